"""Failures in the background: each is raised once on each rank, whichever has met it first."""

from shardopt.checkpoint.run.background import Failures


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
