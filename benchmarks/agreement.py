"""Rounds of agreement of many ranks: the real code of every rank, over a real TCPStore.

    python -m benchmarks.agreement [--ranks 64 256 1024 4096] [--rounds 5] [--name agreement]

Ranks are threads of a few processes, each with a connection to the store, and all run `Ranks.agree`. The store's
server, rank 0 and the first rank of the second block of ranks (which leads the others of it) have processes of their
own, whose seconds of the processor are read from the system; so what one machine of two cores adds, by running all
ranks, is told apart from what a job's busiest processes have to do. Wall time includes all of it, and is that of no
job.

`first`: the ranks find each other, and agree once. `alike`: all report the same. `different`: each reports what no
other does, of the length of what a rank reports of the files that it has written.

Before a run of thousands of ranks, add a line for each loopback address to `/etc/hosts`, such as
`::ffff:127.0.0.1 localhost`: TCPStore looks up clients' names, otherwise for minutes. The first round of 4,096 ranks
took 9 s on 2026-11-22, and 54 s on 2026-11-27, when the machine was slower.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from matplotlib import pyplot
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # from a compiled module

from benchmarks.peers import RESULTS, write_table
from shardopt.ranks import Ranks
from shardopt.runtime.stores import Store
from shardopt.world import World, using

matplotlib.use("Agg")

BLOCK = 128  # the second leader, where ranks are led in blocks of so many
RANKS_OF_A_PROCESS = 128
DEADLINE_SECONDS = 900.0
EXTRAPOLATED = 16384
PHASES = ("first", "alike", "different")


class Job:
    """In the place of a process group: what `Ranks.meeting` asks of one."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self._rank, self._size = rank, size
        self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_SECONDS))

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> Store:
        return self._store


def take_part(job: Job, rounds: int, before: Callable[[str], None]) -> None:
    """One rank: all phases, each with `before` called first."""
    rank, size = job.rank(), job.size()
    before("first")
    of_job = Ranks.meeting(job, tuple(range(size)))  # type: ignore[arg-type]  # what it asks of a group, Job has
    ranks = of_job.with_deadline(DEADLINE_SECONDS)
    ranks.agree("beginning", lambda: None)
    before("alike")
    for _ in range(rounds):
        ranks.agree("saving", lambda: ["0" * 32] * 3, lambda report: report)
    before("different")
    for i in range(rounds):
        name = f"{rank:05d}-{i:04d}-{'0' * 40}.safetensors"
        ranks.agree("saving", partial(_said_of, name), lambda got: got, len)
    before("end")
    ranks.agree("ending", lambda: None)


def _said_of(name: str) -> list[list[object]]:
    return [[name, 1 << 30, "0" * 32]]


def run_many(first: int, last: int, size: int, port: int, rounds: int, start: Barrier) -> None:
    """Ranks from `first` to before `last` as threads of this process."""
    threading.stack_size(256 << 10)
    # Objects of all ranks are searched through by the collector at once, which no rank of a job would do.
    gc.disable()
    jobs = [Job(rank, size, port) for rank in range(first, last)]
    threads = [threading.Thread(target=take_part, args=(job, rounds, lambda _: None)) for job in jobs]
    start.wait()  # for all to be connected to the store
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _CountingSocket(socket.socket):
    """Counts what goes through it."""

    counted = 0

    def send(self, data: Any, flags: int = 0) -> int:
        sent = super().send(data, flags)
        _CountingSocket.counted += sent
        return sent

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        _CountingSocket.counted += len(data)
        return data

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        return _counting(accepted), address


def _counting(plain: socket.socket) -> socket.socket:
    counting = _CountingSocket(plain.family, plain.type, plain.proto, plain.detach())
    counting.setblocking(False)
    return counting


class CountedWorld(World):
    """Counts the bytes of all sockets of this process but the store's."""

    def listen(self, host: str, ports: range | None = None, backlog: int = 1024) -> socket.socket:
        return _counting(super().listen(host, ports, backlog))

    def begin_connect(self, host: str, port: int) -> socket.socket:
        return _counting(super().begin_connect(host, port))


