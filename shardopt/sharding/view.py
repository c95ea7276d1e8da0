"""Any tensor seen as boxes: its global shape and dtype, the memory this rank holds, and the layout of the whole.

This is the one file that knows DTensor, `_StridedShard`, ShardedTensor and LocalShardsWrapper, and the one place
under `sharding` that reaches for private parts of torch. Nothing here copies, communicates or records gradients,
except that `gradient_leaves` redistributes a gradient that has another placement than its parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardopt.errors import GradientError, LayoutError, Problem
from shardopt.sharding.box import Box, cover_faults, whole
from shardopt.sharding.layout import Layout, everywhere, held
from shardopt.sharding.mesh import Mesh, Split, boxes_of, mesh_layout, runs_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor and the local memory that it lies in.

    Args:
        box: where in the global tensor.
        tensor: the elements, of the box's sizes; it shares memory with the tensor that was viewed, is not always
            contiguous, and takes no part in autograd.
    """

    box: Box
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class View:
    """What this rank knows and holds of a tensor.

    Args:
        shape: the global shape.
        dtype: the element type. A rank that holds no shard of a LocalShardsWrapper cannot know it, and has torch's
            default here.
        pieces: what this rank holds, in ascending order of offsets; empty where it holds nothing. A tensor without
            elements is one empty piece on each rank that has it.
        layout: where the whole tensor is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Place:
    """One reading of a DTensor's placements: the layout, and where this rank's boxes lie in its local tensor."""

    layout: Layout
    local_shape: tuple[int, ...]
    slots: tuple[tuple[Box, Box], ...]


def view_of(tensor: Tensor, key: str = "tensor") -> View:
    """The boxes of any tensor that can be described: plain, DTensor, ShardedTensor, LocalShardsWrapper in a DTensor.

    Local: no collective, no copy; a few microseconds for a placement and shape that was seen before.

    Args:
        tensor: what to look at; it is not changed.
        key: the tensor's name in errors.

    Raises:
        LayoutError: a Partial or unknown placement; a tensor subclass that is none of the above, or memory that is not
            strided; local tensors that are not what the placements or the metadata say.
    """
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        if isinstance(local, LocalShardsWrapper):
            return _view_of_wrapper(tensor, local, key)
        return _view_of_dtensor(tensor, _awaited(local), key)
    if isinstance(tensor, ShardedTensor):
        return _view_of_sharded_tensor(tensor, key)
    _refuse_strange_memory(tensor, key)
    shape = tuple(tensor.shape)
    layout = everywhere(shape)
    return View(shape, tensor.dtype, (Piece(layout.boxes[0], tensor.detach()),), layout)


def leaves_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The local tensors that an optimizer steps on: the tensor itself, the local tensor of a DTensor, the local shards
    of a ShardedTensor or LocalShardsWrapper (none or several).

    The same objects each time while the tensor's storage is not replaced. Nothing is checked, waited for or copied.
    """
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        return tuple(local.local_shards()) if isinstance(local, LocalShardsWrapper) else (local,)
    if isinstance(tensor, ShardedTensor):
        return tuple(shard.tensor for shard in tensor.local_shards())
    if isinstance(tensor, LocalShardsWrapper):
        return tuple(tensor.local_shards())
    return (tensor,)


