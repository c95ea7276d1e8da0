"""torch's own optimizers: finds stored state that does not fit them, and makes state to load into.

Their state is stored under the names of their parameters (`Numbered`). L-BFGS, and those whose parameters no module of
the app has, keep their positions: these are taken where names that are stored agree, or shapes tell.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.loading.names import Names
from shardopt.checkpoint.loading.options import Strictness
from shardopt.checkpoint.loading.positional_params import listed
from shardopt.checkpoint.loading.schedules import number_of
from shardopt.errors import Problem, StateError
from shardopt.runtime.signatures import signature
from shardopt.sharding.view import view_of
from shardopt.state.param_groups import (
    ALGORITHM,
    IMPLEMENTATION_OPTIONS,
    NAMES_OF_TORCH,
    OWN,
    PARAMS,
    SAVED_BY,
    Numbered,
    numbers_in,
    other_algorithm,
    other_class,
)
from shardopt.state.paths import PARAM_GROUPS, join
from shardopt.state.state import FlatState, RestoreTarget
from shardopt.state.values import canonical, encode_value

_log = logging.getLogger("shardopt.checkpoint")

_BEGINS = {"lr": "initial_lr", "momentum": "max_momentum", "betas": "max_momentum"}
"""The key, in a group, of the value with which torch's schedules begin to change an option."""
_COMMON_OPTIONS = {"lr", "betas", "momentum", "dampening", "nesterov", "weight_decay", "eps", "amsgrad"}
"""Options in torch's sense, whatever a constructor calls what it makes them of (beta1, wd)."""
_NO_NAMES = (
    "put the module whose parameters these are into the app, where it is saved and where it is loaded, or make the "
    "optimizer of model.named_parameters()"
)


def problems_of_torchs(
    target: RestoreTarget, flat: FlatState, names: Names, stored: Collection[str], strictness: Strictness
) -> Iterator[Problem]:
    """Yields what does not fit one of torch's optimizers or scalers as a whole; nothing for other objects.

    Args:
        stored: the keys of the optimizer in the checkpoint.
    """
    if isinstance(target.object, torch.amp.GradScaler):
        yield from _problems_of_scaler(join(target.path), target.object, names)
    elif target.numbered is not None and not target.numbered.in_order:
        yield from _problems_of_groups(target, target.numbered, flat, names, strictness)
    elif isinstance(target.object, Optimizer) and target.groups is None:
        parameters = numbers_in(target.object, target.state)
        section = target.state_key
        if parameters is not None and stored and any(key.startswith(section) for key in names.chosen):
            yield from _problems_of_positions(target, parameters, names.manifest, stored)


def _problems_of_scaler(key: str, scaler: torch.amp.GradScaler, names: Names) -> Iterator[Problem]:
    """Yields a problem for an enabled GradScaler that was saved disabled, and so without state."""
    if key in names.chosen and names.manifest.values.get(key, ((), None))[1] == {} and scaler.is_enabled():
        remedy = (
            'leave it out of the app, and load with Strictness(unexpected="ignore"): it begins with its own scale; or '
            "make it with enabled=False"
        )
        yield Problem(key, "no state, of a GradScaler that was disabled", "that of one that is enabled", remedy)


def _problems_of_groups(
    target: RestoreTarget, numbered: Numbered, flat: FlatState, names: Names, strictness: Strictness
) -> Iterator[Problem]:
    """Yields a problem for each group whose members have several sets of stored options, or another algorithm's."""
    for members in numbered.members():
        keys = {name: target.options_key(name, flat.tied) for name in members}
        stored = {
            name: names.manifest.values[key][1]
            for name, key in keys.items()
            if key in names.manifest.values and key in names.chosen
        }
        if not stored:
            continue
        first = next(iter(stored))
        malformed = next((name for name, options in stored.items() if not isinstance(options, Mapping)), None)
        if malformed is not None:
            kind = type(stored[malformed]).__name__
            yield Problem(keys[malformed], f"a {kind}", "a dict of options", "load what an optimizer saved")
            continue
        another = other_algorithm(stored[first], numbered.algorithm)
        if another and not strictness.lets_objects_differ:
            resume = (
                f"resume with {another}; or begin anew: leave the optimizer out of the app, and load with "
                'Strictness(unexpected="ignore")'
            )
            yield Problem(f"{keys[first]}.algorithm", f"{another}, {SAVED_BY}", numbered.algorithm, resume)
            continue
        forms = {id(stored[name]): _form(stored[name], keys[name]) for name in _distinct(stored)}
        alike: dict[Any, list[str]] = {}
        for name, options in stored.items():
            alike.setdefault(forms[id(options)], []).append(name)
        if len(alike) > 1:
            found = f"other options of {first} than of {next(names[0] for names in [*alike.values()][1:])}"
            remedy = f"make these groups of them, as they were saved: {'; '.join(map(listed, alike.values()))}"
            yield Problem(keys[first], found, "the same in one group", remedy)


