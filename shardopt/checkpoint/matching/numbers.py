"""Names of parameters that others have by number, as torch's own optimizers save them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.nn import Module, Parameter

from shardopt.errors import MismatchError, Problem
from shardopt.names import names_under_wrappers
from shardopt.param_groups import PARAM_GROUPS, PARAMS, UNTOUCHED, Groups
from shardopt.state import FlatState, Handback, join

NAMES_OF_TORCH = "param_names"
_NOTES = ("algorithm", "given", UNTOUCHED)
"""What keyed optimizers store among options, and torch's do not have."""
_log = logging.getLogger("shardopt.checkpoint")


def names_of_numbers(stored: Sequence[Mapping[str, Any]], handback: Handback, flat: FlatState) -> dict[Any, str]:
    """Returns the name of each parameter that stored groups have by its number; empty where they have names.

    Raises:
        MismatchError: the order of the parameters is not clear.
    """
    numbers = [number for group in stored for number in group[PARAMS]]
    if not all(type(number) is int for number in numbers):
        return {}
    if all(len(group.get(NAMES_OF_TORCH) or ()) == len(group[PARAMS]) for group in stored):
        names = [name for group in stored for name in group[NAMES_OF_TORCH]]
        plain = names_under_wrappers(names, frozenset(names_in(handback.groups)))
        return dict(zip(numbers, (plain.get(name, name) for name in names), strict=True))
    orders = []
    own = [group for group in _own_order(handback.target) if group]
    if [len(group[PARAMS]) for group in stored if group[PARAMS]] == [len(group) for group in own]:
        orders.append(dict(zip(numbers, chain.from_iterable(own), strict=True)))
    known = frozenset(names_in(handback.groups))
    # An average of the model has the same names: once is enough.
    everything = [*dict.fromkeys(name for name, _ in parameters_of_modules(flat))]
    for ordered in ([name for name in everything if name in known], everything):  # the latter with frozen parameters
        if len(stored) == 1 and len(ordered) == len(numbers) and not (ordered is everything and orders):
            orders.append(dict(zip(sorted(numbers), ordered, strict=True)))
    if len(orders) == 2 and orders[0] != orders[1]:
        number, name = next((number, name) for number, name in orders[0].items() if orders[1][number] != name)
        found = f"parameter {number}, which is {name} in the order of the groups and {orders[1][number]} in the model's"
        remedy = "save it with names (param_names), or give the groups in the order in which it was saved"
        raise MismatchError("numbers of parameters", [Problem(join(handback.path), found, "one meaning", remedy)])
    if orders and len(stored) > 1:
        text = "%s: numbers of parameters are taken for the order of the app's groups; nothing stored says so"
        _log.warning(text, join(handback.path))
    return orders[0] if orders else {}


def _own_order(optimizer: Any) -> Iterator[list[str]]:
    """Yields the names of the parameters in each group of an optimizer, in their order there."""
    parameters = getattr(optimizer, "params", None)
    if not isinstance(parameters, Mapping):
        return
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        yield [names[id(parameter)] for parameter in group[PARAMS] if id(parameter) in names]


def parameters_of_modules(flat: FlatState) -> Iterator[tuple[str, Parameter]]:
    """Yields the parameters of the app's modules, by their names within these, in their order."""
    for handback in flat.handbacks:
        if isinstance(handback.target, Module):
            for name, parameter in handback.target.named_parameters():
                yield handback.plain_names.get(name, name), parameter


def names_in(groups: Groups | None) -> list[str]:
    """Returns the names of the parameters in some groups."""
    return [] if groups is None else [name for group in groups for name in group[PARAMS]]


def numbers_of_names(handback: Handback, flat: FlatState) -> dict[str, int]:
    """Returns the number that one of torch's optimizers has for each parameter, by its name in the app's modules.

    Empty where a parameter is in no module, or has a name that another one has too.
    """
    names = {id(parameter): name for name, parameter in parameters_of_modules(flat)}
    parameters = [parameter for group in handback.target.param_groups for parameter in group[PARAMS]]  # type: ignore[attr-defined] # an Optimizer
    numbers = {names.get(id(parameter), ""): number for number, parameter in enumerate(parameters)}
    return {} if "" in numbers or len(numbers) < len(parameters) else numbers


def groups_by_number(
    handback: Handback, numbers: Mapping[str, int], options: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the groups of one of torch's optimizers with the options that are stored for their parameters.

    Args:
        numbers: name → number.
        options: those that are stored, by name.

    Raises:
        MismatchError: parameters of one group have different options, or some of them none.
    """
    names = {number: name for name, number in numbers.items()}
    groups = []
    for at, group in enumerate(handback.state[PARAM_GROUPS]):
        members = [names[number] for number in group[PARAMS]]
        own = [options.get(name) for name in members]
        other = next((name for name, each in zip(members, own, strict=True) if each != own[0]), None)
        if other is not None:
            found = f"other options of {members[0]} than of {other}"
            remedy = "give the optimizer the groups that were saved, or use shardopt.keyed"
            problem = Problem(f"{join(handback.path)}.{PARAM_GROUPS}.{at}", found, "the same in one group", remedy)
            raise MismatchError("options of parameters", [problem])
        stored = {name: value for name, value in (own[0] or {} if own else {}).items() if name not in _NOTES}
        groups.append({**group, **stored, PARAMS: group[PARAMS]})
    return groups
