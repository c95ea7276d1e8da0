"""Tensors of libraries that wrap others and say so by torch's protocol `__tensor_flatten__`.

A wrapper of one strided tensor of its own shape and dtype (torchao's float8 weights in training) is that tensor: it is
stepped, clipped, averaged and stored as such. One of several (codes and their scales) is stored as these, each under a
key of its own, and is no sum of anything: it can be frozen, and not trained.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import Parameter

from shardopt.sharding.kinds import kind_of
from shardopt.sharding.wrapper import is_wrapper

_NOT_THESE = (DTensor, AsyncCollectiveTensor, ShardedTensor)  # known in this folder by themselves


def seen_through(tensor: Tensor) -> Tensor:
    """Returns the single tensor that a tensor wraps, with its shape and dtype; else the tensor itself."""
    while (inner := _inner_tensors(tensor)) is not None and len(inner) == 1:
        (only,) = inner.values()
        if only.shape != tensor.shape or only.dtype != tensor.dtype or only.layout is not torch.strided:
            break
        tensor = only
    return tensor


def is_composite(tensor: Tensor) -> bool:
    """Whether a tensor, or a DTensor's local tensor, consists of several, or of one with another shape or dtype."""
    local = tensor._local_tensor if type(tensor) is DTensor else tensor
    if type(local) is Tensor or type(local) is Parameter:  # as nearly all are
        return False
    return _composite_of(tensor) is not None


def parts_of(tensor: Tensor) -> dict[str, tuple[Any, Tensor]] | None:
    """Returns the tensors that a composite consists of, each with the object whose attribute it is. Local: no copy.

    Of a DTensor they are DTensors, sharded as it is, as far as its class shards them; None where it does not tell.
    """
    composite = _composite_of(tensor)
    assert composite is not None, "ask is_composite first"
    inner = _inner_tensors(composite) or {}
    if not isinstance(tensor, DTensor):
        return {name: (composite, part) for name, part in inner.items()}
    split = _split_names(tensor, composite, inner)
    if split is None:
        return None
    return {name: (composite, _part_on_mesh(tensor, part, name in split)) for name, part in inner.items()}


def _composite_of(tensor: Tensor) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return None
    tensor = seen_through(tensor)
    return tensor if _inner_tensors(tensor) else None


def _inner_tensors(tensor: Tensor) -> dict[str, Tensor] | None:
    """Returns the tensors that a tensor wraps, by attribute; None if it is not known to wrap any."""
    if type(tensor) is Tensor or type(tensor) is Parameter or not hasattr(tensor, "__tensor_flatten__"):
        return None
    if isinstance(tensor, _NOT_THESE) or tensor.is_nested or is_wrapper(tensor) or kind_of(tensor) is not None:
        return None
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def _split_names(tensor: DTensor, local: Tensor, inner: dict[str, Tensor]) -> set[str] | None:
    """Returns the names of the inner tensors that are cut like the wrapper.

    It finds them by letting the wrapper's class cut it again. None if that fails, or cannot tell on some rank: a single
    row has no halves; and where ranks have unequally many rows, nor can be told how many a tensor of other rows has.
    """
    is_one = [size == 1 for size in tensor.device_mesh.shape]  # such a dimension of the mesh cuts nothing
    if all(
        isinstance(each, Replicate) or (one and isinstance(each, Shard))
        for each, one in zip(tensor.placements, is_one, strict=True)
    ):
        return set()
    if not all(isinstance(placement, Replicate) or placement == Shard(0) for placement in tensor.placements):
        return None
    if min(_rows_of_ranks(tensor) | {local.shape[0]}) < 2:
        return None
    try:
        with torch.no_grad():
            halves = _inner_tensors(torch.chunk(local.detach(), 2)[0]) or {}
        split = {name for name, part in inner.items() if halves[name].shape != part.shape}
        has_other_rows = any(inner[name].shape[0] != local.shape[0] for name in split)
    except Exception:  # of another library's class
        return None
    return None if has_other_rows and len(_rows_of_ranks(tensor)) > 1 else split


def _rows_of_ranks(tensor: DTensor) -> set[int]:
    """Returns what numbers of rows ranks have, as torch cuts."""
    rows = {tensor.shape[0]}
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            count = tensor.device_mesh.size(dim)
            rows = {min(-(-n // count), max(0, n - i * -(-n // count))) for n in rows for i in range(count)}
    return rows


def _part_on_mesh(like: DTensor, part: Tensor, is_split: bool) -> DTensor:
    """Returns a DTensor of this rank's part of one of a composite's tensors."""
    mesh, placements, shape = like.device_mesh, [*like.placements], [*part.shape]
    if not is_split:
        placements = [Replicate()] * len(placements)
    elif shape[0] == like._local_tensor.shape[0]:
        shape[0] = like.shape[0]
    else:  # ranks have equally many
        shape[0] *= math.prod(mesh.size(dim) for dim, each in enumerate(placements) if isinstance(each, Shard))
    return DTensor.from_local(
        part.detach(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=part.stride()
    )
