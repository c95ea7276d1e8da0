"""No garbage collection while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector.

    A plan for thousands of tensors makes a hundred thousand small objects, none of them in a cycle, and each time that
    enough of them have come together the collector walks through all of the program's: half of the time of a save.

    By the threshold, and not by `gc.disable()`, so that what the program does with that meanwhile stays as it is.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:  # or somebody has set it anew
            gc.set_threshold(first, *others)
