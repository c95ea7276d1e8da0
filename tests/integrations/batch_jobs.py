"""Three epochs of a data set that batches do not divide, in one program or several: which samples each step is of.

Each part of a run ends behind a step, and the next one makes all that it needs anew, and resumes from the checkpoint.
"""

import contextlib
import io
import logging
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

import shardopt
from shardopt import checkpoint

SAMPLES, BATCH, EPOCHS = 125, 12, 3
STEPS = -(-SAMPLES // BATCH) * EPOCHS


class Numbers(Dataset):
    """Samples that say which they are."""

    def __init__(self, size=SAMPLES):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if i >= self.size:
            raise IndexError(i)
        return {"number": torch.tensor([float(i)]), "input_ids": [0] * (1 + i % 7)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbers())


def numbers_of(samples):
    return {"number": torch.stack([sample["number"] for sample in samples])}


class Mean(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(1, 1)

    def forward(self, number):
        return {"loss": super().forward(number / SAMPLES).sub(0.5).square().mean()}


def of_all_ranks(numbers):
    """The samples of a global batch, in their order over the ranks."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [int(number) for number in numbers.flatten()])
    return [number for part in parts for number in part]


def see(framework, out, stops, logged=False, **options):
    """Trains up to each of `stops`; returns samples and loss of each batch by step. `logged`: also what was logged."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    seen, lines = {}, io.StringIO()
    logging.getLogger("shardopt").addHandler(logging.StreamHandler(lines))
    for stop in stops:
        assert WAYS[framework](Path(out), stop, seen, **options) == stop
    return {**seen, "logged": lines.getvalue()} if logged else seen


def see_each(framework, runs, **options):
    """As `see`, for each folder and its stops."""
    return [see(framework, out, stops, **options) for out, stops in runs]


def trainer_of(out, stop, seen, resumable=True, dataset=None, **options):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shardopt.integrations.trainer import ShardoptCallback

    class Seeing(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            numbers = of_all_ranks(inputs["number"])
            loss = super().training_step(model, inputs, *args, **kwargs)
            seen.setdefault(self.state.global_step + 1, []).append((numbers, loss.item()))
            return loss

        def floating_point_ops(self, inputs):
            return inputs["number"].numel()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            control.should_training_stop = state.global_step >= stop

    given = {"seed": 1, "per_device_train_batch_size": BATCH // dist.get_world_size(), **options}
    arguments = TrainingArguments(
        str(out),
        num_train_epochs=EPOCHS,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **given,
    )
    trainer = Seeing(Mean(), arguments, train_dataset=Numbers() if dataset is None else dataset, callbacks=[Stop()])
    if resumable:
        trainer.add_callback(ShardoptCallback(trainer, out / "checkpoints", every=100))
    return trainer


def with_trainer(*given, **options):
    trainer = trainer_of(*given, **options)
    trainer.train()
    return trainer.state.global_step


def results_of_trainer(out, stops, **options):
    """The loss that `train()` returns, and the operations so far, of each part; and the losses of this rank by step."""
    seen, results = {}, []
    for stop in stops:
        trainer = trainer_of(Path(out), stop, seen, **options)
        results.append((trainer.train().training_loss, trainer.state.total_flos))
    return results, {step: loss for step, ((_, loss),) in seen.items()}


def loader_of(kind, drop_last):
    from shardopt.integrations.loader import ResumableLoader

    options = {"batch_size": BATCH, "seed": 1, "drop_last": drop_last, "collate_fn": numbers_of}
    if kind == "ResumableLoader":
        return ResumableLoader(Numbers(), **options)
    if kind == "mixture":
        return ResumableLoader(ConcatDataset([Numbers(100), Numbers(25)]), weights=[1, 2], **options)
    from shardopt.integrations.torchdata import ResumableStatefulLoader

    return ResumableStatefulLoader(Numbers(), **options)


def with_loop(out, stop, seen, kind="ResumableLoader", drop_last=False):
    """A loop of one's own; stopped behind a step, before the loader is asked for the next batch."""
    loader, app = loader_of(kind, drop_last), {"step": 0}
    app["data"] = loader
    with checkpoint.Manager(out / "checkpoints") as manager:
        manager.restore(app)
        while True:
            for batch in loader:
                app["step"] += 1
                seen.setdefault(app["step"], []).append((of_all_ranks(batch["number"]), 0.0))
                if app["step"] == stop:
                    manager.save(stop, app)
                    return stop


def with_accelerate(out, stop, seen, prepared=False, sets_epoch=False, drop_last=False, **options):
    from accelerate import DataLoaderConfiguration

    from shardopt.integrations.accelerate import Accelerator

    torch.manual_seed(1)  # of the order
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, **options)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = Mean()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if prepared:
        options = {"batch_size": BATCH, "shuffle": True, "drop_last": drop_last, "collate_fn": numbers_of}
        loader = accelerator.prepare(DataLoader(Numbers(), **options))
    else:
        loader = loader_of("ResumableLoader", drop_last)
        accelerator.register_for_checkpointing(loader)
    progress = {"step": 0}
    with checkpoint.Manager(out / "checkpoints") as manager:
        manager.restore(accelerator.app({"progress": progress}))
        for epoch in range(progress["step"] // len(loader), EPOCHS):
            rest = loader
            if prepared:
                done = progress["step"] % len(loader)
                rest = accelerator.skip_first_batches(loader, done) if done else loader
                if sets_epoch:
                    rest.set_epoch(epoch)
            for batch in rest:
                loss = model(**batch)["loss"] * torch.rand(())  # as dropout takes of these numbers
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                progress["step"] += 1
                seen.setdefault(progress["step"], []).append((of_all_ranks(batch["number"]), loss.item()))
                if progress["step"] == stop:
                    manager.save(stop, accelerator.app({"progress": progress}))
                    return stop


def with_lightning(out, stop, seen, kind="ResumableLoader", drop_last=False):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from shardopt.integrations.lightning import ShardoptCheckpoint

    class Stopped(Exception):
        pass

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.mean = Mean()

        def configure_optimizers(self):
            return shardopt.keyed("adamw", self.named_parameters())

        def train_dataloader(self):
            return loader_of(kind, drop_last)

        def training_step(self, batch, i):
            if self.trainer.global_step == stop:
                raise Stopped
            loss = self.mean(**batch)["loss"]
            at = self.trainer.global_step + 1
            seen.setdefault(at, []).append((of_all_ranks(batch["number"]), loss.item()))
            return loss

    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[ShardoptCheckpoint(out / "checkpoints", every=1)],
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    with contextlib.suppress(Stopped):
        trainer.fit(Module())
    return trainer.global_step


WAYS = {"trainer": with_trainer, "loop": with_loop, "accelerate": with_accelerate, "lightning": with_lightning}
