"""Bytes of optimizer state a parameter, by algorithm and option, and what a step costs in memory and time.

    python -m benchmarks.state_memory [--rounds 5] [--ranks-only]

The matrices and vectors of a transformer layer of width 768 in bf16 (fp32 where nothing else is asked for), on one
thread. State is what tensors take. Peak memory is the most that new tensors take at once within a step, beside what
was there, as counted by torch's allocator in Python. Times are CPU seconds of the process, peers in turns. Of two ranks
what each of them has at most, parameters, gradients and state with it, is held against the table's bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import shardopt
from benchmarks.peers import on_ranks, write_table
from shardopt import checkpoint
from shardopt.sharding.view import local_tensors

WIDTH, RANKS = 768, 2
LAYERS_OF_RANKS = (1, 4)  # what a step allocates is as much for both
BF16, FP32 = torch.bfloat16, torch.float32
STORED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "torch, fp32": (FP32, {}),
    "torch, bf16": (BF16, {}),
    "bf16": (FP32, {"state_dtype": BF16}),
    "8 bits": (FP32, {"state_dtype": torch.uint8}),
    "8 bits, to nearest": (FP32, {"state_dtype": torch.uint8, "rounding": "nearest"}),
    "8 bits, stochastic": (BF16, {"state_dtype": torch.uint8, "rounding": "stochastic"}),
    "fp32, master": (BF16, {"master_dtype": FP32}),
    "8 bits, master": (BF16, {"state_dtype": torch.uint8, "master_dtype": FP32}),
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam, amsgrad": {"amsgrad": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {},
    "RMSprop, momentum": {"momentum": 0.9},
    "Rprop": {},
    "ASGD": {},
    "SGD, momentum": {"momentum": 0.9},
}
PEERS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32, fused": (FP32, {"fused": True}),
    "fp32, foreach": (FP32, {"foreach": True}),
    **{name: STORED[name] for name in STORED if not name.startswith("torch")},
}


def parameters(dtype: torch.dtype, matrices_only: bool = False, layers: int = 1) -> dict[str, Tensor]:
    shapes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
    made: dict[str, Tensor] = {}
    for layer in range(layers):
        for name, (rows, columns) in shapes.items():
            made[f"{layer}.{name}.weight"] = torch.randn(rows * WIDTH, columns * WIDTH)
            if not matrices_only:
                made[f"{layer}.{name}.bias"] = torch.randn(rows * WIDTH)
    return {name: torch.nn.Parameter(value.to(dtype)) for name, value in made.items()}


def optimizer_of(algorithm: str, options: dict[str, Any], named: dict[str, Tensor]) -> Any:
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    name = algorithm.partition(",")[0].lower()
    return shardopt.keyed(name, named, **ALGORITHMS[algorithm], **options)


def bytes_of_state(optimizer: Any) -> int:
    states = optimizer.state_dict()["state"].values()
    values = [value for entries in states for value in entries.values() if isinstance(value, Tensor)]
    return sum(local.nbytes for value in values for local in local_tensors(value))


def measure_bytes(algorithm: str, stored: str) -> float:
    """Bytes of state a parameter of a transformer's matrices."""
    dtype, options = STORED[stored]
    named = parameters(dtype, matrices_only=True)
    optimizer = optimizer_of(algorithm, options, named)
    optimizer.step()
    return bytes_of_state(optimizer) / sum(parameter.numel() for parameter in named.values())


def bytes_or_none(algorithm: str, stored: str) -> str:
    """`measure_bytes`, or that the algorithm refuses to store so."""
    try:
        return f"{measure_bytes(algorithm, stored):.3f}"
    except shardopt.errors.AlgorithmError:
        return "–"


