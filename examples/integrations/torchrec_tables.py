"""Trains tables that torchrec shards, and goes on under another plan, on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/integrations/torchrec_tables.py out/tables --plan row-wise
    torchrun --standalone --nproc-per-node 3 examples/integrations/torchrec_tables.py out/tables --plan table-wise

The data is drawn from the number of the sample, so that it is the same on any number of ranks.
"""

import argparse
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, sharding_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import shardopt
from shardopt import checkpoint

ROWS = {"user": 48, "item": 30}
WIDTH, BATCH = 8, 12  # columns of a table, samples of a global batch
PLANS = ("row-wise", "table-wise", "first-rank", "column-wise", "data-parallel")


class Rates(torch.nn.Module):
    """Predicts a number from a user and an item."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=rows, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
        self.over = torch.nn.Linear(WIDTH * len(ROWS), 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(self.tables(ids).values())


def sharded(model: Rates, plan: str, device: torch.device) -> DistributedModelParallel:
    """Shards the tables: one kind of plan for all of them. Collective."""
    ranks = dist.get_world_size()
    of_table = {
        "row-wise": lambda number: sharding_plan.row_wise(),
        "table-wise": lambda number: sharding_plan.table_wise(rank=number % ranks),
        "first-rank": lambda number: sharding_plan.table_wise(rank=0),
        "column-wise": lambda number: sharding_plan.column_wise(ranks=[0, ranks - 1]),
        "data-parallel": lambda number: sharding_plan.data_parallel(),
    }[plan]
    sharder = EmbeddingBagCollectionSharder()
    of_tables = sharding_plan.construct_module_sharding_plan(
        model.tables,
        {name: of_table(number) for number, name in enumerate(ROWS)},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=device.type,
    )
    return DistributedModelParallel(
        model, device=device, plan=ShardingPlan({"tables": of_tables}), sharders=[sharder], init_data_parallel=True
    )


def batch_of(samples: list[int], device: torch.device) -> tuple[KeyedJaggedTensor, Tensor]:
    """Draws two ids of each table for each sample, and what is to be predicted, [samples, 1]."""
    ids: dict[str, list[Tensor]] = {name: [] for name in ROWS}
    wanted = []
    for sample in samples:
        generator = torch.Generator().manual_seed(sample)
        for name, rows in ROWS.items():
            ids[name].append(torch.randint(0, rows, (2,), generator=generator))
        wanted.append(torch.rand(1, generator=generator))
    values = torch.cat([each for name in ROWS for each in ids[name]])
    lengths = torch.full((len(ROWS) * len(samples),), 2, dtype=torch.int32)
    return KeyedJaggedTensor.from_lengths_sync([*ROWS], values, lengths).to(device), torch.stack(wanted).to(device)


def train(
    root: str,
    plan: str,
    steps: int,
    every: int = 4,
    fused: type[torch.optim.Optimizer] = torch.optim.Adagrad,
    replicated: type[torch.optim.Optimizer] | str = "adagrad",
    begin: str | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    **how: Any,
) -> dict[int, float]:
    """Trains up to a step, from the newest checkpoint under a root. Returns the loss of each step taken. Collective.

    Args:
        replicated: the algorithm of data-parallel tables, which is `fused` for all others.
        begin: a checkpoint to begin with where there is none under the root; `how` are options of loading it.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = Rates()
    if plan != "data-parallel":
        apply_optimizer_in_backward(fused, model.tables.parameters(), {"lr": 0.1})
    parallel = sharded(model, plan, device)
    tables = parallel.fused_optimizer
    tables.save_param_groups(True)
    rest = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    of_tables = {"match": r"^tables\.", "algorithm": replicated, "lr": 0.1}
    groups = [of_tables] if plan == "data-parallel" else []
    dense = shardopt.keyed("adam", rest.items(), lr=0.01, groups=groups)
    data = shardopt.ResumableSampler(60, batch_size=BATCH, seed=1)
    app = {"model": parallel, "tables": tables, "dense": dense, "data": data, "step": 0}
    losses: dict[int, float] = {}
    with checkpoint.Manager(root, every=every, stop_on=signal.SIGTERM) as manager:
        manager.restore(app)
        if manager.restored_step is None and begin is not None:
            checkpoint.load(begin, app, init_state=True, **how)
        while app["step"] < steps:
            for samples in data.through(data):
                if app["step"] == steps:
                    break
                ids, wanted = batch_of(samples, device)
                loss = torch.nn.functional.mse_loss(parallel(ids), wanted)
                loss.backward()  # which moves the tables, too
                dense.step()
                dense.zero_grad()
                app["step"] += 1
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                losses[app["step"]] = mean.item() / dist.get_world_size()
                manager.save(app["step"], app)
                on_step(app["step"])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="where checkpoints are")
    parser.add_argument("--plan", choices=PLANS, default="row-wise")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    losses = train(arguments.root, arguments.plan, arguments.steps)
    if dist.get_rank() == 0:
        for step, loss in losses.items():
            print(f"step {step}: loss {loss:.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
