"""Saves and loads Lightning's own checkpoints by shardopt: `trainer.fit(ckpt_path=…)` and ModelCheckpoint with FSDP2.

trainer = Trainer(strategy=ShardoptStrategy(data_parallel_size=4, tensor_parallel_size=1), ...)
trainer.fit(module, ckpt_path="out/epoch=3-step=400.ckpt")  # on any number of ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from shardopt import checkpoint as checkpoints
from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.saving.removal import remove_checkpoint, remove_in_the_way
from shardopt.checkpoint.storage import storage_of
from shardopt.integrations.lightning_state import LoaderStates, app_of, deal_as, without_loaders
from shardopt.integrations.run import FrameworkState, of_rank_0, removal_told, replace_checkpoint
from shardopt.ranks import ranks_of

__all__ = ["ShardoptMixin", "ShardoptStrategy"]

_ELSEWHERE = ("state_dict", "optimizer_states", "lr_schedulers")  # of Lightning's own checkpoint, saved by keys here


class ShardoptMixin:
    """Saves and loads a strategy's checkpoints by shardopt. Must stand before the strategy among the base classes.

    A checkpoint is a directory in the place of Lightning's file or directory, as `ShardoptCheckpoint` writes it, which
    may be loaded here as well. One that stands in the way of a new one is replaced by it once it is whole.
    """

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Tells Lightning to load once module and optimizers are set up, which a load in place needs."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Tells Lightning not to restore optimizers' state, as `load_checkpoint` has done so."""
        return False

    def process_dataloader(self, dataloader: object) -> object:
        """Has a loader of ours deal its batches to the ranks among which this strategy divides data."""
        deal_as(self, dataloader)
        return super().process_dataloader(dataloader)  # type: ignore[misc]  # of the strategy that this is mixed into

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns nothing, as the module is saved in place."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns nothing, as optimizers are saved in place."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing, as `load_checkpoint` has loaded the module."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing, as `load_checkpoint` has loaded the optimizers."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves a trainer's dumped state, and its module, optimizers and schedules. All ranks must call.

        Raises:
            StateError: there is something in the dump that is no plain value, such as a hyperparameter.
            CheckpointError: as by `checkpoint.save`.
        """
        path = _path_of_rank_0(filepath)
        rest = {name: value for name, value in checkpoint.items() if name not in _ELSEWHERE}
        fit_loop = {"fit_loop": rest.pop("loops")["fit_loop"]}
        state, loaders = without_loaders({**of_rank_0("Lightning's checkpoint", rest), "loops": fit_loop})
        app = app_of(self._trainer(), FrameworkState(state), loaders)
        if not _is_committed(path):
            checkpoints.save(path, app)
            return
        beside = f"{path}.new"
        ranks_of(None).on_rank_0(f"clearing {beside}", lambda: remove_in_the_way(storage_of(beside)))
        checkpoints.save(beside, app)
        ranks_of(None).on_rank_0(f"putting {beside} in the place of {path}", lambda: replace_checkpoint(path, beside))

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads module, optimizers and schedules in place; returns what Lightning loads itself.

        Raises:
            CheckpointNotFoundError, MismatchError, CorruptionError: as by `checkpoint.load`.
        """
        path = _path_of_rank_0(checkpoint_path)
        trainer, framework, loaders = self._trainer(), FrameworkState(), LoaderStates()
        app = app_of(trainer, framework, loaders)
        fits = trainer.state.fn == TrainerFn.FITTING  # afterwards a trainer still has its optimizers
        if fits:
            checkpoints.load(path, app, init_state=True)
        else:
            own = {name: app[name] for name in ("model", "lightning")}
            checkpoints.load(
                path, own, select=r"^(model|lightning)(\.|$)", strict=checkpoints.Strictness(unexpected="ignore")
            )
        loaders.put_into(framework.value)
        if not fits:
            del framework.value["loops"]  # the loop that was saved is that of a fit: Lightning would look for its own
        schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        return {**framework.value, "state_dict": {}, "optimizer_states": [], "lr_schedulers": schedules}

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Removes a checkpoint, on rank 0; a half-removed one is no checkpoint. One that cannot be removed is told of.

        Not collective: where the metric of a ModelCheckpoint is another on each rank, each decides what to remove.
        """
        if ranks_of(None).rank == 0:
            with removal_told(filepath):
                remove_checkpoint(storage_of(filepath))

    def _trainer(self) -> Any:
        return self.lightning_module.trainer  # type: ignore[attr-defined]  # of the strategy that this is mixed into


class ShardoptStrategy(ShardoptMixin, ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` (FSDP2, tensor parallel) whose checkpoints shardopt saves and loads."""


def _path_of_rank_0(path: str | os.PathLike[str]) -> str:
    return str(of_rank_0("the path of a checkpoint", {"path": os.fspath(path)})["path"])


def _is_committed(path: str) -> bool:
    what = "looking for a checkpoint"
    return bool(ranks_of(None).on_rank_0(what, lambda: storage_of(path).exists(MANIFEST_NAME)))
