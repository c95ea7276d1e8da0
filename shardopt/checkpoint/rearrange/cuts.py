"""Cuts of local memory: which boxes of new tensors a piece of an old one has, and where in its memory.

    old piece  →  boxes of sections  →  boxes of a new tensor, and strided views of the piece

This is the way of `reads` the other way round: there new memory takes from stored boxes, here old memory gives to new
ones. How a piece is cut follows from its box and the rule, and not from its memory: ranks with replicas of a piece have
the same boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from torch import Tensor

from shardopt.checkpoint.rearrange.binding import Component
from shardopt.checkpoint.rearrange.geometry import Place, Ranges
from shardopt.sharding.box import Box, whole


class Cut(NamedTuple):
    """A box of a new tensor, and where its elements are in a piece of an old one.

    Args:
        first: the index of its first element in the piece.
        axes: those of the box, in its order: the dimension of the piece, the step along it, and the length.
    """

    box: Box
    first: tuple[int, ...]
    axes: tuple[tuple[int, int, int], ...]

    def of(self, memory: Tensor) -> Tensor:
        """Returns a view of the memory of the piece, which has the elements of the box in C order.

        It has the box's sizes where these dimensions have one stride each, else a dimension for each axis.
        """
        strides = memory.stride()
        at = memory.storage_offset() + sum(i * stride for i, stride in zip(self.first, strides, strict=True))
        lengths = [length for _, _, length in self.axes]
        view = memory.as_strided(lengths, [step * strides[dim] for dim, step, _ in self.axes], at)
        try:
            return view.view(self.box.sizes)
        except RuntimeError:  # torch's answer to whether dimensions can be joined
            return view


def cuts_of(component: Component, box: Box) -> Iterator[Cut]:
    """Yields the cuts of a stored component that are in a box of the old tensor."""
    old, new = component.old, component.new
    assert old is not None
    # The box is not cut to the section's bounds: where sections alternate, these end within a round.
    for ranges in old.ranges(box) if old.bounds.intersect(box) is not None else ():
        for found, at, inner in _boxes(new, ranges):
            first = [i - offset for i, offset in zip(old.first(ranges), box.offsets, strict=True)]
            for axis, i in at.items():
                dim, step = old.step_of[axis]
                first[dim] += i * step
            axes = tuple((*old.step_of[axis], ranges[axis][1] - ranges[axis][0]) for axis in inner)
            yield Cut(found, tuple(first), axes)


def boxes_of_zeros(component: Component, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields the boxes of a component that is zeros, in a new tensor of this shape."""
    for ranges in component.new.ranges(whole(shape)):
        for box, _, _ in _boxes(component.new, ranges):
            yield box


def _boxes(place: Place, ranges: Ranges) -> Iterator[tuple[Box, dict[str, int], list[str]]]:
    """Cuts a box of a section into boxes of the tensor that has it: with no hole along any dimension.

    Yields:
        The box; the place of it on each axis that is cut; and the other axes, in the order of the box.
    """
    lengths = {axis: end - begin for axis, (begin, end) in ranges.items()}
    inner: list[list[str]] = []
    for dim in range(len(place.digits)):
        inner.append([])
        extent = 1
        for axis, step in reversed([*place.steps(dim).items()]):
            if lengths[axis] > 1 and step == extent:
                inner[dim].insert(0, axis)
                extent *= lengths[axis]
    sizes = tuple(prod(lengths[axis] for axis in axes) for axes in inner)
    within = [axis for axes in inner for axis in axes]
    cut = [axis for axis, length in lengths.items() if length > 1 and axis not in within]
    first = place.first(ranges)
    for indices in product(*(range(lengths[axis]) for axis in cut)):
        at = dict(zip(cut, indices, strict=True))
        offsets = [*first]
        for axis, i in at.items():
            dim, step = place.step_of[axis]
            offsets[dim] += i * step
        yield Box(tuple(offsets), sizes), at, within
