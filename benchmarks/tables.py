"""Steps of sharded embedding tables, fused in backward, beside torchrec's on the same ids; and the bytes they exchange.

    python -m benchmarks.tables [--cut rows] [--ranks 2] [--repetitions 10] [--rounds 6] [--profile]
    PYTHONPATH=.:out/integrations python -m benchmarks.tables      # with torchrec, from launch/test_integrations.sh

Four tables of 100,000 rows of 64 fp32 elements; 512 bags of ten ids for each table and rank. A step looks up, pools,
and moves the touched rows in backward. Ids are the same for all, and ready. Losses of row-wise Adagrad are compared
before anything is timed: ours and torchrec's have to do the same work.

Bytes are those that leave rank 0 in a step, by the arguments of its collectives; an all-reduce is counted as a ring.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.peers import in_turns, on_ranks, write_table
from shardopt.nn import ShardedEmbeddingBag, Table
from shardopt.nn.table import Cut, Grid
from shardopt.optim import RowWiseAdagrad

TABLES, ROWS, WIDTH, BAGS, POOLING, BATCHES = 4, 100_000, 64, 512, 10, 8
CUTS = ("rows", "columns", "whole", "replicated", "grid")
OURS = {"row-wise Adagrad": "RowWiseAdagrad", "row-wise Adam": "RowWiseAdam", "Adam": "SparseAdam"}
COMPARED = "row-wise Adagrad"
TORCHRECS = f"torchrec, {COMPARED}"
RATE, EPS = 0.1, 1e-8

Step = Callable[[int], Tensor]
"""Takes the step of a number; returns its loss on this rank."""


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ids, [tables, bags x pooling], and the weights of a loss, [bags, tables x width], of this rank."""
    for number in range(BATCHES):
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        ids = torch.randint(ROWS, (TABLES, BAGS * POOLING), generator=generator)
        yield ids, torch.randn(BAGS, TABLES * WIDTH, generator=generator) / BAGS


def names() -> list[str]:
    return [f"table{number}" for number in range(TABLES)]


