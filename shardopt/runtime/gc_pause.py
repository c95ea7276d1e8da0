"""Pauses garbage collection while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shardopt.world import world

_lock = world().lock()
_pauses: list[tuple[int, int, int]] = []
"""The program's thresholds, once for each running pause."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector while it is open.

    A plan for thousands of tensors makes a hundred thousand small objects, none of them in a cycle, and each time that
    enough of them have come together the collector walks through all of the program's: half of the time of a save.

    By its threshold, which programs leave alone: who calls `gc.disable()` or `gc.enable()` meanwhile, in whatever
    thread, finds it so afterwards.
    """
    with _lock:
        _pauses.append(_pauses[0] if _pauses else gc.get_threshold())
        gc.set_threshold(0, *_pauses[0][1:])
    try:
        yield
    finally:
        with _lock:
            thresholds = _pauses.pop()
            if not _pauses and gc.get_threshold()[0] == 0:  # else the program has set others meanwhile
                gc.set_threshold(*thresholds)
