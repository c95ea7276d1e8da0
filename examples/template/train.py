"""Trains a small model on any number of ranks, and resumes it on any other number.

    torchrun --standalone --nproc-per-node 2 train.py config.toml
    torchrun --standalone --nproc-per-node 3 train.py config.toml --resume

A comment such as `docs/recipes/fsdp2.md` names the page of shardopt's documentation that explains the lines below it.
"""

import argparse
import importlib.util
import logging
import os
import signal
import tomllib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError
from rich.progress import Progress
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import shardopt
from shardopt import checkpoint
from shardopt.integrations.loggers import log_report_metrics, tensorboard


class Table(BaseModel):
    """A table of config.toml: an unknown name, a missing one and a value of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(Table):
    width: PositiveInt
    layers: PositiveInt


class DataConfig(Table):
    batch: PositiveInt  # samples of a step, over all ranks together


class OptimizerConfig(Table):
    lr: PositiveFloat
    weight_decay: NonNegativeFloat


class CheckpointConfig(Table):
    every: PositiveInt  # steps
    keep: PositiveInt


class Config(Table):
    out: str
    steps: PositiveInt
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    checkpoints: CheckpointConfig


def read_config(path: Path) -> Config:
    """Returns the settings of a file. Ends the program at wrong ones, and names each."""
    try:
        return Config.model_validate(tomllib.loads(path.read_text()))
    except ValidationError as error:
        raise SystemExit(wrong_settings(path, error)) from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SystemExit(f"{path}: {error}") from None


def wrong_settings(path: Path, error: ValidationError) -> str:
    """Returns a line for each wrong setting: its name, what was found, and what is wrong with it."""
    wrong = [(".".join(map(str, each["loc"])), each["input"], each["msg"]) for each in error.errors()]
    return "\n".join(f"{path}: {name}: found {found!r}: {message}" for name, found, message in wrong)


def join_job(**options: Any) -> torch.device:
    """Joins the job that torchrun has started; returns this rank's device. Collective.

    Args:
        options: of `init_process_group`, such as `timeout`.
    """
    use_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # NCCL needs one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpus else "gloo", **options)
    return device


def make_samples() -> TensorDataset:
    """Returns the training data: replace it by yours. Sample `i` must be the same on all ranks."""
    # docs/start.md
    inputs = torch.randn(4096, 64)
    samples = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

    return samples


def make_layers(width: int, layers: int) -> list[nn.Module]:
    """Returns the layers of the model: replace them by yours."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return [nn.Linear(64, width), *hidden, nn.Linear(width, 1)]


def make_manager(config: Config) -> checkpoint.Manager:
    """Returns what saves and restores the run, and stops it after SIGTERM to any rank, or Ctrl-C."""
    return checkpoint.Manager(
        f"{config.out}/checkpoints",
        every=config.checkpoints.every,
        keep=config.checkpoints.keep,
        # docs/recipes/preemption.md
        stage="lazy",  # saves in the background
        stop_on=checkpoint.Preemption((signal.SIGTERM, signal.SIGINT), seconds=20),  # less than the scheduler allows
    )


def make_writer(config: Config, app: dict[str, Any]) -> Any:
    """Returns TensorBoard's writer, which gets the metrics of saves from here on."""
    from torch.utils.tensorboard import SummaryWriter  # needs the package `tensorboard`

    writer = SummaryWriter(f"{config.out}/logs", purge_step=app["step"] + 1)  # hides steps after the loaded one
    # docs/integrations/loggers.md
    log_report_metrics(tensorboard(writer), step=lambda: app["step"])

    return writer


def train(config: Config, device: torch.device, resume: bool, use_tensorboard: bool) -> None:
    """Trains until `config.steps` steps are done. Every rank calls it, in an initialized process group."""
    # docs/start.md
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s: %(message)s")

    steps, batch = config.steps, config.data.batch
    # docs/start.md
    torch.manual_seed(0)  # the same weights and samples on any number of ranks

    samples = make_samples()
    layers = make_layers(config.model.width, config.model.layers)
    model = nn.Sequential(*layers).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    # docs/recipes/fsdp2.md
    for layer in layers:
        fully_shard(layer, mesh=mesh)  # gathered and freed layer by layer
    fully_shard(model, mesh=mesh)

    # docs/start.md
    no_decay = {"match": r"bias", "weight_decay": 0.0}  # a regex; a parameter joins the first group that matches

    adamw = shardopt.keyed("adamw", model.named_parameters(), groups=[no_decay], **config.optimizer.model_dump())
    # docs/recipes/fsdp2.md
    optimizer = shardopt.GradientClippingOptimizer(adamw, "norm", max_gradient=1.0)  # clips the global norm to 1.0

    data = shardopt.ResumableSampler(len(samples), batch_size=batch, seed=0)  # batch_size is global
    # docs/start.md
    loader = DataLoader(samples, batch_sampler=data)

    # docs/start.md
    app: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": data, "step": 0}

    manager = make_manager(config)
    if resume:
        # docs/start.md
        manager.restore(app)  # loads the newest checkpoint in place; the number of ranks may differ
    elif manager.latest_step is not None:
        raise SystemExit(f"{config.out}: found checkpoints; required none: add --resume, or choose another `out`")

    writer = make_writer(config, app) if use_tensorboard and rank == 0 else None
    with manager, Progress(disable=rank != 0) as progress:
        bar = progress.add_task("training", total=steps, completed=app["step"])
        while app["step"] < steps:
            # docs/start.md
            for x, y in data.through(loader):  # counts the batches that the loop has taken, not prefetched ones
                # to this rank's device
                x, y = x.to(device), y.to(device)
                # docs/start.md
                loss = torch.nn.functional.mse_loss(model(x), y, reduction="sum") / batch
                (loss * ranks).backward()  # undoes the mean over ranks
                optimizer.step()
                optimizer.zero_grad()
                app["step"] += 1

                # docs/start.md
                total = loss.detach().clone()
                dist.all_reduce(total)

                progress.update(bar, completed=app["step"])
                if rank == 0 and app["step"] % 10 == 0:
                    progress.console.print(f"step {app['step']} loss {total.item():.6f}", highlight=False)
                if writer is not None:
                    writer.add_scalar("loss", total.item(), app["step"])
                manager.save(app["step"], app, force=app["step"] == steps)
                if app["step"] == steps:
                    break
    if writer is not None:
        writer.close()


@record  # so that torchrun's report has the traceback of the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the model that config.toml describes.")
    parser.add_argument("config", type=Path, help="a TOML file, such as config.toml")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint; start if there is none")
    parser.add_argument("--tensorboard", action="store_true", help="write losses and saves to `out`/logs")
    arguments = parser.parse_args()
    if arguments.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard: found no package of this name: pip install tensorboard")
    config = read_config(arguments.config)
    train(config, join_job(), arguments.resume, arguments.tensorboard)
    dist.barrier()  # a rank that exits while another still talks to it aborts that one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
