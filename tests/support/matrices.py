"""Matrices sharded in every way that a job of 1, 2, 3, 4 or more ranks can, made of known global values."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.placement import fill, runs, sharded_tensor_of, two_on_first_none_on_last

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


def _table(dtype):
    """Two shards on rank 0, one on each other rank but the last, which has none where there are several."""
    holders, shape = two_on_first_none_on_last(dist.get_world_size()), SHAPES["table"]
    ends = [*(3 * (i + 1) for i in range(len(holders) - 1)), shape[0]]
    return sharded_tensor_of(torch.zeros(shape, dtype=dtype), runs(shape, 0, ends), holders, requires_grad=True)


def _strided(mesh, dtype):
    """Sharded over tensor parallel ranks first, then over data parallel ones."""
    layer = torch.nn.Sequential(torch.nn.Linear(6, 21, bias=False, dtype=dtype))
    parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(layer, mesh=mesh["dp"])
    return layer[0].weight
