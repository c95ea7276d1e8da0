"""From data files into memory that is already there: every byte is summed, and read once.

What a caller wants of one box of one file is a `Want`. Where its bytes lie in one run in the file and in memory, they
are read straight into that memory; otherwise whole rows are read into a bounded scratch buffer and copied from there.
Checksums stand for segments, so that at both ends of a run up to one segment more is read, into scratch.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.datafile import Entry, header_length, parse_header
from shardopt.checkpoint.format import SEGMENT_BYTES, Dtype, damaged, segment_count, stored_shape
from shardopt.checkpoint.manifest import DataFile
from shardopt.checkpoint.memory import bytes_of, is_plain_memory, tensor_over, torch_dtype
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.storage import Span, Storage, telling
from shardopt.errors import CorruptionError, Problem
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import narrowed

_THREADS = 4
_BATCH_BYTES = 2 << 20  # read by one thread at a time, and still in its cache when it is summed and copied
_FAR_BATCH_BYTES = 8 << 20  # where each request costs a round trip; see benchmarks/results/remote.md
_FAR_THREADS = 8
_ALIGNMENT = 64  # of what is taken from scratch, so that there can be tensors of any dtype over it


class Want(NamedTuple):
    """A part of a stored box, and the memory for it.

    `wanted` is in coordinates of the stored box, whose sizes are `sizes`; `target` has just its shape.
    """

    entry: Entry
    dtype: Dtype
    sizes: tuple[int, ...]
    wanted: Box
    target: Tensor


class OpenFile:
    """A data file whose header and checksums have been read and verified."""

    def __init__(self, storage: Storage, file: DataFile) -> None:
        self.storage, self.file = storage, file
        self.where = f"{storage.url}/{file.name}"
        with self.reading():
            found = storage.size(file.name)
            if found != file.nbytes:
                raise damaged(self.where, f"{found} bytes where {file.nbytes} were written")
            length = header_length(storage.read(file.name, 0, 8), file.nbytes, self.where)
            header = storage.read(file.name, 0, length)
            self.entries = parse_header(header, file.nbytes, self.where)
            last = next(reversed(self.entries.values()))
            self.sums = storage.read(file.name, last.begin, last.end)
        digest = xxhash.xxh3_64(header)
        digest.update(self.sums)
        if digest.hexdigest() != file.digest:
            raise damaged(self.where, "a header or checksums that are not what was written")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Tells what goes wrong while this file is read."""
        with telling(f"read {self.where}"):
            try:
                yield
            except FileNotFoundError:
                raise damaged(self.where, "no such file") from None

    def read_into(self, spans: Sequence[Span]) -> None:
        with self.reading():
            self.storage.read_into(self.file.name, spans)

    def checksums(self, entry: Entry) -> bytes:
        """Of all segments of an entry, one after the other."""
        return self.sums[8 * entry.segment : 8 * (entry.segment + segment_count(entry.end - entry.begin))]

    def entry(self, key: str, dtype: Dtype, box: Box) -> Entry:
        """Where a box is in this file; the header must agree with what the manifest says of it."""
        entry = self.entries.get(key)
        shape = box.sizes if dtype.safetensors else tuple(stored_shape(dtype, box.sizes))
        name = dtype.safetensors or "U8"
        if entry is None or entry.shape != shape or entry.dtype != name:
            found = f"{entry.dtype} {entry.shape}" if entry else "nothing"
            raise damaged(self.where, f"{found} under {key!r} where the manifest has {name} {shape}")
        if entry.end - entry.begin != box.numel * dtype.itemsize:
            raise damaged(self.where, f"{entry.end - entry.begin} bytes for {key!r}")
        return entry


