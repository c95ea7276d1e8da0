"""Uses shardopt for torchtitan's checkpoints and optimizers by a config: no fork, no patch.

    from shardopt.integrations.torchtitan import ShardoptCheckpoints, ShardoptOptimizers

    def my_config() -> Trainer.Config:                                    # --module my_module --config my_config
        config = llama3_debugmodel()
        config.checkpoint = ShardoptCheckpoints.Config(enable=True, interval=500)
        config.optimizer = ShardoptOptimizers.Config(param_groups=config.optimizer.param_groups)
        return config

Written for torchtitan 0.3.0.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.tools import filesystem

from shardopt import checkpoint
from shardopt.algorithms.registry import spec_of
from shardopt.checkpoint.reports import announce
from shardopt.errors import MismatchError, OptionError, Problem
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.keyed import keyed
from shardopt.optim.state_dict.options import known_options
from shardopt.ranks import ranks_of

MODEL, OPTIMIZER, SCHEDULE, DATA, TRAINER = "model", "optimizer", "lr_scheduler", "dataloader", "train_state"
_RANKS = "world_size"  # under which torchtitan's loaders have the number of data ranks


class ShardoptCheckpoints(BaseCheckpointManager):  # type: ignore[misc, unused-ignore]  # torchtitan may be absent
    """A torchtitan checkpoint manager that saves and restores by a `checkpoint.Manager`.

    Its checkpoints have model, optimizer, schedule, data and step, whole at the last step, too. Runs resume with other
    meshes and stages of a pipeline. Loaders whose state is the same on every data rank (`ResumableStatefulLoader`)
    resume with another number of them; those of torchtitan are refused, unless `exclude_from_loading` has "dataloader".

    Args:
        config: `folder`, `interval`, `keep_latest_k` and `exclude_from_loading` are torchtitan's. `load_step` rewinds
            the run to that step, at each start; with `load_only` it leaves the run as it is.
            `stage` is `checkpoint.Manager`'s, "none" for a save that training waits for. With `stop_on_sigterm` a
            SIGTERM to any rank makes all ranks save after the same step, and leave. `initial_load_path` is a checkpoint
            of shardopt to begin with, of which the model alone is taken where `initial_load_model_only` is set.
            `storage_options` are arguments of fsspec's file system for both.
        dataloader, model_parts, optimizers, lr_schedulers, states: of the trainer; loaded in place.
        sd_adapter: is not used: `shardopt convert` writes other formats.
        base_folder: what `folder` is relative to.

    Raises:
        OptionError: an option of `config` that is not here.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc, unused-ignore]  # as above
        last_save_model_only: bool = False
        stage: Literal["none", "now", "lazy"] = "now"
        stop_on_sigterm: bool = True
        storage_options: dict[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        _refuse_options(config)
        self._config, self._loader = config, dataloader
        self._app = {
            MODEL: model_parts[0] if len(model_parts) == 1 else _ModelParts(model_parts),
            OPTIMIZER: optimizers.keyed if isinstance(optimizers, ShardoptOptimizers) else optimizers,
            SCHEDULE: lr_schedulers,
            **{name: _TrainState(state) if name == TRAINER else state for name, state in states.items()},
        }
        self._manager = checkpoint.Manager(
            filesystem.join(base_folder, config.folder),
            every=config.interval,
            keep=config.keep_latest_k or None,
            stage=None if config.stage == "none" else config.stage,
            stop_on=signal.SIGTERM if config.stop_on_sigterm and not config.load_only else None,
            storage_options=config.storage_options or None,
        )

    def _load(self, step: int = -1) -> bool:
        """Restores the newest checkpoint, or that of a step; returns whether there was one. Collective.

        A step to train from rewinds the run. With `load_only` the run stays as it is.
        """
        excluded = set(self._config.exclude_from_loading)
        app = {name: value for name, value in self._app.items() if name not in excluded}
        select = "^(?!" + "|".join(rf"{re.escape(name)}(\.|$)" for name in excluded) + ")" if excluded else None
        if DATA not in excluded:
            app |= self._data()
        path, optimizer, schedules = self._config.initial_load_path, self._app[OPTIMIZER], self._app[SCHEDULE]
        # Torchtitan's load a step alone, and compute the rates by the config's.
        by_config = getattr(type(schedules), "load_state_dict", None) is LRSchedulersContainer.load_state_dict
        if by_config and isinstance(optimizer, KeyedOptimizer) and optimizer.param_groups:
            optimizer.keep_options("lr")
        try:
            if self._config.load_only and step != -1:
                report = checkpoint.load(self._manager.path(step), app, select=select, init_state=True)
                if ranks_of().rank == 0:
                    announce(f"loaded step {step} from {report.url}; the run stays as it is")
            elif not self._manager.restore(app, step=None if step == -1 else step, select=select):
                if not path:
                    return False
                if self._config.initial_load_model_only:
                    app, select = {MODEL: self._app[MODEL]}, rf"^{MODEL}\."
                options = self._config.storage_options or None
                checkpoint.load(path, app, select=select, init_state=True, storage_options=options)
        except MismatchError as error:
            raise MismatchError(error.message, [*map(_with_reason, error.problems)], code=error.code) from None
        if by_config:
            _set_rates(schedules)
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Saves if the step is due or the last one. Collective. Ends the job with SystemExit after a SIGTERM."""
        if self._config.load_only:
            return False
        force = last_step or (curr_step == 1 and self._config.enable_first_step_checkpoint)
        return self._manager.save(curr_step, self._app | self._data(), force=force) is not None

    def _wait_for_saving(self) -> None:
        """Does nothing, as the next save waits for the previous save."""

    def _maybe_wait_for_staging(self) -> None:
        """Does nothing, as a step waits for the copies that are still being made."""

    def _close(self) -> None:
        """Waits for saves in the background. Raises their failure."""
        if hasattr(self, "_manager"):
            self._manager.close()

    def _data(self) -> dict[str, Any]:
        """Returns the loader itself if all ranks share its state, else its state with a key per data rank."""
        if self._loader is None:
            return {}
        return {DATA: _PositionsByRank(self._loader) if _RANKS in self._loader.state_dict() else self._loader}


class ShardoptOptimizers(OptimizersContainer):  # type: ignore[misc, type-arg, unused-ignore]  # torchtitan may be absent
    """The optimizers of torchtitan's groups as one, keyed by name, over all of a rank's model parts.

    Attributes:
        keyed: the optimizer, of `shardopt.keyed`.

    Args:
        config: as torchtitan's: of each group its pattern, the first that is found in a name counts, and the name and
            options of its algorithm, any that `shardopt.keyed` knows. `implementation` is "fused", "foreach" or
            "for-loop", for algorithms that have it.
        model_parts: of this rank; the patterns may match on other ranks alone.

    Raises:
        OptionError: an implementation that is not here, or a parameter that no pattern matches.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc, unused-ignore]  # as above
        pass

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        named = {
            canonical_fqn(name): parameter
            for part in model_parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        _refuse_groups(config, named)
        implementation = {name: config.implementation == name for name in ("fused", "foreach")}
        groups = [
            {
                "match": group.pattern,
                "algorithm": group.optimizer_name,
                **known_options(spec_of(group.optimizer_name).optimizer, implementation),
                **group.optimizer_kwargs,
            }
            for group in config.param_groups
        ]
        self.model_parts = model_parts
        self.keyed = keyed(config.param_groups[-1].optimizer_name, named.items(), groups=groups)
        self.optimizers = [self.keyed]
        torch.optim.Optimizer.__init__(self, [*named.values()], {})  # for its hooks, of which models register some

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the keyed optimizer, without making any."""
        return self.keyed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.keyed.load_state_dict(state_dict)


class _ModelParts:
    """Several pipeline stages on one rank, as parts of one model."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {canonical_fqn(name): value for part in self._parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self._parts:
            part.load_state_dict({name: state_dict[canonical_fqn(name)] for name in part.state_dict()})


class _PositionsByRank:
    """The position of torchtitan's own loader: each data rank has it under a name of its own.

    A plain dict would not do: a load gives it whatever entries are stored, also those of other numbers of ranks.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def held_state_names(self) -> tuple[str, ...]:
        """No "state" by names of parameters; but each entry has a key of its own."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loader.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self._loader.load_state_dict(state_dict)


class _TrainState:
    """The trainer's own state, which counts one rank's tokens; stores the count of all ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state = dict(self._trainer.state_dict())
        state["ntokens_seen"] *= self._ranks
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tokens = state_dict["ntokens_seen"] // self._ranks
        self._trainer.load_state_dict({**state_dict, "ntokens_seen": tokens})

    @property
    def _ranks(self) -> int:
        """The number of ranks whose tokens the trainer adds up."""
        dims = self._trainer.parallel_dims
        return int(dims.get_mesh("loss").size()) if dims.dp_cp_enabled else 1


def _set_rates(schedules: Any) -> None:
    """Gives groups the rates that their schedules computed when they were loaded, as their next step would."""
    for schedule in schedules:
        for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _with_reason(problem: Problem) -> Problem:
    """Adds to a refusal of other data ranks' positions why they are refused."""
    if not problem.key.startswith(f"{DATA}.dp_rank_"):
        return problem
    remedy = (
        "what a data rank has seen of its stream says nothing for another number of them: use as many, or a loader "
        'whose position holds for any (ResumableStatefulLoader), or exclude_from_loading=["dataloader"] to begin anew'
    )
    return replace(problem, remedy=remedy)


def _refuse_options(config: ShardoptCheckpoints.Config) -> None:
    """Raises OptionError for features of torchtitan's own manager that this one lacks."""
    remedy = "leave it out, and write that format with `shardopt convert` (docs/convert.md)"
    names = ("initial_load_in_hf", "last_save_in_hf", "last_save_model_only", "create_seed_checkpoint")
    problems = [Problem(f"checkpoint.{name}", "True", "False", remedy) for name in names if getattr(config, name)]
    if problems:
        raise OptionError("options of torchtitan's checkpoints that are not here", problems, code="framework")


def _refuse_groups(config: ShardoptOptimizers.Config, named: Mapping[str, Any]) -> None:
    problems = []
    if config.implementation not in ("fused", "foreach", "for-loop"):
        required, remedy = "fused, foreach or for-loop", "choose one of them"
        problems.append(Problem("optimizer.implementation", config.implementation, required, remedy))
    patterns = [group.pattern for group in config.param_groups]
    for name in named:
        if not any(re.search(pattern, name) for pattern in patterns):
            remedy = 'append a group with the pattern ".*"'
            problems.append(Problem(name, "no pattern that matches it", f"one of {patterns}", remedy))
    if problems:
        raise OptionError("groups of torchtitan's that cannot be optimized", problems, code="framework")
