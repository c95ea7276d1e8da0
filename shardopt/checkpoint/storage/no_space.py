"""Errors for full disks, with the number of bytes needed, and of bytes free."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardopt.checkpoint.storage import Storage
from shardopt.checkpoint.text import plural
from shardopt.errors import NoSpaceError, Problem

_FEW_FILES = 100  # that can still be made: then inodes may be what has run out


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
        files, inodes = storage.free_files(), ""
        if files is not None and files < _FEW_FILES:
            there, inodes = f"{plural(files, 'inode')} and {there}", ", and an inode for each file"
        quota = "" if error.errno == errno.ENOSPC else "; a quota may allow fewer than are free"
        problem = Problem(
            key=storage.url,
            found=f"{there}{written():,} of the bytes written{quota}",
            required=f"{needed():,} bytes for {content}{inodes}",
            remedy="make room, keep fewer checkpoints (keep=), or save to another disk",
        )
        raise NoSpaceError(f"cannot write to {storage.url}: {error.strerror}", [problem]) from error
