"""Options of groups: as given, as saved and loaded, and which of them a load has overridden.

A number is saved as a number, also where the live option is a tensor of one element (as torch.compile and CUDA graphs
want learning rates): so a run resumes with either. Loading keeps the kind that is there, and fills a tensor in place.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shardopt.algorithms.registry import algorithms
from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.runtime.signatures import signature
from shardopt.state.param_groups import ELSEWHERE, IMPLEMENTATION_OPTIONS, PARAMS, STORAGE_OPTIONS, UNTOUCHED
from shardopt.state.state import like

_NOT_SAVED = IMPLEMENTATION_OPTIONS | {"params"}
_MOST_LINES = 20
_OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps", "beta": "betas", "beta1": "betas"}
_OTHER_NAMES |= {"beta2": "betas", "rate": "lr"}

_log = logging.getLogger("shardopt")


def refuse_bad_options(
    optimizer: type[Optimizer], options: Mapping[str, Any], where: str, known_besides: Iterable[str] = ()
) -> None:
    """Checks options against the arguments of the optimizer's class: their names, and their types by its defaults.

    A group may have keys of the user's own, but none that look like an option.

    Args:
        where: "defaults", or the key of a group.
        known_besides: names that are good as well.

    Raises:
        AlgorithmError: names each option that is not one, and those that there are; and each that is no number where
            the default is one.
    """
    arguments = list(signature(optimizer).parameters.values())[1:]  # the first is the parameters
    takes_any = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments)
    known = [argument.name for argument in arguments]
    problems = []
    for name in options:
        if takes_any or name in known or name in known_besides:
            continue
        meant = _meant(name, known)
        if where == "defaults" or meant or name in _not_own():
            remedy = f"did you mean {meant!r}?" if meant else "mend its spelling or drop it"
            problems.append(Problem(f"{where}.{name}", "an unknown option", f"one of {', '.join(known)}", remedy))
    if problems:
        raise AlgorithmError(f"{optimizer.__name__} has no such option", problems, code="bad-options")
    wanted = {argument.name: _kind_wanted(argument.default) for argument in arguments}
    problems = [
        Problem(f"{where}.{name}", f"{value!r} (a {type(value).__name__})", wanted[name], f"write it as {wanted[name]}")
        for name, value in options.items()
        if wanted.get(name) and not _is_alike(value, signature(optimizer).parameters[name].default)
    ]
    if problems:
        raise AlgorithmError(f"{optimizer.__name__} cannot take these options", problems, code="bad-options")


def known_options(optimizer: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the constructor of the optimizer's class accepts, without users' own keys."""
    arguments = signature(optimizer).parameters
    if any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values()):
        return dict(options)
    return {name: value for name, value in options.items() if name in arguments}


def _meant(name: str, known: Sequence[str]) -> str:
    """Returns the option that a misspelt name is close to; "" for a key of its own, such as "lr_scale"."""
    if any(name.startswith(f"{option}_") or name.endswith(f"_{option}") for option in known):
        return ""
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    other = _OTHER_NAMES.get(name.lower(), "")
    return close[0] if close else other if other in known else ""


@lru_cache(maxsize=1)
def _not_own() -> frozenset[str]:
    """Returns the names that a group's own key cannot have: options of any algorithm, and keys of saved groups."""
    arguments = (each for spec in algorithms() for each in signature(spec.optimizer).parameters)
    return frozenset(
        {*arguments, *STORAGE_OPTIONS, "initial_lr", PARAMS, "algorithm", "given", "train_mode", UNTOUCHED, ELSEWHERE}
    )


