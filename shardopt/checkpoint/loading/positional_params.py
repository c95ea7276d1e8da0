"""Maps numbers of parameters, as torch's own optimizers save them, to names."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from shardopt.errors import MismatchError, Problem
from shardopt.sharding.view import view_of
from shardopt.state.names import NAMELESS, names_under_wrappers
from shardopt.state.param_groups import NAMES_OF_TORCH, PARAMS, Groups
from shardopt.state.paths import PARAM_GROUPS, join
from shardopt.state.state import FlatState, RestoreTarget

_MOST_NAMES = 6
_log = logging.getLogger("shardopt.checkpoint")


@dataclass(frozen=True, slots=True)
class NumberedState:
    """The stored state of an optimizer whose parameters are numbered.

    Args:
        groups: with numbers under "params".
        shapes: number → the shapes of its tensors.
        by_rules: gives the name that the rules of `rename` make of a number; "" for none.
        in_order: whether the order of the parameters may be taken for their names: in files of others it is all that
            there is, and they mean it.
    """

    groups: Sequence[Mapping[str, Any]]
    shapes: Mapping[int, frozenset[tuple[int, ...]]]
    by_rules: Callable[[int], str]
    in_order: bool


def names_of_numbers(stored: NumberedState, target: RestoreTarget, flat: FlatState) -> dict[Any, str]:
    """Returns the name of each numbered parameter in stored groups; empty if the groups already have names.

    Raises:
        MismatchError: it is not clear which number is which parameter.
    """
    numbers = [number for group in stored.groups for number in group[PARAMS]]
    if not numbers or not all(type(number) is int for number in numbers):
        return {}
    key, known = join(target.path), dict.fromkeys(names_in(target.groups))  # in order, for errors
    ruled = {number: name for number in numbers if (name := stored.by_rules(number))}
    if ruled:
        unnamed = [number for number in numbers if number not in ruled]
        if unnamed:
            raise _doubt(key, f"parameters {unnamed} without a name, where rules name others", known)
        return ruled
    if all(len(group.get(NAMES_OF_TORCH) or ()) == len(group[PARAMS]) for group in stored.groups):
        names = [name for group in stored.groups for name in group[NAMES_OF_TORCH]]
        plain = names_under_wrappers(names, known)
        _log.info("%s: stored by position; the names that its parameters were given with tell which is which", key)
        return dict(zip(numbers, (plain.get(name, name) for name in names), strict=True))
    # Earlier versions gave numbers to all parameters of a program of which some have no name, and went by their order.
    in_order = stored.in_order or any(name.startswith(NAMELESS) for name in known)
    return _names_by_order(stored, numbers, target, flat) if in_order else _names_by_shape(stored, target)


def _names_by_order(
    stored: NumberedState, numbers: Sequence[int], target: RestoreTarget, flat: FlatState
) -> dict[Any, str]:
    """Returns the names by the order of the app's parameters, in its groups and in its modules."""
    orders = []
    own = [group for group in _own_order(target) if group]
    counts, own_counts = [len(group[PARAMS]) for group in stored.groups if group[PARAMS]], [*map(len, own)]
    if counts == own_counts:
        orders.append(dict(zip(numbers, chain.from_iterable(own), strict=True)))
    known = frozenset(names_in(target.groups))
    # An average of the model has the same names: once is enough.
    everything = [*dict.fromkeys(name for name, _ in parameters_of_modules(flat))]
    for ordered in ([name for name in everything if name in known], everything):  # the latter with frozen parameters
        if len(stored.groups) == 1 and len(ordered) == len(numbers) and not (ordered is everything and orders):
            orders.append(dict(zip(sorted(numbers), ordered, strict=True)))
    if len(orders) == 2 and orders[0] != orders[1]:
        number, name = next((number, name) for number, name in orders[0].items() if orders[1][number] != name)
        found = f"parameter {number}, which is {name} in the order of the groups and {orders[1][number]} in the model's"
        remedy = "save it with names (param_names), or give the groups in the order in which it was saved"
        problem = Problem(join(target.path), found, "one meaning", remedy)
        raise MismatchError("parameters are numbered, and not by what names", [problem], code="by-position")
    target.in_doubt = bool(orders) and (len(stored.groups) > 1 or _are_alike(target, orders[0].values()))
    target.unnamed = None if orders else _other_groups(join(target.path), counts, own_counts)
    return orders[0] if orders else {}


def warn_of_order(loaded: RestoreTarget) -> None:
    """Logs that an optimizer has loaded state by numbers that only the order of its parameters explains."""
    text = (
        "%s: numbers of parameters are taken for the order of the app's groups; nothing stored confirms it. Check that "
        "the program which saved them gave its optimizer the parameters in the same order, and the same groups, as "
        "this one [by-position]"
    )
    _log.warning(text, join(loaded.path))


