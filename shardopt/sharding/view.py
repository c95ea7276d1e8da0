"""Any tensor seen as boxes: its global shape and dtype, the memory this rank holds, and the layout of the whole.

This is the one file that knows DTensor, `_StridedShard`, ShardedTensor and LocalShardsWrapper, and the one place
under `sharding` that reaches for private parts of torch. Nothing here copies, communicates or records gradients,
except that `gradient_leaves` redistributes a gradient that has another placement than its parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed._shard.sharding_spec.api import ShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import Parameter, is_lazy

from shardopt.errors import GradientError, LayoutError, Problem
from shardopt.sharding.box import Box, cover_faults, overlap_faults, whole
from shardopt.sharding.layout import Layout, everywhere, held
from shardopt.sharding.mesh import Mesh, Split, boxes_of, in_order, mesh_layout, runs_of


class Piece(NamedTuple):
    """A box of a tensor and the local memory that it lies in.

    Args:
        box: where in the global tensor.
        tensor: the elements, of the box's sizes; it shares memory with the tensor that was viewed, is not always
            contiguous, and takes no part in autograd.
    """

    box: Box
    tensor: Tensor


class View(NamedTuple):
    """What this rank knows and holds of a tensor.

    Args:
        shape: the global shape.
        dtype: the type of the elements in memory. A rank that holds no shard of a LocalShardsWrapper cannot know it,
            and has what the wrapper says here.
        pieces: what this rank holds, in ascending order of offsets; empty where it holds nothing. A tensor without
            elements is one empty piece on each rank that has it.
        layout: where the whole tensor is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    layout: Layout


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
        return _view_of_wrapper(tensor, local, key) if _is_wrapper(local) else _view_of_dtensor(tensor, local, key)
    if isinstance(tensor, ShardedTensor):
        return _view_of_sharded_tensor(tensor, key)
    memory = _memory(tensor, key)
    layout = everywhere(tuple(tensor.shape))
    return View(layout.shape, tensor.dtype, (Piece(layout.boxes[0], memory),), layout)