class _Run(NamedTuple):
    """Bytes of a stored box that lie in one run in the file, of whole segments.

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


class _Batch:
    """Spans to read in one go, the segments that are complete with them, and copies to make once they are verified.

    Args:
        limit: of its bytes.
        scratch: buffers for what is not read in place; the batch takes one when it needs it, and gives it back.
    """

    def __init__(self, limit: int, scratch: list[bytearray]) -> None:
        self._limit = limit
        self.spans: list[Span] = []
        self.checks: list[tuple[Entry, int, Sequence[memoryview]]] = []
        self.nbytes = 0
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._scratch = scratch
        self._buffer: bytearray | None = None
        self._used = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether a run of that size may be added; a first one always may."""
        return not self.spans or self.nbytes + nbytes <= self._limit

    def add(self, entry: Entry, run: _Run) -> None:
        parts = [self._take(run.head), run.memory, self._take(run.tail)] if run.memory else [self._take(run.tail)]
        parts = [part for part in parts if part]
        if run.copy is not None:
            self._copies.append(run.copy(parts[0]))
        offset = run.offset
        self.checks += _segments(entry, offset, parts)
        for memory in parts:
            self.spans.append(Span(offset, memory))
            offset += memory.nbytes
        self.nbytes += run.nbytes

    def read(self, file: OpenFile) -> None:
        """Fills, verifies and copies; the batch is done with then."""
        file.read_into(self.spans)
        for entry, segment, parts in self.checks:
            if _sum(parts) != file.sums[8 * segment : 8 * segment + 8]:
                raise damaged(file.where, _failed_segment(entry, segment))
        with torch.no_grad():  # a thread has a grad mode of its own
            for target, source in self._copies:
                target.copy_(source)
        if self._buffer is not None:
            self._scratch.append(self._buffer)

    def _take(self, nbytes: int) -> memoryview:
        """Scratch memory. Fresh memory costs more than what is read into it, so buffers are used again."""
        if not nbytes:
            return memoryview(b"")
        if self._buffer is None:
            self._buffer = self._scratch.pop() if self._scratch else bytearray(self._limit + 2 * SEGMENT_BYTES)
        begin = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._used > len(self._buffer):  # thousands of crumbs, which alignment has made larger
            return memoryview(bytearray(nbytes))
        return memoryview(self._buffer)[begin : begin + nbytes]


def fetch(wants: Sequence[tuple[OpenFile, Want]], progress: Progress | None = None) -> int:
    """Reads all that is wanted into its targets; returns the bytes read.

    Args:
        progress: of the bytes that are wanted.

    Raises:
        CorruptionError: bytes that fail their checksum; targets may have changed by then.
    """
    by_file: defaultdict[OpenFile, list[Want]] = defaultdict(list)
    for file, want in wants:
        by_file[file].append(want)
    scratch: list[bytearray] = []  # at most two buffers more than there are threads: batches under way or being made
    failures: list[Exception] = []
    threads = max((threads_for(file.storage) for file in by_file), default=1)
    limit = max(map(_batch_bytes, by_file), default=0)
    slots = threading.Semaphore(threads + 1)  # batches that are under way or wait for a thread
    done = Counter(sum(want.wanted.numel * want.dtype.itemsize for _, want in wants), progress)
    nbytes = 0

    def run(batch: _Batch, file: OpenFile) -> None:
        try:
            batch.read(file)
            done.add(batch.nbytes)
        except Exception as error:
            failures.append(error)
        finally:
            slots.release()

    with torch.no_grad(), ThreadPoolExecutor(threads, "shardopt-read") as pool:
        for file, wanted in by_file.items():
            for batch in _batches(sorted(wanted, key=lambda want: want.entry.begin), limit, scratch):
                slots.acquire()
                if failures:
                    slots.release()  # or the files that follow would wait for it
                    break
                pool.submit(run, batch, file)
                nbytes += batch.nbytes
    if failures:
        raise failures[0]
    return nbytes


def threads_for(storage: Storage) -> int:
    """How many threads should read from it at a time."""
    return _FAR_THREADS if storage.is_remote else _THREADS


def _batch_bytes(file: OpenFile) -> int:
    return _FAR_BATCH_BYTES if file.storage.is_remote else _BATCH_BYTES