def _are_alike(target: RestoreTarget, names: Iterable[str]) -> bool:
    """Whether some of these parameters have one shape, so that another order of them would fit as well."""
    parameters = _parameters_of(target)
    shapes = [view_of(parameters[name], name).shape for name in names if name in parameters]
    return len({*shapes}) < len(shapes)


def _other_groups(key: str, counts: Sequence[int], own: Sequence[int]) -> Problem:
    """Returns the problem of groups that have other numbers of parameters than the app's."""
    found, required = (f"groups of {', '.join(map(str, each)) or 'no'} parameters" for each in (counts, own))
    remedy = (
        "give the app groups of as many parameters, in the checkpoint's order: in keyed(groups=[...]) the listed ones "
        "come first"
    )
    return Problem(f"{key}.{PARAM_GROUPS}", f"{found}, without names", f"{required}, as in the app", remedy)


def _names_by_shape(stored: NumberedState, target: RestoreTarget) -> dict[Any, str]:
    """Returns the names by unique shapes of stored state, if they leave no parameter in doubt."""
    key = join(target.path)
    own = {name: view_of(parameter, name).shape for name, parameter in _parameters_of(target).items()}
    names: dict[Any, str] = {}
    for number, shapes in stored.shapes.items():
        fitting = [name for name, shape in own.items() if shape in shapes and (shape or shapes == {()})]
        rivals = [other for other, theirs in stored.shapes.items() if fitting and own[fitting[0]] in theirs]
        if len(fitting) != 1 or (len(rivals) > 1 and own[fitting[0]]):
            what = "no parameter has" if not fitting else f"{listed(fitting)} may be"
            shape = own[fitting[0]] if fitting else max(shapes, key=len)
            raise _doubt(key, f"parameter {number} of shape {list(shape)} without a name: {what} it", own)
        names[number] = fitting[0]
    # Of those without state there are options alone: whose they are is no matter where all are equal.
    rest = [(number, group) for group in stored.groups for number in group[PARAMS] if number not in names]
    left = [name for name in own if name not in names.values()]
    options = [{name: each for name, each in group.items() if name != PARAMS} for _, group in rest]
    if rest and len(rest) == len(left) and (len(rest) == 1 or all(each == options[0] for each in options)):
        names |= {number: name for (number, _), name in zip(rest, left, strict=True)}
    elif rest:
        raise _doubt(key, f"parameters {[number for number, _ in rest]} without a name or state", own)
    if names:
        _log.warning(
            "%s: stored by position, without names; only shapes tell which parameter is which [by-position]",
            join(target.path),
        )
    return names


def _doubt(key: str, found: str, names: Collection[str]) -> MismatchError:
    """Returns the error for numbers that could stand for other parameters."""
    state = re.escape(f"{key}.state")
    remedy = (
        "say which is which, in the order in which the optimizer that was saved had them: "
        f'rename={{rf"^{state}\\.{{i}}\\.(?=[^.]*$)": f"{key}.state.{{name}}." '
        f"for i, name in enumerate([{listed(names)}])}}; "
        'or leave the optimizer out of the app, and load with Strictness(unexpected="ignore")'
    )
    return MismatchError(
        "parameters are numbered, and not by what names",
        [Problem(f"{key}.state", found, "a name for each number", remedy)],
        code="by-position",
    )


def _parameters_of(target: RestoreTarget) -> Mapping[str, Tensor]:
    """Returns the parameters of an optimizer by name."""
    if target.numbered is not None:
        return dict(zip(target.numbered.names, target.numbered.parameters, strict=True))
    parameters = getattr(target.object, "params", None)
    return parameters if isinstance(parameters, Mapping) else {}


def _own_order(target: RestoreTarget) -> Iterator[list[str]]:
    """Yields the names of the parameters in each group of an optimizer, in order."""
    if target.numbered is not None:
        yield from target.numbered.members()
        return
    names = {id(parameter): name for name, parameter in _parameters_of(target).items()}
    for group in target.object.param_groups if names else ():  # type: ignore[attr-defined]  # an Optimizer
        yield [names[id(parameter)] for parameter in group[PARAMS] if id(parameter) in names]


def parameters_of_modules(flat: FlatState) -> Iterator[tuple[str, Parameter]]:
    """Yields the parameters of the app's modules, by name within each module, in order."""
    for target in flat.targets:
        if isinstance(target.object, Module):
            for name, parameter in target.object.named_parameters():
                yield target.plain_names.get(name, name), parameter


def names_in(groups: Groups | None) -> list[str]:
    """Returns the names of the parameters in some groups."""
    return [] if groups is None else [name for group in groups for name in group[PARAMS]]


def listed(names: Collection[str]) -> str:
    """Lists the first names, for a sentence."""
    shown = [repr(name) for name in [*names][:_MOST_NAMES]]
    return ", ".join(shown) + (", ..." if len(names) > _MOST_NAMES else "")
