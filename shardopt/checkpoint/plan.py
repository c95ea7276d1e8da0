"""Who writes what: pure arithmetic on layouts, the same on every rank. No I/O, no torch, no talking.

    R ranks, H holders of a box, L bytes that a rank is to write

Every rank knows all layouts, so every rank works out the whole assignment alone and takes its own part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from shardopt.checkpoint.format import Dtype
from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, cover_faults
from shardopt.sharding.layout import Layout
from shardopt.state import Path

Load = npt.NDArray[np.float64]
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


def assign(members: Mapping[str, Member]) -> dict[str, Assignment]:
    """Shares the writing out: each box is written by one of the ranks that hold it, and all write about as much.

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
    splits: dict[tuple[Layout, Holders, Parts], _Split] = {}
    assigned: dict[str, Assignment] = {}
    # Those that have least choice come first, and the others fill up what they leave.
    for holders in sorted(groups, key=lambda holders: (holders.positions, holders.ranks)):
        keys = groups[holders]
        ends = _ends(holders, load, sum(members[key].nbytes for key in keys))
        position, done = 0, 0
        for key in keys:
            member, parts = members[key], []
            begin = done
            done += member.nbytes
            while position + 1 < len(ends) and ends[position] < done - _CUT_BYTES:
                if ends[position] > begin + _CUT_BYTES:
                    parts.append(((ends[position] - begin) / member.nbytes, position))
                position += 1
            parts.append((1.0, position))
            choice = member.layout, holders, tuple(parts)
            split = splits.get(choice) or splits.setdefault(choice, _split(*choice))
            assigned[key] = split.assignment
            load[split.ranks] += split.numels * member.dtype.itemsize
    return {key: assigned[key] for key in members}


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


def _ends(holders: Holders, load: Load, nbytes: int) -> list[int]:
    """Where each position's piece of the group's bytes ends, such that the fullest rank stays as low as can be."""
    if holders.positions == 1:
        return [nbytes]
    boxes = len(holders.ranks)
    before = [float(max(load[ranks[i]] for ranks in holders.ranks)) for i in range(holders.positions)]
    level = _level(before, nbytes / boxes)
    ends, total = [], 0.0
    for position in range(holders.positions):
        total += max(level - before[position], 0.0) * boxes
        ends.append(round(total))
    ends[-1] = nbytes
    return ends


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


def _split(layout: Layout, holders: Holders, parts: Parts) -> _Split:
    """Gives each box to its holder at the position of `parts`, cut at fractions of its rows where there are several."""
    boxes: list[Box] = []
    writers: list[tuple[int, int]] = []
    slots: defaultdict[int, int] = defaultdict(int)
    numels: defaultdict[int, int] = defaultdict(int)
    for box, ranks in zip(layout.boxes, holders.ranks, strict=True):
        for piece, position in _cut(box, parts):
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
