"""The size and number of the requests of a load from afar, against a store that answers after a while.

    python -m benchmarks.remote [--megabytes 128]

The store is in memory; each request takes `latency` and then its bytes at the rate of one connection, which is about
what object stores give: many connections at once are how they are fast. Nothing else is measured, so the numbers say
what round trips cost, not what any store or network is worth.
"""

import argparse
import time
import uuid
from statistics import median
from typing import Any
from unittest import mock

import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]  # has no type hints

from shardopt import checkpoint
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading import checking
from shardopt.checkpoint.sources.reading import fetch as read
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.sharding.box import whole
from shardopt.sharding.pieces import Piece

LATENCY_SECONDS = 0.03
BYTES_PER_SECOND = 80e6


class Far(MemoryFileSystem):  # type: ignore[misc]  # as above
    protocol = "far"
    cachable = False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        time.sleep(LATENCY_SECONDS + len(data) / BYTES_PER_SECOND)
        return data


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--megabytes", type=int, default=128)
    megabytes = arguments.parse_args().megabytes
    root = f"memory://far/{uuid.uuid4().hex}"
    value = torch.arange(megabytes * 250_000, dtype=torch.float32)
    checkpoint.save(root, {"x": value})
    reader = CheckpointReader(OwnSource(RemoteStorage(Far(), root.removeprefix("memory:/"))))
    target = torch.empty_like(value)
    requests = reader.requests([("x", [Piece(whole(tuple(value.shape)), target)])])
    print(f"{megabytes} MB, {1e3 * LATENCY_SECONDS:g} ms and {BYTES_PER_SECOND / 1e6:g} MB/s a request")
    print("| MiB a request | at a time | seconds | MB/s | at most in flight, MiB |")
    print("|---|---|---|---|---|")
    fixed = ((2, 4), (2, 8), (8, 4), (8, 8), (8, 16), (16, 8), (32, 8))
    for mib, threads, widens in ((8, 8, True), *((*each, False) for each in fixed)):
        most = 24 if widens else threads
        sizes = checking.ReadSizes(mib << 20, mib << 20, mib << 20, threads, most)
        seconds = []
        with mock.patch.object(checking, "_FAR_SIZES", sizes):
            for _ in range(3):
                begin = time.perf_counter()
                read.fetch(requests)
                seconds.append(time.perf_counter() - begin)
        print(
            f"| {mib} | {threads}{f' to {most}' if widens else ''} | {median(seconds):.2f} | "
            f"{4 * value.numel() / median(seconds) / 1e6:.0f} | {mib * most} |"
        )
    assert torch.equal(target, value)


if __name__ == "__main__":
    main()
