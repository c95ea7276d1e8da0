"""A Lightning run with accumulation and validation in the middle of an epoch, over one of several loaders."""

import contextlib
import os
import signal
import warnings
from types import SimpleNamespace

import pytest
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


def fit_small(folder, dies_at=None, plateau=False, accumulated=None, **options):
    """Fits on this rank alone, and is interrupted in a batch. Returns what a fit leads to, its batches, validations.

    Args:
        accumulated: batches of a step, by the epoch from which on.
    """
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint

    import shardopt
    from shardopt.integrations.lightning import ShardoptCheckpoint
    from shardopt.integrations.loader import ResumableLoader

    samples = torch.randn(56, 4, generator=torch.Generator().manual_seed(5))  # 7 batches
    batches, validated = [], []

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))

        def training_step(self, batch, batch_index):
            batches.append((self.current_epoch, batch_index, batch.sum().item()))
            if len(batches) == dies_at:
                raise KeyboardInterrupt
            return self.network(batch).square().mean()

        def validation_step(self, batch, batch_index):
            self.log("bad", 1.0 + self.trainer.global_step % 3)

        def configure_optimizers(self):
            optimizer = shardopt.keyed("adamw", self.named_parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [{"scheduler": schedule, "monitor": "bad"}] if plateau else []

        def train_dataloader(self):
            return ResumableLoader(samples, batch_size=8)

        def val_dataloader(self):
            return DataLoader(samples[:8], batch_size=8)

    class Validated(Callback):
        def on_validation_end(self, trainer, module):
            validated.append(trainer.global_step)

    torch.manual_seed(0)
    module, stopping = Module(), EarlyStopping("bad", patience=4, strict=False)
    callbacks = [Validated(), stopping, ShardoptCheckpoint(folder, every=1)]
    if plateau:
        callbacks.append(ModelCheckpoint(f"{folder}/best", monitor="bad", filename="{step}"))
    if accumulated:
        callbacks.append(GradientAccumulationScheduler(accumulated))
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **{"max_epochs": 4, **options},
    )
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    weights = [parameter.tolist() for parameter in module.parameters()]
    best = os.path.basename(callbacks[3].best_model_path) if plateau else None
    return (trainer.global_step, rate, stopping.wait_count, best, weights), batches, validated


def resume_small(folder, dies, **options):
    """Fits without a fault, and interrupted in each of some batches and resumed; returns all that `fit_small` does."""
    whole = fit_small(f"{folder}/whole", **options)
    resumed = {}
    for at in dies:
        fit_small(f"{folder}/{at}", at, **options)
        resumed[at] = fit_small(f"{folder}/{at}", **options)
    return whole, resumed


def extend_small(folder, *steps):
    """Fits up to the last number of steps without a break, and up to each of them in a fit of its own."""
    whole = fit_small(f"{folder}/whole", max_steps=steps[-1], max_epochs=-1)
    return whole, [fit_small(f"{folder}/parts", max_steps=each, max_epochs=-1) for each in steps]


def means_of_metrics(names):
    """Returns what a checkpoint has of metrics, of which each rank has a number of its own."""
    from shardopt.integrations.lightning_state import _means_of_metrics

    rank = torch.distributed.get_rank()
    known = {name: torch.tensor(rank + 1.0) for name in names[rank]}
    schedules = [SimpleNamespace(monitor=name, reduce_on_plateau=True) for name in ("bad", "worse")]
    return _means_of_metrics(SimpleNamespace(callback_metrics=known, lr_scheduler_configs=schedules))


