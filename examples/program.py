"""The command line of the training programs, and their settings.

Tables of settings, their errors and the joining of the job are those of the template (`shardopt new`).
"""

import argparse
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError
from template.train import Table, join_job, wrong_settings
from torch.distributed.elastic.multiprocessing.errors import record

C = TypeVar("C", bound=Table)


def override(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns settings with those of `changes` in their place, also within tables."""
    merged = config | changes
    for name in changes.keys() & config.keys():
        if isinstance(config[name], dict) and isinstance(changes[name], dict):
            merged[name] = override(config[name], changes[name])
    return merged


def read_config(kind: type[C], path: Path, changes: dict[str, Any]) -> C:
    """Returns the settings of a file, some of them changed. Ends the program at wrong ones, and names each."""
    try:
        return kind.model_validate(override(tomllib.loads(path.read_text()), changes))
    except ValidationError as error:
        raise SystemExit(wrong_settings(path, error)) from None


def limited(seconds: float) -> dict[str, Any]:
    """Returns options of `join_job` by which a collective waits no longer for a host that was cut off. Collective.

    torch has it wait half an hour. What other ranks take to start does not count: all are there before it holds.
    """
    store, rank, ranks = next(dist.rendezvous("env://"))
    store.set_timeout(timedelta(minutes=30))
    if store.add("started", 1) == ranks:
        store.set("all started", "")
    store.wait(["all started"])
    return {"store": store, "rank": rank, "world_size": ranks, "timeout": timedelta(seconds=seconds)}


@record  # so that torchrun's report has the traceback of the rank that failed first
def launch(train: Callable[[C, torch.device, bool], None], kind: type[C], description: str) -> None:
    """Reads the command line, joins the job that torchrun has started, and trains.

    Args:
        train: gets the settings, this rank's device, and whether to resume.
        kind: of the settings.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a TOML file, such as those in configs/")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint; start if there is none")
    parser.add_argument("--out", help="where losses and checkpoints go, instead of the file's `out`")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings, values as in TOML")
    parser.add_argument("--collective-seconds", type=float, help="how long a collective waits for other ranks")
    arguments = parser.parse_args()
    changes = tomllib.loads("\n".join(arguments.set)) | ({"out": arguments.out} if arguments.out else {})
    config = read_config(kind, arguments.config, changes)
    device = join_job(**limited(arguments.collective_seconds) if arguments.collective_seconds else {})
    train(config, device, arguments.resume)
    dist.barrier()  # a rank that exits while another still talks to it aborts that one
    dist.destroy_process_group()
