"""The costs of a table's cuts: bytes that ranks hold, and seconds that a step takes them.

Here are the table with N rows of D elements, R ranks, and a piece of h rows times w elements, f = h / N of the rows.
An element takes e bytes in the table and x bytes in exchanges (all tables travel in the widest of their dtypes), an id
8 bytes. The optimizer keeps s bytes for each element and r bytes for each row of a piece.

**Rows of a step.** A rank draws n = batch * pooling ids. The id of popularity i has the probability p_i, proportional
to i ** -skew: 0 is uniform, 1 is Zipf's law. Popularity is taken to be independent of the number of a row. So a rank
has ids of d(n) = sum of 1 - (1 - p_i) ** n different rows, of which a piece has f * d(n). All ranks together touch
u = d(R * n) rows.

**Vectors of a step.** With P parts of rows, a rank wants v = P * batch sums of bags, one of each bag from each part, if
these are fewer than its ids and the table's rows (`Bags.are_summed_afar`). It then sends m = n ids, and v lengths.
Else, and where nothing is pooled, it wants different rows: v = m = d(n).

**Bytes held** by the rank of a piece: h * (w * (e + s) + r).

**Bytes exchanged**, sent and received. The exchange of `route.py` has one message of ids, one of vectors and one of
gradients for each pair of ranks. Between one asking rank and one piece these are y = f * (8 * k + 2 * v * w * x) bytes,
where k = m + v numbers travel for sums, and k = m for rows. The holder has them with R - 1 others. Each rank also asks,
for its own ids: the sum of y over the pieces of all other ranks. C parts of columns thus cost C times the ids.

**Memory traffic** of the holder. It reads R * f * m rows and writes the vectors, whose gradients are written, and read
for each of these rows: f * R * w * (m * (e + x) + 2 * v * x) bytes. To add up gradients it sorts ids, in eight passes
that read and write them: f * R * m * 128 bytes. An update reads and writes rows and state:
f * u * 2 * (w * (e + s) + r) bytes.

**Parts of columns** exchange moments that are one for each row: those of touched rows, by one all-reduce. That is
2 * f * u * r bytes, and `piece_seconds` once more for each piece.

**A replica** asks nobody: it reads m rows. It sends ids, and the gradients of its vectors, to R - 1 ranks and receives
theirs, 2 * (R - 1) * (8 * k + v * D * x) bytes, writes and reads these, R * (v + m) * D * x bytes, sorts all ids, and
updates all u rows.

**Seconds** of a rank: bytes exchanged / exchange_bandwidth + memory traffic / memory_bandwidth + `piece_seconds` for
each of its pieces, as each has kernels to launch. The last is why small tables stay whole. Nothing overlaps. Pooling is
left out: it takes each rank the same, however tables are cut. The cost of a plan is the seconds of its busiest rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXCHANGE_BANDWIDTH, MEMORY_BANDWIDTH = 25e9, 2e12
PIECE_SECONDS, NARROWEST = 20e-6, 16

_ID_BYTES = 8
_SORT_BYTES = 128
_COUNTED_ALONE = 64  # the most popular ids; others in buckets, each 5% wider than the one before it
_BUCKET_RATIO = 1.05

Named = Literal["rows", "columns", "replicated"]


class Shape(NamedTuple):
    """A cut in `rows` times `columns` pieces.

    Args:
        rows, columns: into how many parts each is cut.
        ranks: of the pieces; None where a search chooses them, or the name says them.
        name: of a cut over all ranks, in their order: that of `Table.cut`.
    """

    rows: int
    columns: int
    ranks: tuple[int, ...] | None = None
    name: Named | None = None


class TableSize(NamedTuple):
    """The size and use of a table, on which its costs depend.

    Args:
        name: of the table.
        rows, columns: N and D.
        element_bytes: e.
        pooling: ids per sample.
        skew: of the popularity of ids.
        element_state, row_state: s and r, in bytes.
        kept: the only cut that is allowed; None if it is to be chosen.
        is_pooled: whether the vectors of a sample are, in a dtype of at least 4 bytes.
    """

    name: str
    rows: int
    columns: int
    element_bytes: int
    pooling: float
    skew: float
    element_state: int
    row_state: int
    kept: Shape | None = None
    is_pooled: bool = True

    @property
    def bytes(self) -> int:
        """The bytes of the whole table with its state."""
        return self.rows * (self.columns * (self.element_bytes + self.element_state) + self.row_state)


class Job(NamedTuple):
    """The ranks, and what a step is like.

    Args:
        memory: bytes of each rank for tables and their state.
        batch: samples per rank.
        travel_bytes: x.
        exchange_bandwidth: bytes/s that a rank sends and receives.
        memory_bandwidth: bytes/s that a rank reads and writes.
        piece_seconds: that a piece costs its rank in a step, however small it is.
        narrowest: the fewest columns of a piece.
    """

    memory: tuple[int, ...]
    batch: float
    travel_bytes: int
    exchange_bandwidth: float
    memory_bandwidth: float
    piece_seconds: float
    narrowest: int

    @property
    def ranks(self) -> int:
        return len(self.memory)


@dataclass(frozen=True)
class Candidate:
    """One cut of one table.

    Args:
        shape: of the cut.
        rows, columns: of the table.
        copies: of each piece: as many as ranks if the table is replicated, otherwise one.
        everywhere: seconds of each rank, with a piece or without.
        total: seconds of all ranks together.
        per_row, per_element: seconds of a piece for each of its rows, and for each of its elements.
        per_piece: seconds of a piece besides.
        row_bytes, element_bytes: bytes held for each row, and for each element.
    """

    shape: Shape
    rows: int
    columns: int
    copies: int
    everywhere: float
    total: float
    per_row: float
    per_element: float
    per_piece: float
    row_bytes: int
    element_bytes: int

    @property
    def count(self) -> int:
        """The number of pieces."""
        return self.shape.rows * self.shape.columns * self.copies

    @property
    def is_fixed(self) -> bool:
        """Whether the shape says which ranks have the pieces."""
        return bool(self.shape.name) or self.shape.ranks is not None

    @cached_property
    def seconds(self) -> Floats:
        """The seconds of each piece, those of the first part of rows first."""
        rows, elements = self._parts
        return np.where(elements > 0, self.per_piece + rows * self.per_row + elements * self.per_element, 0.0)

    @cached_property
    def bytes(self) -> Ints:
        """The bytes of each piece."""
        rows, elements = self._parts
        return rows * self.row_bytes + elements * self.element_bytes

    @cached_property
    def most_seconds(self) -> float:
        """The seconds of the largest piece, which is the first."""
        height, width = self._largest
        return self.per_piece + height * self.per_row + height * width * self.per_element

    @cached_property
    def most_bytes(self) -> int:
        """The bytes of the largest piece."""
        height, width = self._largest
        return height * self.row_bytes + height * width * self.element_bytes

    @property
    def _largest(self) -> tuple[int, int]:
        return -(-self.rows // self.shape.rows), -(-self.columns // self.shape.columns)

    @cached_property
    def _parts(self) -> tuple[Ints, Ints]:
        """The rows of each piece, and its elements."""
        heights, widths = chunks(self.rows, self.shape.rows)[:, None], chunks(self.columns, self.shape.columns)
        rows, elements = (heights * (widths > 0)).ravel(), (heights * widths).ravel()
        return np.tile(rows, self.copies), np.tile(elements, self.copies)


def chunks(size: int, parts: int) -> Ints:
    """Returns the sizes of as many parts, as torch.chunk cuts; the last ones may be smaller, or 0."""
    each = -(-size // parts)
    sizes = np.zeros(parts, dtype=np.int64)
    sizes[: size // each] = each
    sizes[size // each : size // each + 1] = size % each
    return sizes


def distinct_rows(rows: int, ids: float, skew: float) -> float:
    """Returns how many different rows are expected among `ids` of them: d(ids) of the module's text.

    In ten digits. Logarithms and powers have other last bits on other CPUs, and a search that compares sums of them
    would find other plans there.
    """
    return float(f"{_distinct_rows(rows, ids, skew):.10g}")


def _distinct_rows(rows: int, ids: float, skew: float) -> float:
    if skew == 0 and rows > 1:
        return float(min(ids, -rows * math.expm1(ids * math.log1p(-1 / rows))))
    alone = np.arange(1, min(rows, _COUNTED_ALONE) + 1, dtype=np.float64)
    first, count = alone, np.ones_like(alone)
    if rows > _COUNTED_ALONE:
        buckets = int(np.ceil(np.log(rows / _COUNTED_ALONE) / np.log(_BUCKET_RATIO)))
        edges = _COUNTED_ALONE * (rows / _COUNTED_ALONE) ** (np.arange(buckets + 1) / buckets)
        first, count = np.append(first, np.sqrt(edges[:-1] * edges[1:])), np.append(count, np.diff(edges))
    weight = first**-skew
    share = np.minimum(weight / (weight * count).sum(), 1 - 2**-53)
    return float(min(rows, ids, (count * -np.expm1(ids * np.log1p(-share))).sum()))


def candidates(table: TableSize, job: Job) -> list[Candidate]:
    """Returns the cuts of a table among which a plan chooses, those with the fewest total seconds first.

    Rows are cut in 1, 2, 4, ... parts, or over all ranks, and columns too, no narrower than `job.narrowest`. A grid
    with several parts of columns is left out if as many parts of rows alone are no larger: it sends more ids for
    nothing.
    """
    different = distinct_rows(table.rows, job.batch * table.pooling, table.skew)
    touched = distinct_rows(table.rows, job.batch * table.pooling * job.ranks, table.skew)
    shapes = [table.kept] if table.kept else _shapes(table, job)
    made = [
        (_replicas if shape.name == "replicated" else _cut)(
            table, job, shape, _asked(table, job, shape.rows, different), touched
        )
        for shape in shapes
    ]
    return sorted(made, key=lambda each: (each.total, each.count))


def _shapes(table: TableSize, job: Job) -> Iterator[Shape]:
    ranks = job.ranks
    parts = sorted({*(1 << power for power in range(ranks.bit_length()) if 1 << power <= ranks), ranks})
    if ranks > 1:
        yield Shape(ranks, 1, None, "rows")
        yield Shape(1, 1, None, "replicated")
    for columns in parts:
        width = -(-table.columns // columns)
        if columns > 1 and (table.columns // columns < job.narrowest or (columns - 1) * width >= table.columns):
            break
        for rows in parts:
            pieces, height = rows * columns, -(-table.rows // rows)
            if pieces > ranks:
                break
            if (rows - 1) * height >= table.rows:
                continue  # a part would be empty
            flat = -(-table.rows // pieces)
            is_larger = height * width >= flat * table.columns and (pieces - 1) * flat < table.rows
            if columns > 1 and is_larger and _asked(table, job, rows, 0.0).vectors == 0:
                continue  # as many parts of rows are no larger, and send no more vectors
            if columns == ranks > 1:
                yield Shape(1, ranks, None, "columns")
            elif rows < ranks or ranks == 1:
                yield Shape(rows, columns)


class _Asked(NamedTuple):
    """Numbers that a rank sends in a step, k in all; they stand for m rows, and give v vectors."""

    numbers: float
    rows: float
    vectors: float


def _asked(table: TableSize, job: Job, parts: int, different: float) -> _Asked:
    ids, sums = job.batch * table.pooling, parts * job.batch
    if table.is_pooled and sums < min(ids, table.rows):
        return _Asked(ids + sums, ids, sums)
    return _Asked(different, different, different)


def _cut(table: TableSize, job: Job, shape: Shape, asked: _Asked, touched: float) -> Candidate:
    exchanges = job.ranks > 1
    others = exchanges * (job.ranks - 2)  # the holder meets R - 1 ranks, and in its own asking one piece less
    x, width = job.travel_bytes, table.element_bytes + table.element_state
    shares = table.row_state if shape.columns > 1 else 0
    piece_seconds = job.piece_seconds * (2 if shares else 1)
    per_row = (others * asked.numbers * _ID_BYTES + 2 * touched * shares) / job.exchange_bandwidth
    per_row += (job.ranks * asked.rows * _SORT_BYTES + 2 * touched * table.row_state) / job.memory_bandwidth
    traffic = job.ranks * (asked.rows * (table.element_bytes + x) + 2 * asked.vectors * x) + 2 * touched * width
    per_element = others * asked.vectors * 2 * x / job.exchange_bandwidth + traffic / job.memory_bandwidth
    used = _parts_used(table.columns, shape.columns)
    sent = asked.numbers * _ID_BYTES * used + 2 * asked.vectors * table.columns * x
    everywhere = exchanges * sent / job.exchange_bandwidth
    pieces = used * _parts_used(table.rows, shape.rows)
    total = job.ranks * everywhere + per_row * used + per_element * table.columns + piece_seconds * pieces
    per_row, per_element = per_row / table.rows, per_element / table.rows
    of_piece = per_row, per_element, piece_seconds, table.row_state, width
    return Candidate(shape, table.rows, table.columns, 1, everywhere, total, *of_piece)


def _replicas(table: TableSize, job: Job, shape: Shape, asked: _Asked, touched: float) -> Candidate:
    ranks, columns, x = job.ranks, table.columns, job.travel_bytes
    width = table.element_bytes + table.element_state
    exchanged = 2 * (ranks - 1) * (_ID_BYTES * asked.numbers + asked.vectors * columns * x)
    traffic = asked.rows * columns * table.element_bytes + ranks * (asked.vectors + asked.rows) * columns * x
    traffic += ranks * asked.rows * _SORT_BYTES
    traffic += 2 * touched * (columns * width + table.row_state)
    seconds = exchanged / job.exchange_bandwidth + traffic / job.memory_bandwidth + job.piece_seconds
    of_piece = 0.0, 0.0, 0.0, table.row_state, width
    return Candidate(shape, table.rows, columns, ranks, seconds, ranks * seconds, *of_piece)


def _parts_used(size: int, parts: int) -> int:
    return -(-size // -(-size // parts))
