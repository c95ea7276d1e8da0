"""A Lightning run with accumulation and validation in the middle of an epoch, over one of several loaders."""

import os
import signal
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

ACCUMULATED, VALIDATED = 2, 2  # batches to a step, and between validations; an epoch has 5


def loader_of(kind):
    from integrations.task import BATCH, Sums

    from shardopt.integrations.loader import ResumableLoader

    if kind == "ResumableLoader":
        return ResumableLoader(Sums(), batch_size=BATCH, seed=0)
    from torchdata.stateful_dataloader import StatefulDataLoader

    from shardopt.integrations.torchdata import ResumableStatefulLoader

    if kind == "ResumableStatefulLoader":
        return ResumableStatefulLoader(Sums(), batch_size=BATCH, seed=0)
    sampler = DistributedSampler(Sums(), shuffle=False)
    return StatefulDataLoader(Sums(), batch_size=BATCH // dist.get_world_size(), sampler=sampler)


def train(folder, kind, dies_at=None):
    """Trains; rank 1 kills itself at a batch. Returns losses by epoch and batch, and validated ones by step."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    from integrations import fit_lightning
    from integrations.task import Sums
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from shardopt.integrations.lightning import ShardoptCheckpoint

    losses, validated, ranks = {}, {}, dist.get_world_size()

    def over_ranks(loss):
        mean = loss.detach().double() / ranks
        dist.all_reduce(mean)
        return mean.item()

    class Module(fit_lightning.Module):
        def train_dataloader(self):
            return loader_of(kind)

        def val_dataloader(self):
            return DataLoader(Sums(), batch_size=30)

        def training_step(self, batch, batch_index):
            at = (self.trainer.current_epoch, batch_index)
            if at == dies_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = self.network(**batch)["loss"]
            losses[at] = over_ranks(loss)
            return loss

        def validation_step(self, batch, batch_index):
            validated[self.trainer.global_step] = over_ranks(self.network(**batch)["loss"])

    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1, process_group_backend="gloo"),
        max_epochs=3,
        logger=False,
        callbacks=[ShardoptCheckpoint(f"{folder}/checkpoints", every=1)],
        enable_progress_bar=False,
        accumulate_grad_batches=ACCUMULATED,
        val_check_interval=VALIDATED,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    torch.manual_seed(0)
    trainer.fit(Module(folder))
    return losses, validated
