"""Checkpoints against torch.distributed.checkpoint (DCP) in the same run; ratios are DCP time / our time.

python -m benchmarks.checkpoint [--only NAME …] [--repetitions 5] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks import dcp, raw_io
from benchmarks.peers import RESULTS, interleaved, on_ranks, write_table
from shardopt import checkpoint

SMALL = 10_000  # tensors
ROWS, COLUMNS = 8192, 4096  # of a large one


def small_plain() -> dict[str, Any]:
    return {f"layers.{i}.weight": torch.randn(16, 16) for i in range(SMALL)}


def small_sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(64, 16)
    return {f"layers.{i}.weight": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for i in range(SMALL)}


def large(dim: int) -> dict[str, Any]:
    """2 GiB in 16 tensors, sharded along `dim` over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for i in range(16):
        whole = torch.empty(1, 1).expand(ROWS, COLUMNS)
        local = (
            whole.chunk(mesh.size(), dim)[mesh.get_rank()]
            if mesh.get_rank() < len(whole.chunk(mesh.size(), dim))
            else whole[:0]
        )
        filled = torch.full(local.shape, float(i + 1))
        state[f"layers.{i}.weight"] = torch.distributed.tensor.DTensor.from_local(
            filled, mesh, [Shard(dim)], shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1)
        )
    return state


def dcp_writer(path: str, durable: bool = True) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=durable, thread_count=1)


def save_peers(
    state: dict[str, Any], folder: str, repeated: bool, durable: bool = True
) -> dict[str, Callable[[int], Any]]:
    planner = dcp.DefaultSavePlanner(enable_plan_caching=repeated)

    def ours(repetition: int) -> None:
        checkpoint.save(f"{folder}/ours{repetition}", state, durable=durable)

    def by_dcp(repetition: int) -> None:
        dcp.save(state, storage_writer=dcp_writer(f"{folder}/dcp{repetition}", durable), planner=planner)

    return {"ours": ours, "dcp": by_dcp}


def load_peers(state: dict[str, Any], ours_at: str, dcp_at: str) -> dict[str, Callable[[int], Any]]:
    return {
        "ours": lambda _: checkpoint.load(ours_at, state),
        "dcp": lambda _: dcp.load(state, storage_reader=dcp.FileSystemReader(dcp_at), planner=dcp.DefaultLoadPlanner()),
    }


def save_both(make: Callable[..., dict[str, Any]], args: tuple[Any, ...], folder: str) -> None:
    state = make(*args)
    checkpoint.save(f"{folder}/ours-saved", state)
    dcp.save(state, storage_writer=dcp_writer(f"{folder}/dcp-saved"))


def time_saves(
    make: Callable[..., dict[str, Any]],
    args: tuple[Any, ...],
    folder: str,
    repetitions: int,
    repeated: bool,
    durable: bool,
) -> dict[str, float]:
    state = make(*args)

    def clear() -> None:
        """Removes what was saved, so that nobody waits for another's dirty pages."""
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder)
        dist.barrier()

    clear()
    peers = save_peers(state, folder, repeated, durable)
    if make is large:
        peers |= raw_io.writers(f"{folder}/raw-{dist.get_rank()}", _memories(state), durable)
    elif make is small_plain:
        peers |= raw_io.safetensors_writer(f"{folder}/raw", state)
    return interleaved(peers, repetitions, prepare=clear)


def time_loads(
    make: Callable[..., dict[str, Any]], args: tuple[Any, ...], folder: str, repetitions: int
) -> dict[str, float]:
    state = make(*args)
    peers = load_peers(state, f"{folder}/ours-saved", f"{folder}/dcp-saved")
    if make is large:
        whole = state if args == (0,) else large(0)  # by columns, memory is the same bytes in other places
        memories = _memories(whole)
        begin = 16 * ROWS * COLUMNS * 4 * dist.get_rank() // dist.get_world_size()
        peers |= raw_io.readers(sorted(glob.glob(f"{folder}/ours-saved/*.safetensors")), begin, memories)
    elif make is small_plain:
        (path,) = glob.glob(f"{folder}/ours-saved/*.safetensors")
        peers |= raw_io.safetensors_reader(path, state)
    times = interleaved(peers, repetitions)
    report = checkpoint.load(f"{folder}/ours-saved", state)
    return times | {"read": report.bytes_read, "wanted": report.bytes_wanted}


