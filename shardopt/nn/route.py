"""Routes ids to the ranks that hold their rows, and vectors and gradients back along the same way.

G ranks, T tables; table t has N_t rows of D_t elements, cut into pieces as `cuts.py` says. A rank asks for U_t
different rows of table t, each rank that has a piece of them for its columns, and is asked for rows of its own pieces.
Who holds a replica that the rank does not fetch from hears of the rows too, as it is sent their gradients. Everything
travels sorted by rank, then by table, then by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardopt.nn.cuts import Piece, Pieces
from shardopt.ranks import Ranks

Counts = list[list[int]]
"""[G][T]: the number of rows of each table sent to, or received from, each rank."""

Blocks = dict[tuple[int, int], Tensor]
"""Rank and table → rows of that table, [M, W], sent to or received from that rank."""


class Directory:
    """What a module knows of its tables before any lookup.

    Args:
        tables: T of them, the same on every rank.
        rank: the position of this rank.
    """

    def __init__(self, tables: Sequence[Pieces], rank: int) -> None:
        self.tables, self.rank = tables, rank
        self.bases = [0, *accumulate(each.table.num_embeddings for each in tables)]
        starts: list[int] = []
        first: list[list[int]] = [[] for _ in tables[0].on]  # of each rank and table, where in `starts` its part begins
        for base, each in zip(self.bases, tables, strict=False):
            for row, piece in zip(first, each.on, strict=True):
                row.append(-1 if piece is None else len(starts) + piece.part)
            starts += [base + row for row in each.row_starts]
        # No buffers, which would have no values where a module is made on "meta" and gets its memory later. The first
        # row of each part of each table, with all tables in turn, and each one's end:
        self._starts = torch.tensor(starts, dtype=torch.int64, device="cpu")
        self._first = torch.tensor(first, dtype=torch.int64, device="cpu")

    @property
    def mine(self) -> list[Piece | None]:
        """This rank's piece of each table."""
        return [each.on[self.rank] for each in self.tables]

    def asked(self, keys: Tensor) -> Tensor:
        """Returns how many of these distinct keys, ascending, each rank has a piece of: [G, T], int64."""
        if self._starts.device != keys.device:
            self._starts, self._first = self._starts.to(keys.device), self._first.to(keys.device)
        counts = torch.searchsorted(keys, self._starts).diff(append=self._starts.new_zeros(1))
        return counts[self._first].masked_fill(self._first < 0, 0)

    def parts(self, asked: Counts) -> list[list[tuple[int, int]]]:
        """Returns for each table and part of its rows where this rank's distinct rows begin and end: from 0 to U_t."""
        spans = []
        for t, each in enumerate(self.tables):
            counts = [0] * (len(each.row_starts) - 1)
            for q, piece in enumerate(each.on):
                if piece is not None:
                    counts[piece.part] = asked[q][t]
            spans.append([*pairwise([0, *accumulate(counts)])])
        return spans


