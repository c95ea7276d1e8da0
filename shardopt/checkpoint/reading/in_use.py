"""Checkpoints that this process is reading now, which it must not clear away."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shardopt.checkpoint.storage import storage_of
from shardopt.world import world

_lock = world().lock()
_readers: Counter[str] = Counter()


@contextmanager
def reading(url: str | os.PathLike[str]) -> Iterator[None]:
    """Counts the checkpoint at `url` as being read, while this is open."""
    try:
        key = storage_of(url).url
    except Exception:  # of a URL that nothing can be read from: it is refused in a round, on all ranks
        key = str(url)
    with _lock:
        _readers[key] += 1
    try:
        yield
    finally:
        with _lock:
            _readers[key] -= 1
            if not _readers[key]:
                del _readers[key]


def urls_being_read() -> set[str]:
    """Returns the URLs of the checkpoints that are being read, as storages spell them."""
    with _lock:
        return set(_readers)
