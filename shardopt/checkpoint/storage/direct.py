"""Durable writes past the page cache (O_DIRECT): the disk takes blocks while the next ones are hashed and copied.

Through the page cache each byte is copied by the kernel, kept in memory that nobody reads again, and waited for at the
fsync. Here it is copied once, into one of a few blocks that stay in the processor's cache, and the fsync finds nothing
left to write but the file's size. The file is the same to the byte.

Only on file systems known to do this well. Others take the flag and then fail, or write through their own cache: FUSE,
NFS, overlays.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from shardopt.world import Future, world

_log = logging.getLogger("shardopt.checkpoint")

BLOCK_BYTES = 8 << 20  # of one request; less keeps the disk waiting
_BLOCKS = 3  # one is filled while two are written
_PAGE_BYTES = mmap.PAGESIZE  # offsets and memory begin at multiples of it
_RESERVED_BYTES = 16 << 20  # at a time: writes within it need no space of their own. Of a nearly full disk, other ranks
# must still get theirs
_FILE_SYSTEMS = {"ext4", "xfs"}
_DIRECT = getattr(os, "O_DIRECT", 0)  # of Linux
_types: dict[int, str | None] = {}  # by device: its file system's type; None where direct writes have failed


def takes_writes(fd: int) -> bool:
    """Whether large durable writes to an open file should pass by the page cache."""
    if not _DIRECT:
        return False
    device = os.fstat(fd).st_dev
    if device not in _types:
        _types[device] = _type_of(device)
        if _types[device] not in _FILE_SYSTEMS:
            _log.debug("saves to a file system of type %s go through the page cache", _types[device] or "unknown")
    return _types[device] in _FILE_SYSTEMS


class DirectWriter:
    """Writes an open file from an offset on; what is before it stays as it is.

    Args:
        fd: open for writing, and not used by others until `close`.
        offset: where the first byte goes.
    """

    def __init__(self, fd: int, offset: int) -> None:
        self._end = self._reserved = offset  # of what was given to the disk; of what is reserved
        # Shared: a fork beside a direct write, as of workers that load data, may not copy what the disk is reading.
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        self._free = deque(mmap.mmap(-1, BLOCK_BYTES, flags) for _ in range(_BLOCKS))
        self._block, self._used = self._free.popleft(), 0
        self._writing: deque[tuple[mmap.mmap, Future[None]]] = deque()
        self._threads = world().thread_pool(_BLOCKS - 1, "shardopt-direct")
        # Of its own: an interrupt may end `close` before the last write, when another file may get the caller's number.
        self._fd, self._flags = os.dup(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
        self._before_page = -offset % _PAGE_BYTES  # bytes that go through the page cache first
        self._set_direct(not self._before_page)

    def write(self, buffers: Iterable[memoryview]) -> None:
        """Copies the bytes, and begins to write what fills a block. Raises OSError: an earlier block failed."""
        for buffer in buffers:
            source = np.frombuffer(buffer, np.uint8)
            at = self._fill_page(buffer) if self._before_page else 0
            while at < len(source):
                taken = min(len(source) - at, BLOCK_BYTES - self._used)
                np.copyto(np.frombuffer(self._block, np.uint8, taken, self._used), source[at : at + taken])
                at, self._used = at + taken, self._used + taken
                if self._used == BLOCK_BYTES:
                    self._begin_block()

    def finish(self) -> None:
        """Writes the rest and waits for all: the last bytes fill no page, and go through the page cache."""
        while self._writing:
            self._wait_for_one()
        whole = self._used // _PAGE_BYTES * _PAGE_BYTES
        rest = memoryview(self._block)[: self._used]
        self._write(rest[:whole], self._end)
        self._set_direct(False)
        self._write(rest[whole:], self._end + whole)
        self._end += self._used

    def close(self) -> None:
        """Waits until nobody uses the file any more, and gives back reserved space, whether or not writes succeeded."""
        world().wait_for_all(future for _, future in self._writing)
        self._threads.shutdown()
        try:
            os.ftruncate(self._fd, self._end)
        finally:
            os.close(self._fd)

    def _fill_page(self, buffer: memoryview) -> int:
        """Writes the bytes up to the next page; returns how many of the buffer's they are."""
        taken = min(buffer.nbytes, self._before_page)
        self._write(buffer[:taken], self._end)
        self._end, self._before_page = self._end + taken, self._before_page - taken
        self._reserved = self._end
        self._set_direct(not self._before_page)
        return taken

    def _begin_block(self) -> None:
        block, offset = self._block, self._end
        self._end, self._used = offset + BLOCK_BYTES, 0
        if self._end > self._reserved:
            self._reserve()
        try:
            self._writing.append((block, self._threads.submit(self._write, memoryview(block), offset)))
        except RuntimeError:  # the program is ending, and starts no threads any more
            self._write(memoryview(block), offset)
            self._free.append(block)
        if not self._free:
            self._wait_for_one()
        self._block = self._free.popleft()

    def _wait_for_one(self) -> None:
        block, future = self._writing.popleft()
        future.result()
        self._free.append(block)

    def _reserve(self) -> None:
        """Reserves space; without it, writes take longer. A full disk is found by the writes themselves."""
        with suppress(OSError):
            os.posix_fallocate(self._fd, self._reserved, _RESERVED_BYTES)
        self._reserved += _RESERVED_BYTES

    def _write(self, memory: memoryview, offset: int) -> None:
        refused = False
        while memory.nbytes:
            try:
                done = os.pwrite(self._fd, memory, offset)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or refused:
                    raise
                refused = True
                self._give_up(error)
                continue
            memory, offset = memory[done:], offset + done
            if offset % _PAGE_BYTES:  # a short write: what follows it is at no page
                self._set_direct(False)

    def _give_up(self, error: OSError) -> None:
        """Continues through the page cache, as the file system takes direct writes no more, or never did."""
        device = os.fstat(self._fd).st_dev
        if _types.get(device) is not None:
            _log.info("saves to this file system go through the page cache from now on: a direct write got %s", error)
        _types[device] = None
        self._set_direct(False)

    def _set_direct(self, direct: bool) -> None:
        with suppress(OSError):  # then writes go through the page cache
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | _DIRECT if direct else self._flags & ~_DIRECT)


def _type_of(device: int) -> str | None:
    """Returns the type of a mounted device's file system, as the kernel lists it; None if it is not listed."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields, _, of_file_system = line.partition(" - ")
            if fields.split()[2] == number:
                return of_file_system.split()[0]
    return None
