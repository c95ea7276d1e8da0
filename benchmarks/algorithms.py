"""Algorithms side by side: bytes of state for each parameter, and the time of a step against AdamW's.

    python -m benchmarks.algorithms [--repetitions 3] [--rounds 3] [--steps 10]

The matrices and vectors of two transformer blocks of width 256, in fp32, on one rank and one thread. A measurement is
ten steps, in the thread's processor time: SOAP and Shampoo do some work every ten steps. A second AdamW shows how far
two equal optimizers differ.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

import shardopt
from benchmarks.peers import in_turns, repeating, write_table
from shardopt.sharding.view import local_tensors

WIDTH, BLOCKS = 256, 2
FUSED, FOREACH, AGAIN = "AdamW, fused", "AdamW, foreach", "AdamW, fused, again"
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    FUSED: ("adamw", {"fused": True}),
    AGAIN: ("adamw", {"fused": True}),
    FOREACH: ("adamw", {"foreach": True}),
    "Lion": ("lion", {}),
    "ScheduleFreeSGD": ("ScheduleFreeSGD", {}),
    "ScheduleFreeAdamW": ("ScheduleFreeAdamW", {}),
    "AdEMAMix": ("AdEMAMix", {}),
    "Muon (matrices)": ("muon", {"ns_dtype": "float32"}),
    "SOAP": ("soap", {}),
    "SOAP, blocks of 128": ("soap", {"block_size": 128}),
    "Shampoo, blocks of 128": ("shampoo", {"block_size": 128}),
    "Shampoo, blocks of 256": ("shampoo", {"block_size": 256}),
}


def parameters(matrices_only: bool) -> dict[str, Tensor]:
    """Named parameters with gradients."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(BLOCKS):
        for name in ("query", "key", "value", "out"):
            shapes[f"blocks.{block}.{name}"] = (WIDTH, WIDTH)
        shapes[f"blocks.{block}.up"] = (4 * WIDTH, WIDTH)
        shapes[f"blocks.{block}.down"] = (WIDTH, 4 * WIDTH)
        shapes[f"blocks.{block}.norm"] = (WIDTH,)
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if len(shape) > 1 or not matrices_only:
            made[name] = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
            made[name].grad = torch.randn(shape, generator=generator)
    return made


def main() -> None:
    """Measures, prints the table and writes it to `results/`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs, nbytes = {}, {}
    for name, (algorithm, options) in PEERS.items():
        params = parameters("matrices" in name)
        optimizer = shardopt.keyed(algorithm, params, lr=1e-5, **options)

        optimizer.step()
        runs[name] = repeating(optimizer.step, arguments.steps)
        state = [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]
        held = sum(local.nbytes for value in state for local in local_tensors(value))
        nbytes[name] = held / sum(param.numel() for param in params.values())
    seconds = in_turns(runs, arguments.repetitions, arguments.rounds, time.thread_time)
    rows = [
        [
            name,
            f"{nbytes[name]:.2f}",
            f"{1e3 * took / arguments.steps:.2f}",
            f"{took / seconds[FUSED]:.2f}",
            f"{took / seconds[FOREACH]:.2f}",
        ]
        for name, took in seconds.items()
    ]
    header = ["algorithm", "bytes of state a parameter", "ms a step", "/ AdamW fused", "/ AdamW foreach"]
    print(
        write_table(
            "algorithms", "Algorithms side by side", header, rows, " ".join((__doc__ or "").split("\n\n")[2].split())
        )
    )


if __name__ == "__main__":
    main()