def cut_of(cut: str, ranks: int) -> Cut:
    """Returns a cut by name; a grid has two parts of the columns where ranks are even."""
    columns = 2 if ranks % 2 == 0 else 1
    cuts: dict[str, Cut] = {"rows": "rows", "columns": "columns", "whole": "whole", "replicated": "replicated"}
    return cuts[cut] if cut in cuts else Grid(ranks // columns, columns)


def ours(cut: str, algorithm: str) -> Step:
    ranks = dist.get_world_size()
    tables = [
        Table(name, ROWS, WIDTH, mode="sum", init=torch.nn.init.zeros_, cut=cut_of(cut, ranks)) for name in names()
    ]
    bags = ShardedEmbeddingBag(tables, init_device_mesh("cpu", (ranks,)), mean_gradients=True)
    bags.fuse(algorithm, lr=RATE, eps=EPS)
    offsets = torch.arange(BAGS) * POOLING
    given = [
        ({name: (of_table, offsets) for name, of_table in zip(names(), ids, strict=True)}, weights)
        for ids, weights in batches()
    ]

    def step(number: int) -> Tensor:
        ids, weights = given[number % BATCHES]
        pooled = bags(ids)
        loss = (torch.cat([pooled[name] for name in ids], dim=1) * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss.detach()

    return step


def torchrecs(cut: str) -> Step:
    """A step of DistributedModelParallel. What has no fused kernel, data-parallel tables, steps by torchrec's class."""
    warnings.simplefilter("ignore")  # of torchrec, about what it will remove
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel, sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TorchrecsAdagrad

    ranks, device = dist.get_world_size(), torch.device("cpu")
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(ranks))  # by which torchrec knows a host
    plans = {
        "rows": lambda number: sharding_plan.row_wise(),
        "columns": lambda number: sharding_plan.column_wise(ranks=[*range(ranks)]),
        "whole": lambda number: sharding_plan.table_wise(rank=number % ranks),
        "replicated": lambda number: sharding_plan.data_parallel(),
    }
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name], init_fn=torch.nn.init.zeros_
        )
        for name in names()
    ]
    bags = torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=device))
    if cut != "replicated":
        apply_optimizer_in_backward(TorchrecsAdagrad, bags.parameters(), {"lr": RATE, "eps": EPS})
    sharder = EmbeddingBagCollectionSharder()
    of_tables = {name: plans[cut](number) for number, name in enumerate(names())}
    plan = sharding_plan.construct_module_sharding_plan(bags[0], of_tables, sharder, ranks, ranks, device_type="cpu")
    parallel = DistributedModelParallel(bags, device=device, plan=ShardingPlan({"0": plan}), sharders=[sharder])
    dense = RowWiseAdagrad(parallel.parameters(), lr=RATE, eps=EPS) if cut == "replicated" else None
    lengths = torch.full((TABLES * BAGS,), POOLING, dtype=torch.int32)
    given = [
        (KeyedJaggedTensor.from_lengths_sync(names(), ids.flatten(), lengths), weights) for ids, weights in batches()
    ]

    def step(number: int) -> Tensor:
        ids, weights = given[number % BATCHES]
        pooled = parallel(ids).to_dict()  # whose values follow the ranks of whole tables
        loss = (torch.cat([pooled[name] for name in names()], dim=1) * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        if dense is not None:
            dense.step()
            dense.zero_grad()
        return loss.detach()

    return step


def peers_of(cut: str) -> dict[str, Step]:
    peers = {name: ours(cut, algorithm) for name, algorithm in OURS.items()}
    if has_torchrec() and cut != "grid":  # which wants several hosts of torchrec
        peers[TORCHRECS] = torchrecs(cut)
    return peers


def has_torchrec() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts the bytes that leave this rank, by the name of the collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.by_name: defaultdict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name != "barrier":
            self.by_name[name] += sent_bytes(name, args)
        return func(*args, **(kwargs or {}))


def sent_bytes(name: str, args: Sequence[Any]) -> int:
    """Returns the bytes that a rank sends to others in a collective, by its arguments."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if name == "alltoall_base_":
        data, splits = args[1], args[4]
        own = splits[rank] if splits else len(data) // ranks
        return int(data[:1].nbytes * (len(data) - own))
    first, second = (
        [each.nbytes for each in tree_leaves(given) if isinstance(each, Tensor)] for given in (args[:1], args[1:2])
    )
    if name == "allreduce_":
        return 2 * sum(first) * (ranks - 1) // ranks
    if name == "alltoall_":  # outputs, and then an input for each rank
        return sum(second) - second[rank]
    if name in ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return sum(second) * (ranks - 1) // ranks
    if name in ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"):
        return sum(second) * (ranks - 1)
    raise NotImplementedError(f"the bytes of {name}, which a step has begun to call")


def measured(cut: str, repetitions: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns of each peer the seconds and processor seconds of a step, and the bytes sent in one. Collective."""
    peers = peers_of(cut)
    losses = {name: [step(number).item() for number in range(3)] for name, step in peers.items()}
    if TORCHRECS in peers and cut != "columns":  # whose parts torchrec moves by their own means
        torch.testing.assert_close(losses[TORCHRECS], losses[COMPARED], rtol=1e-4, atol=1e-6)
    sent = {}
    for name, step in peers.items():
        with SentBytes() as counted:
            step(3)
        sent[name] = dict(counted.by_name)
    seconds = in_turns(peers, repetitions, rounds)
    processor = in_turns(peers, repetitions, rounds, clock=time.process_time)
    return {name: {"seconds": seconds[name], "processor": processor[name], "sent": sent[name]} for name in peers}


def profiled(cut: str) -> str:
    """Returns what the processor does in ten steps of ours and of torchrec's, on rank 0. Collective."""
    tables = []
    for name, step in peers_of(cut).items():
        if name not in (COMPARED, TORCHRECS):
            continue
        for number in range(3):
            step(number)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for number in range(10):
                step(number)
        tables.append(f"{name}\n{profiler.key_averages().table(sort_by='self_cpu_time_total', row_limit=22)}")
    return "\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", choices=CUTS, nargs="+", default=["rows"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", action="store_true", help="print what a step's time is made of instead")
    given = parser.parse_args()
    if given.profile:
        print("\n".join(on_ranks(given.ranks, profiled, cut) for cut in given.cut))
        return
    rows = []
    for cut in given.cut:
        found = on_ranks(given.ranks, measured, cut, given.repetitions, given.rounds)
        base = found[COMPARED]
        for name, each in found.items():
            ratios = [f"{each[clock] / base[clock]:.2f}" for clock in ("seconds", "processor")]
            nbytes = sum(each["sent"].values())
            steps = f"{1 / each['seconds']:.1f}"
            rows.append([cut, name, steps, *ratios, f"{each['processor'] * 1e3:.1f} ms", f"{nbytes / 1e6:.2f} MB"])
    notes = (
        f"{TABLES} tables of {ROWS:,} × {WIDTH} in fp32, {BAGS} bags of {POOLING} ids a table and rank, {given.ranks} "
        f"ranks of one thread on gloo. Peers take turns and change places; medians of {given.rounds} rounds of "
        f"{given.repetitions} steps. {'' if has_torchrec() else 'torchrec is not installed, and ours are alone. '}"
        "FBGEMM has no fused Adam for CPUs. Adam is SparseAdam."
    )
    beside = [f"{what}, of ours by {COMPARED}" for what in ("time", "processor time")]
    header = ["cut", "step", "steps a second", *beside, "processor time", "sent by a rank"]
    print(write_table("tables", "Steps of sharded embedding tables", header, rows, notes))


if __name__ == "__main__":
    main()