def fit_with_hooks(folder, drops, averaging=None):
    """Fits twice with hooks that read the weights, and leave some out when they save; returns what the hooks found."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    import lightning.pytorch.callbacks
    from lightning.pytorch import LightningModule, Trainer

    import shardopt
    from shardopt.integrations.lightning import ShardoptCheckpoint

    found = []

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_index):
            return self.network(batch).square().mean()

        def configure_optimizers(self):
            return shardopt.keyed("adamw", self.named_parameters(), lr=0.01)

        def train_dataloader(self):
            return DataLoader(torch.ones(8, 4), batch_size=4)

        def on_save_checkpoint(self, checkpoint):
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: each for name, each in weights.items() if drops not in name}

        def on_load_checkpoint(self, checkpoint):
            found.extend(checkpoint["state_dict"])

    for epochs in (1, 2):
        callbacks = [ShardoptCheckpoint(folder)]
        if averaging is not None:
            name, options = averaging
            callbacks.append(getattr(lightning.pytorch.callbacks, name)(**options))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        Trainer(accelerator="cpu", max_epochs=epochs, callbacks=callbacks, **quiet).fit(Module())
    return found


def fit_and_evaluate(folder, saved_by):
    """Fits on these ranks; then validates, tests and predicts from the checkpoint. Returns what each has computed."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    import shardopt
    from shardopt import checkpoint
    from shardopt.errors import OptionError
    from shardopt.integrations.lightning import ShardoptCheckpoint
    from shardopt.integrations.lightning_strategy import ShardoptMixin

    class Strategy(ShardoptMixin, DDPStrategy):
        pass

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.seen = torch.nn.Linear(4, 1), []

        def training_step(self, batch, batch_index):
            return self.network(batch).square().mean()

        def configure_optimizers(self):
            return shardopt.keyed("adamw", self.named_parameters(), lr=0.01)

        def validation_step(self, batch, batch_index):
            self.seen.append(self.network(batch).sum().item())

        test_step = predict_step = validation_step

    def trainer(*callbacks):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        strategy = Strategy(process_group_backend="gloo")
        size = dist.get_world_size()
        return Trainer(
            accelerator="cpu", devices=size, strategy=strategy, max_epochs=2, callbacks=[*callbacks], **quiet
        )

    batches = DataLoader(torch.arange(32.0).view(8, 4), batch_size=2)
    saving = ModelCheckpoint(folder) if saved_by == "strategy" else ShardoptCheckpoint(folder)
    trained = Module()
    fitting = trainer(saving)
    fitting.fit(trained, batches)
    path = saving.best_model_path if saved_by == "strategy" else checkpoint.Manager(folder).path(4)
    found = {}
    if saved_by == "callback":
        with pytest.raises(OptionError, match="a fit would mix two checkpoints"):
            trainer(ShardoptCheckpoint(folder)).fit(Module(), batches, ckpt_path=path)
        requeued = f"{folder}-hpc/hpc_ckpt_1.ckpt"
        os.makedirs(os.path.dirname(requeued), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(path, requeued)
        with pytest.raises(OptionError, match="auto_requeue=False"):
            trainer(ShardoptCheckpoint(folder)).fit(Module(), batches, ckpt_path=requeued)
    for verb in ("validate", "test", "predict"):
        module = Module()
        evaluating = trainer()
        getattr(evaluating, verb)(module, batches, ckpt_path=path)
        found[verb] = module.seen, torch.equal(module.network.weight, trained.network.weight)
    with torch.no_grad():
        wanted = trained.network.weight.clone()
        trained.network.weight.zero_()
    fitting.test(trained, batches, ckpt_path=path)  # of a trainer that has its optimizers
    found["test after fit"] = trained.seen, torch.equal(wanted, trained.network.weight)
    return found


def samples_of_tensor_parallelism(folder, by, **share):
    """Validates and fits two ranks of tensor parallelism; returns the samples that this one was given."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import shardopt
    from shardopt.integrations.lightning import ShardoptCheckpoint
    from shardopt.integrations.lightning_strategy import ShardoptStrategy
    from shardopt.integrations.loader import ResumableLoader

    seen = []

    class Module(LightningModule):
        def configure_model(self):
            self.network = torch.nn.Linear(1, 2)
            parallelize_module(self.network, self.device_mesh["tensor_parallel"], ColwiseParallel())

        def training_step(self, batch, batch_index):
            seen.append(batch.flatten().tolist())
            return self.network(batch).square().mean()

        validation_step = training_step

        def configure_optimizers(self):
            return shardopt.keyed("adamw", self.named_parameters(), lr=0.01)

        def train_dataloader(self):
            return ResumableLoader(torch.arange(16.0).view(16, 1), batch_size=4, shuffle=False, **share)

    strategy = ShardoptStrategy if by == "strategy" else ModelParallelStrategy
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(1, 2, process_group_backend="gloo"),
        callbacks=[ModelCheckpoint(folder) if by == "strategy" else ShardoptCheckpoint(folder)],
        **{"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
    )
    module = Module()
    trainer.validate(module, module.train_dataloader(), verbose=False)
    trainer.fit(module)
    return seen


def remove_on_rank_0(folder):
    """Removes a checkpoint, and one that cannot be removed, as a rank may that decides by a metric of its own."""
    from shardopt import checkpoint
    from shardopt.integrations import lightning_strategy
    from shardopt.integrations.run import of_rank_0

    def fail(storage):
        raise OSError("it is in use")

    paths = [f"{folder}/{name}" for name in "ab"]
    for path in paths:
        checkpoint.save(path, {"step": 1})
    strategy = lightning_strategy.ShardoptMixin()
    if dist.get_rank() == 0:
        strategy.remove_checkpoint(paths[0])
        lightning_strategy.remove_checkpoint = fail
        strategy.remove_checkpoint(paths[1])
    return of_rank_0("what is left", {"names": sorted(os.listdir(folder))})["names"]


def random_numbers_of(folder, *steps, own_class=False):
    """Fits to each number of steps, from the newest checkpoint; returns the random numbers that the last fit used.

    Args:
        own_class: whether the program derives its loader from torchdata's.
    """
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from torchdata.stateful_dataloader import StatefulDataLoader

    import shardopt
    from shardopt.integrations.lightning import ShardoptCheckpoint

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.used = torch.nn.Linear(4, 1), []

        def training_step(self, batch, batch_index):
            self.used.append(torch.rand(1).item())
            return self.network(batch).square().mean()

        def configure_optimizers(self):
            return shardopt.keyed("sgd", self.named_parameters(), lr=0.01)

    class Own(StatefulDataLoader):
        pass

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for end in steps:
        torch.manual_seed(0)
        module = Module()
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=end, callbacks=[ShardoptCheckpoint(folder)], **quiet)
        trainer.fit(module, (Own if own_class else StatefulDataLoader)(torch.ones(8, 4), batch_size=2))
    return module.used
