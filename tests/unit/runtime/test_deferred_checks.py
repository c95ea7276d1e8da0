"""Checks that are run later: by the next step, by whoever takes state, or never again after a load."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import torch

from shardopt.runtime import deferred_checks
from shardopt.runtime.deferred_checks import (
    DeferredChecks,
    empty_pinned,
    failed_steps_remain,
    settle_checks,
    taking_state,
)


def refuse(name, seen, numbers):
    seen.append(numbers.tolist())
    if numbers.any():
        raise ValueError(name)


def checks(*numbers, seen=None):
    made = DeferredChecks()
    for number in numbers:
        made.defer(torch.tensor([number]), partial(refuse, str(number), [] if seen is None else seen))
    return made


def step_to(deferred, count):
    """Begins and ends steps."""
    for _ in range(count):
        deferred.begin_step()
        deferred.end_step(lambda: Parameters(False))


class Parameters:
    """Parameters, replaced or not."""

    def __init__(self, replaced):
        self.replaced = replaced

    def are_replaced(self):
        return self.replaced


def settle_and_fail(deferred):
    with pytest.raises(ValueError):
        deferred.settle()


def test_a_step_raises_each_failure_once_and_saves_and_state_dict_raise_it_until_a_load():
    deferred = checks(0.0, 1.0, 2.0)
    deferred.begin_step()
    with pytest.raises(ValueError, match=r"1\.0"):
        deferred.begin_step()
    deferred.begin_step()
    settle_checks()
    for _ in range(2):
        settle_and_fail(deferred)
        with taking_state() as taken:
            deferred.settle()
        with pytest.raises(ValueError, match=r"1\.0"):
            taken.settle()
    deferred.state_is_loaded()
    deferred.settle()
    with taking_state() as taken:
        deferred.settle()
    taken.settle()


@pytest.mark.parametrize("found_by", ["the step", "a save in the background", "a save after the next step"])
def test_a_failure_is_raised_two_steps_later_whoever_has_found_it(found_by):
    """So that ranks raise in the same step, however fast their threads and devices are."""
    seen, deferred = [], DeferredChecks()
    for number in range(1, 8):
        if number in (5, 7):  # two after steps 3 and 5
            with pytest.raises(ValueError, match=str(number - 2)):
                deferred.begin_step()
        else:
            deferred.begin_step()
        deferred.defer(torch.tensor([float(number)]), partial(refuse_in, {3, 5}, seen))
        if number == {"a save in the background": 3, "a save after the next step": 4}.get(found_by):
            settle_and_fail(deferred)
    assert sorted(int(each) for (each,) in seen) == [1, 2, 3, 4, 5]
    deferred.state_is_loaded()


def test_checks_of_the_last_step_are_not_waited_for():
    seen, deferred = [], DeferredChecks()
    for _ in range(4):
        deferred.begin_step()
        deferred.defer(torch.zeros(1), partial(refuse, "", seen))
    assert len(seen) == 2 and len(deferred.waiting) == 2
    deferred.state_is_loaded()


def refuse_in(steps, seen, numbers):
    seen.append(numbers.tolist())
    if int(numbers) in steps:
        raise ValueError(f"step {int(numbers)}")


@pytest.mark.parametrize("order", ["optimizer first", "model first"])
def test_a_load_of_the_optimizer_alone_leaves_what_the_parameters_still_have(order):
    deferred, parameters = checks(1.0), Parameters(order == "model first")
    deferred.end_step(lambda: parameters)
    deferred.state_is_loaded()
    if order == "optimizer first":
        for _ in range(2):
            settle_and_fail(deferred)
            with taking_state() as taken:
                pass
            with pytest.raises(ValueError, match=r"1\.0"):
                taken.settle()
        assert failed_steps_remain()
        parameters.replaced = True
    assert not failed_steps_remain()
    deferred.settle()
    step_to(deferred, 3)


def test_a_load_of_the_parameters_alone_leaves_what_the_state_still_has():
    deferred, parameters = checks(1.0), Parameters(True)
    deferred.end_step(lambda: parameters)
    settle_and_fail(deferred)
    settle_and_fail(deferred)
    deferred.state_is_loaded()
    deferred.settle()


def test_a_step_after_half_a_load_begins_it_again():
    deferred, parameters = checks(1.0), Parameters(False)
    deferred.end_step(lambda: parameters)
    deferred.state_is_loaded()
    step_to(deferred, 1)
    parameters.replaced = True
    settle_and_fail(deferred)
    deferred.end_step(lambda: Parameters(True))
    deferred.state_is_loaded()


def test_threads_of_an_app_leave_their_checks_to_the_save():
    deferred, pool = checks(1.0), ThreadPoolExecutor(1)
    pool.submit(int).result()  # the thread is there before
    for thread in (pool, ThreadPoolExecutor(1)):
        with taking_state() as taken:
            thread.submit(deferred.settle).result()
        with pytest.raises(ValueError, match=r"1\.0"):
            taken.settle()
        with pytest.raises(ValueError, match=r"1\.0"):
            thread.submit(deferred.settle).result()
    deferred.state_is_loaded()


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
    deferred.state_is_loaded()
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
    step_to(deferred, 3)


def test_a_step_raises_what_a_save_in_the_background_has_found():
    deferred = checks(1.0)
    with taking_state() as taken:
        deferred.settle()
    with pytest.raises(ValueError, match=r"1\.0"):
        taken.settle()
    step_to(deferred, 1)
    with pytest.raises(ValueError, match=r"1\.0"):
        deferred.begin_step()
    deferred.begin_step()


def test_a_save_without_the_optimizer_is_refused_each_time_until_a_load():
    """As of the weights alone, after a step or a save has raised it already."""
    deferred = checks(1.0)
    deferred.begin_step()
    with pytest.raises(ValueError, match=r"1\.0"):
        deferred.begin_step()
    for _ in range(2):
        with taking_state() as taken:
            pass
        with pytest.raises(ValueError, match=r"1\.0"):
            taken.settle()
    deferred.state_is_loaded()
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
    deferred.state_is_loaded()


def test_what_is_found_while_a_load_replaces_the_state_is_dropped():
    begun, go_on = threading.Event(), threading.Event()

    def slow(numbers):
        begun.set()
        assert go_on.wait(10)
        raise ValueError("old")

    deferred = DeferredChecks()
    deferred.defer(torch.ones(1), slow)
    thread = threading.Thread(target=deferred.settle)
    thread.start()
    assert begun.wait(10)
    deferred.state_is_loaded()
    go_on.set()
    thread.join()
    step_to(deferred, 3)
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
    deferred.state_is_loaded()


def test_numbers_come_to_plain_memory_where_none_can_be_pinned(monkeypatch):
    empty = torch.empty

    def refusing(*shape, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("no memory can be locked")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    assert empty_pinned(torch.zeros(3, dtype=torch.float64)).dtype == torch.float64


def test_those_that_failed_are_read_under_the_lock(monkeypatch):
    """Threads that save add to them: a walk of a WeakSet that grows raises."""

    class Locked(weakref.WeakSet):
        def __iter__(self):
            assert deferred_checks._lock.locked()
            return super().__iter__()

    monkeypatch.setattr(deferred_checks, "_failed", Locked([DeferredChecks()]))
    assert not deferred_checks.has_failed_steps() and not failed_steps_remain()
