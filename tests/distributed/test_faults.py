"""Whatever goes wrong at whatever operation of a save: the old checkpoint or the new one, and a name for the rank.

The faults are not picked: a first, sound save is traced, and each call that it makes on each rank becomes a fault.
"""

import os
import random
from collections import Counter
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.storage import direct, local
from shardopt.errors import ShardoptError
from tests.harness import Fault, each_operation, run_ranks, run_ranks_outcomes

RANKS = 3
DEADLINE_SECONDS = 5.0
CALLS = ("os:open", "os:makedirs", "os:writev", "os:fsync", "os:link", "os:unlink", "os:close", "os:listdir", "os:stat")
ERRORS = ("ENOSPC", "EIO")


def value(step):
    return torch.arange(40_000, dtype=torch.float32).reshape(400, 100) + step


def state(step):
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = distribute_tensor(value(step), mesh, [Shard(0)], src_data_rank=None)
    big = torch.full((1 << 20,), float(step))  # large enough for each rank to write a part of it
    whole = distribute_tensor(big, mesh, [Replicate()], src_data_rank=None)
    return {"rows": rows, "whole": whole, "step": step, "mine": checkpoint.PerRank(dist.get_rank())}


def save_second(root):
    checkpoint.Manager(root, options=checkpoint.SaveOptions(deadline_seconds=DEADLINE_SECONDS)).save(2, state(2))


SOON_SECONDS = 2.0


def save_second_soon(root):
    """As `save_second`, with a deadline that a test can wait for."""
    checkpoint.Manager(root, options=checkpoint.SaveOptions(deadline_seconds=SOON_SECONDS)).save(2, state(2))


def save_past_the_page_cache(root):
    """As `save_second`, with what is large for a test written as large files are."""
    device = os.stat(root).st_dev
    direct._types[device], direct.BLOCK_BYTES, local._DIRECT_BYTES = "ext4", 1 << 18, 1 << 18
    save_second(root)


def save_first(root):
    checkpoint.Manager(root, options=checkpoint.SaveOptions(deadline_seconds=DEADLINE_SECONDS)).save(1, state(1))


@cache
def sound_calls(root, save=save_second, calls=CALLS):
    """The calls of each rank in a sound save."""
    run_ranks(RANKS, save_first, root)
    return run_ranks_outcomes(RANKS, save, root, trace=calls)


def newest_is_whole(root):
    """The newest committed checkpoint is, to the bit, the first or the second; returns its step."""
    manager = checkpoint.Manager(root)
    step = manager.steps()[-1]
    assert step in (1, 2)
    assert manager.steps()[0] == 1
    assert checkpoint.verify(manager.path(step)).ok
    with checkpoint.open(manager.path(step)) as reader:
        assert reader.read("step") == step
        assert torch.equal(reader.read("rows"), value(step))
        assert torch.equal(reader.read("whole"), torch.full((1 << 20,), float(step)))
    return step


def survive(tmp_path, fault, save=save_second):
    """One save under one fault, checked; returns the step that is the newest afterwards."""
    root = str(tmp_path / "root")
    run_ranks(RANKS, save_first, root)
    outcomes = run_ranks_outcomes(RANKS, save, root, faults=[fault], deadline_seconds=DEADLINE_SECONDS + 25)
    step = newest_is_whole(root)
    killed = fault.action == "kill"
    if killed:
        assert outcomes[fault.rank].signal is not None
    survivors = [each for each in outcomes if not (killed and each.rank == fault.rank)]
    raised = [each.error for each in survivors if each.error is not None]
    assert all(isinstance(error, ShardoptError) for error in raised), outcomes
    if raised:  # then all of them did, and each names the rank
        assert len(raised) == len(survivors), outcomes
        assert all(f"rank {fault.rank}" in str(error) for error in raised), raised
    else:
        assert step == 2, outcomes
    last = max(each.at_seconds for each in survivors)
    first = min(each.at_seconds for each in outcomes)
    assert last - first <= DEADLINE_SECONDS + 5
    # What the failure has left behind is in nobody's way.
    if step == 1:
        retried = run_ranks_outcomes(RANKS, save, root)
        assert all(each.ok for each in retried), retried
        assert newest_is_whole(root) == 2
    return step


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    return sound_calls(str(tmp_path_factory.mktemp("sound") / "root"))


def sample(faults, count):
    return random.Random(0).sample(faults, count)


def test_the_trace_has_every_kind_of_operation(calls):
    seen = Counter(call for outcome in calls for call in outcome.calls)
    assert {"os:open", "os:writev", "os:fsync", "os:link", "os:unlink", "os:makedirs"} <= set(seen)
    assert all(outcome.calls for outcome in calls)


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_sample_of_kills(calls, tmp_path, number):
    survive(tmp_path, sample(each_operation(calls, "kill"), 2)[number])


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_sample_of_failing_calls(calls, tmp_path, number):
    fault = sample(each_operation(calls, ERRORS[number % 2]), 2)[number]
    survive(tmp_path, fault)


def test_a_slow_rank_that_still_beats_is_not_called_dead(tmp_path):
    fault = Fault(rank=1, operation="os:fsync", action="delay", seconds=SOON_SECONDS + 1)
    assert survive(tmp_path, fault, save_second_soon) == 2


def test_short_writes_are_continued(calls, tmp_path):
    assert survive(tmp_path, Fault(rank=2, operation="os:writev", action="short")) == 2


@pytest.fixture(scope="module")
def direct_calls(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("direct") / "root")
    return sound_calls(root, save_past_the_page_cache, ("os:pwritev", "os:posix_fallocate", "os:ftruncate"))


DIRECT_ACTIONS = ("kill", "EIO", "ENOSPC", "EINVAL", "short")


@pytest.mark.parametrize("action", DIRECT_ACTIONS[:4])
def test_a_sample_past_the_page_cache(direct_calls, tmp_path, action):
    faults = [fault for fault in each_operation(direct_calls, action) if fault.operation == "os:pwritev"]
    assert len(faults) > 3 * RANKS
    step = survive(tmp_path, sample(faults, 1)[0], save_past_the_page_cache)
    assert step == (2 if action == "EINVAL" else 1)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("action", DIRECT_ACTIONS)
def test_everything_past_the_page_cache(direct_calls, tmp_path_factory, action):
    steps = Counter()
    for fault in each_operation(direct_calls, action):
        if action != "short" or fault.operation == "os:pwritev":
            steps[survive(tmp_path_factory.mktemp("direct"), fault, save_past_the_page_cache)] += 1
    print(f"{action}: {sum(steps.values())}, of which {steps[2]} left the new checkpoint")


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_kill(calls, tmp_path_factory):
    steps = Counter()
    for fault in each_operation(calls, "kill"):
        steps[survive(tmp_path_factory.mktemp("kill"), fault)] += 1
    print(f"kills: {sum(steps.values())}, of which {steps[2]} left the new checkpoint")
    assert steps[1] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", ERRORS)
def test_every_failing_call(calls, tmp_path_factory, error):
    steps = Counter()
    for fault in each_operation(calls, error):
        steps[survive(tmp_path_factory.mktemp("fail"), fault)] += 1
    print(f"{error}: {sum(steps.values())}, of which {steps[2]} left the new checkpoint")
    assert steps[1] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_short_write(calls, tmp_path_factory):
    writes = [fault for fault in each_operation(calls, "short") if fault.operation == "os:writev"]
    assert [survive(tmp_path_factory.mktemp("short"), fault) for fault in writes] == [2] * len(writes)
