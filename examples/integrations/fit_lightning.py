"""Train with Lightning and FSDP2, from the newest committed checkpoint if there is one.

    PYTHONPATH=examples torchrun --standalone --nproc-per-node 4 examples/integrations/fit_lightning.py out/lightning

Kill it, or send SIGTERM to any rank, and run it again on as many ranks as are left.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from common import log_loss
from integrations.task import BATCH, Network, Sums
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed import get_world_size
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt.integrations.lightning import ShardoptCheckpoint
from shardopt.integrations.loader import ResumableLoader


class Module(LightningModule):
    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out, self.network = out, Network()

    def configure_model(self) -> None:
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        optimizer = shardopt.keyed("adamw", self.named_parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(Sums(), batch_size=BATCH, seed=0)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss: Tensor = self.network(**batch)["loss"]
        log_loss(self.out, self.trainer.global_step + 1, loss.detach().double() / get_world_size())
        return loss


def train(
    out: Path, ranks: int, strategy: type[Strategy] = ModelParallelStrategy, callbacks: Any = None, **fit: Any
) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"),
        max_epochs=3,
        logger=False,
        callbacks=callbacks or [ShardoptCheckpoint(out / "checkpoints", every=2)],
        enable_progress_bar=False,
    )
    trainer.fit(Module(out), **fit)
    return trainer


if __name__ == "__main__":
    import os

    path = Path(sys.argv[1])
    path.mkdir(parents=True, exist_ok=True)
    train(path, int(os.environ["WORLD_SIZE"]))
