"""DTensors: placements on a mesh, seen as boxes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.sharding.box import Box, whole, with_ones
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, boxes_of, descent, differ_unseen, in_order, mesh_layout, runs_of
from shardopt.sharding.pieces import Piece, View, empty_piece, narrowed, refusal

_MOST_PLACES = 4096


@dataclass(frozen=True, slots=True)
class _Place:
    """The layout of some placements, and the places of one rank's boxes in its local tensor (None: all of it)."""

    layout: Layout
    local_shape: tuple[int, ...]
    slots: tuple[tuple[Box, Box | None], ...]


@dataclass(slots=True)
class _OnMesh:
    """One rank of a mesh: its coordinate (None outside), and the cached layouts of placements.

    `job` returns the process group of all ranks, as long as it is there: a mesh outlives it, and equals those of later
    jobs.
    """

    mesh: Mesh
    coordinate: tuple[int, ...] | None
    job: Callable[[], Any]
    places: dict[Any, _Place] = field(default_factory=dict)


_meshes: WeakKeyDictionary[DeviceMesh, dict[int, _OnMesh]] = WeakKeyDictionary()
"""Records by mesh, then by rank.

Rank is part of the key, as a mesh cut out of a larger one compares equal on ranks in different cuts. References are
weak, so that no mesh, and with it no process group, outlives `destroy_process_group`.
"""


def on_mesh(mesh: DeviceMesh) -> _OnMesh:
    """Returns the cached record of this rank of a mesh; kept as long as the mesh."""
    by_rank = _meshes.get(mesh)
    if by_rank is None:
        by_rank = _meshes[mesh] = {}
    known = by_rank.get(mesh._rank)
    job = dist.group.WORLD
    if known is None or known.job() is not job:
        ranks = mesh.mesh
        cut = max(mesh._get_root_mesh().size(), 0 if job is None else job.size()) > mesh.size()
        coordinate = mesh.get_coordinate()
        known = by_rank[mesh._rank] = _OnMesh(
            Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()), cut),
            None if coordinate is None else tuple(coordinate),
            (lambda: None) if job is None else weakref.ref(job),
        )
    return known


def view_of_dtensor(tensor: DTensor, memory: Tensor, key: str) -> View:
    """Returns the view of a DTensor around a plain local tensor with this memory; raises LayoutError as `view_of`."""
    spec = tensor._spec
    shape = spec.shape
    here = on_mesh(spec.mesh)
    strided_is_order = spec.use_strided_shard_as_shard_order
    key_of_place = (shape, spec.placements, spec.shard_order, strided_is_order)
    # A subclass of Shard equals it, and may mean something else; others refuse even to be looked up.
    place = here.places.get(key_of_place) if _KNOWN_PLACEMENTS.issuperset(map(type, spec.placements)) else None
    if place is None:
        refuse_placements(tensor, key)
        _refuse_order(tensor, here.mesh, key)
        place = _place(tuple(shape), here, spec.placements, spec.shard_order, strided_is_order)
        if place is None:
            raise refusal(
                key,
                f"{spec.placements} over {spec.mesh} of shape {tuple(shape)}, which distribute_tensor and fully_shard "
                "lay out in two ways that are alike in size",
                "one way to lie",
                "shard it over fewer dimensions of the mesh, or pad it so that sizes divide evenly",
            )
        while len(here.places) >= _MOST_PLACES:
            del here.places[next(iter(here.places))]
        here.places[key_of_place] = place
    if here.coordinate is None:  # torch gives such ranks a 1-dimensional empty tensor, whatever the shape
        return View(place.layout.shape, memory.dtype, (), place.layout)
    if 0 in place.local_shape and not memory.numel() and 0 not in shape:  # fully_shard gives these another empty shape
        return View(place.layout.shape, memory.dtype, (), place.layout)
    if memory.shape != place.local_shape:
        raise refusal(
            key,
            f"a local tensor of shape {tuple(memory.shape)} on rank {spec.mesh._rank}",
            f"{place.local_shape}, what {spec.placements} over {spec.mesh} make of {tuple(shape)}",
            "pass shape and stride to DTensor.from_local, and split as torch.chunk does",
        )
    if 0 in shape:
        pieces = empty_piece(place.layout.shape, memory.dtype, [memory])
    else:
        pieces = tuple([Piece(box, memory if slot is None else narrowed(memory, slot)) for box, slot in place.slots])
    return View(place.layout.shape, memory.dtype, pieces, place.layout)


