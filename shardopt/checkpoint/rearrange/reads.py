"""Reads of rearranged tensors: reads boxes of stored tensors into views of a new tensor's memory.

    new piece  →  boxes of sections  →  boxes of a stored tensor, and strided views of the piece  →  reads of its files

Where the wanted elements are a box of the stored tensor, the stored tensor's own reads do it. Where they are strided,
as every other head, the bytes of each stored box are taken as those of a tensor of more dimensions, where they are a
box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add

import torch
from torch import Tensor

from shardopt.checkpoint.rearrange.binding import Component
from shardopt.checkpoint.rearrange.geometry import Place, Ranges, Run, as_digits, joined_runs
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.open_file import ReadRequest
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import Piece

Reads = Iterator[ReadRequest]


def views_of(component: Component, piece: Piece) -> Iterator[tuple[dict[str, tuple[int, int]], Tensor]]:
    """Yields a piece's shares of a component: boxes of axes, and views of memory with one dimension per axis.

    The dimensions are in the order of the axes in the box.
    """
    box, tensor = piece
    common = component.new.bounds.intersect(box)
    for ranges in component.new.ranges(common) if common is not None else ():
        at, stride = tensor.storage_offset(), tensor.stride()
        for dim, index in enumerate(component.new.first(ranges)):
            at += (index - box.offsets[dim]) * stride[dim]
        steps = component.new.step_of
        strides = [steps[axis][1] * stride[steps[axis][0]] for axis in ranges]
        yield ranges, tensor.as_strided([end - begin for begin, end in ranges.values()], strides, at)


def reads_of(component: Component, piece: Piece, reader: CheckpointReader) -> Reads:
    """Yields the reads that fill a piece's share of a stored component."""
    for ranges, memory in views_of(component, piece):
        yield from _reads(component, ranges, memory, reader)


def _reads(component: Component, ranges: Ranges, memory: Tensor, reader: CheckpointReader) -> Reads:
    """Yields the reads of a box of a section; `memory` has one dimension per axis."""
    key, old = component.key, component.old
    assert key is not None and old is not None
    dims = _runs(old, ranges, memory)
    first = old.first(ranges)
    if all(_is_range(runs) for runs in dims):
        sizes = tuple(runs[0].length if runs else 1 for runs in dims)
        target = memory.as_strided(sizes, [runs[0].stride if runs else 1 for runs in dims], memory.storage_offset())
        yield from reader.requests([(key, [Piece(Box(first, sizes), target)])])
        return
    sizes = tuple(1 + sum(run.step * (run.length - 1) for run in runs) for runs in dims)
    outline = torch.empty(sizes, dtype=memory.dtype, device="meta")  # tells which request is for which elements
    requests = reader.requests([(key, [Piece(Box(first, sizes), outline)])])
    places = [_place_of(request, outline) for request in requests]
    for request, place in zip(requests, places, strict=True):
        if place is None:
            yield from _one_by_one(component, ranges, memory, reader)
            return
        start, order = place
        stored = Box(tuple(map(add, first, start)), _sizes_of(request, order, len(sizes)))
        for part in old.ranges(stored):
            common = {
                axis: (max(begin, part[axis][0]), min(end, part[axis][1])) for axis, (begin, end) in ranges.items()
            }
            if any(begin >= end for begin, end in common.values()):
                continue
            target = _narrowed(memory, ranges, common)
            runs, at = _runs(old, common, target), old.first(common)
            in_box = [
                (size, offset, []) if dim is None else (size, offset + at[dim] - stored.offsets[dim], runs[dim])
                for size, offset, dim in zip(request.sizes, request.wanted.offsets, order, strict=True)
            ]
            yield from _of_box(request, in_box, target, int(target.storage_offset()))


def _runs(place: Place, ranges: Ranges, memory: Tensor) -> list[list[Run]]:
    """Returns, for each dimension of a tensor, how a box of a section runs through it and through memory."""
    strides = dict(zip(ranges, memory.stride(), strict=True))
    return [
        joined_runs([Run(step, ranges[axis][1] - ranges[axis][0], strides[axis]) for axis, step in steps.items()])
        for steps in map(place.steps, range(len(place.digits)))
    ]


