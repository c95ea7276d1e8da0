"""Tables whose rows are touched a few at a time, placed in every way there is, and their gradients, dense and sparse.

R ranks; a table is [N rows, ...]. Every rank knows the whole gradient and takes its part of it.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.sharding.box import Box
from tests.support.fake_rank import shard
from tests.support.placement import runs, sharded_tensor_of, two_on_first_none_on_last

ROWS = {
    "even": (24, 8),
    "uneven": (25, 5),
    "short": (2, 16),  # fewer rows than ranks: some hold nothing
    "wide": (3, 1031),
    "vector": (13,),
    "cube": (9, 3, 4),
    "copies": (7, 6),
    "hybrid": (11, 4),
    "strided": (16, 3),
    "table": (19, 6),  # a ShardedTensor, of which the last of several ranks holds nothing
    "plain": (6, 5),
}
COLUMNS = {
    "columns": (9, 12),
    "uneven columns": (8, 7),
    "few columns": (6, 2),
    "cube columns": (5, 4, 6),
    "grid": (10, 9),
    "table of columns": (6, 7),
    "table of tiles": (8, 9),
}
TOUCHED = [(0, 2, 2, 5, 1), (3,), (), (1, 4, 1, 4, 0), (5, 5, 5), (0, 1, 2, 3, 4, 5), (2, 0), (4, 1)]
"""Of each step, in units of a sixth of the rows; with repeats, and once none."""


def start(name):
    """The global values that a table begins with."""
    return _random(name, 0)


def gradient(name, step, sparse):
    """The global gradient of a step; the dense one has the values of the sparse one."""
    shape = {**ROWS, **COLUMNS}[name]
    rows = torch.tensor([row * shape[0] // 6 for row in TOUCHED[step % len(TOUCHED)]], dtype=torch.int64)
    values = _random(name, step + 1, (len(rows), *shape[1:]))
    made = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=True)
    return made if sparse else made.to_dense()


def _random(name, seed, shape=None):
    every = {**ROWS, **COLUMNS}
    generator = torch.Generator().manual_seed(100 * seed + list(every).index(name))
    return torch.randn(shape or every[name], generator=generator)


def place(full, name, row, square):
    """Global values as the table of that name.

    Args:
        full: the same on every rank.
        row, square: meshes of one and of two dimensions over all ranks.
    """
    placements = {
        "even": (row, Shard(0)),
        "uneven": (row, Shard(0)),
        "short": (row, Shard(0)),
        "wide": (row, Shard(0)),
        "vector": (row, Shard(0)),
        "cube": (row, Shard(0)),
        "copies": (row, Replicate()),
        "hybrid": (square, Replicate(), Shard(0)),
        "strided": (square, _StridedShard(0, split_factor=square.size(1)), Shard(0)),
        "columns": (row, Shard(1)),
        "uneven columns": (row, Shard(1)),
        "few columns": (row, Shard(1)),
        "cube columns": (row, Shard(2)),
        "grid": (square, Shard(0), Shard(1)),
    }
    if name in placements:
        mesh, *where = placements[name]
        return torch.nn.Parameter(shard(full, mesh, *where))
    return _sharded_tensor(full, name) if name.startswith("table") else torch.nn.Parameter(full.clone())


def _sharded_tensor(full, name):
    """Rows or columns, two runs on rank 0 and none on the last of several; or four tiles."""
    holders = two_on_first_none_on_last(dist.get_world_size())
    dim = 1 if name == "table of columns" else 0
    size = full.shape[dim]
    boxes = runs(full.shape, dim, [*(min(i + 1, size - 1) for i in range(len(holders) - 1)), size])
    if name == "table of tiles":
        boxes = [Box((0, 0), (3, 4)), Box((0, 4), (3, 5)), Box((3, 0), (5, 6)), Box((3, 6), (5, 3))]
        holders = [i % max(dist.get_world_size() - 1, 1) for i in range(4)]
    return sharded_tensor_of(full, boxes, holders, requires_grad=True, empty=False)
