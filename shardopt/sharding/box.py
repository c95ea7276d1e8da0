"""Boxes: axis-aligned blocks of a tensor's index space, and whether some of them make up a whole tensor.

Everything here is arithmetic on integers; a box knows nothing of tensors, ranks or files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

MOST_FAULTS = 16
"""How many faults `cover_faults` names before it stops looking for more."""

_MOST_HOLE_VISITS = 200_000


@dataclass(frozen=True, slots=True)
class Box:
    """The elements whose index is at least `offsets` and less than `offsets + sizes`, in every dimension.

    A box of a 0-dimensional tensor is `Box((), ())`; it holds one element.

    Args:
        offsets: first index of the box along each dimension.
        sizes: number of indices along each dimension; as many as there are offsets.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index along each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements that both boxes hold, or None if they share none. Both must have the same dimensions."""
        offsets, sizes = [], []
        for mine, my_size, theirs, their_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = max(mine, theirs)
            size = min(mine + my_size, theirs + their_size) - start
            if size <= 0:
                return None
            offsets.append(start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Whether `other` lies inside this box. An empty box lies inside where its offsets and ends do."""
        return all(
            mine <= theirs and theirs + their_size <= mine + my_size
            for mine, my_size, theirs, their_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )

    def within(self, other: Box) -> Box:
        """This box in coordinates that start at the offsets of `other`, which should contain it."""
        return Box(tuple(mine - theirs for mine, theirs in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offsets, self.ends, strict=True))}]"


