"""Finds the rows of a box that have changed since an earlier save, by a number of each row that is kept in memory.

    row     an index of the first dimension; N rows of R bytes
    print   64 bits of a row: the sum of w_j (x_j ^ x_j >> 29) mod 2^64 over its words x_j of 8 bytes, each w_j odd;
            of a row of 1, 2, 4 or 8 bytes, the row itself

Prints belong to one save. The next one that has it as its base computes them again, of all rows, and finds each row
that anything has changed: an optimizer, a load, or a write that no counter of torch sees. So nobody has to say what he
changes, and the earlier bytes are not read. A row that changed at random keeps its print once in 2^64, and once in 2^30
if only signs of elements changed. The checksums of segments show it where no other row of the segment has changed.

Source: Carter, Wegman, Universal Classes of Hash Functions (1979), as sums of products in Lemire, Kaser, Strongly
Universal String Hashing is Fast (2014). The shift lets an upper bit count in the lower half too, since a product with a
high bit has few bits of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.saving.planning.save_plan import WriteRequest
from shardopt.checkpoint.saving.writing.earlier import TensorBytes
from shardopt.sharding.box import Box

Array = NDArray[Any]
Rows = tuple[int, int]
"""The first of some rows of a box, and their end."""

_LEAST_ROWS = 1024  # of fewer, the earlier bytes are compared as fast
_READ_BYTES = 8 * SEGMENT_BYTES  # at a time
_CHUNK_BYTES = 256 << 10  # computed at a time, in a core's cache
_MOST_CHANGED = 2  # of the rows, one in so many: of more, rows are not what changes
_PAUSE = 16  # saves, after which rows of such a box may be tried again
_SHIFT = np.uint64(29)  # not 32, by which the signs of two floats in a word would cancel each other


class RowPrints:
    """The prints of boxes at the last save of one series. Holds at most 8 bytes for each row.

    Begin each save with `begin`. What is noted for a save counts once a later one has it as its base, so a save that
    fails changes nothing. Boxes that a save does not come to are forgotten.
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[str, Box], _Prints] = {}
        self._paused: dict[tuple[str, Box], int] = {}
        self._save_id = ""

    def begin(self, base_id: str, save_id: str) -> None:
        """Begins a save, and forgets the prints of other saves than its base."""
        self._save_id = save_id
        self._boxes = {place: each for place, each in self._boxes.items() if each.settle(base_id)}
        self._paused = {place: left - 1 for place, left in self._paused.items() if left > 1}

    def forget(self) -> None:
        """Forgets everything."""
        self._boxes, self._paused = {}, {}

    def keep(self, request: WriteRequest) -> None:
        """Notes that no row of a box has changed."""
        known = self._boxes.get(_place(request))
        if known is not None:
            known.note(self._save_id, None)

    def add(self, request: WriteRequest, memory: TensorBytes) -> None:
        """Notes the prints of a box at this save; not of one with few rows, or without a second dimension."""
        if _has_rows(request) and _place(request) not in self._paused:
            self._boxes[_place(request)] = _Prints(request, memory, self._save_id)

    def knows(self, request: WriteRequest) -> bool:
        """Whether the prints of a box at the base are known."""
        return _place(request) in self._boxes

    def changed(self, request: WriteRequest, memory: TensorBytes, within: Sequence[Rows]) -> Array | None:
        """Returns the numbers of the rows of a box that differ from the base, ascending.

        Notes the prints at this save. If most rows have changed, it returns None, and forgets the box.

        Args:
            within: ascending ranges that have all rows that may differ.
        """
        found = self._boxes[_place(request)].changed(request, memory, within)
        if found is None:
            del self._boxes[_place(request)]
            self._paused[_place(request)] = _PAUSE
            return None
        self._boxes[_place(request)].note(self._save_id, found)
        return found[0]


class _Prints:
    """The prints of a box at a save, and what differs from them at the next one, which may yet fail."""

    def __init__(self, request: WriteRequest, memory: TensorBytes, save_id: str) -> None:
        self._save_id, self._next_id = "", save_id
        self._prints = np.concatenate([each for _, each in _prints(request, memory, [(0, request.box.sizes[0])])])
        self._next: tuple[Array, Array] | None = None

    def settle(self, base_id: str) -> bool:
        """Says whether these are prints of a save; takes over the next ones if they are."""
        if self._next_id == base_id:
            self._save_id = base_id
            if self._next is not None:
                rows, prints = self._next
                self._prints[rows] = prints
        self._next_id, self._next = "", None
        return self._save_id == base_id

    def note(self, save_id: str, changed: tuple[Array, Array] | None) -> None:
        self._next_id, self._next = save_id, changed

    def changed(self, request: WriteRequest, memory: TensorBytes, within: Sequence[Rows]) -> tuple[Array, Array] | None:
        """Returns the changed rows and their prints; None once most of the rows that were looked at have changed."""
        rows, prints = [np.empty(0, np.int64)], [self._prints[:0]]
        changed = looked_at = 0
        for begin, now in _prints(request, memory, within):
            here = np.flatnonzero(now != self._prints[begin : begin + len(now)])
            changed, looked_at = changed + len(here), looked_at + len(now)
            if changed * _MOST_CHANGED > looked_at:
                return None
            rows.append(here + begin)
            prints.append(now[here])
        return np.concatenate(rows), np.concatenate(prints)


def row_bytes(request: WriteRequest) -> int:
    """Returns the bytes of a row of a box."""
    return prod(request.box.sizes[1:]) * request.dtype.itemsize


def _place(request: WriteRequest) -> tuple[str, Box]:
    return request.key, request.box


def _has_rows(request: WriteRequest) -> bool:
    sizes = request.box.sizes
    return len(sizes) > 1 and sizes[0] >= _LEAST_ROWS and 0 < row_bytes(request) <= SEGMENT_BYTES


def _prints(request: WriteRequest, memory: TensorBytes, within: Sequence[Rows]) -> Iterator[tuple[int, Array]]:
    """Yields the number of a first row, and the prints from there on, of ranges of rows."""
    size = row_bytes(request)
    step = max(_READ_BYTES // size, 1)
    for first, last in within:
        for begin in range(first, last, step):
            end = min(begin + step, last)
            yield begin, prints_of(memory.read(begin * size, end * size), size)


def prints_of(rows: memoryview, size: int) -> Array:
    """Computes the print of each row, [N], from N rows of `size` bytes."""
    if size in (1, 2, 4, 8):
        return np.frombuffer(rows, f"<u{size}").copy()
    words = -(-size // 8)
    if size % 8:
        padded = np.zeros((rows.nbytes // size, 8 * words), np.uint8)
        padded[:, :size] = np.frombuffer(rows, np.uint8).reshape(-1, size)
        data = padded.view("<u8")
    else:
        data = np.frombuffer(rows, "<u8").reshape(-1, words)
    weights = _weights(words)
    prints = np.empty(len(data), np.uint64)
    step = max(_CHUNK_BYTES // (8 * words), 1)
    mixed = np.empty((min(step, len(data)), words), np.uint64)
    for begin in range(0, len(data), step):
        chunk = data[begin : begin + step]
        into = mixed[: len(chunk)]
        np.right_shift(chunk, _SHIFT, out=into)
        np.bitwise_xor(chunk, into, out=into)
        np.einsum("ij,j->i", into, weights, out=prints[begin : begin + step])
    return prints


@lru_cache(maxsize=64)
def _weights(count: int) -> Array:
    """Returns odd numbers of 64 bits: SplitMix64 of 1 to `count`."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    weights: Array = numbers ^ numbers >> np.uint64(31) | np.uint64(1)
    return weights