def warn_of_other_options(flat: FlatState, values: Mapping[str, Any]) -> None:
    """Logs what a load has taken from the checkpoint in contradiction to the code: options, and state of other classes.

    Of torch's optimizers these are options; of one that a schedule changes, compared is the value with which the
    schedule begins. Of another algorithm a load has taken none. A class counts where one of the two is the program's.

    Args:
        values: that were loaded, by key.
    """
    lines, algorithms, classes, begins = dict[str, None](), dict[str, None](), dict[str, None](), set[str]()
    for target in flat.targets:
        where, optimizer, numbered = join(target.path), target.object, target.numbered
        for number, here, stored in _options_of_groups(target, flat, values):
            own = here.get(ALGORITHM)
            if isinstance(own, str) and (other := other_class(stored, own)):
                there, own = (f"the program's {each[1:]}" if each[0] == OWN else each for each in (other, own))
                classes[f"{where}: saved by {there}, {own} here"] = None
            if numbered is None or not isinstance(optimizer, Optimizer):
                continue
            if other := other_algorithm(stored, numbered.algorithm):
                told = f"saved by {other}; {numbered.algorithm} takes the state that fits, with its own options"
                algorithms[f"{where}: {told}"] = None
                continue
            plateaus = [each for _, each in flat.schedules() if isinstance(each, ReduceLROnPlateau)]
            plateaus = [each for each in plateaus if each.optimizer is optimizer]
            for option, ours, theirs, begin in _other_options(optimizer, number, here, stored, plateaus):
                lines[f"{where}: {option}: {ours} here, {theirs} stored"] = None
                begins |= {begin} - {""}
    if lines:
        again = f", with {' and '.join(sorted(begins))}, and then make the schedule again, which sets them"
        _log.warning(
            "options of the checkpoint replace those that an optimizer has [optimizer-state]:\n  %s\n"
            "to resume with other ones, set them in param_groups after loading%s",
            "\n  ".join(lines),
            again if begins else "",
        )
    if algorithms:
        _log.warning(
            "loaded with strict=False from another algorithm [optimizer-state]:\n  %s", "\n  ".join(algorithms)
        )
    if classes:
        _log.warning(
            "optimizers resume from another class, whose state has the same names [optimizer-state]:\n  %s",
            "\n  ".join(classes),
        )


