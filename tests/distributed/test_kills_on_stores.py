"""Ranks killed at any request to an object store: what was committed stays, and nothing is half committed."""

import functools
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.storage import remote, retry
from tests.harness import Fault, run_ranks, run_ranks_outcomes
from tests.harness.object_stores import object_servers, reached

REQUEST = "shardopt.checkpoint.storage.retry:Requests.within_deadline"
STEPS, KEPT, ROWS = 4, 2, 1031  # no multiple of the ranks


def app_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.arange(ROWS * 192, dtype=torch.float32).reshape(ROWS, 192) + step
    return {"x": distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None), "step": step}


def save_all(server_options, protocol, root, log):
    """Saves `STEPS` steps, and notes on rank 0 which of them it was told are committed."""
    retry.RETRY_POLICY, remote.PART_BYTES = retry.RetryPolicy(attempts=3, pause_seconds=0.01), 1 << 17
    with reached(server_options, protocol):
        options = checkpoint.SaveOptions(deadline_seconds=5)
        with checkpoint.Manager(root, keep=KEPT, options=options) as manager:
            for step in range(1, STEPS + 1):
                manager.save(step, app_of(step), force=True)
                if dist.get_rank() == 0:
                    with open(log, "a") as file:
                        file.write(f"{step}\n")


def continue_after(server_options, protocol, root, told):
    """Restores what was committed last, and saves once more. Gives the steps that were there."""
    remote.PART_BYTES = 1 << 17
    with reached(server_options, protocol), checkpoint.Manager(root, keep=KEPT) as manager:
        there = manager.steps()
        app = app_of(0)
        restored = manager.restore(app)
        assert (restored or 0) >= told, f"{told} was committed, and {there} is there"
        if restored is not None:
            assert torch.equal(app["x"].to_local(), app_of(restored)["x"].to_local())
            assert app["step"] == restored
        if dist.get_rank() == 0:
            for step in there:
                checkpoint.verify(manager.path(step)).raise_if_damaged()
        dist.barrier()
        manager.save(STEPS + 1, app_of(STEPS + 1), force=True)
        assert checkpoint.verify(manager.path(STEPS + 1)).ok
    return there


@pytest.fixture(scope="module")
def servers():
    with object_servers() as server:
        yield server


@pytest.fixture(scope="module")
def requests_of(servers):
    """By protocol: how many requests each rank makes."""

    @functools.cache
    def count(protocol):
        server = servers(protocol)
        arguments = (server.options(), protocol, server.new_root(), "/dev/null")
        outcomes = run_ranks_outcomes(2, save_all, *arguments, trace=[REQUEST])
        return [Counter(outcome.calls)[REQUEST] for outcome in outcomes]

    return count


def kill_and_continue(server, rank, at):
    """Returns how many steps were committed when the rank was killed."""
    folder = Path(tempfile.mkdtemp())
    root, log = server.new_root(), folder / "log"
    log.touch()
    outcomes = run_ranks_outcomes(
        2, save_all, server.options(), server.protocol, root, str(log), faults=[Fault(rank, REQUEST, at=at)]
    )
    assert outcomes[rank].signal is not None
    told = max(map(int, log.read_text().split()), default=0)
    run_ranks(2, continue_after, server.options(), server.protocol, root, told)
    shutil.rmtree(folder)
    return told


@pytest.mark.parametrize(
    "protocol",
    ["gs", pytest.param("s3", marks=pytest.mark.exhaustive), pytest.param("az", marks=pytest.mark.exhaustive)],
)
def test_a_few_kills(servers, requests_of, protocol):
    for rank, part in ((0, 0.45), (1, 0.8)):
        kill_and_continue(servers(protocol), rank, int(part * requests_of(protocol)[rank]))


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("protocol", ["s3", "gs", "az"])
def test_two_hundred_kills(servers, requests_of, protocol):
    counts, kills = requests_of(protocol), 0
    told = Counter()
    for rank, share in ((0, 130), (1, 70)):
        for number in range(share):
            told[kill_and_continue(servers(protocol), rank, 1 + number * (counts[rank] - 1) // share)] += 1
            kills += 1
    print(f"{protocol}: {kills} kills; steps that were committed when the rank was killed: {dict(told)}")
    assert kills == 200 and len(told) > STEPS - 1