def peak_of(call: Callable[[], Any]) -> int:
    """The most bytes that torch has allocated at once within a call, beside what was there."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    held = most = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        held += change
        most = max(most, held)
    return most


def measure_peaks(stored: str) -> tuple[float, float, float]:
    """Bytes a parameter: state after a step; allocated at most by a step, and by a load into state that is there."""
    dtype, options = STORED[stored]
    named = parameters(dtype)
    optimizer = optimizer_of("AdamW", options, named)
    optimizer.step()
    count = sum(parameter.numel() for parameter in named.values())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(f"{folder}/saved", {"optimizer": optimizer})
        step = peak_of(optimizer.step)
        load = peak_of(lambda: checkpoint.load(f"{folder}/saved", {"optimizer": optimizer}))
    return bytes_of_state(optimizer) / count, step / count, load / count


def measure_rank(stored: str, dim: int, bytes_of_table: float, layers: int) -> list[float]:
    """Of this rank, over what the table says: parameters, gradients and state; with a step's peak; with a load's."""
    dtype, options = STORED[stored]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named: dict[str, Tensor] = {
        name: torch.nn.Parameter(distribute_tensor(full.detach(), mesh, [Shard(dim)]))
        for name, full in parameters(dtype, True, layers).items()
    }
    optimizer = optimizer_of("AdamW", options, named)
    optimizer.step()
    here = [local for parameter in named.values() for local in local_tensors(parameter)]
    held = sum(2 * local.nbytes for local in here) + bytes_of_state(optimizer)
    wanted = sum(local.numel() for local in here) * (2 * dtype.itemsize + bytes_of_table)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        checkpoint.save(f"{folder[0]}/saved", {"optimizer": optimizer})
        step = peak_of(optimizer.step)
        load = peak_of(lambda: checkpoint.load(f"{folder[0]}/saved", {"optimizer": optimizer}))
        dist.barrier()
    ratios = torch.tensor([held, held + step, held + load], dtype=torch.float64) / wanted
    dist.all_reduce(ratios, dist.ReduceOp.MAX)
    return [float(ratio) for ratio in ratios]


def measure_ranks(bytes_of_table: dict[str, float]) -> dict[str, list[float]]:
    """By way to store, and dimension that parameters are cut along: `measure_rank`, the greater of all ranks."""
    return {
        f"{stored}, cut along {what}, {layers} layer{'s' * (layers > 1)}": measure_rank(
            stored, dim, bytes_of_table[stored], layers
        )
        for stored in STORED
        for layers in LAYERS_OF_RANKS
        for dim, what in ((0, "rows"), (1, "columns"))
    }


def measure_times(rounds: int) -> dict[str, float]:
    """CPU nanoseconds of an AdamW step for each element, medians."""
    optimizers = {}
    for name, (dtype, options) in PEERS.items():
        named = parameters(dtype)
        optimizers[name] = optimizer_of("AdamW", options, named), sum(each.numel() for each in named.values())
    taken: dict[str, list[float]] = {name: [] for name in PEERS}
    for turn in range(rounds + 1):
        for name, (optimizer, count) in optimizers.items():
            begin = time.process_time()
            optimizer.step()
            if turn:
                taken[name].append((time.process_time() - begin) / count * 1e9)
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks-only", action="store_true", help="only what each of two ranks has at most")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_one = {stored: measure_bytes("AdamW", stored) for stored in STORED}
    of_ranks = on_ranks(RANKS, measure_ranks, on_one)
    rows = [[name, *(f"{ratio:.3f}" for ratio in ratios)] for name, ratios in of_ranks.items()]
    notes = (
        f"AdamW on the matrices of transformer layers of width {WIDTH}, {RANKS} ranks. A cell is the ratio of a rank's "
        "bytes to those that the table of one process gives for its elements, on the rank with more. *Held* counts "
        "parameters, gradients and state. *In a step* adds the most that a step allocates: scratch memory, the same "
        "for any model, and the scales of blocks that ranks share. *In a load* adds the most that a load in place "
        "allocates."
    )
    header = ["stored", "held", "in a step", "in a load"]
    print(write_table("state_memory_ranks", "Memory of a rank against the table", header, rows, notes))
    if arguments.ranks_only:
        return
    rows = [[algorithm, *(bytes_or_none(algorithm, stored) for stored in STORED)] for algorithm in ALGORITHMS]
    title = "Bytes of optimizer state a parameter"
    notes = (
        f"Matrices of a transformer layer of width {WIDTH}; parameters in fp32 or bf16 as the column says "
        "(masters are part of the state). "
    )
    print(write_table("state_memory", title, ["algorithm", *STORED], rows, notes))
    peaks = {name: measure_peaks(name) for name in STORED}
    rows = [[name, *(f"{value:.3f}" for value in peaks[name])] for name in STORED]
    title = "Memory of AdamW, bytes a parameter"
    notes = "Step and load: the most that their tensors take beside the state. The load is in place. With biases."
    print(write_table("state_memory_peaks", title, ["stored", "state", "step", "load"], rows, notes))
    times = measure_times(rounds)
    base = times["fp32, fused"]
    rows = [[name, f"{value:.1f}", f"{value / base:.1f}"] for name, value in times.items()]
    title = "CPU time of an AdamW step"
    header = ["stored", "ns an element", "over fused"]
    print(write_table("state_memory_times", title, header, rows, f"One thread, median of {rounds}. "))


if __name__ == "__main__":
    main()
