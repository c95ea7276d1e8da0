"""Steps of several parameters as lists of tensors: which go together, and sums for each parameter of a list.

A list is stepped by torch's foreach operations. On the CPU these are loops over its tensors and compute the bits of a
single tensor's operation; on an accelerator one launch takes many tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.communicating import ParameterStep

Tensors = list[Tensor] | tuple[Tensor, ...]

MOST_ON_CPU, MOST_ELSEWHERE = 1 << 16, 1 << 24


def batched(steps: Sequence[Any], alike: Callable[[Any], Any]) -> list[list[Any]]:
    """Groups steps that may be taken as lists of tensors, so that scratch memory stays bounded.

    Those of a batch share options, device and dtype; all have a gradient or none, cuts or none, and elements here or
    none. A step is alone where only other ranks' shards may have a gradient, or where its parameter may share memory
    with another, which then sees its update. On the CPU a batch is as much as stays in its caches, elsewhere as much
    as a large parameter.

    Args:
        steps: in their order.
        alike: returns what else must be equal within a batch.
    """
    batches: list[list[Any]] = []
    rooms: dict[Any, tuple[list[Any], int]] = {}
    shared = _over_one_memory(steps)
    for step in steps:
        alone = step if step in shared or (step.gradients is None and not step.all_or_none) else None
        same = (id(step.group), step.view.dtype, step.gradients is None, step.is_held, bool(step.cuts), alone)
        key = (*same, step.device, alike(step))
        elements = sum(local.numel() for local in step.local_tensors)
        batch, room = rooms.get(key, ([], 0))
        if elements > room or not batch:
            batch, room = [], MOST_ON_CPU if step.device.type == "cpu" else MOST_ELSEWHERE
            batches.append(batch)
        batch.append(step)
        rooms[key] = batch, room - elements
    return batches


def _over_one_memory(steps: Sequence[Any]) -> set[Any]:
    """Returns the steps with a local tensor that begins before one of another step ends."""
    found: set[Any] = set()
    held = ((place, local) for place, step in enumerate(steps) for local in step.local_tensors if local.numel())
    last, owner = 0, 0
    for begin, end, place in sorted((*_span(local), place) for place, local in held):
        if begin < last:
            found.update((steps[owner], steps[place]))
        if end > last:
            last, owner = end, place
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses at which a tensor's memory begins and ends."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    farthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (farthest + 1) * tensor.itemsize


def owners_of(steps: Sequence[ParameterStep]) -> Tensor:
    """Returns for each local tensor of S steps the place of its step: int64, on their device."""
    places = [place for place, step in enumerate(steps) for _ in step.local_tensors]
    return torch.tensor(places, dtype=torch.int64, device="cpu").to(steps[0].device, non_blocking=True)


def add_squares(into: Tensor, owners: Tensor, tensors: Tensors) -> None:
    """Adds the sum of squares of each of N tensors, at least one of each owner, to the number of its owner.

    In their order, as replicas have to get the same bits: that of `index_add_` is left to the GPU.

    Args:
        into: [S], of the dtype to add up in.
        owners: [N], as `owners_of` returns it.
        tensors: N.
    """
    squares = torch.stack(torch._foreach_norm(tensors, dtype=into.dtype)).square_()
    if len(squares) == len(into):
        into.add_(squares)
    else:
        into.index_put_((owners,), squares, accumulate=True)