def check_all(wants: Sequence[tuple[OpenFile, Want]]) -> None:
    """Verifies every segment of the stored boxes that something is wanted of; changes nothing.

    Raises:
        CorruptionError: with all that is damaged.
    """
    boxes = {(id(file), want.entry.begin): (file, want.entry) for file, want in wants}
    problems = [problem for file, entry in boxes.values() for problem in damaged_segments(file, entry)]
    if problems:
        raise CorruptionError("a checkpoint is damaged; nothing was changed", problems)


def damaged_segments(
    file: OpenFile, entry: Entry, progress: Callable[[int], object] = lambda nbytes: None
) -> Iterator[Problem]:
    """The segments of one stored box that fail their checksums; reads all of it.

    Args:
        progress: gets the bytes of each piece that was read.
    """
    step = _batch_bytes(file)
    buffer = memoryview(bytearray(min(step, entry.end - entry.begin)))
    segment = entry.segment
    for begin in range(entry.begin, entry.end, step):
        chunk = buffer[: min(step, entry.end - begin)]
        file.read_into([Span(begin, chunk)])
        progress(chunk.nbytes)
        for i in range(0, chunk.nbytes, SEGMENT_BYTES):
            if xxhash.xxh3_64_digest(chunk[i : i + SEGMENT_BYTES]) != file.sums[8 * segment : 8 * segment + 8]:
                yield from damaged(file.where, _failed_segment(entry, segment)).problems
            segment += 1


def pieces_in_order(box: Box, itemsize: int) -> Iterator[Box]:
    """Boxes of bounded size that hold a box's elements one after the other in C order."""
    row_bytes = prod(box.sizes[1:]) * itemsize
    if not box.sizes or box.numel * itemsize <= _BATCH_BYTES:
        if box.numel:
            yield box
        return
    step = _BATCH_BYTES // row_bytes
    for begin in range(0, box.sizes[0], max(step, 1)):
        offsets = (box.offsets[0] + begin, *box.offsets[1:])
        if step:
            yield Box(offsets, (min(step, box.sizes[0] - begin), *box.sizes[1:]))
        else:
            for inner in pieces_in_order(Box(box.offsets[1:], box.sizes[1:]), itemsize):
                yield Box((offsets[0], *inner.offsets), (1, *inner.sizes))


def _failed_segment(entry: Entry, segment: int) -> str:
    return f"segment {segment - entry.segment} of {entry.key!r} with bytes that fail their checksum"


def _batches(wants: Sequence[Want], limit: int, scratch: list[bytearray]) -> Iterator[_Batch]:
    """Batches of at most `limit` bytes, or of one run."""
    batch = _Batch(limit, scratch)
    for want in wants:
        entry = want.entry
        nbytes = entry.end - entry.begin
        if nbytes <= SEGMENT_BYTES and want.wanted.sizes == want.sizes and _takes_bytes(want):
            # All of a small box, which is what most tensors of most checkpoints are.
            if not batch.has_room(nbytes):
                yield batch
                batch = _Batch(limit, scratch)
            memory = bytes_of(want.target)
            batch.spans.append(Span(entry.begin, memory))
            batch.checks.append((entry, entry.segment, (memory,)))
            batch.nbytes += nbytes
            continue
        for run in _direct(want, limit) if _is_one_run(want) else _through_scratch(want, limit):
            if not batch.has_room(run.nbytes):
                yield batch
                batch = _Batch(limit, scratch)
            batch.add(entry, run)
    if batch.spans:
        yield batch


def _is_one_run(want: Want) -> bool:
    """Whether the wanted part is contiguous in the stored box, and the target's memory is plain."""
    partial = [d for d, (size, of) in enumerate(zip(want.wanted.sizes, want.sizes, strict=True)) if size != of]
    last = partial[-1] if partial else 0
    return all(size == 1 for size in want.wanted.sizes[:last]) and _takes_bytes(want)


def _takes_bytes(want: Want) -> bool:
    """Whether the target's memory takes the stored bytes as they are."""
    return want.target.dtype == torch_dtype(want.dtype) and is_plain_memory(want.target)


