"""Ranks that die, stop or come back, as processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardopt.errors import RankError
from shardopt.ranks import Ranks, ranks_among, ranks_of
from shardopt.ranks.groups import process_group_among
from tests.harness import Fault, each_operation, run_ranks, run_ranks_outcomes

TALK = ["shardopt.ranks.channel:pack", "shardopt.ranks.channel:unpack"]


def rounds(count, deadline_seconds=1.0):
    """How many rounds went well, the error that ended them, and how long the last one took."""
    here = ranks_of(None, deadline_seconds)
    for done in range(count):
        start = time.monotonic()
        try:
            reports = here.agree(
                f"round {done}",
                lambda: [here.rank, done],  # noqa: B023  # called at once
                lambda report: report,
                lambda reports: reports,
            )[1]
        except RankError as error:
            return done, str(error), time.monotonic() - start
        assert reports == [[rank, done] for rank in range(here.size)]
    return count, "", time.monotonic() - start


def all_deaths():
    return each_operation(run_ranks_outcomes(3, rounds, 2, trace=TALK))


def check_survivors(fault):
    outcomes = run_ranks_outcomes(3, rounds, 2, faults=[fault])
    assert outcomes[fault.rank].signal == signal.SIGKILL
    survivors = [outcome.value for outcome in outcomes if outcome.rank != fault.rank]
    assert max(seconds for _, _, seconds in survivors) < 1 + 5  # the deadline, and some for a busy machine
    ((done, error),) = {(done, error) for done, error, _ in survivors}
    if error:  # in the first round rank 0 does not know the process of another yet
        reason = "gave no sign of life for 1 s" if fault.rank and not done else "died, or ended before this call"
        assert f"round {done}: rank {fault.rank} {reason}" in error
    else:
        assert done == 2
    return done


# For rank 0 _put is the answer, for others the report; of _get each rank has one more a round than it has told.
@pytest.mark.parametrize(
    ("rank", "operation", "at", "done"),
    [(0, TALK[0], 1, 0), (0, TALK[1], 2, 1), (2, TALK[0], 2, 1), (2, TALK[1], 1, 1)],
    ids=["0 before it answers", "0 after it answered", "2 before it reports", "2 before it hears"],
)
def test_a_death_is_named_by_the_survivors(rank, operation, at, done):
    assert check_survivors(Fault(rank, operation, at)) == done


@pytest.mark.exhaustive
def test_every_death_is_named_by_the_survivors():
    deaths = all_deaths()
    assert len(deaths) >= 12
    for fault in deaths:
        check_survivors(fault)


def slow_rounds():
    here = ranks_of()
    return here.with_deadline(0.8).agree("x", lambda: time.sleep(1.6 if here.rank == 1 else 0))


def test_a_slow_rank_that_beats_is_waited_for():
    assert run_ranks(2, slow_rounds) == [(None, None)] * 2


def stop_for(seconds):
    """Stops this process, as a debugger or a full disk would."""
    waker = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
    with subprocess.Popen([sys.executable, "-S", "-c", waker]):
        os.kill(os.getpid(), signal.SIGSTOP)


def stopped_rounds(victim, seconds):
    """Two rounds; in the work of the second a rank is stopped for a while."""
    here = ranks_of()
    here.with_deadline(0.8).agree("first", lambda: None)

    def stop():
        if here.rank == victim:
            stop_for(seconds)

    errors = []
    for what in ("second", "third"):
        try:
            here.with_deadline(0.8).agree(what, stop if what == "second" else lambda: None)
        except RankError as error:
            errors.append(str(error))
    return errors


def test_a_rank_that_was_stopped_for_long_learns_that_it_was_given_up():
    outcomes = run_ranks(3, stopped_rounds, 2, 2.5)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    second, third = outcomes[0]
    assert second.startswith("second: rank 2 gave no sign of life for 0.8 s")
    assert "lost step" in third


def test_rank_0_stopped_for_long_is_given_up():
    """It does not know, and may commit what all have finished; it goes no further with the others."""
    outcomes = run_ranks(3, stopped_rounds, 0, 2.5)
    assert outcomes[1] == outcomes[2]
    assert outcomes[1][0].startswith("second: rank 0 gave no sign of life for 0.8 s")
    assert outcomes[0][0].startswith("third: ranks 1, 2 gave no sign of life")


def between_rounds(victim, seconds):
    """A call of two rounds, between which one rank is stopped for a while. What the second round raises."""
    here = ranks_of()
    here = ranks_of(None, 0.5)
    with here.beating():
        here.agree("a call", lambda: None)
        if here.rank == victim:
            stop_for(seconds)
        try:
            here.agree("a call", lambda: None)
        except RankError as error:
            return str(error)
    return ""


def test_a_rank_that_is_stopped_between_rounds_is_named():
    """Where it works there for as long it is not: tests/unit/ranks/test_ranks.py."""
    texts = run_ranks(2, between_rounds, 1, 1.5)
    assert texts[0].startswith("a call: rank 1 gave no sign of life for 0.5 s")


def one_dies_later():
    """How long the others take to learn of a death, under a deadline that they would not wait out."""
    here = ranks_of()
    here.agree("first", lambda: None)
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RankError, match="second: rank 1 died, or ended before this call"):
        here.with_deadline(300).agree("second", lambda: None)
    return time.monotonic() - begin


def test_a_death_on_this_machine_is_not_waited_out():
    outcomes = run_ranks_outcomes(3, one_dies_later)
    assert outcomes[1].signal == signal.SIGKILL
    assert all(outcomes[rank].value < 20 for rank in (0, 2)), outcomes


def use_after_the_end():
    """Errors of collectives whose process group is gone; at first they did nothing, on each rank for itself."""
    here = ranks_of()
    numbers = here.all_reduce_sum(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    texts = []
    for call in (
        lambda: here.all_reduce_sum(torch.ones(1)),
        lambda: here.all_to_all(torch.ones(2), [1, 1], [1, 1]),
        lambda: here.side_channel("x"),
    ):
        with pytest.raises(RankError) as caught:
            call()
        texts.append(str(caught.value))
    return numbers.item(), texts


def test_a_destroyed_group_is_named_by_whoever_would_use_it():
    for number, texts in run_ranks(2, use_after_the_end):
        assert number == 2
        assert all("the process group of ranks 0, 1: found destroyed" in text for text in texts)


def overlapping_teams(extra):
    """Sums over groups of two ranks each; ranks have made different numbers of groups by then."""
    rank, sums = dist.get_rank(), []
    for _ in range(extra[rank]):
        dist.new_group([rank], use_local_synchronization=True)
    for members in ((0, 1), (0, 2), (1, 2), (0, 1)):
        if rank in members:
            sums.append(ranks_among(members).all_reduce_sum(torch.full((1,), 10.0**rank)).item())
    return sums


@pytest.mark.parametrize("extra", [(0, 0, 0), (2, 0, 1)], ids=str)
def test_ranks_make_groups_whatever_others_they_have_made(extra):
    assert run_ranks(3, overlapping_teams, extra) == [[11, 101, 11], [11, 110, 11], [101, 110]]


def apart_from_a_bound_device():
    """Returns what a new group of ranks 0 and 1 computes, whether it was split off, and the device of the job after."""
    job, split = dist.group.WORLD, []
    job.bound_device_id = torch.device("cuda", dist.get_rank())  # as init_process_group(device_id=...) leaves it
    number = 0.0
    with mock.patch.object(dist.distributed_c10d, "_get_split_source", lambda group: split.append(group)):
        if dist.get_rank() < 2:
            number = ranks_among((0, 1)).all_reduce_sum(torch.ones(1)).item()
            assert process_group_among((0, 1), ()).bound_device_id == job.bound_device_id
    device, job.bound_device_id = job.bound_device_id, None
    return number, bool(split), str(device)


def test_a_new_group_is_not_split_from_the_jobs_which_would_wait_for_all_its_ranks():
    assert run_ranks(3, apart_from_a_bound_device) == [
        (2.0, False, "cuda:0"),
        (2.0, False, "cuda:1"),
        (0.0, False, "cuda:2"),
    ]


def groups_turn_by_turn():
    """The ranks of a new group in the same store, after some rounds of the old one."""
    seen = []
    for number in range(3):
        group = dist.new_group()
        here = ranks_of(group)
        assert here is ranks_of(group) and here is not ranks_of()
        for _ in range(number + 1):
            report = [number, here.rank]
            seen.append(here.agree("x", lambda: report, lambda r: r, lambda rs: rs)[1])  # noqa: B023  # called at once
        again = Ranks(group)  # as after a restart: it knows of nothing that lies there
        seen.append(again.agree("x", lambda: "again", lambda r: r, lambda rs: rs)[1])
    return seen


def test_groups_and_their_successors_in_one_store():
    outcomes = run_ranks(2, groups_turn_by_turn)
    expected = []
    for number in range(3):
        expected += [[[number, 0], [number, 1]]] * (number + 1) + [["again", "again"]]
    assert outcomes == [expected] * 2


def rounds_of_three():
    """Three threads each talk in rounds of their own, from the first on at once; what each heard in its last round."""
    heard = {}

    def talk(name, ranks):
        for done in range(20):
            report = [name, ranks.rank, done]
            _, heard[name] = ranks.with_deadline(5.0).agree(
                name, lambda: None, lambda _, r=report: r, lambda all_: all_
            )

    sides = {name: ranks_of().side_channel(name) for name in ("left", "right")}
    threads = [threading.Thread(target=talk, args=each) for each in sides.items()]
    for thread in threads:
        thread.start()
    talk("main", ranks_of())
    for thread in threads:
        thread.join()
    return heard


def test_ranks_talk_beside_each_other_in_rounds_of_their_own():
    expected = {name: [[name, rank, 19] for rank in range(3)] for name in ("left", "main", "right")}
    assert run_ranks(3, rounds_of_three) == [expected] * 3