_KNOWN_PLACEMENTS = frozenset({Replicate, Shard, _StridedShard})


def refuse_placements(tensor: DTensor, key: str) -> None:
    """Raises LayoutError for placements that do not say which elements a rank holds."""
    for placement in tensor._spec.placements:
        # A subclass may mean something else by the same name, so it is as unknown as any other class.
        if type(placement) not in _KNOWN_PLACEMENTS:
            required, remedy = "only Shard and Replicate placements", "redistribute the tensor first"
        elif isinstance(placement, Shard | _StridedShard) and not -tensor.ndim <= placement.dim < tensor.ndim:
            required, remedy = f"a dimension of shape {tuple(tensor.shape)}", "place it on one of its dimensions"
        else:
            continue
        raise refusal(key, f"placement {placement!r} in {tensor._spec.placements}", required, remedy)


def _refuse_order(tensor: DTensor, mesh: Mesh, key: str) -> None:
    """Raises LayoutError for shards over ranks that do not ascend.

    torch disagrees with itself there. Its collectives, and so `fully_shard`, `distribute_tensor` and `full_tensor`, go
    by the order in a group, whose ranks it sorts; what a rank cuts alone, as in `redistribute`, goes by its place.
    """
    for dim, placement in enumerate(tensor._spec.placements):
        if not isinstance(placement, Replicate) and (ranks := descent(mesh, dim)) is not None:
            actual = f"{placement} over a mesh on which rank {ranks[1]} follows rank {ranks[0]} along dimension {dim}"
            required = "ranks that ascend along it; otherwise torch's own calls differ in the order of the shards"
            raise refusal(key, actual, required, "make the mesh anew with its ranks sorted along that dimension")


def _place(
    shape: tuple[int, ...],
    here: _OnMesh,
    placements: tuple[Placement, ...],
    shard_order: Sequence[Any] | None,
    strided_is_order: bool | None,
) -> _Place | None:
    """Computes the layout of known placements, and this rank's boxes; None if they are ambiguous.

    torch has two readings of `[_StridedShard(0, split_factor=2), Shard(0)]`: from left to right, as `distribute_tensor`
    makes it, and "first over the second mesh dimension, then over the first", as `fully_shard` and `redistribute` make
    it and `full_tensor` reads it. They differ where sizes do not divide evenly. The second holds here wherever there is
    such an order; the local shape on some rank gives a tensor of the first kind away. Where it would not, as it may be
    where a dimension is split three times, nobody can tell what lies there: None.
    """
    splits = tuple(
        Split(mesh_dim, placement.dim % len(shape), int(getattr(placement, "split_factor", 1)))
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, Shard | _StridedShard)
    )
    if strided_is_order:
        ordered = in_order(splits, here.mesh.shape) or splits
        if differ_unseen(shape, here.mesh.shape, splits, ordered):
            return None
        splits = ordered
    elif all(split.factor == 1 for split in splits) and shard_order:
        splits = tuple(Split(mesh_dim, dim) for dim, mesh_dims in shard_order for mesh_dim in mesh_dims)
    layout = mesh_layout(shape, here.mesh, splits)
    if here.coordinate is None:
        return _Place(layout, (0,), ())
    runs = runs_of(shape, here.mesh.shape, splits, here.coordinate)
    local_shape = tuple(sum(end - start for start, end in dim_runs) for dim_runs in runs)
    return _Place(
        layout, local_shape, tuple((box, None if slot == whole(local_shape) else slot) for box, slot in boxes_of(runs))
    )


