"""Who writes what: pure arithmetic on layouts, the same on every rank. No I/O, no torch, no talking.

    R ranks, H holders of a box, L bytes that a rank is to write

Every rank knows all layouts, so every rank works out the whole assignment alone and takes its own part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from shardopt.checkpoint.format import Dtype
from shardopt.errors import LayoutError, Problem
from shardopt.sharding.box import Box, cover_faults
from shardopt.sharding.layout import Layout
from shardopt.state import Path

_CUT_BYTES = 1 << 20  # a share is not cut to win less than this: a cut makes one more layout for the manifest


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


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which rank writes each box of a tensor, and into which of its files: one file has one box of a key."""

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
    if that moves at least 1 MiB, which bounds the load of a rank to its fair share and 1 MiB.
    """
    groups: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
    for key in sorted(members):
        groups[_holders(members[key])].append(key)
    load: defaultdict[int, int] = defaultdict(int)
    assigned: dict[str, Assignment] = {}
    # Those that have least choice come first, and the others fill up what they leave.
    for holders in sorted(groups, key=lambda holders: (min(map(len, holders)), holders)):
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
            assigned[key] = _split(member.layout, holders, tuple(parts))
            for box, (rank, _) in zip(assigned[key].boxes, assigned[key].writers, strict=True):
                load[rank] += box.numel * member.dtype.itemsize
    return {key: assigned[key] for key in members}


def _holders(member: Member) -> tuple[tuple[int, ...], ...]:
    return (member.ranks,) if member.layout.holders is None else member.layout.holders


def _ends(holders: tuple[tuple[int, ...], ...], load: Mapping[int, int], nbytes: int) -> list[int]:
    """Where each position's piece of the group's bytes ends, such that the fullest rank stays as low as can be."""
    positions = min(map(len, holders))
    if positions == 1:
        return [nbytes]
    before = [max(load[ranks[position]] for ranks in holders) for position in range(positions)]
    boxes = len(holders)
    level = _level(before, nbytes / boxes)
    ends, total = [], 0.0
    for position in range(positions):
        total += max(level - before[position], 0.0) * boxes
        ends.append(round(total))
    ends[-1] = nbytes
    return ends


def _level(before: list[int], amount: float) -> float:
    """How high `amount` stands when it is poured over steps of these heights."""
    steps = sorted(before)
    poured = 0.0
    for i, step in enumerate(steps):
        poured += step
        level = (amount + poured) / (i + 1)
        if i + 1 == len(steps) or level <= steps[i + 1]:
            return level
    raise AssertionError("poured over no steps")


@cache
def _split(layout: Layout, holders: tuple[tuple[int, ...], ...], parts: tuple[tuple[float, int], ...]) -> Assignment:
    """Gives each box to its holder at the position of `parts`, cut at fractions of its rows where there are several."""
    boxes: list[Box] = []
    writers: list[tuple[int, int]] = []
    slots: defaultdict[int, int] = defaultdict(int)
    for box, ranks in zip(layout.boxes, holders, strict=True):
        for piece, position in _cut(box, parts):
            rank = ranks[position]
            boxes.append(piece)
            writers.append((rank, slots[rank]))
            slots[rank] += 1
    return Assignment(tuple(boxes), tuple(writers))


def _cut(box: Box, parts: tuple[tuple[float, int], ...]) -> Iterator[tuple[Box, int]]:
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
