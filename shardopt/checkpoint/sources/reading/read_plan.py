"""Plans the reads of a data file: splits requests into batches that one thread reads, verifies and copies at once.

Where the bytes of a wanted box lie in one run in the file and in memory, they are read straight into that memory;
otherwise whole rows are read into a bounded scratch buffer and copied from there, and so are small boxes, of which many
are read at once. Checksums stand for segments, so that at both ends of a run up to one segment more is read, into
scratch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from shardopt.checkpoint.format.constants import SEGMENT_BYTES, Dtype
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.tensor_bytes import (
    TORCH_DTYPES,
    bytes_of,
    move_bytes,
    tensor_over,
)
from shardopt.checkpoint.sources.reading.checking import ReadSizes
from shardopt.checkpoint.sources.reading.open_file import OpenFile, ReadRequest
from shardopt.checkpoint.sources.reading.scratch import Scratch, ScratchCopy, room_for
from shardopt.checkpoint.storage import ReadInto, Span
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import narrowed

_SMALL_READ_BYTES = 64 * 1024  # up to here a copy costs less than one more place to read to; no more than a segment


class _Run(NamedTuple):
    """A contiguous run of a stored box's bytes in the file, in whole segments.

    Args:
        offset: in the file.
        head: bytes before what is wanted, to make up its first segment.
        memory: for what is wanted; None where all of the run goes to scratch.
        tail: bytes behind what is wanted; all of the run where it goes to scratch.
        copy: for a run in scratch: where its bytes are → what to copy from them, and where to.
    """

    offset: int
    head: int
    memory: memoryview | None
    tail: int
    copy: Callable[[memoryview], tuple[Tensor, Tensor]] | None = None

    @property
    def nbytes(self) -> int:
        return self.head + (self.memory.nbytes if self.memory else 0) + self.tail


class Batch:
    """Spans to read at once, segments to verify then, and copies to make from scratch.

    Args:
        scratch: for bytes that are not read in place; the batch takes a buffer when it needs it, and gives it back.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.nbytes = 0
        self._spans: list[Span] = []
        self._checks: list[tuple[Entry, int, Sequence[memoryview]]] = []
        self._copies: list[ScratchCopy] = []
        self._scratch = scratch
        self._buffer: bytearray | memoryview | None = None
        self._used = 0

    def takes(self, run: _Run) -> bool:
        """Whether a run has room in scratch."""
        return self._scratch.grows or self._used + room_for(run.head) + room_for(run.tail) <= self._scratch.nbytes

    def add(self, entry: Entry, run: _Run) -> None:
        """Adds a run of an entry's bytes."""
        sections = [self._allocate(run.head), run.memory] if run.memory else []
        memories = [memory for memory in (*sections, self._allocate(run.tail)) if memory]
        if run.copy is not None:
            self._copies.append(ScratchCopy(entry, *run.copy(memories[0])))
        offset = run.offset
        self._checks += _segments(entry, offset, memories)
        for memory in memories:
            self._spans.append(Span(offset, memory))
            offset += memory.nbytes
        self.nbytes += run.nbytes

    def read(self, file: OpenFile, read: ReadInto) -> None:
        """Reads, verifies and copies; call it once."""
        read(self._spans)
        for entry, segment, memories in self._checks:
            if not file.is_intact(segment, *memories):
                raise file.segment_error(entry, segment)
        if self._buffer is not None:
            self._scratch.use(self._buffer, self._copies)

    def _allocate(self, nbytes: int) -> memoryview:
        """Returns this many bytes of scratch memory."""
        if not nbytes:
            return memoryview(b"")
        if self._buffer is None:
            self._buffer = self._scratch.take()
        begin = self._used
        self._used += room_for(nbytes)
        if self._used > len(self._buffer):  # thousands of small pieces, which alignment has made larger
            return memoryview(bytearray(nbytes))
        return memoryview(self._buffer)[begin : begin + nbytes]


