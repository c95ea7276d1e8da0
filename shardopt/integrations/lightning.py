"""Checkpoints of a Lightning trainer by a callback, for any strategy, resumed on any number of ranks.

trainer = Trainer(callbacks=[ShardoptCheckpoint("out/checkpoints", every=500)], ...)
trainer.fit(module)  # from the newest committed checkpoint, if there is one
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler, OnExceptionCheckpoint

from shardopt.checkpoint import Manager
from shardopt.data.random_state import RandomState
from shardopt.errors import OptionError, Problem
from shardopt.integrations.lightning_state import (
    METRICS,
    LoaderStates,
    app_of,
    begin_dealing,
    draws_seed_in_each_epoch,
    end_dealing,
    end_short_epoch,
    load_state,
    progress_of,
    state_of,
    step_plateaus,
    validates,
    without_loaders,
)
from shardopt.integrations.run import FrameworkState, TrainingRun

__all__ = ["ShardoptCheckpoint"]


class ShardoptCheckpoint(Checkpoint):
    """Restores the newest checkpoint when a fit begins, saves at regular steps, and at the end. All ranks need one.

    Saved are the module, its optimizers (which have to be `shardopt.keyed`) and schedules, random states, the progress
    of the loops, positions of data loaders, and what callbacks and hooks add. Lightning's own checkpoints are off then,
    unless a ModelCheckpoint is given too. Steps are those of optimizers, as `trainer.global_step` counts them.

    Args:
        root: of the run's checkpoints, as for `checkpoint.Manager`.
        every: a checkpoint every so many steps; or, a `timedelta`, at the first step after each such time.
        options: `start_from`, the URL of a checkpoint of another program, from which a run without any takes model and
            optimizer; and those of `checkpoint.Manager`, such as `keep`, `stage` or `storage_options` (which hold for
            `start_from` too). `stop_on` is SIGTERM; None leaves the signal to Lightning.

    Attributes:
        restored: the step that the last fit began with.
    """

    def __init__(self, root: str | os.PathLike[str], *, every: int | timedelta = 1, **options: Any) -> None:
        self._run = TrainingRun(root, every=every, **options)
        self._loaders = LoaderStates()
        self._metrics: dict[str, float] = {}  # restored
        self._random: dict[str, Any] = {}  # restored
        self._draws_seed = False  # whether an epoch begins after what was restored
        self._progress: dict[str, Any] | None = None  # after the last batch, while its step is not over
        self.restored = 0

    @property
    def manager(self) -> Manager:
        """The Manager, during a fit."""
        return self._run.manager

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Moves behind all other callbacks: what a ModelCheckpoint notes of a step is to be saved with it.

        Loaders are dealt to the ranks from now on, also in a validation, test or prediction without a fit.
        """
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
        begin_dealing(trainer.strategy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        end_dealing(trainer.strategy)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores: strategy, optimizers and schedules exist by now, and no data was requested yet."""
        framework, self._loaders, self._progress = FrameworkState(), LoaderStates(), None
        app = app_of(trainer, framework, self._loaders)
        self.restored = self._run.begin(app)
        if self.restored:
            self._random = app["random"].state_dict()
            self._loaders.put_into(framework.value)
            load_state(trainer, framework.value)
            self._draws_seed = trainer.is_last_batch
        self._metrics = framework.value.get(METRICS, {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts back what Lightning has changed since the restore.

        Raises:
            OptionError: Lightning has loaded a `ckpt_path` over what was restored.
        """
        if self.restored and trainer.ckpt_path is not None:
            found = f"{trainer.ckpt_path}, and step {self.restored} in the callback's root"
            remedy = "leave ckpt_path out to resume that step, or give ShardoptCheckpoint another root"
            if os.path.basename(trainer.ckpt_path).startswith("hpc_ckpt_"):
                remedy = (
                    "Lightning saved this file for a requeue, and takes it by itself: remove it to resume that step. "
                    "Pass Trainer(plugins=[SLURMEnvironment(auto_requeue=False)]), so that it saves no other"
                )
            elif any(isinstance(each, OnExceptionCheckpoint) for each in trainer.callbacks):
                remedy += "; leave OnExceptionCheckpoint out, for which Lightning takes a ckpt_path by itself"
            problem = Problem("ckpt_path", found, "one checkpoint to resume from", remedy)
            raise OptionError("a fit would mix two checkpoints", [problem], code="framework")
        # Lightning has put in a handler since, in which the rank that got the signal alone begins a collective.
        self._run.take_signal_back()
        self._loaders.load_positions(trainer.train_dataloader)
        if self.restored and not (self._draws_seed and draws_seed_in_each_epoch(trainer)):
            RandomState(on_resize="keep").load_state_dict(self._random)  # Lightning has opened the loaders since
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._metrics.items()})
        for each in trainer.callbacks if self.restored else ():
            if isinstance(each, GradientAccumulationScheduler):  # Lightning does not begin this epoch once more
                each.on_train_epoch_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Saves if this batch has ended a due step; not after a batch that only accumulated gradients.

        What follows at this step belongs to it: a validation, and callbacks, schedules and hooks at the epoch's end. So
        the save waits for them. A resume begins with the next batch, and does not repeat them: the loops' progress is
        that of now, from which Lightning resumes so.
        """
        if trainer.is_last_batch:  # of an epoch; of a fit that `max_steps` ends, it is not
            end_short_epoch(trainer)
        self._progress = None
        if trainer.is_last_batch or validates(trainer):
            self._progress = progress_of(trainer)
        else:
            self._after_step(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self._progress is not None and not trainer.is_last_batch:  # Lightning passes over an empty validation
            self._after_step(trainer)
        self._progress = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._progress is not None and not trainer.is_last_batch:
            self._after_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step_plateaus(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._progress is not None:  # schedules that go by a metric of the epoch are stepped by now
            self._after_step(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._after_step(trainer)
        self._run.end(trainer.global_step, lambda: self._app(trainer))
        self._progress = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._progress = None
        self._run.abort()

    def _app(self, trainer: Trainer) -> dict[str, Any]:
        state, loaders = without_loaders(state_of(trainer, self._progress or progress_of(trainer)))
        return app_of(trainer, FrameworkState(state), loaders)

    def _after_step(self, trainer: Trainer) -> None:
        self._run.after_step(trainer.global_step, lambda: self._app(trainer))
