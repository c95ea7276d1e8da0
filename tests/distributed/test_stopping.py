"""One rank is told to stop, at any moment: all ranks save one step, the same, and end as asked."""

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
    """Trains until told to stop; SIGTERM comes at the moment of step `at`, on the ranks `signaled`."""
    app = sharded_job()
    manager = checkpoint.Manager(
        root, every=EVERY, stage=stage, stop_on=signal.SIGTERM, exit_code=EXIT_CODE, stop_seconds=STOP_SECONDS
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
            if gets_signal and moment == "in a save" and app["step"] == EVERY:
                threading.Timer(0.0, tell).start()
                app["slow"] = Slow()
            manager.save(app["step"], app | {"slow": Slow()} if moment == "in a save" else app)
            app.pop("slow", None)
    return app["step"]


class Slow:
    """Takes a while to give its state, as a large state does."""

    def state_dict(self):
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
    manager = checkpoint.Manager(root, every=1000, stop_on=signal.SIGUSR2, exit_code=3)
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


@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_drift_apart_stop_at_one_step_that_none_has_passed(tmp_path, seed):
    (first, *others) = run_ranks(3, drifting_ranks, str(tmp_path), seed)
    assert first is not None and first[0] >= 300 and first[1] == 3
    assert others == [first] * 2
    assert checkpoint.Manager(tmp_path).steps() == [first[0]]


def busy_elsewhere(root, signaled):
    """Rank 1 never comes to ask again; the one that got the signal cannot wait for it."""
    manager = checkpoint.Manager(root, every=1, stop_on=signal.SIGTERM, exit_code=EXIT_CODE, stop_seconds=2.0)
    manager.save(1, {"step": 1})
    rank = dist.get_rank()
    if rank == signaled:
        threading.Timer(0.2, tell).start()
    if rank == 1:
        threading.Event().wait(4.0)
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
    manager = checkpoint.Manager(root, every=100, stop_on=signal.SIGTERM, exit_code=EXIT_CODE, stop_seconds=2.0)
    manager.should_save(1)
    if dist.get_rank() == 1:
        threading.Event().wait(4.5)
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
    assert outcomes[0].exit_code == EXIT_CODE or 2.0 <= outcomes[0].value < 5.0
    assert checkpoint.Manager(tmp_path).steps() == []


def words():
    cell = ranks_of().shared_cell("testing", "first")
    other = ranks_of().shared_cell("testing", "another")
    dist.barrier()
    own = cell.replace("first", f"of {dist.get_rank()}")
    dist.barrier()
    return own, cell.replace("no such", "never"), other.replace("no such", "never")


def test_a_notice_is_replaced_by_one_rank():
    replies = run_ranks(3, words)
    assert len({own for own, _, _ in replies}) == 1
    assert {(now, other) for _, now, other in replies} == {(replies[0][0], "another")}


def lose_the_other(root, stage):
    """Rank 1 is killed in a save; the launcher sees it, and tells rank 0 to stop. How long that takes to leave."""
    manager = checkpoint.Manager(root, stage=stage, stop_on=signal.SIGTERM, stop_seconds=60.0)
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
    killed = Fault(1, "shardopt.checkpoint.save:write_files", at=2)
    outcomes = run_ranks_outcomes(2, lose_the_other, str(tmp_path), stage, faults=[killed])
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].value < 20, outcomes  # far from the deadlines, of 60 and 300 seconds
    assert checkpoint.Manager(tmp_path).steps() == [1]