class LargeRead:
    """Many whole segments that are read straight into memory, each verified while it is in the processor's cache.

    Args:
        entry: the segments' own.
        offset: of their bytes in the file.
        memory: for them.
        call_bytes: to read in one call, whole segments.
    """

    def __init__(self, entry: Entry, offset: int, memory: memoryview, call_bytes: int) -> None:
        self.nbytes = memory.nbytes
        self._entry, self._offset, self._memory, self._call_bytes = entry, offset, memory, call_bytes

    def read(self, file: OpenFile, read: ReadInto) -> None:
        """Reads and verifies; call it once."""
        segment = self._entry.segment + (self._offset - self._entry.begin) // SEGMENT_BYTES
        for begin in range(0, self.nbytes, self._call_bytes):
            memory = self._memory[begin : begin + self._call_bytes]
            read([Span(self._offset + begin, memory)])
            for failed in file.failed_segments(segment, memory):
                raise file.segment_error(self._entry, failed)
            segment += self._call_bytes // SEGMENT_BYTES


@dataclass(slots=True, eq=False)
class SmallReads:
    """Small whole boxes: many at a time are read into scratch, verified there, and copied.

    Of thousands of small tensors each is next to its neighbours in the file, but not in memory.

    Args:
        scratch: as for `Batch`.
        members: whole boxes by their offsets, each to be copied to contiguous memory of its dtype.
        nbytes: of all of them.
    """

    scratch: Scratch
    members: list[ReadRequest]
    nbytes: int

    def read(self, file: OpenFile, read: ReadInto) -> None:
        """Reads, verifies and copies; call it once."""
        buffer = self.scratch.take()
        memory, address = memoryview(buffer), ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))
        runs: list[tuple[Entry, int, list[memoryview]]] = []  # of boxes that follow one another in the file: the first
        at, end = 0, -1  # before any entry, also one that begins where its file does
        for _, entry, _, _, _, _ in self.members:
            _, _, _, begin, stop, _ = entry
            if begin != end:
                runs.append((entry, at, pieces := []))
            pieces.append(memory[at : (at := at + stop - begin)])
            end = stop
        read([Span(first.begin, memory[at : at + sum(map(len, pieces))]) for first, at, pieces in runs])
        for first, _, pieces in runs:
            for failed in file.failed_of(first.segment, pieces):
                entry = next(each.entry for each in self.members if each.entry.segment == failed)
                raise file.segment_error(entry, failed)
        for _, (_, _, _, begin, end, _), _, _, _, target in self.members:
            move_bytes(target.data_ptr(), address, end - begin)
            address += end - begin
        self.scratch.use(buffer, ())


def batches_of(
    requests: Iterable[ReadRequest], read_sizes: ReadSizes, scratch: Scratch
) -> Iterator[Batch | LargeRead | SmallReads]:
    """Splits requests of one file into batches: of several runs, of one large run, or of small boxes."""
    limit = read_sizes.batch
    batch: Batch | None = None
    small: list[ReadRequest] = []
    small_bytes = 0
    for request in sorted(requests, key=attrgetter("entry.begin")):
        _, entry, dtype, sizes, wanted, target = request
        _, _, _, begin, end, _ = entry
        nbytes = end - begin
        if not nbytes:
            continue  # and no checksum
        if nbytes <= _SMALL_READ_BYTES and wanted.sizes == sizes and _takes_bytes(target, dtype):
            if small and small_bytes + nbytes > limit:
                yield SmallReads(scratch, small, small_bytes)
                small, small_bytes = [], 0
            small.append(request)
            small_bytes += nbytes
            continue
        is_one = _is_one_run(request)
        runs = (
            _direct(request, read_sizes.run) if is_one else _through_scratch(request, limit, 0, sizes, wanted, target)
        )
        for run in runs:
            if run.memory is not None and run.memory.nbytes == run.nbytes > read_sizes.call:
                yield LargeRead(entry, run.offset, run.memory, read_sizes.call)
                continue
            if batch is not None and (batch.nbytes + run.nbytes > limit or not batch.takes(run)):
                yield batch
                batch = None
            batch = batch or Batch(scratch)
            batch.add(entry, run)
    if small:
        yield SmallReads(scratch, small, small_bytes)
    if batch is not None:
        yield batch


def _is_one_run(request: ReadRequest) -> bool:
    """Whether the wanted box is contiguous within the stored one, and the target's memory is plain."""
    partial = [d for d, (size, of) in enumerate(zip(request.wanted.sizes, request.sizes, strict=True)) if size != of]
    last = partial[-1] if partial else 0
    return all(size == 1 for size in request.wanted.sizes[:last]) and _takes_bytes(request.target, request.dtype)


