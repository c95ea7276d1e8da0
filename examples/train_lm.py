"""Trains a small language model with sharded state, and resumes it on any number of ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py configs/lm.toml
    torchrun --standalone --nproc-per-node 2 examples/train_lm.py configs/lm.toml --resume
    torchrun --standalone --nproc-per-node 2 examples/train_lm.py configs/lm.toml --out out/small --set model.width=64

Losing ranks costs the steps since the last checkpoint, nothing else: run it again on the remaining ranks, or let
torchrun do it (--max-restarts, with --resume; docs/surviving.md). SIGTERM to any rank costs nothing at all.
A comment such as `docs/recipes/fsdp2.md` names the page that explains the lines below it.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Windows, learning_rate_factor, log_loss
from lm import Transformer
from program import Table, launch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import shardopt
from shardopt import checkpoint


class CheckpointConfig(Table):
    every: PositiveInt
    keep: PositiveInt
    stop_seconds: PositiveFloat
    deadline_seconds: PositiveFloat
    tiers: list[dict[str, Any]]  # arguments of checkpoint.Tier


class DataConfig(Table):
    corpus: str
    batch: PositiveInt
    context: PositiveInt


class ModelConfig(Table):
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt


class OptimizerConfig(Table):
    lr: PositiveFloat
    betas: list[float]
    weight_decay: NonNegativeFloat


class ScheduleConfig(Table):
    warmup_steps: PositiveInt


class Config(Table):
    out: str
    seed: int
    steps: PositiveInt
    checkpoints: CheckpointConfig
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig


def train(config: Config, device: torch.device, resume: bool) -> None:
    """Trains until `config.steps` steps are done. Every rank calls it, in an initialized process group."""
    ranks, steps, batch = dist.get_world_size(), config.steps, config.data.batch
    windows = Windows(config.data.corpus, config.data.context)
    # The order of windows follows from the seed, and not from the number of ranks; what was seen of it is saved.
    data = shardopt.ResumableSampler(len(windows), batch_size=batch, seed=config.seed)
    loader = DataLoader(windows, batch_sampler=data)

    torch.manual_seed(config.seed)  # drawn whole, then sharded: the same weights on any number of ranks
    model = Transformer(context=windows.context, **config.model.model_dump()).to(device)
    # docs/recipes/fsdp2.md
    mesh = init_device_mesh(device.type, (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    no_decay = {"match": r"norm|bias", "weight_decay": 0.0}
    optimizer = shardopt.keyed("adamw", model.named_parameters(), groups=[no_decay], **config.optimizer.model_dump())
    # docs/recipes/schedules.md
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, config.schedule.warmup_steps))

    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    app = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data, "step": 0}
    # Saved beside training; and once more, after the same step on all ranks, when any of them is asked to stop.
    # docs/recipes/preemption.md
    rules = config.checkpoints
    manager = checkpoint.Manager(
        out / "checkpoints",
        destinations=[checkpoint.Tier(**tier) for tier in rules.tiers],
        every=rules.every,
        keep=rules.keep,
        stage="lazy",
        stop_on=checkpoint.Preemption(signal.SIGTERM, seconds=rules.stop_seconds),
        options=checkpoint.SaveOptions(deadline_seconds=rules.deadline_seconds),
    )
    if resume:
        manager.restore(app)
    elif manager.latest_step is not None:
        raise SystemExit(f"{config.out}: found checkpoints; required none: add --resume, or choose another --out")

    while app["step"] < steps:
        for inputs, targets in data.through(loader):
            losses = cross_entropy(
                model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten(), reduction="none"
            )
            share = losses.sum(dtype=torch.float64) / (batch * windows.context)
            # The gradients' mean over ranks, which fully_shard takes, is then the global batch's, however it was cut.
            (share * ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            app["step"] += 1

            log_loss(out, app["step"], share.detach())
            manager.save(app["step"], app, force=app["step"] == steps)
            if app["step"] == steps:
                break
    manager.close()


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products on GPUs need it for the next line
    torch.use_deterministic_algorithms(True)
    launch(train, Config, __doc__)
