"""An optimizer step on sharded parameters: ours, torch's on the same DTensors, and torch's on plain tensors.

    python -m benchmarks.step [--ranks 1] [--rounds 6] [--repetitions 20] [--only AdamW ...] [--no-plot]

400 parameters of 4,096 fp32 elements on each rank, and 20 of 4,194,304; one thread a rank. Peers take turns on the same
memory (parameters, gradients and state), since where it lies makes more of a difference than what is measured; a second
plain optimizer shows how far two equal ones come out apart. Then one step's time over the number of parameters, drawn.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from matplotlib import pyplot
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import shardopt
from benchmarks.peers import RESULTS, in_turns, on_ranks, write_table

matplotlib.use("Agg")  # draws into a file and needs no display

SIZES = {"400 × 4k": (400, 4096), "20 × 4M": (20, 4 * 2**20)}
OPTIONS: dict[str, dict[str, Any]] = {"AdamW": {}, "SGD": {"momentum": 0.9}, "Adagrad": {}, "RMSprop": {}}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}
WITHOUT_FUSED = ("RMSprop",)
PLAIN, AGAIN, THEIRS, OURS, OURS_PLAIN = "torch plain", "again", "torch DTensor", "ours DTensor", "ours plain"
STEPS_A_TURN = 20  # of small parameters; after the first, a peer finds in the caches what it left there
COUNTS = (25, 50, 100, 200, 400, 800, 1600)
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a8a8a"


def parameters(count: int, elements: int, mesh: DeviceMesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Plain parameters with gradients, and DTensors around the same memory, whose local tensors they are."""
    plain: dict[str, Tensor] = {}
    sharded: dict[str, Tensor] = {}
    for i in range(count):
        local, gradient = torch.randn(elements), torch.randn(elements)
        plain[f"w{i}"] = torch.nn.Parameter(local)
        plain[f"w{i}"].grad = gradient
        sharded[f"w{i}"] = torch.nn.Parameter(dtensor(local, mesh))
        sharded[f"w{i}"].grad = dtensor(gradient, mesh)
    return plain, sharded


