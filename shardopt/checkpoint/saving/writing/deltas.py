"""Deltas of boxes of which a few elements have changed since an earlier save. No communication."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from shardopt.checkpoint.format.constants import DELTA_INDEX_PREFIX, DELTA_PREFIX, DTYPES, SEGMENT_BYTES
from shardopt.checkpoint.format.delta import DeltaBuilder, index_bytes, word_bytes
from shardopt.checkpoint.format.manifest import StoredEntry
from shardopt.checkpoint.format.tensor_bytes import tensor_over
from shardopt.checkpoint.saving.planning.save_plan import WriteRequest
from shardopt.checkpoint.saving.writing.base import Base
from shardopt.checkpoint.saving.writing.earlier import Earlier, OnDisk, TensorBytes
from shardopt.errors import CheckpointError
from shardopt.sharding.box import whole

_MOST_DELTAS = 64  # on a box
_DELTA_COST = 32 << 10  # bytes that a restore reads in the time that a delta takes besides its bytes
_HEADER_BYTES = 512  # of both entries of a delta in a file's header
_READ_SEGMENTS = 8  # at a time, which are compared while they are in the core's cache
_WORTH = 0.5  # of the bytes of changed rows: a delta takes longer to find, and to read, than as many bytes of rows
_WORTH_TO_FOLLOWERS = 0.8  # of the bytes of a box

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

    The earlier bytes are read again, so the base must be on a disk, or kept in memory.

    Args:
        changed_bytes: of rows that have changed, at most.
        is_bounded: whether there may be no more deltas on the box than restores take well.
    """
    fixed = index_bytes(request.nbytes) + _HEADER_BYTES
    budget = int(_WORTH * changed_bytes if is_bounded else _WORTH_TO_FOLLOWERS * request.nbytes) - fixed
    found = _as_a_whole(base, request) if budget > 0 else None
    if found is None or (base.source.storage.is_remote and isinstance(found[2], OnDisk)):
        return None
    number, entry, stored = found
    if is_bounded:
        # A restore takes at most about as long as two reads of the box. For a small one, deltas would take longer.
        budget = min(budget, request.nbytes - sum(stored.delta_bytes) - _DELTA_COST * (1 + len(entry.deltas)))
        if budget <= 0 or len(entry.deltas) >= _MOST_DELTAS:
            return None
    try:
        built = _built(request, stored, memory, changed_bytes, budget)
    except CheckpointError as error:
        _log.warning("what an earlier save has is written again: %s", error)
        return None
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


def _built(
    request: WriteRequest, stored: Earlier, memory: TensorBytes, changed_bytes: int, budget: int
) -> tuple[bytearray, bytearray] | None:
    """Returns index and body of a delta; None if the body would have more bytes than `budget`."""
    nbytes, before = request.nbytes, stored.checksums
    bounds = [(begin, min(begin + SEGMENT_BYTES, nbytes)) for begin in range(0, nbytes, SEGMENT_BYTES)]
    sums = [before[at : at + 8] for at in range(0, len(before), 8)]

    def compared(runs: Iterable[Sequence[int]], most: int) -> DeltaBuilder | None:
        builder = DeltaBuilder(nbytes, word_bytes(request.dtype.safetensors or ""))
        with stored.reading() as read:
            for run in runs:
                begin, end = bounds[run[0]][0], bounds[run[-1]][1]
                builder.add(run[0], read(begin, end), memory.read(begin, end))
                if builder.nbytes > most:
                    return None
        return builder

    # One changed segment first: where most of it has changed, the others need not be looked at.
    sample = next((i for i, each in enumerate(bounds) if memory.digest(*each) != sums[i]), None)
    if sample is None:
        return None
    if len(bounds) > 1 and compared([[sample]], budget * SEGMENT_BYTES // changed_bytes) is None:
        return None
    after = [memory.digest(*each) for each in bounds]
    builder = compared(_runs([i for i in range(len(bounds)) if after[i] != sums[i]]), budget)
    return None if builder is None else builder.build(before, b"".join(after))


def _runs(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yields adjacent numbers, a few at a time."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1 or i - begin == _READ_SEGMENTS:
            yield numbers[begin:i]
            begin = i


def _over(data: bytearray) -> Tensor:
    """Returns a tensor over bytes."""
    return tensor_over(memoryview(data), 0, DTYPES["uint8"], (len(data),))