def saved_options(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the options of a group as saved. Waits for the device of a number that is a tensor there.

    Args:
        where: the key of the group in errors.

    Raises:
        StateError: a value is neither plain nor a tensor, so that it cannot be stored.
    """
    options = {name: as_number(value) for name, value in group.items() if name not in _NOT_SAVED}
    problems = [
        Problem(
            key=f"{where}.{name}",
            found=f"a {type(value).__qualname__}",
            required="a tensor, a plain value, or a dict, list or tuple of these",
            remedy="keep it outside of the group, or turn groups off with save_param_groups(False)",
        )
        for name, value in options.items()
        if not _storable(value)
    ]
    if problems:
        raise StateError("a group has an option that cannot be stored", problems, code="bad-options")
    return options


def as_number(value: Any) -> Any:
    """Converts a one-element plain tensor to its number, also within a list or tuple; leaves everything else."""
    if _is_number_tensor(value):
        return value.item()
    if isinstance(value, list | tuple) and any(map(_is_number_tensor, value)):
        return like(value, map(as_number, value))
    return value


def replaced(here: Any, value: Any, filled: dict[int, Any]) -> Any:
    """Returns an option of a live group with a saved value; fills an existing tensor in place.

    Args:
        filled: the value put into each tensor so far, by identity, in this load: groups may share one.
    """
    if isinstance(here, Tensor) and isinstance(value, bool | int | float | complex | np.number):
        if not is_equal_option(filled.setdefault(id(here), value), value):
            here = here.clone()  # a group that shares it has got another value
        with torch.no_grad():
            here.fill_(value)
        return here
    if isinstance(here, list | tuple) and isinstance(value, list | tuple) and len(here) == len(value):
        return like(here, [replaced(old, new, filled) for old, new in zip(here, value, strict=True)])
    return value


def class_defaults(optimizer: type[Optimizer]) -> Mapping[str, Any]:
    """Returns the defaults of a class's arguments, as saved; `inspect.Parameter.empty` of those without one."""
    return {name: as_number(argument.default) for name, argument in signature(optimizer).parameters.items()}


def given_options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group that the code gave: those that differ from the defaults of the class."""
    own = {name: value for name, value in plain_options(group).items() if name in defaults}
    return {name: value for name, value in own.items() if not is_equal_option(value, defaults[name])}


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are numbers, texts and similar, as saved, and that say what to compute."""
    saved = {name: as_number(value) for name, value in options.items() if name not in _NOT_SAVED}
    return {name: value for name, value in saved.items() if _is_plain(value)}


class Overridden(NamedTuple):
    """An option, given by the code now or at the save, that a load has overridden.

    Args:
        key: "param_groups.<least name>.<option>", as it is seen from the outermost optimizer.
        here, stored: its values in the code and in the checkpoint.
        by_default: whether the code no longer gives it, so that its value there is the class's default.
        scheduled: whether a schedule sets it.
    """

    key: str
    here: Any
    stored: Any
    by_default: bool
    scheduled: bool

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def overridden(
    where: str, given: Mapping[str, Any], stored: Mapping[str, Any], given_then: Any, defaults: Mapping[str, Any]
) -> list[Overridden]:
    """Finds options for which the code now gives another value than at the save, and than the group has.

    Changes by a schedule or the training loop are no difference: compared are the values that the code gave then and
    gives now; where it gave one then and gives none now, the default. Of a group that has none (older checkpoints) it
    is the rate from which a schedule started.

    Args:
        where: key of the group.
        given: by the code, now.
        stored: options of the saved group.
        given_then: the options that the code gave when it was saved, if the group has them.
        defaults: of the options that are not given, as far as they are known.
    """
    given_then = given_then if isinstance(given_then, Mapping) else {}
    dropped = {name: defaults[name] for name in given_then if name in defaults and name not in given}
    overrides = []
    for name, value in {**given, **dropped}.items():
        full = f"initial_{name}"
        if name not in stored or full in given:  # a warm-up computes the option from it
            continue
        in_use = as_number(stored.get(full, stored[name]))
        same_code = name in given_then and is_equal_option(value, given_then[name])
        if not same_code and not is_equal_option(value, in_use):
            overrides.append(Overridden(f"{where}.{name}", value, in_use, name in dropped, full in stored))
    return overrides


def warn_of(plan: LoadPlan) -> None:
    """Logs what a load took from the checkpoint in contradiction to the code: options, algorithms, forms of state."""
    if plan.overridden:
        lines = [
            f"  {each.key}: {each.here!r}{' by default' if each.by_default else ''} in the code, "
            f"{each.stored!r} in the checkpoint"
            for each in plan.overridden
        ]
        names = ", ".join(repr(name) for name in dict.fromkeys(each.name for each in plan.overridden))
        scheduled = " and ".join(dict.fromkeys(repr(each.name) for each in plan.overridden if each.scheduled))
        again = (
            f"; a schedule sets {scheduled} again: leave it out of the app, load with "
            'Strictness(unexpected="ignore"), and afterwards make it anew and call its step() once for each step taken'
        )
        _log.warning(
            "options of the checkpoint replace those of the code [optimizer-state]:\n%s\n"
            "to resume with the code's own, call optimizer.keep_options(%s) before loading%s",
            "\n".join(_first(lines, "  ")),
            names,
            again if scheduled else "",
        )
    if plan.rounded_anew:
        _log.warning(
            'state in fewer bits was saved with rounding="nearest", and is rounded at random from here on, as the code '
            'gives no rounding; rounding="nearest" keeps the previous rounding: %s%s [low-precision]',
            plan.rounded_anew[0],
            f" and {len(plan.rounded_anew) - 1} more" if len(plan.rounded_anew) > 1 else "",
        )
    if plan.algorithms:
        _log.warning(
            "loaded with strict=False from another algorithm [optimizer-state]:\n  %s",
            "\n  ".join(_first(plan.algorithms)),
        )
    errors: dict[tuple[str, Any, Any], list[float]] = {}
    for entry, then, now, error in plan.conversions:
        errors.setdefault((entry, then, now), []).append(error)
    lines = [
        f"{entry} of {len(each)} parameters: {then or 'none'} to {now or 'none'}, "
        + ("exactly" if not any(each) else f"off by at most {max(each):.2g} of a tensor's largest number")
        for (entry, then, now), each in errors.items()
    ]
    if lines:
        _log.warning("state was converted [low-precision]:\n  %s", "\n  ".join(lines))


def _first(lines: Sequence[str], indent: str = "") -> list[str]:
    """Returns the first lines, and the number of the others."""
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"{indent}and {more} more"] if more > 0 else [])]


def _is_number_tensor(value: Any) -> bool:
    return type(value) in (Tensor, Parameter) and value.numel() == 1 and not value.is_meta


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def is_equal_option(one: Any, other: Any) -> bool:
    """Whether two saved options are equal; a list equals a tuple."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other or (type(one) is type(other) is Tensor and torch.equal(one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_equal_option, one, other))
    return bool(one == other) or (one != one and other != other)


def _storable(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str | int) and _storable(inner) for name, inner in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_storable, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | np.number | np.bool_ | Tensor)


def _kind_wanted(default: Any) -> str:
    """Describes the type of an option by its default, in a few words; "" if that says nothing."""
    if isinstance(default, bool):
        return "True or False"
    if isinstance(default, Real):
        return "a number"
    return f"{len(default)} numbers" if isinstance(default, tuple) and default else ""


def _is_alike(value: Any, default: Any) -> bool:
    """Whether a value has the type of a default that is a bool, a number, or a tuple of numbers."""
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(default)
        return fits and all(map(_is_alike, value, default))
    if default is None:
        return value is None or isinstance(value, Real | Tensor)
    return isinstance(value, Real) or (isinstance(value, Tensor) and not isinstance(default, bool))
