"""Reduced and stacked tensors, placed like a sharded tensor with one dimension fewer or more.

Less: sums over some dimensions, and the ranks that share them; or some numbers for each index of the first. More:
several tensors like it in a stack.

A sum over dimension d is complete on a rank unless the tensor is cut along d. Where it is, each rank of a process group
has a summand, and all of them need the sum. So the sum lies like the tensor along its other dimensions, and is the same
on all ranks that hold what lies one behind the other along d:

    [N rows, D columns] placed [Shard(0)]              summed over 1: [N, 1] placed [Shard(0)]
    [N rows, D columns] placed [Shard(0)]              summed over 0: [1, D] placed [Replicate()]
    [N rows, D columns] placed [Shard(0), Shard(1)]    summed over 1: [N, 1] placed [Shard(0), Replicate()]

A ShardedTensor cannot hold copies: there what is summed over a dimension that is cut is a plain tensor, whole on every
rank of its process group.

The ranks of a LocalShardsWrapper do not know how it is cut: it is taken as if it were not, so that only sums over
dimensions that each of its shards has whole are right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.sharding.box import with_ones
from shardopt.sharding.dtensor import dtensor_blocks_like, dtensor_stack_like, dtensor_sum_like
from shardopt.sharding.sharded_tensor import (
    cut_dims,
    holders_of,
    process_group_of,
    sharded_blocks_like,
    sharded_stack_like,
    sharded_sum_like,
    window_of,
)
from shardopt.sharding.view import empty_local_tensor, local_like, local_tensors, tells_of_others


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Ranks that cut a tensor among them: no two hold the same element.

    Args:
        group: their process group.
        dims: the dimensions along which they hold different indices; not negative.
        replicas: the groups of ranks, including this one, of which each has the same part of the tensor.
    """

    group: dist.ProcessGroup
    dims: frozenset[int]
    replicas: tuple[dist.ProcessGroup, ...] = ()


def shard_groups_of(tensor: Tensor) -> tuple[ShardGroup, ...]:
    """Returns the groups of ranks, including this one, that cut a tensor; in the same order on each of them.

    Replicas are in none of the groups, so local sums that are added up over each group in turn make up the sum of the
    whole. A plain tensor has none. Local, no collective.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None or not tells_of_others(tensor):
            return ()
        placed = [(dim, each) for dim, each in enumerate(tensor.placements) if mesh.size(dim) > 1]
        cut = [(dim, each.dim % tensor.ndim) for dim, each in placed if isinstance(each, Shard | _StridedShard)]
        replicas = tuple(mesh.get_group(dim) for dim, each in placed if each.is_replicate())
        return tuple(ShardGroup(mesh.get_group(dim), frozenset([along]), replicas) for dim, along in cut)
    if isinstance(tensor, ShardedTensor):
        return (ShardGroup(process_group_of(tensor), cut_dims(tensor.metadata())),)
    return ()


def is_first_of(tensor: Tensor, group: ShardGroup) -> bool:
    """Whether this rank is the first, in one of a tensor's shard groups, that has elements of it."""
    if isinstance(tensor, ShardedTensor):
        return dist.get_rank() == min(holders_of(tensor), default=-1)
    return group.group.rank() == 0


def sum_memory(tensor: Tensor, dims: Collection[int], dtype: torch.dtype, *stacked: int) -> tuple[Tensor, ...]:
    """Makes zeros for a tensor's sum over some dimensions, which are kept with size 1, for the elements of this rank.

    Args:
        tensor: what is to be summed.
        dims: not negative.
        dtype: of the sum.
        stacked: a first dimension, for so many tensors like it.
    """
    if isinstance(tensor, ShardedTensor) and _is_plain(tensor.metadata(), dims):
        shapes: Iterable[tuple[int, ...]] = [tuple(tensor.metadata().size)]
    elif isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return (torch.zeros(*stacked, 0, dtype=dtype, device=tensor.device),)  # as torch's own for such ranks
    else:
        shapes = [tuple(local.shape) for local in local_tensors(tensor)]
    device = next((local.device for local in local_tensors(tensor)), None) or empty_local_tensor(tensor).device
    return tuple(torch.zeros((*stacked, *with_ones(shape, dims)), dtype=dtype, device=device) for shape in shapes)


