"""The overhead of keyed optimizers over torch's own: steps in the same implementation, `state_dict()`, and clipping.

    python -m benchmarks.optimizer_overhead [--repetitions 60] [--rounds 8]

400 parameters of 4,096 fp32 elements, on one thread each rank: plain ones under AdamW, and DTensors over 2 ranks whose
gradients are clipped. All peers step on the same parameters, gradients and state tensors, since where memory lies
makes more of a difference than what is measured; a second bare optimizer shows how far two equal ones come out apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

import shardopt
from benchmarks.peers import calling, in_turns, on_ranks, write_table
from shardopt import GradientClipping, GradientClippingOptimizer, WarmupOptimizer, WarmupPolicy, WarmupStage

PARAMETERS, ELEMENTS, RANKS = 400, 4096, 2
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
BARE, AGAIN, KEYED = "torch.optim.AdamW", "torch.optim.AdamW again", "keyed"
WRAPPED = "warm-up, clipping NONE, keyed"
TORCHS, OURS = "torch.nn.utils.clip_grad_norm_", "GradientClippingOptimizer"
Row = list[str]


def plain_parameters() -> dict[str, Tensor]:
    named: dict[str, Tensor] = {
        f"layers.{i}.weight": torch.nn.Parameter(torch.randn(ELEMENTS)) for i in range(PARAMETERS)
    }
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    return named


def optimizers(options: dict[str, Any]) -> dict[str, Optimizer]:
    """The peers over the same tensors, state too; none saves groups."""
    named = plain_parameters()
    wrapped = GradientClippingOptimizer(shardopt.keyed(AdamW, named, **options))
    peers: dict[str, Optimizer] = {
        BARE: AdamW(named.values(), **options),
        AGAIN: AdamW(named.values(), **options),
        KEYED: shardopt.keyed(AdamW, named, **options),
        WRAPPED: WarmupOptimizer(wrapped, [WarmupStage(WarmupPolicy.LINEAR, max_iters=10**6, value=0.01)], lr=1e-3),
    }
    for name, optimizer in peers.items():
        optimizer.step()
        for parameter in named.values():
            optimizer.state[parameter] = peers[BARE].state[parameter]
        if name in (KEYED, WRAPPED):
            optimizer.save_param_groups(False)  # type: ignore[attr-defined]  # a keyed optimizer
    addresses = [optimizer.state[next(iter(named.values()))]["exp_avg"].data_ptr() for optimizer in peers.values()]
    assert len(set(addresses)) == 1
    return peers


def target(value: float, most: float, unit: str = "") -> str:
    return f"≤ {most:g}{unit}: {'met' if value <= most else 'missed'}"


def steps(repetitions: int, rounds: int) -> list[Row]:
    rows = []
    for implementation, options in IMPLEMENTATIONS.items():
        peers = optimizers(options)
        seconds = in_turns({name: calling(o.step) for name, o in peers.items()}, repetitions, rounds)
        for name, each in seconds.items():
            ratio = each / seconds[BARE]
            met = target(ratio, 1.05) if name in (KEYED, WRAPPED) else ""
            rows.append([f"step, {implementation}", name, f"{each * 1e3:.2f} ms", f"{ratio:.3f}", met])
    return rows


def state_dicts(repetitions: int, rounds: int) -> list[Row]:
    peers = optimizers(IMPLEMENTATIONS["for-loop"])
    seconds = in_turns({name: calling(o.state_dict) for name, o in peers.items()}, repetitions, rounds)
    rows = []
    for name, each in seconds.items():
        microseconds = each / PARAMETERS * 1e6
        met = target(microseconds, 5, " µs") if name in (KEYED, WRAPPED) else ""
        ratio = f"{each / seconds[BARE]:.2f}"
        rows.append(["state_dict without groups", name, f"{microseconds:.2f} µs a parameter", ratio, met])
    return rows


def clipping(limit: float, repetitions: int, rounds: int) -> dict[str, float]:
    """On every rank: the medians of clipping the same DTensor gradients to a norm."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named: dict[str, Tensor] = {}
    for i in range(PARAMETERS):
        weight = torch.nn.Parameter(distribute_tensor(torch.randn(64, ELEMENTS // 64), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.randn(64, ELEMENTS // 64), mesh, [Shard(0)])
        named[f"layers.{i}.weight"] = weight
    ours = GradientClippingOptimizer(shardopt.keyed(AdamW, named), GradientClipping.NORM, max_gradient=limit)
    peers: dict[str, Callable[[int], Any]] = {
        TORCHS: lambda _: torch.nn.utils.clip_grad_norm_(named.values(), limit),
        OURS: lambda _: ours.clip_grad_norm_(),
    }
    return in_turns(peers, repetitions, rounds)


def clipping_rows(repetitions: int, rounds: int) -> list[Row]:
    rows = []
    for where, limit in (("below", 1e9), ("above", 1.0)):
        seconds = on_ranks(RANKS, clipping, limit, repetitions, rounds)
        what = f"norm clipping of DTensors, {RANKS} ranks, norm {where} the limit"
        for name, each in seconds.items():
            ratio = each / seconds[TORCHS]
            met = target(ratio, 0.5) if name == OURS else ""
            rows.append([what, name, f"{each * 1e3:.2f} ms", f"{ratio:.3f}", met])
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--repetitions", type=int, default=60)
    arguments.add_argument("--rounds", type=int, default=8)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    rows = [
        *steps(given.repetitions, given.rounds),
        *state_dicts(given.repetitions, given.rounds),
        *clipping_rows(given.repetitions, given.rounds),
    ]
    notes = (
        f"{PARAMETERS} parameters of {ELEMENTS:,} fp32 elements, one thread a rank. Peers take turns and change "
        f"places; medians of {given.rounds} rounds of {given.repetitions} repetitions."
    )
    header = ["what", "peer", "median", "ratio to torch's", "target"]
    print(write_table("optimizer_overhead", "Keyed optimizers against torch's own", header, rows, notes))


if __name__ == "__main__":
    main()