def leaves_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The local tensors that an optimizer steps on: the tensor itself, the local tensor of a DTensor, the local shards
    of a ShardedTensor or LocalShardsWrapper (none or several).

    The same objects each time while the tensor's storage is not replaced. Nothing is checked, waited for or copied.
    """
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        return tuple(local.local_shards()) if _is_wrapper(local) else (local,)
    if isinstance(tensor, ShardedTensor):
        return tuple(shard.tensor for shard in tensor.local_shards())
    return tuple(tensor.local_shards()) if _is_wrapper(tensor) else (tensor,)


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
        return _dtensor(like, local_like(like, leaves))
    if isinstance(like, ShardedTensor):
        return _sharded_tensor(like, leaves)
    return _wrapper(like, leaves) if _is_wrapper(like) else leaves[0]


def local_like(like: DTensor, leaves: Sequence[Tensor]) -> Tensor:
    """What a DTensor wraps, made of other leaves: they stand at the offsets at which those of `like` do."""
    local = like._local_tensor
    return _wrapper(local, leaves) if _is_wrapper(local) else leaves[0]


def tells_of_others(tensor: Tensor) -> bool:
    """Whether a sharded tensor says where all of its shards are; a LocalShardsWrapper tells of this rank's only."""
    return not _is_wrapper(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def gradient_leaves(param: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of each of `leaves_of(param)`, None where there is none.

    Local, unless the gradient of a DTensor has another placement than the parameter: then it is redistributed, and all
    ranks of the mesh must call. Sparse gradients are handed through. Shards of ShardedTensor and LocalShardsWrapper
    carry their own gradients.

    Raises:
        GradientError: the gradient is no DTensor where the parameter is one (or the reverse), is on another mesh, has
            another shape, global or local, or is sparse where it would have to be redistributed.
    """
    leaves = leaves_of(param)
    if not isinstance(param, DTensor):
        if isinstance(param, ShardedTensor) or _is_wrapper(param):
            return tuple(leaf.grad for leaf in leaves)
        grad = param.grad
        if grad is None or (grad.shape == param.shape and not isinstance(grad, DTensor)):
            return (grad,)
        raise _bad_gradient(param, grad, "give the parameter a plain gradient of its own shape")
    grad = param.grad
    if grad is None:
        wrapped = _is_wrapper(param._local_tensor)
        return tuple(leaf.grad if wrapped else None for leaf in leaves)
    if not isinstance(grad, DTensor):
        raise _bad_gradient(param, grad, "wrap it with DTensor.from_local on the parameter's mesh and placements")
    have, want = grad._spec, param._spec
    if have.mesh != want.mesh:
        raise _bad_gradient(param, grad, "redistribute it to the parameter's mesh before the step")
    if grad.shape != param.shape:
        raise _bad_gradient(param, grad, "give the parameter a gradient of its own global shape")
    if have.placements != want.placements:
        if grad._local_tensor.layout is not torch.strided:
            raise _bad_gradient(param, grad, "make the sparse gradient with the parameter's placements")
        try:
            with torch.no_grad():
                grad = grad.redistribute(placements=want.placements)
        except ValueError as error:  # torch knows no way, as to some _StridedShards
            raise _bad_gradient(param, grad, "make the gradient with the parameter's placements") from error
    gradients = tuple(_awaited(leaf) for leaf in leaves_of(grad))
    if [leaf.shape for leaf in gradients] != [leaf.shape for leaf in leaves]:
        raise _bad_gradient(param, grad, "pass the parameter's shape and stride where the gradient is made")
    return gradients


class GradientReader:
    """Reads the gradient of a parameter with one leaf, where it is plainly there: dense, and placed as the parameter.

    `gradient_leaves` for those who ask in every step: in a fraction of its time, as it remembers which placement it has
    found good. Calling it gives None where there is no gradient, and where only `gradient_leaves` can tell.
    """

    __slots__ = ("_have", "_leaf", "_param", "_want")

    def __init__(self, param: Tensor) -> None:
        self._param: Any = param
        # A placement of the gradient and one of the parameter that were found equal.
        self._have: DTensorSpec | None = None
        self._want: DTensorSpec | None = None
        self._leaf: Tensor | None = None  # the local tensor of a DTensor that `lend_gradients` may go by

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientReader, (self._param,)  # a copy is to look for itself

    def __call__(self) -> Tensor | None:
        param = self._param
        grad: Tensor | None
        if isinstance(param, DTensor):
            whole = param.grad
            if type(whole) is not DTensor:
                return None
            have, want = whole._spec, param._spec
            if have is not self._have or want is not self._want:
                if have.mesh != want.mesh or have.placements != want.placements or have.shape != want.shape:
                    return None
                self._have, self._want = have, want
            wanted, grad = param._local_tensor, whole._local_tensor
        elif type(param) is Parameter or type(param) is Tensor:
            wanted, grad = param, param.grad
        else:
            return None
        # Of another class are unfinished results of collectives, and several shards in one.
        plainly = type(grad) is Tensor and grad.shape == wanted.shape and grad.layout is torch.strided
        return grad if plainly else None

    def accepted(self) -> None:
        """Tells that `gradient_leaves` has looked at the parameter and its gradient, and refused neither."""
        param = self._param
        if isinstance(param, DTensor) and type(param._local_tensor) is Tensor:
            if param._spec is not self._want:
                self._have, self._want = None, param._spec
            self._leaf = param._local_tensor
            self()


def lend_gradients(readers: Iterable[GradientReader], lent: list[Tensor]) -> list[GradientReader]:
    """Sets `grad` of the local tensors of DTensors to their local gradients, where all lies as when it was accepted.

    That is known by the very same objects: on small parameters a step's time is made of such checks, and this loop
    touches as few objects as it can.

    Args:
        readers: of different parameters.
        lent: gets the local tensors that were given a gradient; before, they had none of their own.

    Returns:
        Those that must be looked at; their local tensors were left alone. A steady parameter without a gradient is not
        among them.
    """
    others = []
    # Asking a DTensor for its gradient takes three times as long where torch looks for overrides, of which it has none.
    with torch._C.DisableTorchFunctionSubclass():
        for reader in readers:
            param, leaf = reader._param, reader._leaf
            if leaf is not None and param._local_tensor is leaf and param._spec is reader._want and leaf.grad is None:
                grad = param.grad
                if grad is None:
                    continue
                if type(grad) is DTensor and grad._spec is reader._have:
                    local = grad._local_tensor
                    if type(local) is Tensor:
                        try:
                            leaf.grad = local
                        except (RuntimeError, TypeError):  # another size or dtype: gradient_leaves tells what is wrong
                            pass
                        else:
                            lent.append(leaf)
                            continue
            others.append(reader)
    return others


def takes_gradient(param: Tensor) -> bool:
    """Whether a gradient is set on the tensor itself (`param.grad`), not on its local shards."""
    return not (isinstance(param, ShardedTensor) or _is_wrapper(param))


def requires_gradient(param: Tensor) -> bool:
    """Whether the tensor is trained, on any rank."""
    if isinstance(param, ShardedTensor):
        return bool(param.metadata().tensor_properties.requires_grad)
    return param.requires_grad


def members_of(tensor: Tensor) -> tuple[int, ...]:
    """The ranks over which a tensor is sharded or replicated: global numbers, ascending, with those that hold nothing.

    Of a tensor that does not tell of other ranks (plain, LocalShardsWrapper) it is this rank.
    """
    if isinstance(tensor, DTensor) and not _is_wrapper(tensor._local_tensor):
        return tuple(sorted(_on_mesh(tensor._spec.mesh).mesh.ranks))
    if isinstance(tensor, ShardedTensor):
        return tuple(sorted(dist.get_process_group_ranks(tensor._process_group)))
    return (dist.get_rank() if dist.is_initialized() else 0,)


def groups_of(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups that a sharded tensor was made over, as far as this rank is in them."""
    if isinstance(tensor, DTensor):
        mesh = tensor._spec.mesh
        return () if mesh.get_coordinate() is None else tuple(mesh.get_all_groups())
    if isinstance(tensor, ShardedTensor):
        return (tensor._process_group,)
    return ()


def device_of(param: Tensor) -> torch.device:
    """Where its local tensors lie, or would lie on a rank that has none."""
    leaves = leaves_of(param)
    return (leaves[0] if leaves else empty_leaf(param)).device


def empty_leaf(param: Tensor) -> Tensor:
    """An empty tensor with the dtype, device and dimensions that local tensors of `param` have, for a rank without."""
    if isinstance(param, ShardedTensor):
        metadata = param.metadata()
        placement = metadata.shards_metadata[0].placement
        # The type only: a shard's device has the index that it has on its own rank.
        kind = "cpu" if placement is None else placement.device().type
        return torch.empty(0, *metadata.size[1:], dtype=metadata.tensor_properties.dtype, device=kind)
    return torch.empty(0, *param.shape[1:], dtype=param.dtype, device=param.device)


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


def _memory(tensor: Tensor, key: str) -> Tensor:
    """The tensor outside of autograd, if its elements are simply its strided memory."""
    if is_lazy(tensor):
        found, remedy = "a lazy parameter without a shape", "run the module once before"
    elif tensor.layout is not torch.strided:
        found, remedy = f"{tensor.layout} memory", "convert it with to_dense()"
    elif tensor.is_nested:
        found, remedy = "a nested tensor", "convert it with to_padded_tensor(), or store its parts"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or _is_wrapper(tensor):
        # What runs operations by itself may have no memory at all: a MaskedTensor's address is null.
        found, remedy = f"the tensor subclass {type(tensor).__name__}", "pass the tensors that it wraps"
    elif tensor.is_conj() or tensor.is_neg():
        found, remedy = "a lazily conjugated or negated view", "apply resolve_conj() and resolve_neg()"
    else:
        return tensor.detach() if tensor.requires_grad else tensor
    raise _refusal(key, found, "strided memory, plain or inside a DTensor or ShardedTensor", remedy)


def _empty_piece(shape: tuple[int, ...], dtype: torch.dtype, memory: Sequence[Tensor]) -> tuple[Piece, ...]:
    """The one piece of a tensor without elements; no local tensor need have its shape."""
    device = memory[0].device if memory else None
    return (Piece(whole(shape), torch.empty(shape, dtype=dtype, device=device)),)


# --- DTensor ---------------------------------------------------------------------------------------------------------


_MOST_PLACES = 4096


@dataclass(frozen=True, slots=True)
class _Place:
    """What placements come to for one rank: the layout, and where the rank's boxes lie in its local tensor."""

    layout: Layout
    local_shape: tuple[int, ...]
    slots: tuple[tuple[Box, Box], ...]


@dataclass(slots=True)
class _OnMesh:
    """What is known of one rank of a mesh: where it is, and what placements came to on it so far."""

    mesh: Mesh
    coordinate: tuple[int, ...] | None
    places: dict[Any, _Place] = field(default_factory=dict)


_meshes: WeakKeyDictionary[DeviceMesh, dict[int, _OnMesh]] = WeakKeyDictionary()
"""By mesh, then by rank: a mesh cut out of a larger one compares equal on ranks that lie in different cuts. Weak, so
that no mesh, and with it no process group, is kept beyond `destroy_process_group`."""


def _on_mesh(mesh: DeviceMesh) -> _OnMesh:
    by_rank = _meshes.get(mesh)
    if by_rank is None:
        by_rank = _meshes[mesh] = {}
    known = by_rank.get(mesh._rank)
    if known is None:
        ranks = mesh.mesh
        cut = mesh._get_root_mesh().size() > mesh.size()
        coordinate = mesh.get_coordinate()
        known = by_rank[mesh._rank] = _OnMesh(
            Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()), cut),
            None if coordinate is None else tuple(coordinate),
        )
    return known


