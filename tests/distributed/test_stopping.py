"""One rank gets a signal, at any moment: all ranks save one step, the same, and end as asked."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.errors import RankError
from shardopt.ranks import ranks_of
from shardopt.ranks.connections import tree
from tests.harness import Fault, run_ranks, run_ranks_outcomes

RANKS, TOLD, STEPS, EVERY = 4, 2, 12, 5
EXIT_CODE = 85
STOP_SECONDS = 15.0
MOMENTS = ("forward", "backward", "between steps", "in a save")


def sharded_job():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    fully_shard(model)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "step": 0}


def tell(*unused):
    os.kill(os.getpid(), signal.SIGTERM)


def train(root, moment, stage, signaled=(TOLD,), at=7):
    """Trains until the signal; SIGTERM comes at the moment of step `at`, on the ranks `signaled`."""
    app = sharded_job()
    manager = checkpoint.Manager(
        root,
        every=EVERY,
        stage=stage,
        stop_on=checkpoint.Preemption(signal.SIGTERM, exit_code=EXIT_CODE, seconds=STOP_SECONDS),
    )
    manager.restore(app)
    gets_signal = dist.get_rank() in signaled
    with manager:
        while app["step"] < STEPS:
            app["step"] += 1
            now = gets_signal and app["step"] == at
            loss = app["model"](torch.ones(4, 6)).square().sum()
            if now and moment == "forward":
                tell()
            if now and moment == "backward":
                loss.register_hook(tell)
            loss.backward()
            app["optimizer"].step()
            app["optimizer"].zero_grad()
            if now and moment == "between steps":
                tell()
            told = gets_signal and app["step"] == EVERY
            manager.save(app["step"], app | {"slow": Slow(told)} if moment == "in a save" else app)
    return app["step"]


class Slow:
    """Takes a while to give its state, as a large state does; a signal may come in the meantime."""

    def __init__(self, told):
        self.told = told

    def state_dict(self):
        if self.told:
            tell()
        time.sleep(0.05)
        return {"nothing": 0}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("moment", MOMENTS)
def test_one_rank_told_and_all_save_the_same_step(tmp_path, moment):
    stage = {"forward": None, "backward": "now", "between steps": "lazy", "in a save": "lazy"}[moment]
    begin = time.monotonic()
    outcomes = run_ranks_outcomes(RANKS, train, str(tmp_path), moment, stage)
    assert time.monotonic() - begin < STOP_SECONDS
    assert [(type(each.error), getattr(each.error, "code", None)) for each in outcomes] == [
        (SystemExit, EXIT_CODE)
    ] * RANKS, outcomes
    steps = checkpoint.Manager(tmp_path).steps()
    assert len(steps) == 2 and steps[0] == EVERY  # one more than was due
    assert steps[1] in ((6, 7) if moment == "in a save" else (7, 8))
    for step in steps:
        path = checkpoint.Manager(tmp_path).path(step)
        assert checkpoint.verify(path).ok
        with checkpoint.open(path) as reader:
            assert reader.read("step") == step


def test_all_told_at_once_and_resumed_on_fewer(tmp_path):
    outcomes = run_ranks_outcomes(3, train, str(tmp_path), "forward", "lazy", (0, 1, 2))
    assert {each.error.code for each in outcomes} == {EXIT_CODE}
    (_, stopped) = checkpoint.Manager(tmp_path).steps()
    assert stopped in (7, 8)
    assert run_ranks(2, train, str(tmp_path), "forward", None, ()) == [STEPS] * 2
    assert checkpoint.Manager(tmp_path).steps() == [5, stopped, 10]


def drifting_ranks(root, seed):
    """Ranks that never wait for one another, and ask at their own pace."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    manager = checkpoint.Manager(root, every=1000, stop_on=checkpoint.Preemption(signal.SIGUSR2, exit_code=3))
    signaled = seed % dist.get_world_size()
    for step in range(10, 2000, 10):  # not every step is a step at which ranks ask
        time.sleep(float(torch.rand((), generator=generator)) * 0.002)
        if rank == signaled and step == 300:
            os.kill(os.getpid(), signal.SIGUSR2)
        if manager.should_save(step):
            with pytest.raises(SystemExit) as left:
                manager.save(step, {"step": step})
            return step, left.value.code
        assert manager.should_save(step) is False  # asked twice for one step
    return None


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_ranks_that_drift_apart_stop_at_one_step_that_none_has_passed(tmp_path, seed):
    (first, *others) = run_ranks(3, drifting_ranks, str(tmp_path), seed)
    assert first is not None and first[0] >= 300 and first[1] == 3
    assert others == [first] * 2
    assert checkpoint.Manager(tmp_path).steps() == [first[0]]


def busy_elsewhere(root, signaled):
    """Rank 1 never comes to ask again; the one that got the signal cannot wait for it."""
    manager = checkpoint.Manager(
        root, every=1, stop_on=checkpoint.Preemption(signal.SIGTERM, exit_code=EXIT_CODE, seconds=1.0)
    )
    manager.save(1, {"step": 1})
    rank = dist.get_rank()
    if rank == signaled:
        threading.Timer(0.2, tell).start()
    if rank == 1:
        threading.Event().wait(3.0)
        return "done"
    if signaled == 1:
        return "not told"
    if rank == 0:
        dist.all_reduce(torch.ones(1))  # which rank 1 does not join
    for step in range(2, 9):
        manager.save(step, {"step": step}, force=rank == signaled)
    return "unreachable"


