"""Saves of a table of which some rows were touched: bytes and time, beside other saves of the same state.

python -m benchmarks.touched_rows [--rows 1000000] [--repetitions 3] [--folder /tmp]

Each share of rows is touched by a sparse step under row-wise Adagrad and under SparseAdam. Kinds of saves take turns.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import shardopt
from benchmarks.peers import write_table
from shardopt import checkpoint
from shardopt.checkpoint.saving import save as saving
from shardopt.checkpoint.saving.writing.row_prints import RowPrints

COLUMNS = 64
SHARES = (0.001, 0.01, 0.05, 0.2)
ALGORITHMS = ("RowWiseAdagrad", "SparseAdam")


class Chain:
    """Saves one after the other, each on the previous one, of which two are kept."""

    def __init__(self, folder: Path, app: dict[str, Any], knows_rows: bool) -> None:
        self._folder, self._app, self._number = folder, app, 0
        self._prints = RowPrints() if knows_rows else None

    def save(self) -> None:
        self._number += 1
        base = self._folder / str(self._number - 1) if self._number > 1 else None
        with mock.patch.object(saving, "_prints", self._prints):
            checkpoint.save(self._folder / str(self._number), self._app, base=base, durable=False)

    @property
    def last(self) -> Path:
        return self._folder / str(self._number)


def measure(algorithm: str, share: float, rows: int, repetitions: int, folder: Path) -> list[list[str]]:
    """Rows of the table, one for each kind of save."""
    torch.manual_seed(0)
    table = nn.Embedding(rows, COLUMNS, sparse=True)
    optimizer = shardopt.keyed(algorithm, table.named_parameters(), lr=0.1)
    app = {"table": table, "optimizer": optimizer}
    like_table = 2 if algorithm == "SparseAdam" else 0
    row_bytes = 4 * (COLUMNS * (1 + like_table) + (0 if like_table else 1))
    touched = max(int(rows * share), 1)

    def step() -> None:
        ids = torch.randperm(rows)[:touched]
        (table(ids) * torch.randn(touched, COLUMNS)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    known, whole = (Chain(folder / name, app, name == "known") for name in ("known", "whole"))
    full, peer = folder / "full", folder / "dcp"

    def save_full() -> None:
        checkpoint.save(full, app, durable=False)

    def save_dcp() -> None:
        dcp_save({"table": table.state_dict(), "optimizer": dict(optimizer.state_dict())}, checkpoint_id=peer)

    kinds: dict[str, tuple[Callable[[], None], Callable[[], Path]]] = {
        "rows are known": (known.save, lambda: known.last),
        "bytes are compared": (whole.save, lambda: whole.last),
        "full": (save_full, lambda: full),
        "DCP, full": (save_dcp, lambda: peer),
    }
    for chain in (known, whole):
        for _ in range(2):  # the second begins with the prints of rows
            chain.save()
            step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    nbytes: dict[str, int] = {}
    step()
    for chain in (known, whole):
        chain.save()
    for _ in range(repetitions):
        step()
        for name, (save, place) in kinds.items():
            for each in (full, peer):
                shutil.rmtree(each, ignore_errors=True)
            begin = time.perf_counter(), time.process_time()
            save()
            times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            nbytes[name] = sum(file.stat().st_size for file in place().iterdir())
    result = []
    for name, measured in times.items():
        seconds, of_processor = (statistics.median(column) for column in zip(*measured, strict=True))
        result.append(
            [
                algorithm,
                f"{100 * share:g}%",
                name,
                f"{nbytes[name] / 1e6:.2f}",
                f"{nbytes[name] / (touched * row_bytes):.2f}",
                f"{seconds:.2f}",
                f"{of_processor:.2f}",
            ]
        )
    return result


HEADER = ("state of", "rows touched", "save", "MB", "bytes, of those touched", "seconds", "processor seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    given = parser.parse_args()
    rows: list[list[str]] = []
    for algorithm in ALGORITHMS:
        for share in SHARES:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                rows += measure(algorithm, share, given.rows, given.repetitions, Path(folder))
            for row in rows[-4:]:
                print("| " + " | ".join(row) + " |", flush=True)
    notes = (
        f"A table of {given.rows:,} × {COLUMNS} in fp32 and its state, one process, no fsync. Touched rows are random. "
        f"Medians of {given.repetitions}. The base lies in the page cache, which favours comparing its bytes."
    )
    print(write_table("touched_rows", "Saves of touched rows", HEADER, rows, notes))


if __name__ == "__main__":
    main()
