"""Plans of embedding tables by `plan_tables` and by torchrec's EmbeddingShardingPlanner, under one cost model: ours.

    PYTHONPATH=$PWD/out/integrations python -m benchmarks.table_plans     # without torchrec only ours are shown

torchrec plans for a Topology of as many GPUs with the same memory, batch, pooling and fused optimizer, as one host of
up to 8 ranks each; no process is started. Its plan is given to `plan_tables` with all cuts kept, which says what it
costs here. torchrec counts costs of its own kernels and exchanges, of pooled vectors, so that this says how well the
plans suit shardopt's tables, and not which planner is better at its own. Two of its pieces of one table on one rank
count as pieces on that rank and the next ones that have none.
"""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.peers import write_table
from shardopt.errors import InputError
from shardopt.nn import Grid, Table, TablePlan, plan_tables

MEMORY, BATCH, ALGORITHM = 80 * 10**9, 4096, "row_wise_adagrad"
SETS = ((8, 2), (12, 4), (20, 8), (40, 8))
LARGE = ((300, 64), (1000, 128), (1000, 1024))  # ours alone: torchrec's would take many minutes


def tables_of(count: int, seed: int) -> tuple[list[Table], dict[str, float]]:
    """Returns tables of hundreds to a hundred million rows, and ids per sample."""
    draw = random.Random(seed)
    names = [f"t{number}" for number in range(count)]
    tables = [Table(name, int(10 ** draw.uniform(2, 8)), draw.choice((16, 32, 64, 128))) for name in names]
    return tables, {name: float(draw.choice((1, 1, 2, 5, 20, 80))) for name in names}


def ours(tables: Sequence[Table], ranks: int, pooling: dict[str, float], keep: Sequence[str] = ()) -> TablePlan:
    """Returns our plan, or what a plan with these cuts costs."""
    return plan_tables(tables, ranks, MEMORY, batch=BATCH, pooling=pooling, algorithm=ALGORITHM, keep=keep)


def torchrec_cuts(tables: Sequence[Table], ranks: int, pooling: dict[str, float]) -> list[Table]:
    """Returns the tables with the cuts that torchrec plans."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            name=table.name,
            embedding_dim=table.embedding_dim,
            num_embeddings=table.num_embeddings,
            feature_names=[f"{table.name}_ids"],
        )
        for table in tables
    ]
    model = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    fused = {"optimizer": _rowwise_adagrad()}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, local_world_size=min(8, ranks), compute_device="cuda", hbm_cap=MEMORY),
        batch_size=BATCH,
        constraints={name: ParameterConstraints(pooling_factors=[ids]) for name, ids in pooling.items()},
    )
    (plan,) = planner.plan(model, [EmbeddingBagCollectionSharder(fused_params=fused)]).plan.values()
    return [replace(table, cut=_cut(table, ranks, plan[table.name])) for table in tables]


def _rowwise_adagrad() -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return EmbOptimType.EXACT_ROWWISE_ADAGRAD


def _cut(table: Table, ranks: int, planned: Any) -> Any:
    """Returns a cut with as many parts of rows and columns, on the same ranks where each has one piece."""
    if planned.sharding_type == "data_parallel":
        return "replicated"
    shards = [shard for shard in planned.sharding_spec.shards if 0 not in shard.shard_sizes]
    rows = len({shard.shard_offsets[0] for shard in shards})
    columns = len({shard.shard_offsets[1] for shard in shards})
    held: list[int] = []
    for shard in sorted(shards, key=lambda shard: tuple(shard.shard_offsets)):
        rank = shard.placement.rank()
        held.append(next(each % ranks for each in range(rank, rank + ranks) if each % ranks not in held))
    return "rows" if (rows, columns) == (ranks, 1) else Grid(rows, columns, tuple(held))


def row_of(count: int, ranks: int, with_torchrec: bool) -> list[str]:
    """Returns a line of the table: costs by our model, relative to the bound, and seconds of the processor."""
    tables, pooling = tables_of(count, count)
    start = time.process_time()
    plan = ours(tables, ranks, pooling)
    spent = time.process_time() - start
    row = [f"{count}", f"{ranks}", f"{1e3 * plan.seconds:.2f} ms", f"{plan.seconds / plan.bound:.3f}", f"{spent:.2f} s"]
    if not with_torchrec:
        return [*row, "", "", ""]
    start = time.process_time()
    cut = torchrec_cuts(tables, ranks, pooling)
    spent = time.process_time() - start
    try:
        theirs = ours(cut, ranks, pooling, keep=[table.name for table in cut])
    except InputError:
        return [*row, "over the memory", "", f"{spent:.2f} s"]
    if plan.seconds > theirs.seconds * (1 + 1e-9):
        raise AssertionError(f"{count} tables on {ranks} ranks: torchrec's plan costs less, {theirs.seconds} s")
    return [*row, f"{1e3 * theirs.seconds:.2f} ms", f"{theirs.seconds / plan.bound:.3f}", f"{spent:.2f} s"]


def main() -> None:
    """Measures, and writes table_plans.md."""
    try:
        import torchrec
    except ImportError:
        torchrec = None
    warnings.filterwarnings("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    rows = [row_of(*each, torchrec is not None) for each in SETS] + [row_of(*each, False) for each in LARGE]
    version = f"torchrec {torchrec.__version__}" if torchrec is not None else "torchrec, which is not installed here"
    header = [
        "tables",
        "ranks",
        "cost",
        "of the bound",
        "processor",
        *(f"torchrec: {h}" for h in ("cost", "of the bound", "processor")),
    ]
    notes = (
        f"Plans by `plan_tables` and by {version}: both under shardopt's cost model, for shardopt's exchanges. A "
        "cost is the seconds of the busiest rank in a step; no plan is below the bound. torchrec plans for its own "
        "kernels and for exchanges of pooled vectors, so its plans may be good there. Random tables, RowWiseAdagrad, "
        f"{BATCH} samples and {MEMORY / 1e9:.0f} GB a rank; hosts of 8 ranks."
    )
    print(write_table("table_plans", "Plans for embedding tables", header, rows, notes))


if __name__ == "__main__":
    main()
