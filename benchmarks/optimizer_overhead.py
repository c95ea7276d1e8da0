"""What the keyed optimizers cost over torch's own: steps in the same implementation on both sides, and `state_dict()`.

    python benchmarks/optimizer_overhead.py [--repetitions 60] [--rounds 5]

400 plain parameters of 4,096 fp32 elements under AdamW, on one thread. Each peer has parameters, gradients and state of
its own; a second bare optimizer shows how far two equal ones come out apart.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from peers import interleaved, write_table
from torch import Tensor
from torch.optim import AdamW, Optimizer

import shardopt
from shardopt import WarmupOptimizer, WarmupPolicy, WarmupStage

PARAMETERS, ELEMENTS = 400, 4096
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
STEP_TARGET, STATE_DICT_TARGET_MICROSECONDS = 1.05, 5.0
BARE, AGAIN, KEYED, WARMING = "torch.optim.AdamW", "the same again", "keyed", "warm-up around keyed"


def parameters() -> dict[str, Tensor]:
    named = {f"layers.{i}.weight": torch.nn.Parameter(torch.randn(ELEMENTS)) for i in range(PARAMETERS)}
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    return named


def built(options: dict[str, Any]) -> dict[str, Optimizer]:
    """The peers, with state and warm memory."""
    ramp = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10**6, value=0.01)]
    peers: dict[str, Optimizer] = {
        BARE: AdamW(parameters().values(), lr=1e-3, **options),
        AGAIN: AdamW(parameters().values(), lr=1e-3, **options),
        KEYED: shardopt.keyed(AdamW, parameters(), lr=1e-3, **options),
        WARMING: WarmupOptimizer(shardopt.keyed(AdamW, parameters(), lr=1e-3, **options), ramp, lr=1e-3),
    }
    for optimizer in peers.values():
        for _ in range(3):
            optimizer.step()
        if hasattr(optimizer, "save_param_groups"):
            optimizer.save_param_groups(False)
    return peers


def timed(peers: dict[str, Callable[[int], Any]], repetitions: int, rounds: int) -> dict[str, float]:
    """Medians over rounds of the medians in each round, so that a disturbance of a second decides nothing."""
    medians = [interleaved(peers, repetitions, warm_up=5) for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in medians) for name in peers}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--repetitions", type=int, default=60)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, options in IMPLEMENTATIONS.items():
        optimizers = built(options)
        steps = {peer: lambda _, optimizer=optimizer: optimizer.step() for peer, optimizer in optimizers.items()}
        dicts = {peer: lambda _, optimizer=optimizer: optimizer.state_dict() for peer, optimizer in optimizers.items()}
        seconds = timed(steps, given.repetitions, given.rounds)
        for peer in optimizers:
            ratio = seconds[peer] / seconds[BARE]
            target = (
                f"≤ {STEP_TARGET}: {'met' if ratio <= STEP_TARGET else 'missed'}" if peer in (KEYED, WARMING) else ""
            )
            rows.append([f"step, {name}", peer, f"{seconds[peer] * 1e3:.2f} ms", f"{ratio:.3f}", target])
        if name == "for-loop":  # the same for all implementations
            state_dicts = timed(dicts, given.repetitions, given.rounds)
    for peer, seconds_each in state_dicts.items():
        microseconds = seconds_each / PARAMETERS * 1e6
        met = "met" if microseconds <= STATE_DICT_TARGET_MICROSECONDS else "missed"
        target = f"≤ {STATE_DICT_TARGET_MICROSECONDS:g} µs: {met}" if peer in (KEYED, WARMING) else ""
        ratio = f"{seconds_each / state_dicts[BARE]:.2f}"
        rows.append(["state_dict, no groups", peer, f"{microseconds:.2f} µs a parameter", ratio, target])
    print(
        write_table(
            "optimizer_overhead",
            "Keyed optimizers over torch's own",
            ["what", "peer", "median", "× torch.optim.AdamW", "target"],
            rows,
            f"{PARAMETERS} plain parameters of {ELEMENTS:,} fp32 elements, one thread; peers take turns, medians of "
            f"{given.rounds} rounds of {given.repetitions} repetitions.",
        )
    )


if __name__ == "__main__":
    main()