def _other_options(
    optimizer: Optimizer,
    number: int,
    here: Mapping[str, Any],
    stored: Mapping[str, Any],
    plateaus: Sequence[ReduceLROnPlateau],
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields the options of a group that a load has changed: name, own, stored, and what a schedule begins with."""
    for option in sorted(_given_by_code(optimizer) & here.keys() & stored.keys() - IMPLEMENTATION_OPTIONS):
        begin = _BEGINS.get(option, "")
        begin = begin if begin in here else ""
        ours, theirs = (_as_begun(each, option, begin) for each in (here, stored))
        if _is_same(ours, theirs) or (option == "lr" and _is_reduced(ours, theirs, plateaus)):
            continue
        groups = optimizer.param_groups  # a class may have made fewer of them in its load
        now = groups[number].get(option) if number < len(groups) else stored[option]
        if _is_same(now, stored[option]) or not _is_same(now, here[option]):  # else its class has kept it
            yield option, ours, theirs, begin


def _given_by_code(optimizer: Optimizer) -> set[str]:
    """Returns the options that the code gives, and not those in which an optimizer keeps how far it has come."""
    if "lr" not in signature(type(optimizer)).parameters:  # as from a config, from which others come too
        return set(optimizer.defaults)
    # Not any with **kwargs: progress is among the defaults (Prodigy). What these pass on, a base takes by name.
    constructors = [vars(each)["__init__"] for each in type(optimizer).__mro__[:-1] if "__init__" in vars(each)]
    arguments = {name for each in constructors for name in signature(each).parameters}
    return {name for name in optimizer.defaults if name in arguments | _COMMON_OPTIONS}


def _options_of_groups(
    target: RestoreTarget, flat: FlatState, values: Mapping[str, Any]
) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Yields the number of each group of an optimizer, its options here, and as its first parameter has loaded them."""
    firsts = [(number, group[PARAMS][0]) for number, group in enumerate(target.groups or ()) if group[PARAMS]]
    for number, name in firsts:
        key = target.options_key(name, flat.tied)
        stored = values.get(key)
        if key in flat.leaves and isinstance(stored, Mapping):
            yield number, flat.leaves[key].value, stored


def _as_begun(options: Mapping[str, Any], option: str, begin: str) -> Any:
    """Returns an option as it was before a schedule changed it.

    Args:
        begin: the key of the value with which the schedule begins; "" where none changes the option.
    """
    value = options[option]
    if begin not in options:
        return value
    return (options[begin], *value[1:]) if isinstance(value, list | tuple) else options[begin]  # the first beta


def _is_reduced(here: Any, stored: Any, plateaus: Sequence[ReduceLROnPlateau]) -> bool:
    """Whether schedules that reduce on plateaus may have made the stored rate of this one: they note no first rate."""
    ours, theirs = map(number_of, (here, stored))
    if any(_is_same(theirs, least) for each in plateaus for least in each.min_lrs):
        return True
    if not all(isinstance(rate, int | float) for rate in (ours, theirs)) or not 0 < theirs < ours:
        return False
    factors = {each.factor for each in plateaus if each.factor > 0}
    times = [math.log(theirs / ours, factor) for factor in factors]
    return len(factors) > 1 or any(round(each) > 0 and math.isclose(each, round(each), rel_tol=1e-4) for each in times)


def _is_same(*options: Any) -> bool:
    plain = [*map(number_of, options)]
    if all(isinstance(each, int | float) for each in plain):
        return math.isclose(*plain, rel_tol=1e-6)  # in a tensor of fp32 a number has fewer digits
    try:
        return len({canonical(encode_value(each)) for each in plain}) == 1
    except StateError:  # no plain value here, as a function
        return False


def _distinct(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns each distinct set of options once, by the first name that has it; most groups have one."""
    first = {id(each): name for name, each in reversed([*options.items()])}
    return {name: each for name, each in options.items() if first[id(each)] == name}


def _form(options: Mapping[str, Any], key: str) -> Any:
    left_out = {*IMPLEMENTATION_OPTIONS, "given", "untouched"}
    return canonical(encode_value({name: each for name, each in sorted(options.items()) if name not in left_out}, key))


def _problems_of_positions(
    target: RestoreTarget, parameters: Sequence[torch.Tensor], manifest: Manifest, stored: Collection[str]
) -> Iterator[Problem]:
    """Yields a problem if positions in the checkpoint may mean other parameters than in the app."""
    section = (*target.path, PARAM_GROUPS)
    if any(manifest.values[key][0][:-1] == section for key in stored if key in manifest.values):
        yield Problem(target.state_key, "state by the names of parameters", "names of those in the app", _NO_NAMES)
        return
    theirs = _names_in(manifest.values.get(f"{join(target.path)}.{PARAM_GROUPS}", ((), None))[1])
    ours = _names_in(target.state[PARAM_GROUPS])
    if theirs is not None and ours is not None:
        other = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
        if other is not None:
            told = f"parameter {other} is {theirs[other]}, by the names that were saved"
            remedy = "give the parameters in the order in which they were saved"
            yield Problem(f"{target.state_key}.{other}", told, ours[other], remedy)
        return
    if target.numbered is not None:  # of one vector, whose shape tells nothing
        _log.warning(
            "%s: stored by position, without names; they are taken for those of the app [by-position]",
            join(target.path),
        )
        return
    shapes = Counter(view_of(each, f"parameter {i}").shape for i, each in enumerate(parameters))
    shape, count = shapes.most_common(1)[0]
    if count > 1:
        found = f"state by position, without names, and {count} parameters of shape {list(shape)}"
        yield Problem(target.state_key, found, "a name for each of them", _NO_NAMES)


def _names_in(groups: Any) -> list[str] | None:
    """Returns the names that torch's groups store for all their parameters; None if they store none."""
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return None
    if not all(len(group.get(NAMES_OF_TORCH) or ()) == len(group.get(PARAMS, ())) for group in groups):
        return None
    return [*chain.from_iterable(group[NAMES_OF_TORCH] for group in groups if group[PARAMS])]