def whole(shape: Iterable[int]) -> Box:
    """The box that holds every element of a tensor of this shape."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def grid_cuts(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[tuple[int, ...], ...] | None:
    """The cut points of each dimension, if the boxes are exactly the cells of a grid over `shape`.

    Args:
        shape: the tensor's global shape.
        boxes: non-empty boxes in any order.

    Returns:
        For each dimension the ascending cut points, from 0 to the dimension's size; the boxes are then all the
        cells between them, each once. None where they are not, or where the tensor is empty.
        Takes time linear in the number of boxes (times dimensions) plus a sort of the cut points.
    """
    cuts = []
    for dim, size in enumerate(shape):
        starts = sorted({box.offsets[dim] for box in boxes})
        if not starts or starts[0] != 0 or size <= 0:
            return None
        cuts.append((*starts, size))
    if len(boxes) != prod(len(points) - 1 for points in cuts):
        return None
    following = [dict(pairwise(points)) for points in cuts]
    for box in boxes:
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if following[dim][start] != start + size:
                return None
    # Every box is a cell, and there are as many boxes as cells: all that can still be wrong is one cell given twice.
    return tuple(cuts) if len({box.offsets for box in boxes}) == len(boxes) else None


def grid_boxes(cuts: Sequence[Sequence[int]]) -> tuple[Box, ...]:
    """The cells of the grid with these cut points (the reverse of `grid_cuts`), in ascending order of offsets."""
    starts = product(*(points[:-1] for points in cuts))
    sizes = product(*([end - start for start, end in pairwise(points)] for points in cuts))
    return tuple(map(Box, starts, sizes))


def cover_faults(shape: Sequence[int], boxes: Iterable[Box]) -> list[str]:
    """What keeps the boxes from holding every element of a tensor exactly once.

    Boxes that hold nothing are passed over. Grids take linear time. Other boxes are swept along the dimension
    where the fewest of them stand side by side, so time is at worst quadratic in their number, whatever
    the number of dimensions.

    Args:
        shape: the tensor's global shape.
        boxes: boxes in any order, from any source.

    Returns:
        One sentence for each box out of range, overlap and hole, naming the boxes; at most `MOST_FAULTS` of them
        and one more that says so where there may be others. Empty where the cover is exact.
    """
    space = whole(shape)
    faults: list[str] = []
    inside: list[Box] = []
    for box in boxes:
        if len(box.offsets) != len(space.sizes) or len(box.sizes) != len(space.sizes):
            faults.append(
                f"box with offsets {box.offsets} and sizes {box.sizes} has not the {len(space.sizes)} "
                f"dimensions of shape {space.sizes}"
            )
        elif any(number < 0 for number in (*box.offsets, *box.sizes)):
            faults.append(f"box with offsets {box.offsets} and sizes {box.sizes} has a negative number")
        elif box.numel == 0:
            continue
        elif not space.contains(box):
            faults.append(f"box {_name(box)} reaches beyond shape {space.sizes}")
        else:
            inside.append(box)
        if len(faults) >= MOST_FAULTS:
            return _and_perhaps_more(faults)
    if space.numel == 0 or (not faults and grid_cuts(space.sizes, inside) is not None):
        return faults

    overlaps = _overlaps(len(space.sizes), inside, MOST_FAULTS - len(faults))
    faults += [f"boxes {_name(a)} and {_name(b)} both hold {_name(shared)}" for a, b, shared in overlaps]
    if overlaps or sum(box.numel for box in inside) != space.numel:
        holes = _holes(space, inside, MOST_FAULTS - len(faults), disjoint=not overlaps)
        faults += [f"no box holds {_name(hole)}" for hole in holes]
    return _and_perhaps_more(faults) if len(faults) >= MOST_FAULTS else faults


def _name(box: Box) -> str:
    return f"offsets {box.offsets} sizes {box.sizes}"


def _and_perhaps_more(faults: list[str]) -> list[str]:
    return [*faults[:MOST_FAULTS], f"only the first {MOST_FAULTS} faults are listed"]


def _overlaps(ndim: int, boxes: list[Box], most: int) -> list[tuple[Box, Box, Box]]:
    """Up to `most` pairs of boxes that share elements, each with what it shares."""
    found: list[tuple[Box, Box, Box]] = []
    if ndim == 0:
        return [(a, b, a) for a, b in pairwise(boxes)][:most]
    dim = min(range(ndim), key=lambda d: _pairs_side_by_side(boxes, d))
    standing: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        start = box.offsets[dim]
        standing = [other for other in standing if other.offsets[dim] + other.sizes[dim] > start]
        for other in standing:
            shared = box.intersect(other)
            if shared is not None:
                found.append((other, box, shared))
                if len(found) >= most:
                    return found
        standing.append(box)
    return found


def _pairs_side_by_side(boxes: list[Box], dim: int) -> int:
    """How many pairs of boxes share an index along one dimension: what a sweep along it has to compare."""
    starts = sorted(box.offsets[dim] for box in boxes)
    ends = sorted(box.offsets[dim] + box.sizes[dim] for box in boxes)
    return sum(position - bisect_right(ends, start) for position, start in enumerate(starts))


def _holes(space: Box, boxes: list[Box], most: int, disjoint: bool) -> list[Box]:
    """Up to `most` boxes of elements that none of `boxes` holds.

    Halves the space at the boundaries of boxes. Where the boxes are disjoint a part whose volume is filled has no
    hole and is left at once, so only the way down to each hole is walked; where they overlap volumes say nothing,
    and the number of visits is bounded instead.
    """
    holes: list[Box] = []
    visits = 0
    parts = [(space, boxes)]
    while parts and len(holes) < most:
        region, inside = parts.pop()
        visits += len(inside) + 1
        if visits > _MOST_HOLE_VISITS and not disjoint:
            break
        if not inside:
            holes.append(region)
            continue
        filled = sum(box.numel for box in inside)
        if filled == region.numel if disjoint else any(box == region for box in inside):
            continue
        parts.extend(_halves(region, inside))
    return holes


def _halves(region: Box, inside: list[Box]) -> list[tuple[Box, list[Box]]]:
    """The region cut in two at the middle one of the boundaries along the dimension that has most of them."""
    best: list[int] = []
    best_dim = 0
    for dim, (start, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        edges = {box.offsets[dim] for box in inside} | {box.offsets[dim] + box.sizes[dim] for box in inside}
        points = sorted(edges - {start, start + size})
        if len(points) > len(best):
            best, best_dim = points, dim
    cut = best[len(best) // 2]
    halves = []
    for start, end in ((region.offsets[best_dim], cut), (cut, region.ends[best_dim])):
        half = Box(
            (*region.offsets[:best_dim], start, *region.offsets[best_dim + 1 :]),
            (*region.sizes[:best_dim], end - start, *region.sizes[best_dim + 1 :]),
        )
        shares = (half.intersect(box) for box in inside)
        halves.append((half, [share for share in shares if share is not None]))
    return halves
