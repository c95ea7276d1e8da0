"""An Accelerate `Accelerator` whose states shardopt saves and loads, resumed on any number of ranks.

    from shardopt.integrations.accelerate import Accelerator  # in the place of accelerate's

    accelerator = Accelerator()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(loader)
    accelerator.save_state("out/step-500")
    accelerator.load_state("out/step-500")

or with all that a Manager does: `manager.restore(accelerator.app(step))`, `manager.save(count, accelerator.app(step))`.
"""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderStateMixin
from torch import nn

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.saving.removal import remove_checkpoints
from shardopt.checkpoint.storage import storage_of
from shardopt.data.random_state import RandomState
from shardopt.data.sampler import refuse_any_order, require_dealt
from shardopt.data.workers import shield_if_listening
from shardopt.errors import CheckpointError, CheckpointNotFoundError, MismatchError, OptionError, Problem
from shardopt.integrations.loader import Positioned, position_of
from shardopt.integrations.optimizers import add_objects, make_keyed, require_keyed
from shardopt.integrations.run import FrameworkState, of_rank_0, removal_told
from shardopt.ranks import ranks_of

__all__ = ["Accelerator"]

_log = logging.getLogger("shardopt")
_REMEDY = "give `prepare` one of torch.optim's that has not stepped, together with its model; it is keyed there"
_ACCELERATES = re.compile(r"(optimizer|scheduler|sampler|scaler|random_states|custom_checkpoint)(_\d+)?\.(bin|pt|pkl)")
_NOT_STATEFUL = (
    "leave it out, and read the begun epoch from `accelerator.skip_first_batches(loader, batches)`; or register a "
    "shardopt.integrations.loader.ResumableLoader, or torchdata's ResumableStatefulLoader, without preparing it"
)


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` that makes optimizers keyed, and saves and loads states by shardopt.

    A state has all that `prepare` got (models, optimizers, schedules), what was registered for checkpointing, random
    states, and the epoch of each data loader. A torch optimizer is replaced by the keyed one of the same algorithm and
    groups within its wrapper, once `prepare` has sharded its model, which Accelerate does beneath it for FSDP2.

    Raises in `prepare`:
        StateError: an optimizer has stepped, or was built upon parameters that are not those of one model by then; or
            mixed precision is fp16, whose scaler has hold of the step.
        OptionError: data loaders with `use_stateful_dataloader`.
    """

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares as Accelerate does, and then makes torch optimizers keyed."""
        prepared = super().prepare(*args, **kwargs)
        for wrapper in self._optimizers:
            make_keyed(wrapper, self._model_of(wrapper), self._schedules(), _REMEDY)
        return prepared

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares a loader as Accelerate does.

        Raises:
            OptionError: `use_stateful_dataloader` is on: a loader's own state is not saved, and holds for as many ranks
                alone.
        """
        if self.use_stateful_dataloader:
            found, required = "True", "False: the position in a loader of Accelerate's is not saved"
            problem = Problem("dataloader_config.use_stateful_dataloader", found, required, _NOT_STATEFUL)
            raise OptionError("data that would begin the epoch again", [problem], code="framework")
        return super().prepare_data_loader(*args, **kwargs)

    def app(self, entries: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the app to save and load, for `checkpoint.save`, `load` and `Manager`.

        Args:
            entries: others of the app, such as `{"step": 7}`. Plain values are replaced in the dict that holds them:
                to get them back, pass `{"progress": progress}` with a dict, and keep that.

        Raises:
            StateError: an optimizer is not keyed by parameter name.
            OptionError: a loader of ours gives ranks of tensor or context parallelism different samples.
        """
        self._require_shares([*(entries or {}).values(), *self._custom_objects])
        state = {
            "step": self.step,
            "processes": self._processes_of_schedules(),
            "iterations": [getattr(each, "iteration", 0) for each in self._dataloaders],
        }
        for each in self._dataloaders:
            shield_if_listening(each)
        if self.gradient_state.sync_with_dataloader:
            for each in (*(entries or {}).values(), *self._custom_objects):
                if isinstance(each, Positioned) and len(each) % self.gradient_accumulation_steps:
                    _tell_of_rest(len(each), self.gradient_accumulation_steps)
        app: dict[str, Any] = {"random": RandomState(on_resize="keep"), "accelerator": _State(self, state)}
        add_objects(app, "model", [self.unwrap_model(model) for model in self._models])
        add_objects(app, "optimizer", require_keyed(self._optimizers, _REMEDY))
        add_objects(app, "schedule", self._schedules())
        if self._custom_objects:
            app["registered"] = [*self._custom_objects]
        return {**app, **(entries or {})}

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Registers objects as Accelerate does; raises OptionError for a loader, as `app` does."""
        self._require_shares(objects)
        super().register_for_checkpointing(*objects)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Saves a state; returns its path. Collective.

        Args:
            output_dir: a path or URL where no checkpoint is yet. None with `automatic_checkpoint_naming`, whose
                `total_limit` holds.
            safe_serialization: has no meaning here: files are safetensors.
            options: there are none here.

        Raises:
            OptionError: there is no place to save to; options or hooks of Accelerate's own format.
            CheckpointExistsError, CheckpointError: as by `checkpoint.save`.
        """
        self._refuse("save_state", options, self._save_model_state_pre_hook)
        project = self.project_configuration
        saved = self._saved() if output_dir is None else []
        if saved:  # by this run, one before it in this directory, or one that was loaded by its path
            project.iteration = max(project.iteration, _number_of(saved[-1]) + 1)
        path = self._folder(output_dir, f"checkpoint_{project.iteration}")
        checkpoint.save(path, self.app())
        project.iteration += 1
        if output_dir is None and project.total_limit is not None:
            self._remove_old([*saved, os.path.basename(path)], max(1, project.total_limit))
        return path

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Loads a state in place into the prepared objects, on any number of ranks. Collective.

        Args:
            input_dir: a path or URL. None with `automatic_checkpoint_naming`, for the newest one that is committed.
            load_kwargs, options: there are none here.

        Raises:
            OptionError: options or hooks of Accelerate's own format.
            CheckpointNotFoundError, MismatchError, CorruptionError: as by `checkpoint.load`.
        """
        self._refuse("load_state", {**options, **(load_kwargs or {})}, self._load_model_state_pre_hook)
        path = self._folder(input_dir, "")
        if input_dir is None:
            saved = self._saved()
            if not saved:
                problem = Problem(path, "no checkpoint_…", "one that is committed", "save one, or name its path")
                raise CheckpointNotFoundError("there is nothing to load", [problem])
            path = f"{path}/{saved[-1]}"
            self.project_configuration.iteration = _number_of(saved[-1]) + 1
        if ranks_of(None).rank == 0:
            _tell_of_accelerates_files(path)
        checkpoint.load(path, self.app(), init_state=True)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns a loader of the batches that are left of an epoch; behind it, `dataloader` has the next epoch.

        Accelerate's own would leave `dataloader` at the epoch that was resumed, and draw the seed of a loader's workers
        from torch's random numbers once more: the run that resumes drew it when it began the epoch.

        Args:
            dataloader: what `prepare` gave.
            num_batches: how many of the epoch are done, on this rank.

        Raises:
            OptionError: some are done, and the loader has workers and `in_order=False`: others were done first.
        """
        if num_batches:
            refuse_any_order(dataloader)
        rest = super().skip_first_batches(dataloader, num_batches)
        if isinstance(rest, DataLoaderStateMixin) and isinstance(dataloader, DataLoaderStateMixin):
            reads = rest.base_dataloader
            if num_batches and reads.generator is None and torch.get_default_device().type == "cpu":
                reads.generator = torch.Generator()
                reads.generator.set_state(torch.get_rng_state())
            if hasattr(dataloader, "set_epoch"):  # a rest that one rank reads does not reach the sampler
                dataloader.set_epoch(dataloader.iteration)
            rest.end = partial(_end_for_both, weakref.ref(rest), dataloader)
        return rest

    def _require_shares(self, objects: Iterable[Any]) -> None:
        parallel = self.parallelism_config
        alike = parallel.non_data_parallel_size if parallel else 1  # ranks that need the same samples; neighbours
        for at in map(position_of, objects if alike > 1 else ()):
            if at is not None:
                require_dealt(at, self.process_index // alike, self.num_processes // alike)

    def _schedules(self) -> list[Any]:
        return [getattr(each, "scheduler", each) for each in self._schedulers]

    def _processes_of_schedules(self) -> int | None:
        """Returns the number of ranks, if schedules step once per rank in each step, as by default; else None."""
        counts = self.step_scheduler_with_optimizer and not self.split_batches and bool(self._schedulers)
        return int(self.num_processes) if counts else None

    def _model_of(self, wrapper: Any) -> nn.Module:
        """Returns the model with an optimizer's parameters; the last one if none has them, which is refused later."""
        parameters = {id(each) for group in wrapper.param_groups for each in group["params"]}
        models: list[nn.Module] = [self.unwrap_model(model) for model in self._models] or [nn.Module()]
        return next((each for each in models if parameters <= {*map(id, each.parameters())}), models[-1])

    def _folder(self, given: str | None, name: str) -> str:
        if given is not None:
            return os.fspath(given)
        if not self.project_configuration.automatic_checkpoint_naming:
            remedy = "pass a path, or a ProjectConfiguration with automatic_checkpoint_naming"
            problem = Problem("output_dir", "None", "a path or URL", remedy)
            raise OptionError("there is no path to save the state to", [problem], code="framework")
        return os.path.join(self.project_dir, "checkpoints", name).rstrip("/")

    def _saved(self) -> list[str]:
        """Returns the names of committed states under automatic naming, oldest first, as rank 0 sees them."""
        folder, found = self._folder(None, ""), []
        if ranks_of(None).rank == 0 and os.path.isdir(folder):
            found = [name for name in os.listdir(folder) if re.fullmatch(r"checkpoint_\d+", name)]
            found = [name for name in found if storage_of(os.path.join(folder, name)).exists(MANIFEST_NAME)]
        names: list[str] = of_rank_0("the saved states", {"names": found})["names"]
        return sorted(names, key=_number_of)

    def _remove_old(self, saved: list[str], limit: int) -> None:
        """Removes all but the last `limit` states. Collective. Of those that cannot be removed one is told of."""
        folder = self._folder(None, "")
        old = [storage_of(os.path.join(folder, name)) for name in saved[:-limit]]

        def remove() -> None:
            with removal_told(f"a state in {folder}"):  # the new one is saved
                for error in remove_checkpoints(old).values():
                    raise error

        if len(saved) > limit:
            ranks_of(None).on_rank_0(f"removing old states in {folder}", remove)

    def _refuse(self, call: str, options: Mapping[str, Any], hooks: Mapping[Any, Any]) -> None:
        remedy = "leave it out: shardopt saves and loads the state as it is"
        problems = [Problem(f"{call}({name}=...)", "an option", "none", remedy) for name in options]
        if hooks:
            problems.append(Problem(f"hooks of {call}", f"{len(hooks)}", "none", remedy))
        if problems:
            raise OptionError("options of Accelerate's own format", problems, code="framework")


class _State(FrameworkState):
    """The Accelerator's own counters; a load hands them back to it."""

    def __init__(self, owner: Accelerator, value: dict[str, Any]) -> None:
        super().__init__(value, self._check_schedules)
        self._owner = owner

    def _check_schedules(self, saved: dict[str, Any]) -> None:
        if saved["processes"] != self.value["processes"]:
            found = f"{self.value['processes']} steps of a schedule in each step of training"
            required = f"{saved['processes']}, as in the checkpoint"
            remedy = "pass DataLoaderConfiguration(split_batches=True), and a step is one on any number of ranks"
            problem = Problem("schedule", found, required, remedy)
            raise MismatchError("the schedule would not resume", [problem], code="framework")

    def state_dict(self) -> dict[str, Any]:
        if not self._owner.sync_gradients:
            _tell_of_gradients()
        at = self._owner.gradient_state
        if at.in_dataloader and at.end_of_dataloader:
            _tell_of_last_batch()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._owner.step = self.value["step"]
        for loader, iteration in zip(self._owner._dataloaders, self.value["iterations"], strict=False):
            loader.iteration = iteration


def _number_of(name: str) -> int:
    return int(name.rpartition("_")[2])


def _end_for_both(rest_of: weakref.ref[Any], loader: Any) -> None:
    """Ends the rest of a loader's epoch, which the loader is then through, too.

    The rest is held weakly: Accelerate takes a loader that is still there for one that is being read.
    """
    rest: Any = rest_of()
    type(rest).end(rest)
    loader.iteration = rest.iteration


@cache
def _tell_of_gradients() -> None:
    _log.warning(
        "a state of the Accelerator between the batches of one step: the gradients accumulated so far are not in it, "
        "and a resume makes the step without them; save where accelerator.sync_gradients is True [framework]"
    )


@cache
def _tell_of_rest(batches: int, steps: int) -> None:
    # No warning: a loop that counts steps, and not epochs, is right.
    _log.info(
        "an epoch has %d batches, and a step accumulates %d: the last step of an epoch takes batches of the next one. "
        "Accelerate makes a step at the end of an epoch of its own loaders, and not of this. Where an epoch ends, do "
        "not wait for accelerator.sync_gradients; or make the batches of an epoch a multiple of %d",
        *(batches, steps, steps),
    )


@cache
def _tell_of_last_batch() -> None:
    _log.info(
        "a state at the last batch of an epoch, which its loader has not counted yet: a resume from it reads the next "
        "epoch in the order of this one. Call loader.set_epoch(epoch) in each epoch, or save behind the loop"
    )


def _tell_of_accelerates_files(path: str) -> None:
    """Warns of files of Accelerate's own `save_state` beside the weights, which are all that is read there. Local."""
    names: list[str] = []
    with suppress(OSError, CheckpointError):
        names = storage_of(path).names()
    others = sorted(name for name in names if _ACCELERATES.fullmatch(name))
    if others and MANIFEST_NAME not in names:
        _log.warning(
            "%s is a folder of Accelerate's own, of which %s are not read: only its weights are. Load it with "
            "accelerate.Accelerator to resume, or load the weights alone by checkpoint.load(path, model) [framework]",
            *(path, ", ".join(others)),
        )