def _view_of_dtensor(tensor: DTensor, local: Tensor, key: str) -> View:
    spec = tensor._spec
    shape = spec.shape
    memory = _memory(_awaited(local), key)
    here = _on_mesh(spec.mesh)
    strided_is_order = spec.use_strided_shard_as_shard_order
    told = (shape, spec.placements, spec.shard_order, strided_is_order)
    # A subclass of Shard equals it, and may mean something else; others refuse even to be looked up.
    place = here.places.get(told) if _KNOWN_PLACEMENTS.issuperset(map(type, spec.placements)) else None
    if place is None:
        _refuse_placements(tensor, key)
        place = _place(tuple(shape), here, spec.placements, spec.shard_order, strided_is_order)
        while len(here.places) >= _MOST_PLACES:
            del here.places[next(iter(here.places))]
        here.places[told] = place
    if here.coordinate is None:  # torch gives such ranks a 1-dimensional empty tensor, whatever the shape
        return View(place.layout.shape, memory.dtype, (), place.layout)
    if memory.shape != place.local_shape:
        raise _refusal(
            key,
            f"a local tensor of shape {tuple(memory.shape)} on rank {spec.mesh._rank}",
            f"{place.local_shape}, what {spec.placements} over {spec.mesh} make of {tuple(shape)}",
            "pass shape and stride to DTensor.from_local, and split as torch.chunk does",
        )
    if 0 in shape:
        pieces = _empty_piece(place.layout.shape, memory.dtype, [memory])
    else:
        pieces = tuple([Piece(box, _part(memory, slot)) for box, slot in place.slots])
    return View(place.layout.shape, memory.dtype, pieces, place.layout)


