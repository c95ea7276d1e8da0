"""Trains a model of the next letter whose tables have 2 million rows, cut over the ranks as a plan says.

    torchrun --standalone --nproc-per-node 4 examples/train_tables.py configs/tables.toml
    torchrun --standalone --nproc-per-node 3 examples/train_tables.py configs/tables.toml --resume --set steps=200

A step touches a few thousand rows, and backward updates them where they are. Every 20 steps a save writes the rows that
were touched since the last. A different number of ranks makes another plan, and resumes from a checkpoint of any plan.
On one or two ranks, set plan.memory_bytes higher.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from common import log_loss
from grams import Config, Grams, NextLetter
from program import launch
from spool import note
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import shardopt
from shardopt import checkpoint


class Trainer:
    """The model and its optimizers: row-wise Adagrad of the tables, in backward, and Adam of the rest. Collective."""

    def __init__(self, config: Config, cut: str, device: torch.device) -> None:
        self.batch, self.device = config.data.batch, device
        torch.manual_seed(config.seed)  # the same weights on any number of ranks
        self.model = NextLetter(config, cut, init_device_mesh(device.type, (dist.get_world_size(),)))
        self.of_tables = self.model.tables.fuse(shardopt.optim.RowWiseAdagrad, lr=config.optimizer.tables)
        self.of_dense = shardopt.keyed("adam", self.model.dense.named_parameters(), lr=config.optimizer.dense)

    def step(self, rows: dict[str, Tensor], letters: Tensor) -> Tensor:
        """Takes a step with this rank's part of the batch; returns its addend of the loss, a double."""
        logits = self.model({name: of_table.to(self.device) for name, of_table in rows.items()})
        losses = cross_entropy(logits, letters.to(self.device), reduction="none")
        share = losses.sum(dtype=torch.float64) / self.batch
        # The gradients' mean over ranks is then the global batch's, however it was cut.
        (share * dist.get_world_size()).backward()  # updates the rows
        self.of_dense.step()
        self.of_dense.zero_grad()
        return share.detach()


def train(config: Config, device: torch.device, resume: bool) -> None:
    """Trains until `config.steps` steps are done. Every rank calls it, in an initialized process group."""
    rank, ranks, steps, rules = dist.get_rank(), dist.get_world_size(), config.steps, config.checkpoints
    grams = Grams(config.data.corpus, config.grams.model_dump(), config.rows.model_dump())
    # The order of letters follows from the seed, and not from the number of ranks; what was seen of it is saved.
    data = shardopt.ResumableSampler(len(grams), batch_size=config.data.batch, seed=config.seed)
    trainer = Trainer(config, "planned", device)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    app = {
        "model": trainer.model,
        "of_tables": trainer.of_tables,
        "of_dense": trainer.of_dense,
        "data": data,
        "step": 0,
    }
    touched = checkpoint.Manager(out / "checkpoints", every=rules.every, incremental=True)
    # Damage of a file hits every save that refers to it: so some are whole, in files of their own.
    full = checkpoint.Manager(out / "full", every=rules.full_every, keep=1)
    if resume:
        touched.restore(app)
    elif touched.latest_step is not None:
        raise SystemExit(f"{config.out}: found checkpoints; required none: add --resume, or choose another --out")
    if rank == 0:
        cuts = ", ".join(f"{table.name} {table.cut}" for table in trainer.model.tables.tables)
        print(f"{ranks} ranks, from step {app['step']}: {cuts}", flush=True)

    while app["step"] < steps:
        for numbers in data.through(data):
            share = trainer.step(*grams.read(numbers))
            app["step"] += 1
            total = log_loss(out, app["step"], share)
            for manager, kind in ((touched, "touched"), (full, "full")):
                report = manager.save(app["step"], app)
                if rank == 0 and report is not None:
                    note(
                        out,
                        "saves",
                        step=app["step"],
                        writes=kind,
                        ranks=ranks,
                        bytes=report.bytes_total,
                        seconds=report.seconds,
                    )
                    print(f"step {app['step']:4d} of {steps}  loss {total:.4f}  {kind} {report.bytes_total:,}")
            if app["step"] == steps:
                break
    touched.close()
    full.close()


if __name__ == "__main__":
    launch(train, Config, __doc__)
