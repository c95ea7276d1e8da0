"""The cost of a step that touches a few rows of a large table, against torch's own on a plain table.

    python -m benchmarks.sparse [--repetitions 10] [--rounds 18]
    python -m benchmarks.sparse --cuda      # on a GPU: the row-wise kernel against the card's memory bandwidth

4,096 touched rows of 64 fp32 elements, of 1,000,000 and of 4,000,000 rows. Ours are keyed optimizers over a DTensor
whose gradient is sparse. All peers of one algorithm work on the same memory, parameter and state, and take turns; times
are those of the thread, so that a machine that others use too tells the same ratios.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # from a compiled module
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

import shardopt
from benchmarks.peers import interleaved, write_table
from shardopt.algorithms.row_wise import row_rules

SIZES, DIMENSION, TOUCHED, BATCHES = (1_000_000, 4_000_000), 64, 4096, 8
TORCHS, AGAIN = "torch.optim.SparseAdam", "torch.optim.SparseAdam again"
ADAGRAD, DENSE = "torch.optim.Adagrad, sparse", "torch.optim.Adagrad, dense"
OURS = {"keyed SparseAdam": 1.05, "RowWiseAdagrad": 0.7, "RowWiseAdam": 0.7}
"""Peers of ours, and the most of SparseAdam's time on a plain table that they may take."""
MOST_GROWTH = 1.3


class Table:
    """A table as a plain parameter and as a DTensor over the same memory, and the optimizers on it."""

    def __init__(self, rows: int) -> None:
        memory = torch.zeros(rows, DIMENSION).uniform_(-0.01, 0.01)
        mesh = init_device_mesh("cpu", (1,))
        self.plain = torch.nn.Parameter(memory)
        self.sharded = torch.nn.Parameter(DTensor.from_local(memory, mesh, [Shard(0)], run_check=False))
        ids = [torch.randint(rows, (1, TOUCHED)) for _ in range(BATCHES)]
        values = [torch.randn(TOUCHED, DIMENSION) for _ in range(BATCHES)]
        self.gradients = [
            torch.sparse_coo_tensor(index, given, memory.shape, check_invariants=False)
            for index, given in zip(ids, values, strict=True)
        ]
        spec = self.sharded._spec  # type: ignore[attr-defined]  # a DTensor's
        self.of_sharded = [_dtensor(gradient, spec) for gradient in self.gradients]

    def peers(self) -> dict[str, Callable[[int], Any]]:
        """Name → a step with one of the sparse gradients."""
        torchs, again = (torch.optim.SparseAdam([self.plain]) for _ in range(2))
        adagrad = torch.optim.Adagrad([self.plain])
        ours = {name: shardopt.keyed(name.removeprefix("keyed "), {"table": self.sharded}, lr=1e-3) for name in OURS}
        peers = {
            TORCHS: self._step(torchs, False),
            AGAIN: self._step(again, False),
            ADAGRAD: self._step(adagrad, False),
            **{name: self._step(optimizer, True) for name, optimizer in ours.items()},
        }
        for run in peers.values():
            run(0)
        state, same = torchs.state[self.plain], again.state[self.plain]
        for name in ("exp_avg", "exp_avg_sq"):
            same[name] = state[name]
            wrapped = _dtensor(state[name], self.sharded._spec)  # type: ignore[attr-defined]  # a DTensor
            ours["keyed SparseAdam"].state[self.sharded][name] = wrapped
        return peers

    def dense(self) -> Callable[[int], Any]:
        """A step of torch's Adagrad with a dense gradient, for which all rows are worked on."""
        optimizer = torch.optim.Adagrad([self.plain])
        gradient = torch.zeros_like(self.plain)
        for index in self.gradients:
            gradient.add_(index)

        def run(_: int) -> None:
            self.plain.grad = gradient
            optimizer.step()

        return run

    def _step(self, optimizer: torch.optim.Optimizer, sharded: bool) -> Callable[[int], Any]:
        parameter, gradients = (self.sharded, self.of_sharded) if sharded else (self.plain, self.gradients)

        def run(repetition: int) -> None:
            parameter.grad = gradients[repetition % BATCHES]
            optimizer.step()

        return run


