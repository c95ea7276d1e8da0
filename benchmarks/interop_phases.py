"""Where the time of a save or load through torch.distributed.checkpoint (DCP) goes: phases of DCP, and our own work.

python -m benchmarks.interop_phases [--repetitions 5] [--gib 1] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.logger import _dcp_logger

from benchmarks import dcp
from benchmarks.interop import save_both, state
from benchmarks.peers import on_ranks, write_table
from shardopt.checkpoint.dcp import StorageReader, StorageWriter

PHASES = {
    "local_step": "plan of each rank",
    "global_step": "plan of all, on the first rank",
    "write_data": "files",
    "read_data": "files",
    "finish_checkpoint": "commit, on the first rank",
}
"""The phases as DCP calls them → as the table does."""
CALLS = ((os, "writev"), (os, "preadv"), (os, "fsync"), (xxhash, "xxh3_64_digest"))
"""What our files are made of, timed in whatever thread it runs."""


class _Phases(logging.Handler):
    """Adds up what DCP says of the seconds of its phases."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and record.msg.get("event") == "end" and record.msg["func_name"] in PHASES:
            self.seconds[PHASES[record.msg["func_name"]]] += record.msg["times_spent"] / 1e9


@contextmanager
def timed_calls(seconds: defaultdict[str, float]) -> Iterator[None]:
    """Adds the processor seconds of `CALLS`, of all threads, to `seconds`."""
    lock, plain = threading.Lock(), [getattr(module, name) for module, name in CALLS]

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args)
            finally:
                with lock:
                    seconds[f"processor in {name}"] += time.thread_time() - begin

        return run

    for (module, name), call in zip(CALLS, plain, strict=True):
        setattr(module, name, timed(name, call))
    try:
        yield
    finally:
        for (module, name), call in zip(CALLS, plain, strict=True):
            setattr(module, name, call)


def measure(gib: float, folder: str, repetitions: int, what: str) -> dict[str, dict[str, float]]:
    """Peer → part → median seconds on the first rank."""
    held = state(gib)
    peers: dict[str, Callable[[str], Any]] = {
        "save ours": lambda path: dcp.save(held, storage_writer=StorageWriter(path, durable=False)),
        "save dcp": lambda path: dcp.save(held, storage_writer=dcp.FileSystemWriter(path, sync_files=False)),
        "load ours": lambda _: dcp.load(held, storage_reader=StorageReader(f"{folder}/ours-saved")),
        "load dcp": lambda _: dcp.load(held, storage_reader=dcp.FileSystemReader(f"{folder}/dcp-saved")),
    }
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "dcp": []}
    _dcp_logger.setLevel(logging.DEBUG)
    for repetition in range(-1, repetitions):
        for peer, taken in runs.items():
            handler = _Phases()
            _dcp_logger.addHandler(handler)
            dist.barrier()
            begin, processor = time.perf_counter(), time.process_time()
            with tempfile.TemporaryDirectory(dir=folder) as local, timed_calls(handler.seconds):
                name = [local]
                dist.broadcast_object_list(name)  # its last barrier keeps the directory until all are done
                peers[f"{what} {peer}"](f"{name[0]}/saved")
                seconds = handler.seconds
                seconds["all"] = time.perf_counter() - begin
                seconds["processor in all"] = time.process_time() - processor
                seconds["between ranks, and the rest"] = seconds["all"] - sum(
                    seconds[each] for each in set(PHASES.values())
                )
                dist.barrier()
            _dcp_logger.removeHandler(handler)
            if repetition >= 0:
                taken.append(dict(seconds))
    parts = {part for taken in runs.values() for each in taken for part in each}
    return {
        peer: {part: statistics.median(each.get(part, 0.0) for each in taken) for part in parts}
        for peer, taken in runs.items()
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0, help="of the state of all ranks together")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    for label, ranks, what in (("save, 2 ranks", 2, "save"), ("load, 4 ranks", 4, "load")):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            if what == "load":
                on_ranks(ranks, save_both, arguments.gib, folder)
            measured = on_ranks(ranks, measure, arguments.gib, folder, arguments.repetitions, what)
        columns |= {f"{label}, {peer}": parts for peer, parts in measured.items()}
    order = ["all", *dict.fromkeys(PHASES.values()), "between ranks, and the rest", "processor in all"]
    order += [f"processor in {name}" for _, name in CALLS]
    rows = []
    for part in order:
        row = [columns[column].get(part, 0.0) for column in columns]
        if any(row):
            rows.append((part, *(f"{1000 * seconds:.0f}" for seconds in row)))
            print(*rows[-1], sep="  ", flush=True)
    notes = (
        f"{arguments.gib:g} GiB in tensors of 64 MiB, sharded by rows, without fsync; milliseconds on the first rank, "
        "medians. Processor time is that of all threads of the rank. With more ranks than cores, or on a busy machine, "
        "compare processor times. Ours is mostly copying by the kernel and checksums; the rest is DCP's plan and its "
        "exchanges, for both. "
        f"Load average {os.getloadavg()[0]:.1f}."
    )
    title = "Where the time goes of dcp.save and dcp.load, ours and DCP's own"
    write_table("interop_phases", title, ("part", *columns), rows, notes)


if __name__ == "__main__":
    main()
