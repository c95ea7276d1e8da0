"""Conversions against a raw copy of the same files in the same run: seconds, and memory beside what there was before.

python -m benchmarks.convert [--gib 4] [--repetitions 3] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.peers import write_table
from shardopt import checkpoint
from shardopt.sharding.mesh import Mesh, Split, mesh_layout

MIB = 1 << 20
WIDTH = 4096
SMALL = 6_000_000  # elements, of what warms up
_COPY_BYTES = 16 * MIB


def save_source(folder: Path, gib: int) -> None:
    """Saves `gib` GiB in 16 tensors a GiB, each in two boxes of rows."""
    mesh = Mesh((2,), (0, 1))
    checkpoint.save(
        folder / "whole", {"model": {f"layers.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(16 * gib)}}
    )
    checkpoint.reshard(
        folder / "whole", folder / "src", layout=lambda _, stored: mesh_layout(stored.shape, mesh, (Split(0, 0),))
    )
    shutil.rmtree(folder / "whole")


def copy(source: Path, target: Path) -> None:
    """Copies the files of a directory, through one buffer, each flushed to the disk at its end."""
    target.mkdir()
    buffer = memoryview(bytearray(_COPY_BYTES))
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as read, open(target / path.name, "xb", buffering=0) as write:
            while count := read.readinto(buffer):
                rest = buffer[:count]
                while rest:
                    rest = rest[write.write(rest) :]
            os.fsync(write.fileno())


def resident_bytes(field: str) -> int:
    """Returns a number of bytes that the system has of this process: now ("VmRSS"), or the most ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def peak_over(work: Callable[[], object]) -> int:
    """Returns how many more bytes are resident at most while it works than before."""
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
    work()
    return resident_bytes("VmHWM") - before


def conversions(source: Path, target: Path) -> dict[str, Callable[[], object]]:
    """Returns what is measured, by name."""
    convert = checkpoint.convert
    return {
        "raw copy": lambda: copy(source, target),
        "shardopt": lambda: convert(source, target),
        "dcp": lambda: convert(source, target, to="dcp"),
        "huggingface": lambda: convert(source, target, to="huggingface"),
        "huggingface, bf16": lambda: convert(source, target, to="huggingface", dtype=torch.bfloat16),
        "torch": lambda: convert(source, target, to="torch"),
        "huggingface, check": lambda: convert(source, target, to="huggingface", check=True),
    }


def measure(name: str, folder: Path) -> tuple[float, int]:
    """Returns the seconds that a conversion takes, and its memory; on a small checkpoint first, where all is made that
    is made once."""
    target = folder / "out"
    seconds: list[float] = []

    def timed() -> None:
        begin = time.perf_counter()
        conversions(folder / "src", target)[name]()
        seconds.append(time.perf_counter() - begin)

    conversions(folder / "small", target)[name]()
    remove(target)
    peak = peak_over(timed)
    remove(target)
    return seconds[0], peak


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def measure_apart(name: str, folder: Path) -> tuple[float, int]:
    """Measures in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.convert", "--measure", name, "--folder", str(folder)]
    seconds, peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]
    return float(seconds), int(peak)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--measure")
    args = parser.parse_args()
    if args.measure:
        print(*measure(args.measure, Path(args.folder)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        save_source(folder, args.gib)
        checkpoint.save(folder / "small", {"w": torch.ones(SMALL)})
        load_before = os.getloadavg()[0]
        measured: dict[str, list[tuple[float, int]]] = {peer: [] for peer in conversions(folder, folder)}
        for _ in range(args.repetitions):
            for peer, those in measured.items():
                those.append(measure_apart(peer, folder))
        load_after = os.getloadavg()[0]
    seconds = {peer: statistics.median(took for took, _ in those) for peer, those in measured.items()}
    peaks = {peer: max(peak for _, peak in those) for peer, those in measured.items()}
    raw = seconds["raw copy"]
    rows = [
        [peer, f"{took:.1f}", f"{args.gib / took:.2f}", f"{raw / took:.2f}", f"{peaks[peer] / MIB:.0f}"]
        for peer, took in seconds.items()
    ]
    notes = (
        f"{args.gib} GiB of fp32 in {16 * args.gib} tensors, each in two boxes, to a local disk with fsync, by one "
        f"process. Medians of {args.repetitions}; the load average of the machine, which others used too, was "
        f"{load_before:.1f} before and {load_after:.1f} after. Memory is the growth of resident memory at its peak, "
        "each time in a fresh process. `python -m benchmarks.convert`"
    )
    print(
        write_table("convert", "Conversions", ["to", "seconds", "GiB/s", "of a raw copy", "memory, MiB"], rows, notes)
    )


if __name__ == "__main__":
    main()
