"""The state offered to a load: the forms that it may have, and which part of an optimizer it is for.

Names of a part are seen with its key before them: `weight` of the part "dense" is `dense.weight`; a part without a key
keeps its names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer

from shardopt.errors import MismatchError, Problem, ShardoptError
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.optim.state_dict.saved_form import as_saved
from shardopt.runtime.torch_private import before_load_state_dict
from shardopt.state.names import before_all, plain_name
from shardopt.state.param_groups import ELSEWHERE, NAMES_OF_TORCH, PARAMS, are_named, members_only, renamed_group
from shardopt.state.paths import PARAM_GROUPS, STATE


def with_key(name: str, key: str) -> str:
    """Returns the name in the whole: "key.name", or "name" if the key is ""."""
    return f"{key}.{name}" if key else name


def without_key(name: str, key: str) -> str:
    """Strips a part's key from a name; a name without that prefix stays."""
    return name.removeprefix(f"{key}.") if key else name


def begins(name: str, key: str) -> bool:
    """Whether a name may belong to the part with that key."""
    return not key or name.startswith(f"{key}.")


def meant(name: str, keys: Sequence[str]) -> set[int]:
    """Returns the parts whose key a new name begins with; if there are none, those without a key."""
    keyed = {index for index, key in enumerate(keys) if key and begins(name, key)}
    return keyed or {index for index, key in enumerate(keys) if not key}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an optimizer, as far as a load must know it.

    Args:
        key: stands before its names in the whole.
        names: those under which it has or may get state.
        group_count: how many groups it has, if it saves them; else None.
    """

    key: str
    names: Collection[str]
    group_count: int | None

    def takes(self, section: str) -> bool:
        """Whether the part loads "state", or "param_groups"."""
        return section == STATE or self.group_count is not None


def distributed(plan: LoadPlan, parts: Sequence[Part], offered: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what is offered to each part, under the part's own names; notes what is for none, or for several.

    Of groups, each part gets those of its parameters; where there are as many as here, also empty ones at the places
    of its own.
    """
    keys = [part.key for part in parts]
    by_part: list[dict[str, Any]] = [
        {STATE: {}} if part.group_count is None else {STATE: {}, PARAM_GROUPS: []} for part in parts
    ]
    state, groups = offered.get(STATE, {}), offered.get(PARAM_GROUPS, [])
    if isinstance(state, Mapping):
        for name, index in _owners(plan, STATE, state, parts).items():
            by_part[index][STATE][without_key(name, keys[index])] = state[name]
    else:
        remedy = "load what state_dict() of a combined optimizer gave"
        plan.problem(plan.section(STATE), f"a {type(state).__name__}", "a mapping by name", remedy)
    if all(part.group_count is None for part in parts):
        return by_part
    if not are_named(groups):
        remedy = "load what state_dict() of a combined optimizer gave"
        required = 'a list of groups with names under "params"'
        plan.problem(plan.section(PARAM_GROUPS), f"a {type(groups).__name__}", required, remedy)
        return by_part
    owners = _owners(plan, PARAM_GROUPS, [name for group in groups for name in group[PARAMS]], parts)
    places = [index for index, part in enumerate(parts) for _ in range(part.group_count or 0)]
    alike = len(places) == sum(not group.get(ELSEWHERE) for group in groups)
    for index, part in enumerate(parts):
        if part.group_count is None:
            continue
        own = {name for name, owner in owners.items() if owner == index}
        own |= {name for group in groups for name in group.get(ELSEWHERE, ()) if index in meant(name, keys)}
        for place, group in enumerate(groups):
            members = renamed_group(members_only(group, own), partial(without_key, key=part.key))
            is_twin = alike and not group[PARAMS] and not group.get(ELSEWHERE) and places[place] == index
            if members[PARAMS] or members.get(ELSEWHERE) or is_twin:
                by_part[index][PARAM_GROUPS].append(members)
    return by_part


