"""New weights for other processes: `Publisher` and `Follower`, beside gathering them and a broadcast, in the same run.

python -m benchmarks.streams [--gib 2] [--trainers 2] [--receivers 3] [--repetitions 5] [--folder /dev/shm]
python -m benchmarks.streams --mbit 1000 [...]

Trainers hold bf16 weights cut by rows, of which some elements change before each turn; each receiver holds all of
them. A turn ends when all receivers have the new weights. With `--mbit` each rank has a host of its own, with a cable
of that speed, and trainers publish in the memory of their hosts.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.linked_hosts import in_namespaces, on_hosts
from benchmarks.peers import interleaved, on_ranks, write_table
from examples.namespaces import MEMORY
from shardopt import checkpoint

COLUMNS = 4096
TENSOR_BYTES = 64 << 20
RATES = (0.02, 0.002)
_SKIP_BYTES = 1.6  # that a position may take

Group = Any


class Job:
    """A trainer or a receiver, or both on one rank.

    Args:
        gib: of weights.
        trainers, receivers: how many.
        root: of what is published.
    """

    def __init__(self, gib: float, trainers: int, receivers: int, root: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        of_trainers = range(min(trainers, size))
        of_receivers = range(size - min(receivers, size), size)
        self.trainers: Group = dist.new_group([*of_trainers])
        self.senders: Group = dist.new_group([*dict.fromkeys([0, *of_receivers])])
        alone = {each: dist.new_group([each]) for each in of_receivers}
        self.trains, self.receives = rank in of_trainers, rank in of_receivers
        self.sends = rank == 0 or self.receives
        self.count = max(int(gib * 2**30) // TENSOR_BYTES, 1)
        rows = max(TENSOR_BYTES // 2 // COLUMNS, len(of_trainers))
        self.shape = torch.Size((rows // len(of_trainers) * len(of_trainers), COLUMNS))
        self.root, self.step, self.stalls, self.pauses = root, 0, list[float](), list[float]()
        self.bytes_written = self.changed = 0
        if self.trains:
            mesh = DeviceMesh.from_group(self.trainers, "cpu")
            rows = self.shape[0] // len(of_trainers)
            self.weights = {
                f"layers.{i}.weight": DTensor.from_local(
                    torch.randn(rows, COLUMNS).bfloat16(), mesh, [Shard(0)], shape=self.shape, stride=(COLUMNS, 1)
                )
                for i in range(self.count)
            }
            self.publisher = checkpoint.Publisher(
                self.root, durable=False, anchor_every=1000, process_group=self.trainers
            )
        if self.receives:
            self.received = {
                f"layers.{i}.weight": torch.zeros(self.shape, dtype=torch.bfloat16) for i in range(self.count)
            }
            self.follower = checkpoint.Follower(
                self.root, self.received, memory_bytes=4 << 30, process_group=alone[rank]
            )

    def change(self, rate: float) -> None:
        """Changes some elements of the weights, as a training step does."""
        self.changed = 0
        for weight in self.weights.values() if self.trains else ():
            local = weight.to_local().view(-1)
            places = torch.randint(0, local.numel(), (max(int(rate * local.numel()), 1),))
            local.view(torch.int16)[places] ^= 1
            self.changed += len(torch.unique(places))

    def publish_and_follow(self, _: int) -> None:
        """Publishes the weights, and takes them over."""
        self.step += 1
        if self.trains:
            pending = self.publisher.publish(self.step, self.weights)
            self.stalls.append(pending.call_seconds)
            self.bytes_written = pending.result().bytes_written
        while self.receives and self.follower.step != self.step:
            report = self.follower.update()
            if report is None:
                time.sleep(0.02)
            else:
                self.pauses.append(report.pause_seconds)

    def gather_and_broadcast(self, _: int) -> None:
        """Gathers each tensor on the trainers, and sends it to all receivers."""
        for i in range(self.count):
            name = f"layers.{i}.weight"
            whole = self.weights[name].full_tensor() if self.trains else None
            if self.sends:
                if whole is None or self.receives:
                    target = self.received[name]
                    if whole is not None:
                        target.copy_(whole)
                    whole = target
                dist.broadcast(whole, 0, group=self.senders)

    def memcpy(self) -> float:
        """Seconds of a copy of this trainer's weights into memory that is warm."""
        locals_ = [weight.to_local() for weight in self.weights.values()]
        copies = [torch.empty_like(each) for each in locals_]
        return best(lambda: [copy.copy_(local) for copy, local in zip(copies, locals_, strict=True)])

    def full_load(self) -> float:
        """Seconds of a load of the newest step into a receiver's weights."""
        url = f"{self.root}/step-{self.step:08d}"
        return best(lambda: checkpoint.load(url, self.received, process_group=self.follower._options.process_group))