def _is_range(runs: Sequence[Run]) -> bool:
    return not runs or (len(runs) == 1 and runs[0].step == 1)


def _place_of(request: ReadRequest, outline: Tensor) -> tuple[list[int], list[int | None]] | None:
    """Returns where a request's target begins in the outline, and how its dimensions map to the request's.

    None if they are not the same dimensions.
    """
    start, rest = [], request.target.storage_offset()
    for stride in outline.stride():
        start.append(rest // stride)
        rest %= stride
    shape, strides = request.target.shape, request.target.stride()
    # A dimension of one index has any stride, also that of its neighbour: where one ends tells them apart.
    if len(shape) == outline.ndim and all(
        size == 1 or (stride == of and begin + size <= extent)
        for size, stride, of, begin, extent in zip(shape, strides, outline.stride(), start, outline.shape, strict=True)
    ):
        return start, [*range(outline.ndim)]
    order: list[int | None] = []
    for size, stride in zip(shape, strides, strict=True):
        fitting = (
            dim
            for dim, of in enumerate(outline.stride())
            if of == stride and dim not in order and start[dim] + size <= outline.shape[dim]
        )
        dim = None if size == 1 else next(fitting, -1)
        if dim == -1:
            return None
        order.append(dim)
    return start, order


def _sizes_of(request: ReadRequest, order: Sequence[int | None], ndim: int) -> tuple[int, ...]:
    """Returns the sizes of a request along the dimensions of the stored tensor."""
    sizes = [1] * ndim
    for dim, size in zip(order, request.wanted.sizes, strict=True):
        if dim is not None:
            sizes[dim] = size
    return tuple(sizes)


def _narrowed(memory: Tensor, ranges: Ranges, within: Ranges) -> Tensor:
    """Returns the memory of a box of a section that is within another box."""
    for dim, (axis, (begin, _)) in enumerate(ranges.items()):
        first, end = within[axis]
        memory = memory.narrow(dim, first - begin, end - first)
    return memory


def _of_box(request: ReadRequest, dims: list[tuple[int, int, list[Run]]], memory: Tensor, at: int) -> Reads:
    """Yields the reads of strided elements of a stored box.

    Args:
        request: any that reads from the box.
        dims: for each of its dimensions the size, the least index that is wanted, and how the wanted ones go on.
        memory: that they are read into, from the element `at` on.
    """
    sizes: list[int] = []
    offsets: list[int] = []
    counts: list[int] = []
    strides: list[int] = []
    for i, (size, first, runs) in enumerate(dims):
        digits = as_digits(size, first, runs)
        if digits is None:  # of odd cuts: each index of the outermost run by itself
            outer, *inner = runs
            for j in range(outer.length):
                one = [*dims[:i], (size, first + j * outer.step, inner), *dims[i + 1 :]]
                yield from _of_box(request, one, memory, at + j * outer.stride)
            return
        sizes += digits[0]
        offsets += digits[1]
        counts += digits[2]
        strides += [run.stride for run in runs] + [1] * (len(digits[0]) - len(runs))
    target = memory.as_strided(counts, strides, at)
    box = Box(tuple(offsets), tuple(counts))
    yield request._replace(sizes=tuple(sizes), wanted=box, target=target)


def _one_by_one(component: Component, ranges: Ranges, memory: Tensor, reader: CheckpointReader) -> Reads:
    """Yields the reads for each index of the outermost axis, for a dimension that is not one range."""
    assert component.old is not None
    steps = component.old.step_of
    strided = [dim for dim, runs in enumerate(_runs(component.old, ranges, memory)) if not _is_range(runs)]
    axes = [axis for axis, (begin, end) in ranges.items() if steps[axis][0] in strided and end - begin > 1]
    outer = max(axes, key=lambda axis: steps[axis][1])
    for i in range(*ranges[outer]):
        one = {**ranges, outer: (i, i + 1)}
        yield from _reads(component, one, _narrowed(memory, ranges, one), reader)
