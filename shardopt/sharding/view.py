"""Any tensor as boxes: its global shape and dtype, this rank's memory, and the layout of the whole.

This folder alone knows DTensor, `_StridedShard`, ShardedTensor and LocalShardsWrapper. Nothing here copies,
communicates or records gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Parameter, is_lazy

from shardopt.sharding.box import Box, overlap_faults
from shardopt.sharding.dtensor import dtensor_like, on_mesh, refuse_placements, view_of_dtensor
from shardopt.sharding.kinds import kind_of
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import Piece, View, awaited, memory_of, refusal, shard_pieces
from shardopt.sharding.pieces_tensor import PiecesTensor
from shardopt.sharding.sharded_tensor import holders_of, process_group_of, sharded_tensor_like, view_of_sharded_tensor
from shardopt.sharding.traceable import seen_through
from shardopt.sharding.wrapper import Wrapper, is_wrapper, wrapper_like


def view_of(tensor: Tensor, key: str = "tensor") -> View:
    """Describes any tensor as boxes: plain, DTensor, ShardedTensor, LocalShardsWrapper in a DTensor, registered kinds.

    Local: no collective, no copy; a few microseconds for a placement and shape that was seen before.

    Args:
        tensor: what to look at; it is not changed.
        key: the tensor's name in errors.

    Raises:
        LayoutError: a Partial or unknown placement; a tensor subclass that is none of the above; memory that is not
            strided. Or local tensors contradict the placements or the metadata.
    """
    is_plain = type(tensor) is Tensor or type(tensor) is Parameter  # as nearly all
    local = memory = tensor
    if not is_plain and isinstance(tensor, DTensor):
        local = memory = tensor._local_tensor
        is_plain = type(local) is Tensor or type(local) is Parameter
    if not is_plain or local.layout is not torch.strided or local.is_nested or local.is_conj() or local.is_neg():
        if isinstance(tensor, DTensor):
            if is_wrapper(local):
                return _view_of_wrapper(tensor, local, key)
            local = awaited(local)
        elif isinstance(tensor, ShardedTensor):
            return view_of_sharded_tensor(tensor, key)
        elif (kind := kind_of(tensor)) is not None:
            return _view_of_own(tuple(kind.shape(tensor)), tensor.dtype, kind.pieces(tensor), key)
        memory = memory_of(local, key)
    elif local.requires_grad:
        memory = local.detach()
    if local is not tensor and isinstance(tensor, DTensor):
        return view_of_dtensor(tensor, memory, key)
    layout = Layout.replicated(tensor.shape)
    # In half the time that `View(...)` takes, as there are tens of thousands.
    return tuple.__new__(View, (layout.shape, tensor.dtype, (tuple.__new__(Piece, (layout.boxes[0], memory)),), layout))


def local_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the local tensors that an optimizer steps.

    These are the tensor itself, the local tensor of a DTensor, or the local shards of a ShardedTensor or
    LocalShardsWrapper (none or several). A wrapper of one tensor counts as that tensor.

    The same objects each time while the tensor's storage is not replaced. Nothing is checked, waited for or copied.

    Args:
        tensor: of any kind that `view_of` knows.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) is Tensor or type(local) is Parameter:  # as nearly all are
        return (local,)
    if isinstance(tensor, DTensor):
        return tuple(local.local_shards()) if is_wrapper(local) else (seen_through(local),)
    if isinstance(tensor, ShardedTensor):
        return tuple(shard.tensor for shard in tensor.local_shards())
    kind = kind_of(tensor)
    if kind is not None:
        return tuple(local for _, local in kind.pieces(tensor))
    return tuple(tensor.local_shards()) if is_wrapper(tensor) else (seen_through(tensor),)


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Returns where the local tensors of these begin in memory; 0 for those without an element here.

    Lazy parameters, which have no memory yet, begin nowhere.
    """
    local = (each for tensor in tensors if not is_lazy(tensor) for each in local_tensors(tensor))
    return {each.data_ptr() for each in local if each.layout is torch.strided}


def versions_of(tensor: Tensor) -> list[int]:
    """Returns torch's counters of changes in place, of a tensor and of its local tensors that have elements.

    A change of a DTensor counts at the DTensor alone, and one of its local tensor there alone. Empty where nothing is
    counted: without elements, and of inference tensors.
    """
    local = [each for each in local_tensors(tensor) if each.numel() and not each.is_inference()]
    if local and isinstance(tensor, DTensor):
        local.append(tensor)
    return [each._version for each in local]


def is_held(tensor: Tensor) -> bool:
    """Whether this rank has a share of a tensor: it is in a DTensor's mesh, or has elements of another sharded tensor.

    Only then can it see the tensor's gradients. A rank of a DTensor's mesh gets its shard of them, even an empty one; a
    shard without elements may never get any.
    """
    if isinstance(tensor, DTensor) and not is_wrapper(tensor._local_tensor):
        return tensor._local_tensor.numel() > 0 or tensor._spec.mesh.get_coordinate() is not None
    tensors = local_tensors(tensor)
    return any(local is tensor or local.numel() for local in tensors)


