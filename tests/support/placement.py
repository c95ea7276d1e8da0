"""Global tensors on ranks, and back: ShardedTensors cut into boxes, gradients placed as parameters, comparisons.

Used by the catalogues of layouts: `layouts` (every kind), `matrices`, `tables` (rows), `clipped` (on some ranks only)
and `sharded_state` (for checkpoints).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from shardopt.sharding.box import Box
from shardopt.sharding.gradients import takes_gradient
from shardopt.sharding.view import assemble, local_tensors, view_of


def at(box: Box) -> tuple[slice, ...]:
    """Returns the index that takes a box out of a tensor."""
    return tuple(map(slice, box.offsets, box.ends))


def two_on_first_none_on_last(ranks: int) -> list[int]:
    """Returns the holder of each shard: two on rank 0, one on each other rank but the last of several."""
    return [0, *range(max(ranks - 1, 1))]


def runs(shape: Sequence[int], dim: int, ends: Sequence[int]) -> list[Box]:
    """Cuts a shape along one dimension at these ends, ascending and the last one the size."""
    boxes = []
    for begin, end in zip([0, *ends], ends, strict=False):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = begin, end - begin
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def ends_of(sizes: Sequence[int]) -> list[int]:
    """Returns the ends of runs of these sizes, one behind the other."""
    return list(accumulate(sizes))


def sharded_tensor_of(
    full: Tensor,
    boxes: Sequence[Box],
    holders: Sequence[int],
    rank: int | None = None,
    requires_grad: bool = False,
    empty: bool = True,
) -> ShardedTensor:
    """Makes a ShardedTensor of copies of boxes of a tensor that every rank has, without a collective.

    Args:
        full: the whole.
        boxes, holders: the shards, and the rank that holds each of them.
        rank: this rank; default: of the job.
        empty: whether a rank has a local shard for an empty box; the metadata has one in any case.
    """
    rank = dist.get_rank() if rank is None else rank
    shards = [
        ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{holder}/cpu")
        for box, holder in zip(boxes, holders, strict=True)
    ]
    local = [
        LocalShard(full[at(box)].clone(memory_format=torch.contiguous_format).requires_grad_(requires_grad), metadata)
        for box, holder, metadata in zip(boxes, holders, shards, strict=True)
        if holder == rank and (empty or box.numel)
    ]
    properties = TensorProperties(dtype=full.dtype, requires_grad=requires_grad)
    whole = ShardedTensorMetadata(shards, full.shape, properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, whole)


def pieces_of(full: Tensor, like: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns, for each piece that this rank has of `like`, the elements of the whole and those that are there."""
    return [(full[at(piece.box)], piece.tensor) for piece in view_of(like).pieces]


def fill(tensor: Tensor, full: Tensor) -> None:
    """Writes this rank's pieces of a whole tensor."""
    for expected, actual in pieces_of(full, tensor):
        actual.copy_(expected)


def same(tensor: Tensor, full: Tensor) -> bool:
    """Whether this rank's pieces have the bits of the whole tensor."""
    return all(torch.equal(actual, expected) for expected, actual in pieces_of(full, tensor))


def give_gradient(parameter: Tensor, full: Tensor | None) -> None:
    """Sets this rank's shards of a whole gradient, sparse or dense; None takes it away."""
    local = local_tensors(parameter)
    holders = (parameter,) if takes_gradient(parameter) else local
    if full is None:
        for holder in holders:
            holder.grad = None
        return
    gradients = [_local_gradient(full, each, where) for each, where in zip(local, _boxes(parameter), strict=True)]
    given = [assemble(parameter, gradients)] if takes_gradient(parameter) else gradients
    for holder, gradient in zip(holders, given, strict=True):
        holder.grad = gradient


def _boxes(parameter):
    """The box of each local tensor; None where it is empty, and a list where it has several."""
    pieces = view_of(parameter).pieces
    if not takes_gradient(parameter):
        return [piece.box for piece in pieces]
    return [[piece.box for piece in pieces]]


def _local_gradient(full, each, boxes):
    """Returns the gradient of a local tensor: that of its boxes, one behind the other along the rows."""
    boxes = boxes if isinstance(boxes, list) else [boxes]
    if not full.is_sparse:
        made = [full[tuple(map(slice, box.offsets, box.ends))] for box in boxes]
        return torch.cat(made).clone().view(each.shape) if made else torch.zeros_like(each).detach()
    rows, values, at = [], [], 0
    indices = full._indices()[0]
    for box in boxes:
        here = (indices >= box.offsets[0]) & (indices < box.ends[0])
        rows.append(indices[here] - box.offsets[0] + at)
        values.append(full._values()[here][(slice(None), *map(slice, box.offsets[1:], box.ends[1:]))])
        at += box.sizes[0]
    index = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    chosen = torch.cat(values) if values else each.detach().new_empty((0, *each.shape[1:]))
    return torch.sparse_coo_tensor(index[None], chosen, each.shape, check_invariants=True)