def dtensor(local: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def optimizers(algorithm: str, how: str, count: int, elements: int, mesh: DeviceMesh) -> dict[str, Optimizer | None]:
    """The peers after a first step, all on one memory; None for one that fails."""
    plain, sharded = parameters(count, elements, mesh)
    options = {"lr": 1e-3, **OPTIONS[algorithm], **IMPLEMENTATIONS[how]}
    make = getattr(torch.optim, algorithm)
    peers: dict[str, Optimizer | None] = {
        PLAIN: make(plain.values(), **options),
        AGAIN: make(plain.values(), **options),
        THEIRS: make(sharded.values(), **options),
        OURS: shardopt.keyed(algorithm, sharded, **options),
        OURS_PLAIN: shardopt.keyed(algorithm, plain, **options),
    }
    for name, optimizer in peers.items():
        assert optimizer is not None
        try:
            optimizer.step()
        except (RuntimeError, TypeError):
            peers[name] = None
            continue
        for key, parameter in (sharded if "DTensor" in name else plain).items():
            share(optimizer, parameter, peers[PLAIN], plain[key], mesh)
    return peers


def share(optimizer: Optimizer, parameter: Tensor, first: Optimizer | None, plain: Tensor, mesh: DeviceMesh) -> None:
    """Makes the state of a parameter use the memory of the first peer's; counters stay apart."""
    assert first is not None
    for name, value in first.state[plain].items():
        if isinstance(value, Tensor) and value.ndim:
            whole = dtensor(value, mesh) if isinstance(parameter, DTensor) else value
            if isinstance(whole, DTensor):
                # As if a step had made it: of a tensor from outside torch makes a view, which it changes more slowly.
                whole._local_tensor = value
            optimizer.state[parameter][name] = whole


def measure(
    algorithm: str, how: str, size: tuple[int, int], rounds: int, repetitions: int, only: tuple[str, ...] = ()
) -> dict[str, float]:
    """Median seconds of a step of each peer that can step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    peers = optimizers(algorithm, how, *size, mesh)
    times = STEPS_A_TURN if size[0] > 20 else 1
    steps = {
        name: stepping(made, times) for name, made in peers.items() if made is not None and (not only or name in only)
    }
    gc.collect()
    gc.freeze()  # what is there now is not looked through again
    seconds = in_turns(steps, repetitions, rounds, time.thread_time)
    return {name: each / times for name, each in seconds.items()}


def stepping(optimizer: Optimizer, times: int) -> Callable[[int], Any]:
    def step(_: int) -> None:
        for _ in range(times):
            optimizer.step()

    return step


def table(arguments: argparse.Namespace) -> list[list[str]]:
    rows = []
    for label, size in SIZES.items():
        repetitions = arguments.repetitions if size[0] > 100 else max(2, arguments.repetitions // 7)
        for algorithm in arguments.only:
            for how in IMPLEMENTATIONS:
                if how == "fused" and algorithm in WITHOUT_FUSED:
                    continue
                seconds = on_ranks(arguments.ranks, measure, algorithm, how, size, arguments.rounds, repetitions)
                rows.append(row(label, algorithm, how, seconds))
                print(*rows[-1], sep=" | ", flush=True)
    return rows


def row(label: str, algorithm: str, how: str, seconds: dict[str, float]) -> list[str]:
    torchs = seconds.get(THEIRS)
    return [
        label,
        algorithm,
        how,
        f"{seconds[PLAIN] * 1e3:.2f}",
        f"{seconds[AGAIN] / seconds[PLAIN]:.2f}",
        "fails" if torchs is None else f"{torchs * 1e3:.2f}",
        f"{seconds[OURS] * 1e3:.2f}",
        f"{seconds[OURS_PLAIN] * 1e3:.2f}",
        f"{seconds[OURS] / seconds[PLAIN]:.2f}",
        f"{seconds[OURS_PLAIN] / seconds[PLAIN]:.2f}",
        "" if torchs is None else f"{torchs / seconds[OURS]:.1f}",
    ]


def plot(arguments: argparse.Namespace) -> None:
    """AdamW as each of the three makes it without being asked for an implementation, and torch's fused one."""
    lines: dict[str, list[float]] = {name: [] for name in (THEIRS, PLAIN, OURS, "torch plain, fused")}
    for count in COUNTS:
        size = (count, SIZES["400 × 4k"][1])
        seconds = on_ranks(
            arguments.ranks,
            measure,
            "AdamW",
            "default",
            size,
            arguments.rounds,
            arguments.repetitions,
            (PLAIN, THEIRS, OURS),
        )
        fused = on_ranks(
            arguments.ranks, measure, "AdamW", "fused", size, arguments.rounds, arguments.repetitions, (PLAIN,)
        )
        for name in (THEIRS, PLAIN, OURS):
            lines[name].append(seconds[name])
        lines["torch plain, fused"].append(fused[PLAIN])
        print(count, {name: f"{values[-1] * 1e3:.2f} ms" for name, values in lines.items()}, flush=True)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained", dpi=110)
    styles = {
        THEIRS: (ORANGE, "-", "torch, DTensor"),
        PLAIN: (GREY, "-", "torch, plain tensors"),
        OURS: (BLUE, "-", "shardopt, DTensor"),
        "torch plain, fused": (GREY, "--", "torch, plain tensors, fused=True"),
    }
    for name, seconds in lines.items():
        color, style, label = styles[name]
        axes.plot(COUNTS, [each * 1e3 for each in seconds], style, color=color, marker="o", markersize=4, lw=2)
        axes.annotate(
            label, (COUNTS[-1], seconds[-1] * 1e3), (8, 0), textcoords="offset points", color=color, va="center"
        )
    axes.set(xscale="log", yscale="log", xlabel="parameters of 4,096 elements", ylabel="milliseconds")
    axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axes.minorticks_off()
    axes.set_xlim(COUNTS[0] * 0.9, COUNTS[-1] * 5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("One AdamW step on the CPU, with the implementation that each takes by itself", loc="left")
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "step.png")
    pyplot.close(figure)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--no-plot", action="store_true")
    arguments = parser.parse_args()
    header = [
        "elements on each rank",
        "algorithm",
        "implementation",
        "torch plain, ms",
        "again",
        "torch DTensor, ms",
        "ours DTensor, ms",
        "ours plain, ms",
        "ours DTensor / torch plain",
        "ours plain / torch plain",
        "torch DTensor / ours",
    ]
    mesh = f"a gloo mesh of {arguments.ranks} rank{'s'[: arguments.ranks > 1]}"
    notes = (
        f"Medians of interleaved steps, {arguments.rounds} rounds of {arguments.repetitions} (large: a seventh), on "
        f"{mesh}; fp32, SGD with momentum. Times are processor time of the one thread that steps, as the machine was "
        "shared. “default” names neither foreach nor fused: torch then takes its for-loop on the CPU. “again” is the "
        "ratio of two equal optimizers."
    )
    print(write_table("step", "An optimizer step on sharded parameters", header, table(arguments), notes))
    if not arguments.no_plot:
        plot(arguments)


if __name__ == "__main__":
    main()
