"""Errors for full disks, with the number of bytes needed, and of bytes free."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from shardopt.checkpoint.format.constants import save_id_in
from shardopt.checkpoint.sources.referred import leftovers_in
from shardopt.checkpoint.storage import Storage
from shardopt.checkpoint.text import plural
from shardopt.errors import CheckpointError, NoSpaceError, Problem

_MOST_NAMES = 3
_FEW_FILES = 100  # that can still be made: then inodes may be what has run out


@contextmanager
def explain_no_space(
    storage: Storage, content: str, needed: Callable[[], int], written: Callable[[], int], save_id: str = ""
) -> Iterator[None]:
    """Turns the operating system's error for a full disk into NoSpaceError, with numbers of bytes.

    Args:
        content: of the file, in words, for the message.
        needed: bytes of all of it.
        written: bytes of it that are there already.
        save_id: of the save, of which all files in the directory are that were not left there; "" for unknown.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            found = f"{written():,} of the bytes written, and no more allowed in one file"
            remedy = "raise the limit on the size of a file (ulimit -f, or the file system's), or save from more ranks"
            problem = Problem(storage.url, found, f"{needed():,} bytes for {content}", remedy)
            raise NoSpaceError(f"cannot write to {storage.url}: {error.strerror}", [problem]) from error
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
            remedy=f"{_leftovers(storage, save_id)}make room, keep fewer checkpoints (keep=), or save to another disk",
        )
        raise NoSpaceError(f"cannot write to {storage.url}: {error.strerror}", [problem]) from error


def _leftovers(storage: Storage, save_id: str) -> str:
    """Returns the remedy for what broken-off saves have left on this disk, here and in directories beside, if any."""
    parent, found = storage.parent(), dict[str, int]()
    if parent is None or storage.is_remote:
        return ""
    root, own = parent
    with suppress(OSError, CheckpointError):
        for name in root.names():
            beside = root.child(name)
            if name != own or save_id:
                left = (each for each in leftovers_in(beside) if name != own or save_id_in(each) != save_id)
                found[name] = sum(map(beside.size, left))
    names = [name for name, nbytes in found.items() if nbytes]
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    where = f"{', '.join(names[:_MOST_NAMES])}{more} of {root.url}"
    return (
        f"remove the {sum(found.values()):,} bytes that broken-off saves have left in {where}, if no job saves there; "
    )
