"""ShardedTensors: uneven shards, several or none per rank, described by metadata."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec, ShardingSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

from shardopt.sharding.box import Box, cover_faults, whole, with_ones
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import View, refusal, shard_pieces

_BY_ITSELF = "_shardopt_by_itself"


def view_of_sharded_tensor(tensor: ShardedTensor, key: str) -> View:
    """Returns the view of a ShardedTensor; raises LayoutError as `view_of`."""
    # The metadata is asked, not the tensor: attributes of a ShardedTensor go through __torch_function__, which warns.
    metadata = tensor.metadata()
    shape = tuple(metadata.size)
    dtype = metadata.tensor_properties.dtype
    placed = []
    for meta in metadata.shards_metadata:
        holder = None if meta.placement is None else meta.placement.rank()
        if holder is None:
            actual = f"a shard placed on {meta.placement}"
            raise refusal(key, actual, "placements of the form rank:R/device", "name the rank of each shard")
        placed.append((tuple(meta.shard_offsets), tuple(meta.shard_sizes), holder))
    # Others, in groups like it, may hold the same tensor, as with a mesh that is a cut.
    cut = process_group_of(tensor).size() < dist.get_world_size()
    layout, faults = _sharded_layout(shape, tuple(placed), cut)
    if faults:
        raise refusal(key, "; ".join(faults), f"shards that cover {shape} once", "mend the metadata of its shards")

    rank = dist.get_rank()
    shards = [
        (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor)
        for shard in tensor.local_shards()
    ]
    pieces = shard_pieces(shape, dtype, shards, key) if shards else ()
    have = [piece.box for piece in pieces]
    want = [box for box, holders in zip(layout.boxes, layout.holders or (), strict=True) if rank in holders]
    if have != want:
        raise refusal(
            key,
            f"local shards {[str(box) for box in have]} on rank {rank}",
            f"{[str(box) for box in want]}, as the metadata of all shards says",
            "make the ShardedTensor anew from its local shards",
        )
    return View(
        shape, dtype, pieces, dataclasses.replace(layout, local=True) if _BY_ITSELF in tensor.__dict__ else layout
    )


def process_group_of(tensor: ShardedTensor) -> dist.ProcessGroup:
    """Returns the process group that a ShardedTensor is sharded over; torch sets it, and has no public call for it."""
    return tensor._process_group


def holders_of(tensor: ShardedTensor) -> set[int]:
    """Returns the ranks of the job with elements of a ShardedTensor; the same on every rank."""
    shards = [shard for shard in tensor.metadata().shards_metadata if all(shard.shard_sizes)]
    return {rank for shard in shards if shard.placement and (rank := shard.placement.rank()) is not None}


@lru_cache(maxsize=4096)
def _sharded_layout(
    shape: tuple[int, ...], placed: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...], cut: bool
) -> tuple[Layout, tuple[str, ...]]:
    """Returns the layout that the metadata of all shards describe, and its faults."""
    if prod(shape) == 0:
        return Layout.from_holders(shape, {whole(shape): {holder for _, _, holder in placed}}, cut), ()
    holders: dict[Box, list[int]] = {}
    for offsets, sizes, holder in placed:
        if prod(sizes):  # an empty chunk of a ChunkShardingSpec may have an offset past the end
            holders.setdefault(Box(offsets, sizes), []).append(holder)
    return Layout.from_holders(shape, holders, cut), tuple(cover_faults(shape, holders))


def sharded_tensor_like(like: ShardedTensor, tensors: Sequence[Tensor]) -> ShardedTensor:
    """Makes a ShardedTensor cut like another, from local tensors with their dtype, without a gradient."""
    metadata = like.metadata()
    properties = copy.copy(metadata.tensor_properties)
    properties.dtype = tensors[0].dtype if tensors else properties.dtype
    properties.requires_grad = properties.pin_memory = False
    new_metadata = ShardedTensorMetadata(metadata.shards_metadata, metadata.size, properties)
    here = [shard.metadata for shard in like.local_shards()]
    return _made(like.sharding_spec(), new_metadata, here, tensors, process_group_of(like))


def sharded_tensor_at(
    shape: Sequence[int],
    placed: Sequence[tuple[Box, int]],
    tensors: Sequence[Tensor],
    like: Tensor,
    by_itself: bool = False,
) -> ShardedTensor:
    """Makes a ShardedTensor over the ranks of the job, with a freely chosen rank for each shard.

    Local: no collective. The job has to have a process group.

    Args:
        shape: of the whole.
        placed: the box of each shard, and the rank of the job that holds it; the same on every rank that has it so.
        tensors: this rank's shards, in that order.
        like: a tensor of their dtype, on the kind of device that they are on.
        by_itself: whether other ranks may have all of it as well, placed among themselves: then ranks that save or
            count it have to tell each other of theirs first.
    """
    rank = dist.get_rank()
    # torch compares a local shard's device with its placement, index and all; which index others use is not known here.
    device_of = {rank: str(like.device)}
    shards = [
        ShardMetadata([*box.offsets], [*box.sizes], f"rank:{holder}/{device_of.get(holder, like.device.type)}")
        for box, holder in placed
    ]
    properties = TensorProperties(dtype=like.dtype, layout=torch.strided, requires_grad=False)
    metadata = ShardedTensorMetadata(shards, torch.Size(shape), properties)
    here = [shard for shard, (_, holder) in zip(shards, placed, strict=True) if holder == rank]
    made = _made(EnumerableShardingSpec(shards), metadata, here, tensors, dist.group.WORLD)
    if by_itself:
        made.__dict__[_BY_ITSELF] = True
    return made


def _made(
    spec: ShardingSpec,
    metadata: ShardedTensorMetadata,
    here: Sequence[ShardMetadata],
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> ShardedTensor:
    """Makes a ShardedTensor from this rank's shards and their metadata, without a collective or a copy."""
    # torch's own constructor from local shards refuses the empty chunks past the end that its ChunkShardingSpec makes.
    made: ShardedTensor = ShardedTensor.__new__(
        ShardedTensor,
        spec,
        metadata.size,
        dtype=metadata.tensor_properties.dtype,
        layout=torch.strided,
        pin_memory=False,
        requires_grad=False,
    )
    made._metadata = metadata
    # It sets the process group and the (empty) remote shards.
    made._prepare_init(process_group=group, init_rrefs=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    made._local_shards = [LocalShard(local, shard) for local, shard in zip(tensors, here, strict=True)]
    return made


def sharded_sum_like(
    tensor: ShardedTensor, dims: Collection[int], memory: Sequence[Tensor], dtype: torch.dtype
) -> ShardedTensor:
    """Makes a ShardedTensor cut like the sum of another over `dims`, which are kept with size 1, uncut."""

    def summed(shard: ShardMetadata) -> ShardMetadata:
        return dataclasses.replace(shard, shard_sizes=list(with_ones(shard.shard_sizes, dims)))

    return _resharded(tensor, summed, with_ones(tensor.metadata().size, dims), memory, added_dims=0, dtype=dtype)


def sharded_stack_like(tensor: ShardedTensor, count: int, memory: Sequence[Tensor]) -> ShardedTensor:
    """Makes a ShardedTensor cut like `count` tensors like another, stacked along a new first dimension."""

    def stacked(shard: ShardMetadata) -> ShardMetadata:
        offsets, sizes = [0, *shard.shard_offsets], [count, *shard.shard_sizes]
        return dataclasses.replace(shard, shard_offsets=offsets, shard_sizes=sizes)

    dtype = tensor.metadata().tensor_properties.dtype
    return _resharded(tensor, stacked, (count, *tensor.metadata().size), memory, added_dims=1, dtype=dtype)


def sharded_blocks_like(
    tensor: ShardedTensor, count: int, memory: Sequence[Tensor], dtype: torch.dtype
) -> ShardedTensor:
    """Makes a ShardedTensor of `count` numbers per index of the first dimension, and cut only along that."""

    def blocks(shard: ShardMetadata) -> ShardMetadata:
        offsets, sizes = [shard.shard_offsets[0], 0], [shard.shard_sizes[0], count]
        return dataclasses.replace(shard, shard_offsets=offsets, shard_sizes=sizes)

    return _resharded(tensor, blocks, (tensor.metadata().size[0], count), memory, added_dims=0, dtype=dtype)


def _resharded(
    tensor: ShardedTensor,
    change: Callable[[ShardMetadata], ShardMetadata],
    shape: tuple[int, ...],
    memory: Sequence[Tensor],
    added_dims: int,
    dtype: torch.dtype,
) -> ShardedTensor:
    """Makes a ShardedTensor from the changed shards of another.

    Args:
        change: gives the metadata of a shard from that of the other's.
        added_dims: by how much the number of a dimension has grown.
        dtype: of the memory, which a rank may have none of.
    """
    metadata = tensor.metadata()
    shards = [change(shard) for shard in metadata.shards_metadata]
    properties = dataclasses.replace(metadata.tensor_properties, requires_grad=False, pin_memory=False)
    properties.dtype = dtype
    spec = tensor.sharding_spec()
    if isinstance(spec, EnumerableShardingSpec):
        spec = EnumerableShardingSpec(shards)
    elif isinstance(spec, ChunkShardingSpec) and isinstance(spec.dim, int) and spec.dim >= 0:
        spec = ChunkShardingSpec(spec.dim + added_dims, spec.placements)
    new_metadata = ShardedTensorMetadata(shards, torch.Size(shape), properties)
    here = [change(shard.metadata) for shard in tensor.local_shards()]
    return _made(spec, new_metadata, here, memory, process_group_of(tensor))


def cut_dims(metadata: ShardedTensorMetadata) -> frozenset[int]:
    """Returns the dimensions along which a ShardedTensor is cut."""
    return frozenset(
        dim
        for dim, size in enumerate(metadata.size)
        if any(shard.shard_sizes[dim] != size for shard in metadata.shards_metadata)
    )


def window_of(shard: ShardMetadata, dims: Collection[int]) -> tuple[slice, ...]:
    """Returns the index that selects a shard's section from a whole sum over some dimensions."""
    spans = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    return tuple(slice(None) if dim in dims else slice(at, at + size) for dim, (at, size) in enumerate(spans))