def _owners(plan: LoadPlan, section: str, names: Iterable[str], parts: Sequence[Part]) -> dict[str, int]:
    """Returns offered name → its part; notes names for none, or for several."""
    keys = [part.key for part in parts]
    known = {with_key(name, part.key): {index} for index, part in enumerate(parts) for name in part.names}
    owners = {}
    for name in names:
        candidates = [index for index in known.get(name) or meant(name, keys) if parts[index].takes(section)]
        if len(candidates) == 1:
            owners[name] = candidates[0]
        else:
            plan.unexpected(f"{plan.section(section)}.{name}", "combine the optimizers as when it was saved")
    return owners


def changed_by_hooks(optimizer: Optimizer, offered: Mapping[str, Any], has_descriptions: bool) -> Mapping[str, Any]:
    """Returns the state as the hooks of `register_load_state_dict_pre_hook` leave it.

    Args:
        has_descriptions: whether tensors on the meta device stand for stored ones.

    Raises:
        MismatchError: a hook fails with such a description.
    """
    if not has_descriptions:
        return before_load_state_dict(optimizer, offered)
    try:
        # A copy, as plain values that hooks change would be changed again by the load.
        return before_load_state_dict(optimizer, as_saved(offered))
    except ShardoptError:
        raise
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        required = "a hook that leaves tensors on the meta device, which stand for stored ones, as they are"
        remedy = "look at tensor.is_meta, and change values in a load_state_dict_post_hook"
        problem = Problem("register_load_state_dict_pre_hook", failure, required, remedy)
        raise MismatchError(
            "a hook fails with what is to be loaded; nothing was changed", [problem], code="optimizer-state"
        ) from error


def with_named_groups(offered: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns state with its groups as a list, and parameters by name in both; other forms stay unchanged.

    Taken are groups as a list, or as a mapping by the least name in each (earlier versions), with names under "params",
    or with positions under "params" and names under "param_names" (torch's optimizers). Those are without what
    wrappers put into them, as the names of keyed optimizers.

    Raises:
        MismatchError: parameters go by position and have no names.
    """
    groups = offered.get(PARAM_GROUPS)
    if isinstance(groups, Mapping):
        return {**offered, PARAM_GROUPS: [*groups.values()]}
    if _are_nameless(groups):
        remedy = (
            "optimizer.as_torch().load_state_dict(...) takes parameters in the order of the groups here; or save from "
            "a torch optimizer made of model.named_parameters()"
        )
        problem = Problem(PARAM_GROUPS, "parameters by position, without names", "parameters by name", remedy)
        raise MismatchError("the state goes by position; nothing was changed", [problem], code="by-position")
    if not isinstance(groups, list) or not all(map(_has_positions, groups)):
        return offered
    names = [plain_name(name) for group in groups for name in group[NAMES_OF_TORCH]]
    dropped = before_all(names)
    positions = [position for group in groups for position in group[PARAMS]]
    by_position = {position: name.removeprefix(dropped) for position, name in zip(positions, names, strict=True)}
    named = [
        {
            PARAMS: [by_position[position] for position in group[PARAMS]],
            **{option: value for option, value in group.items() if option not in (PARAMS, NAMES_OF_TORCH)},
        }
        for group in groups
    ]
    state = offered.get(STATE)
    if isinstance(state, Mapping):
        offered = {**offered, STATE: {by_position.get(key, key): entries for key, entries in state.items()}}
    return {**offered, PARAM_GROUPS: named}


def _are_nameless(groups: Any) -> bool:
    """Whether these are groups of a torch optimizer that was made of parameters without names."""
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    return any(type(each) is int for group in groups if NAMES_OF_TORCH not in group for each in group.get(PARAMS, ()))


def _has_positions(group: Any) -> bool:
    """Whether this is a group of a torch optimizer with as many names as positions."""
    if not isinstance(group, Mapping):
        return False
    positions, names = group.get(PARAMS), group.get(NAMES_OF_TORCH)
    return (
        isinstance(positions, list)
        and isinstance(names, list)
        and len(positions) == len(names)
        and all(isinstance(position, int) for position in positions)
        and all(isinstance(name, str) for name in names)
    )
