"""Ranks that die, stop or come back, as processes."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from shardopt.errors import RankError
from shardopt.ranks import Ranks, ranks_of
from tests.harness import Fault, each_operation, run_ranks, run_ranks_outcomes

TALK = ["shardopt.ranks.channel:put", "shardopt.ranks.channel:get"]


def rounds(count, deadline_seconds=1.0):
    """How many rounds went well, the error that ended them, and how long the last one took."""
    here = ranks_of()
    for done in range(count):
        start = time.monotonic()
        try:
            reports = here.agree(
                f"round {done}",
                lambda: [here.rank, done],  # noqa: B023  # called at once
                lambda report: report,
                lambda reports: reports,
                deadline_seconds,
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
    if error:
        assert f"round {done}: rank {fault.rank} gave no sign of life for 1 s" in error
    else:
        assert done == 2
    return done


# For rank 0 _put is the answer, for others the report; of _get each rank has one more a round than it has told.
@pytest.mark.parametrize(
    ("rank", "operation", "at", "done"),
    [(0, TALK[0], 1, 0), (0, TALK[1], 3, 1), (2, TALK[0], 2, 1), (2, TALK[1], 1, 1)],
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
    return here.agree("x", lambda: time.sleep(1.6 if here.rank == 1 else 0), deadline_seconds=0.8)


def test_a_slow_rank_that_beats_is_waited_for():
    assert run_ranks(2, slow_rounds) == [(None, None)] * 2


def stopped_rounds(victim, seconds):
    """Two rounds; in the work of the second a rank is stopped for a while, as by a debugger or a full disk."""
    here = ranks_of()
    here.agree("first", lambda: None, deadline_seconds=0.8)

    def stop():
        if here.rank == victim:
            waker = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
            with subprocess.Popen([sys.executable, "-S", "-c", waker]):
                os.kill(os.getpid(), signal.SIGSTOP)

    errors = []
    for what in ("second", "third"):
        try:
            here.agree(what, stop if what == "second" else lambda: None, deadline_seconds=0.8)
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
            _, heard[name] = ranks.agree(name, lambda: None, lambda _, r=report: r, lambda all_: all_, 5.0)

    threads = [threading.Thread(target=talk, args=(name, ranks_of().beside(name))) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    talk("main", ranks_of())
    for thread in threads:
        thread.join()
    return heard


def test_ranks_talk_beside_each_other_in_rounds_of_their_own():
    expected = {name: [[name, rank, 19] for rank in range(3)] for name in ("left", "main", "right")}
    assert run_ranks(3, rounds_of_three) == [expected] * 3
