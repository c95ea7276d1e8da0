"""Matrices sharded in every way that a job of 1, 2, 3, 4 or more ranks can, made of known global values."""

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardopt.sharding.gradients import takes_gradient
from shardopt.sharding.view import assemble, local_tensors, view_of

SHAPES = {
    "plain": (13, 6),
    "rows": (24, 16),
    "uneven": (33, 17),
    "few": (2, 9),  # fewer rows than ranks: some hold nothing
    "columns": (20, 27),
    "copies": (16, 10),
    "empty": (0, 5),
    "table": (19, 8),  # a ShardedTensor, of which the last of several ranks holds nothing
    "grid": (10, 14),
    "hsdp": (12, 7),
    "cut": (9, 11),  # one mesh for each half of the ranks
    "strided": (21, 6),  # fully_shard over tensor parallel
}


def value(name, seed, dtype=torch.float32):
    """The known matrix, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def matrices(dtype=torch.float32):
    """A parameter of each kind on this rank, filled with `value(name, 0)`; two-dimensional meshes need even ranks."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    across = init_device_mesh("cpu", (max(ranks // 2, 1), 2 - ranks % 2), mesh_dim_names=("dp", "tp"))
    if ranks % 2:
        across = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))
    places = {
        "rows": (mesh, [Shard(0)]),
        "uneven": (mesh, [Shard(0)]),
        "few": (mesh, [Shard(0)]),
        "columns": (mesh, [Shard(1)]),
        "copies": (mesh, [Replicate()]),
        "empty": (mesh, [Shard(0)]),
        "grid": (across, [Shard(0), Shard(1)]),
        "hsdp": (across, [Replicate(), Shard(0)]),
        "cut": (across["tp"], [Shard(0)]),
    }
    made = {"plain": torch.nn.Parameter(torch.zeros(SHAPES["plain"], dtype=dtype))}
    for name, (where, placements) in places.items():
        zeros = torch.zeros(SHAPES[name], dtype=dtype)
        made[name] = torch.nn.Parameter(distribute_tensor(zeros, where, placements, src_data_rank=None))
    made["table"] = _table(dtype)
    made["strided"] = _strided(across, dtype)
    for name, parameter in made.items():
        fill(parameter, value(name, 0, dtype))
    return {name: made[name] for name in SHAPES}


def fill(tensor, full):
    """Writes this rank's part of a whole matrix."""
    for piece in view_of(tensor).pieces:
        piece.tensor.copy_(full[tuple(map(slice, piece.box.offsets, piece.box.ends))])


def same(tensor, full):
    """Whether what this rank holds has the bits of the whole matrix."""
    return all(
        torch.equal(piece.tensor, full[tuple(map(slice, piece.box.offsets, piece.box.ends))])
        for piece in view_of(tensor).pieces
    )


def give_gradient(parameter, full):
    """Sets this rank's part of a gradient; None takes it away."""
    holders = (parameter,) if takes_gradient(parameter) else local_tensors(parameter)
    if full is None:
        for holder in holders:
            holder.grad = None
        return
    gradient = assemble(parameter, [torch.zeros_like(local).detach() for local in local_tensors(parameter)])
    fill(gradient, full)
    for holder, own in zip(holders, (gradient,) if takes_gradient(parameter) else local_tensors(gradient), strict=True):
        holder.grad = own


def _table(dtype):
    """Two shards on rank 0, one on each other rank but the last, which has none where there are several."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows, columns = SHAPES["table"]
    holders = [0, *range(max(ranks - 1, 1))]
    ends = [*(3 * (i + 1) for i in range(len(holders) - 1)), rows]
    shards = [
        LocalShard.from_tensor_and_offsets(
            torch.zeros(end - start, columns, dtype=dtype, requires_grad=True), [start, 0], rank
        )
        for holder, start, end in zip(holders, [0, *ends], ends, strict=False)
        if holder == rank
    ]
    return init_from_local_shards(shards, rows, columns)


def _strided(mesh, dtype):
    """Sharded over tensor parallel ranks first, then over data parallel ones."""
    layer = torch.nn.Sequential(torch.nn.Linear(6, 21, bias=False, dtype=dtype))
    parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(layer, mesh=mesh["dp"])
    return layer[0].weight
