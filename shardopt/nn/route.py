"""Routes ids to the ranks that hold their rows, and vectors and gradients back along the same way.

G ranks, T tables; table t has N_t rows of D_t elements, cut into pieces as `cuts.py` says. A rank asks for U_t
different rows of table t, each rank that has a piece of them for its columns, and is asked for rows of its own pieces.
Who holds a replica that the rank does not fetch from hears of the rows too, as it is sent their gradients. Everything
travels sorted by rank, then by table, then by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain, pairwise
from zlib import crc32

import torch
from torch import Tensor

from shardopt.nn.cuts import Piece, Pieces
from shardopt.nn.table import Table
from shardopt.ranks import Ranks

Blocks = Sequence[Sequence[Tensor]]
"""For each table the rows of it that travel, one block for each rank that takes part, ascending."""

Order = list[list[int]]
"""For each rank the tables of which it gets a block, or sends one, ascending. So blocks are in the buffer."""


class Directory:
    """The tables of a module, and which ranks exchange their rows, as known before any lookup.

    Args:
        tables: T of them, the same on every rank.
        rank: the position of this rank.

    Attributes:
        tables: as they were given.
        described: what each table is, in words.
        bases: [T + 1], the first row of each table with all of them in turn, and the end.
        mine: this rank's piece of each table.
        holders: for each table the pieces of all ranks.
        sources: those among them from which this rank fetches.
        served: for each table the ranks that fetch from this one's piece.
        asked, asking, serving, fetched: who gets ids and gradients from this rank, and who sends it some; who gets
            vectors, and who sends some.
    """

    def __init__(self, tables: Sequence[Pieces], rank: int) -> None:
        every = range(len(tables[0].on))
        self.tables, self.mine = tables, [each.on[rank] for each in tables]
        self.described = [_described(each.table) for each in tables]
        self._fingerprint = crc32("\n".join(self.described).encode())
        self.bases = [0, *accumulate(each.table.num_embeddings for each in tables)]
        self.holders = [[piece for piece in each.on if piece is not None] for each in tables]
        self.sources = [
            [piece for piece in pieces if piece.replica == each.nearest[rank]]
            for pieces, each in zip(self.holders, tables, strict=True)
        ]
        self.served = [[q for q in every if each.serves(rank, q)] for each in tables]
        self.asked: Order = [[t for t, each in enumerate(tables) if each.on[q] is not None] for q in every]
        self.asking: Order = [self.asked[rank]] * len(every)
        self.serving: Order = [[t for t, each in enumerate(tables) if each.serves(rank, q)] for q in every]
        self.fetched: Order = [[t for t, each in enumerate(tables) if each.serves(q, rank)] for q in every]
        # No buffers, which would have no values where a module is made on "meta" and gets its memory later.
        self._starts, self._first = _starts(tables, self.bases)

    def requests(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Counts distinct keys, ascending, by part of rows and by rank.

        Returns:
            How many are in each part of each table, [sum of R_t + 1] int64, a zero after those of each table. And of
            how many each rank has a piece, [G, T].
        """
        if self._starts.device != keys.device:
            self._starts, self._first = self._starts.to(keys.device), self._first.to(keys.device)
        counts = torch.searchsorted(keys, self._starts).diff(append=self._starts.new_zeros(1))
        return counts, counts[self._first].masked_fill(self._first < 0, 0)

    def marked(self, faulty: Tensor) -> Tensor:
        """Returns what every rank sends if it is ready, which says what tables it has; -1 where `faulty`, a bool."""
        return torch.where(faulty, -1, self._fingerprint)

    def are_ready(self, marks: Sequence[int]) -> bool:
        """Whether the marks of all ranks say so, and that they have the same tables."""
        return all(mark == self._fingerprint for mark in marks)

    def by_part(self, counts: Sequence[int]) -> list[list[int]]:
        """Returns the counts of each part of each table, from all of them in turn."""
        ends = [0, *accumulate(len(each.row_starts) for each in self.tables)]
        return [[*counts[begin : end - 1]] for begin, end in pairwise(ends)]


def _described(table: Table) -> str:
    dtype = "" if table.dtype is None else f", {table.dtype}"
    return f"{table.name}: {table.num_embeddings} x {table.embedding_dim}{dtype}, cut {table.cut!r}"


