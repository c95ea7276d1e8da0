"""Tensors that keep all but one dimension of another, and the ranks that share what is summed over that dimension.

A sum over dimension d of a sharded tensor is complete on a rank unless d is cut. Where it is, each rank of a process
group has a summand, and all of them get the sum. So the sum lies like the tensor along the other dimensions, and is the
same on all ranks that lie one behind the other along d:

    [N rows, D columns] placed [Shard(0)]              summed over d = 1: [N, 1] placed [Shard(0)]
    [N rows, D columns] placed [Shard(0)]              summed over d = 0: [1, D] placed [Replicate()]
    [N rows, D columns] placed [Shard(0), Shard(1)]    summed over d = 1: [N, 1] placed [Shard(0), Replicate()]

A ShardedTensor cannot hold copies, so there what is summed over a dimension that is cut is a plain tensor, whole on
every rank of its process group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.sharding.view import leaves_of, sharded_tensor_of


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranks among which a tensor is cut: no two of them hold the same element.

    Args:
        group: their process group.
        dims: the dimensions along which they hold different indices; along the others they hold the same, unless
            `dims` has several.
    """

    group: dist.ProcessGroup
    dims: frozenset[int]


def cuts_of(tensor: Tensor) -> tuple[Cut, ...]:
    """The cuts through a tensor that this rank is part of, in the same order on each of its ranks.

    What its local tensors add up to, added up over the group of each cut in turn, is what the whole adds up to:
    replicas are in none of these groups. A plain tensor has no cut. Local, no collective.

    Args:
        tensor: one that `view_of` can describe, no LocalShardsWrapper.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            return ()
        return tuple(
            Cut(mesh.get_group(mesh_dim), frozenset([placement.dim % tensor.ndim]))
            for mesh_dim, placement in enumerate(tensor.placements)
            if isinstance(placement, Shard | _StridedShard) and mesh.size(mesh_dim) > 1
        )
    if isinstance(tensor, ShardedTensor):
        group = tensor._process_group
        return () if group is None else (Cut(group, _cut_dims(tensor.metadata())),)
    return ()


def sum_like(tensor: Tensor, dim: int) -> Tensor:
    """Zeros in the place of a tensor's sum over one dimension, which is kept with size 1.

    Local, no collective. The dtype is the tensor's. There is memory for what this rank needs: the sums of the indices
    that it holds along other dimensions.

    Args:
        tensor: one that `view_of` can describe, no LocalShardsWrapper; not changed.
        dim: the dimension that is summed over, not negative.
    """
    if isinstance(tensor, DTensor):
        return _dtensor_sum_like(tensor, dim)
    if isinstance(tensor, ShardedTensor):
        metadata = tensor.metadata()
        if dim not in _cut_dims(metadata):
            return _sharded_sum_like(tensor, metadata, dim)
        device = next((leaf.device for leaf in leaves_of(tensor)), tensor._get_preferred_device())
        dtype = metadata.tensor_properties.dtype
        return torch.zeros(_with_one(metadata.size, dim), dtype=dtype, device=device)
    return tensor.new_zeros(_with_one(tensor.shape, dim))


def parts_for(tensor: Tensor, dim: int, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """For each of `leaves_of(tensor)` the part of its sum over one dimension that its elements go into.

    Args:
        tensor: what is summed.
        dim: the dimension that is summed over, not negative.
        sums: the leaves of what `sum_like(tensor, dim)` made, or tensors of their shapes.

    Returns:
        Views with the shapes of the leaves, but for a 1 in the place of `dim`.
    """
    if not isinstance(tensor, ShardedTensor) or dim not in _cut_dims(tensor.metadata()):
        return tuple(sums)
    (whole,) = sums
    return tuple(whole[_window(shard.metadata, dim)] for shard in tensor.local_shards())


def _with_one(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], 1, *shape[dim + 1 :])


def _dtensor_sum_like(tensor: DTensor, dim: int) -> DTensor:
    spec = tensor._spec
    placements = tuple(Replicate() if _splits(placement, tensor.ndim, dim) else placement for placement in spec.placements)
    # Splits of one dimension stay or go together, so what is left of their order still holds.
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    order = None if spec.shard_order is None or strided else tuple(e for e in spec.shard_order if e.tensor_dim != dim)
    meta = torch.empty(_with_one(tensor.shape, dim), device="meta")
    local = tensor._local_tensor
    inside = spec.mesh.get_coordinate() is not None  # torch gives other ranks an empty tensor of one dimension
    made = local.new_zeros(_with_one(local.shape, dim) if inside else (0,))
    kept = DTensorSpec(
        spec.mesh,
        placements,
        TensorMeta(meta.shape, meta.stride(), local.dtype),
        shard_order=order,
        use_strided_shard_as_shard_order=spec.use_strided_shard_as_shard_order if strided else None,
    )
    return DTensor(made, kept, requires_grad=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _splits(placement: Placement, ndim: int, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim % ndim == dim


def _cut_dims(metadata: ShardedTensorMetadata) -> frozenset[int]:
    """The dimensions along which a ShardedTensor is cut into several shards."""
    return frozenset(
        dim
        for dim, size in enumerate(metadata.size)
        if any(shard.shard_sizes[dim] != size for shard in metadata.shards_metadata)
    )


def _sharded_sum_like(tensor: ShardedTensor, metadata: ShardedTensorMetadata, dim: int) -> ShardedTensor:
    def summed(shard: ShardMetadata) -> ShardMetadata:
        offsets, sizes = list(shard.shard_offsets), list(shard.shard_sizes)
        offsets[dim], sizes[dim] = 0, 1
        return dataclasses.replace(shard, shard_offsets=offsets, shard_sizes=sizes)

    shards = [summed(shard) for shard in metadata.shards_metadata]
    properties = dataclasses.replace(metadata.tensor_properties, requires_grad=False, pin_memory=False)
    told = ShardedTensorMetadata(shards, torch.Size(_with_one(metadata.size, dim)), properties)
    spec = tensor.sharding_spec()
    here = [summed(shard.metadata) for shard in tensor.local_shards()]
    leaves = [shard.tensor.new_zeros(_with_one(shard.tensor.shape, dim)) for shard in tensor.local_shards()]
    return sharded_tensor_of(
        tensor, EnumerableShardingSpec(shards) if isinstance(spec, EnumerableShardingSpec) else spec, told, here, leaves
    )


def _window(shard: ShardMetadata, dim: int) -> tuple[slice, ...]:
    """The index by which a shard's part is taken out of a whole sum over one dimension."""
    spans = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    return tuple(slice(None) if d == dim else slice(start, start + size) for d, (start, size) in enumerate(spans))
