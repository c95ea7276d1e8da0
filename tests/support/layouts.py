"""Parameters placed in every way there is, on any number of ranks, made of known global values."""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.sharding.gradients import takes_gradient
from tests.support.fake_rank import shard
from tests.support.placement import ends_of, pieces_of, runs, sharded_tensor_of, two_on_first_none_on_last

SHAPES = {
    "even": (8, 6),
    "uneven": (9, 5),
    "short": (2, 3),  # fewer rows than four ranks: some hold nothing
    "columns": (3, 10),
    "whole": (5, 3),
    "vector": (9,),
    "scalar": (),
    "cube": (4, 5, 6),
    "cube_rows": (2, 7, 3),
    "cube_columns": (2, 3, 7),
    "grid": (7, 9),
    "hybrid": (6, 5),
    "strided": (12, 4),
    "both": (11, 3),
    "table": (11, 4),
    "table_columns": (3, 7),
    "table_vector": (10,),
    "plain": (5, 4),
}


HALF = ("even", "vector", "grid", "strided", "table", "plain")


def values(seed, dtype=torch.float32):
    """Global values by name, the same on every rank; under the dtype "mixed" those of `HALF` are in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    every = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if dtype == "mixed":
        return {name: value.bfloat16() if name in HALF else value for name, value in every.items()}
    return {name: value.to(dtype) for name, value in every.items()}


def meshes():
    """All ranks in a row, and in two rows where their number is even; made once, as each has groups with threads."""
    made = _meshes.get(dist.group.WORLD)
    if made is None:
        ranks = dist.get_world_size()
        rows = 2 if ranks % 2 == 0 else 1
        made = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (rows, ranks // rows))
        _meshes[dist.group.WORLD] = made
    return made


_meshes = WeakKeyDictionary()  # of all ranks' group


def place(full, name, row, square):
    """A global value as the tensor of that name: a plain one, a DTensor on one of the meshes, or a ShardedTensor."""
    placements = {
        "even": (row, Shard(0)),
        "uneven": (row, Shard(0)),
        "short": (row, Shard(0)),
        "columns": (row, Shard(1)),
        "whole": (row, Replicate()),
        "vector": (row, Shard(0)),
        "scalar": (row, Replicate()),
        "cube": (row, Shard(0)),
        "cube_rows": (row, Shard(1)),
        "cube_columns": (row, Shard(2)),
        "grid": (square, Shard(0), Shard(1)),
        "hybrid": (square, Replicate(), Shard(0)),
        "strided": (square, _StridedShard(0, split_factor=square.size(1)), Shard(0)),
        "both": (square, Shard(0), Shard(0)),
    }
    if name in placements:
        return shard(full, placements[name][0], *placements[name][1:])
    return table(full, full.ndim - 1) if name.startswith("table") else full.clone()


def table(full, last_dim):
    """A ShardedTensor of uneven shards; rank 0 holds two of them and the last rank of several none.

    It is cut along its rows, or its columns where there are few rows.
    """
    holders = two_on_first_none_on_last(dist.get_world_size())
    dim = 0 if full.shape[0] > 3 else last_dim
    ends = [*ends_of(range(1, len(holders))), full.shape[dim]]
    return sharded_tensor_of(full, runs(full.shape, dim, ends), holders)


def trained(tensor):
    """The tensor as a parameter."""
    if takes_gradient(tensor):
        return torch.nn.Parameter(tensor)
    tensor.metadata().tensor_properties.requires_grad = True  # its own requires_grad_ warns
    for piece in tensor.local_shards():
        piece.tensor.requires_grad_()
    return tensor


def give_gradient(parameter, gradient):
    """Gives a parameter a gradient that is placed as it is, or None."""
    if takes_gradient(parameter):
        parameter.grad = gradient
        return
    given = gradient.local_shards() if gradient is not None else [None] * len(parameter.local_shards())
    for own, gradient_shard in zip(parameter.local_shards(), given, strict=True):
        own.tensor.grad = None if gradient_shard is None else gradient_shard.tensor


def worst_difference(full, tensor):
    """The largest difference between a global value and this rank's pieces, over the largest element of the whole."""
    scale = max(full.abs().max().item(), 1e-30)
    return max((((want - have).abs().max() / scale).item() for want, have in pieces_of(full, tensor)), default=0.0)
