"""The forms of state that a load takes: that of `state_dict()`, that of earlier versions, and torch's with names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardopt.names import before_all, plain_name
from shardopt.param_groups import PARAM_GROUPS, PARAMS, STATE

_PARAM_NAMES = "param_names"
"""In the groups of a torch optimizer that was made of `named_parameters()`: the name of each parameter."""


def with_named_groups(offered: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns state with its groups as a list, and parameters by name in both; what is none of the forms stays.

    Taken are groups as a list, or as a mapping by the least name in each (earlier versions), with names under "params",
    or with positions under "params" and names under "param_names" (torch's optimizers). Those are without what
    wrappers put into them, as the names of keyed optimizers.
    """
    groups = offered.get(PARAM_GROUPS)
    if isinstance(groups, Mapping):
        return {**offered, PARAM_GROUPS: [*groups.values()]}
    if not isinstance(groups, list) or not all(map(_has_positions, groups)):
        return offered
    names = [plain_name(name) for group in groups for name in group[_PARAM_NAMES]]
    dropped = before_all(names)
    positions = [position for group in groups for position in group[PARAMS]]
    by_position = {position: name.removeprefix(dropped) for position, name in zip(positions, names, strict=True)}
    named = [
        {
            PARAMS: [by_position[position] for position in group[PARAMS]],
            **{option: value for option, value in group.items() if option not in (PARAMS, _PARAM_NAMES)},
        }
        for group in groups
    ]
    state = offered.get(STATE)
    if isinstance(state, Mapping):
        offered = {**offered, STATE: {by_position.get(key, key): entries for key, entries in state.items()}}
    return {**offered, PARAM_GROUPS: named}


def _has_positions(group: Any) -> bool:
    """Whether this is a group of a torch optimizer with as many names as positions."""
    if not isinstance(group, Mapping):
        return False
    positions, names = group.get(PARAMS), group.get(_PARAM_NAMES)
    return (
        isinstance(positions, list)
        and isinstance(names, list)
        and len(positions) == len(names)
        and all(isinstance(position, int) for position in positions)
        and all(isinstance(name, str) for name in names)
    )
