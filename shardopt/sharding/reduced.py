"""Tensors with a dimension less or more than a sharded tensor that they belong to.

Less: what sums over some dimensions look like, and which ranks share them. More: several tensors like it in a stack.

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

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.sharding.sharded_tensor import holders_of, sharded_tensor_of
from shardopt.sharding.view import empty_local_tensor, local_like, local_tensors, tells_of_others


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Ranks among which a tensor is cut: no two of them hold the same element.

    Args:
        group: their process group.
        dims: the dimensions along which they hold different indices; not negative.
    """

    group: dist.ProcessGroup
    dims: frozenset[int]


def shard_groups_of(tensor: Tensor) -> tuple[ShardGroup, ...]:
    """The cuts through a tensor that this rank is part of, in the same order on each of its ranks.

    Replicas are in none of the groups, so local sums that are added up over the group of each cut in turn make up the
    sum of the whole. A plain tensor has no cut. Local, no collective.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None or not tells_of_others(tensor):
            return ()
        return tuple(
            ShardGroup(mesh.get_group(mesh_dim), frozenset([placement.dim % tensor.ndim]))
            for mesh_dim, placement in enumerate(tensor.placements)
            if isinstance(placement, Shard | _StridedShard) and mesh.size(mesh_dim) > 1
        )
    if isinstance(tensor, ShardedTensor):
        group = tensor._process_group
        return () if group is None else (ShardGroup(group, _cut_dims(tensor.metadata())),)
    return ()


def is_first_of(tensor: Tensor, cut: ShardGroup) -> bool:
    """Whether this rank is the first with a part of a tensor among the ranks of one of its cuts."""
    if isinstance(tensor, ShardedTensor):
        return dist.get_rank() == min(holders_of(tensor), default=-1)
    return cut.group.rank() == 0


def sum_memory(tensor: Tensor, dims: Collection[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Zeros to take up a tensor's sum over some dimensions, which are kept with size 1, for what this rank holds.

    Args:
        tensor: what is to be summed.
        dims: not negative.
        dtype: of the sum.
    """
    if isinstance(tensor, ShardedTensor) and _is_whole(tensor.metadata(), dims):
        shapes: Iterable[tuple[int, ...]] = [tuple(tensor.metadata().size)]
    elif isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return (torch.zeros(0, dtype=dtype, device=tensor.device),)  # as torch's own for such ranks
    else:
        shapes = [tuple(leaf.shape) for leaf in local_tensors(tensor)]
    device = next((leaf.device for leaf in local_tensors(tensor)), None) or empty_local_tensor(tensor).device
    return tuple(torch.zeros(_with_ones(shape, dims), dtype=dtype, device=device) for shape in shapes)


