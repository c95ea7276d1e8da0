"""The peak memory of training steps with an optimizer in backward, and with one that steps after it.

    python -m benchmarks.in_backward [--repetitions 15]

Four blocks of two fp32 matrices of 3,072 × 3,072: 288 MiB of gradients, of which the largest layer (a block) has 72.
Each kind runs in processes of its own, one with hooks that count the bytes of gradients that are alive at once, and one
whose peak resident memory is what the system says. Both have their state before the first step. Then both take turns
in one process, on many small layers, which cost the most, and on a few large ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import shardopt
from benchmarks.convert import resident_bytes
from benchmarks.peers import RESULTS, interleaved, write_table
from shardopt import KeyedOptimizer

BLOCKS, MATRICES, WIDTH = 4, 2, 3072
LAYER_BYTES = MATRICES * 4 * WIDTH**2
GRADIENT_BYTES = BLOCKS * LAYER_BYTES
KINDS = ("after backward", "in backward")
TIMED = ((100, 64), (8, 1024))  # layers, and their width


def count(net: nn.Module) -> Callable[[], int]:
    """From now on counts bytes of gradients; gives the most that were alive at once, those just computed with them."""
    alive: dict[str, int] = {}
    most = [0]

    def computed(name: str, gradient: Tensor) -> None:
        alive[name] = gradient.nbytes
        most[0] = max(most[0], sum(alive.values()))

    def complete(name: str, parameter: Tensor) -> None:
        if parameter.grad is None:
            del alive[name]

    for name, parameter in net.named_parameters():
        parameter.register_hook(partial(computed, name))  # type: ignore[no-untyped-call]  # torch's
        parameter.register_post_accumulate_grad_hook(partial(complete, name))  # type: ignore[no-untyped-call]  # torch's
    return lambda: most[0]


def training(kind: str, algorithm: str, net: nn.Module, batch: Tensor) -> Callable[[int], None]:
    """A step of training."""
    if kind == "in backward":
        optimizer: KeyedOptimizer = shardopt.in_backward(net, algorithm, lr=1e-3)
    else:
        optimizer = shardopt.keyed(algorithm, net.named_parameters(), lr=1e-3)
    optimizer.init_state()

    def step(number: int) -> None:
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(kind: str, algorithm: str, counts: bool) -> dict[str, int]:
    torch.set_num_threads(1)
    blocks = [[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)] for _ in range(BLOCKS)]
    net = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
    step = training(kind, algorithm, net, torch.ones(1, WIDTH))
    live = count(net) if counts else lambda: 0
    for number in range(2):
        step(number)
    # getrusage would count what its parent had as it forked.
    return {"peak_bytes": resident_bytes("VmHWM"), "live_bytes": live()}


def in_a_child(*args: str) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.in_backward", "--child", *args]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=RESULTS.parents[1])
    numbers: dict[str, int] = json.loads(run.stdout)
    return numbers


def time_ratio(algorithm: str, layers: int, width: int, repetitions: int) -> str:
    """Seconds of a step in backward over those of one after it, forward and backward included."""
    torch.set_num_threads(1)
    batch = torch.ones(8, width)
    nets = [nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))) for _ in KINDS]
    peers = {kind: training(kind, algorithm, net, batch) for kind, net in zip(KINDS, nets, strict=True)}
    seconds = interleaved(peers, repetitions, warm_up=3)
    return f"{seconds['in backward'] / seconds['after backward']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--child", nargs=3, metavar=("KIND", "ALGORITHM", "COUNTS"))
    args = parser.parse_args()
    if args.child:
        kind, algorithm, counts = args.child
        print(json.dumps(measure(kind, algorithm, counts == "True")))
        return
    rows = []
    for algorithm in ("sgd", "adamw"):
        live = {kind: in_a_child(kind, algorithm, "True")["live_bytes"] for kind in KINDS}
        peak = {kind: in_a_child(kind, algorithm, "False")["peak_bytes"] for kind in KINDS}
        for kind in KINDS:
            row = (live[kind], peak[kind], peak[KINDS[0]] - peak[kind])
            rows.append([algorithm, kind, *(f"{nbytes / 2**20:.1f}" for nbytes in row)])
    title = "Memory of training with the optimizer in backward"
    small, large = (time_ratio("adamw", *size, args.repetitions) for size in TIMED)
    notes = (
        f"Steps on {GRADIENT_BYTES >> 20} MiB of gradients, the largest layer has {LAYER_BYTES >> 20} MiB: what "
        f"must be saved is {(GRADIENT_BYTES - LAYER_BYTES) >> 20} MiB. One process, one thread, batch 1.\n\n"
        f"Forward, backward and AdamW in backward take {small} times as long as with the step after backward on 100 "
        f"layers of 64 × 64, and {large} times on 8 layers of 1,024 × 1,024 (interleaved, batch 8)."
    )
    header = ["algorithm", "steps", "gradients alive, MiB", "peak resident, MiB", "saved, MiB"]
    print(write_table("in_backward", title, header, rows, notes))


if __name__ == "__main__":
    main()
