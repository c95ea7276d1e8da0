"""Shared by all benchmarks: ranks, interleaved repetitions, medians, and a table with date and hardware.

Machines are shared and noisy, so that an absolute time proves nothing: peers take turns in one run, after memory and
files are warm, and what is reported is the ratio of their medians.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # from a compiled module
from torch.multiprocessing.spawn import spawn

RESULTS = Path(__file__).parent / "results"


def on_ranks(n: int, function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(*args)` on n gloo ranks, one thread each; returns what rank 0 returned."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (n, folder, function, args), nprocs=n)  # type: ignore[no-untyped-call]  # torch's
        return torch.load(f"{folder}/result", weights_only=False)


def _rank(rank: int, n: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", n), rank=rank, world_size=n)
    result = function(*args)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def drop_from_cache(folder: Path) -> None:
    """Drops a folder's files from the page cache, once they are on the disk."""
    for file in filter(Path.is_file, folder.rglob("*")):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def calling(function: Callable[[], Any]) -> Callable[[int], Any]:
    """A peer that calls a function, whatever the number of the repetition."""
    return lambda _: function()


def repeating(function: Callable[[], Any], times: int) -> Callable[[int], Any]:
    """A peer that calls a function so many times."""

    def run(_: int) -> None:
        for _ in range(times):
            function()

    return run


def interleaved(
    peers: dict[str, Callable[[int], Any]],
    repetitions: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
    """The median seconds of each peer, which take turns. Collective where the peers are: the slowest rank counts.

    Args:
        peers: name → what to time; gets the number of the repetition.
        repetitions: how often each is timed.
        warm_up: how often each runs before.
        clock: seconds; `time.thread_time` for what keeps one thread busy, on a machine that others load too.
        prepare: called on each rank before each turn, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for repetition in range(-warm_up, repetitions):
        for name, run in peers.items():
            prepare()
            if dist.is_initialized():
                dist.barrier()
            begin = clock()
            run(repetition)
            took = torch.tensor(clock() - begin, dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(took, dist.ReduceOp.MAX)
            if repetition >= 0:
                seconds[name].append(took.item())
    return {name: statistics.median(times) for name, times in seconds.items()}


def in_turns(
    peers: dict[str, Callable[[int], Any]],
    repetitions: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Medians over rounds of the medians in each; peers change places, as some places may be better than others."""
    medians: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(rounds):
        order = [*peers][turn % len(peers) :] + [*peers][: turn % len(peers)]
        for name, seconds in interleaved({name: peers[name] for name in order}, repetitions, 3, clock).items():
            medians[name].append(seconds)
    return {name: statistics.median(each) for name, each in medians.items()}


def write_table(name: str, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: str = "") -> str:
    """Writes a Markdown table to `results/` with date and hardware, and returns it."""
    lines = [f"# {title}", "", f"{datetime.date.today()}, {hardware()}", ""]
    if notes:
        lines += [notes, ""]
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    return text


def hardware() -> str:
    """CPU, cores, memory, GPU and versions, as a line."""
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "CPU"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB{gpu}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