def local_views(tensor: Tensor, dims: Collection[int], memory: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """For each of `local_tensors(tensor)` the part of the sum over some dimensions that its elements belong to.

    Args:
        tensor: what is summed.
        dims: those that are summed over, not negative.
        memory: what `sum_memory(tensor, dims, …)` made, or tensors like it.

    Returns:
        Views with the shapes of the leaves, but for ones in the place of `dims`.
    """
    if isinstance(tensor, ShardedTensor) and _is_whole(tensor.metadata(), dims):
        (whole,) = memory
        return tuple(whole[_window(shard.metadata, dims)] for shard in tensor.local_shards())
    return tuple(memory)


def sum_like(tensor: Tensor, *dims: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros placed as the sum of a tensor over some dimensions is, which are kept with size 1.

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
        return memory[0] if _is_whole(metadata, dims) else _sharded_sum_like(tensor, dims, memory, dtype)
    memory = sum_memory(tensor, dims, dtype or tensor.dtype)
    return _dtensor_sum_like(tensor, dims, memory) if isinstance(tensor, DTensor) else memory[0]


def stack_like(tensor: Tensor, count: int) -> Tensor:
    """Zeros for `count` tensors of a tensor's dtype, stacked along a new first dimension and placed as it is.

    Local, no collective. Its leaves are contiguous, [count, *shape of the tensor's leaf].
    """
    leaves = local_tensors(tensor)
    made = [torch.zeros((count, *leaf.shape), dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
    if isinstance(tensor, ShardedTensor):
        return _sharded_stack_like(tensor, count, made)
    if not isinstance(tensor, DTensor):
        return made[0]
    if tensor.device_mesh.get_coordinate() is None:
        made = [made[0].flatten()]  # as torch's own for ranks outside of the mesh
    spec: Any = tensor._spec
    moved = tuple(_moved(placement, tensor.ndim) for placement in spec.placements)
    order = spec.shard_order and tuple(entry._replace(tensor_dim=entry.tensor_dim + 1) for entry in spec.shard_order)
    whole = torch.empty((count, *tensor.shape), dtype=made[0].dtype, device="meta")
    return _dtensor(spec, moved, order, whole, made[0])


def _moved(placement: Placement, dimensions: int) -> Placement:
    if not isinstance(placement, Shard | _StridedShard):
        return placement
    dim = placement.dim % dimensions + 1
    return (
        _StridedShard(dim, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(dim)
    )


def _with_ones(shape: Sequence[int], dims: Collection[int]) -> tuple[int, ...]:
    return tuple(1 if dim in dims else size for dim, size in enumerate(shape))


def _dtensor_sum_like(tensor: DTensor, dims: Collection[int], memory: Sequence[Tensor]) -> DTensor:
    spec: Any = tensor._spec
    placements = tuple(Replicate() if _splits(each, tensor.ndim, dims) else each for each in spec.placements)
    order = spec.shard_order and tuple(entry for entry in spec.shard_order if entry.tensor_dim not in dims)
    whole = torch.empty(_with_ones(tensor.shape, dims), dtype=memory[0].dtype if memory else None, device="meta")
    return _dtensor(spec, placements, order, whole, local_like(tensor, memory))


def _dtensor(spec: Any, placements: tuple[Placement, ...], order: Any, whole: Tensor, local: Tensor) -> DTensor:
    """A DTensor of the global shape of `whole`, on the mesh of another's spec, whose splits are read as there.

    Splits of one dimension stay or go together, so what stays of placements or of their order means what it did.
    """
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    kept = DTensorSpec(
        spec.mesh,
        placements,
        TensorMeta(whole.shape, whole.stride(), whole.dtype),
        shard_order=None if strided else order,  # type: ignore[arg-type]  # None is its default
        use_strided_shard_as_shard_order=spec.use_strided_shard_as_shard_order if strided else None,
    )
    return DTensor(local, kept, requires_grad=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _splits(placement: Placement, dimensions: int, dims: Collection[int]) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim % dimensions in dims


def _cut_dims(metadata: ShardedTensorMetadata) -> frozenset[int]:
    """The dimensions along which a ShardedTensor is cut."""
    return frozenset(
        dim
        for dim, size in enumerate(metadata.size)
        if any(shard.shard_sizes[dim] != size for shard in metadata.shards_metadata)
    )


def _is_whole(metadata: ShardedTensorMetadata, dims: Collection[int]) -> bool:
    """Whether a ShardedTensor's sum over these dimensions is a plain tensor on every rank."""
    return not _cut_dims(metadata).isdisjoint(dims)


def _sharded_sum_like(
    tensor: ShardedTensor, dims: Collection[int], memory: Sequence[Tensor], dtype: torch.dtype
) -> ShardedTensor:
    def summed(shard: ShardMetadata) -> ShardMetadata:
        return dataclasses.replace(shard, shard_sizes=list(_with_ones(shard.shard_sizes, dims)))

    return _resharded(tensor, summed, _with_ones(tensor.metadata().size, dims), memory, moved=0, dtype=dtype)


def _sharded_stack_like(tensor: ShardedTensor, count: int, memory: Sequence[Tensor]) -> ShardedTensor:
    def stacked(shard: ShardMetadata) -> ShardMetadata:
        offsets, sizes = [0, *shard.shard_offsets], [count, *shard.shard_sizes]
        return dataclasses.replace(shard, shard_offsets=offsets, shard_sizes=sizes)

    dtype = tensor.metadata().tensor_properties.dtype
    return _resharded(tensor, stacked, (count, *tensor.metadata().size), memory, moved=1, dtype=dtype)


def _resharded(
    tensor: ShardedTensor,
    change: Callable[[ShardMetadata], ShardMetadata],
    shape: tuple[int, ...],
    memory: Sequence[Tensor],
    moved: int,
    dtype: torch.dtype,
) -> ShardedTensor:
    """A ShardedTensor whose shards are those of another, changed.

    Args:
        change: gives the metadata of a shard from that of the other's.
        moved: by how much the number of a dimension has grown.
        dtype: of the memory; a rank without any has to be told.
    """
    metadata = tensor.metadata()
    shards = [change(shard) for shard in metadata.shards_metadata]
    properties = dataclasses.replace(metadata.tensor_properties, requires_grad=False, pin_memory=False)
    properties.dtype = dtype
    spec = tensor.sharding_spec()
    if isinstance(spec, EnumerableShardingSpec):
        spec = EnumerableShardingSpec(shards)
    elif isinstance(spec, ChunkShardingSpec) and isinstance(spec.dim, int) and spec.dim >= 0:
        spec = ChunkShardingSpec(spec.dim + moved, spec.placements)
    told = ShardedTensorMetadata(shards, torch.Size(shape), properties)
    here = [change(shard.metadata) for shard in tensor.local_shards()]
    return sharded_tensor_of(tensor, spec, told, here, memory)


def _window(shard: ShardMetadata, dims: Collection[int]) -> tuple[slice, ...]:
    """The index that takes a shard's part out of a whole sum over some dimensions."""
    spans = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    return tuple(slice(None) if dim in dims else slice(at, at + size) for dim, (at, size) in enumerate(spans))
