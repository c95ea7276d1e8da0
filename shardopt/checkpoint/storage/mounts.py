"""The kernel's answers about the file system below a file: its type, and what direct I/O needs."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import NamedTuple

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000  # of Linux 6.1
_MASK, _MEMORY_ALIGNMENT, _OFFSET_ALIGNMENT = 0, 38, 39  # places in struct statx, in numbers of 32 bits
_statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
if _statx is not None:
    _statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)


class Alignment(NamedTuple):
    """Alignments that direct I/O of a file needs, in bytes: memory, and offsets in the file, begin at multiples."""

    memory: int
    offset: int


def direct_alignment(fd: int) -> Alignment | None:
    """Returns what direct I/O of an open file needs; pages where the kernel does not say; None if there is none."""
    about = (ctypes.c_uint32 * 64)()
    if _statx is None or _statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, about) != 0:
        return Alignment(mmap.PAGESIZE, mmap.PAGESIZE)
    if not about[_MASK] & _STATX_DIOALIGN:
        return Alignment(mmap.PAGESIZE, mmap.PAGESIZE)
    if not about[_OFFSET_ALIGNMENT]:
        return None  # it writes through its cache, as ext4 with data=journal
    return Alignment(about[_MEMORY_ALIGNMENT], about[_OFFSET_ALIGNMENT])


def file_system_type(device: int) -> str | None:
    """Returns the type of a mounted device's file system, as the kernel lists it; None if it is not listed."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields, _, of_file_system = line.partition(" - ")
            if fields.split()[2] == number:
                return of_file_system.split()[0]
    return None


def unwritable(path: str) -> str | None:
    """Returns a local directory, or the nearest one above it that exists, if this process may not write there."""
    while not os.path.isdir(path):
        above = os.path.dirname(path)
        if above in ("", path):
            return None
        path = above
    return None if os.access(path, os.W_OK | os.X_OK) else path
