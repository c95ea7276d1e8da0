"""Estimates of saves and loads against what they then are: four states, on a local disk and in a bucket.

    python -m benchmarks.estimates [--ranks 2] [--repetitions 5] [--folder /tmp]

The bytes are those of an estimate before the first step, and of saves after it. Estimates, saves and loads take turns.
The bucket is a directory in memory that `s3_files.py` serves on loopback, with 200 MB/s in all and 20 ms before each
answer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no type hints
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from benchmarks.peers import on_ranks, write_table
from benchmarks.s3_files import BUCKET, served
from shardopt import checkpoint
from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.storage import storage_of

ROWS, COLUMNS = 65536, 4096  # of the large tensor
SMALL = 10_000  # tensors
WIDTH, LAYERS = 512, 8  # of the transformer
TABLES = (1_000_000, 300_000, 100_000, 10_000, 200, 30)  # rows
RATE, LATENCY = 200e6, 0.02  # of the bucket

App = dict[str, Any]


def large(mesh: DeviceMesh) -> App:
    return {"w": distribute_tensor(torch.ones(ROWS, COLUMNS), mesh, [Shard(0)], src_data_rank=None)}


def small(mesh: DeviceMesh) -> App:
    whole = torch.ones(64, 16)
    return {f"layers.{i}.weight": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for i in range(SMALL)}


def transformer(mesh: DeviceMesh) -> App:
    layers = (torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH) for _ in range(LAYERS))
    return trained(torch.nn.Sequential(*layers), "adamw", mesh)


def tables(mesh: DeviceMesh) -> App:
    model = torch.nn.ModuleList(torch.nn.Embedding(rows, 64) for rows in TABLES)
    return trained(model, "rowwiseadagrad", mesh)


def trained(model: torch.nn.Module, algorithm: str, mesh: DeviceMesh) -> App:
    for part in model.children():
        fully_shard(part, mesh=mesh)
    return {"model": model, "optimizer": shardopt.keyed(algorithm, model.named_parameters(), lr=1e-3), "step": 0}


def step(app: App) -> None:
    """The first one, by which optimizers get their state."""
    if "optimizer" in app:
        for parameter in app["model"].parameters():
            parameter.grad = torch.zeros_like(parameter)
        app["optimizer"].step()
        app["optimizer"].zero_grad()


STATES: dict[str, Callable[[DeviceMesh], App]] = {
    f"one tensor of {ROWS * COLUMNS * 4 / 2**30:g} GiB": large,
    "a transformer with AdamW": transformer,
    f"{SMALL:,} small tensors": small,
    "embedding tables with row-wise Adagrad": tables,
}


def look(make: Callable[[DeviceMesh], App], root: str, options: Mapping[str, Any], repetitions: int) -> dict[str, Any]:
    """Estimates, saves and loads in turns; returns medians of seconds, and bytes. On each rank."""
    fsspec.config.conf["s3"] = dict(options)
    torch.manual_seed(0)
    app = make(init_device_mesh("cpu", (dist.get_world_size(),)))
    before = checkpoint.estimate(app, root, measure_seconds=0)
    step(app)
    seconds: dict[str, list[float]] = {}
    sizes = [0]
    for repetition in range(-1, repetitions):
        url = f"{root}/saved-{repetition + 1}"
        estimate = checkpoint.estimate(app, root)
        saved, loaded = checkpoint.save(url, app), checkpoint.load(url, app)
        slowest = torch.tensor([saved.seconds, loaded.seconds], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        sizes = [storage_of(url).size(MANIFEST_NAME)]
        dist.barrier()
        if dist.get_rank() == 0:
            remove_checkpoint(storage_of(url))
        found = {"save": slowest[0].item(), "load": slowest[1].item()}
        found |= {"save?": estimate.save_seconds or 0.0, "load?": estimate.load_seconds or 0.0}
        for name, each in found.items() if repetition >= 0 else ():
            seconds.setdefault(name, []).append(each)
    written: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(written, saved.bytes_written)
    return {
        **{name: median(each) for name, each in seconds.items()},
        "written": written,
        "estimated": [*before.bytes_by_rank],
        "manifest": sizes[0] - before.manifest_bytes,
        "measured": estimate.measured_bytes,
    }


def row_of(state: str, storage: str, found: Mapping[str, Any]) -> list[str]:
    ratios = [found[f"{call}?"] / found[call] for call in ("save", "load")]
    equal = "equal" if found["written"] == found["estimated"] else f"{found['estimated']} for {found['written']}"
    nbytes = " + ".join(f"{each / 1e6:.1f}" for each in found["written"])
    figures = [f"{found[name]:.2f}" for name in ("save?", "save", "load?", "load")]
    save, load = (f"{ratio:.2f}" if abs(ratio - 1) <= 0.3 else f"**{ratio:.2f}**" for ratio in ratios)
    measured = f"{found['measured'] / 1e6:.0f}"
    return [state, storage, nbytes, equal, f"{found['manifest']:+d}", measured, *figures[:2], save, *figures[2:], load]


NOTES = """Bytes a rank (MB) are compared with an estimate before the first step; "manifest" is by how many bytes it was
longer, from the digits of times and counters. "Measured" is how much a rank wrote at a time for the estimate (MB).
Seconds are medians of estimates, saves and loads in turns; a ratio is estimated / was, and bold if it misses by more
than 30 %. Loads read from the page cache where they can, in the estimate too."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--folder", default="/tmp")
    given = arguments.parse_args()
    rows = []
    for state, make in STATES.items():
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            on_disk = on_ranks(given.ranks, look, make, folder, {}, given.repetitions)
        rows.append(row_of(state, "disk", on_disk))
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, served(folder, RATE, LATENCY) as options:
            in_bucket = on_ranks(given.ranks, look, make, f"s3://{BUCKET}/run", options, given.repetitions)
        rows.append(row_of(state, "bucket", in_bucket))
        print(*rows[-2:], sep="\n", flush=True)
    header: tuple[str, ...] = ("state", "storage", "bytes a rank", "estimate", "manifest", "measured")
    header += ("save: estimated, s", "was", "ratio", "load: estimated, s", "was", "ratio")
    print(write_table("estimates", f"Estimates before a run, {given.ranks} ranks", header, rows, NOTES))


if __name__ == "__main__":
    main()