def local_views(tensor: Tensor, dims: Collection[int], memory: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns, for each of `local_tensors(tensor)`, the view of the sum over `dims` that its elements add to.

    Args:
        tensor: what is summed.
        dims: those that are summed over, not negative.
        memory: what `sum_memory(tensor, dims, …)` made, or tensors like it.

    Returns:
        Views with the shapes of the local tensors, but for ones in the place of `dims`.
    """
    if isinstance(tensor, ShardedTensor) and _is_plain(tensor.metadata(), dims):
        (whole,) = memory
        return tuple(whole[window_of(shard.metadata, dims)] for shard in tensor.local_shards())
    return tuple(memory)


def sum_like(tensor: Tensor, *dims: int, dtype: torch.dtype | None = None) -> Tensor:
    """Makes zeros placed like the sum of a tensor over some dimensions, kept with size 1.

    Local, no collective. Its memory is what `sum_memory` would make.

    Args:
        tensor: what is summed.
        dims: not negative.
        dtype: of the result; by default the tensor's.
    """
    if isinstance(tensor, ShardedTensor):
        metadata = tensor.metadata()
        dtype = dtype or metadata.tensor_properties.dtype
        memory = sum_memory(tensor, dims, dtype)
        return memory[0] if _is_plain(metadata, dims) else sharded_sum_like(tensor, dims, memory, dtype)
    memory = sum_memory(tensor, dims, dtype or tensor.dtype)
    return dtensor_sum_like(tensor, dims, local_like(tensor, memory)) if isinstance(tensor, DTensor) else memory[0]


def stack_like(tensor: Tensor, count: int) -> Tensor:
    """Makes zeros for `count` tensors like a tensor, stacked along a new first dimension, and placed like it.

    Local, no collective. The local tensors are contiguous, [count, *shape of the tensor's local tensor].
    """
    tensors = local_tensors(tensor)
    made = [torch.zeros((count, *local.shape), dtype=local.dtype, device=local.device) for local in tensors]
    if isinstance(tensor, ShardedTensor):
        return sharded_stack_like(tensor, count, made)
    if not isinstance(tensor, DTensor):
        return made[0]
    return dtensor_stack_like(tensor, count, made[0])


def blocks_like(tensor: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Makes zeros for `count` numbers per index of a tensor's first dimension, [N, count].

    They are placed as the tensor along the first dimension, and whole on all ranks that share an index. Local, no
    collective.

    Args:
        tensor: of at least two dimensions.
        count: at least 1.
        dtype: of the result.
    """
    dims = range(1, len(tensor.metadata().size) if isinstance(tensor, ShardedTensor) else tensor.ndim)
    if isinstance(tensor, ShardedTensor) and _is_plain(tensor.metadata(), dims):
        return torch.zeros(tensor.metadata().size[0], count, dtype=dtype, device=empty_local_tensor(tensor).device)
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return dtensor_blocks_like(tensor, count, torch.zeros(0, dtype=dtype, device=tensor.device))
    made = [torch.zeros(each.shape[0], count, dtype=dtype, device=each.device) for each in local_tensors(tensor)]
    if isinstance(tensor, ShardedTensor):
        return sharded_blocks_like(tensor, count, made, dtype)
    return dtensor_blocks_like(tensor, count, made[0]) if isinstance(tensor, DTensor) else made[0]


def _is_plain(metadata: ShardedTensorMetadata, dims: Collection[int]) -> bool:
    """Whether a ShardedTensor's sum over these dimensions is a plain tensor, whole on every rank."""
    return not cut_dims(metadata).isdisjoint(dims)
