"""Bytes of state against the time of a step, of each algorithm and option, and what ranks exchange in one.

    python -m benchmarks.frontier [--repetitions 3] [--rounds 3] [--steps 10] [--no-plot]

The matrices and vectors of a transformer block of width 512, in fp32 (bf16 where there is a master), on one rank and
one thread. A measurement is ten steps, in the thread's processor time: SOAP and Shampoo do some work every ten steps.
A second AdamW shows how far two equal optimizers differ. The last two columns are for two ranks, with all parameters
cut along rows or along their last dimension: calls of collectives and bytes sent, for one rank and step, the mean of
ten.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from matplotlib import pyplot
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from benchmarks.peers import RESULTS, in_turns, on_ranks, repeating, write_table
from shardopt.sharding.view import local_tensors

matplotlib.use("Agg")  # draws into a file and needs no display

WIDTH, RANKS = 512, 2
LABEL_PIXELS = (150, 12)  # of width and height
FP32, BF16 = torch.float32, torch.bfloat16
CODES: dict[str, Any] = {"state_dtype": torch.uint8}
FUSED, FOREACH, AGAIN = "AdamW, fused", "AdamW, foreach", "AdamW, fused, again"
PEERS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    FUSED: ("adamw", FP32, {"fused": True}),
    AGAIN: ("adamw", FP32, {"fused": True}),
    FOREACH: ("adamw", FP32, {"foreach": True}),
    "AdamW, bf16 state": ("adamw", FP32, {"state_dtype": BF16}),
    "AdamW, 8 bits": ("adamw", FP32, CODES),
    "AdamW, 8 bits, stochastic": ("adamw", BF16, {**CODES, "rounding": "stochastic"}),
    "AdamW, master": ("adamw", BF16, {"master_dtype": FP32}),
    "AdamW, 8 bits, master": ("adamw", BF16, {**CODES, "master_dtype": FP32}),
    "SGD, momentum": ("sgd", FP32, {"momentum": 0.9}),
    "SGD, momentum, 8 bits": ("sgd", FP32, {"momentum": 0.9, **CODES}),
    "Lion": ("lion", FP32, {}),
    "Lion, 8 bits": ("lion", FP32, CODES),
    "AdEMAMix": ("ademamix", FP32, {}),
    "AdEMAMix, 8 bits": ("ademamix", FP32, CODES),
    "ScheduleFreeSGD": ("ScheduleFreeSGD", FP32, {}),
    "ScheduleFreeAdamW": ("ScheduleFreeAdamW", FP32, {}),
    "Adafactor": ("adafactor", FP32, {}),
    "LAMB": ("lamb", FP32, {}),
    "LARS": ("lars", FP32, {}),
    "RowWiseAdam": ("RowWiseAdam", FP32, {}),
    "Muon (matrices)": ("muon", FP32, {"ns_dtype": "float32"}),
    "SOAP, blocks of 128": ("soap", FP32, {"block_size": 128}),
    "Shampoo, blocks of 128": ("shampoo", FP32, {"block_size": 128}),
}


def parameters(name: str, place: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[str, Tensor]:
    """Named parameters with gradients, each placed."""
    shapes: dict[str, tuple[int, ...]] = {each: (WIDTH, WIDTH) for each in ("query", "key", "value", "out")}
    shapes |= {"up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH), "norm": (WIDTH,)}
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}
    for each, shape in shapes.items():
        if len(shape) > 1 or "matrices" not in name:
            dtype = PEERS[name][1]
            made[each] = torch.nn.Parameter(place((torch.randn(shape, generator=generator) * 0.02).to(dtype)))
            made[each].grad = place(torch.randn(shape, generator=generator).to(dtype))
    return made


def optimizer_of(name: str, params: dict[str, Tensor]) -> Any:
    algorithm, _, options = PEERS[name]
    optimizer = shardopt.keyed(algorithm, params, lr=1e-5, **options)
    optimizer.step()
    return optimizer


def measure_steps(steps: int, repetitions: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step, and bytes of state a parameter, by peer."""
    runs, nbytes = {}, {}
    for name in PEERS:
        params = parameters(name)
        optimizer = optimizer_of(name, params)

        runs[name] = repeating(optimizer.step, steps)
        state = [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]
        held = sum(local.nbytes for value in state for local in local_tensors(value))
        nbytes[name] = held / sum(param.numel() for param in params.values())
    seconds = in_turns(runs, repetitions, rounds, time.thread_time)
    return {name: each / steps for name, each in seconds.items()}, nbytes


