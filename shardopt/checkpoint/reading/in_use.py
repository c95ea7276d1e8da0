"""Checkpoints that this process is reading, which it must not clear away."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shardopt.checkpoint.storage import storage_of
from shardopt.world import world

_lock = world().lock()
_read: Counter[str] = Counter()


@contextmanager
def reading(url: str | os.PathLike[str]) -> Iterator[None]:
    """While this is open, the process reads the checkpoint at `url`."""
    try:
        key = storage_of(url).url
    except Exception:  # of a URL that nothing can be read from, which is found in a round, where all ranks hear of it
        key = str(url)
    with _lock:
        _read[key] += 1
    try:
        yield
    finally:
        with _lock:
            _read[key] -= 1
            if not _read[key]:
                del _read[key]


def urls_read() -> set[str]:
    """Where the process reads now, as storages spell it."""
    with _lock:
        return set(_read)
