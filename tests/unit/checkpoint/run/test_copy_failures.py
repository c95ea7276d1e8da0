"""Failures in the background: each is raised once on each rank, whichever has met it first."""

import os
import signal
import threading

from shardopt.checkpoint.run.background import Failures, Turns


def failed(*numbers):
    failures = Failures()
    for _ in range(5):
        failures.begin()
    for number in numbers:
        failures.note(number, OSError(number))
    return failures


def test_the_last_is_taken_once():
    failures = failed(2, 3)
    assert failures.newest == 3
    assert str(failures.take()) == "3"
    assert failures.newest == 0 and failures.take() is None


def test_one_that_another_rank_has_raised_is_not_raised_when_it_is_met_here():
    failures = failed()
    assert failures.take(until=2) is None
    failures.note(2, OSError("late"))
    assert failures.newest == 0
    failures.note(3, OSError("another"))
    assert str(failures.take()) == "another"


def test_a_later_one_stays_to_be_raised():
    failures = failed(1, 4)
    assert str(failures.take(until=3)) == "1"
    assert failures.newest == 4 and str(failures.take()) == "4"


def test_one_that_is_met_after_the_next_was_taken_here_is_raised_too():
    failures = failed(2)
    assert str(failures.take()) == "2"
    failures.note(1, OSError("slow"))
    assert str(failures.take()) == "slow"


def test_a_forked_child_waits_for_no_job_of_its_parent():
    """It has no thread for it, and used to hang as it left the `with` of a Manager."""
    began, gate, done = threading.Event(), threading.Event(), []

    def do(job):
        done.append(job)
        began.set()
        gate.wait(30)

    turns = Turns(do, str, "shardopt-test")
    turns.begin("parent's")
    turns.failures.note(turns.failures.begin(), OSError("parent's"))
    assert began.wait(30)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            gate.set()
            turns.finish()
            turns.begin("child's")
            turns.finish()
            os._exit(0 if turns.failures.take() is None and done == ["parent's", "child's"] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert turns.jobs == ["parent's"] and str(turns.failures.take()) == "parent's"
    gate.set()
    turns.finish()
