"""The pause of the garbage collector, beside what the program does with it."""

import gc
import os
import threading

import pytest

from shardopt.runtime.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def as_it_was():
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


def collections_while_making(objects):
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    held = [[] for _ in range(objects)]
    return gc.get_stats()[0]["collections"] - before if held else 0


def test_nothing_is_collected_in_a_pause_and_all_is_as_before_after_it():
    gc.set_threshold(100, 7, 9)
    assert collections_while_making(1000) > 0
    with gc_paused():
        assert collections_while_making(1000) == 0
        with gc_paused():
            pass
        assert collections_while_making(1000) == 0
    assert gc.get_threshold() == (100, 7, 9) and gc.isenabled()
    assert collections_while_making(1000) > 0


@pytest.mark.parametrize("before", [gc.enable, gc.disable])
@pytest.mark.parametrize("meanwhile", [gc.enable, gc.disable])
def test_what_the_program_does_meanwhile_stays(before, meanwhile):
    before()
    with gc_paused():
        meanwhile()
    assert gc.isenabled() == (meanwhile is gc.enable)


def test_thresholds_that_the_program_sets_meanwhile_stay():
    with gc_paused():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def pausing_thread():
    """Starts a thread that pauses until it is told to leave; returns it and the event that tells it."""
    inside, leave = threading.Event(), threading.Event()

    def pause():
        with gc_paused():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=pause)
    thread.start()
    assert inside.wait(30)
    return thread, leave


def test_pauses_of_several_threads():
    """The program disables collection between the end of one and that of the other."""
    gc.set_threshold(100, 7, 9)
    with gc_paused():
        thread, leave = pausing_thread()
    assert collections_while_making(1000) == 0
    gc.disable()
    leave.set()
    thread.join()
    assert not gc.isenabled() and gc.get_threshold() == (100, 7, 9)


def test_a_child_that_is_forked_in_a_pause_collects():
    gc.set_threshold(100, 7, 9)
    thread, leave = pausing_thread()
    with gc_paused():  # that of the forking thread ends in the child too
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.get_threshold() == (100, 7, 9) else 1)
        assert gc.get_threshold()[0] == 0
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_threshold() == (100, 7, 9)
