"""Published tables in fewer bits: bytes of a step in which some rows were touched, and what the call takes.

python -m benchmarks.published_rows [--rows 400000] [--repetitions 5] [--folder /tmp]

Publishers in each form take turns with the same table. The touched rows are random, and all of their numbers change.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import write_table
from shardopt import checkpoint

COLUMNS, SHARE = 64, 0.01
CHANGES = {"a hundredth": 0.01, "about themselves": 1.0}
FORMS: dict[str, Any] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "int8_rows": {"": "int8_rows"}}


def measure(change: float, rows: int, repetitions: int, folder: Path) -> dict[str, list[float]]:
    """Returns of each form: MB of the first step; medians of MB, seconds and processor seconds of the others."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(rows, COLUMNS, generator=generator)
    publishers = {name: checkpoint.Publisher(folder / name, dtype=form, durable=False) for name, form in FORMS.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FORMS}
    for step in range(1, repetitions + 3):
        for name, publisher in publishers.items():
            begin, of_processor = time.perf_counter(), time.process_time()
            pending = publisher.publish(step, {"table": table})
            seconds = time.perf_counter() - begin
            megabytes = pending.result().bytes_total / 1e6
            found[name].append((megabytes, seconds, time.process_time() - of_processor))
        touched = torch.randperm(rows, generator=generator)[: int(rows * SHARE)]
        table[touched] += change * torch.randn(len(touched), COLUMNS, generator=generator)
    for publisher in publishers.values():
        publisher.close()
    # The first two steps of a publisher allocate its host memory.
    return {name: [each[0][0], *map(statistics.median, zip(*each[2:], strict=True))] for name, each in found.items()}


HEADER = (
    "published as",
    "numbers of touched rows change by",
    "MB, all weights",
    "MB, a step",
    "bytes of a touched row",
    "seconds in the call",
    "processor seconds of the step",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    given = parser.parse_args()
    lines = []
    for said, change in CHANGES.items():
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            for name, (whole, step, seconds, of_processor) in measure(
                change, given.rows, given.repetitions, Path(folder)
            ).items():
                of_row = step * 1e6 / max(int(given.rows * SHARE), 1)
                numbers = (f"{whole:.1f}", f"{step:.2f}", f"{of_row:.0f}", f"{seconds:.3f}", f"{of_processor:.3f}")
                lines.append([name, said, *numbers])
    notes = (
        f"A table of {given.rows:,} × {COLUMNS}; {SHARE:.0%} of its rows were touched since the step before. One "
        f"process, no fsync. Medians of {given.repetitions}. Other programs ran on the machine."
    )
    print(write_table("published_rows", "Tables published in fewer bits", HEADER, lines, notes))


if __name__ == "__main__":
    main()
