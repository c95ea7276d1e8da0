"""Parameters of which some ranks hold no part: on meshes of some ranks, or in shards of a few of them.

`where` says for a tensor: None, every rank has all of it; `(ranks, placement)`, a DTensor on the mesh of those ranks;
`[(rows, rank), ...]`, a ShardedTensor of so many rows in each shard, and the rank that holds it.
"""

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardopt.sharding.view import local_tensors, view_of


def placed(whole, where, meshes):
    """This rank's part of a parameter. Collective, the first time that a mesh is needed.

    Args:
        meshes: those that were made, by their ranks; the new ones are added.
    """
    if where is None:
        return torch.nn.Parameter(whole.clone())
    if isinstance(where, list):
        rank, begin, shards = dist.get_rank(), 0, []
        for rows, holder in where:
            metadata = ShardMetadata([begin, 0], [rows, whole.shape[1]], f"rank:{holder}/cpu")
            if holder == rank and rows:
                shards.append(sharded_tensor.Shard(whole[begin : begin + rows].clone().requires_grad_(), metadata))
            begin += rows
        return sharded_tensor.init_from_local_shards(shards, *whole.shape)
    ranks, placement = where
    if tuple(ranks) not in meshes:
        meshes[tuple(ranks)] = DeviceMesh("cpu", ranks)
    mesh = meshes[tuple(ranks)]
    if mesh.get_coordinate() is None:
        local = torch.empty(0, dtype=whole.dtype)
    elif isinstance(placement, Shard):
        parts = torch.chunk(whole, len(ranks), placement.dim)
        here = mesh.get_local_rank()
        empty = whole.narrow(placement.dim, 0, 0)
        local = (parts[here] if here < len(parts) else empty).clone()
    else:
        local = whole.clone()
    made = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return torch.nn.Parameter(made)


def lacks(where, rank):
    """Whether a rank has no part of it; one in the mesh has, even if that is empty."""
    if isinstance(where, tuple):
        return rank not in where[0]
    return where is not None and rank not in {holder for rows, holder in where if rows}


def part(whole, piece):
    """Copies the elements of a piece out of a whole tensor."""
    return whole[tuple(map(slice, piece.box.offsets, piece.box.ends))].clone()


def give_gradient(param, whole):
    """Gives this rank's part of a gradient to a parameter, or none where it is None."""
    pieces = view_of(param).pieces
    if isinstance(param, DTensor):
        param.grad = None
        if whole is not None and param.device_mesh.get_coordinate() is not None:
            local = part(whole, pieces[0]) if pieces else torch.zeros_like(local_tensors(param)[0].detach())
            spec = param.device_mesh, param.placements
            param.grad = DTensor.from_local(local, *spec, run_check=False, shape=param.shape, stride=param.stride())
    elif isinstance(param, torch.nn.Parameter):
        param.grad = None if whole is None else whole.clone()
    else:
        for leaf, piece in zip(local_tensors(param), pieces, strict=True):
            leaf.grad = None if whole is None else part(whole, piece)