@dataclass(frozen=True, slots=True)
class Route:
    """The exchanges of rows of one lookup.

    Args:
        ranks: that look up together.
        directory: of the tables.
        parts: for each table and part of its rows, where they are among the U_t.
        got: how many rows each rank has of this one's pieces.
        in_use: for each table, whether any rank passed ids for it, maybe none at all.
        positions: for each table, where among its U_t rows each id's is: the shape of the ids, int64. That of a
            padding id is U_t. None where this rank passed no ids.
        rows: for each table, which of this piece's rows other ranks have, [M_t] int64, those of rank 0 first; None
            without a piece.
    """

    ranks: Ranks
    directory: Directory
    parts: list[list[tuple[int, int]]]
    got: Counts
    in_use: tuple[bool, ...]
    positions: tuple[Tensor | None, ...]
    rows: tuple[Tensor | None, ...]

    def fetch(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Fetches the rows that this rank requested, [U_t, D_t], from this rank's piece of each table. Collective."""
        here, known = self.ranks.rank, self.directory.tables
        sent: Blocks = {}
        for t, (table, rows) in enumerate(zip(tables, self.rows, strict=True)):
            if rows is None:
                continue
            for q, wanted in enumerate(torch.split(rows, [counts[t] for counts in self.got])):
                if known[t].serves(here, q):
                    sent[q, t] = table.index_select(0, wanted)
        shapes = {
            (q, t): (end - begin, piece.shape[1])
            for q, t, piece, (begin, end) in self._asked()
            if known[t].serves(q, here)
        }
        got = _travel(self.ranks, sent, shapes, tables)
        return [self._whole(t, got, table) for t, table in enumerate(tables)]

    def return_gradients(self, gradients: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """Sends back gradients of fetched rows, [U_t, D_t]. Collective.

        Returns:
            For each table of which this rank has a piece, its rows, [M_t], and their gradients, [M_t, W_t].
        """
        sent = {(q, t): gradients[t][begin:end, slice(*piece.columns)] for q, t, piece, (begin, end) in self._asked()}
        mine = self.directory.mine
        shapes = {
            (q, t): (counts[t], piece.shape[1])
            for q, counts in enumerate(self.got)
            for t, piece in enumerate(mine)
            if piece is not None
        }
        got = _travel(self.ranks, sent, shapes, gradients)
        every = range(self.ranks.size)
        return {
            t: (rows, torch.cat([got[q, t] for q in every])) for t, rows in enumerate(self.rows) if rows is not None
        }

    def _asked(self) -> Iterator[tuple[int, int, Piece, tuple[int, int]]]:
        """Yields each piece of other ranks and of this one: rank, table, piece, and where its rows are among U_t."""
        for q in range(self.ranks.size):
            for t, each in enumerate(self.directory.tables):
                piece = each.on[q]
                if piece is not None:
                    yield q, t, piece, self.parts[t][piece.part]

    def _whole(self, t: int, got: Blocks, like: Tensor) -> Tensor:
        """Puts the pieces of rows of one table together, [U_t, D_t]."""
        each, replica = self.directory.tables[t], self.directory.tables[t].nearest[self.ranks.rank]
        by_part: list[list[Tensor]] = [[] for _ in self.parts[t]]
        for q, piece in enumerate(each.on):  # by columns in ascending order, as positions of a part are
            if piece is not None and piece.replica == replica:
                by_part[piece.part].append(got[q, t])
        rows = [blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1) for blocks in by_part]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


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
        None on every rank where some rank is faulty.
    """
    tables = range(len(directory.tables))
    keys, inverse = _distinct(directory, ids, faulty.device)
    asked = directory.asked(keys)
    for t in set(tables) - ids.keys():
        asked[:, t] = -1
    outgoing = torch.cat([faulty.expand(ranks.size, 1), asked], dim=1).flatten()
    each = [1 + len(tables)] * ranks.size
    incoming = ranks.all_to_all(outgoing, each, each).wait()
    outgoing_counts, incoming_counts = torch.stack([outgoing, incoming]).view(2, ranks.size, -1).tolist()
    if any(fault for fault, *_ in incoming_counts):
        return None
    sent, got = (
        [[max(count, 0) for count in counts] for _, *counts in all_] for all_ in (outgoing_counts, incoming_counts)
    )

    parts = directory.parts(sent)
    begins = [0, *accumulate(spans[-1][1] for spans in parts)]
    rows_of = [keys[begin:end] - base for (begin, end), base in zip(pairwise(begins), directory.bases, strict=False)]
    wanted = {
        (q, t): rows_of[t][slice(*parts[t][piece.part])].unsqueeze(1)
        for q in range(ranks.size)
        for t in tables
        if (piece := directory.tables[t].on[q]) is not None
    }
    mine = directory.mine
    shapes = {(q, t): (got[q][t], 1) for q in range(ranks.size) for t in tables if mine[t] is not None}
    arrived = _travel(ranks, wanted, shapes, [keys] * len(tables))
    rows = [
        None if piece is None else torch.cat([arrived[q, t] for q in range(ranks.size)]).squeeze(1) - piece.rows[0]
        for t, piece in enumerate(mine)
    ]
    positions = {
        t: (places - begins[t]).clamp(max=parts[t][-1][1]).view(ids[t].shape)
        for t, places in zip(ids, inverse, strict=True)
    }
    return Route(
        ranks,
        directory,
        parts,
        got,
        tuple(any(counts[1 + t] >= 0 for counts in incoming_counts) for t in tables),
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


def _travel(
    ranks: Ranks, sent: Blocks, shapes: Mapping[tuple[int, int], tuple[int, int]], like: Sequence[Tensor]
) -> Blocks:
    """Sends rows of tables to the ranks, and returns the rows received. One exchange for all dtypes.

    Args:
        ranks: to exchange with.
        sent: to each rank, [M, W] of each table.
        shapes: of what comes from each rank.
        like: for each table a tensor of the dtype and device of its rows.
    """
    # Types travel as the narrowest that holds them all, so that nothing is rounded on the way.
    dtype = reduce(torch.promote_types, [each.dtype for each in like])
    sent_counts, got_counts = [0] * ranks.size, [0] * ranks.size
    order = sorted(sent)
    for at in order:
        sent_counts[at[0]] += sent[at].numel()
    for (q, _), (count, width) in shapes.items():
        got_counts[q] += count * width
    buffer = torch.cat([like[0].new_empty(0, dtype=dtype), *(sent[at].reshape(-1).to(dtype) for at in order)])
    arrived = ranks.all_to_all(buffer, sent_counts, got_counts).wait()
    order = sorted(shapes)
    pieces = torch.split(arrived, [shapes[at][0] * shapes[at][1] for at in order])
    return {at: piece.view(shapes[at]).to(like[at[1]].dtype) for at, piece in zip(order, pieces, strict=True)}
