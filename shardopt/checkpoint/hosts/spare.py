"""Keeps files of removed checkpoints on a host, for the next save to overwrite.

In a file system in memory a new file costs three times as much as one that is written over: each of its pages is found,
cleared and charged to somebody first. So of each file of a checkpoint one that was removed is kept under a name that no
reader has, and the file of the same rank in the next save begins with its pages. At most one save's files are kept.

What is kept may be lost or removed at any time: then a new file is made. Nothing can be read as part of a checkpoint
while it is written over. The record of its checkpoint was removed, durably, before; it has a temporary name until all
its bytes are new; and who still has it open, to serve it to another host say, gives bytes that fail their checksums.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

_PREFIX = ".spare-"
FILE_MODE = 0o600


def keep_spare(root: str, path: str) -> None:
    """Moves a data file out of a checkpoint without record; keeps it in place of an earlier spare.

    Args:
        root: the host's directory.
        path: of the file, to which nobody writes.
    """
    with suppress(FileNotFoundError):
        os.replace(path, _spare_of(root, os.path.basename(path)))


def take_spare(root: str, name: str, path: str) -> int | None:
    """Moves the spare file for a data file to `path`, and opens it for writing.

    Of several who try, one gets it. A file that has another name too is somebody's, and is not written over.

    Args:
        root: the host's directory.
        name: of the data file that is to be written.

    Returns:
        The descriptor, which the caller closes; None where there is no such file, or none that may be written over.
    """
    try:
        os.replace(_spare_of(root, name), path)
    except FileNotFoundError:
        return None
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
        status = os.fstat(fd)
        if (
            stat.S_ISREG(status.st_mode)
            and stat.S_IMODE(status.st_mode) == FILE_MODE
            and status.st_uid == os.geteuid()
            and status.st_nlink == 1
        ):
            return fd
        os.close(fd)
    except OSError:  # a link, or a FIFO
        pass
    os.unlink(path)
    return None


def remove_spares(root: str) -> None:
    """Removes all spare files in a host's directory."""
    with suppress(FileNotFoundError):
        for name in os.listdir(root):
            if name.startswith(_PREFIX):
                with suppress(FileNotFoundError):  # another process takes it
                    os.unlink(os.path.join(root, name))


def _spare_of(root: str, name: str) -> str:
    """Returns the path of a data file's spare, which depends on the rank that writes it, not on the save."""
    return os.path.join(root, _PREFIX + name.partition("-")[2])
