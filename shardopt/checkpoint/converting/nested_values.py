"""Converts chosen values to other libraries' form: options as a list of groups, values in nested dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch

from shardopt.errors import MismatchError, Problem
from shardopt.runtime.signatures import signature
from shardopt.state.param_groups import ALGORITHM, PARAMS, OptionsByMember, groups_of
from shardopt.state.paths import PARAM_GROUPS, Path, join, lists_with_gaps, nest
from shardopt.state.values import canonical, encode_value

Values = Mapping[str, tuple[Path, Any]]


def split_options(values: Values) -> tuple[dict[Path, Any], dict[Path, dict[str, Mapping[str, Any]]]]:
    """Splits plain values into two dicts: other values by path; options as optimizer's path → name → options."""
    others: dict[Path, Any] = {}
    options: dict[Path, dict[str, Mapping[str, Any]]] = {}
    for path, value in values.values():
        if len(path) > 1 and path[-2] == PARAM_GROUPS and isinstance(path[-1], str) and isinstance(value, Mapping):
            options.setdefault(path[:-2], {})[path[-1]] = {**_unsaid(value), **value}
        else:
            others[path] = value
    return others, options


_UNSAID = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
"""Options that say how torch's optimizers compute, with their defaults.

A keyed optimizer chooses these itself and does not save them, but `dcp.load` into a torch optimizer asks for each.
"""


def _unsaid(options: Mapping[str, Any]) -> dict[str, Any]:
    algorithm = options.get(ALGORITHM)
    if not is_torchs(algorithm):
        return {}
    parameters = signature(getattr(torch.optim, algorithm)).parameters
    return {name: value for name, value in _UNSAID.items() if name in parameters}


def is_torchs(algorithm: Any) -> TypeGuard[str]:
    """Whether it is the name of one of torch's own algorithms."""
    found = getattr(torch.optim, str(algorithm), None)
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer)


def groups_of_equal(options: OptionsByMember, keys: Iterable[str]) -> list[dict[str, Any]]:
    """Returns one group for all parameters with equal options, with their names under "params".

    Args:
        keys: of tensors; parameters stand in the order of theirs, which a model's are in that of the model, since
            torch's own `load_state_dict` of optimizers goes by position.
    """
    numbers: dict[str, int] = {}
    for number, key in enumerate(keys):
        segments = key.split(".")
        for i in range(len(segments)):
            numbers.setdefault(".".join(segments[i:]), number)
    order = {
        name: i for i, name in enumerate(sorted(options, key=lambda name: (numbers.get(name, len(numbers)), name)))
    }
    first: dict[str, Mapping[str, Any]] = {}
    groups = groups_of(
        {name: first.setdefault(canonical(encode_value(dict(options[name]), name)), options[name]) for name in order}
    )
    return [{**group, PARAMS: sorted(group[PARAMS], key=order.__getitem__)} for group in groups]


def nested(leaves: Mapping[Path, Any]) -> Any:
    """Nests leaves by path.

    Raises:
        MismatchError: a place is a value and has others within it, or a list lacks some of its elements.
    """
    inner = {path[:length] for path in leaves for length in range(len(path))}
    problems = [
        Problem(join(path), "a value, and others within it", "one of the two", "rename or skip one of them")
        for path in leaves
        if path in inner
    ]
    problems += [
        Problem(join(path), f"elements {those} of a list", "all of them", "take or leave the whole list")
        for path, those in lists_with_gaps(leaves).items()
    ]
    if problems:
        raise MismatchError("what was chosen cannot be nested", problems, code="cannot-convert")
    return nest(leaves)