def dtensor_like(like: DTensor, local: Tensor) -> DTensor:
    """Wraps a local tensor, without a view of it, in a DTensor placed like another."""
    # DTensor.from_local would record autograd and wrap a fresh view, so that local_tensors gave another object back.
    spec, meta = like._spec, like._spec.tensor_meta
    if meta is None or meta.dtype != local.dtype:  # otherwise they share it, as torch's own results do
        spec = copy.copy(spec)
        spec.tensor_meta = TensorMeta(like.shape, like.stride(), local.dtype)
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made  # without `__init__`, which only has `torch.export` look, and takes longer than all of this


def dtensor_sum_like(tensor: DTensor, dims: Collection[int], local: Tensor) -> DTensor:
    """Wraps a local tensor in a DTensor placed like the sum of another over `dims`, kept with size 1."""
    return _without_splits(tensor, dims, local, with_ones(tensor.shape, dims))


def dtensor_blocks_like(tensor: DTensor, count: int, local: Tensor) -> DTensor:
    """Wraps a local tensor in a DTensor of `count` numbers per index of another's first dimension."""
    return _without_splits(tensor, range(1, tensor.ndim), local, (tensor.shape[0], count))


def _without_splits(tensor: DTensor, dims: Collection[int], local: Tensor, shape: Sequence[int]) -> DTensor:
    """Wraps a local tensor in a DTensor of a global shape, placed like another but along `dims`, where it is whole."""
    spec: Any = tensor._spec
    placements = tuple(Replicate() if _splits(each, tensor.ndim, dims) else each for each in spec.placements)
    order = spec.shard_order and tuple(entry for entry in spec.shard_order if entry.tensor_dim not in dims)
    return _dtensor_around(local, spec, placements, order, shape)


def dtensor_stack_like(tensor: DTensor, count: int, local: Tensor) -> DTensor:
    """Wraps a local tensor in a DTensor placed as `count` tensors like another, stacked along a new first dimension."""
    if tensor.device_mesh.get_coordinate() is None:
        local = local.flatten()  # as torch's own for ranks outside of the mesh
    spec: Any = tensor._spec
    placements = tuple(_behind_new_dim(placement, tensor.ndim) for placement in spec.placements)
    order = spec.shard_order and tuple(entry._replace(tensor_dim=entry.tensor_dim + 1) for entry in spec.shard_order)
    return _dtensor_around(local, spec, placements, order, (count, *tensor.shape))


def _splits(placement: Placement, dimensions: int, dims: Collection[int]) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim % dimensions in dims


def _behind_new_dim(placement: Placement, dimensions: int) -> Placement:
    if not isinstance(placement, Shard | _StridedShard):
        return placement
    dim = placement.dim % dimensions + 1
    return (
        _StridedShard(dim, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(dim)
    )


def _dtensor_around(
    local: Tensor, spec: Any, placements: tuple[Placement, ...], order: Any, shape: Sequence[int]
) -> DTensor:
    """Wraps a local tensor in a DTensor of a global shape, on the mesh of `spec`, with its order of splits.

    Splits of one dimension stay or go together, so what stays of placements or of their order means what it did.
    """
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    whole_tensor = torch.empty(tuple(shape), dtype=local.dtype, device="meta")
    changed = DTensorSpec(
        spec.mesh,
        placements,
        TensorMeta(whole_tensor.shape, whole_tensor.stride(), local.dtype),
        shard_order=None if strided else order,  # type: ignore[arg-type]  # None is its default
        use_strided_shard_as_shard_order=spec.use_strided_shard_as_shard_order if strided else None,
    )
    return DTensor(local, changed, requires_grad=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped
