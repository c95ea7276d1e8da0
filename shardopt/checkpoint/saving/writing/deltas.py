"""Deltas of boxes of which a few elements have changed since an earlier save. No communication."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from shardopt.checkpoint.format.constants import DELTA_INDEX_PREFIX, DELTA_PREFIX, DTYPES, SEGMENT_BYTES
from shardopt.checkpoint.format.delta import DeltaBuilder, index_bytes, word_bytes
from shardopt.checkpoint.format.manifest import StoredEntry
from shardopt.checkpoint.format.tensor_bytes import tensor_over
from shardopt.checkpoint.saving.planning.save_plan import WriteRequest
from shardopt.checkpoint.saving.writing.base import Base
from shardopt.checkpoint.saving.writing.earlier import Earlier, OnDisk, TensorBytes
from shardopt.checkpoint.saving.writing.row_prints import Array, RowPrints, row_bytes
from shardopt.errors import CheckpointError
from shardopt.sharding.box import whole

_MOST_DELTAS = 64  # on a box
_DELTA_COST = 32 << 10  # bytes that a restore reads in the time that a delta takes besides its bytes
_HEADER_BYTES = 512  # of both entries of a delta in a file's header
_READ_SEGMENTS = 8  # at a time, which are compared while they are in the core's cache
_WORTH = 0.5  # of the bytes of changed rows: a delta takes longer to find, and to read, than as many bytes of rows
_WORTH_TO_FOLLOWERS = 0.8  # of the bytes of a box
_RUN_WORDS = 8  # that lie together on average where it is rows that change, or half a row if that is less

_log = logging.getLogger("shardopt.checkpoint")


class BuiltDelta(NamedTuple):
    """The changes of a box of the base, by its number there: the entries to write."""

    number: int
    requests: tuple[WriteRequest, WriteRequest]

    @property
    def nbytes(self) -> int:
        return sum(request.nbytes for request in self.requests)


def delta_of(
    base: Base, request: WriteRequest, memory: TensorBytes, changed_bytes: int, is_bounded: bool
) -> BuiltDelta | None:
    """Returns the delta between what the base has of a box and what it is now; None where that does not pay.

    The earlier bytes are read again, so the base must be on a disk, or kept in memory; but not where it is known which
    rows have changed.

    Args:
        changed_bytes: of rows that have changed, at most.
        is_bounded: whether there may be no more deltas on the box than restores take well.
    """
    fixed = index_bytes(request.nbytes) + _HEADER_BYTES
    budget = int(_WORTH * changed_bytes if is_bounded else _WORTH_TO_FOLLOWERS * request.nbytes) - fixed
    prints = base.prints
    knows_rows = prints is not None and prints.knows(request)
    found = _as_a_whole(base, request) if budget > 0 or knows_rows else None
    if found is None:
        return None
    # Also where no delta is made: the next save asks for what this one has learned.
    rows = None if prints is None else _changed_rows(base, prints, request, found[2], memory)
    number, entry, stored = found
    if is_bounded:
        # A restore takes at most about as long as two reads of the box. For a small one, deltas would take longer.
        budget = min(budget, request.nbytes - sum(stored.delta_bytes) - _DELTA_COST * (1 + len(entry.deltas)))
        if budget <= 0 or len(entry.deltas) >= _MOST_DELTAS:
            return None
    built = None if rows is None else _built_of_rows(request, stored, memory, rows, budget)
    if built is None and not (base.source.storage.is_remote and isinstance(stored, OnDisk)):
        built = _built_from_bytes(base, request, stored, memory, changed_bytes, budget)
    if built is None:
        return None
    requests = [
        request._replace(dtype=DTYPES["uint8"], box=whole((len(data),)), inner=None, prefix=prefix, memory=_over(data))
        for prefix, data in zip((DELTA_INDEX_PREFIX, DELTA_PREFIX), built, strict=True)
    ]
    return BuiltDelta(number, (requests[0], requests[1]))


def _as_a_whole(base: Base, request: WriteRequest) -> tuple[int, StoredEntry, Earlier] | None:
    """Returns number, entry and file of a box of the base that is just the box of a request."""
    layout = base.layout_of(request)
    if layout is None or not request.box.sizes or request.prefix:
        return None
    begin = request.box.offsets[0]
    for first, _, number in base.rows_like(layout, request.box):
        entry = layout.entry(number)
        if first == begin and layout.boxes[number] == request.box == entry.box and not entry.is_patch:
            stored = base.stored(layout.files[number], request, entry)
            return None if stored is None else (number, entry, stored)
    return None


def _changed_rows(
    base: Base, prints: RowPrints, request: WriteRequest, stored: Earlier, memory: TensorBytes
) -> Array | None:
    """Returns the rows of a box that have changed, where their prints at the base are known.

    On remote storage earlier bytes are not read. So the first save there that finds a change begins with the prints.
    """
    if not prints.knows(request):
        if base.source.storage.is_remote:
            prints.add(request, memory)
        return None
    segments, size = _Segments(memory, request), row_bytes(request)
    ranges: list[tuple[int, int]] = []
    for run in _runs(segments.changed_since(stored.checksums)):
        begin, end = segments.bounds[run[0]][0] // size, -(-segments.bounds[run[-1]][1] // size)
        ranges.append((max(begin, ranges[-1][1]) if ranges else begin, end))
    return prints.changed(request, memory, ranges)


def _built_of_rows(
    request: WriteRequest, stored: Earlier, memory: TensorBytes, rows: Array, budget: int
) -> tuple[bytearray, bytearray] | None:
    """Returns index and body of a delta with all words of some rows, without the earlier bytes.

    None if the body would have more bytes than `budget`; or if a segment has changed and none of these rows is in it,
    as its checksum shows: then a reader would not get the bytes that `after` is of.
    """
    size, word, segments = row_bytes(request), word_bytes(request.dtype.safetensors or ""), _Segments(memory, request)
    if len(rows) * size > budget:
        return None
    changed = [*segments.changed_since(stored.checksums)]
    builder = DeltaBuilder(request.nbytes, word)
    for run in _runs(changed):
        begin, end = segments.bounds[run[0]][0], segments.bounds[run[-1]][1]
        here = rows[slice(*np.searchsorted(rows, (begin // size, -(-end // size))))]
        builder.add_rows(run[0], here, size // word, begin // word, memory.read(begin, end))
    if builder.nbytes > budget or not np.array_equal(builder.segments, changed):
        return None
    return builder.build(stored.checksums, memory.checksums)


def _built_from_bytes(
    base: Base, request: WriteRequest, stored: Earlier, memory: TensorBytes, changed_bytes: int, budget: int
) -> tuple[bytearray, bytearray] | None:
    """Returns index and body of a delta by comparison with the earlier bytes; None where they cannot be read.

    None also if the body would have more bytes than `budget`. If whole rows have changed, the next save asks for rows.
    """
    try:
        builder, after = _compared(request, stored, memory, changed_bytes, budget)
    except CheckpointError as error:
        _log.warning("what an earlier save has is written again: %s", error)
        return None
    if builder is None:
        return None
    words = row_bytes(request) // word_bytes(request.dtype.safetensors or "")
    if base.prints is not None and builder.count >= min(_RUN_WORDS, words / 2) * builder.runs:
        base.prints.add(request, memory)
    return builder.build(stored.checksums, after)


def _compared(
    request: WriteRequest, stored: Earlier, memory: TensorBytes, changed_bytes: int, budget: int
) -> tuple[DeltaBuilder | None, bytes]:
    """Returns what has changed, and the checksums now; None if the body would have more bytes than `budget`."""
    segments, before = _Segments(memory, request), stored.checksums

    def compared(runs: Iterable[Sequence[int]], most: int) -> DeltaBuilder | None:
        builder = DeltaBuilder(request.nbytes, word_bytes(request.dtype.safetensors or ""))
        with stored.reading() as read:
            for run in runs:
                begin, end = segments.bounds[run[0]][0], segments.bounds[run[-1]][1]
                builder.add(run[0], read(begin, end), memory.read(begin, end))
                if builder.nbytes > most:
                    return None
        return builder

    # One changed segment first: where most of it has changed, the others need not be looked at.
    sample = next(segments.changed_since(before), None)
    if sample is None:
        return None, b""
    if len(segments.bounds) > 1 and compared([[sample]], budget * SEGMENT_BYTES // changed_bytes) is None:
        return None, b""
    return compared(_runs(segments.changed_since(before)), budget), memory.checksums


class _Segments:
    """The segments of a box in memory."""

    def __init__(self, memory: TensorBytes, request: WriteRequest) -> None:
        nbytes = request.nbytes
        self._memory = memory
        self.bounds = [(begin, min(begin + SEGMENT_BYTES, nbytes)) for begin in range(0, nbytes, SEGMENT_BYTES)]

    def changed_since(self, before: bytes) -> Iterator[int]:
        """Yields the numbers of those that have other checksums."""
        return (i for i, each in enumerate(self.bounds) if self._memory.digest(*each) != before[8 * i : 8 * i + 8])


def _runs(found: Iterable[int]) -> Iterator[Sequence[int]]:
    """Yields adjacent numbers, a few at a time."""
    numbers, begin = [*found], 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1 or i - begin == _READ_SEGMENTS:
            yield numbers[begin:i]
            begin = i


def _over(data: bytearray) -> Tensor:
    """Returns a tensor over bytes."""
    return tensor_over(memoryview(data), 0, DTYPES["uint8"], (len(data),))