def _at(call: Callable[[int], Any], repetition: int, _: int) -> Any:
    return call(repetition)


def best(call: Callable[[], Any], times: int = 3) -> float:
    """The least seconds of some calls."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure(rate: float, gib: float, trainers: int, receivers: int, repetitions: int, root: str) -> list[str]:
    """A row of the table. Collective."""
    log = logging.getLogger("shardopt")
    level = log.level
    log.setLevel(logging.WARNING)  # and no line for each update
    try:
        return _row(Job(gib, trainers, receivers, root), rate, repetitions)
    finally:
        log.setLevel(level)


def _row(job: Job, rate: float, repetitions: int) -> list[str]:
    processor: dict[str, float] = {}

    def counted(name: str, call: Callable[[int], None]) -> Callable[[int], None]:
        def run(repetition: int) -> None:
            begin = time.process_time()
            call(repetition)
            if repetition == repetitions - 1:
                processor[name] = time.process_time() - begin

        return run

    peers = {
        "ours": counted("ours", job.publish_and_follow),
        "theirs": counted("theirs", job.gather_and_broadcast),
    }

    job.change(rate)
    peers["ours"](0)  # memory and files are warm from here on
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for repetition in range(-1, repetitions):
        job.change(rate)
        for name, call in peers.items():
            taken = interleaved({name: partial(_at, call, repetition)}, 1, 0)
            if repetition >= 0:
                seconds[name].append(taken[name])
    job.change(rate)
    job.publish_and_follow(repetitions)  # once more: the last turn was the others', and what is compared is to be ours
    is_right = torch.tensor(1)
    for i in range(job.count):
        name = f"layers.{i}.weight"
        whole = job.weights[name].full_tensor() if job.trains else torch.empty(0, dtype=torch.bfloat16)
        if job.sends:
            whole = whole if job.trains else torch.empty(job.shape, dtype=torch.bfloat16)
            dist.broadcast(whole, 0, group=job.senders)
            is_right &= int(not job.receives or torch.equal(whole, job.received[name]))
    dist.all_reduce(is_right, dist.ReduceOp.MIN)
    assert is_right, "other weights than the trainers'"
    numbers = [
        processor["ours"],
        processor["theirs"],
        float(job.changed),
        float(job.bytes_written) if job.trains else 0.0,
    ]
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    stall = statistics.median(job.stalls[2:]) / job.memcpy() if job.trains else 0.0
    dist.barrier()
    pause = statistics.median(job.pauses[2:]) / job.full_load() if job.receives else 0.0
    most = torch.tensor([stall, pause], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if job.trains:
        job.publisher.close()
    ours, theirs = (statistics.median(seconds[name]) for name in peers)
    changed, written = sums[2].item(), sums[3].item()
    return [
        f"{100 * rate:g}%",
        f"{ours:.2f}",
        f"{theirs:.2f}",
        f"{theirs / ours:.1f}",
        f"{sums[0].item():.1f}, {sums[1].item():.1f}",
        f"{written / 1e6:.1f}",
        f"{written / (changed * (2 + _SKIP_BYTES)):.2f}",
        f"{most[0].item():.2f}",
        f"{100 * most[1].item():.0f}%",
    ]


HEADER = (
    "changed",
    "seconds, ours",
    "seconds, gather and broadcast",
    "times as fast",
    "processor seconds, all ranks: ours, theirs",
    "MB written",
    "of 3.6 bytes a changed element",
    "stall of trainers, of a memcpy",
    "pause of receivers, of a full load",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--receivers", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--mbit", type=int)
    given = parser.parse_args()
    if given.mbit is not None:
        in_namespaces()
    size, rows = given.trainers + given.receivers, []
    for rate in RATES:
        job = rate, given.gib, given.trainers, given.receivers, given.repetitions
        if given.mbit is None:
            folder = tempfile.mkdtemp(dir=given.folder)
            try:
                rows.append(on_ranks(size, measure, *job, f"{folder}/published"))
            finally:
                shutil.rmtree(folder)
        else:
            rows.append(on_hosts(size, given.mbit, "benchmarks.streams:measure", *job, f"hosts://{MEMORY}/published"))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    notes = (
        f"{given.gib:g} GiB of bf16 weights on {given.trainers} trainers; all of them on {given.receivers} receivers. "
        "From the call until all receivers have them, medians; through gloo"
    )
    if given.mbit is None:
        print(write_table("streams", "Weights for other processes", HEADER, rows, f"{notes}, on the loopback."))
    else:
        notes += (
            f". Each rank has a host of its own (a namespace), with a cable of {given.mbit} Mbit/s; ours publish in"
        )
        title = "Weights for other processes, over links"
        print(write_table("streams_over_links", title, HEADER, rows, f"{notes} the memory of the hosts."))


if __name__ == "__main__":
    main()
