"""Pauses garbage collection while a plan is made."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardopt.world import world

_lock = world().lock()
_pauses: dict[object, tuple[int, int, int]] = {}
"""The program's thresholds, once for each running pause."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector while it is open.

    A plan for thousands of tensors makes a hundred thousand small objects, none of them in a cycle, and each time that
    enough of them have come together the collector walks through all of the program's: half of the time of a save.

    By its threshold, which programs leave alone: who calls `gc.disable()` or `gc.enable()` meanwhile, in whatever
    thread, finds it so afterwards.
    """
    pause = object()
    try:
        with _lock:
            thresholds = _pauses[pause] = next(iter(_pauses.values()), gc.get_threshold())
            gc.set_threshold(0, *thresholds[1:])
        yield
    finally:
        with _lock:
            began = _pauses.pop(pause, None)  # not in a child that was forked meanwhile
            if began is not None and not _pauses:
                _resume(began)


def _resume(thresholds: tuple[int, int, int]) -> None:
    if gc.get_threshold()[0] == 0:  # else the program has set others meanwhile
        gc.set_threshold(*thresholds)


def _end_in_child() -> None:
    """Ends the pauses of the parent's threads, which a forked child does not have."""
    global _lock
    _lock = world().lock()  # a thread of the parent may have held it
    if _pauses:
        _resume(next(iter(_pauses.values())))
        _pauses.clear()


os.register_at_fork(after_in_child=_end_in_child)