def _starts(tables: Sequence[Pieces], bases: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the first row of each part of each table, with all tables in turn, and each one's end; and for each rank
    and table where in there its part is: [G, T], -1 without a piece. On the CPU.
    """
    ends = [0, *accumulate(len(each.row_starts) for each in tables)]
    starts = [base + row for base, each in zip(bases, tables, strict=False) for row in each.row_starts]
    first = [[-1 if p is None else at + p.part[0] for p in each.on] for at, each in zip(ends, tables, strict=False)]
    return torch.tensor(starts, dtype=torch.int64, device="cpu"), torch.tensor(first, device="cpu").T.contiguous()


@dataclass(frozen=True, slots=True)
class Route:
    """The exchanges of rows of one lookup.

    Args:
        ranks: that look up together.
        directory: of the tables.
        parts: for each table, how many of its U_t rows are in each part of its rows.
        got: for each table, how many rows each rank has of this one's piece; zeros without a piece.
        in_use: for each table, whether any rank passed ids for it, maybe none at all.
        positions: for each table, where among its U_t rows each id's is: the shape of the ids, int64. That of a
            padding id is U_t. None where this rank passed no ids.
        rows: for each table, which of this piece's rows other ranks have, [M_t] int64, those of rank 0 first; None
            without a piece.
    """

    ranks: Ranks
    directory: Directory
    parts: list[list[int]]
    got: list[list[int]]
    in_use: tuple[bool, ...]
    positions: tuple[Tensor | None, ...]
    rows: tuple[Tensor | None, ...]

    def fetch(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Fetches the rows that this rank requested, [U_t, D_t], from this rank's piece of each table. Collective."""
        known = self.directory
        sent = [
            [] if rows is None else _selected(table, rows, counts, to)
            for table, rows, counts, to in zip(tables, self.rows, self.got, known.served, strict=True)
        ]
        sizes = [
            [counts[piece.part[0]] * piece.shape[1] for piece in pieces]
            for counts, pieces in zip(self.parts, known.sources, strict=True)
        ]
        got = _travel(self.ranks, known.serving, sent, known.fetched, sizes, tables)
        return [
            _put_together(blocks, counts, each.widths).to(table.dtype)
            for blocks, counts, each, table in zip(got, self.parts, known.tables, tables, strict=True)
        ]

    def return_gradients(self, gradients: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """Sends back gradients of fetched rows, [U_t, D_t]. Collective.

        Returns:
            For each table of which this rank has a piece, its rows, [M_t], and their gradients, [M_t, W_t].
        """
        known = self.directory
        sent = [
            _taken_apart(torch.split(gradient, [*each.widths], dim=1), counts, pieces)
            for gradient, counts, each, pieces in zip(gradients, self.parts, known.tables, known.holders, strict=True)
        ]
        widths = [0 if piece is None else piece.shape[1] for piece in known.mine]
        sizes = [[count * width for count in counts] for counts, width in zip(self.got, widths, strict=True)]
        got = _travel(self.ranks, known.asked, sent, known.asking, sizes, gradients)
        return {
            t: (rows, torch.cat(got[t]).view(len(rows), widths[t]).to(gradients[t].dtype))
            for t, rows in enumerate(self.rows)
            if rows is not None
        }


def find_route(ranks: Ranks, directory: Directory, ids: Mapping[int, Tensor], faulty: Tensor) -> Route | None:
    """Finds the rows that every rank is asked for. Collective: two exchanges, of counts and of ids.

    The counts have to be known here to the program, not only to the device: it waits for them, once. Each row is asked
    for once, however often its id comes.

    Args:
        ranks: that look up together.
        directory: of the tables.
        ids: index of a table → its ids, of any shape, int64. Tables may be absent.
        faulty: whether something about this rank's ids is wrong; a bool without dimensions, on their device.

    Returns:
        None on every rank where some rank is faulty, or ranks have different tables.
    """
    tables = range(len(directory.tables))
    keys, inverse = _distinct(directory, ids, faulty.device)
    counts, asked = directory.requests(keys)
    for t in set(tables) - ids.keys():
        asked[:, t] = -1
    each = [1 + len(tables)] * ranks.size
    outgoing = torch.cat([directory.marked(faulty).expand(ranks.size, 1), asked], dim=1).flatten()
    incoming = ranks.all_to_all(outgoing, each, each).wait()
    on_host = torch.cat([incoming.view(ranks.size, -1).T.flatten(), counts]).tolist()
    marks, *incoming_counts = (on_host[t * ranks.size : (t + 1) * ranks.size] for t in range(1 + len(tables)))
    if not directory.are_ready(marks):
        return None
    got = [[max(count, 0) for count in of_ranks] for of_ranks in incoming_counts]

    parts = directory.by_part(on_host[ranks.size * (1 + len(tables)) :])
    begins = [0, *accumulate(map(sum, parts))]
    wanted = [
        _taken_apart([keys[begin:end] - base], counts, pieces)
        for (begin, end), base, counts, pieces in zip(
            pairwise(begins), directory.bases, parts, directory.holders, strict=False
        )
    ]
    arrived = _travel(ranks, directory.asked, wanted, directory.asking, got, [keys] * len(tables))
    rows = [
        None if piece is None else torch.cat(blocks) - piece.rows[0]
        for piece, blocks in zip(directory.mine, arrived, strict=True)
    ]
    positions = {
        t: (places - begins[t]).clamp(max=begins[t + 1] - begins[t]).view(ids[t].shape)
        for t, places in zip(ids, inverse, strict=True)
    }
    return Route(
        ranks,
        directory,
        parts,
        got,
        tuple(any(count >= 0 for count in of_ranks) for of_ranks in incoming_counts),
        tuple(positions.get(t) for t in tables),
        tuple(rows),
    )


def _distinct(directory: Directory, ids: Mapping[int, Tensor], device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns the distinct keys, ascending, and for each of `ids` the position of its key among them.

    A key is a row's place in all tables one after the other. That of padding is past the end, so that nobody is asked.
    """
    bases = directory.bases
    keys = [torch.empty(0, dtype=torch.int64, device=device)]
    for t, table_ids in ids.items():
        key = table_ids.flatten() + bases[t]
        padding = directory.tables[t].table.padding_idx
        keys.append(key if padding is None else key.masked_fill(table_ids.flatten() == padding, bases[-1]))
    distinct, inverse = torch.unique(torch.cat(keys), return_inverse=True)
    return distinct, torch.split(inverse, [len(each) for each in keys])[1:]


def _selected(table: Tensor, rows: Tensor, counts: Sequence[int], to: Sequence[int]) -> Sequence[Tensor]:
    """Returns the rows that some ranks want of this rank's piece: a block for each of them.

    Args:
        table: the piece.
        rows: that all ranks have, [M], those of rank 0 first.
        counts: how many each has.
        to: those that fetch from here.
    """
    if len(to) < len(counts):
        blocks = torch.split(rows, [*counts])
        rows = torch.cat([blocks[q] for q in to])
    return torch.split(table.index_select(0, rows), [counts[q] for q in to])


def _taken_apart(columns: Sequence[Tensor], counts: Sequence[int], pieces: Iterable[Piece]) -> Sequence[Tensor]:
    """Cuts rows of a table into the blocks of pieces.

    Args:
        columns: [U, ...] for each part of the columns; or one tensor, of which each gets all.
        counts: how many rows are in each part of them.
        pieces: that get a block each.
    """
    blocks = [torch.split(each, [*counts]) for each in columns]
    return [blocks[piece.part[1] % len(blocks)][piece.part[0]] for piece in pieces]


def _put_together(blocks: list[Tensor], counts: Sequence[int], widths: Sequence[int]) -> Tensor:
    """Puts rows of a table, [U, D], together from blocks of so many rows and columns, all columns of a part in turn."""
    if len(widths) == 1:
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).view(sum(counts), widths[0])
    of_part = [blocks[at : at + len(widths)] for at in range(0, len(blocks), len(widths))]
    rows = [
        torch.cat([block.view(count, width) for block, width in zip(part, widths, strict=True)], dim=1)
        for part, count in zip(of_part, counts, strict=True)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _travel(
    ranks: Ranks,
    to: Order,
    sent: Blocks,
    come_from: Order,
    sizes: Sequence[Sequence[int]],
    like: Sequence[Tensor],
) -> list[list[Tensor]]:
    """Sends blocks of rows to the ranks, and returns those received, flat. One exchange for all dtypes.

    Args:
        ranks: to exchange with.
        to, sent: who gets blocks of which tables, and the blocks.
        come_from, sizes: who sends blocks of which tables, and how many elements each has.
        like: for each table a tensor of the dtype and device of its rows.
    """
    # Types travel as the narrowest that holds them all, to which `cat` converts: nothing is rounded on the way.
    buffers = [like[0].new_empty(0, dtype=reduce(torch.promote_types, [each.dtype for each in like]))]
    sent_counts, got_counts, flat_sizes = [], [], []
    next_blocks, next_sizes = [iter(blocks) for blocks in sent], [iter(each) for each in sizes]
    for tables in to:
        blocks = [next(next_blocks[t]) for t in tables]
        sent_counts.append(sum(block.numel() for block in blocks))
        buffers += [block.reshape(-1) for block in blocks]
    for tables in come_from:
        own = [next(next_sizes[t]) for t in tables]
        got_counts.append(sum(own))
        flat_sizes += own
    arrived = ranks.all_to_all(torch.cat(buffers), sent_counts, got_counts).wait()
    got: list[list[Tensor]] = [[] for _ in like]
    for t, block in zip(chain.from_iterable(come_from), torch.split(arrived, flat_sizes), strict=True):
        got[t].append(block)
    return got