_KNOWN_PLACEMENTS = frozenset({Replicate, Shard, _StridedShard})


def _refuse_placements(tensor: DTensor, key: str) -> None:
    """Refuses placements that do not say which elements a rank holds."""
    for placement in tensor._spec.placements:
        # A subclass may mean something else by the same name, so it is as unknown as any other class.
        if type(placement) not in _KNOWN_PLACEMENTS:
            required, remedy = "only Shard and Replicate placements", "redistribute the tensor first"
        elif isinstance(placement, Shard | _StridedShard) and not -tensor.ndim <= placement.dim < tensor.ndim:
            required, remedy = f"a dimension of shape {tuple(tensor.shape)}", "place it on one of its dimensions"
        else:
            continue
        raise _refusal(key, f"placement {placement!r} in {tensor._spec.placements}", required, remedy)


def _part(memory: Tensor, slot: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(slot.offsets, slot.sizes, strict=True)):
        if size != memory.shape[dim]:
            memory = memory.narrow(dim, start, size)
    return memory


def _place(
    shape: tuple[int, ...],
    here: _OnMesh,
    placements: tuple[Placement, ...],
    shard_order: Sequence[Any] | None,
    strided_is_order: bool | None,
) -> _Place:
    """What placements of these kinds come to.

    torch has two readings of `[_StridedShard(0, split_factor=2), Shard(0)]`: from left to right, as `distribute_tensor`
    makes it, and "first over the second mesh dimension, then over the first", as `fully_shard` and `redistribute` make
    it and `full_tensor` reads it. They differ where sizes do not divide evenly. The second holds here wherever there is
    such an order; the local shape on some rank gives a tensor of the first kind away.
    """
    splits = tuple(
        Split(mesh_dim, placement.dim % len(shape), int(getattr(placement, "split_factor", 1)))
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, Shard | _StridedShard)
    )
    if strided_is_order:
        splits = in_order(splits, here.mesh.shape) or splits
    elif all(split.factor == 1 for split in splits) and shard_order:
        splits = tuple(Split(mesh_dim, dim) for dim, mesh_dims in shard_order for mesh_dim in mesh_dims)
    layout = mesh_layout(shape, here.mesh, splits)
    if here.coordinate is None:
        return _Place(layout, (0,), ())
    runs = runs_of(shape, here.mesh.shape, splits, here.coordinate)
    local_shape = tuple(sum(end - start for start, end in dim_runs) for dim_runs in runs)
    return _Place(layout, local_shape, boxes_of(runs))