def processor_seconds(pid: int) -> float:
    """What all threads of a process have used of the processor, those that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ended_too = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    running = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            running += int((task / "schedstat").read_text().split()[0])  # nanoseconds; the other has ticks of 10 ms
        except OSError:
            continue
    return max(running / 1e9, ended_too)


def run_measured(
    rank: int, size: int, port: int, rounds: int, start: Barrier, server: int, results: Connection
) -> None:
    """One rank in a process of its own: what it, and the store, have used up to each phase."""
    marks: dict[str, tuple[float, float, float, int]] = {}

    def before(phase: str) -> None:
        marks[phase] = (
            time.perf_counter(),
            processor_seconds(os.getpid()),
            processor_seconds(server),
            _CountingSocket.counted,
        )

    with using(CountedWorld()):
        job = Job(rank, size, port)
        start.wait()
        take_part(job, rounds, before)
    results.send(marks)


def serve(size: int, port: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()


def measure(size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns, by phase, the figures of one round."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(size, theirs))
    server.start()
    port = ours.recv()
    measured = {0: context.Pipe(False)}
    if size > BLOCK:
        measured[BLOCK] = context.Pipe(False)
    ranges = [
        (max(first, 1), min(last, size))
        for begin in range(0, size, RANKS_OF_A_PROCESS)
        for first, last in _without(BLOCK if size > BLOCK else 0, begin, begin + RANKS_OF_A_PROCESS)
    ]
    start = context.Barrier(len(measured) + len(ranges))
    processes = [
        context.Process(target=run_measured, args=(rank, size, port, rounds, start, server.pid, pipe[1]))
        for rank, pipe in measured.items()
    ]
    processes += [context.Process(target=run_many, args=(*each, size, port, rounds, start)) for each in ranges]
    for process in processes:
        process.start()
    marks = {rank: pipe[0].recv() for rank, pipe in measured.items()}
    for process in processes:
        process.join()
    ours.send("end")
    server.join()
    if any(process.exitcode for process in [*processes, server]):
        raise SystemExit("a process has failed")
    return {phase: _figures(marks, phase, rounds, size) for phase in PHASES}


def _without(left_out: int, begin: int, end: int) -> Iterable[tuple[int, int]]:
    if left_out and begin <= left_out < end:
        return [(begin, left_out), (left_out + 1, end)]
    return [(begin, end)]


def _figures(marks: dict[int, dict[str, Any]], phase: str, rounds: int, size: int) -> dict[str, float]:
    names = [*PHASES, "end"]
    count = rounds if phase in ("alike", "different") else 1
    used = {}
    for rank, each in marks.items():
        begin, end = each[phase], each[names[names.index(phase) + 1]]
        used[rank] = [(after - before) / count for before, after in zip(begin, end, strict=True)]
    leader = used.get(BLOCK, [0.0] * 4)
    return {
        "wall": used[0][0],
        "rank 0": used[0][1],
        "server": used[0][2],
        "bytes": used[0][3],
        "leader": leader[1],
        "leader bytes": leader[3],
    }


def extrapolated(sizes: list[int], values: list[float]) -> float:
    """A straight line through what was measured, at many more ranks."""
    slope, constant = numpy.polyfit(sizes, values, 1)
    return float(slope * EXTRAPOLATED + constant)


def report(name: str, found: dict[int, dict[str, dict[str, float]]], rounds: int) -> str:
    header = ["ranks", "round", "wall, s", "rank 0, ms", "a leader, ms", "store's server, ms", "rank 0, bytes a rank"]
    rows = []
    for size, phases in found.items():
        for phase, figures in phases.items():
            rows.append(
                [
                    f"{size:,}",
                    phase,
                    f"{figures['wall']:.3f}",
                    *(f"{1000 * figures[who]:.1f}" for who in ("rank 0", "leader", "server")),
                    f"{figures['bytes'] / size:.0f}",
                ]
            )
    sizes = [size for size in found if size > BLOCK]
    if len(sizes) > 1:
        for phase in PHASES:
            line = [
                f"{1000 * extrapolated(sizes, [found[size][phase][who] for size in sizes]):.1f}"
                for who in ("rank 0", "leader", "server")
            ]
            rows.append([f"{EXTRAPOLATED:,} (extrapolated)", phase, "", *line, ""])
    notes = (
        f"A row is one round; `alike` and `different` are means of {rounds}. Milliseconds are processor time of whole "
        "processes. Wall time is that of this machine, which runs all ranks. Extrapolated rows follow a straight line "
        f"through the sizes above {BLOCK} ranks: they assume that each further rank costs the same."
    )
    draw(name, found)
    return write_table(name, "Rounds of agreement", header, rows, notes)


def draw(name: str, found: dict[int, dict[str, dict[str, float]]]) -> None:
    """Processor time of rank 0 and of the server, by ranks."""
    figure, axes = pyplot.subplots(figsize=(6, 4))
    sizes = [*found]
    for phase, style in (("alike", "-"), ("different", "--")):
        for who, color in (("rank 0", "tab:blue"), ("leader", "tab:green"), ("server", "tab:red")):
            values = [1000 * found[size][phase][who] for size in sizes]
            shown = [(size, value) for size, value in zip(sizes, values, strict=True) if value > 0]
            axes.plot(
                *zip(*shown, strict=True), style, marker="o", color=color, label=f"{who}, {phase}"
            ) if shown else None
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms of the processor, a round")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="agreement")
    options = parser.parse_args()
    found = {}
    for size in options.ranks:
        found[size] = measure(size, options.rounds)
        print(size, json.dumps(found[size]), flush=True)
    print(report(options.name, found, options.rounds))


if __name__ == "__main__":
    main()