def is_on_all_ranks(tensor: Tensor) -> bool:
    """Whether every rank of the job has a share of a tensor, as far as the tensor says; the same on every rank.

    A plain tensor is taken to be on all; a LocalShardsWrapper does not say so, and counts as not.
    """
    if not dist.is_initialized():
        return True
    if isinstance(tensor, ShardedTensor):
        return len(holders_of(tensor)) == dist.get_world_size()
    if isinstance(tensor, DTensor) and tensor._spec.mesh.size() != dist.get_world_size():
        return False
    return tells_of_others(tensor)


def assemble(like: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Assembles local tensors to one placed like `like`: the inverse of `local_tensors`, without a copy.

    Local: no collective. The result has the class, global shape and placement of `like`, the dtype of the tensors, and
    no gradient. `local_tensors` returns the same objects.

    Args:
        like: the tensor whose placement is wanted; it is not changed.
        tensors: as many local tensors as `local_tensors(like)` has, of the same shapes.

    Raises:
        LayoutError: they have other shapes than those of `like`.
    """
    expected, actual = [local.shape for local in local_tensors(like)], [local.shape for local in tensors]
    if expected != actual:
        found, required = f"local tensors of shapes {[*map(tuple, actual)]}", f"shapes {[*map(tuple, expected)]}"
        raise refusal("tensor", found, required, "pass one for each local tensor")
    if isinstance(like, DTensor):
        return dtensor_like(like, local_like(like, tensors))
    if isinstance(like, ShardedTensor):
        return sharded_tensor_like(like, tensors)
    kind = kind_of(like)
    if kind is not None:
        boxes = [box for box, _ in kind.pieces(like)]
        device = None if tensors else like.device
        return PiecesTensor(kind.shape(like), list(zip(boxes, tensors, strict=True)), like.dtype, device)
    return wrapper_like(like, tensors) if is_wrapper(like) else tensors[0]


def local_like(like: DTensor, tensors: Sequence[Tensor]) -> Tensor:
    """Makes a DTensor's local tensor from other tensors, at the offsets of those of `like`."""
    local = like._local_tensor
    return wrapper_like(local, tensors) if type(local) is not Tensor and is_wrapper(local) else tensors[0]


def tells_of_others(tensor: Tensor) -> bool:
    """Whether a sharded tensor knows where all its shards are; a LocalShardsWrapper knows only this rank's."""
    return kind_of(tensor) is None and not is_wrapper(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def members_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns the ranks that a tensor is sharded or replicated over, even those without elements: global, ascending.

    A tensor that does not know of other ranks (plain, LocalShardsWrapper) has this rank alone.
    """
    if isinstance(tensor, DTensor) and not is_wrapper(tensor._local_tensor):
        return tuple(sorted(on_mesh(tensor._spec.mesh).mesh.ranks))
    if isinstance(tensor, ShardedTensor):
        return tuple(sorted(dist.get_process_group_ranks(process_group_of(tensor))))
    return (_rank(),)


def groups_of(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the process groups of a sharded tensor that this rank is in; none where the mesh is of one rank."""
    if isinstance(tensor, DTensor):
        mesh = tensor._spec.mesh  # one of a single rank may be without groups
        return () if mesh.size() == 1 or mesh.get_coordinate() is None else tuple(mesh.get_all_groups())
    if isinstance(tensor, ShardedTensor):
        return (process_group_of(tensor),)
    return ()


def device_of(param: Tensor) -> torch.device:
    """Returns the device of a tensor's local tensors, or of those that a rank without any would have."""
    tensors = local_tensors(param)
    return (tensors[0] if tensors else empty_local_tensor(param)).device


def empty_local_tensor(param: Tensor) -> Tensor:
    """Makes an empty tensor with the dtype, device and dimensions of `param`'s local tensors, for a rank without."""
    if isinstance(param, ShardedTensor):
        metadata = param.metadata()
        placement = metadata.shards_metadata[0].placement
        # The type only: a shard's device has the index that it has on its own rank.
        kind = "cpu" if placement is None else placement.device().type
        return torch.empty(0, *metadata.size[1:], dtype=metadata.tensor_properties.dtype, device=kind)
    return torch.empty(0, *param.shape[1:], dtype=param.dtype, device=param.device)


def _view_of_wrapper(tensor: DTensor, wrapper: Wrapper, key: str) -> View:
    refuse_placements(tensor, key)
    shards = zip(wrapper.local_shards(), wrapper.local_offsets(), wrapper.local_sizes(), strict=False)
    own = [(Box(tuple(offsets), tuple(sizes)), shard) for shard, offsets, sizes in shards]
    return _view_of_own(tuple(tensor.shape), tensor.dtype, own, key)


def _view_of_own(shape: tuple[int, ...], dtype: torch.dtype, own: Sequence[tuple[Box, Tensor]], key: str) -> View:
    """Returns the view of a tensor of which each rank knows only its own shards."""
    dtype = own[0][1].dtype if own else dtype
    pieces = shard_pieces(shape, dtype, own, key)
    layout = Layout.from_holders(shape, {piece.box: (_rank(),) for piece in pieces}, local=True)
    faults = overlap_faults(shape, [piece.box for piece in pieces])
    if faults:
        raise refusal(key, "; ".join(faults), f"disjoint shards inside {shape}", "mend the shards' offsets")
    return View(shape, dtype, pieces, layout)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
