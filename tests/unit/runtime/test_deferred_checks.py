"""Checks that are run later: by the next step, by whoever takes state, or never again after a load."""

import gc
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch

from shardopt.runtime.deferred_checks import DeferredChecks, settle_checks, taking_state


def refuse(name, seen, numbers):
    seen.append(numbers.tolist())
    if numbers.any():
        raise ValueError(name)


def checks(*numbers, seen=None):
    made = DeferredChecks()
    for number in numbers:
        made.defer(torch.tensor([number]), partial(refuse, str(number), [] if seen is None else seen))
    return made


def settle_and_fail(deferred):
    with pytest.raises(ValueError):
        deferred.settle()


def test_a_step_raises_each_failure_once_and_saves_raise_it_until_a_load():
    deferred = checks(0.0, 1.0, 2.0)
    with pytest.raises(ValueError, match=r"1\.0"):
        deferred.run_ready()
    deferred.run_ready()
    settle_checks()
    deferred.settle()
    for _ in range(2):
        with taking_state() as taken:
            deferred.settle()
        with pytest.raises(ValueError, match=r"1\.0"):
            taken.settle()
    deferred.discard()
    with taking_state() as taken:
        deferred.settle()
    taken.settle()


def test_numbers_are_those_of_when_the_check_was_deferred():
    seen, deferred, numbers = [], DeferredChecks(), torch.zeros(2)
    deferred.defer(numbers, partial(refuse, "", seen))
    numbers += 1
    deferred.settle()
    assert seen == [[0.0, 0.0]]


def test_a_save_looks_at_the_steps_before_it_and_at_no_later_ones():
    """Those of an optimizer that is not in the app too: it may have stepped what is."""
    elsewhere, here = checks(0.0), checks(0.0)
    with taking_state() as taken:
        here.settle()
    here.defer(torch.ones(1), partial(refuse, "later", []))
    taken.settle()
    with taking_state() as taken:
        pass
    with pytest.raises(ValueError, match="later"):
        taken.settle()
    assert not elsewhere.waiting


def test_what_a_thread_finds_after_a_load_is_not_of_the_loaded_state():
    deferred = checks(1.0)
    with taking_state() as taken:
        deferred.settle()
    deferred.discard()
    raised = []

    def settle():
        try:
            taken.settle()
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join()
    assert raised == ["1.0"] and deferred.failure is None
    deferred.run_ready()


def test_a_step_raises_what_a_save_in_the_background_has_found():
    deferred = checks(1.0)
    with taking_state() as taken:
        deferred.settle()
    with pytest.raises(ValueError, match=r"1\.0"):
        taken.settle()
    with pytest.raises(ValueError, match=r"1\.0"):
        deferred.run_ready()
    deferred.run_ready()


def test_a_save_without_the_optimizer_is_refused_each_time_until_a_load():
    """As of the weights alone, after a step or a save has raised it already."""
    deferred = checks(1.0)
    with pytest.raises(ValueError, match=r"1\.0"):
        deferred.run_ready()
    for _ in range(2):
        with taking_state() as taken:
            pass
        with pytest.raises(ValueError, match=r"1\.0"):
            taken.settle()
    deferred.discard()
    with taking_state() as taken:
        pass
    taken.settle()


def test_the_last_step_of_an_optimizer_that_is_gone_is_looked_at():
    checks(1.0)
    gc.collect()
    with taking_state() as taken:
        pass
    with pytest.raises(ValueError, match=r"1\.0"):
        taken.settle()
    with taking_state() as taken:  # nobody can load into it any more
        pass
    taken.settle()


def test_a_save_beside_another_that_runs_the_check_waits_for_its_result():
    begun, go_on = threading.Event(), threading.Event()

    def slow(numbers):
        begun.set()
        assert go_on.wait(10)
        raise ValueError("slow")

    deferred = DeferredChecks()
    deferred.defer(torch.ones(1), slow)
    thread = threading.Thread(target=settle_and_fail, args=(deferred,))
    thread.start()
    assert begun.wait(10)
    with taking_state() as taken:
        pass
    go_on.set()
    with pytest.raises(ValueError, match="slow"):
        taken.settle()
    thread.join()
    deferred.discard()


def test_what_is_found_while_a_load_replaces_the_state_is_dropped():
    begun, go_on = threading.Event(), threading.Event()

    def slow(numbers):
        begun.set()
        assert go_on.wait(10)
        raise ValueError("old")

    deferred = DeferredChecks()
    deferred.defer(torch.ones(1), slow)
    thread = threading.Thread(target=settle_and_fail, args=(deferred,))
    thread.start()
    assert begun.wait(10)
    deferred.discard()
    go_on.set()
    thread.join()
    deferred.run_ready()
    assert deferred.failure is None


def test_a_failure_keeps_nothing_of_the_step_that_failed():
    deferred, kept = DeferredChecks(), []

    def failing(numbers):
        activations = torch.zeros(3)
        kept.append(weakref.ref(activations))
        raise ValueError("failed")

    deferred.defer(torch.ones(1), failing)
    with suppress(ValueError):
        deferred.settle()
    gc.collect()
    assert deferred.failure is not None and kept[0]() is None
    deferred.discard()