def assemble(like: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """A tensor made of `leaves` that is placed as `like` is: the reverse of `leaves_of`, without a copy.

    Local: no collective. The result has the class, global shape and placement of `like`, the dtype of the leaves, and
    no gradient. `leaves_of` gives the same objects back.

    Args:
        like: the tensor whose placement is wanted; it is not changed.
        leaves: as many local tensors as `leaves_of(like)` has, of the same shapes.

    Raises:
        LayoutError: the leaves have other shapes than those of `like`.
    """
    wanted = [tuple(leaf.shape) for leaf in leaves_of(like)]
    found = [tuple(leaf.shape) for leaf in leaves]
    if wanted != found:
        raise _refusal("tensor", f"local tensors of shapes {found}", f"shapes {wanted}", "pass one for each local part")
    if isinstance(like, DTensor):
        local = like._local_tensor
        if isinstance(local, LocalShardsWrapper):
            return _dtensor(like, LocalShardsWrapper(list(leaves), _wrapper_offsets(local)))
        return _dtensor(like, leaves[0])
    if isinstance(like, ShardedTensor):
        return _sharded_tensor(like, leaves)
    if isinstance(like, LocalShardsWrapper):
        return LocalShardsWrapper(list(leaves), _wrapper_offsets(like))
    return leaves[0]


def gradient_leaves(param: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of each of `leaves_of(param)`, None where there is none.

    Local, unless the gradient of a DTensor has another placement than the parameter: then it is redistributed, and all
    ranks of the mesh must call. Sparse gradients are handed through. Shards of ShardedTensor and LocalShardsWrapper
    carry their own gradients.

    Raises:
        GradientError: the gradient is no DTensor where the parameter is one (or the reverse), is on another mesh, or
            has another shape, global or local.
    """
    if isinstance(param, ShardedTensor):
        return tuple(shard.tensor.grad for shard in param.local_shards())
    if isinstance(param, LocalShardsWrapper):
        return tuple(shard.grad for shard in param.local_shards())
    grad = param.grad
    if not isinstance(param, DTensor):
        if grad is None or (grad.shape == param.shape and not isinstance(grad, DTensor)):
            return (grad,)
        raise _bad_gradient(param, grad, "give the parameter a plain gradient of its own shape")
    leaves = leaves_of(param)
    if grad is None:
        wrapped = isinstance(param._local_tensor, LocalShardsWrapper)
        return tuple(leaf.grad if wrapped else None for leaf in leaves)
    if not isinstance(grad, DTensor):
        raise _bad_gradient(param, grad, "wrap it with DTensor.from_local on the parameter's mesh and placements")
    if grad._spec.mesh != param._spec.mesh:
        raise _bad_gradient(param, grad, "redistribute it to the parameter's mesh before the step")
    if grad.shape != param.shape:
        raise _bad_gradient(param, grad, "give the parameter a gradient of its own global shape")
    if grad._spec.placements != param._spec.placements:
        with torch.no_grad():
            grad = grad.redistribute(placements=param._spec.placements)
    gradients = tuple(_awaited(leaf) for leaf in leaves_of(grad))
    if [leaf.shape for leaf in gradients] != [leaf.shape for leaf in leaves]:
        raise _bad_gradient(param, grad, "pass the parameter's shape and stride where the gradient is made")
    return gradients


def takes_gradient(param: Tensor) -> bool:
    """Whether a gradient is set on the tensor itself (`param.grad`), not on its local shards."""
    return not isinstance(param, ShardedTensor | LocalShardsWrapper)


def requires_gradient(param: Tensor) -> bool:
    """Whether the tensor is trained, on any rank."""
    if isinstance(param, ShardedTensor):
        return bool(param.metadata().tensor_properties.requires_grad)
    return param.requires_grad


def empty_leaf(param: Tensor) -> Tensor:
    """An empty tensor with the dtype and device that local tensors of `param` have, for a rank that has none."""
    if isinstance(param, ShardedTensor):
        metadata = param.metadata()
        placement = metadata.shards_metadata[0].placement
        # The type only: a shard's device has the index that it has on its own rank.
        kind = "cpu" if placement is None else placement.device().type
        return torch.empty(0, dtype=metadata.tensor_properties.dtype, device=kind)
    return torch.empty(0, dtype=param.dtype, device=param.device)


def _refusal(key: str, found: str, required: str, remedy: str) -> LayoutError:
    return LayoutError("a tensor cannot be described as boxes", [Problem(key, found, required, remedy)])


def _bad_gradient(param: Tensor, grad: Tensor, remedy: str) -> GradientError:
    problem = Problem("gradient", _described(grad), f"a gradient that fits {_described(param)}", remedy)
    return GradientError("a gradient does not fit its parameter", [problem])


def _described(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        local = [tuple(leaf.shape) for leaf in leaves_of(tensor)]
        return f"DTensor of shape {tuple(tensor.shape)} placed {spec.placements} on {spec.mesh}, local shapes {local}"
    return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"


def _awaited(local: Tensor) -> Tensor:
    """The tensor itself once the collective that makes it is done; redistribution may hand out unfinished ones."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _refuse_strange_memory(tensor: Tensor, key: str) -> None:
    """Refuses a tensor whose elements are not simply its strided memory."""
    if tensor.layout is not torch.strided:
        found, remedy = f"{tensor.layout} memory", "convert it with to_dense()"
    elif is_traceable_wrapper_subclass(tensor) or isinstance(tensor, LocalShardsWrapper):
        found, remedy = f"the tensor subclass {type(tensor).__name__}", "pass the tensors that it wraps"
    elif tensor.is_conj() or tensor.is_neg():
        found, remedy = "a lazily conjugated or negated view", "apply resolve_conj() and resolve_neg()"
    else:
        return
    raise _refusal(key, found, "a plain, DTensor or ShardedTensor with strided memory", remedy)


# --- DTensor ---------------------------------------------------------------------------------------------------------

_meshes: WeakKeyDictionary[DeviceMesh, dict[int, Mesh]] = WeakKeyDictionary()
"""By mesh, then by rank: a mesh cut out of a larger one compares equal on ranks that lie in different cuts. Weak, so
that no mesh, and with it no process group, is kept beyond `destroy_process_group`."""


def _mesh_of(mesh: DeviceMesh) -> Mesh:
    by_rank = _meshes.get(mesh)
    if by_rank is None:
        by_rank = _meshes[mesh] = {}
    rank = mesh._rank
    known = by_rank.get(rank)
    if known is None:
        ranks = mesh.mesh
        known = by_rank[rank] = Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
    return known


def _view_of_dtensor(tensor: DTensor, local: Tensor, key: str) -> View:
    _refuse_strange_memory(local, key)
    spec = tensor._spec
    mesh = spec.mesh
    shape = tuple(tensor.shape)
    for placement in spec.placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            raise _unknown_placement(key, placement, spec)
    coordinate = mesh.get_coordinate()
    places = _places(
        shape,
        _mesh_of(mesh),
        None if coordinate is None else tuple(coordinate),
        mesh._rank,
        spec.placements,
        getattr(spec, "shard_order", None),
        getattr(spec, "use_strided_shard_as_shard_order", True),
    )
    local = local.detach()
    if coordinate is None:  # such ranks hold a 1-dimensional empty tensor, whatever the shape
        return View(shape, tensor.dtype, (), places[0].layout)
    fitting = [place for place in places if place.local_shape == tuple(local.shape)]
    if not fitting:
        raise _refusal(
            key,
            f"a local tensor of shape {tuple(local.shape)} on rank {mesh._rank}",
            f"{' or '.join(str(place.local_shape) for place in places)}: {spec.placements} over {mesh} split {shape}",
            "pass shape and stride to DTensor.from_local, and split as torch.chunk does",
        )
    place = fitting[0]
    if any(other.slots != place.slots for other in fitting):
        raise _refusal(
            key,
            f"{spec.placements} over {mesh}, which torch reads in two ways that differ for shape {shape}",
            "a placement with one meaning",
            "make the dimension a multiple of the number of ranks that split it",
        )
    if place.layout.shape and prod(shape) == 0:
        pieces: tuple[Piece, ...] = (Piece(whole(shape), local.new_empty(shape)),)
    elif len(place.slots) == 1:
        pieces = (Piece(place.slots[0][0], local),)
    else:
        pieces = tuple(Piece(box, _part(local, slot)) for box, slot in place.slots)
    return View(shape, tensor.dtype, pieces, place.layout)


def _unknown_placement(key: str, placement: Placement, spec: DTensorSpec) -> LayoutError:
    return _refusal(
        key,
        f"placement {placement} in {spec.placements}",
        "Shard and Replicate placements",
        "redistribute the tensor first: its elements are not known before they are reduced",
    )


def _part(local: Tensor, slot: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(slot.offsets, slot.sizes, strict=True)):
        if size != local.shape[dim]:
            local = local.narrow(dim, start, size)
    return local


@lru_cache(maxsize=4096)
def _places(
    shape: tuple[int, ...],
    mesh: Mesh,
    coordinate: tuple[int, ...] | None,
    rank: int,
    placements: tuple[Placement, ...],
    shard_order: tuple[Any, ...] | None,
    strided_is_order: bool,
) -> tuple[_Place, ...]:
    """What placements mean: one reading, or two where torch has two.

    torch reads `[_StridedShard(0, split_factor=2), Shard(0)]` from left to right where it distributes a tensor, and as
    "first the second mesh dimension, then the first" where `fully_shard` and `redistribute` make one. Both agree where
    sizes divide evenly. Where they do not, only the size of the local tensor tells them apart, so that a rank knows its
    own boxes and not those of the others.
    """
    left_to_right = tuple(
        Split(mesh_dim, placement.dim % len(shape), getattr(placement, "split_factor", 1))
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, Shard | _StridedShard)
    )
    readings = [left_to_right]
    if any(split.factor > 1 for split in left_to_right):
        ordered = _as_order(left_to_right, mesh.shape) if strided_is_order else None
        if ordered is not None and _divides_evenly(shape, mesh.shape, left_to_right):
            readings = [ordered]
        elif ordered is not None:
            readings.append(ordered)
    elif shard_order:
        readings = [tuple(Split(mesh_dim, dim) for dim, mesh_dims in shard_order for mesh_dim in mesh_dims)]
    places = [_place(shape, mesh, coordinate, splits) for splits in readings]
    if all(place.layout == places[0].layout for place in places):
        return (places[0],)
    return tuple(
        _Place(held(shape, {box: (rank,) for box, _ in place.slots}, local=True), place.local_shape, place.slots)
        for place in places
    )


def _place(shape: tuple[int, ...], mesh: Mesh, coordinate: tuple[int, ...] | None, splits: tuple[Split, ...]) -> _Place:
    layout = mesh_layout(shape, mesh, splits)
    if coordinate is None:
        return _Place(layout, (0,), ())
    runs = runs_of(shape, mesh.shape, splits, coordinate)
    local_shape = tuple(sum(end - start for start, end in dim_runs) for dim_runs in runs)
    return _Place(layout, local_shape, boxes_of(runs))


def _divides_evenly(shape: tuple[int, ...], mesh_shape: tuple[int, ...], splits: tuple[Split, ...]) -> bool:
    return all(
        size % prod(mesh_shape[split.mesh_dim] for split in splits if split.tensor_dim == dim) == 0
        for dim, size in enumerate(shape)
    )


def _as_order(splits: tuple[Split, ...], mesh_shape: tuple[int, ...]) -> tuple[Split, ...] | None:
    """Plain splits in the order that the factors stand for, or None if they stand for no order.

    A factor is the number of parts that mesh dimensions further right have made before. So, from right to left, each
    mesh dimension takes its place after as many of those as multiply to its factor.
    """
    order: dict[int, list[int]] = {}
    for split in reversed(splits):
        placed = order.setdefault(split.tensor_dim, [])
        before = [prod(mesh_shape[mesh_dim] for mesh_dim in placed[:count]) for count in range(len(placed) + 1)]
        if split.factor not in before:
            return None
        placed.insert(before.index(split.factor), split.mesh_dim)
    return tuple(Split(mesh_dim, dim) for dim, mesh_dims in order.items() for mesh_dim in mesh_dims)


def _dtensor(like: DTensor, local: Tensor) -> DTensor:
    # DTensor.from_local would record autograd and wrap a fresh view, so that leaves_of gave another object back.
    spec = copy.copy(like._spec)
    spec.tensor_meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped


# --- LocalShardsWrapper ----------------------------------------------------------------------------------------------


def _wrapper_offsets(wrapper: LocalShardsWrapper) -> list[tuple[int, ...]]:
    # Without shards the wrapper still tells of one (empty) chunk.
    return [tuple(offsets) for offsets in wrapper.local_offsets()][: len(wrapper.local_shards())]


def _view_of_wrapper(tensor: DTensor, wrapper: LocalShardsWrapper, key: str) -> View:
    spec = tensor._spec
    for placement in spec.placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            raise _unknown_placement(key, placement, spec)
    shape = tuple(tensor.shape)
    shards = wrapper.local_shards()
    dtype = shards[0].dtype if shards else tensor.dtype
    pieces = []
    for shard, offsets, sizes in zip(shards, wrapper.local_offsets(), wrapper.local_sizes(), strict=False):
        _refuse_strange_memory(shard, key)
        box = Box(tuple(offsets), tuple(sizes))
        if tuple(shard.shape) != box.sizes or shard.dtype != dtype:
            raise _refusal(
                key,
                f"a local shard of shape {tuple(shard.shape)}, {shard.dtype}",
                f"shape {box.sizes}, {dtype}, as the wrapper says",
                "make the LocalShardsWrapper anew from its shards",
            )
        if box.numel:
            pieces.append(Piece(box, shard.detach()))
    pieces.sort(key=lambda piece: piece.box.offsets)
    faults = [fault for fault in cover_faults(shape, [piece.box for piece in pieces]) if "no box holds" not in fault]
    if faults:
        raise _refusal(key, "; ".join(faults), f"disjoint shards inside {shape}", "mend the shards' offsets")
    rank = spec.mesh._rank
    if prod(shape) == 0:
        empty = shards[0].new_empty(shape) if shards else torch.empty(shape, dtype=dtype)
        return View(shape, dtype, (Piece(whole(shape), empty),), held(shape, {whole(shape): (rank,)}, local=True))
    layout = held(shape, {piece.box: (rank,) for piece in pieces}, local=True)
    return View(shape, dtype, tuple(pieces), layout)


# --- ShardedTensor ---------------------------------------------------------------------------------------------------


def _view_of_sharded_tensor(tensor: ShardedTensor, key: str) -> View:
    # The metadata is asked, not the tensor: attributes of a ShardedTensor go through __torch_function__, which warns.
    metadata = tensor.metadata()
    shape = tuple(metadata.size)
    dtype = metadata.tensor_properties.dtype
    told = []
    for shard in metadata.shards_metadata:
        holder = None if shard.placement is None else shard.placement.rank()
        if holder is None:
            raise _refusal(key, f"a shard placed on {shard.placement}", "a placement rank:R/device", "name its rank")
        told.append((tuple(shard.shard_offsets), tuple(shard.shard_sizes), holder))
    layout = _sharded_layout(shape, tuple(told), key)
    rank = dist.get_rank()
    pieces = []
    for local in tensor.local_shards():
        box = Box(tuple(local.metadata.shard_offsets), tuple(local.metadata.shard_sizes))
        _refuse_strange_memory(local.tensor, key)
        if tuple(local.tensor.shape) != box.sizes or local.tensor.dtype != dtype:
            raise _refusal(
                key,
                f"a local shard of shape {tuple(local.tensor.shape)}, {local.tensor.dtype} on rank {rank}",
                f"shape {box.sizes}, {dtype}, as its metadata says",
                "make the ShardedTensor anew from its local shards",
            )
        if box.numel:
            pieces.append(Piece(box, local.tensor.detach()))
    pieces.sort(key=lambda piece: piece.box.offsets)
    mine = [piece.box for piece in pieces]
    wanted = [
        box for box, holders in zip(layout.boxes, layout.holders or (), strict=True) if rank in holders and box.numel
    ]
    if mine != wanted:
        raise _refusal(
            key,
            f"local shards {[str(box) for box in mine]} on rank {rank}",
            f"{[str(box) for box in wanted]}, as the global metadata says",
            "make the ShardedTensor anew from its local shards",
        )
    if prod(shape) == 0 and any(holder == rank for _, _, holder in told):
        shards = tensor.local_shards()
        empty = shards[0].tensor.new_empty(shape) if shards else torch.empty(shape, dtype=dtype)
        pieces = [Piece(whole(shape), empty)]
    return View(shape, dtype, tuple(pieces), layout)


@lru_cache(maxsize=4096)
def _sharded_layout(
    shape: tuple[int, ...], told: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...], key: str
) -> Layout:
    if prod(shape) == 0:
        return held(shape, {whole(shape): {holder for _, _, holder in told}})
    holders: dict[Box, list[int]] = {}
    for offsets, sizes, holder in told:
        if prod(sizes):  # an empty chunk of a ChunkShardingSpec may have an offset past the end
            holders.setdefault(Box(offsets, sizes), []).append(holder)
    faults = cover_faults(shape, holders)
    if faults:
        raise _refusal(key, "; ".join(faults), f"shards that cover {shape} once", "mend the metadata of its shards")
    return held(shape, holders)


def _sharded_tensor(like: ShardedTensor, leaves: Sequence[Tensor]) -> ShardedTensor:
    # torch's own constructor from local shards refuses the empty chunks past the end that its ChunkShardingSpec makes.
    metadata = like.metadata()
    dtype = leaves[0].dtype if leaves else metadata.tensor_properties.dtype
    made: ShardedTensor = ShardedTensor.__new__(
        ShardedTensor,
        like.sharding_spec(),
        metadata.size,
        dtype=dtype,
        layout=torch.strided,
        pin_memory=False,
        requires_grad=False,
    )
    properties = copy.copy(metadata.tensor_properties)
    properties.dtype = dtype
    properties.requires_grad = False
    made._metadata = ShardedTensorMetadata(metadata.shards_metadata, metadata.size, properties)
    # torch leaves this untyped; it sets the process group and the (empty) remote shards.
    made._prepare_init(process_group=like._process_group, init_rrefs=False)  # type: ignore[no-untyped-call]
    made._local_shards = [
        LocalShard(leaf, shard.metadata) for leaf, shard in zip(leaves, like.local_shards(), strict=True)
    ]
    return made
