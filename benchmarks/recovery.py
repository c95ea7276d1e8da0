"""What recovery takes: a restore from memory, a neighbour, disks and a store; the stall of saves to memory; copies.

    python -m benchmarks.recovery [restore] [stall] [copying] [--megabytes 256] [--repetitions 3] [--disk /tmp]

Each rank is a host of its own, with directories of its own; hosts reach each other over TCP on loopback.

`restore`: 4 ranks with 256 MiB of AdamW's state each, in a fresh process group each time: from `restore()` until all
ranks have returned from it, and until all have made a step. From the host's own memory; from a neighbour's, where one
host has lost its files and where all have; from disks whose cache was dropped; from S3 without TLS, by a server that
sends 200 MB/s in all (`s3_files.py`). Then a load into state that is there already, from the host's own memory, beside
a plain read of the same files into the same tensors.

`stall`: what a save to memory takes from the training, beside a memcpy of the same state: on files of removed saves,
as a run has them from the third save on, and on new ones. And the processor's time of the whole save.

`copying`: steps of two hosts whose saves are copied and of two whose saves are not, in turns; with all cores at work,
and with the training on one core of two, so that another one is free.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardopt
from benchmarks.peers import drop_from_cache, on_ranks, write_table
from benchmarks.s3_files import BUCKET, served
from shardopt import checkpoint
from shardopt.checkpoint import Tier
from shardopt.checkpoint.format.constants import MANIFEST_NAME, RECORD_NAME, writer_of
from shardopt.checkpoint.run.root import LABEL_NAME, RUN_NAME, RunIdentity
from shardopt.state.flatten import flatten
from tests.harness.object_stores import reached

STORE_BYTES_PER_SECOND = 200e6
WIDTH = 2048
BATCH = 24
STEP = "step-00000001"


class Layers(nn.Module):
    """Matrices sharded by rows, each rank of which multiplies with its own rows alone: nobody waits for others."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        rows = [WIDTH] * int(megabytes * 2**20 / (12 * WIDTH * WIDTH))  # weights and two moments have 12 bytes each
        rows += [int(megabytes * 2**20 / (12 * WIDTH)) - sum(rows)]
        self.weights = nn.ParameterList(
            DTensor.from_local(
                torch.full((n, WIDTH), 1 / WIDTH),
                mesh,
                [Shard(0)],
                shape=torch.Size((n * mesh.size(), WIDTH)),
                stride=(WIDTH, 1),
            )
            for n in rows
            if n
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([(inputs @ weight.to_local().T).tanh().square().mean() for weight in self.weights]).sum()


class Job:
    """A model, its optimizer, and one step of training."""

    def __init__(self, megabytes: float, batch: int) -> None:
        self.model = Layers(megabytes)
        self.optimizer = shardopt.keyed("adamw", self.model.named_parameters(), lr=1e-3)
        self.app: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.inputs = torch.linspace(-1, 1, batch * WIDTH).reshape(batch, WIDTH) * (1 + dist.get_rank())

    def step(self) -> None:
        self.model(self.inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.app["step"] += 1

    def local_tensors(self) -> list[Tensor]:
        return [each.to_local() if isinstance(each, DTensor) else each for each in flatten(self.app).tensors().values()]


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def slowest(seconds: float) -> float:
    return over_ranks(seconds, dist.ReduceOp.MAX)


def over_ranks(number: float, how: Any = dist.ReduceOp.SUM) -> float:
    both = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(both, how)
    return both.item()


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in times.items()}


# Restore.


@contextmanager
def fresh_group(folder: str, number: int) -> Iterator[None]:
    """A new process group of the same ranks, in which shardopt has no connections yet."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store-{number}", size)  # type: ignore[attr-defined]  # of Python's API, without a stub
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    yield
    dist.barrier()


def lay_out(kept: Path, target: Path, is_wanted: Callable[[int], bool]) -> None:
    """Makes a host's share of hard links to files that are kept: of those ranks that are wanted."""
    (target / STEP).mkdir(mode=0o700, parents=True)
    target.chmod(0o700)
    for file in kept.iterdir():
        if file.name == RECORD_NAME:
            shutil.copy(file, target / STEP / file.name)
        elif is_wanted(writer_of(file.name)):
            os.link(file, target / STEP / file.name)


def restores(memory: str, disk: str, s3: dict[str, object], megabytes: float, repetitions: int) -> dict[str, Any]:
    """Medians of the seconds until all have restored, and made a step, of the processor's, and of loads; the bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    job = Job(megabytes, 1)
    job.step()
    nbytes = int(over_ranks(sum(tensor.nbytes for tensor in job.local_tensors())))
    kept = {}
    for name, folder in (("memory", Path(memory)), ("disk", Path(disk))):
        at = folder / f"save-{rank}"
        checkpoint.save(f"hosts://{at}/{STEP}", job.app)
        dist.barrier()
        kept[name] = folder / f"kept-{name}"
        kept[name].mkdir(exist_ok=True)
        for file in (at / STEP).iterdir():
            if file.name != RECORD_NAME or rank == 0:
                os.rename(file, kept[name] / file.name)
        dist.barrier()
    if rank == 0:  # what the store has: the same files, and the same manifest
        bucket = Path(memory) / "bucket" / "run" / STEP
        bucket.mkdir(parents=True)
        for file in kept["memory"].iterdir():
            os.link(file, bucket / (MANIFEST_NAME if file.name == RECORD_NAME else file.name))
    dist.barrier()
    sources: dict[str, Callable[[int], bool] | None] = {
        "memory of the same host": lambda writer: writer in (rank, (rank - 1) % size),
        "neighbours' memory, one host lost": lambda writer: rank > 0 and writer in (rank, (rank - 1) % size),
        "neighbours' memory, all hosts' own files lost": lambda writer: writer == (rank - 1) % size,
        "disk of the same host": lambda writer: writer == rank,
        "S3 at 200 MB/s": None,
    }
    restored: defaultdict[str, list[float]] = defaultdict(list)
    stepped: defaultdict[str, list[float]] = defaultdict(list)
    processor: defaultdict[str, list[float]] = defaultdict(list)
    number = 0
    for repetition in range(-1, repetitions):
        for name, is_wanted in sources.items():
            number += 1
            where = "disk" if name.startswith("disk") else "memory"
            base = Path(disk if where == "disk" else memory) / f"run-{number}"
            host = base / f"host-{rank}"
            root, tiers = str(base / "root"), []
            if is_wanted is None:
                root = f"s3://{BUCKET}/run"
            else:
                run = RunIdentity("0" * 32, root).pack()
                if rank == 0:
                    Path(root).mkdir(parents=True)
                    (Path(root) / RUN_NAME).write_bytes(run)
                dist.barrier()
                lay_out(kept[where], host, is_wanted)
                (host / LABEL_NAME).write_bytes(run)
                tiers = [Tier(str(host), every=1, copies=2 if where == "memory" else 1)]
            fresh = Job(megabytes, 1)
            dist.barrier()
            drop_from_cache(kept["disk"])
            with fresh_group(memory, number), reached(s3):
                begin, busy = time.perf_counter(), time.process_time()
                manager = checkpoint.Manager(root, every=1000, destinations=tiers)
                assert manager.restore(fresh.app, required=True) == 1
                seconds, busy = time.perf_counter() - begin, time.process_time() - busy
                restore_seconds, processor_seconds = slowest(seconds), over_ranks(busy)
                fresh.step()
                step_seconds = slowest(time.perf_counter() - begin)
                manager.close()
            if repetition >= 0:
                restored[name].append(restore_seconds)
                stepped[name].append(step_seconds)
                processor[name].append(processor_seconds)
            else:
                if job.app["step"] == 1:  # the step that has followed there
                    job.step()
                assert all(map(torch.equal, fresh.local_tensors(), job.local_tensors()))
            del fresh
            shutil.rmtree(host, ignore_errors=True)
    return {
        "restored": medians(restored),
        "stepped": medians(stepped),
        "processor": medians(processor),
        "loads": loads_of(job, kept["memory"], Path(memory), repetitions),
        "bytes": nbytes,
    }


def loads_of(job: Job, kept: Path, memory: Path, repetitions: int) -> dict[str, float]:
    """Medians of loads from the host's own memory, and of plain reads, in seconds and in seconds of the processor."""
    rank = dist.get_rank()
    host = memory / f"load-{rank}"
    lay_out(kept, host, lambda writer: writer == rank)
    (path,) = [file for file in (host / STEP).iterdir() if file.name != RECORD_NAME]
    flat: list[Any] = [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in job.local_tensors()]
    memories = [memoryview(each) for each in flat]

    def plain(begin: int = 0) -> None:
        fd = os.open(path, os.O_RDONLY)
        for each in memories:
            done = 0
            while done < each.nbytes:
                done += os.preadv(fd, [each[done:]], begin + done)
            begin += each.nbytes
        os.close(fd)

    def load() -> None:
        checkpoint.load(f"hosts://{host}/{STEP}", job.app)

    times: defaultdict[str, list[float]] = defaultdict(list)
    for repetition in range(-1, max(5, 3 * repetitions)):
        for name, run in (("plain read", plain), ("load", load)):
            dist.barrier()
            begin = time.process_time()
            seconds = slowest(timed(run)[0])
            processor = over_ranks(time.process_time() - begin)
            if repetition >= 0:
                times[name].append(seconds)
                times[name + ", processor"].append(processor)
    return medians(times)


def restore(arguments: argparse.Namespace) -> None:
    with folders(arguments) as (memory, disk):
        (Path(memory) / "bucket").mkdir()
        with served(f"{memory}/bucket", STORE_BYTES_PER_SECOND) as s3:
            took = on_ranks(4, restores, memory, disk, s3, arguments.megabytes, arguments.repetitions)
    restored, stepped, loads, nbytes = took["restored"], took["stepped"], took["loads"], took["bytes"]
    store, store_step = list(restored.values())[-1], list(stepped.values())[-1]
    rows = [
        (
            name,
            f"{seconds:.2f}",
            f"{store / seconds:.1f}",
            f"{stepped[name]:.2f}",
            f"{store_step / stepped[name]:.1f}",
            f"{nbytes / seconds / 1e6:.0f}",
            f"{took['processor'][name]:.2f}",
        )
        for name, seconds in restored.items()
    ]
    header = (
        "from",
        "restored, s",
        "times as fast as S3",
        "and stepped, s",
        "times as fast as S3",
        "MB/s",
        "processor, s",
    )
    ratio = loads["plain read"] / loads["load"]
    processor = loads["plain read, processor"] / loads["load, processor"]
    notes = (
        f"{nbytes / 2**30:.2f} GiB of AdamW's state on 4 ranks, each a host of its own (TCP on loopback), in a fresh "
        "process group each time. *Restored* is the time from `Manager(...)` until `restore()` has returned on the "
        "last rank, with the optimizers' state made. *Stepped* ends when the last rank has made its next step, while "
        "the restored files are verified and copied in the background. *Processor* is that of all ranks until then. "
        f"The S3 server sends {STORE_BYTES_PER_SECOND / 1e6:.0f} MB/s in all, without TLS. {load_note()}\n\n"
        f"A load from the host's own memory into existing state takes {1e3 * loads['load']:.0f} ms. A plain read of "
        f"the same files into the same tensors takes {1e3 * loads['plain read']:.0f} ms: the load has {ratio:.2f} of "
        f"its speed. In processor time it is {loads['load, processor']:.2f} s and "
        f"{loads['plain read, processor']:.2f} s, a ratio of {processor:.2f}. The load verifies every byte."
    )
    print(write_table("recovery", "Recovery: restores from memory, neighbours, disks and a store", header, rows, notes))


# Stall.

STAGES = {'stage="now"': "now", 'stage="lazy"': "lazy", "stage=None": None}


def stalls(memory: str, megabytes: float, repetitions: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved saves: of the stall, and of the processor's seconds of all ranks."""
    rank = dist.get_rank()
    job = Job(megabytes, BATCH)
    job.step()
    block = torch.zeros(sum(tensor.nbytes for tensor in job.local_tensors()), dtype=torch.uint8)
    managers = {
        name: checkpoint.Manager(
            f"{memory}/root-{number}",
            every=10**6,
            destinations=[Tier(f"{memory}/host-{rank}/{number}", every=1, keep_last=1)],
            stage=stage,  # type: ignore[arg-type]  # a str there, of which these are Stages
        )
        for number, (name, stage) in enumerate(STAGES.items())
    }
    for manager in managers.values():
        manager.restore(job.app)
    stall: defaultdict[str, list[float]] = defaultdict(list)
    processor: defaultdict[str, list[float]] = defaultdict(list)

    def memcpy() -> None:
        begin = block.data_ptr()
        for tensor in job.local_tensors():
            ctypes.memmove(begin, tensor.data_ptr(), tensor.nbytes)
            begin += tensor.nbytes

    for repetition in range(-3, repetitions):
        dist.barrier()
        begin = time.process_time()
        seconds = slowest(timed(memcpy)[0])
        took = {"memcpy": (seconds, over_ranks(time.process_time() - begin))}
        for number, (name, manager) in enumerate(managers.items()):
            took[f"{name}, over removed files"] = one_save(job, manager, STAGES[name])
            for spare in Path(f"{memory}/host-{rank}/{number}").glob(".spare-*"):
                spare.unlink()
            took[f"{name}, on new files"] = one_save(job, manager, STAGES[name])
        if repetition >= 0:
            for name, (seconds, busy) in took.items():
                stall[name].append(seconds)
                processor[name].append(busy)
    for manager in managers.values():
        manager.close()
    return {"stall": medians(stall), "processor": medians(processor)}


def one_save(job: Job, manager: checkpoint.Manager, stage: str | None) -> tuple[float, float]:
    """The stall of a save, and the processor's seconds of all ranks for it, without those of a step beside it."""
    if stage is None:
        job.app["step"] += 1
    dist.barrier()
    begin, training = time.process_time(), 0.0
    seconds, saved = timed(partial(manager.save, job.app["step"], job.app))
    if stage is not None:
        training = -time.thread_time()
        job.step()  # whose backward is what a lazy copy has time for
        training += time.thread_time()
        seconds = saved.result().stall_seconds
    manager.wait()
    return slowest(seconds), over_ranks(time.process_time() - begin - training)


def stall(arguments: argparse.Namespace) -> None:
    with folders(arguments) as (memory, _):
        results = on_ranks(2, stalls, memory, arguments.megabytes, max(5, 3 * arguments.repetitions))
    memcpy, busy = results["stall"]["memcpy"], results["processor"]["memcpy"]
    rows = [
        (
            name,
            f"{1e3 * seconds:.1f}",
            f"{seconds / memcpy:.2f}",
            f"{1e3 * results['processor'][name]:.0f}",
            f"{results['processor'][name] / busy:.1f}",
        )
        for name, seconds in results["stall"].items()
    ]
    header = ("a save to memory", "stall, ms", "/ memcpy", "processor, ms of all ranks", "/ memcpy")
    notes = (
        f"{arguments.megabytes} MiB of AdamW's state on each of 2 ranks, each a host of its own, on a tier in /dev/shm "
        "that keeps one save. The stall is the call and what the next step waited for, on the slowest rank; the "
        "processor's time is that of the save without the step: checksums, commit, removal of the previous checkpoint. "
        f"Medians of interleaved saves, from the third on. {load_note()}"
    )
    print(write_table("recovery_stall", "The stall of saves to memory", header, rows, notes))


# Copying.

BLOCK_STEPS = 10


def copying_steps(memory: str, megabytes: float, rounds: int, with_free_core: bool) -> dict[str, float]:
    """Medians over blocks of steps, each with one save: of the seconds of a block, and of the processor's."""
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    job = Job(megabytes, BATCH)
    job.step()
    managers = {
        name: checkpoint.Manager(
            f"{memory}/root-{name}",
            every=10**6,
            destinations=[Tier(f"{memory}/host-{rank}/{name}", every=1, keep_last=1, copies=copies)],
            stage="lazy",
        )
        for name, copies in (("copied", 2), ("not copied", 1))
    }
    for manager in managers.values():
        manager.restore(job.app)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for repetition in range(-2, rounds):
        for name, manager in [*managers.items()][:: 1 if repetition % 2 else -1]:
            dist.barrier()
            busy = time.process_time()
            begin = time.perf_counter()
            manager.save(job.app["step"], job.app)  # its threads may run on any core
            if with_free_core:
                os.sched_setaffinity(0, cores[:1])  # of this thread alone
            for _ in range(BLOCK_STEPS):
                job.step()
            seconds = time.perf_counter() - begin
            os.sched_setaffinity(0, cores)
            late = timed(manager.wait)[0]
            seconds, late = slowest(seconds), slowest(late)
            busy = over_ranks(time.process_time() - busy)
            if repetition >= 0:
                times[name].append(seconds)
                times[f"{name}, late"].append(late)
                times[f"{name}, processor"].append(busy)
    for manager in managers.values():
        manager.close()
    return medians(times)


def copying(arguments: argparse.Namespace) -> None:
    megabytes, rounds = arguments.megabytes / 4, max(5, 8 * arguments.repetitions)
    rows = []
    for with_free_core in (True, False):
        with folders(arguments) as (memory, _):
            took = on_ranks(2, copying_steps, memory, megabytes, rounds, with_free_core)
        on, off = took["copied"], took["not copied"]
        more = took["copied, processor"] - took["not copied, processor"]
        rows.append(
            (
                "training on one core, another free" if with_free_core else "training on all cores",
                f"{1e3 * off / BLOCK_STEPS:.0f}",
                f"{1e3 * on / BLOCK_STEPS:.0f}",
                f"{100 * (on / off - 1):+.1f} %",
                f"{1e3 * more / (2 * megabytes / 1024):.0f}",
                f"{megabytes * 2**20 / off / 1e6:.0f}",
                f"{1e3 * took['copied, late']:.0f}",
            )
        )
    header = (
        "",
        "a step, saves not copied, ms",
        "copied, ms",
        "more",
        "processor, ms for a GiB copied, both ends",
        "MB/s copied by a host",
        "copied after the steps, ms",
    )
    notes = (
        f"2 ranks, each a host of its own, {megabytes:g} MiB of state each, saved to memory (lazily) every "
        f"{BLOCK_STEPS} steps; TCP on loopback. In the first row the training's thread stays on one core; no other "
        f"thread does. Medians of {rounds} blocks of {BLOCK_STEPS} steps in turns. {load_note()}"
    )
    print(write_table("recovery_copying", "What copies for other hosts take from the training", header, rows, notes))


@contextmanager
def folders(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """A folder in memory, and one on the disk."""
    with (
        tempfile.TemporaryDirectory(dir=arguments.memory) as memory,
        tempfile.TemporaryDirectory(dir=arguments.disk) as disk,
    ):
        yield memory, disk


def load_note() -> str:
    return f"The load of the machine was {os.getloadavg()[0]:.1f} at the end."


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"restore": restore, "stall": stall, "copying": copying}
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    parser.add_argument("--megabytes", type=int, default=256, help="of state on each rank")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--disk", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    for part in arguments.parts or parts:
        parts[part](arguments)


if __name__ == "__main__":
    main()
