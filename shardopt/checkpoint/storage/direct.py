"""Durable writes past the page cache (O_DIRECT): the disk takes bytes while the next ones are hashed.

Through the page cache each byte is copied by the kernel, kept in memory that nobody reads again, and waited for at the
fsync. Here the disk takes large tensors from where they are, if their memory is aligned as it needs it. Other bytes are
copied once, into one of a few blocks that stay in the processor's cache. The fsync finds nothing left to write but the
file's size. The file is the same to the byte.

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

from shardopt.checkpoint.format.tensor_bytes import bytes_of
from shardopt.checkpoint.storage.base import FLUSH, skip
from shardopt.checkpoint.storage.mounts import direct_alignment, file_system_type
from shardopt.runtime.host_memory import Block
from shardopt.world import Future, world

_log = logging.getLogger("shardopt.checkpoint")

BLOCK_BYTES = 8 << 20  # of one request; less keeps the disk waiting
_WRITERS = 2  # requests that are written while another is filled
_IN_PLACE_BYTES = 64 << 10  # of a buffer from which on it is worth a segment of its own
_PAGE_BYTES = mmap.PAGESIZE  # offsets begin at multiples of it
_FILE_SYSTEMS = {"ext4", "xfs"}
_DIRECT = getattr(os, "O_DIRECT", 0)  # of Linux
# Of file systems that take no direct writes (any more), and of memory that the disk cannot take, but the kernel can.
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)
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
        _types[device] = file_system_type(device)
        if _types[device] not in _FILE_SYSTEMS:
            _log.debug("saves to a file system of type %s go through the page cache", _types[device] or "unknown")
    alignment = direct_alignment(fd) if _types[device] in _FILE_SYSTEMS else None
    if alignment is None or alignment.offset > _PAGE_BYTES:
        return None
    try:
        return DirectWriter(fd, offset, alignment.memory)
    except (OSError, RuntimeError) as error:
        _log.debug("a file goes through the page cache: %s", error)
        return None


class _Request:
    """Bytes that follow one another in the file, up to `BLOCK_BYTES`: in segments, copied to a block or in place.

    Each segment but the last is of whole pages; each that is in place is.
    """

    def __init__(self, block: memoryview, offset: int) -> None:
        self.block, self.offset = block, offset
        self.segments: list[memoryview] = []
        self.nbytes = 0
        self._used = self._copied = 0  # of the block: all, and up to the last segment's begin

    @property
    def room(self) -> int:
        """The number of bytes that still fit."""
        return BLOCK_BYTES - self.nbytes

    @property
    def open_bytes(self) -> int:
        """The number of copied bytes that are in no segment yet."""
        return self._used - self._copied

    def copy(self, source: np.ndarray) -> None:
        """Copies bytes that fit to the end."""
        np.copyto(np.frombuffer(self.block, np.uint8, len(source), self._used), source)
        self._used += len(source)
        self.nbytes += len(source)

    def add(self, memory: memoryview) -> None:
        """Adds memory that fits as it is; the bytes before it must fill pages."""
        self.close()
        self.segments.append(memory)
        self.nbytes += memory.nbytes

    def close(self) -> None:
        """Makes a segment of what was copied since the last one."""
        if self.open_bytes:
            self.segments.append(self.block[self._copied : self._used])
            self._copied = self._used

    def take_open(self) -> np.ndarray:
        """Removes and returns the copied bytes that are in no segment yet; valid until the block is used again."""
        taken = np.frombuffer(self.block, np.uint8, self.open_bytes, self._copied)
        self.nbytes -= len(taken)
        self._used = self._copied
        return taken

    def take_tail(self) -> list[memoryview]:
        """Makes segments of everything; removes and returns the bytes at the end that fill no page."""
        self.close()
        nbytes = self.nbytes % _PAGE_BYTES
        if not nbytes:
            return []
        last = self.segments.pop()
        if last.nbytes > nbytes:
            self.segments.append(last[:-nbytes])
        self.nbytes -= nbytes
        return [last[-nbytes:]]


class DirectWriter:
    """Writes an open file from an offset on; what is before it stays as it is. Made by `direct_writer`.

    Args:
        memory_alignment: of what the disk can take from where it is, in bytes.
    """

    def __init__(self, fd: int, offset: int, memory_alignment: int) -> None:
        self._begin = self._reserved = offset  # of all bytes; of what is not reserved
        self._alignment = memory_alignment
        self._in_place = True  # whether memory stays as it is until the file is finished
        self._finished = False
        # In large pages, of which the disk takes more at once; and not inherited: a fork beside a direct write, as of
        # workers that load data, may not copy what the disk is reading.
        blocks = bytes_of(Block((1 + _WRITERS) * BLOCK_BYTES).memory)
        self._free = deque(blocks[begin : begin + BLOCK_BYTES] for begin in range(0, blocks.nbytes, BLOCK_BYTES))
        self._request = _Request(self._free.popleft(), offset)
        self._writing: deque[tuple[_Request, Future[None]]] = deque()
        # A pool for each thread, which starts here: a pool that starts one later, and cannot, has queued the request.
        self._threads = deque(world().thread_pool(1, "shardopt-direct") for _ in range(_WRITERS))
        for thread in self._threads:
            thread.submit(int).result()
        # Of its own: an interrupt may end `close` before the last write, when another file may get the caller's number.
        self._fd, self._flags = os.dup(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
        self._before_page = -offset % _PAGE_BYTES  # bytes that go through the page cache first
        self._set_direct(not self._before_page)

    def write(self, buffers: Iterable[memoryview]) -> None:
        """Takes the bytes, and begins to write full requests. Raises OSError: an earlier request failed.

        Bytes in place must not change before `finish` has returned, or the call with a `FLUSH` after them.
        """
        for buffer in buffers:
            if buffer is FLUSH:
                self._end_in_place()
            elif buffer.nbytes:
                self._take(buffer)

    def finish(self) -> None:
        """Waits for all requests, and then writes the rest; bytes that fill no page go through the page cache."""
        self._wait_for_all()
        last = self._request
        tail = last.take_tail()
        self._write(last.segments, last.offset)
        self._set_direct(False)
        self._write(tail, last.offset + last.nbytes)
        # Gives back what was reserved beyond.
        os.ftruncate(self._fd, last.offset + last.nbytes + sum(memory.nbytes for memory in tail))
        self._finished = True

    def close(self) -> None:
        """Waits until nobody uses the file any more. If it is not finished, it ends before the first request that
        failed, and holds no space that is only reserved.
        """
        world().wait_for_all(future for _, future in self._writing)
        for thread in self._threads:
            thread.shutdown()
        if not self._finished:
            failed = (request.offset for request, future in self._writing if future.exception() is not None)
            with suppress(OSError):  # of what has failed already
                os.ftruncate(self._fd, min(failed, default=self._request.offset))
        os.close(self._fd)
        self._free.clear()  # an error that is kept has this object
        self._writing.clear()
        del self._request

    def _take(self, buffer: memoryview) -> None:
        at = self._fill_page(buffer) if self._before_page else 0
        source = np.frombuffer(buffer, np.uint8)
        end = len(source)
        if self._in_place and end - at >= _IN_PLACE_BYTES:
            before = -(self._request.offset + self._request.nbytes) % _PAGE_BYTES
            if not (source.__array_interface__["data"][0] + at + before) % self._alignment:
                self._copy(source[at : at + before])
                at += before
                end = at + (end - at) // _PAGE_BYTES * _PAGE_BYTES
                while at < end:
                    nbytes = min(end - at, self._room())
                    self._request.add(buffer[at : at + nbytes])
                    at += nbytes
        self._copy(source[at:])

    def _copy(self, source: np.ndarray) -> None:
        at = 0
        while at < len(source):
            nbytes = min(len(source) - at, self._room())
            self._request.copy(source[at : at + nbytes])
            at += nbytes

    def _room(self) -> int:
        """Returns how many more bytes the request takes; begins to write one that is full, and makes the next.

        Not before there are more bytes: so the last ones of a file come after all others.
        """
        if not self._request.room:
            self._begin_request()
        return self._request.room

    def _end_in_place(self) -> None:
        """Waits until the disk has all that it takes in place, and copies from now on: memory is used again."""
        if self._in_place and (self._request.segments or self._writing):
            opened = self._request.take_open()
            if self._request.segments:
                self._begin_request()
            self._copy(opened)
            self._wait_for_all()
        self._in_place = False

    def _fill_page(self, buffer: memoryview) -> int:
        """Writes the bytes up to the next page; returns how many of the buffer's they are."""
        taken, request = min(buffer.nbytes, self._before_page), self._request
        self._write([buffer[:taken]], request.offset)
        request.offset += taken
        self._before_page -= taken
        self._reserved = request.offset
        self._set_direct(not self._before_page)
        return taken

    def _begin_request(self) -> None:
        request = self._request
        request.close()
        end = request.offset + request.nbytes
        if end > self._reserved:
            self._reserve(request.offset)
        try:
            future = self._threads[0].submit(self._write, request.segments, request.offset)
        except RuntimeError:  # the program is ending, and takes no more work; this is not queued
            self._write(request.segments, request.offset)
            self._free.append(request.block)
        else:
            self._writing.append((request, future))
            self._threads.rotate()
        if not self._free:
            self._wait_for_one()
        self._request = _Request(self._free.popleft(), end)

    def _wait_for_all(self) -> None:
        while self._writing:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        request, future = self._writing[0]
        future.result()
        self._writing.popleft()
        self._free.append(request.block)

    def _reserve(self, begin: int) -> None:
        """Reserves space; without it, writes take longer. A full disk is found by the writes themselves."""
        nbytes = min(max(begin - self._begin, _LEAST_RESERVED_BYTES), _MOST_RESERVED_BYTES)
        try:
            disk = os.fstatvfs(self._fd)
            nbytes = min(nbytes, disk.f_bavail * disk.f_frsize // _RESERVED_PART)
            if nbytes < _LEAST_RESERVED_BYTES:
                self._reserved = sys.maxsize
                return
            os.posix_fallocate(self._fd, begin, nbytes)
            self._reserved = begin + nbytes
        except OSError:
            self._reserved = sys.maxsize  # of this file nothing more is reserved

    def _write(self, segments: list[memoryview], offset: int) -> None:
        refused = False
        while segments:
            try:
                done = os.pwritev(self._fd, segments, offset)
            except OSError as error:
                if error.errno not in _REFUSED or refused:
                    raise
                refused = True
                self._give_up(error)
                continue
            segments, offset = skip(segments, done), offset + done
            if offset % _PAGE_BYTES:  # a short write: what follows it is at no page
                self._set_direct(False)

    def _give_up(self, error: OSError) -> None:
        """Continues through the page cache, as the file system takes direct writes no more, or never did."""
        device = os.fstat(self._fd).st_dev
        if error.errno != errno.EFAULT and _types.get(device) is not None:
            _log.info("saves to this file system go through the page cache from now on: a direct write got %s", error)
            _types[device] = None
        self._set_direct(False)

    def _set_direct(self, direct: bool) -> None:
        with suppress(OSError):  # then writes go through the page cache
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | _DIRECT if direct else self._flags & ~_DIRECT)
