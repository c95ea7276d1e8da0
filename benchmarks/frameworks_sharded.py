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

from tests.harness import run_ranks_outcomes

SIZE, BATCH = 120, 3
SAVED_AT, STEPS = 4, 8


def pass_over(ranks: int, states: list[Any] | None, batches: int | None) -> tuple[list[int], list[Any]]:
    """Takes so many batches on each of some ranks; returns the samples, and the states of the loaders."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    seen, after = [], []
    for rank in range(ranks):
        sampler = DistributedSampler(range(SIZE), ranks, rank, seed=1)  # type: ignore[arg-type]  # a sequence will do
        loader = StatefulDataLoader(range(SIZE), batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
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


def tables(folder: str, plan: str, begin: str | None) -> list[float]:
    """Trains tables for some steps, from DCP's checkpoint where there is one; saves one at SAVED_AT."""
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    from integrations import torchrec_tables as example
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    torch.manual_seed(0)
    model = example.Rates()
    example.apply_optimizer_in_backward(torch.optim.Adagrad, model.tables.parameters(), {"lr": 0.1})
    parallel = example.sharded(model, plan, torch.device("cpu"))
    dense = dict(example.in_backward_optimizer_filter(parallel.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
    optimizer = CombinedOptimizer([parallel.fused_optimizer, wrapped])
    step = 0
    if begin is not None:
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
    with tempfile.TemporaryDirectory() as root:
        whole = run_ranks_outcomes(2, tables, f"{root}/row-wise", "row-wise", None, deadline_seconds=200)
        expected = whole[0].value
        assert expected is not None
        for ranks, plan in ((2, "row-wise"), (2, "table-wise"), (2, "first-rank"), (1, "first-rank"), (3, "row-wise")):
            got = run_ranks_outcomes(ranks, tables, "", plan, f"{root}/row-wise", deadline_seconds=200)
            print(f"torchrec, 2 ranks row-wise then {ranks} {plan}: {cell(got, expected)}", flush=True)


def stock(config: Any) -> None:
    """Puts torchtitan's own parts in the place of ours."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer

    config.checkpoint = CheckpointManager.Config(enable=True, interval=SAVED_AT, last_save_model_only=False)
    config.optimizer = OptimizersContainer.Config(
        param_groups=config.optimizer.param_groups, implementation=config.optimizer.implementation
    )


def titan(folder: str, steps: int) -> list[float]:
    from tests.integrations.titan_job import train

    losses, _ = train(folder, steps, None, stock)
    return [loss for step, loss in losses.items() if step > SAVED_AT]


def of_torchtitan() -> None:
    import shutil

    with tempfile.TemporaryDirectory() as root:
        whole = run_ranks_outcomes(2, titan, f"{root}/whole", STEPS, deadline_seconds=200)
        expected = whole[0].value
        assert expected is not None, whole[0].error
        run_ranks_outcomes(2, titan, f"{root}/first", SAVED_AT, deadline_seconds=200)
        for ranks in (2, 1, 3):
            shutil.copytree(f"{root}/first", f"{root}/{ranks}")
            got = run_ranks_outcomes(ranks, titan, f"{root}/{ranks}", STEPS, deadline_seconds=200)
            print(f"torchtitan's own, 2 ranks then {ranks}: {cell(got, expected)}", flush=True)


if __name__ == "__main__":
    of = {"torchdata": of_torchdata, "torchrec": of_torchrec, "torchtitan": of_torchtitan}
    for name in sys.argv[1:] or of:
        of[name]()
