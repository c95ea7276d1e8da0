"""Shared by the training programs: settings, the text they train on, rates, the log of losses, how a rank begins."""

import argparse
import json
import math
import os
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import Dataset

Train = Callable[[dict[str, Any], torch.device], None]


def read_text(url: str) -> bytes:
    """Returns what lies at any URL that fsspec opens; for an empty one the text that CPython ships."""
    if not url:
        return "\n".join(topics[name] for name in sorted(topics)).encode()
    with fsspec.open(url, "rb") as file:
        return file.read()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every window of a text: `context` bytes, and the byte that follows each of them, as int64."""

    def __init__(self, corpus: str, context: int) -> None:
        self.text = torch.frombuffer(bytearray(read_text(corpus)), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def learning_rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))


def override(config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Sets the values of `changes` in `config`, tables within it included; ends the program at an unknown name."""
    for name, value in changes.items():
        if name not in config:
            raise SystemExit(f"no setting is called {name!r} here; there are {', '.join(config)}")
        if isinstance(value, dict):
            override(config[name], value)
        else:
            config[name] = value


def log_loss(out: Path, step: int, share: Tensor) -> float:
    """Adds a step to `loss.jsonl`, on rank 0, and returns its loss. Collective.

    Args:
        share: the rank's addend of the loss, a double on its device; replaced by the sum over ranks.
    """
    dist.all_reduce(share)
    if dist.get_rank() == 0:
        with open(out / "loss.jsonl", "a") as log:
            log.write(json.dumps({"step": step, "loss": share.item(), "ranks": dist.get_world_size()}) + "\n")
    return share.item()


def init_with_limit(backend: str, limit: timedelta) -> None:
    """Joins the job so that a collective waits no longer for a host that was cut off; torch has it wait half an hour.

    What other ranks take to start does not count: all are there before it holds.
    """
    store, rank, ranks = next(dist.rendezvous("env://"))
    store.set_timeout(timedelta(minutes=30))
    if store.add("started", 1) == ranks:
        store.set("all started", "")
    store.wait(["all started"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)


@record  # so that torchrun's report has the traceback of the rank that failed first
def launch(train: Train, description: str) -> None:
    """Reads the command line, joins the job that torchrun has started, and trains."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML file, such as those in configs/")
    parser.add_argument("--out", help="where losses and checkpoints go, instead of the file's `out`")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings, values as in TOML")
    arguments = parser.parse_args()
    config = tomllib.loads(arguments.config.read_text())
    override(config, tomllib.loads("\n".join(arguments.set)))
    config["out"] = arguments.out or config["out"]

    train(config, join_job(config.get("collective_seconds")))
    dist.barrier()  # a rank that leaves while another still talks to it aborts that one
    dist.destroy_process_group()


def join_job(collective_seconds: float | None = None) -> torch.device:
    """Joins the job that torchrun has started; returns this rank's device. Collective.

    Args:
        collective_seconds: how long a collective waits for others; None for as long as torch has it.
    """
    use_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # NCCL wants one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if use_gpus else "gloo"
    if collective_seconds:
        init_with_limit(backend, timedelta(seconds=collective_seconds))
    else:
        dist.init_process_group(backend)
    return device
