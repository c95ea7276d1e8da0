"""Errors for full disks, with the number of bytes needed, and of bytes free."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardopt.checkpoint.storage import Storage
from shardopt.errors import NoSpaceError, Problem


@contextmanager
def explain_no_space(
    storage: Storage, content: str, needed: Callable[[], int], written: Callable[[], int]
) -> Iterator[None]:
    """Turns the operating system's error for a full disk into NoSpaceError, with numbers of bytes.

    Args:
        content: of the file, in words, for the message.
        needed: bytes of all of it.
        written: bytes of it that are there already.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = storage.free_bytes()
        there = "" if free is None else f"{free:,} bytes free, and "
        quota = "" if error.errno == errno.ENOSPC else "; a quota may allow fewer than are free"
        problem = Problem(
            key=storage.url,
            found=f"{there}{written():,} of the bytes written{quota}",
            required=f"{needed():,} bytes for {content}",
            remedy="make room, keep fewer checkpoints (keep=), or save to another disk",
        )
        raise NoSpaceError(f"cannot write to {storage.url}: {error.strerror}", [problem]) from error