def _memories(state: dict[str, Any]) -> list[memoryview]:
    locals_ = [tensor.to_local() for tensor in state.values()]
    return [memoryview(local.numpy()).cast("B") for local in locals_ if local.numel()]


CASES: dict[str, Callable[[str, int], list[tuple[str, dict[str, float]]]]] = {}


def case(name: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        CASES[name] = function
        return function

    return add


@case("small-1")
def _small_one(folder: str, n: int) -> list[tuple[str, dict[str, float]]]:
    return [
        ("10,000 small tensors, 1 rank, save", on_ranks(1, time_saves, small_plain, (), folder, n, False, True)),
        (
            "10,000 small tensors, 1 rank, load",
            on_ranks(1, save_both, small_plain, (), folder) or on_ranks(1, time_loads, small_plain, (), folder, n),
        ),
    ]


@case("small-2-first")
def _small_two_first(folder: str, n: int) -> list[tuple[str, dict[str, float]]]:
    """First saves and loads: processes that have not saved before, so each repetition is a job of its own."""
    saves, loads = [], []
    for i in range(n):
        saves.append(on_ranks(2, first_save, f"{folder}/{i}"))
        loads.append(on_ranks(2, first_load, f"{folder}/{i}"))
        shutil.rmtree(f"{folder}/{i}")
    return [
        ("the same over 2 ranks, first save", _medians(saves)),
        ("the same over 2 ranks, first load", _medians(loads)),
    ]


def first_save(folder: str) -> dict[str, float]:
    state = small_sharded()
    checkpoint.save(f"{folder}/warm-ours", {"x": torch.zeros(3)})  # imports and the like
    dcp.save({"x": torch.zeros(3)}, storage_writer=dcp_writer(f"{folder}/warm-dcp"))
    return interleaved(
        {
            "ours": lambda _: checkpoint.save(f"{folder}/ours-saved", state),
            "dcp": lambda _: dcp.save(state, storage_writer=dcp_writer(f"{folder}/dcp-saved")),
        },
        1,
        warm_up=0,
    )


def first_load(folder: str) -> dict[str, float]:
    state = small_sharded()
    checkpoint.load(f"{folder}/warm-ours", {"x": torch.zeros(3)})
    dcp.load({"x": torch.zeros(3)}, storage_reader=dcp.FileSystemReader(f"{folder}/warm-dcp"))
    return interleaved(load_peers(state, f"{folder}/ours-saved", f"{folder}/dcp-saved"), 1, warm_up=0)


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: sorted(run[name] for run in runs)[len(runs) // 2] for name in runs[0]}


@case("small-2-repeated")
def _small_two(folder: str, n: int) -> list[tuple[str, dict[str, float]]]:
    return [
        ("the same over 2 ranks, repeated save", on_ranks(2, time_saves, small_sharded, (), folder, n, True, True)),
        (
            "the same over 2 ranks, repeated load",
            on_ranks(2, save_both, small_sharded, (), folder) or on_ranks(2, time_loads, small_sharded, (), folder, n),
        ),
    ]


@case("large-save")
def _large_save(folder: str, n: int) -> list[tuple[str, dict[str, float]]]:
    return [
        ("2 GiB, 2 ranks, save, without fsync", on_ranks(2, time_saves, large, (0,), f"{folder}/not", n, True, False)),
        ("2 GiB, 2 ranks, save, with fsync", on_ranks(2, time_saves, large, (0,), f"{folder}/synced", n, True, True)),
    ]


@case("large-load")
def _large_load(folder: str, n: int) -> list[tuple[str, dict[str, float]]]:
    on_ranks(2, save_both, large, (0,), folder)
    return [
        ("2 GiB, 2 ranks, load", on_ranks(2, time_loads, large, (0,), folder, n)),
        ("2 GiB, 2 → 3 ranks, load", on_ranks(3, time_loads, large, (0,), folder, n)),
    ]


@case("large-reshard")
def _large_reshard(folder: str, n: int) -> list[tuple[str, dict[str, float]]]:
    on_ranks(4, save_both, large, (0,), folder)
    return [
        ("2 GiB, 4 → 3 ranks, load", on_ranks(3, time_loads, large, (0,), folder, n)),
        ("2 GiB, 4 → 1 ranks, load", on_ranks(1, time_loads, large, (0,), folder, n)),
        ("2 GiB, rows → columns, 4 ranks, load", on_ranks(4, time_loads, large, (1,), folder, n)),
    ]


TARGETS = {
    "10,000 small tensors, 1 rank, save": "20",
    "10,000 small tensors, 1 rank, load": "25",
    "the same over 2 ranks, first save": "12",
    "the same over 2 ranks, first load": "12",
    "the same over 2 ranks, repeated save": "20",
    "the same over 2 ranks, repeated load": "15",
    "2 GiB, 2 ranks, save, without fsync": "1.3; raw 0.85",
    "2 GiB, 2 ranks, save, with fsync": "1.4; raw 0.85",
    "2 GiB, 2 ranks, load": "6; raw 0.85",
    "2 GiB, 2 → 3 ranks, load": "8",
    "2 GiB, 4 → 3 ranks, load": "8; raw 0.85",
    "2 GiB, 4 → 1 ranks, load": "8; raw 0.85",
    "2 GiB, rows → columns, 4 ranks, load": "4",
}
"""What each DCP / ours, and where it says so the fraction of raw I/O, should at least be."""


def plot(rows: list[tuple[str, ...]]) -> None:
    """Draws DCP / ours of each case beside its target."""
    names = [row[0] for row in rows][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.2), layout="constrained")
    axes.barh(names, [float(row[3]) for row in rows][::-1], color="#4477aa", label="DCP time / shardopt time")
    targets = [float(TARGETS[name].split(";")[0]) for name in names]
    axes.plot(targets, names, "k|", markersize=16, markeredgewidth=2, label="target")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("times faster than torch.distributed.checkpoint")
    axes.legend(loc="lower right")
    figure.savefig(RESULTS / "checkpoint.png", dpi=120)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for name in arguments.only:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for label, times in CASES[name](folder, arguments.repetitions):
                best = raw_io.best(times)
                raw = "" if best is None else f"{best / times['ours']:.2f}"
                summed = f"{times[raw_io.SUMMED] / times['ours']:.2f}" if raw_io.SUMMED in times else ""
                amplification = f"{times['read'] / times['wanted']:.3f}" if times.get("wanted") else ""
                ratio = f"{times['dcp'] / times['ours']:.1f}"
                seconds = f"{times['ours']:.3f}", f"{times['dcp']:.3f}"
                rows.append((label, *seconds, ratio, TARGETS[label], raw, summed, amplification))
                print(*rows[-1], sep="  ", flush=True)
    if arguments.only == list(CASES):
        header = (
            "case",
            "ours, s",
            "DCP, s",
            "DCP / ours",
            "target",
            "of raw I/O",
            "with checksums",
            "bytes read / wanted",
        )
        notes = (
            "Medians of interleaved repetitions, the slowest rank counts; checksums are on. Targets are of DCP / ours, "
            "and of the fraction of a raw write or cached read of the same bytes: the fastest way of "
            "`benchmarks/raw_io.py`; for small tensors on one rank, safetensors' own `save_file` and `load_file`, "
            "without checksums. *With checksums*: of the speed of that program's read where it also hashes each "
            "segment, and compares nothing."
        )
        write_table("checkpoint", "Checkpoints against torch.distributed.checkpoint", header, rows, notes)
        plot(rows)


if __name__ == "__main__":
    main()