def _dtensor(like: DTensor, local: Tensor) -> DTensor:
    # DTensor.from_local would record autograd and wrap a fresh view, so that leaves_of gave another object back.
    spec = copy.copy(like._spec)
    spec.tensor_meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped


# --- LocalShardsWrapper ----------------------------------------------------------------------------------------------


class _Wrapper(Protocol):
    """What torch's LocalShardsWrapper and torchrec's copy of it have in common; they are not related by class."""

    def local_shards(self) -> list[Tensor]: ...
    def local_offsets(self) -> list[torch.Size]: ...
    def local_sizes(self) -> list[torch.Size]: ...


def _is_wrapper(tensor: Any) -> TypeGuard[_Wrapper]:
    return type(tensor) is not Tensor and hasattr(tensor, "local_shards") and hasattr(tensor, "local_offsets")


def _wrapper(like: _Wrapper, leaves: Sequence[Tensor]) -> Tensor:
    # Without shards a wrapper still tells of one (empty) chunk, hence the zip.
    offsets = [tuple(offsets) for _, offsets in zip(leaves, like.local_offsets(), strict=False)]
    make: Any = type(like)
    made: Tensor = make(list(leaves), offsets)
    return made


def _view_of_wrapper(tensor: DTensor, wrapper: _Wrapper, key: str) -> View:
    _refuse_placements(tensor, key)
    shape = tuple(tensor.shape)
    told = zip(wrapper.local_shards(), wrapper.local_offsets(), wrapper.local_sizes(), strict=False)
    shards = [(Box(tuple(offsets), tuple(sizes)), shard) for shard, offsets, sizes in told]
    dtype = shards[0][1].dtype if shards else tensor.dtype
    pieces = _shard_pieces(shape, dtype, shards, key)
    layout = held(shape, {piece.box: (tensor._spec.mesh._rank,) for piece in pieces}, local=True)
    faults = overlap_faults(shape, [piece.box for piece in pieces])
    if faults:
        raise _refusal(key, "; ".join(faults), f"disjoint shards inside {shape}", "mend the shards' offsets")
    return View(shape, dtype, pieces, layout)


