"""A state that has every kind of tensor, made of known global values on any number of ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt.sharding.view import view_of
from tests.support.placement import ends_of, runs, sharded_tensor_of, two_on_first_none_on_last

SHAPES = {
    "rows": ((8, 6), torch.float32),
    "columns": ((6, 8), torch.float32),
    "uneven": ((7, 5), torch.float32),
    "short": ((2, 3), torch.float32),  # fewer rows than ranks: some hold nothing
    "empty": ((0, 4), torch.float32),
    "scalar": ((), torch.float32),
    "counts": ((9,), torch.int64),
    "half": ((10, 3), torch.bfloat16),
    "table": ((11, 4), torch.float32),
    "plain": ((5, 4), torch.float32),
    "cube": ((4, 6, 5), torch.float64),
}


def global_value(name):
    shape, dtype = SHAPES[name]
    seed = sorted(SHAPES).index(name)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 3 + seed
    return (numbers % 251).reshape(shape).to(dtype)  # small enough to be exact in bfloat16


def make_state(style, filled):
    """The state on this rank. `style` turns the placements round; values are the known ones, or -1."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {
        "rows": Shard(0),
        "columns": Shard(1),
        "uneven": Shard(0),
        "short": Shard(0),
        "empty": Shard(0),
        "scalar": Replicate(),
        "counts": Shard(0),
        "half": Shard(0),
        "cube": Shard(2),
    }
    if style == "turned":
        placements |= {"rows": Shard(1), "columns": Replicate(), "uneven": Shard(1), "half": Shard(1), "cube": Shard(1)}
    if style == "replicated":
        placements = dict.fromkeys(placements, Replicate())
    state = {}
    for name in SHAPES:
        value = global_value(name) if filled else torch.full_like(global_value(name), -1)
        if name in placements:
            state[name] = distribute_tensor(value, mesh, [placements[name]], src_data_rank=None)
        elif name == "table":
            state[name] = _uneven_table(value, reverse=style == "turned")
        else:
            state[name] = value
    return state


def _uneven_table(value, reverse):
    """A ShardedTensor of uneven shards; the last rank of several holds none, the first two."""
    holders, rows = two_on_first_none_on_last(dist.get_world_size()), value.shape[0]
    if reverse:
        holders.reverse()
    ends = [*(min(end, rows) for end in ends_of([1 + 2 * i for i in range(len(holders) - 1)])), rows]
    shards = [(box, holder) for box, holder in zip(runs(value.shape, 0, ends), holders, strict=True) if box.numel]
    return sharded_tensor_of(value, [box for box, _ in shards], [holder for _, holder in shards])


def check_state(state):
    """Each piece that this rank holds has just the known values."""
    for name, tensor in state.items():
        for piece in view_of(tensor, name).pieces:
            expected = global_value(name)
            for dim, (offset, size) in enumerate(zip(piece.box.offsets, piece.box.sizes, strict=True)):
                expected = expected.narrow(dim, offset, size)
            assert torch.equal(piece.tensor, expected), name


def memory_of(state):
    return {name: [p.tensor.data_ptr() for p in view_of(tensor, name).pieces] for name, tensor in state.items()}
