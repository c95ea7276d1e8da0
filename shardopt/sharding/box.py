"""Boxes: axis-aligned blocks of a tensor's index space, and whether several of them cover a whole tensor.

Everything here is arithmetic on integers; a box knows nothing of tensors, ranks or files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

MOST_FAULTS = 16
"""The number of faults that `cover_faults` names before it stops."""

_MOST_CUT = 6  # dimensions, of whose corners there are 2 ** 6 for each box
_MOST_VISITS = 50_000  # of boxes, to find those that overlap; or some for each box, where there are more
_MOST_HOLE_VISITS = 50_000  # likewise, to find holes
_VISITS_PER_BOX = 8


class Box(NamedTuple):
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
        """The number of elements in the box."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index along each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Returns the box of common elements; None if there are none. Both have the same dimensions."""
        offsets, sizes = [], []
        for start, length, other_start, other_length in zip(*self, *other, strict=True):
            shared_start = max(start, other_start)
            size = min(start + length, other_start + other_length) - shared_start
            if size <= 0:
                return None
            offsets.append(shared_start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Whether `other` is inside this box. An empty box is inside if its offsets and ends are."""
        return all(
            offset <= other_offset and other_offset + other_size <= offset + size
            for offset, size, other_offset, other_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )

    def within(self, other: Box) -> Box:
        """Returns this box in coordinates relative to the offsets of `other`, which should contain it."""
        offsets = (offset - origin for offset, origin in zip(self.offsets, other.offsets, strict=True))
        return Box(tuple(offsets), self.sizes)

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offsets, self.ends, strict=True))}]"


def whole(shape: Iterable[int]) -> Box:
    """Returns the box that holds every element of a tensor.

    Args:
        shape: of the tensor.
    """
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def with_ones(shape: Sequence[int], dims: Collection[int]) -> tuple[int, ...]:
    """Returns the shape of a sum over some dimensions, kept with size 1."""
    return tuple(1 if dim in dims else size for dim, size in enumerate(shape))


def cut_in_order(box: Box, most: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most `most` elements (at least one), in C order."""
    if not box.sizes or box.numel <= most:
        if box.numel:
            yield box
        return
    step = most // prod(box.sizes[1:])
    for begin in range(0, box.sizes[0], max(step, 1)):
        offsets = (box.offsets[0] + begin, *box.offsets[1:])
        if step:
            yield Box(offsets, (min(step, box.sizes[0] - begin), *box.sizes[1:]))
        else:
            for inner in cut_in_order(Box(box.offsets[1:], box.sizes[1:]), most):
                yield Box((offsets[0], *inner.offsets), (1, *inner.sizes))


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Yields boxes of the elements from one position to another, in C order, of a tensor of this shape.

    At most 2·d - 1 for d dimensions, as a range begins and ends within a row, within a row of rows, and so on: 5 to 20
    of the shape [4, 6] are [0:1, 5:6], [1:3, 0:6] and [3:4, 0:2].
    """
    if not shape and begin < end:
        yield Box((), ())
        return
    row = prod(shape[1:])
    while begin < end:
        index, within = divmod(begin, row)
        rows = 0 if within else (end - begin) // row
        if rows:
            yield Box((index, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
        else:
            for box in boxes_of_range(shape[1:], within, min(end - index * row, row)):
                yield Box((index, *box.offsets), (1, *box.sizes))
        begin = (index + max(rows, 1)) * row


def grid_cuts(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[tuple[int, ...], ...] | None:
    """Returns the cut points of each dimension, if the boxes are exactly the cells of a grid over `shape`, in order.

    Args:
        shape: the tensor's global shape.
        boxes: non-empty boxes.

    Returns:
        For each dimension the ascending cut points, from 0 to the dimension's size; the boxes are then those of
        `grid_boxes`. None where they are not, or where the tensor is empty.
        Takes time linear in the number of boxes (times dimensions) plus a sort of the cut points.
    """
    starts = [sorted(set(along)) for along in zip(*(box.offsets for box in boxes), strict=True)]
    if len(starts) < len(shape) or len(boxes) != prod(map(len, starts)):
        return None
    if any(points[0] != 0 or points[-1] >= size for points, size in zip(starts, shape, strict=True)):
        return None
    cuts = tuple((*points, size) for points, size in zip(starts, shape, strict=True))
    return cuts if (*boxes,) == grid_boxes(cuts) else None


def grid_boxes(cuts: Sequence[Sequence[int]]) -> tuple[Box, ...]:
    """Returns the cells of the grid with these cut points (the inverse of `grid_cuts`), ascending by offsets."""
    starts = product(*(points[:-1] for points in cuts))
    sizes = product(*([end - start for start, end in pairwise(points)] for points in cuts))
    return tuple(map(partial(tuple.__new__, Box), zip(starts, sizes, strict=True)))


def cover_faults(shape: Sequence[int], boxes: Iterable[Box]) -> list[str]:
    """Finds the holes and overlaps that keep boxes from covering every element exactly once.

    Boxes that hold nothing are passed over. An exact cover takes linear time where at most 6 dimensions are cut. Where
    that is not known, comparisons are bounded, and so many boxes that they do not suffice are a fault, too.

    Args:
        shape: the tensor's global shape.
        boxes: boxes in any order, from any source.

    Returns: One sentence for each box that cannot be in the tensor, or else for each overlap and hole, naming the
        boxes. There are at most `MOST_FAULTS` of them, and one more that says so if there may be others. Empty where
        the cover is exact.
    """
    inside, misfits = _sound(shape, boxes)
    if misfits or prod(shape) == 0 or grid_cuts(shape, sorted(inside)) is not None or _corners_cancel(shape, inside):
        return _listed(misfits) if misfits else []
    work = _Work(max(_MOST_VISITS, _VISITS_PER_BOX * len(inside)))
    faults = _overlaps(inside, MOST_FAULTS, work)
    if faults or sum(box.numel for box in inside) != prod(shape):
        holes = _holes(whole(shape), inside, MOST_FAULTS - len(faults), disjoint=not faults and not work.is_done)
        faults += [f"no box holds {_name(hole)}" for hole in holes]
    if not faults and (work.is_done or sum(box.numel for box in inside) != prod(shape)):
        faults = [f"{len(inside)} boxes that are not known to hold each of its elements once"]
    return _listed(faults)


def _corners_cancel(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes certainly cover every element exactly once; takes linear time.

    A box is the sum, over its corners, of signed quadrants that begin there. These are linearly independent: so the
    boxes make up the tensor, each element once, just where their corners cancel but for those of the tensor. Dimensions
    that no box cuts count for nothing; with many that are cut, corners are too many, and False says nothing.
    """
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]
    if len(cut) > _MOST_CUT:
        return False
    sums: dict[tuple[int, ...], int] = defaultdict(int)
    signs = [-1 if sum(ends) % 2 else 1 for ends in product((0, 1), repeat=len(cut))]
    for box in boxes:
        edges = [(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in cut]
        for corner, sign in zip(product(*edges), signs, strict=True):
            sums[corner] += sign
    for corner, sign in zip(product(*((0, shape[dim]) for dim in cut)), signs, strict=True):
        sums[corner] -= sign
    return not any(sums.values())


def overlap_faults(shape: Sequence[int], boxes: Iterable[Box]) -> list[str]:
    """Finds the overlaps of boxes of a tensor: `cover_faults` without the holes."""
    inside, misfits = _sound(shape, boxes)
    return _listed(misfits or _overlaps(inside, MOST_FAULTS, _Work(None)))


class _Work:
    """A budget of visits of boxes; None for no limit."""

    def __init__(self, left: int | None) -> None:
        self._left = left

    def visit(self, count: int) -> None:
        if self._left is not None:
            self._left -= count

    @property
    def is_done(self) -> bool:
        return self._left is not None and self._left < 0


def _sound(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[list[Box], list[str]]:
    """Splits boxes into those inside a tensor of this shape and the faults of the other non-empty ones."""
    space = whole(shape)
    ndim = len(space.sizes)
    inside: list[Box] = []
    faults: list[str] = []
    for box in boxes:
        if len(box.offsets) != ndim or len(box.sizes) != ndim:
            faults.append(f"box with {_name(box)} has not the {ndim} dimensions of shape {space.sizes}")
        elif min(box.sizes, default=0) < 0:
            faults.append(f"box with {_name(box)} has a negative size")
        elif box.numel == 0:
            continue
        elif not space.contains(box):
            faults.append(f"box with {_name(box)} reaches beyond shape {space.sizes}")
        else:
            inside.append(box)
        if len(faults) >= MOST_FAULTS:
            break
    return inside, faults


def _listed(faults: list[str]) -> list[str]:
    if len(faults) < MOST_FAULTS:
        return faults
    return [*faults[:MOST_FAULTS], f"there may be more: only the first {MOST_FAULTS} faults are listed"]


def _name(box: Box) -> str:
    return f"offsets {box.offsets} sizes {box.sizes}"


def _overlaps(boxes: Sequence[Box], most: int, work: _Work) -> list[str]:
    """Finds up to `most` pairs of overlapping boxes, within the budget. No box is empty."""
    overlaps: list[str] = []
    groups = [list(boxes)]
    while groups and len(overlaps) < most and not work.is_done:
        group = groups.pop()
        work.visit(len(group))
        if len(group) < 2:  # as of a tensor of many pieces nearly all are
            continue
        bands = next((b for dim in range(len(group[0].sizes)) if len(b := _bands(group, dim)) > 1), None)
        if bands is None:
            overlaps += _overlaps_of_neighbours(group, most - len(overlaps), work)
        else:
            groups.extend(bands)
    return overlaps


def _bands(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """Groups boxes by disjoint intervals of one dimension, so that only boxes of one group can overlap."""
    bands: list[list[Box]] = []
    reached = 0
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        if not bands or box.offsets[dim] >= reached:
            bands.append([])
        bands[-1].append(box)
        reached = max(reached, box.offsets[dim] + box.sizes[dim])
    return bands


def _overlaps_of_neighbours(boxes: Sequence[Box], most: int, work: _Work) -> list[str]:
    """Finds up to `most` overlaps by a sweep, which compares each box with those still open along one dimension."""
    overlaps: list[str] = []
    ndim = len(boxes[0].sizes)
    # Without dimensions every box is the same element, and any order of them will do.
    dim = min(range(ndim), key=lambda d: _pairs_side_by_side(boxes, d), default=None)
    standing: list[Box] = []
    for box in boxes if dim is None else sorted(boxes, key=lambda b: b.offsets[dim]):
        if dim is not None:
            start = box.offsets[dim]
            standing = [other for other in standing if other.offsets[dim] + other.sizes[dim] > start]
        work.visit(len(standing))
        if work.is_done:
            return overlaps
        for other in standing:
            shared = box.intersect(other)
            if shared is not None:
                overlaps.append(f"boxes with {_name(other)} and {_name(box)} both hold {_name(shared)}")
                if len(overlaps) >= most:
                    return overlaps
        standing.append(box)
    return overlaps


def _pairs_side_by_side(boxes: Sequence[Box], dim: int) -> int:
    """Counts the pairs of boxes that share an index along one dimension, which a sweep along it would compare."""
    starts = sorted(box.offsets[dim] for box in boxes)
    ends = sorted(box.offsets[dim] + box.sizes[dim] for box in boxes)
    return sum(position - bisect_right(ends, start) for position, start in enumerate(starts))


def _holes(space: Box, boxes: Sequence[Box], most: int, disjoint: bool) -> list[Box]:
    """Finds up to `most` boxes of elements that no box holds, each extended as far as its neighbours allow.

    Halves the space at the boundaries of boxes. Where the boxes are disjoint a region whose volume is filled has no
    hole and is left at once, so only the way down to each hole is walked; where they overlap volumes say nothing. The
    number of visits is bounded.
    """
    holes: list[Box] = []
    visits = 0
    regions = [(space, list(boxes))]
    while regions and len(holes) < most:
        region, inside = regions.pop()
        visits += len(inside) + 1
        if visits > max(_MOST_HOLE_VISITS, _VISITS_PER_BOX * len(boxes)):
            break
        if not inside:
            hole = _grown(region, space, [*boxes, *holes])
            holes.append(hole)
            for other, filled in regions:
                share = other.intersect(hole)
                if share is not None:
                    filled.append(share)
        elif sum(box.numel for box in inside) < region.numel if disjoint else region not in inside:
            regions.extend(_halves(region, inside))
    return holes


def _grown(hole: Box, space: Box, boxes: Sequence[Box]) -> Box:
    """Extends a hole, one dimension after the other, until it touches a box."""
    for dim in range(len(hole.sizes)):
        column = _along(hole, dim, space.offsets[dim], space.sizes[dim])
        low, high = space.offsets[dim], space.ends[dim]
        for box in boxes:
            if column.intersect(box) is not None:
                if box.ends[dim] <= hole.offsets[dim]:
                    low = max(low, box.ends[dim])
                else:
                    high = min(high, box.offsets[dim])
        hole = _along(hole, dim, low, high - low)
    return hole


def _along(box: Box, dim: int, start: int, size: int) -> Box:
    """Returns the box with another extent along one dimension."""
    return Box(
        (*box.offsets[:dim], start, *box.offsets[dim + 1 :]),
        (*box.sizes[:dim], size, *box.sizes[dim + 1 :]),
    )


def _halves(region: Box, inside: Sequence[Box]) -> list[tuple[Box, list[Box]]]:
    """Cuts a region in two at the middle boundary along the dimension with the most boundaries."""
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
        half = _along(region, best_dim, start, end - start)
        shares = (half.intersect(box) for box in inside)
        halves.append((half, [share for share in shares if share is not None]))
    return halves
