"""The tables of a module: which ranks exchange their rows, and how keys tell rows of all tables apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from zlib import crc32

import torch
from torch import Tensor

from shardopt.nn.cuts import Pieces
from shardopt.nn.table import Table

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
        row_parts: into how many parts the rows of each table are cut, R_t.
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
        self.row_parts = [len(each.row_starts) - 1 for each in tables]
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

    def parts_of(self, keys: Tensor) -> Tensor:
        """Returns the part of each key, as numbers of the parts of all tables in turn, an empty one after each table's.

        A key is a row's place in all tables one after the other. What has no row is in the first part, or the last.
        """
        return (torch.searchsorted(self._on(keys.device), keys, right=True) - 1).clamp(min=0)

    def counted(self, keys: Tensor) -> Tensor:
        """Counts keys, ascending, by part: [sum of R_t + T] int64, numbered as `parts_of` does."""
        return torch.searchsorted(keys, self._on(keys.device)).diff(append=self._starts.new_full((1,), len(keys)))

    def by_rank(self, counts: Tensor) -> Tensor:
        """Returns of how many keys each rank has a piece, [G, T], from counts by part."""
        return counts[self._first].masked_fill(self._first < 0, 0)

    def marked(self, faulty: Tensor) -> Tensor:
        """Returns what every rank sends if it is ready, which says what tables it has; -1 where `faulty`, a bool."""
        return torch.where(faulty, -1, self._fingerprint)

    def are_ready(self, marks: Sequence[int]) -> bool:
        """Whether the marks of all ranks say so, and that they have the same tables."""
        return all(mark == self._fingerprint for mark in marks)

    def _on(self, device: torch.device) -> Tensor:
        """Returns the first key of each part, and of each table's end, after these are on a device."""
        if self._starts.device != device:
            self._starts, self._first = self._starts.to(device), self._first.to(device)
        return self._starts

    def by_part(self, counts: Sequence[int]) -> list[list[int]]:
        """Returns the counts of each part of each table, from all of them in turn."""
        ends = [0, *accumulate(parts + 1 for parts in self.row_parts)]
        return [[*counts[begin : end - 1]] for begin, end in pairwise(ends)]


def _described(table: Table) -> str:
    looked_up = f"mode {table.mode!r}, padding_idx {table.padding_idx}"
    return f"{table.name}: {table.num_embeddings} x {table.embedding_dim}, cut {table.cut!r}, {looked_up}"


def _starts(tables: Sequence[Pieces], bases: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the first row of each part of each table, with all tables in turn, and each one's end; and for each rank
    and table where in there its part is: [G, T], -1 without a piece. On the CPU.
    """
    ends = [0, *accumulate(len(each.row_starts) for each in tables)]
    starts = [base + row for base, each in zip(bases, tables, strict=False) for row in each.row_starts]
    first = [[-1 if p is None else at + p.part[0] for p in each.on] for at, each in zip(ends, tables, strict=False)]
    return torch.tensor(starts, dtype=torch.int64, device="cpu"), torch.tensor(first, device="cpu").T.contiguous()
