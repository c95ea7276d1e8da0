"""Conversions against a raw copy of the same files in the same run: seconds, and memory beside what there was before.

python -m benchmarks.convert [--gib 4] [--repetitions 3] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.peers import interleaved, write_table
from shardopt import checkpoint
from shardopt.sharding.mesh import Mesh, Split, mesh_layout

MIB = 1 << 20
_COPY_BYTES = 16 * MIB


def save_source(folder: Path, gib: int) -> None:
    """Saves `gib` GiB in 16 tensors a GiB, each in two boxes of rows."""
    mesh = Mesh((2,), (0, 1))
    checkpoint.save(
        folder / "whole", {"model": {f"layers.{i}.weight": torch.randn(4096, 4096) for i in range(16 * gib)}}
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


def conversions(folder: Path, outputs: Iterator[int]) -> dict[str, Callable[[int], object]]:
    """Returns what is timed, by name; each writes to a place of its own, and removes what it wrote before."""

    def fresh(name: str) -> Path:
        path = folder / f"{name}-{next(outputs)}"
        for earlier in folder.glob(f"{name}-*"):
            shutil.rmtree(earlier) if earlier.is_dir() else earlier.unlink()
        return path

    source = folder / "src"
    return {
        "raw copy": lambda _: copy(source, fresh("copy")),
        "shardopt": lambda _: checkpoint.convert(source, fresh("shardopt")),
        "dcp": lambda _: checkpoint.convert(source, fresh("dcp"), to="dcp"),
        "huggingface": lambda _: checkpoint.convert(source, fresh("huggingface"), to="huggingface"),
        "huggingface, bf16": lambda _: checkpoint.convert(
            source, fresh("bf16"), to="huggingface", dtype=torch.bfloat16
        ),
        "torch": lambda _: checkpoint.convert(source, fresh("torch"), to="torch"),
        "huggingface, check": lambda _: checkpoint.convert(source, fresh("checked"), to="huggingface", check=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        save_source(folder, args.gib)
        small = folder / "small"
        checkpoint.save(small, {"w": torch.ones(3)})
        for to in ("shardopt", "dcp", "huggingface", "torch"):  # what is imported and made once is no cost of each
            checkpoint.convert(small, folder / f"small-{to}", to)  # type: ignore[arg-type]
        loads = [os.getloadavg()[0]]
        outputs = iter(range(10**6))
        peers = conversions(folder, outputs)
        peaks = {peer: peak_over(lambda run=run: run(0)) for peer, run in peers.items()}  # type: ignore[misc]
        seconds = interleaved(peers, args.repetitions, warm_up=0)
        loads.append(os.getloadavg()[0])
    raw = seconds["raw copy"]
    rows = [
        [peer, f"{took:.1f}", f"{args.gib / took:.2f}", f"{raw / took:.2f}", f"{peaks[peer] / MIB:.0f}"]
        for peer, took in seconds.items()
    ]
    notes = (
        f"{args.gib} GiB of fp32 in {16 * args.gib} tensors, each in two boxes, to a local disk with fsync; one process. "
        f"Medians of {args.repetitions}; the load average was {loads[0]:.1f} before and {loads[1]:.1f} after. Memory is "
        f"the most that is resident over what was before. `python -m benchmarks.convert`"
    )
    print(
        write_table("convert", "Conversions", ["to", "seconds", "GiB/s", "of a raw copy", "memory, MiB"], rows, notes)
    )


if __name__ == "__main__":
    main()
