"""Train a small language model with sharded state, from the newest committed checkpoint if there is one.

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py configs/lm.toml
    torchrun --standalone --nproc-per-node 2 examples/train_lm.py configs/lm.toml --out out/small --set model.width=64

Losing ranks costs the steps since the last checkpoint, nothing else: run it again on as many ranks as are left, or let
torchrun do it (--max-restarts). SIGTERM to any rank costs nothing at all.
"""

import argparse
import json
import math
import os
import signal
import tomllib
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from lm import Transformer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import shardopt
from shardopt import checkpoint


class Batches:
    """Windows of a text in random order. The order depends on seed and position, never on the number of ranks."""

    def __init__(self, corpus: str, batch: int, context: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(read_text(corpus)), dtype=torch.uint8)
        self.batch, self.context, self.seed = batch, context, seed
        self.position = 0

    def next_slice(self, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """This rank's windows of the next global batch, and the byte that follows each of their bytes."""
        order = torch.Generator().manual_seed(1_000_003 * self.seed + self.position)
        self.position += 1
        starts = torch.randint(len(self.text) - self.context, (self.batch,), generator=order)
        windows = torch.stack([self.text[i : i + self.context + 1] for i in starts[rank::ranks].tolist()]).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]


def read_text(url: str) -> bytes:
    if not url:
        return "\n".join(topics[name] for name in sorted(topics)).encode()
    with fsspec.open(url, "rb") as file:
        return file.read()


def learning_rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))


def train(config: dict[str, Any], device: torch.device) -> None:
    """Train until `config["steps"]` steps are done. Every rank calls it, in an initialized process group."""
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), config["steps"]
    data = Batches(**config["data"], seed=config["seed"])
    if data.batch < ranks:
        raise ValueError(f"{ranks} ranks need a window each, and data.batch is {data.batch}: raise it")

    torch.manual_seed(config["seed"])  # drawn whole, then sharded: the same weights on any number of ranks
    model = Transformer(context=data.context, **config["model"]).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    no_decay = {"match": r"norm|bias", "weight_decay": 0.0}
    optimizer = shardopt.keyed("adamw", model.named_parameters(), groups=[no_decay], **config["optimizer"])
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, **config["schedule"]))

    out = Path(config["out"])
    out.mkdir(parents=True, exist_ok=True)
    app = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data, "step": 0}
    # Saved beside training; and once more, after the same step on all ranks, when any of them is told to stop.
    manager = checkpoint.Manager(out / "checkpoints", stage="lazy", stop_on=signal.SIGTERM, **config["checkpoints"])
    manager.restore(app)

    while app["step"] < steps:
        inputs, targets = (part.to(device) for part in data.next_slice(rank, ranks))
        losses = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        share = losses.sum(dtype=torch.float64) / (data.batch * data.context)
        # The gradients' mean over ranks, which fully_shard takes, is then the global batch's, however it was cut.
        (share * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        app["step"] += 1

        loss = share.detach()
        dist.all_reduce(loss)
        if rank == 0:
            with open(out / "loss.jsonl", "a") as log:
                log.write(json.dumps({"step": app["step"], "loss": loss.item(), "ranks": ranks}) + "\n")
        manager.save(app["step"], app, force=app["step"] == steps)
    manager.close()


def override(config: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if name not in config:
            raise SystemExit(f"no setting is called {name!r} here; there are {', '.join(config)}")
        if isinstance(value, dict):
            override(config[name], value)
        else:
            config[name] = value


@record  # so that torchrun's report has the traceback of the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML file, such as configs/lm.toml")
    parser.add_argument("--out", help="where losses and checkpoints go, instead of the file's `out`")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings, values as in TOML")
    arguments = parser.parse_args()
    config = tomllib.loads(arguments.config.read_text())
    override(config, tomllib.loads("\n".join(arguments.set)))
    config["out"] = arguments.out or config["out"]

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products on GPUs need it for the next line
    torch.use_deterministic_algorithms(True)
    use_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # NCCL wants one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpus else "gloo")
    train(config, device)
    dist.barrier()  # a rank that leaves while another still talks to it aborts that one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