def _shard_pieces(
    shape: tuple[int, ...], dtype: torch.dtype, shards: Sequence[tuple[Box, Tensor]], key: str
) -> tuple[Piece, ...]:
    """The pieces that local shards make, each with the box that it is said to be."""
    if prod(shape) == 0:
        return _empty_piece(shape, dtype, [shard for _, shard in shards])
    for box, shard in shards:
        if tuple(shard.shape) != box.sizes or shard.dtype != dtype:
            raise _refusal(
                key,
                f"a local shard of shape {tuple(shard.shape)}, {shard.dtype}",
                f"shape {box.sizes}, {dtype}, as its metadata says",
                "make the tensor anew from its local shards",
            )
    pieces = [Piece(box, _memory(shard, key)) for box, shard in shards if box.numel]
    return tuple(sorted(pieces, key=lambda piece: piece.box.offsets))


# --- ShardedTensor ---------------------------------------------------------------------------------------------------


def _view_of_sharded_tensor(tensor: ShardedTensor, key: str) -> View:
    # The metadata is asked, not the tensor: attributes of a ShardedTensor go through __torch_function__, which warns.
    metadata = tensor.metadata()
    shape = tuple(metadata.size)
    dtype = metadata.tensor_properties.dtype
    told = []
    for meta in metadata.shards_metadata:
        holder = None if meta.placement is None else meta.placement.rank()
        if holder is None:
            found = f"a shard placed on {meta.placement}"
            raise _refusal(key, found, "placements of the form rank:R/device", "name the rank of each shard")
        told.append((tuple(meta.shard_offsets), tuple(meta.shard_sizes), holder))
    layout, faults = _sharded_layout(shape, tuple(told))
    if faults:
        raise _refusal(key, "; ".join(faults), f"shards that cover {shape} once", "mend the metadata of its shards")

    rank = dist.get_rank()
    shards = [
        (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor)
        for shard in tensor.local_shards()
    ]
    pieces = _shard_pieces(shape, dtype, shards, key) if shards else ()
    have = [piece.box for piece in pieces]
    want = [box for box, holders in zip(layout.boxes, layout.holders or (), strict=True) if rank in holders]
    if have != want:
        raise _refusal(
            key,
            f"local shards {[str(box) for box in have]} on rank {rank}",
            f"{[str(box) for box in want]}, as the metadata of all shards says",
            "make the ShardedTensor anew from its local shards",
        )
    return View(shape, dtype, pieces, layout)


@lru_cache(maxsize=4096)
def _sharded_layout(
    shape: tuple[int, ...], told: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
) -> tuple[Layout, tuple[str, ...]]:
    """The layout that the metadata of all shards describes, and what is wrong with it."""
    if prod(shape) == 0:
        return held(shape, {whole(shape): {holder for _, _, holder in told}}), ()
    holders: dict[Box, list[int]] = {}
    for offsets, sizes, holder in told:
        if prod(sizes):  # an empty chunk of a ChunkShardingSpec may have an offset past the end
            holders.setdefault(Box(offsets, sizes), []).append(holder)
    return held(shape, holders), tuple(cover_faults(shape, holders))


def _sharded_tensor(like: ShardedTensor, leaves: Sequence[Tensor]) -> ShardedTensor:
    metadata = like.metadata()
    properties = copy.copy(metadata.tensor_properties)
    properties.dtype = leaves[0].dtype if leaves else properties.dtype
    properties.requires_grad = properties.pin_memory = False
    told = ShardedTensorMetadata(metadata.shards_metadata, metadata.size, properties)
    here = [shard.metadata for shard in like.local_shards()]
    return sharded_tensor_of(like, like.sharding_spec(), told, here, leaves)


def sharded_tensor_of(
    like: ShardedTensor,
    spec: ShardingSpec,
    metadata: ShardedTensorMetadata,
    here: Sequence[ShardMetadata],
    leaves: Sequence[Tensor],
) -> ShardedTensor:
    """A ShardedTensor on the ranks of another, without a collective or a copy.

    Args:
        like: the tensor whose process group is taken.
        spec: how the new one is sharded.
        metadata: of the whole, with the properties of the new one.
        here: the metadata of this rank's shards.
        leaves: this rank's shards, in the order of `here`.
    """
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
    # torch leaves this untyped; it sets the process group and the (empty) remote shards.
    made._prepare_init(process_group=like._process_group, init_rrefs=False)  # type: ignore[no-untyped-call]
    made._local_shards = [LocalShard(leaf, told) for leaf, told in zip(leaves, here, strict=True)]
    return made
