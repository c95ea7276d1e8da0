"""The stall of training by a save in the background, against a memcpy and against DCP in the same run.

python -m benchmarks.async_save [--ranks 2] [--megabytes 512] [--repetitions 5] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardopt
from benchmarks import dcp, raw_io
from benchmarks.peers import on_ranks, write_table
from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.state.flatten import flatten

WIDTH = 2048
BATCH = 64


class Begun(NamedTuple):
    """A save under way: whether it is done here; waits for it, and gives how many seconds steps waited for it."""

    done: Callable[[], bool]
    wait: Callable[[], float]


class Layers(nn.Module):
    """Matrices sharded by rows over all ranks, each of which multiplies with its own rows alone: nobody waits for
    others, so that what is measured is the saves."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shape = torch.Size((WIDTH * mesh.size(), WIDTH))
        locals_ = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(layers)]
        self.weights = nn.ParameterList(
            DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(WIDTH, 1)) for local in locals_
        )
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.weights:
            inputs = torch.tanh(inputs @ weight.to_local())
        self.seen += 1
        return inputs


class Job:
    """A model, its optimizer, and one step of training."""

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(dist.get_rank())
        layers = max(1, (megabytes << 20) // (3 * 4 * WIDTH * WIDTH))  # weights and two moments
        self.model = Layers(layers)
        self.optimizer = shardopt.keyed("adamw", self.model.named_parameters(), lr=1e-4)
        self.app: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.inputs = torch.randn(BATCH, WIDTH)
        self.step()

    def step(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.app["step"] += 1

    def local_tensors(self) -> list[Tensor]:
        return [each.to_local() if isinstance(each, DTensor) else each for each in flatten(self.app).tensors().values()]


def peers_of(job: Job, folder: str) -> dict[str, Callable[[str], Begun]]:
    """Name → begins a save to a path, or to a file of its own in the folder."""
    block = torch.zeros(sum(tensor.nbytes for tensor in job.local_tensors()), dtype=torch.uint8)
    savers = {terms: AsyncSaver() for terms in (("now", False), ("lazy", False), ("now", True))}
    group = dist.new_group(backend="gloo")
    kept = DefaultStager(StagingOptions(torch.cuda.is_available(), False, False, torch.cuda.is_available()))

    def memcpy(path: str) -> Begun:
        begin = block.data_ptr()
        for tensor in job.local_tensors():
            ctypes.memmove(begin, tensor.data_ptr(), tensor.nbytes)
            begin += tensor.nbytes
        return Begun(lambda: True, lambda: 0.0)

    raw = raw_io.writers(f"{folder}/raw-{dist.get_rank()}", [block.numpy().data], durable=True)
    write = raw.get(raw_io.DIRECT) or raw[f"{raw_io.PREFIX}8 MiB"]

    def memcpy_then_write(path: str) -> Begun:
        memcpy(path)
        writing = threading.Thread(target=write, args=(0,))
        writing.start()

        def wait() -> float:
            writing.join()
            return 0.0

        return Begun(lambda: not writing.is_alive(), wait)

    def ours(stage: Any, durable: bool = False) -> Callable[[str], Begun]:
        def begin(path: str) -> Begun:
            pending = savers[stage, durable].save(path, job.app, SaveTerms(durable=durable), stage=stage)
            return Begun(pending.done.is_set, lambda: pending.result().stall_seconds - pending.call_seconds)

        return begin

    def by_dcp(stager: DefaultStager | None, durable: bool = False) -> Callable[[str], Begun]:
        def begin(path: str) -> Begun:
            state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "step": job.app["step"]}
            writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=durable, thread_count=1)
            future: Any = dcp.async_save(state, storage_writer=writer, process_group=group, async_stager=stager)

            def wait() -> float:
                future.result()
                return 0.0

            return Begun(future.done, wait)

        return begin

    return {
        "memcpy of the local state": memcpy,
        'async_save, stage="now"': ours("now"),
        'async_save, stage="lazy"': ours("lazy"),
        "DCP, default": by_dcp(None),
        "DCP, kept stager": by_dcp(kept),
        "memcpy, then a raw write, durable": memcpy_then_write,
        'async_save, stage="now", durable': ours("now", durable=True),
        "DCP, kept stager, durable": by_dcp(kept, durable=True),
    }


