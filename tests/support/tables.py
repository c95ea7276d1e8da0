"""Tables whose rows are touched a few at a time, placed in every way there is, and their gradients, dense and sparse.

R ranks; a table is [N rows, ...]. Every rank knows the whole gradient and takes its part of it.
"""

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt.sharding.gradients import takes_gradient
from shardopt.sharding.view import assemble, local_tensors, view_of
from tests.support.fake_rank import shard

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
    """Two shards on rank 0, one on each other rank but the last, which has none where there are several."""
    size, rank = dist.get_world_size(), dist.get_rank()
    holders = [0, *range(max(size - 1, 1))]
    rows, columns = full.shape
    ends = [min(i + 1, rows - 1) for i in range(len(holders) - 1)]
    boxes = [(at, 0, end - at, columns) for at, end in zip([0, *ends], [*ends, rows], strict=True)]
    if name == "table of columns":
        ends = [min(i + 1, columns - 1) for i in range(len(holders) - 1)]
        boxes = [(0, at, rows, end - at) for at, end in zip([0, *ends], [*ends, columns], strict=True)]
    elif name == "table of tiles":
        boxes = [(0, 0, 3, 4), (0, 4, 3, 5), (3, 0, 5, 6), (3, 6, 5, 3)]
        holders = [i % max(size - 1, 1) for i in range(4)]
    metadata = [
        ShardMetadata(list(box[:2]), list(box[2:]), f"rank:{holder}/cpu")
        for holder, box in zip(holders, boxes, strict=True)
    ]
    properties = sharded_tensor.TensorProperties(dtype=full.dtype, requires_grad=True)
    local = [
        sharded_tensor.Shard(
            full[at : at + height, left : left + width].clone().contiguous().requires_grad_(), metadata[number]
        )
        for number, (at, left, height, width) in enumerate(boxes)
        if holders[number] == rank and height * width
    ]
    whole = sharded_tensor.ShardedTensorMetadata(metadata, full.shape, properties)
    return sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(local, whole)


def give_gradient(parameter, full):
    """Sets this rank's shards of a whole gradient, sparse or dense; None takes it away."""
    local = local_tensors(parameter)
    holders = (parameter,) if takes_gradient(parameter) else local
    if full is None:
        for holder in holders:
            holder.grad = None
        return
    gradients = [_local_gradient(full, each, where) for each, where in zip(local, _boxes(parameter), strict=True)]
    given = [assemble(parameter, gradients)] if takes_gradient(parameter) else gradients
    for holder, gradient in zip(holders, given, strict=True):
        holder.grad = gradient


def _boxes(parameter):
    """The box of each local tensor; None where it is empty, and a list where it has several."""
    pieces = view_of(parameter).pieces
    if not takes_gradient(parameter):
        return [piece.box for piece in pieces]
    return [[piece.box for piece in pieces]]


def _local_gradient(full, each, boxes):
    """Returns the gradient of a local tensor: that of its boxes, one behind the other along the rows."""
    boxes = boxes if isinstance(boxes, list) else [boxes]
    if not full.is_sparse:
        made = [full[tuple(map(slice, box.offsets, box.ends))] for box in boxes]
        return torch.cat(made).clone().view(each.shape) if made else torch.zeros_like(each).detach()
    rows, values, at = [], [], 0
    indices = full._indices()[0]
    for box in boxes:
        here = (indices >= box.offsets[0]) & (indices < box.ends[0])
        rows.append(indices[here] - box.offsets[0] + at)
        values.append(full._values()[here][(slice(None), *map(slice, box.offsets[1:], box.ends[1:]))])
        at += box.sizes[0]
    index = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    chosen = torch.cat(values) if values else each.detach().new_empty((0, *each.shape[1:]))
    return torch.sparse_coo_tensor(index[None], chosen, each.shape, check_invariants=True)


def parts_of(full, like):
    """This rank's part of a whole tensor, and what stands there: (wanted, found) for each piece."""
    return [(full[tuple(map(slice, p.box.offsets, p.box.ends))], p.tensor) for p in view_of(like).pieces]
