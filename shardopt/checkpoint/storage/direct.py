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
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from shardopt.world import Future, world

_log = logging.getLogger("shardopt.checkpoint")

BLOCK_BYTES = 8 << 20  # of one request; less keeps the disk waiting
_WRITERS = 2  # blocks that are written while another is filled
_PAGE_BYTES = mmap.PAGESIZE  # offsets and memory begin at multiples of it
_FILE_SYSTEMS = {"ext4", "xfs"}
_DIRECT = getattr(os, "O_DIRECT", 0)  # of Linux
_types: dict[int, str | None] = {}  # by device: its file system's type; None where direct writes have failed

# Space to reserve at a time: as much as the file has, within bounds. It waits for the writes that are under way. And
# many ranks may write to one disk, where what one reserves is not there for others.
_LEAST_RESERVED_BYTES, _MOST_RESERVED_BYTES, _RESERVED_PART = 16 << 20, 256 << 20, 64


def direct_writer(fd: int, offset: int) -> DirectWriter | None:
    """Returns a writer past the page cache; None if the file system is none for that, or memory or threads lack.

    Args:
        fd: open for writing, and not used by others until `close`.
        offset: where its first byte goes.
    """
    if not _DIRECT:
        return None
    device = os.fstat(fd).st_dev
    if device not in _types:
        _types[device] = _type_of(device)
        if _types[device] not in _FILE_SYSTEMS:
            _log.debug("saves to a file system of type %s go through the page cache", _types[device] or "unknown")
    if _types[device] not in _FILE_SYSTEMS:
        return None
    try:
        return DirectWriter(fd, offset)
    except (OSError, RuntimeError) as error:
        _log.debug("a file goes through the page cache: %s", error)
        return None


class DirectWriter:
    """Writes an open file from an offset on; what is before it stays as it is. Made by `direct_writer`."""

    def __init__(self, fd: int, offset: int) -> None:
        self._begin = self._end = self._reserved = offset  # of what was given to the disk; of what is reserved
        self._finished = False
        # Shared: a fork beside a direct write, as of workers that load data, may not copy what the disk is reading.
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        self._free = deque(mmap.mmap(-1, BLOCK_BYTES, flags) for _ in range(1 + _WRITERS))
        self._block, self._used = self._free.popleft(), 0
        self._writing: deque[tuple[mmap.mmap, int, Future[None]]] = deque()
        # A pool for each thread, which starts here: a pool that starts one later, and cannot, has queued the block.
        self._threads = deque(world().thread_pool(1, "shardopt-direct") for _ in range(_WRITERS))
        for thread in self._threads:
            thread.submit(int).result()
        # Of its own: an interrupt may end `close` before the last write, when another file may get the caller's number.
        self._fd, self._flags = os.dup(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
        self._before_page = -offset % _PAGE_BYTES  # bytes that go through the page cache first
        self._set_direct(not self._before_page)

    def write(self, buffers: Iterable[memoryview]) -> None:
        """Copies the bytes, and begins to write blocks that are full. Raises OSError: an earlier block failed."""
        for buffer in buffers:
            source = np.frombuffer(buffer, np.uint8)
            at = self._fill_page(buffer) if self._before_page else 0
            while at < len(source):
                if self._used == BLOCK_BYTES:  # not before there are more bytes: so the last ones come after all others
                    self._begin_block()
                taken = min(len(source) - at, BLOCK_BYTES - self._used)
                np.copyto(np.frombuffer(self._block, np.uint8, taken, self._used), source[at : at + taken])
                at, self._used = at + taken, self._used + taken

    def finish(self) -> None:
        """Waits for all blocks, and then writes the rest; bytes that fill no page go through the page cache."""
        while self._writing:
            self._wait_for_one()
        whole = self._used // _PAGE_BYTES * _PAGE_BYTES
        rest = memoryview(self._block)[: self._used]
        self._write(rest[:whole], self._end)
        self._set_direct(False)
        self._write(rest[whole:], self._end + whole)
        self._end += self._used
        os.ftruncate(self._fd, self._end)  # gives back what was reserved beyond
        self._finished = True

    def close(self) -> None:
        """Waits until nobody uses the file any more. If it is not finished, it ends before the first block that failed,
        and holds no space that is only reserved.
        """
        world().wait_for_all(future for *_, future in self._writing)
        for thread in self._threads:
            thread.shutdown()
        if not self._finished:
            failed = (offset for _, offset, future in self._writing if future.exception() is not None)
            with suppress(OSError):  # of what has failed already
                os.ftruncate(self._fd, min(failed, default=self._end))
        os.close(self._fd)
        self._free.clear()  # an error that is kept has this object
        self._writing.clear()
        del self._block

    def _fill_page(self, buffer: memoryview) -> int:
        """Writes the bytes up to the next page; returns how many of the buffer's they are."""
        taken = min(buffer.nbytes, self._before_page)
        self._write(buffer[:taken], self._end)
        self._end, self._before_page = self._end + taken, self._before_page - taken
        self._reserved = self._end
        self._set_direct(not self._before_page)
        return taken

    def _begin_block(self) -> None:
        if self._end + BLOCK_BYTES > self._reserved:
            self._reserve()
        block, self._used = self._block, 0
        try:
            future = self._threads[0].submit(self._write, memoryview(block), self._end)
        except RuntimeError:  # the program is ending, and takes no more work; this is not queued
            self._write(memoryview(block), self._end)
            self._free.append(block)
        else:
            self._writing.append((block, self._end, future))
            self._threads.rotate()
        self._end += BLOCK_BYTES
        if not self._free:
            self._wait_for_one()
        self._block = self._free.popleft()

    def _wait_for_one(self) -> None:
        block, _, future = self._writing[0]
        future.result()
        self._writing.popleft()
        self._free.append(block)

    def _reserve(self) -> None:
        """Reserves space; without it, writes take longer. A full disk is found by the writes themselves."""
        nbytes = min(max(self._end - self._begin, _LEAST_RESERVED_BYTES), _MOST_RESERVED_BYTES)
        try:
            disk = os.fstatvfs(self._fd)
            nbytes = min(nbytes, disk.f_bavail * disk.f_frsize // _RESERVED_PART)
            if nbytes < _LEAST_RESERVED_BYTES:
                self._reserved = sys.maxsize
                return
            os.posix_fallocate(self._fd, self._end, nbytes)
            self._reserved = self._end + nbytes
        except OSError:
            self._reserved = sys.maxsize  # of this file nothing more is reserved

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
