"""Muon's step on sharded matrices: ours against torch's on DTensors, in the same run; collectives counted.

python -m benchmarks.muon [--ranks 2 4] [--repetitions 7]
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import shardopt
from benchmarks.peers import calling, interleaved, on_ranks, write_table

CASES = {
    "48 of 64 × 64": [(64, 64)] * 48,
    "24 of 256 × 256": [(256, 256)] * 24,
    "a transformer's: 6 × (768 × 256, 256 × 256, 1024 × 256, 256 × 1024)": [
        (768, 256),
        (256, 256),
        (1024, 256),
        (256, 1024),
    ]
    * 6,
}


def measure(shapes: list[tuple[int, int]], repetitions: int) -> dict[str, Any]:
    """Seconds of a step of each peer, and how many collectives it takes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def parameters() -> dict[str, torch.nn.Parameter]:
        made = {}
        for i, shape in enumerate(shapes):
            full = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            placed = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
            made[f"w{i}"] = torch.nn.Parameter(placed)
            made[f"w{i}"].grad = placed.clone()
        return made

    optimizers = {
        "ours": shardopt.keyed("muon", parameters()),
        "torch": torch.optim.Muon(parameters().values()),
    }
    result: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        optimizer.step()
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
        result[f"{name} collectives"] = counted.get_total_counts()
    peers = {name: calling(optimizer.step) for name, optimizer in optimizers.items()}
    return result | interleaved(peers, repetitions)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    for label, shapes in CASES.items():
        for ranks in arguments.ranks:
            results = on_ranks(ranks, measure, shapes, arguments.repetitions)
            ours, torchs = results["ours"], results["torch"]
            counts = f"{results['ours collectives']} / {results['torch collectives']}"
            rows.append((label, str(ranks), f"{ours * 1e3:.1f}", f"{torchs * 1e3:.1f}", f"{torchs / ours:.1f}", counts))
            print(*rows[-1], sep="  ", flush=True)
    header = ("matrices", "ranks", "ours, ms", "torch on DTensor, ms", "torch / ours", "collectives a step")
    notes = "A step over matrices sharded by rows, gloo, one thread a rank; medians of interleaved steps."
    print(write_table("muon", "Muon against torch.optim.Muon on DTensors", header, rows, notes))


if __name__ == "__main__":
    main()
