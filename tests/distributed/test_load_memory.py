"""Memory that a load takes beyond that which is there: bounded, whatever the size of the tensors."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardopt import checkpoint
from tests.harness import run_ranks

MIB = 1 << 20
MOST_EXTRA_BYTES = 64 * MIB


def make(rows: int, dim: int) -> dict[str, DTensor]:
    """One fp32 tensor of 8 KiB a row, cut along that dimension, its memory touched."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shape = torch.Size((rows, 2048))
    local = list(shape)
    local[dim] //= size
    filled = torch.full(local, float(rank + 1))
    mesh = init_device_mesh("cpu", (size,))
    return {"w": DTensor.from_local(filled, mesh, [Shard(dim)], run_check=False, shape=shape, stride=(2048, 1))}


def resident(field: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" the most since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def extra_bytes_of(load, state) -> int:
    before = resident("VmRSS")
    forget_peak()
    load(state)
    return resident("VmHWM") - before


def save(path: str, rows: int) -> None:
    state = make(rows, 0)
    checkpoint.save(os.path.join(path, "ours"), state, durable=False)
    dcp.save(state, checkpoint_id=os.path.join(path, "dcp"))


def load(path: str, rows: int, dim: int, transactional: bool) -> int:
    small = {"w": torch.zeros(3)}
    checkpoint.save(os.path.join(path, f"small{dim}{transactional}"), small)
    checkpoint.load(os.path.join(path, f"small{dim}{transactional}"), small)  # imports and the like
    state = make(rows, dim)
    return extra_bytes_of(
        lambda into: checkpoint.load(os.path.join(path, "ours"), into, transactional=transactional), state
    )


def load_with_dcp(path: str, rows: int) -> int:
    return extra_bytes_of(lambda into: dcp.load(into, checkpoint_id=os.path.join(path, "dcp")), make(rows, 1))


def check(path, rows):
    run_ranks(2, save, path, rows, deadline_seconds=120.0)
    chunk = rows * 8192 // 2
    for dim, transactional in ((0, False), (1, False), (1, True)):
        extra = run_ranks(2, load, path, rows, dim, transactional, deadline_seconds=120.0)
        assert max(extra) <= MOST_EXTRA_BYTES, (dim, transactional, extra)
    # The same measure sees what DCP takes for whole chunks: it is not blind.
    assert max(run_ranks(2, load_with_dcp, path, rows, deadline_seconds=120.0)) > chunk


def test_a_load_takes_bounded_memory(tmp_path):
    check(str(tmp_path), 256 * MIB // 8192)


@pytest.mark.exhaustive
def test_a_load_of_a_gibibyte_takes_as_little(tmp_path):
    check(str(tmp_path), 1024 * MIB // 8192)