def measure(megabytes: int, repetitions: int, folder: str) -> dict[str, Any]:
    """Medians over interleaved saves: of the stall, of the step that began right after the call, and of the whole
    save, with training beside it until its end.
    """
    job = Job(megabytes)
    begins = peers_of(job, folder)
    stalls: defaultdict[str, list[float]] = defaultdict(list)
    steps: defaultdict[str, list[float]] = defaultdict(list)
    wholes: defaultdict[str, list[float]] = defaultdict(list)
    quiet: list[float] = []
    for repetition in range(-1, repetitions):
        for name, begin_save in begins.items():
            for _ in range(2):
                quiet_seconds = slowest(timed(job.step)[0])
            path = f"{folder}/save"
            dist.barrier()
            begin = time.perf_counter()
            call_seconds, save = timed(partial(begin_save, path))
            during_seconds, _ = timed(job.step)
            while slowest(0.0 if save.done() else 1.0):  # until it is done on all ranks
                job.step()
            stall = slowest(call_seconds + save.wait())
            whole = slowest(time.perf_counter() - begin)
            during_seconds = slowest(during_seconds)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            dist.barrier()
            if repetition >= 0:
                stalls[name].append(stall)
                steps[name].append(during_seconds)
                wholes[name].append(whole)
                quiet.append(quiet_seconds)
    return {
        "stall": {name: statistics.median(seconds) for name, seconds in stalls.items()},
        "step": {name: statistics.median(seconds) for name, seconds in steps.items()},
        "whole": {name: statistics.median(seconds) for name, seconds in wholes.items()},
        "quiet": statistics.median(quiet),
        "bytes": sum(tensor.nbytes for tensor in job.local_tensors()),
    }


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def slowest(seconds: float) -> float:
    """Of all ranks."""
    took = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=512, help="of state on each rank")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        arguments_of_measure = (arguments.megabytes, arguments.repetitions, folder)
        results = on_ranks(arguments.ranks, measure, *arguments_of_measure)
        alone = on_ranks(1, measure, *arguments_of_measure)
    memcpy, quiet = results["stall"]["memcpy of the local state"], results["quiet"]
    now, lazy = results["stall"]['async_save, stage="now"'], results["stall"]['async_save, stage="lazy"']
    rows = [
        (
            name,
            f"{1000 * stall:.1f}",
            f"{stall / memcpy:.3f}",
            f"{stall / now:.2f}",
            f"{stall / lazy:.1f}",
            f"{results['whole'][name]:.2f}",
            f"{results['step'][name] / quiet:.2f}",
            f"{alone['step'][name] / alone['quiet']:.2f}",
        )
        for name, stall in results["stall"].items()
    ]
    notes = (
        f"{results['bytes'] / 2**20:.0f} MiB of state on each of {arguments.ranks} ranks (gloo, one thread each), "
        f"written without fsync but where it says durable; a step without a save takes {1000 * quiet:.0f} ms. The "
        "stall is the call and what steps waited for. *Whole* is from the call to the end of the step in which the "
        "save ended, with training beside it. The raw write is by one thread past the page cache, where the file "
        "system can: what a durable write of these bytes costs on this machine. "
        "The next step begins right after the call; its time is divided by that of a step without a save, with "
        f"{arguments.ranks} ranks, and with one rank, which leaves the other cores free. DCP saves with a process "
        "group of its own. Medians of interleaved saves, of the slowest rank each."
    )
    header = ("", "stall, ms", "/ memcpy", "/ ours now", "/ ours lazy", "whole, s", "next step", "with one rank")
    print(
        write_table("async_save", "Saving in the background, against torch.distributed.checkpoint", header, rows, notes)
    )


if __name__ == "__main__":
    main()
