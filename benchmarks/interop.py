"""torch.distributed.checkpoint (DCP) through our writer and reader against its own; ratios are its time / ours.

python -m benchmarks.interop [--only NAME …] [--repetitions 5] [--gib 1] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import dcp
from benchmarks.peers import interleaved, on_ranks, write_table
from shardopt.checkpoint.dcp import StorageReader, StorageWriter

ROWS, COLUMNS = 4096, 4096  # 64 MiB a tensor


def state(gib: float) -> dict[str, Any]:
    """Tensors of 64 MiB, sharded by rows over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = {}
    for i in range(round(gib * 16)):
        local = torch.full((ROWS // mesh.size(), COLUMNS), float(i + 1))
        shape = torch.Size((ROWS, COLUMNS))
        made[f"layers.{i}.weight"] = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(COLUMNS, 1))
    return made


def time_saves(gib: float, folder: str, repetitions: int, durable: bool) -> dict[str, float]:
    saved = state(gib)

    def fresh(name: str, repetition: int) -> str:
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/{name}{repetition - 1}", ignore_errors=True)
        return f"{folder}/{name}{repetition}"

    def peer(name: str, writer: Callable[[str], Any]) -> Callable[[int], Any]:
        return lambda repetition: dcp.save(saved, storage_writer=writer(fresh(name, repetition)))

    peers = {
        "ours": peer("ours", lambda path: StorageWriter(path, durable=durable)),
        "dcp": peer("dcp", lambda path: dcp.FileSystemWriter(path, sync_files=durable)),
    }
    return interleaved(peers, repetitions)


def save_both(gib: float, folder: str) -> None:
    saved = state(gib)
    dcp.save(saved, storage_writer=StorageWriter(f"{folder}/ours-saved"))
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(f"{folder}/dcp-saved"))


def time_loads(gib: float, folder: str, repetitions: int) -> dict[str, float]:
    loaded = state(gib)
    peers: dict[str, Callable[[int], Any]] = {
        "ours": lambda _: dcp.load(loaded, storage_reader=StorageReader(f"{folder}/ours-saved")),
        "dcp": lambda _: dcp.load(loaded, storage_reader=dcp.FileSystemReader(f"{folder}/dcp-saved")),
    }
    return interleaved(peers, repetitions)


def saves(ranks: int, durable: bool) -> Callable[[float, str, int], dict[str, float]]:
    return lambda gib, folder, n: on_ranks(ranks, time_saves, gib, folder, n, durable)


def loads(saved_on: int, loaded_on: int) -> Callable[[float, str, int], dict[str, float]]:
    def run(gib: float, folder: str, repetitions: int) -> dict[str, float]:
        on_ranks(saved_on, save_both, gib, folder)
        times: dict[str, float] = on_ranks(loaded_on, time_loads, gib, folder, repetitions)
        return times

    return run


CASES: dict[str, tuple[str, str, Callable[[float, str, int], dict[str, float]]]] = {
    "save-2": ("dcp.save, 2 ranks, without fsync", "1.5", saves(2, False)),
    "save-2-synced": ("dcp.save, 2 ranks, with fsync", "1.5", saves(2, True)),
    "load-2": ("dcp.load, 2 ranks", "2", loads(2, 2)),
    "load-4": ("dcp.load, 4 ranks", "4", loads(4, 4)),
    "load-4-to-2": ("dcp.load, saved by 4 ranks, 2 ranks", "", loads(4, 2)),
}
"""Name → what it is, what DCP / ours should at least be, and how it is timed."""


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0, help="of the state of all ranks together")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        label, target, run = CASES[name]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            times = run(arguments.gib, folder, arguments.repetitions)
        ratio = f"{times['dcp'] / times['ours']:.1f}"
        load = f"{os.getloadavg()[0]:.1f}"
        rows.append((label, f"{times['ours']:.3f}", f"{times['dcp']:.3f}", ratio, target, load))
        print(*rows[-1], sep="  ", flush=True)
    if arguments.only == list(CASES):
        header = ("case", "ours, s", "DCP's own, s", "DCP's own / ours", "target", "load average")
        notes = (
            f"{arguments.gib:g} GiB in tensors of 64 MiB, sharded by rows. Medians of interleaved repetitions, the "
            "slowest rank counts; ours verifies checksums, DCP's own has none. "
            "[Where the time goes](interop_phases.md)."
        )
        write_table("interop", "torch.distributed.checkpoint on our format and on its own", header, rows, notes)


if __name__ == "__main__":
    main()
