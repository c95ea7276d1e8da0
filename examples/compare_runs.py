"""Compare training runs: every step's loss, and the tensors of two checkpoints.

    python examples/compare_runs.py out/uninterrupted out/resumed --tolerance 1e-5

A run is a directory in which a training program has left `loss.jsonl`. A run that was interrupted has written
some steps twice, and each of its lines counts.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardopt import checkpoint


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a run's `loss.jsonl`: the mean loss of a step over the global batch, in nats."""

    step: int
    loss: float
    ranks: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A step of one run beside the same step of the reference run."""

    step: int
    ranks: int
    expected: float
    loss: float

    @property
    def relative(self) -> float:
        return abs(self.loss - self.expected) / abs(self.expected)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All lines of a run beside the reference. `missing`: steps that only one of the two has."""

    differences: tuple[Difference, ...]
    missing: tuple[int, ...]

    @property
    def worst(self) -> float:
        """The largest relative difference; infinite where a loss is not a number, or nothing was compared."""
        relative = [difference.relative for difference in self.differences]
        return max((value if value == value else float("inf") for value in relative), default=float("inf"))

    def holds(self, tolerance: float) -> bool:
        return not self.missing and self.worst <= tolerance


def read_losses(run: Path) -> list[Record]:
    """The run's records as they were written; none before its first step. A line still being written is left out."""
    log = run / "loss.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [Record(**json.loads(line)) for line in lines if line.endswith("\n")]


def compare_losses(reference: Path, run: Path) -> Comparison:
    expected = {record.step: record.loss for record in read_losses(reference)}
    records = read_losses(run)
    return Comparison(
        differences=tuple(
            Difference(record.step, record.ranks, expected[record.step], record.loss)
            for record in records
            if record.step in expected
        ),
        missing=tuple(sorted(expected.keys() ^ {record.step for record in records})),
    )


def differing_keys(first: str, second: str) -> tuple[list[str], int]:
    """The keys whose values are not bit for bit the same in two checkpoints, and how many keys there are in all."""
    with checkpoint.open(first) as left, checkpoint.open(second) as right:
        in_both = set(left.keys()) & set(right.keys())
        in_one = set(left.keys()) ^ set(right.keys())
        changed = {key for key in in_both if not _same(left.read(key), right.read(key))}
        return sorted(in_one | changed), len(in_both | in_one)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        # As bytes: equal numbers may differ in bits (0.0 and -0.0), and equal bits compare unequal (nan).
        return torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
    return type(left) is type(right) and left == right


def table(comparison: Comparison, chosen: Callable[[Difference], bool]) -> str:
    """The chosen lines of a comparison, one per row."""
    rows = [f"{'step':>6} {'ranks':>6} {'uninterrupted':>15} {'interrupted':>15} {'relative':>10}"]
    rows += [
        f"{line.step:6d} {line.ranks:6d} {line.expected:15.9f} {line.loss:15.9f} {line.relative:10.1e}"
        for line in comparison.differences
        if chosen(line)
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="the largest relative difference of a loss")
    arguments = parser.parse_args()
    comparison = compare_losses(arguments.reference, arguments.run)
    holds = comparison.holds(arguments.tolerance)
    print(
        f"{len(comparison.differences)} losses compared, worst relative difference {comparison.worst:.1e}, "
        f"{len(comparison.missing)} missing; {arguments.tolerance:g} is allowed: "
        f"{'holds' if holds else 'DOES NOT HOLD'}."
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
