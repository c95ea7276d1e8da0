"""What torchtitan, torchrec and torchdata do by themselves: their own state, resumed on the same ranks and on others.

    PYTHONPATH=.:examples python -m benchmarks.frameworks_sharded [torchdata] [torchrec] [torchtitan]

torchdata: `StatefulDataLoader` over a `DistributedSampler`, each rank with the state of its number, as is usual; a cell
is how many samples of an epoch were given never, and how many more than once. torchrec: `dcp.save`, `dcp.load` of model
and fused optimizer; torchtitan: its `CheckpointManager` and optimizers. A cell there is the largest relative difference
of a loss from the uninterrupted run's, or the last line of the error.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import dcp
from tests.harness import run_ranks_outcomes

SIZE, BATCH = 120, 3
SAVED_AT, STEPS = 4, 8


def pass_over(ranks: int, states: list[Any] | None, batches: int | None) -> tuple[list[int], list[Any]]:
    """Takes so many batches on each of some ranks; returns the samples, and the states of the loaders."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    seen: list[int] = []
    after: list[Any] = []
    for rank in range(ranks):
        sampler: DistributedSampler[int] = DistributedSampler(range(SIZE), ranks, rank, seed=1)  # type: ignore[arg-type]  # a sequence will do
        loader = StatefulDataLoader(range(SIZE), batch_size=BATCH, sampler=sampler)
        if states is not None and rank < len(states):
            loader.load_state_dict(states[rank])
        for number, batch in enumerate(loader, start=1):
            seen += batch.tolist()
            if number == batches:
                break
        after.append(loader.state_dict())
    return seen, after


def of_torchdata() -> None:
    for then in (4, 2, 3, 8):
        first, states = pass_over(4, None, 3)
        rest, _ = pass_over(then, states, None)
        counted = Counter(first + rest)
        never = SIZE - len(counted)
        twice = sum(times > 1 for times in counted.values())
        print(f"torchdata, 4 ranks then {then}: {never} samples never, {twice} more than once, of {SIZE}", flush=True)


def tables(folder: str, plan: str, begin: str | None, init: bool = True, fused: str = "Adagrad") -> list[float]:
    """Trains tables for some steps, from DCP's checkpoint where there is one; saves one at SAVED_AT."""
    warnings.simplefilter("ignore")
    from integrations import torchrec_tables as example
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    torch.manual_seed(0)
    model = example.Rates()
    algorithm = torch.optim.Adagrad if fused == "Adagrad" else RowWiseAdagrad
    example.apply_optimizer_in_backward(algorithm, model.tables.parameters(), {"lr": 0.1})
    parallel = example.sharded(model, plan, torch.device("cpu"))
    dense = dict(example.in_backward_optimizer_filter(parallel.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
    optimizer = CombinedOptimizer([parallel.fused_optimizer, wrapped])
    step = 0
    if begin is not None:
        if init:
            wrapped.init_state()  # a step, without which there is no place to load into
        state = {"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=begin)
        parallel.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = SAVED_AT
    losses = []
    while step < STEPS:
        share = example.BATCH // dist.get_world_size()
        first = step * example.BATCH + dist.get_rank() * share
        ids, wanted = example.batch_of([*range(first, first + share)], torch.device("cpu"))
        loss = torch.nn.functional.mse_loss(parallel(ids), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step == SAVED_AT and begin is None:
            state = {"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save(state, checkpoint_id=folder)
    return losses[-(STEPS - SAVED_AT) :]


def cell(outcomes: list[Any], expected: list[float]) -> str:
    failed = next((outcome for outcome in outcomes if not outcome.ok), None)
    if failed is not None:
        return str(failed.error).strip().splitlines()[-1][:200]
    worst = max(abs(one - other) / abs(other) for one, other in zip(outcomes[0].value, expected, strict=True))
    return f"losses differ by {worst:.1e}"


def of_torchrec() -> None:
    cells = [
        ("Adagrad", "row-wise", 2, "row-wise", True),
        ("Adagrad", "row-wise", 2, "row-wise", False),
        ("Adagrad", "row-wise", 2, "table-wise", True),
        ("Adagrad", "row-wise", 2, "first-rank", True),
        ("Adagrad", "row-wise", 2, "column-wise", True),
        ("Adagrad", "row-wise", 1, "first-rank", True),
        ("Adagrad", "row-wise", 3, "row-wise", True),
        ("RowWiseAdagrad", "row-wise", 2, "column-wise", True),
        ("RowWiseAdagrad", "column-wise", 2, "row-wise", True),
    ]
    with tempfile.TemporaryDirectory() as root:
        expected: dict[tuple[str, str], list[float]] = {}
        for fused, source, ranks, plan, init in cells:
            folder = f"{root}/{fused}-{source}"
            if (fused, source) not in expected:
                whole = run_ranks_outcomes(2, tables, folder, source, None, True, fused, deadline_seconds=200)
                assert whole[0].value is not None, whole[0].error
                expected[fused, source] = whole[0].value
            got = run_ranks_outcomes(ranks, tables, "", plan, folder, init, fused, deadline_seconds=200)
            how = "" if init else ", no step before the load"
            told = cell(got, expected[fused, source])
            print(f"torchrec {fused}, 2 ranks {source} then {ranks} {plan}{how}: {told}", flush=True)


def stock(config: Any, own_loader: bool) -> None:
    """Puts torchtitan's own checkpoints and optimizers in the place of ours; and its own kind of loader."""
    from torchtitan.components.checkpointer import CheckpointManager

    from tests.integrations import titan_stock

    loader = config.dataloader
    titan_stock.stock(config)
    if not own_loader:
        config.dataloader = loader
    config.checkpoint = CheckpointManager.Config(enable=True, interval=SAVED_AT, last_save_model_only=False)


def titan(folder: str, steps: int, own_loader: bool, parallelism: dict[str, Any]) -> list[float]:
    from tests.integrations.titan_job import train

    losses, _ = train(folder, steps, None, lambda config: stock(config, own_loader), **parallelism)
    return [loss for step, loss in losses.items() if step > SAVED_AT]


def of_torchtitan() -> None:
    import shutil

    stages = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
    parts = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
    with tempfile.TemporaryDirectory() as root:
        for own_loader in (True, False):
            saved = f"{root}/{own_loader}"
            whole = run_ranks_outcomes(2, titan, f"{saved}-whole", STEPS, own_loader, {}, deadline_seconds=400)
            assert whole[0].value is not None, whole[0].error
            run_ranks_outcomes(2, titan, saved, SAVED_AT, own_loader, {}, deadline_seconds=400)
            for ranks, parallelism in ((2, {}), (1, {}), (3, {}), (2, stages), (2, parts)):
                run = f"{saved}-{ranks}-{parallelism.get('pipeline_parallel_schedule')}"
                shutil.copytree(saved, run)
                got = run_ranks_outcomes(ranks, titan, run, STEPS, own_loader, parallelism, deadline_seconds=400)
                where = f"{ranks} {parallelism.get('pipeline_parallel_schedule', '')}".strip()
                data = "its own loader" if own_loader else "a position that holds on any"
                print(f"torchtitan's own, 2 ranks then {where}, {data}: {cell(got[::-1], whole[0].value)}", flush=True)


def main() -> None:
    of = {"torchdata": of_torchdata, "torchrec": of_torchrec, "torchtitan": of_torchtitan}
    for name in sys.argv[1:] or of:
        of[name]()


if __name__ == "__main__":
    main()