def _direct(want: Want, limit: int) -> Iterator[_Run]:
    begin = _offset(want.wanted.offsets, want.sizes) * want.dtype.itemsize
    memory = bytes_of(want.target)
    end = begin + memory.nbytes
    total = want.entry.end - want.entry.begin
    while begin < end:
        # One run ends where a segment ends, so that no segment is read twice.
        stop = min(end, begin - begin % SEGMENT_BYTES + limit)
        head, tail = begin % SEGMENT_BYTES, min(-stop % SEGMENT_BYTES, total - stop)
        yield _Run(want.entry.begin + begin - head, head, memory[: stop - begin], tail)
        memory = memory[stop - begin :]
        begin = stop


def _through_scratch(want: Want, limit: int) -> Iterator[_Run]:
    return _scratch_rows(want, limit, 0, want.sizes, want.wanted, want.target)


def _scratch_rows(
    want: Want, limit: int, base: int, sizes: tuple[int, ...], wanted: Box, target: Tensor
) -> Iterator[_Run]:
    """Reads blocks of whole rows, of the outermost dimension whose rows fit the scratch buffer."""
    row_bytes = prod(sizes[1:]) * want.dtype.itemsize
    first, count = (wanted.offsets[0], wanted.sizes[0]) if sizes else (0, 1)
    if row_bytes > limit:
        inner = Box(wanted.offsets[1:], wanted.sizes[1:])
        for i in range(count):
            yield from _scratch_rows(want, limit, base + (first + i) * row_bytes, sizes[1:], inner, target[i])
        return
    total = want.entry.end - want.entry.begin
    step = max(limit // row_bytes, 1)
    for i in range(0, count, step):
        rows = min(step, count - i)
        begin = base + (first + i) * row_bytes
        stop = begin + rows * row_bytes
        aligned = begin - begin % SEGMENT_BYTES
        nbytes = min(-(-stop // SEGMENT_BYTES) * SEGMENT_BYTES, total) - aligned
        part = target.narrow(0, i, rows) if sizes else target
        box = Box((0, *wanted.offsets[1:]), (rows, *wanted.sizes[1:])) if sizes else None
        shape = (rows, *sizes[1:]) if sizes else ()
        copy = partial(_copy_of, part, begin - aligned, want.dtype, shape, box)
        yield _Run(want.entry.begin + aligned, 0, None, nbytes, copy)


def _copy_of(
    target: Tensor, begin: int, dtype: Dtype, shape: tuple[int, ...], box: Box | None, memory: memoryview
) -> tuple[Tensor, Tensor]:
    """A target, and the tensor to fill it with: the part `box` of one of that shape, which begins in `memory`."""
    source = tensor_over(memory, begin, dtype, shape)
    return target, source if box is None else narrowed(source, box)


def _segments(
    entry: Entry, offset: int, parts: Sequence[memoryview]
) -> Iterator[tuple[Entry, int, Sequence[memoryview]]]:
    """The segments that the bytes of `parts`, from file offset `offset` on, consist of: number in the file, memory."""
    segment = entry.segment + (offset - entry.begin) // SEGMENT_BYTES
    open_parts: list[memoryview] = []
    room = SEGMENT_BYTES
    for part in parts:
        while part.nbytes:
            piece, part = part[:room], part[room:]
            open_parts.append(piece)
            room -= piece.nbytes
            if room == 0:
                yield entry, segment, open_parts
                segment, open_parts, room = segment + 1, [], SEGMENT_BYTES
    if open_parts:
        yield entry, segment, open_parts


def _sum(parts: Sequence[memoryview]) -> bytes:
    if len(parts) == 1:
        return xxhash.xxh3_64_digest(parts[0])
    running = xxhash.xxh3_64()
    for part in parts:
        running.update(part)
    return running.digest()


def _offset(index: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    offset = 0
    for i, size in zip(index, sizes, strict=True):
        offset = offset * size + i
    return offset