def allocated(run: Callable[[int], Any]) -> int:
    """The bytes that the operations of a step have allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(0)
    return sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events() or ())


@dataclass(frozen=True)
class Cost:
    """Of a step: seconds, its ratio to torch's SparseAdam's, and the bytes that it allocates."""

    seconds: float
    ratio: float
    allocated: int


def measured(rows: int, repetitions: int, rounds: int) -> dict[str, Cost]:
    """Times a step of each peer: medians over rounds of the medians of a round.

    In a round all work under the same load.
    """
    table = Table(rows)
    peers = table.peers()
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(rounds):
        # Another order each time: who comes before leaves memory that is quick or slow to get.
        order = random.Random(turn).sample(list(peers), len(peers))
        taken = interleaved({name: peers[name] for name in order}, repetitions, warm_up=3, clock=time.thread_time)
        for name, each in taken.items():
            seconds[name].append(each)
    costs = {}
    for name, each_round in seconds.items():
        ratios = [own / torchs for own, torchs in zip(each_round, seconds[TORCHS], strict=True)]
        costs[name] = Cost(statistics.median(each_round), statistics.median(ratios), allocated(peers[name]))
    peers.clear()
    dense = table.dense()
    taken_dense = interleaved({DENSE: dense}, 3, warm_up=1, clock=time.thread_time)[DENSE]
    return {**costs, DENSE: Cost(taken_dense, taken_dense / costs[TORCHS].seconds, allocated(dense))}


def on_cpu(repetitions: int, rounds: int) -> str:
    small, large = (measured(rows, repetitions, rounds) for rows in SIZES)
    rows = []
    for name, few in small.items():
        many = large[name]
        growth, more = many.seconds / few.seconds, many.allocated / few.allocated
        goal = ""
        if name in OURS:
            met = max(few.ratio, many.ratio) <= OURS[name] and max(growth, more) <= MOST_GROWTH
            goal = f"≤ {OURS[name]:g}, growth ≤ {MOST_GROWTH:g}: {'met' if met else 'missed'}"
        times = [f"{each.seconds * 1e3:.2f} ms" for each in (few, many)]
        ratios = [f"{each.ratio:.3f}" for each in (few, many)]
        rows.append([name, *times, *ratios, f"{growth:.2f}", f"{few.allocated / 2**20:.1f} MiB", f"{more:.2f}", goal])
    notes = (
        f"{TOUCHED:,} touched rows of {DIMENSION} fp32 elements, one thread; thread time. Peers take turns and change "
        f"places; medians of {rounds} rounds of {repetitions} repetitions. {fbgemm()}"
    )
    header = [
        "step",
        *(f"{size / 1e6:g} M rows" for size in SIZES),
        *(f"of SparseAdam's, {size / 1e6:g} M" for size in SIZES),
        "growth of time",
        "allocated",
        "growth of it",
        "target",
    ]
    return write_table("sparse", "Steps that touch a few rows of a table", header, rows, notes)


def fbgemm() -> str:
    """Whether FBGEMM's table optimizers can be put beside."""
    try:
        importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError) as error:
        return f"fbgemm-gpu-cpu is not beside them: {error}."
    return "fbgemm_gpu imports here; its own steps are fused with its look-ups and are not timed apart."


def on_gpu(repetitions: int) -> str:
    """The row-wise update of touched rows, as a fraction of the bandwidth that a plain copy reaches."""
    device = torch.device("cuda")
    big = torch.empty(1 << 28, device=device)
    copied = _gpu_seconds(lambda: big.clone(), repetitions)
    bandwidth = 2 * big.nbytes / copied
    rows = []
    for touched in (TOUCHED, 1 << 18):
        for rule, elements in ((row_rules.ADAGRAD, 3), (row_rules.ADAM, 5)):
            bytes_needed, seconds = _rule_on_gpu(rule, elements, touched, device, repetitions)
            share = bytes_needed / seconds / bandwidth
            rows.append([rule.moments, f"{touched:,}", f"{seconds * 1e6:.1f} µs", f"{share:.0%}", "≥ 60%"])
    header = ["moments", "touched rows", "time", "of the bandwidth of a copy", "aim"]
    return write_table("sparse_cuda", "Row-wise updates on a GPU", header, rows)


def _rule_on_gpu(
    rule: row_rules.RowRule, elements: int, touched: int, device: torch.device, repetitions: int
) -> tuple[int, float]:
    """Bytes that touched rows need (`elements` accesses of a row, two of a moment, one of an id), and seconds."""
    table = torch.zeros(SIZES[1], DIMENSION, device=device)
    state = {rule.moments: torch.zeros(SIZES[1], 1, device=device)}
    state |= {name: torch.zeros_like(table) for name in rule.others}
    options = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "betas": (0.9, 0.999), "maximize": False}
    index = torch.randperm(SIZES[1], device=device)[:touched].sort().values
    gradients = torch.randn(touched, DIMENSION, device=device)
    seconds = _gpu_seconds(
        lambda: row_rules.update_rows(rule, table, index, gradients, state, rule.numbers(options, 1.0)), repetitions
    )
    return touched * (elements * DIMENSION * 4 + 2 * 4 + 8), seconds


def _dtensor(local: Tensor, spec: Any) -> DTensor:
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's


def _gpu_seconds(run: Callable[[], Any], repetitions: int) -> float:
    times: list[float] = []
    for repetition in range(repetitions + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if repetition >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--repetitions", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=18)
    arguments.add_argument("--cuda", action="store_true", help="measure the kernel for GPUs instead")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.cuda:
        print(on_gpu(given.repetitions))
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    print(on_cpu(given.repetitions, given.rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
