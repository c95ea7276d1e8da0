"""Finds the keyed optimizer inside a framework's wrappers, or makes one in place of a torch optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardopt.errors import Problem, StateError
from shardopt.optim.keyed import KeyedOptimizer, keyed
from shardopt.runtime.signatures import signature
from shardopt.runtime.torch_private import note_steps_for_schedules
from shardopt.state.trainer_optimizers import is_constructed, state_of

_PARAMS = "params"


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer within wrappers that call it `optimizer` (Lightning's, Accelerate's)."""
    while not isinstance(optimizer, KeyedOptimizer) and isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        if isinstance(optimizer, Optimizer) and is_constructed(optimizer):
            break  # an optimizer of its own around another
        optimizer = optimizer.optimizer
    return optimizer


def require_keyed(optimizers: Iterable[Any], remedy: str) -> list[KeyedOptimizer]:
    """Returns the keyed optimizers inside wrappers.

    Raises:
        StateError: one of them is none, whose state could be saved and not be loaded into a new one; or its
            parameters are no longer those that it was made for.
    """
    given = [*optimizers]
    found, problems = [unwrapped(each) for each in given], []
    for i, each in enumerate(found):
        within = getattr(given[i], "optimizer", None)
        if isinstance(each, KeyedOptimizer) and isinstance(within, Optimizer) and each not in (given[i], within):
            state_of(within, each, (f"optimizers[{i}]",))  # refuses what a wrapper in between keeps
        if not isinstance(each, KeyedOptimizer):
            kind = f"{type(each).__module__}.{type(each).__qualname__}"
            problems.append(Problem(f"optimizers[{i}]", f"a {kind}", "one that is keyed by parameter name", remedy))
        elif _is_exchanged(each):
            problems.append(
                Problem(
                    f"optimizers[{i}]",
                    "groups with other parameters than it steps on, which were exchanged beneath it",
                    "the parameters that it was made for",
                    remedy,
                )
            )
    if problems:
        raise StateError("optimizers that cannot be resumed", problems, code="framework")
    return found


def keyed_like(optimizer: Optimizer, named_params: Iterable[tuple[str, Tensor]], remedy: str) -> KeyedOptimizer:
    """Makes a keyed optimizer with the algorithm and the groups of a torch optimizer that has not stepped.

    Args:
        optimizer: of a class that shardopt knows; it is left as it is, and is to be used no more.
        named_params: of the model, as it is now: sharded, if it is to be.

    Raises:
        StateError: it has stepped; or has a parameter that the model has not, and so no name for.
        AlgorithmError: its class is not known, or cannot step on shards.
    """
    names: dict[Tensor, str] = {}
    for name, parameter in named_params:
        names.setdefault(parameter, name)
    groups = optimizer.param_groups
    strangers = sum(parameter not in names for group in groups for parameter in group[_PARAMS])
    problems = []
    if strangers:
        found = f"{strangers} tensors without names"
        problems.append(Problem("param_groups", found, "parameters of the model", remedy))
    # Some make their state when they are made, as Adagrad does: that has no step yet, and the keyed one makes the same.
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        problems.append(Problem("state", "that of steps taken", "an optimizer before its first step", remedy))
    if problems:
        raise StateError(
            f"{type(optimizer).__qualname__} cannot be keyed by parameter name", problems, code="framework"
        )
    accepted = signature(type(optimizer)).parameters.keys() - {_PARAMS}
    # A schedule has set its first rate by now, as zero for a warm-up; "initial_lr" is what the code gave.
    given = [{**group, "lr": group["initial_lr"]} if "initial_lr" in group else group for group in groups]
    options = [{name: value for name, value in group.items() if name in accepted} for group in given]
    patterns = [_pattern(sorted(names[parameter] for parameter in group[_PARAMS])) for group in groups]
    # The last group is that of the defaults, so that there are as many groups as schedules know of.
    first = [{"match": match, **own} for match, own in zip(patterns[:-1], options[:-1], strict=True)]
    trained = {names[parameter]: parameter for group in groups for parameter in group[_PARAMS]}
    made = keyed(type(optimizer), trained, groups=first, **options[-1])
    for ours, theirs in zip(made.param_groups, groups, strict=True):
        # Keys that are no options of the class (a schedule keeps its first rates there), and the rate that is in force.
        own = {name: value for name, value in theirs.items() if name not in accepted and name != _PARAMS}
        ours.update(own, **({"lr": theirs["lr"]} if "initial_lr" in own else {}))
    return made


def make_keyed(wrapper: Any, model: nn.Module, schedules: Iterable[Any], remedy: str) -> None:
    """Replaces the torch optimizer in an `AcceleratedOptimizer` by a keyed one; a keyed one stays.

    For FSDP2, Accelerate shards the model beneath the optimizer, and puts the new parameters in its groups. So this
    comes after `prepare`, and before the first step. Schedules that go by the torch optimizer go by the keyed one then,
    those within others too.

    Raises:
        StateError: the optimizer has stepped, or has parameters that are not the model's; or it is stepped by a
            GradScaler, which has hold of its `step`.
        AlgorithmError: its class is not known, or cannot step on shards.
    """
    optimizer = wrapper.optimizer
    if isinstance(optimizer, KeyedOptimizer):
        return
    if wrapper.scaler is not None:
        found, required = "fp16, with a GradScaler around the optimizer's step", 'mixed_precision="bf16" or "no"'
        problem = Problem("mixed_precision", found, required, remedy)
        raise StateError("the optimizer cannot be keyed by parameter name", [problem], code="framework")
    wrapper.optimizer = keyed_like(optimizer, model.named_parameters(remove_duplicate=False), remedy)
    for schedule in schedules:
        _move(schedule, optimizer, wrapper.optimizer)
    note_steps_for_schedules(optimizer, wrapper.optimizer)


def add_objects(app: dict[str, Any], name: str, objects: Sequence[Any]) -> None:
    """Adds objects to an app: one under a name ("optimizer"), several as a list under its plural, or none."""
    if objects:
        app[name if len(objects) == 1 else f"{name}s"] = objects[0] if len(objects) == 1 else [*objects]


def _pattern(names: Sequence[str]) -> str:
    return f"^(?:{'|'.join(map(re.escape, names))})$" if names else r"(?!)"


def _is_exchanged(optimizer: KeyedOptimizer) -> bool:
    own = {id(parameter) for parameter in optimizer.params.values()}
    return any(id(parameter) not in own for group in optimizer.param_groups for parameter in group[_PARAMS])


def _move(schedule: Any, old: Optimizer, new: Optimizer) -> None:
    if getattr(schedule, "optimizer", None) is old:
        schedule.optimizer = new
    for value in vars(schedule).values() if isinstance(schedule, LRScheduler) else ():
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, LRScheduler):
                _move(inner, old, new)
