"""Saves to and loads from a bucket: obstore and s3fs in turns, and torch.distributed.checkpoint through s3fs.

    python -m benchmarks.object_stores [--mib 512] [--repetitions 5]

One process; the bucket is a directory in memory that `s3_files.py` serves on loopback: as fast as it goes, and with
200 MB/s in all and 20 ms before each answer. The server takes processor time from the clients, the same from each.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import fsspec  # type: ignore[import-untyped]  # has no type hints
import torch

from benchmarks import dcp
from benchmarks.peers import write_table
from benchmarks.s3_files import BUCKET, served
from shardopt import checkpoint
from shardopt.checkpoint.storage import file_systems

CLIENTS = ("obstore", "s3fs", "DCP, s3fs")
NETWORKS = {"unlimited": (1e12, 0.0), "200 MB/s, 20 ms": (200e6, 0.02)}
TENSOR_BYTES = 32 << 20


class Cost(NamedTuple):
    """What a call took.

    Args:
        seconds: of real time.
        cpu_seconds: of this process, all threads.
        requests: to the server.
    """

    seconds: float
    cpu_seconds: float
    requests: int


def value(mib: int, filled: float) -> dict[str, torch.Tensor]:
    count = max(1, (mib << 20) // TENSOR_BYTES)
    return {f"x{number}": torch.full((TENSOR_BYTES // 4096, 1024), filled + number) for number in range(count)}


def cost_of(endpoint: str, call: Callable[[], object]) -> Cost:
    requests_of(endpoint)
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, cpu, requests_of(endpoint))


def requests_of(endpoint: str) -> int:
    with urllib.request.urlopen(f"{endpoint}/-/requests") as answer:
        return len(json.loads(answer.read()))


@contextmanager
def client(name: str) -> Any:
    """Makes `s3://` that client's, for as long as the block lasts."""
    has_obstore = file_systems.has_obstore
    file_systems.has_obstore = lambda: name == "obstore"
    try:
        yield
    finally:
        file_systems.has_obstore = has_obstore


def turn(name: str, url: str, state: dict[str, torch.Tensor], endpoint: str) -> tuple[Cost, Cost]:
    """Saves and loads once with one client; returns the cost of both."""
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with client(name):
        if name.startswith("DCP"):
            save = cost_of(endpoint, lambda: dcp.save(dict(state), checkpoint_id=url))
            load = cost_of(endpoint, lambda: dcp.load(target, checkpoint_id=url))
        else:
            save = cost_of(endpoint, lambda: checkpoint.save(url, state))
            load = cost_of(endpoint, lambda: checkpoint.load(url, target))
    assert all(torch.equal(target[key], state[key]) for key in state)
    return save, load


def measure(mib: int, repetitions: int, network: str) -> dict[tuple[str, str], Cost]:
    """Returns the median cost of a save and of a load, by client and call."""
    state, gib = value(mib, 1.0), mib / 1024
    rate, latency = NETWORKS[network]
    costs: dict[tuple[str, str], list[Cost]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, served(folder, rate, latency) as options:
        fsspec.config.conf["s3"] = options
        endpoint = str(options["endpoint_url"])
        for round_ in range(repetitions + 1):
            for name in CLIENTS[round_ % len(CLIENTS) :] + CLIENTS[: round_ % len(CLIENTS)]:
                url = f"s3://{BUCKET}/{round_}-{CLIENTS.index(name)}"
                for call, cost in zip(("save", "load"), turn(name, url, state, endpoint), strict=True):
                    if round_:  # the first one warms connections, memory and imports
                        costs.setdefault((name, call), []).append(cost)
                storage = fsspec.filesystem("s3", **options)
                storage.invalidate_cache()
                for path in storage.find(url):
                    storage.rm_file(path)
    return {
        key: Cost(
            median(cost.seconds for cost in found),
            median(cost.cpu_seconds for cost in found) / gib,
            int(median(cost.requests for cost in found)),
        )
        for key, found in costs.items()
    }


def rows_of(mib: int, repetitions: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for network in NETWORKS:
        found = measure(mib, repetitions, network)
        for call in ("save", "load"):
            for name in CLIENTS:
                cost = found[name, call]
                rows.append(
                    (
                        network,
                        call,
                        name,
                        f"{cost.seconds:.2f}",
                        f"{mib / 1024 / cost.seconds:.2f}",
                        f"{found[name, call].seconds / found['obstore', call].seconds:.2f}",
                        f"{cost.cpu_seconds:.2f}",
                        str(cost.requests),
                    )
                )
                print(*rows[-1], sep="  ", flush=True)
    return rows


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    header = ("network", "call", "client", "seconds", "GiB/s", "× obstore", "processor seconds per GiB", "requests")
    notes = (
        f"`python -m benchmarks.object_stores`. {arguments.mib} MiB in tensors of 32 MiB, one process, medians of "
        f"{arguments.repetitions} interleaved rounds. The server runs on the same cores."
    )
    write_table("object_stores", "Object stores", header, rows_of(arguments.mib, arguments.repetitions), notes)


if __name__ == "__main__":
    main()