def test_a_rank_that_waits_for_one_that_never_comes_ends_all_the_same(tmp_path):
    outcomes = run_ranks_outcomes(2, busy_elsewhere, str(tmp_path), 0)
    assert outcomes[0].exit_code == EXIT_CODE  # from within the all-reduce
    assert checkpoint.Manager(tmp_path).steps() == [1]


def stop_without_the_others(root):
    manager = checkpoint.Manager(
        root, every=100, stop_on=checkpoint.Preemption(signal.SIGTERM, exit_code=EXIT_CODE, seconds=1.0)
    )
    manager.should_save(1)
    if dist.get_rank() == 1:
        threading.Event().wait(3.0)
        return "done"
    tell()
    begin = time.monotonic()
    try:
        manager.save(2, {"step": 2})
    except RankError:
        return time.monotonic() - begin
    return None


def test_a_save_on_the_way_out_waits_no_longer_than_the_deadline(tmp_path):
    outcomes = run_ranks_outcomes(2, stop_without_the_others, str(tmp_path))
    assert outcomes[0].exit_code == EXIT_CODE or 1.0 <= outcomes[0].value < 4.0
    assert checkpoint.Manager(tmp_path).steps() == []


def come_to_places(places, wanted):
    """Passes so many places, each rank its own number; then some want to stop. Where, and where in a later series."""
    rank = dist.get_rank()
    halt = ranks_of().halt("testing")
    for place in range(1, places[rank] + 1):
        assert halt.at(place, False) is None
    dist.barrier()
    return come_on(halt, places[rank], rank in wanted), ranks_of().halt("testing").at(1, True)


def come_on(halt, place, wanted):
    """Passes further places, until it is known where to stop."""
    at = None
    while at is None:
        place += 1
        at = halt.at(place, wanted)
    return at


@pytest.mark.parametrize("wanted", [(0,), (3,), (0, 2), (0, 1, 2, 3, 4)])
def test_all_stop_at_the_place_after_the_foremost(monkeypatch, wanted):
    places = (2, 0, 5, 1, 5)
    found = run_ranks(5, in_small_blocks, come_to_places, places, wanted)
    # Those who do not want to may pass more, until they hear of it.
    assert len({at for at, _ in found}) == 1 and found[0][0] > max(places)
    if len(wanted) == len(places):
        assert found[0][0] == max(places) + 1
    assert {later for _, later in found} == {1}


def in_small_blocks(function, *args):
    tree.RANKS_PER_BLOCK = 2
    return function(*args)


def do_not_answer(stopped):
    """One rank is stopped, and another wants all to stop."""
    halt = ranks_of(None, 1.5).halt("testing")
    assert halt.at(1, False) is None
    dist.barrier()
    if dist.get_rank() == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    try:
        return come_on(halt, 1, dist.get_rank() == 2)
    except RankError as error:
        return str(error)


def test_a_rank_that_is_stopped_keeps_nobody_for_longer_than_the_deadline():
    outcomes = run_ranks_outcomes(3, freed_later, do_not_answer, 1, deadline_seconds=40.0)
    assert "rank 1 did not say for 1.5 s how far" in outcomes[0].value
    assert "not say for 1.5 s how far" in outcomes[2].value


def freed_later(function, stopped):
    """Rank 0 continues the stopped one at the end, as the harness waits for all."""
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    result = function(stopped)
    if dist.get_rank() == 0:
        time.sleep(1.0)
        os.kill(pids[stopped], signal.SIGCONT)
    return result


def die_before_it_answers(dead):
    halt = ranks_of(None, 30.0).halt("testing")
    assert halt.at(1, False) is None
    dist.barrier()
    if dist.get_rank() == dead:
        assert halt.at(2, False) is None
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return come_on(halt, 1, dist.get_rank() == 0)


@pytest.mark.parametrize("dead", [1, 3])  # one that leads nobody, in small blocks, and a member of another's block
def test_a_rank_that_was_killed_is_not_waited_for(dead):
    outcomes = run_ranks_outcomes(4, in_small_blocks, die_before_it_answers, dead)
    at = {outcomes[rank].value for rank in range(4) if rank != dead}
    assert len(at) == 1 and at.pop() >= 2


def lose_the_other(root, stage):
    """Rank 1 is killed in a save; the launcher sees it, and tells rank 0 to stop. How long that takes to leave."""
    manager = checkpoint.Manager(root, stage=stage, stop_on=checkpoint.Preemption(signal.SIGTERM, seconds=60.0))
    app = {"x": torch.ones(1 << 18), "step": 1}
    with manager:
        manager.save(1, app)
        begin = time.monotonic()
        if dist.get_rank() == 0:
            threading.Timer(0.3, tell).start()
        with pytest.raises(RankError, match="rank 1 died, or ended before this call"):
            manager.save(2, app)
            manager.close()
    return time.monotonic() - begin


@pytest.mark.parametrize("stage", [None, "lazy"])
def test_a_rank_does_not_wait_for_one_that_was_killed_beside_it(tmp_path, stage):
    killed = Fault(1, "shardopt.checkpoint.saving.save:write_files", at=2)
    outcomes = run_ranks_outcomes(2, lose_the_other, str(tmp_path), stage, faults=[killed])
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].value < 20, outcomes  # far from the deadlines, of 60 and 300 seconds
    assert checkpoint.Manager(tmp_path).steps() == [1]
