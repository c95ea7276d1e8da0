"""Writes in a thread of low priority: where all cores are busy, training goes first.

Only where nearly all of the work is calls without the interpreter's lock. A thread that seldom runs, and holds the lock
when it is stopped, makes the training wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardopt.checkpoint.saving.planning.save_plan import RankWrites
from shardopt.world import Future, world

T = TypeVar("T")

_LEAST_BYTES = 16 << 20  # less is written before anybody notices
_LEAST_MEAN_BYTES = 1 << 20  # of a box: with smaller ones, too much of the time is Python's


def write_beside_training(writes: RankWrites, write: Callable[[], T]) -> T:
    """Runs the writing of a rank's files in a thread of low priority, if it pays; returns its result, or raises."""
    boxes = sum(map(len, writes.slots.values()))
    nbytes = sum(map(writes.tensor_bytes, writes.slots))
    if nbytes < max(_LEAST_BYTES, _LEAST_MEAN_BYTES * boxes):
        return write()
    done: Future[T] = world().future()

    def run() -> None:
        world().lower_priority(13)  # at 10 it and its helpers ran for an eighth of a step on busy cores
        try:
            done.set_result(write())
        except BaseException as error:
            done.set_exception(error)

    try:
        world().thread(run, "shardopt-write").start()
    except RuntimeError:  # no thread can be had
        return write()
    return done.result()
