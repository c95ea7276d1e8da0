"""Who writes what: pure arithmetic on layouts, the same on every rank. No I/O, no torch, no talking.

    R ranks, H holders of a box, L bytes that a rank is to write

Every rank knows all layouts, so every rank works out the whole assignment alone and takes its own part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import numpy.typing as npt

from shardopt.checkpoint.format.constants import Dtype
from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, cover_faults
from shardopt.sharding.layout import Layout
from shardopt.state import Path

BytesByRank = npt.NDArray[np.float64]
"""Bytes to write, by rank."""

Parts = tuple[tuple[float, int], ...]
"""Up to which fraction of a box's rows it goes to the holder at which position."""

_CUT_BYTES = 512 << 10  # a share is not cut to win less than this: a cut makes one more layout for the manifest


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of the job's state, as all ranks see it."""

    path: Path
    dtype: Dtype
    layout: Layout
    ranks: tuple[int, ...]  # those that have the key

    @property
    def nbytes(self) -> int:
        return prod(self.layout.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Which rank writes each box of a tensor, and into which of its files: one file has one box of a key.

    Tensors that are written alike share one object, which is compared by identity.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    writers: tuple[tuple[int, int], ...]  # rank, slot


def check_covers(members: Mapping[str, Member]) -> None:
    """Raises LayoutError, naming holes and overlaps, unless the boxes of every tensor make up the whole of it."""
    checked: dict[Layout, list[str]] = {}
    problems = []
    for key, member in members.items():
        if member.layout not in checked:
            checked[member.layout] = cover_faults(member.layout.shape, member.layout.boxes)
        problems += [
            Problem(key, fault, "each element in exactly one box", "pass every shard of the tensor, once")
            for fault in checked[member.layout]
        ]
    if problems:
        raise LayoutError("the shards of a tensor do not make up the tensor", problems)


def assign(members: Mapping[str, Member], cut_plain: bool = True) -> dict[str, Assignment]:
    """Shares the writing out: each box is written by one of the ranks that hold it, and all write about as much.

    Args:
        cut_plain: whether plain tensors, which every rank that has the key holds, are known to be the same on all of
            these. Otherwise each goes to one of them whole, the largest first and always to the one with least to
            write: should they differ after all, what is stored is at least what some rank had.

    Tensors whose boxes have the same holders form a group. A group's tensors are laid end to end, and that line of
    bytes is cut into one piece for each of the H positions among a box's holders, so long that the ranks come out
    even with what they already have to write. A tensor that lies across an end is cut there along its first dimension
    if that moves at least 512 KiB at both sides, which bounds the load of a rank to its fair share and 1 MiB.
    """
    groups: defaultdict[Holders, list[str]] = defaultdict(list)
    holders_of = _Holders()
    for key in sorted(members):
        groups[holders_of(members[key])].append(key)
    load = np.zeros(1 + max((ranks[-1] for holders in groups for ranks in holders.ranks), default=0))
    splits: dict[tuple[Layout, Holders, tuple[Parts, ...]], _Split] = {}
    assigned: dict[str, Assignment] = {}
    # Those that have least choice come first, and the others fill up what they leave.
    for holders in sorted(groups, key=lambda holders: (holders.positions, holders.ranks)):

        def give(key: str, *parts: Parts, holders: Holders = holders) -> None:
            member = members[key]
            choice = member.layout, holders, parts
            split = splits.get(choice) or splits.setdefault(choice, _split(*choice))
            assigned[key] = split.assignment
            load[split.ranks] += split.numels * member.dtype.itemsize

        whole = [] if cut_plain else [key for key in groups[holders] if _would_be_cut(members[key])]
        ranks = np.array(holders.ranks[0])
        for key in sorted(whole, key=lambda key: -members[key].nbytes):
            give(key, ((1.0, int(load[ranks].argmin())),))
        keys = [key for key in groups[holders] if key not in assigned]
        lines = _lines(holders, load, [members[key] for key in keys])
        for key in keys:
            give(key, *[line.take(members[key]) for line in lines])
    return {key: assigned[key] for key in members}


def _would_be_cut(member: Member) -> bool:
    """Whether it is a plain tensor of a size at which a line may end within it."""
    return member.layout.holders is None and member.nbytes > 2 * _CUT_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """For each box of a layout the ranks that hold it; H, the number of positions, is what all boxes have at least."""

    ranks: tuple[tuple[int, ...], ...]
    positions: int


class _Holders:
    """One `Holders` object for equal holders, so that thousands of tensors are grouped without comparing ranks."""

    def __init__(self) -> None:
        self._of_layout: dict[tuple[Layout, int], Holders] = {}
        self._by_ranks: dict[tuple[tuple[int, ...], ...], Holders] = {}

    def __call__(self, member: Member) -> Holders:
        # Members of one layout mostly share the very tuple of ranks; if not, the same Holders is found by value.
        found = self._of_layout.get((member.layout, id(member.ranks)))
        if found is None:
            ranks = (member.ranks,) if member.layout.holders is None else member.layout.holders
            found = self._by_ranks.setdefault(ranks, Holders(ranks, min(map(len, ranks))))
            self._of_layout[member.layout, id(member.ranks)] = found
        return found


class _Line:
    """The bytes of a group's tensors end to end, and where each position's piece of it ends.

    Args:
        boxes: of each layout the boxes that this line is of; all of them, or one.
        ranks: their holders.
        load: what ranks have to write already; the pieces are such that the fullest rank stays as low as can be.
        members: the tensors.
    """

    def __init__(
        self, boxes: slice, ranks: Sequence[tuple[int, ...]], load: BytesByRank, members: Sequence[Member]
    ) -> None:
        self._boxes = boxes
        self._position = self._done = 0
        positions = min(map(len, ranks))
        nbytes = sum(map(self._nbytes, members))
        self._ends = [nbytes] * positions
        if positions > 1:
            before = [float(max(load[held[i]] for held in ranks)) for i in range(positions)]
            level = _level(before, nbytes / len(ranks))
            shares = [max(level - height, 0.0) * len(ranks) for height in before]
            self._ends[:-1] = [round(end) for end in accumulate(shares[:-1])]

    def take(self, member: Member) -> Parts:
        """How the next tensor is cut."""
        nbytes, begin, parts = self._nbytes(member), self._done, []
        self._done += nbytes
        while self._position + 1 < len(self._ends) and self._ends[self._position] < self._done - _CUT_BYTES:
            if self._ends[self._position] > begin + _CUT_BYTES:
                parts.append(((self._ends[self._position] - begin) / nbytes, self._position))
            self._position += 1
        return *parts, (1.0, self._position)

    def _nbytes(self, member: Member) -> int:
        if self._boxes == _ALL:
            return member.nbytes
        return sum(box.numel for box in member.layout.boxes[self._boxes]) * member.dtype.itemsize


_ALL = slice(None)


def _lines(holders: Holders, load: BytesByRank, members: Sequence[Member]) -> list[_Line]:
    """One line for all boxes, so that they are cut alike and a grid stays one; but where ranks at one position have
    unlike loads, which uneven shards of other tensors leave behind, one for each box."""
    at_position = np.array([[load[rank] for rank in ranks[: holders.positions]] for ranks in holders.ranks])
    if np.ptp(at_position, axis=0).max() <= _CUT_BYTES or holders.positions == 1:
        return [_Line(_ALL, holders.ranks, load, members)]
    return [_Line(slice(i, i + 1), [ranks], load, members) for i, ranks in enumerate(holders.ranks)]


def _level(before: list[float], amount: float) -> float:
    """How high `amount` stands when it is poured over steps of these heights."""
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
    """An assignment, and how many elements it gives to which rank."""

    assignment: Assignment
    ranks: npt.NDArray[np.int64]  # distinct
    numels: npt.NDArray[np.float64]


def _split(layout: Layout, holders: Holders, parts: tuple[Parts, ...]) -> _Split:
    """Gives each box to its holder at the position of its parts, cut at fractions of its rows where there are several.

    Args:
        parts: of each box, or what holds for all of them.
    """
    boxes: list[Box] = []
    writers: list[tuple[int, int]] = []
    slots: defaultdict[int, int] = defaultdict(int)
    numels: defaultdict[int, int] = defaultdict(int)
    of_each = parts * len(layout.boxes) if len(parts) == 1 else parts
    for box, ranks, cuts in zip(layout.boxes, holders.ranks, of_each, strict=True):
        for piece, position in _cut(box, cuts):
            rank = ranks[position]
            boxes.append(piece)
            writers.append((rank, slots[rank]))
            slots[rank] += 1
            numels[rank] += piece.numel
    assignment = Assignment(layout.shape, tuple(boxes), tuple(writers))
    return _Split(assignment, np.array(list(numels)), np.array(list(numels.values()), dtype=np.float64))


def _cut(box: Box, parts: Parts) -> Iterator[tuple[Box, int]]:
    if len(parts) == 1 or not box.sizes:
        yield box, parts[-1][1]
        return
    rows, begin = box.sizes[0], 0
    for fraction, position in parts:
        end = round(rows * fraction)
        if end > begin:
            offsets = (box.offsets[0] + begin, *box.offsets[1:])
            yield Box(offsets, (end - begin, *box.sizes[1:])), position
            begin = end