class Counted:
    """Counts the collectives of this rank, and the bytes that it hands to them, while it is entered."""

    NAMES = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")

    def __enter__(self) -> Counted:
        self.calls = self.nbytes = 0
        self._real = {name: getattr(dist, name) for name in self.NAMES}
        for name, real in self._real.items():
            setattr(dist, name, self._counting(real, 1 if name in self.NAMES[1:4] else 0))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)

    def _counting(self, real: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            self.nbytes += args[place].nbytes  # what is sent
            return real(*args, **options)

        return call


def _cut(mesh: DeviceMesh, dim: int, full: Tensor) -> Tensor:
    return distribute_tensor(full, mesh, [Shard(dim % full.ndim)])


def measure_exchange(steps: int) -> dict[str, tuple[tuple[float, float], ...]]:
    """By peer: collectives and bytes of a step on this rank, with parameters cut along rows, and along the last."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {}
    for name in PEERS:
        pairs = []
        for dim in (0, -1):
            params = parameters(name, partial(_cut, mesh, dim))
            optimizer = optimizer_of(name, params)
            with Counted() as counted:
                for _ in range(steps):
                    optimizer.step()
            pairs.append((counted.calls / steps, counted.nbytes / steps))
        found[name] = tuple(pairs)
    return found


def plot(seconds: dict[str, float], nbytes: dict[str, float]) -> None:
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained", dpi=110)
    shown = [name for name in PEERS if name != AGAIN]
    colors = [
        "tab:blue" if "8 bits" in name else "tab:orange" if name in (FUSED, FOREACH) else "black" for name in shown
    ]
    axes.scatter([nbytes[name] for name in shown], [1e3 * seconds[name] for name in shown], c=colors, s=18)
    axes.set(yscale="log", xlabel="bytes of state a parameter", ylabel="milliseconds a step, one thread")
    axes.set_xlim(0, 1.2 * max(nbytes.values()))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("State against time: a transformer block of width 512 on the CPU", loc="left")
    figure.draw_without_rendering()  # so that it is known where points come to lie
    lines: list[tuple[float, float]] = []  # of labels so far, in pixels: each goes above those that are in its way
    for name, color in sorted(zip(shown, colors, strict=True), key=lambda each: seconds[each[0]]):
        x, y = axes.transData.transform((nbytes[name], 1e3 * seconds[name]))
        line = y
        for x_other, other in lines:
            if abs(x - x_other) < LABEL_PIXELS[0] and line < other + LABEL_PIXELS[1]:
                line = other + LABEL_PIXELS[1]
        lines.append((x, line))
        at = (nbytes[name], 1e3 * seconds[name])
        axes.annotate(name, at, (6, line - y - 2), textcoords="offset pixels", fontsize=7, color=color)
    figure.savefig(RESULTS / "frontier.png")
    pyplot.close(figure)


def main() -> None:
    """Measures, prints the table, and writes it and the plot to `results/`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-plot", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    exchange = on_ranks(RANKS, measure_exchange, arguments.steps)
    seconds, nbytes = measure_steps(arguments.steps, arguments.repetitions, arguments.rounds)
    rows = [
        [
            name,
            f"{nbytes[name]:.2f}",
            f"{1e3 * took:.2f}",
            f"{took / seconds[FUSED]:.2f}",
            f"{took / seconds[FOREACH]:.2f}",
            *(f"{calls:.1f}, {sent / 1024:.1f} KiB" for calls, sent in exchange[name]),
        ]
        for name, took in seconds.items()
    ]
    header = ["algorithm", "bytes of state a parameter", "ms a step", "/ AdamW fused", "/ AdamW foreach"]
    header += ["collectives, sent: cut along rows", "cut along the last dimension"]
    notes = " ".join((__doc__ or "").split("\n\n")[2].split())
    notes += f" Medians of {arguments.rounds} rounds of {arguments.repetitions}."
    notes += "\n\n![Bytes of state against time](frontier.png)"
    print(write_table("frontier", "Bytes of state against the time of a step", header, rows, notes))
    if not arguments.no_plot:
        plot(seconds, nbytes)


if __name__ == "__main__":
    main()