def _takes_bytes(target: Tensor, dtype: Dtype) -> bool:
    """Whether the target's memory can take the stored bytes unchanged."""
    return target.dtype == TORCH_DTYPES[dtype.name] and target.is_cpu and target.is_contiguous()


def _direct(request: ReadRequest, limit: int) -> Iterator[_Run]:
    """Splits a request into runs that are read directly into the target's memory."""
    begin = position_of(request.wanted.offsets, request.sizes) * request.dtype.itemsize
    memory = bytes_of(request.target)
    end = begin + memory.nbytes
    total = request.entry.end - request.entry.begin
    while begin < end:
        # One run ends where a segment ends, so that no segment is read twice.
        stop = min(end, begin - begin % SEGMENT_BYTES + limit)
        head, tail = begin % SEGMENT_BYTES, min(-stop % SEGMENT_BYTES, total - stop)
        yield _Run(request.entry.begin + begin - head, head, memory[: stop - begin], tail)
        memory = memory[stop - begin :]
        begin = stop


def _through_scratch(
    request: ReadRequest, limit: int, base: int, sizes: tuple[int, ...], wanted: Box, target: Tensor
) -> Iterator[_Run]:
    """Splits a request into runs that are read into scratch, and copied from there to the target.

    They are of whole rows, of the outermost dimension whose rows fit the scratch buffer.

    Args:
        base: of the rows in the stored box, in bytes.
        sizes, wanted, target: of what is within these rows.
    """
    row_bytes = prod(sizes[1:]) * request.dtype.itemsize
    first, count = (wanted.offsets[0], wanted.sizes[0]) if sizes else (0, 1)
    if row_bytes > limit:
        inner = Box(wanted.offsets[1:], wanted.sizes[1:])
        for i in range(count):
            yield from _through_scratch(request, limit, base + (first + i) * row_bytes, sizes[1:], inner, target[i])
        return
    total = request.entry.end - request.entry.begin
    step = max(limit // row_bytes, 1)
    for i in range(0, count, step):
        rows = min(step, count - i)
        begin = base + (first + i) * row_bytes
        stop = begin + rows * row_bytes
        aligned = begin - begin % SEGMENT_BYTES
        nbytes = min(-(-stop // SEGMENT_BYTES) * SEGMENT_BYTES, total) - aligned
        block = target.narrow(0, i, rows) if sizes else target
        box = Box((0, *wanted.offsets[1:]), (rows, *wanted.sizes[1:])) if sizes else None
        shape = (rows, *sizes[1:]) if sizes else ()
        copy = partial(_copy_of, block, begin - aligned, request.dtype, shape, box)
        yield _Run(request.entry.begin + aligned, 0, None, nbytes, copy)


def _copy_of(
    target: Tensor, begin: int, dtype: Dtype, shape: tuple[int, ...], box: Box | None, memory: memoryview
) -> tuple[Tensor, Tensor]:
    """Returns a target and its source: a box of a tensor whose bytes begin at `begin` of `memory`."""
    source = tensor_over(memory, begin, dtype, shape)
    return target, source if box is None else narrowed(source, box)


def _segments(
    entry: Entry, offset: int, memories: Sequence[memoryview]
) -> Iterator[tuple[Entry, int, Sequence[memoryview]]]:
    """Splits bytes that begin at file offset `offset` into segments: entry, number in the file, memory."""
    segment = entry.segment + (offset - entry.begin) // SEGMENT_BYTES
    pieces: list[memoryview] = []  # of the segment that is not complete yet
    room = SEGMENT_BYTES
    for memory in memories:
        while memory.nbytes:
            piece, memory = memory[:room], memory[room:]
            pieces.append(piece)
            room -= piece.nbytes
            if room == 0:
                yield entry, segment, pieces
                segment, pieces, room = segment + 1, [], SEGMENT_BYTES
    if pieces:
        yield entry, segment, pieces


def position_of(index: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the position of an index in C order."""
    offset = 0
    for i, size in zip(index, sizes, strict=True):
        offset = offset * size + i
    return offset
