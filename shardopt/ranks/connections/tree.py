"""The tree of connections: blocks of ranks around their first ones, and these around rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RANKS_PER_BLOCK = 128
"""The size of a block, by which no rank of 16,384 has more than 255 connections. The same on all ranks."""


class Tree:
    """A tree of two levels: ranks in blocks of consecutive numbers, each led by its first; rank 0 leads the leaders.

    Attributes:
        leader: the rank that this one is connected to, on its way to rank 0; None for rank 0.
        members: the others of the block that this rank leads, ascending; empty where it leads none.
        children: who is connected to this rank: its members, and for rank 0 those that lead other blocks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self._per_block = rank, size, RANKS_PER_BLOCK
        block = self.block_of(rank)
        self.leads = rank == block[0]
        self.leader: int | None = None if rank == 0 else 0 if self.leads else block[0]
        self.members: Sequence[int] = block[1:] if self.leads else range(0)
        leaders = range(self._per_block, size, self._per_block) if rank == 0 else range(0)
        self.children: tuple[int, ...] = (*self.members, *leaders)
        self.has_listener = bool(self.children)

    def block_of(self, rank: int) -> range:
        """Returns the block of a rank, its leader first."""
        first = rank - rank % self._per_block
        return range(first, min(first + self._per_block, self.size))

    def next_towards(self, rank: int) -> int | None:
        """Returns the next neighbour on the way to another rank; None if there is no way."""
        if rank in self.children:
            return rank
        if self.rank == 0:
            return self.block_of(rank)[0] if 0 < rank < self.size else None
        return self.leader


def pack_runs(ranks: Iterable[int]) -> list[int]:
    """Encodes ascending ranks as runs: first, distance, count, and so on."""
    runs: list[int] = []
    for rank in ranks:
        if runs:
            first, distance, count = runs[-3:]
            if count == 1 or rank == first + distance * count:
                runs[-2:] = [(rank - first) if count == 1 else distance, count + 1]
                continue
        runs += [rank, 1, 1]
    return runs


def unpack_runs(runs: Sequence[int], within: range | None = None) -> list[int]:
    """Decodes what `pack_runs` encoded. Raises ValueError for a rank outside the range, if one is given."""
    ranks: list[int] = []
    for first, distance, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        end = first + distance * (count - 1)
        if within is not None and (first not in within or end not in within or distance < 1 or count < 1):
            raise ValueError(f"ranks {first} to {end} are not in {within}")
        ranks += range(first, end + 1, distance)
    return ranks
