"""Converts the state of a Lightning trainer to an app and back, for the callback and for the strategy.

    {"model": module, "optimizer": optimizer, "schedule": schedule, "random": …, "loaders": …, "lightning": …}

Where there are several optimizers or schedules they are lists, "optimizers" and "schedules". "lightning" has the rest
of what Lightning puts in a checkpoint of its own, under Lightning's names: the loops' progress, the callbacks' state.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer, __version__
from lightning.pytorch.utilities import CombinedLoader

from shardopt.data.random_state import RandomState
from shardopt.errors import Problem, StateError
from shardopt.integrations.optimizers import add_objects, require_keyed
from shardopt.integrations.run import FrameworkState, of_rank_0
from shardopt.state.state import PerRank

_KEYED = "return shardopt.keyed(torch.optim.AdamW, self.named_parameters(), lr=...) from configure_optimizers"
_LOADERS = "combined_loader"  # Lightning's name for the states of data loaders, within those of the fit loop


def app_of(trainer: Trainer, framework: FrameworkState, loaders: LoaderStates) -> dict[str, Any]:
    """Returns the app of a trainer whose strategy is set up.

    Raises:
        StateError: an optimizer is not keyed by parameter name.
    """
    optimizers = require_keyed(trainer.optimizers, _KEYED)
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    app: dict[str, Any] = {"model": trainer.lightning_module, "random": RandomState(on_resize="keep")}
    app |= {"loaders": loaders, "lightning": framework}
    add_objects(app, "optimizer", optimizers)
    add_objects(app, "schedule", schedules)
    return app


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Returns Lightning's state beside model, optimizers and schedules. Collective: callbacks' state is rank 0's."""
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": __version__,
    }
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    checkpoint["callbacks"] = {key: state for key, state in states.items() if state}
    precision, datamodule = trainer.precision_plugin, trainer.datamodule
    for owner in (precision, datamodule):
        if owner is not None and (state := owner.state_dict()):
            checkpoint[type(owner).__qualname__] = state
    precision.on_save_checkpoint(checkpoint)
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
    trainer.lightning_module.on_save_checkpoint(checkpoint)
    checkpoint = of_rank_0("the state of Lightning's callbacks", checkpoint)
    return {**checkpoint, "loops": {"fit_loop": trainer.fit_loop.state_dict()}}


def load_state(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Hands back the state from `state_of`, as Lightning does when it resumes by itself."""
    precision, datamodule = trainer.precision_plugin, trainer.datamodule
    trainer.lightning_module.on_load_checkpoint(checkpoint)
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        if callback.state_key in checkpoint["callbacks"]:
            callback.load_state_dict(checkpoint["callbacks"][callback.state_key])
    precision.on_load_checkpoint(checkpoint)
    for owner in (precision, datamodule):
        if owner is not None and type(owner).__qualname__ in checkpoint:
            owner.load_state_dict(checkpoint[type(owner).__qualname__])
    trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])


def without_loaders(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], LoaderStates]:
    """Removes the positions of data loaders from Lightning's state, as they may differ between ranks."""
    loop = checkpoint["loops"]["fit_loop"]
    own = dict(loop["state_dict"])
    states = own.pop(_LOADERS, [])
    loops = {**checkpoint["loops"], "fit_loop": {**loop, "state_dict": own}}
    return {**checkpoint, "loops": loops}, LoaderStates(states)


class LoaderStates:
    """The positions of stateful data loaders: stored once if they hold for any rank, else for each rank.

    Args:
        states: in Lightning's order.
    """

    def __init__(self, states: list[Any] | None = None) -> None:
        self.states: list[Any] = states or []

    def state_dict(self) -> dict[str, Any]:
        shared = [state if _is_shared(state) else None for state in self.states]
        own = [None if _is_shared(state) else state for state in self.states]
        return {"shared": {"states": shared}, "of_rank": PerRank(own, "keep")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        shared, own = state_dict["shared"]["states"], state_dict["of_rank"].value
        if any(state is None for state in shared) and len(own) != len(shared):
            found = "the positions of data loaders on another number of ranks"
            remedy = "give Lightning a shardopt.integrations.loader.ResumableLoader"
            problem = Problem("loaders", found, "those of as many ranks", remedy)
            raise StateError("data cannot be resumed", [problem], code="data-position")
        self.states = [own[i] if state is None else state for i, state in enumerate(shared)]

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Puts the positions back to where `without_loaders` removed them."""
        if self.states:
            checkpoint["loops"]["fit_loop"]["state_dict"][_LOADERS] = self.states

    def load_positions(self, loaders: Any) -> None:
        """Loads positions into loaders that count by themselves; Lightning does so only in the middle of an epoch."""
        if self.states:
            stateful = [each for each in CombinedLoader(loaders).flattened if hasattr(each, "load_state_dict")]
            for loader, state in zip(stateful, self.states, strict=False):
                if _is_shared(state):
                    loader.load_state_dict(state)


def _is_shared(state: Any) -> bool:
    """Whether a state belongs to a `ResumableSampler`, that is, to a `ResumableLoader` or `ResumableStatefulLoader`."""
    return isinstance(state, dict) and state.keys() >= {"size", "seed", "epoch", "position"}
