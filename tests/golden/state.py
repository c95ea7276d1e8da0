"""The states that the golden checkpoints hold. Once a checkpoint of a version is stored, its state must not change."""

from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import checkpoint

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]

VALUES = {
    "none": None,
    "numbers": [True, 3, -(2**70), 0.1, -0.0, float("inf"), 1e-320],
    "texts": {"a.b": "ü", 7: b"\x00\xff", "tuple": (1, ("x",)), "set": {1, 2}},
    "counter": Counter("abca"),
    "scalar": np.float32(0.1),
}


def whole(name):
    """The global value of a tensor of the golden state."""
    dtype = getattr(torch, name)
    numbers = torch.arange(1, 13).reshape(4, 3)
    if name == "float8_e8m0fnu":
        return (2.0 ** (numbers % 5)).to(dtype)
    return (numbers % 2 == 0) if name == "bool" else numbers.to(dtype)


def state():
    """The state on this rank of two."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    tensors = {f"rows.{name}": place(whole(name), Shard(0)) for name in DTYPES}
    tensors |= {
        "columns": place(torch.arange(20.0).reshape(4, 5), Shard(1)),
        "replicated": place(torch.arange(7.0), Replicate()),
        "uneven": place(torch.arange(15.0).reshape(5, 3), Shard(0)),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "long": place(torch.arange(150_000, dtype=torch.int32), Shard(0)),
    }
    mine = checkpoint.PerRank({"rank": dist.get_rank(), "state": torch.arange(3, dtype=torch.uint8)}, "keep")
    return {"tensors": tensors, "values": dict(VALUES), "list": [torch.ones(2), {"x": 1}], "mine": mine}


ROWS, PLAIN = torch.arange(15.0).reshape(5, 3), torch.arange(4, dtype=torch.bfloat16)


def tied_state():
    """State that version 2 describes and version 1 cannot: on this rank of two, keys that are one memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(ROWS, mesh, [Shard(0)], src_data_rank=None)
    plain = PLAIN.clone()
    tied = {"rows": rows, "same.rows": rows, "list": [plain, {"x": plain}], "plain": plain, "apart": PLAIN.clone()}
    return {"tied": tied, "step": 7}


STATES = {1: state, 2: tied_state}
