"""Names of parameters that others have by number, as torch's own optimizers save them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.nn import Module

from shardopt.errors import MismatchError, Problem
from shardopt.names import names_under_wrappers
from shardopt.param_groups import PARAMS, Groups
from shardopt.state import FlatState, Handback, join

_NAMES_OF_TORCH = "param_names"
_log = logging.getLogger("shardopt.checkpoint")


def names_of_numbers(stored: Sequence[Mapping[str, Any]], handback: Handback, flat: FlatState) -> dict[Any, str]:
    """Returns the name of each parameter that stored groups have by its number; empty where they have names.

    Raises:
        MismatchError: the order of the parameters is not clear.
    """
    numbers = [number for group in stored for number in group[PARAMS]]
    if not all(type(number) is int for number in numbers):
        return {}
    if all(len(group.get(_NAMES_OF_TORCH) or ()) == len(group[PARAMS]) for group in stored):
        names = [name for group in stored for name in group[_NAMES_OF_TORCH]]
        plain = names_under_wrappers(names, frozenset(names_in(handback.groups)))
        return dict(zip(numbers, (plain.get(name, name) for name in names), strict=True))
    orders = []
    own = [group for group in _own_order(handback.target) if group]
    if [len(group[PARAMS]) for group in stored if group[PARAMS]] == [len(group) for group in own]:
        orders.append(dict(zip(numbers, chain.from_iterable(own), strict=True)))
    known = frozenset(names_in(handback.groups))
    # An average of the model has the same names: once is enough.
    ordered = [name for name in dict.fromkeys(_names_of_modules(flat)) if name in known]
    if len(stored) == 1 and len(ordered) == len(numbers):
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


def _names_of_modules(flat: FlatState) -> Iterator[str]:
    """Yields the names of the parameters of the app's modules in their order."""
    for handback in flat.handbacks:
        if isinstance(handback.target, Module):
            yield from (handback.plain_names.get(name, name) for name, _ in handback.target.named_parameters())


def names_in(groups: Groups | None) -> list[str]:
    """Returns the names of the parameters in some groups."""
    return [] if groups is None else [name for group in groups for name in group[PARAMS]]
