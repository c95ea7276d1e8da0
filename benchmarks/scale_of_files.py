"""What rank 0 of 16,384 does alone: opens as many files, hears of as many failures, removes as many files. With bounds.

    python -m benchmarks.scale_of_files [opening] [failing] [retention]

`opening`: one rank that reads a tensor of which each of the data files has a row, of 100 tensors in each, on a local
disk. `failing`: every rank has a thousand problems that no other has, and then all have the same. `retention`: a commit
on an object store with 100 checkpoints kept, in requests; and the removal of one with as many files as ranks.

Seconds are of the processor: the machine does other work too.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.many_files import write_checkpoint
from benchmarks.peers import write_table
from shardopt import checkpoint
from shardopt.checkpoint.commit import remove_checkpoint
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.storage.retry import Requests
from shardopt.errors import MismatchError, Problem, ShardoptError
from shardopt.ranks.failures import describe, merge
from shardopt.sharding.box import whole
from shardopt.sharding.pieces import Piece

RANKS, TENSORS, PROBLEMS, KEPT = 16_384, 100, 1000, 100
HEADINGS = ("what", "found", "bound")

Row = tuple[str, str, str]


def measured(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns seconds of the processor, of all threads, and the result."""
    begin = time.process_time()
    result = function()
    return time.process_time() - begin, result


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def opening(ranks: int = RANKS) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/c"
        command = [sys.executable, "-m", "benchmarks.many_files", path, str(ranks), str(TENSORS)]
        subprocess.run(command, check=True)  # elsewhere, for its memory is not to be counted
        before = peak_mib()
        reading, reader = measured(lambda: checkpoint.open(path))
        pieces = [Piece(whole((ranks, 16)), torch.zeros(ranks, 16))]
        key = "layers.0.weight"

        def open_all() -> int:
            reader.open_ahead({key: pieces})
            return len(list(reader.requests(key, pieces)))

        seconds, files = measured(open_all)
        assert files == ranks
        return [
            (f"opening: manifest of {ranks:,} files", f"{reading:.2f} s", "-"),
            (f"opening: {ranks:,} files of {TENSORS} tensors each", f"{seconds:.1f} s", "20 s"),
            ("opening: memory beyond that before", f"{peak_mib() - before:.0f} MiB", "256 MiB"),
        ]


def failing(ranks: int = RANKS) -> list[Row]:
    def error_of(rank: int) -> MismatchError:
        problems = [
            Problem(f"stage.{rank}.layers.{i}.weight", "nothing", "a tensor", "add it") for i in range(PROBLEMS)
        ]
        return MismatchError("does not fit", problems)

    first = error_of(0)
    describing, sent = measured(lambda: describe(first, ranks))
    whole_bytes = len(json.dumps([asdict(problem) for problem in first.problems]))
    text = json.dumps(sent)
    different = [
        (rank, json.loads(text.replace("stage.0.", f"stage.{rank}.").replace("s of", f"s of {rank}")))
        for rank in range(ranks)
    ]
    merging, merged = measured(lambda: merge("loading", different, ranks))
    alike = [(rank, sent) for rank in range(ranks)]
    merging_alike, _ = measured(lambda: merge("loading", alike, ranks))
    raising, error = measured(lambda: ShardoptError.from_json(json.loads(json.dumps(merged))))
    assert len(error.problems) + sum(error.left_out.values()) == PROBLEMS * ranks
    return [
        (f"failing: {PROBLEMS} problems of one rank, unbounded", f"{whole_bytes / 1024:.0f} KiB", "-"),
        ("failing: what one rank sends", f"{len(text) / 1024:.1f} KiB, {describing * 1000:.0f} ms", "8 KiB"),
        ("failing: what rank 0 gets, all different", f"{len(text) * ranks / 2**20:.0f} MiB", "128 MiB"),
        ("failing: rank 0 merges them, all different", f"{merging:.2f} s", "2 s"),
        ("failing: rank 0 merges them, all alike", f"{merging_alike * 1000:.0f} ms", "100 ms"),
        ("failing: what all get", f"{len(json.dumps(merged)) / 1024:.0f} KiB, {raising * 1000:.1f} ms", "96 KiB"),
    ]


def retention(ranks: int = RANKS, kept: int = KEPT) -> list[Row]:
    requests: Counter[str] = Counter()
    inner = Requests.once

    def once(self: Requests, method: str, *args: Any, **rest: Any) -> Any:
        requests[method] += 1
        return inner(self, method, *args, **rest)

    Requests.once = once  # type: ignore[method-assign]
    try:
        with checkpoint.Manager("memory://retention/run", keep_last=kept) as manager:
            for step in range(kept + 3):
                requests.clear()
                manager.save(step, {"x": torch.ones(3)})
    finally:
        Requests.once = inner  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/c", ranks, 1)
        begin = time.perf_counter()
        removing, _ = measured(lambda: remove_checkpoint(storage_of(f"{folder}/c")))
        wall = time.perf_counter() - begin
    ends = f"{requests['cat_file']} in up to 32 threads"
    return [
        (f"retention: HEADs of a commit, {kept} kept", str(requests["info"]), "3"),
        (f"retention: ends of manifests that it reads, {kept} kept", ends, f"{2 * kept + 2}"),
        ("retention: other requests", str(sum(requests.values()) - requests["info"] - requests["cat_file"]), "16"),
        (f"retention: {ranks:,} files removed from a local disk", f"{removing:.1f} s ({wall:.1f} s of wall)", "5 s"),
        ("retention: of which a step waits for", "1 s at most", "1 s"),
    ]


JOBS: dict[str, Callable[[], list[Row]]] = {"opening": opening, "failing": failing, "retention": retention}


def main(names: Sequence[str]) -> None:
    if len(names) == 1:
        print(json.dumps(JOBS[names[0]]()))
        return
    rows = []
    for name in names or JOBS:  # each in a process of its own, whose memory is measured
        command = [sys.executable, "-m", "benchmarks.scale_of_files", name]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows += json.loads(answer.splitlines()[-1])
    print(write_table("scale_files", f"One rank of {RANKS:,} and as many files", HEADINGS, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
