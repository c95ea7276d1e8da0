"""Finds the objects of a class that are alive, of which nobody keeps a list."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def instances_of(kind: type) -> list[Any]:
    """Returns the instances of a class, and of classes derived from it.

    All objects that the garbage collector knows are looked at, which takes a tenth of a second where there are two
    million. Those that are frozen are found within `none_frozen` alone.
    """
    kinds = set(map(id, _with_subclasses(kind)))  # no class itself in a search: a metaclass may have no hash
    # `gc.get_referrers` compares what each object refers to with each class: ten times as long with a hundred classes.
    return [each for each in gc.get_objects() if id(type(each)) in kinds]


@contextmanager
def none_frozen() -> Iterator[None]:
    """Lets objects be found that `gc.freeze` keeps out of collections: they are in no list."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        # Else what is in cycles that nobody has any more would stay for good. Before, as it is quick while all else is
        # frozen: with that it takes seconds where there are many millions of objects.
        gc.collect()
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _with_subclasses(kind: type) -> list[type]:
    derived: list[type] = type.__subclasses__(kind)
    return [kind, *(own for each in derived for own in _with_subclasses(each))]
