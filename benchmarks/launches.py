"""Launches and host waits of a step on an accelerator, of each algorithm: for each parameter, and fixed ones.

    python -m benchmarks.launches [--device standin]

Steps on 4 and on 12 matrices of 16 × 256 in fp32, on one rank; the third step of each is counted. What the larger
number adds is divided among its parameters, and the rest is fixed. The tests' stand-in counts as CUDA launches: an
operation on a list of tensors is one launch where CUDA's fast path takes it, else one for each. `--device cuda` counts
with torch's profiler.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import shardopt
from benchmarks.device import STANDIN, apart, counted, lacking, module_of
from benchmarks.peers import write_table

COUNTS = (4, 12)
SHAPE = (16, 256)
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("adamw", {}),
    "AdamW, for-loop": ("adamw", {"foreach": False}),
    "AdamW, bf16 state": ("adamw", {"state_dtype": "bfloat16"}),
    "AdamW, 8-bit state": ("adamw", {"state_dtype": "uint8"}),
    "SGD, momentum": ("sgd", {"momentum": 0.9}),
    **{
        name: (name, {})
        for name in (
            *("Adam", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
            *("Lion", "AdEMAMix", "ScheduleFreeSGD", "ScheduleFreeAdamW", "Adafactor", "LAMB", "LARS"),
            *("Muon", "SOAP", "Shampoo", "RowWiseAdagrad", "RowWiseAdam"),
        )
    },
}


def step_of(kind: str, name: str, count: int) -> tuple[int, int]:
    """Waits and launches of the third step on so many parameters."""
    algorithm, options = PEERS[name]
    parameters = {f"w{i}": torch.nn.Parameter(torch.randn(SHAPE).to(kind)) for i in range(count)}
    optimizer = shardopt.keyed(algorithm, parameters, **options)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.randn(SHAPE).to(kind)
        optimizer.step()
    return counted(kind, optimizer.step)


def measure(kind: str, names: list[str], counts: tuple[int, int]) -> list[list[str]]:
    """A row for each algorithm."""
    module_of(kind)
    rows = []
    for name in names:
        (_, few), (waits, many) = (step_of(kind, name, count) for count in counts)
        each = (many - few) / (counts[1] - counts[0])
        rows.append([name, f"{waits}", f"{each:.1f}", f"{few - counts[0] * each:.0f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=(STANDIN, "cuda"), default=STANDIN)
    kind = parser.parse_args().device
    if lacking(kind):
        raise SystemExit(lacking(kind))
    rows = apart(measure, kind, list(PEERS), COUNTS)
    notes = " ".join((__doc__ or "").split("\n\n")[2].split())
    header = ["algorithm", "host waits a step", "launches for each parameter", "fixed launches of a step"]
    print(write_table("launches", f"Launches of a step on {kind}", header, rows, notes))


if __name__ == "__main__":
    main()
