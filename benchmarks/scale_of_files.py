"""What rank 0 of 16,384 does alone: opens as many files, hears of as many failures, removes as many files. With bounds.

    python -m benchmarks.scale_of_files [opening] [remote] [failing] [retention]

`opening`: one rank that reads a tensor of which each of the data files has a row, of 100 tensors in each, on a local
disk. `remote`: the same over S3, whose server is moto's, on this host, in a process of its own. `failing`: every rank
has a thousand problems that no other has, and then all have the same. `retention`: a commit on an object store with 100
checkpoints kept, in requests; and the removal of one with as many files as ranks.

Seconds are of the processor: the machine does other work too.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.bounds import HEADINGS, Row, row
from benchmarks.many_files import write_checkpoint
from benchmarks.peers import write_table
from shardopt import checkpoint
from shardopt.checkpoint.run.keeper import _WAIT_SECONDS
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.storage.retry import Requests
from shardopt.errors import MismatchError, Problem, ShardoptError
from shardopt.ranks.failures import describe, merge
from shardopt.sharding.box import whole
from shardopt.sharding.pieces import Piece
from tests.harness.object_stores import object_server, reached

RANKS, TENSORS, PROBLEMS, KEPT = 16_384, 100, 1000, 100


def measured(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns seconds of the processor, of all threads, and the result."""
    begin = time.process_time()
    result = function()
    return time.process_time() - begin, result


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def open_all(path: str, ranks: int) -> tuple[float, float]:
    """Opens a checkpoint, and the files of one of its tensors; returns seconds for the manifest and for the files."""
    reading, reader = measured(lambda: checkpoint.open(path))
    pieces = [Piece(whole((ranks, 16)), torch.zeros(ranks, 16))]
    key = "layers.0.weight"

    def open_files() -> int:
        return len(reader.requests([(key, pieces)], others_follow=False))

    seconds, files = measured(open_files)
    assert files == ranks
    return reading, seconds


def write_many(path: str, ranks: int) -> None:
    """Writes the checkpoint in another process, for its memory is not to be counted."""
    subprocess.run([sys.executable, "-m", "benchmarks.many_files", path, str(ranks), str(TENSORS)], check=True)


def opening(ranks: int = RANKS) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/c"
        write_many(path, ranks)
        before = peak_mib()
        reading, seconds = open_all(path, ranks)
        return [
            row(f"opening: manifest of {ranks:,} files", reading, "s"),
            row(f"opening: {ranks:,} files of {TENSORS} tensors each", seconds, "s", 20),
            row("opening: memory beyond that before", peak_mib() - before, "MiB", 256),
        ]


def put_files(folder: str, endpoint: str, prefix: str) -> None:
    """Puts the files of a folder into a bucket, unsigned, as the server does not mind."""

    def put(names: Sequence[str]) -> None:
        connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
        for name in names:
            connection.request("PUT", f"/{prefix}/{name}", (Path(folder) / name).read_bytes())
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
        connection.close()

    names = sorted(os.listdir(folder))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, [names[i::4] for i in range(4)]))


def remote(ranks: int = RANKS) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, object_server() as server, reached(server.options()):
        write_many(f"{folder}/c", ranks)
        root = server.new_root()
        put_files(f"{folder}/c", server.endpoint, root.removeprefix("s3://"))
        with checkpoint.open(root):  # what is imported and connected first is not of this checkpoint
            server.plan()
        before, begin = peak_mib(), time.perf_counter()
        reading, seconds = open_all(root, ranks)
        wall = time.perf_counter() - begin
        log = server.log()
        most = max(log["most_at_once"].values())
        of_files = [each for each in log["requests"] if "manifest.json" not in each]
        again = len(of_files) - len(set(of_files))  # second attempts of the client
        return [
            row("opening over S3: requests for the manifest", len(log["requests"]) - len(of_files), "", 2),
            row(
                f"opening over S3: requests for {ranks:,} files",
                len(of_files),
                "",
                ranks,
                f"{most} at once, {again} again",
            ),
            row("opening over S3: manifest", reading, "s"),
            row(f"opening over S3: {ranks:,} files", seconds, "s", None, f"{wall:.0f} s of wall, the server's too"),
            row("opening over S3: memory beyond that before", peak_mib() - before, "MiB", 256),
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
        row(f"failing: {PROBLEMS} problems of one rank, unbounded", whole_bytes / 1024, "KiB"),
        row("failing: what one rank sends", len(text) / 1024, "KiB", 8, f"{describing * 1000:.0f} ms"),
        row("failing: what rank 0 gets, all different", len(text) * ranks / 2**20, "MiB", 128),
        row("failing: rank 0 merges them, all different", merging, "s", 2),
        row("failing: rank 0 merges them, all alike", merging_alike * 1000, "ms", 100),
        row("failing: what all get", len(json.dumps(merged)) / 1024, "KiB", 96, f"{raising * 1000:.1f} ms"),
    ]


def retention(ranks: int = RANKS, kept: int = KEPT) -> list[Row]:
    requests: Counter[str] = Counter()
    inner = Requests.once

    def once(self: Requests, method: str, *args: Any, **rest: Any) -> Any:
        requests[method] += 1
        return inner(self, method, *args, **rest)

    Requests.once = once  # type: ignore[method-assign]  # to be counted
    try:
        with checkpoint.Manager("memory://retention/run", keep=kept) as manager:
            for step in range(kept + 3):
                requests.clear()
                manager.save(step, {"x": torch.ones(3)})
    finally:
        Requests.once = inner  # type: ignore[method-assign]  # as it was
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/c", ranks, 1)
        begin = time.perf_counter()
        removing, _ = measured(lambda: remove_checkpoint(storage_of(f"{folder}/c")))
        wall = time.perf_counter() - begin
    others = sum(requests.values()) - requests["info"] - requests["cat_file"]
    ends = f"retention: ends of manifests that it reads, {kept} kept"
    return [
        row(f"retention: HEADs of a commit, {kept} kept", requests["info"], "", 3),
        row(ends, requests["cat_file"], "", 2 * kept + 2, "in up to 32 threads"),
        row("retention: other requests", others, "", 16),
        row(f"retention: {ranks:,} files removed from a local disk", removing, "s", 5, f"{wall:.1f} s of wall"),
        row("retention: of which a step waits for, at most", _WAIT_SECONDS, "s", 1),
    ]


JOBS: dict[str, Callable[[], list[Row]]] = {
    "opening": opening,
    "remote": remote,
    "failing": failing,
    "retention": retention,
}


def main(names: Sequence[str]) -> None:
    if len(names) == 1:
        print(json.dumps(JOBS[names[0]]()))
        return
    local: list[Row] = []
    over_s3: list[Row] = []
    for name in names or JOBS:  # each in a process of its own, whose memory is measured
        command = [sys.executable, "-m", "benchmarks.scale_of_files", name]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        (over_s3 if name == "remote" else local).extend(json.loads(answer.splitlines()[-1]))
    if local:
        print(write_table("scale_files", f"One rank of {RANKS:,} and as many files", HEADINGS, local))
    if over_s3:
        print(write_table("scale_files_s3", f"One rank that opens {RANKS:,} files over S3", HEADINGS, over_s3))


if __name__ == "__main__":
    main(sys.argv[1:])
