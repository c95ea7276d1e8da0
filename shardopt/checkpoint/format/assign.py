"""Assigns boxes to the ranks that write them: pure arithmetic on layouts, the same on every rank.

    R ranks, H holders of a box, L bytes that a rank is to write

Every rank knows all layouts, so every rank works out the whole assignment alone and takes its own share of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, count
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardopt.checkpoint.format.constants import Dtype
from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, cover_faults
from shardopt.sharding.layout import Layout
from shardopt.state.paths import Path

BytesByRank = npt.NDArray[np.float64]
"""Bytes to write, by rank."""

Cuts = tuple[tuple[float, int], ...]
"""The cuts of a box: up to which fraction of its rows it goes to the holder at which position, ascending."""

_CUT_BYTES = 512 << 10  # a share is not cut to win less than this: a cut makes one more layout for the manifest
_TO_FIRST: Cuts = ((1.0, 0),)


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of the job's state, as all ranks see it."""

    path: Path
    dtype: Dtype
    layout: Layout
    ranks: tuple[int, ...]  # those that have the key
    is_buffer: bool = False  # of which ranks may hold other values: the first holder's are stored

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return prod(self.layout.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The rank that writes each box of a tensor, and the number of its file: a file has one box of a key.

    Tensors that are written alike share one object, which is compared by identity.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    writers: tuple[tuple[int, int], ...]  # rank, slot


def check_covers(members: Mapping[str, Member]) -> None:
    """Raises LayoutError, naming holes and overlaps, unless the boxes of every tensor cover all of it."""
    checked: dict[Layout, list[str]] = {}
    problems = []
    for key, member in members.items():
        if member.layout not in checked:
            layout = member.layout
            # A grid covers the tensor by what it is, and boxes are found to be one only if they do.
            checked[layout] = [] if layout.grid is not None else cover_faults(layout.shape, layout.boxes)
        problems += [
            Problem(key, fault, "each element in exactly one box", "pass every shard of the tensor, once")
            for fault in checked[member.layout]
        ]
    if problems:
        raise LayoutError("the shards of a tensor do not make up the tensor", problems)


def assign(members: Mapping[str, Member], cut_plain: bool = True) -> dict[str, Assignment]:
    """Assigns each box to one of its holders, so that all ranks write about the same number of bytes.

    Args:
        cut_plain: whether plain tensors, which every rank that has the key holds, are known to be equal on all of
            these. Otherwise each goes to one of them whole, the largest first and always to the one with least to
            write: should they differ after all, the stored one is at least that of some rank.

    Tensors whose boxes have the same holders form a group. A group's tensors are laid end to end, and that line of
    bytes is cut into one piece for each of the H positions among a box's holders, so long that the ranks come out
    even with what they already have to write. A tensor that lies across an end is cut there along its first dimension
    if that moves at least 512 KiB at both sides, which bounds the load of a rank to its fair share and 1 MiB.

    Boxes of buffers go to their first holders, whole: values of several ranks must not be mixed.
    """
    groups: defaultdict[Holders, list[str]] = defaultdict(list)
    holders_of = _HoldersCache()
    for key in sorted(members):
        groups[holders_of(members[key])].append(key)
    load = np.zeros(1 + max((ranks[-1] for holders in groups for ranks in holders.ranks), default=0))
    splits: dict[tuple[Layout, Holders, tuple[Cuts, ...]], _Split] = {}
    assigned: dict[str, Assignment] = {}
    # Groups with the fewest positions come first, since they have the least choice; the others even out the loads.
    for holders in sorted(groups, key=lambda holders: (holders.positions, holders.ranks)):

        def assign_each(cuts_of: Iterable[tuple[str, tuple[Cuts, ...]]], holders: Holders = holders) -> None:
            itemsizes: defaultdict[_Split, int] = defaultdict(int)
            for key, cuts in cuts_of:
                choice = members[key].layout, holders, cuts
                split = splits.get(choice) or splits.setdefault(choice, _split(*choice))
                assigned[key] = split.assignment
                itemsizes[split] += members[key].dtype.itemsize
            for split, itemsize in itemsizes.items():
                np.add.at(load, split.ranks, split.numels * itemsize)

        assign_each((key, (_TO_FIRST,)) for key in groups[holders] if members[key].is_buffer)
        left = [key for key in groups[holders] if key not in assigned]
        plain = [] if cut_plain else [key for key in left if members[key].layout.holders is None]
        whole = [key for key in plain if members[key].nbytes > 2 * _CUT_BYTES]  # a line may be cut within these
        ranks = np.array(holders.ranks[0])
        for key in sorted(whole, key=lambda key: -members[key].nbytes):
            assign_each([(key, (((1.0, int(load[ranks].argmin())),),))])
        keys = [key for key in left if key not in assigned]
        lines = _lines(holders, load, [members[key] for key in keys])
        assign_each((key, tuple([line.take(members[key]) for line in lines])) for key in keys)
    return {key: assigned[key] for key in members}


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The ranks that hold each box of a layout; H, the number of positions, is the least number of a box's holders."""

    ranks: tuple[tuple[int, ...], ...]
    positions: int
    _at: dict[int, _Writers] = field(default_factory=dict)

    def at(self, position: int) -> _Writers:
        """Returns who writes, if that is the holder of each box at this position; one object for all such tensors."""
        if position not in self._at:
            self._at[position] = _Writers.numbered([ranks[position] for ranks in self.ranks])
        return self._at[position]


class _Writers(NamedTuple):
    """The rank that writes each box, and the same with the number of its file."""

    ranks: npt.NDArray[np.int64]
    files: tuple[tuple[int, int], ...]

    @classmethod
    def numbered(cls, ranks: Sequence[int]) -> _Writers:
        slots: defaultdict[int, Iterator[int]] = defaultdict(count)
        return cls(np.array(ranks), tuple((rank, next(slots[rank])) for rank in ranks))


class _HoldersCache:
    """Returns one `Holders` object for equal holders, so that tensors are grouped without comparing ranks."""

    def __init__(self) -> None:
        self._of_layout: dict[tuple[Layout, int], Holders] = {}
        self._by_ranks: dict[tuple[tuple[int, ...], ...], Holders] = {}

    def __call__(self, member: Member) -> Holders:
        # Members of one layout mostly share the very tuple of ranks; if not, the same Holders is found by value.
        holders = self._of_layout.get((member.layout, id(member.ranks)))
        if holders is None:
            ranks = (member.ranks,) if member.layout.holders is None else member.layout.holders
            holders = self._by_ranks.setdefault(ranks, Holders(ranks, min(map(len, ranks))))
            self._of_layout[member.layout, id(member.ranks)] = holders
        return holders


class _Line:
    """The bytes of a group's tensors end to end, and where each position's share of them ends.

    Args:
        boxes: of each layout the boxes that this line is of; all of them, or one.
        loads: bytes that their holders have to write already, by box and position; the pieces are such that the fullest
            rank stays as low as can be.
        members: the tensors.
    """

    def __init__(self, boxes: slice, loads: npt.NDArray[np.float64], members: Sequence[Member]) -> None:
        self._boxes = boxes
        self._position = self._done = 0
        nbytes = sum(map(self._nbytes, members))
        before = loads.max(axis=0).tolist()
        level = _level(before, nbytes / len(loads))
        shares = [max(level - height, 0.0) * len(loads) for height in before]
        self._ends = [*(round(end) for end in accumulate(shares[:-1])), nbytes]

    def take(self, member: Member) -> Cuts:
        """Takes the next tensor of the line; returns its cuts."""
        nbytes, begin, cuts = self._nbytes(member), self._done, []
        self._done += nbytes
        while self._position + 1 < len(self._ends) and self._ends[self._position] < self._done - _CUT_BYTES:
            if self._ends[self._position] > begin + _CUT_BYTES:
                cuts.append(((self._ends[self._position] - begin) / nbytes, self._position))
            self._position += 1
        return *cuts, (1.0, self._position)

    def _nbytes(self, member: Member) -> int:
        if self._boxes == _ALL:
            return member.nbytes
        return sum(member.layout.numels[self._boxes]) * member.dtype.itemsize


_ALL = slice(None)


def _lines(holders: Holders, load: BytesByRank, members: Sequence[Member]) -> list[_Line]:
    """Makes one line for all boxes, so that all are cut alike and a grid stays a grid.

    Where ranks at one position have unlike loads, which uneven shards of other tensors leave behind, it is one line for
    each box.
    """
    loads = load[np.array([ranks[: holders.positions] for ranks in holders.ranks])]
    if np.ptp(loads, axis=0).max() <= _CUT_BYTES or holders.positions == 1:
        return [_Line(_ALL, loads, members)]
    return [_Line(slice(i, i + 1), load[np.array([ranks])], members) for i, ranks in enumerate(holders.ranks)]


def _level(before: list[float], amount: float) -> float:
    """Returns the level that `amount` reaches when poured over steps of these heights (water filling)."""
    steps = sorted(before)
    poured = 0.0
    for i, step in enumerate(steps):
        poured += step
        level = (amount + poured) / (i + 1)
        if i + 1 == len(steps) or level <= steps[i + 1]:
            return level
    raise AssertionError("poured over no steps")


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """An assignment, and of each of its boxes the rank and the number of elements."""

    assignment: Assignment
    ranks: npt.NDArray[np.int64]
    numels: npt.NDArray[np.float64]


def _split(layout: Layout, holders: Holders, cuts: tuple[Cuts, ...]) -> _Split:
    """Cuts each box at fractions of its rows, and assigns each piece to the holder at that position.

    Args:
        cuts: of each box, or one for all of them.
    """
    if len(cuts) == len(cuts[0]) == 1:
        boxes, numels, writers = layout.boxes, layout.numels, holders.at(cuts[0][0][1])
    else:
        of_each = cuts * len(layout.boxes) if len(cuts) == 1 else cuts
        pieces = [
            (Box((first + begin, *offsets), (height, *sizes)), held[position])
            for ((first, *offsets), (rows, *sizes)), held, each in zip(
                layout.boxes, holders.ranks, of_each, strict=True
            )
            for begin, height, position in _cut(rows, each)
        ]
        boxes = tuple(piece for piece, _ in pieces)
        numels = tuple(box.numel for box in boxes)
        writers = _Writers.numbered([rank for _, rank in pieces])
    return _Split(Assignment(layout.shape, boxes, writers.files), writers.ranks, np.array(numels, dtype=np.float64))


@lru_cache(maxsize=64)  # boxes of a grid have as many rows
def _cut(rows: int, cuts: Cuts) -> list[tuple[int, int, int]]:
    """Returns where each piece begins, its rows, and its position."""
    ends = [round(rows * fraction) for fraction, _ in cuts]
    pieces = zip([0, *ends], ends, cuts, strict=False)
    return [(begin, end - begin, position) for begin, end, (_, position) in pieces if end > begin]
