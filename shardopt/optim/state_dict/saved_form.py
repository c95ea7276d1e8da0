"""The saved form of a keyed optimizer, and the plan of loading one into another.

    {"state": {fqn: {name: value}},
     "param_groups": {least fqn: {"params": [sorted fqns], option: value, ..., "algorithm": name,
                                  "given": {option: value}, "untouched": [fqns]}}}

Groups go by the least name in them, so that neither the order of parameters nor that of groups matters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardopt.optim.state_dict.groups import listed
from shardopt.optim.state_dict.load_plan import LoadPlan, is_stateful, like
from shardopt.optim.state_dict.options import IMPLEMENTATION_OPTIONS, as_number, overridden, put_option
from shardopt.values import UnionOfRanks

STATE = "state"
PARAM_GROUPS = "param_groups"
PARAMS = "params"
UNTOUCHED = "untouched"
"""In a saved group: the parameters that have state but never had a step, so that their first step makes it anew."""

ALGORITHM = "algorithm"
"""In a saved group: the name of the algorithm that steps it, where that is known."""
GIVEN = "given"
"""In a saved group: the options that the code gave, before schedules and the training loop changed any."""

_REMEDY = (
    "load what was saved from the same parameters and options (a schedule adds some: attach it first), by "
    "checkpoint.load(..., rename={...}) where names have changed, or pass strict=False"
)
_STATE_REMEDY = (
    "load what was saved from the same parameters and options, by checkpoint.load(..., rename={...}) where names have "
    "changed, with init_state=True where some have not stepped, or pass strict=False"
)


_GROUPS_REMEDY = "put parameters in groups as when it was saved"


@dataclass(frozen=True, slots=True)
class KeyedGroup:
    """A group of an optimizer and its saved form.

    Args:
        live: the group's own dict.
        saved: "params", the options as they are, and further entries that are saved.
        kept: the options that a load leaves as they are here.
    """

    live: dict[str, Any]
    saved: dict[str, Any]
    kept: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """The least name of the group's parameters."""
        return least_name(self.saved)

    def take(self, filled: dict[int, Any]) -> None:
        """Puts options of `saved`, which a load has changed, into the group; `filled` as for `put_option`."""
        for name, value in self.saved.items():
            if name in self.live and name not in (PARAMS, *self.kept):
                put_option(self.live, name, value, filled)


def least_name(group: Mapping[str, Any]) -> str:
    """Returns the name that a saved group goes by: the first of its parameters', which are sorted."""
    return str(group[PARAMS][0])


def renamed_group(group: Any, rename: Callable[[str], str]) -> Any:
    """Renames the parameters of a saved group, in their order."""
    if not isinstance(group, Mapping):
        return group

    def renamed(names: Any) -> list[str]:
        return (UnionOfRanks if isinstance(names, UnionOfRanks) else list)(map(rename, names))

    return {option: renamed(value) if option in (PARAMS, UNTOUCHED) else value for option, value in group.items()}


def as_saved(value: Any) -> Any:
    """Copies a value of state: new dicts, lists and tuples, the same tensors, the state of objects that have any."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        return {name: as_saved(inner) for name, inner in value.items()}
    if is_stateful(value):
        return value.state_dict()
    return like(value, map(as_saved, value)) if isinstance(value, list | tuple) else value


def plan_all(
    plan: LoadPlan, state: dict[str, MutableMapping[str, Any]], groups: Collection[KeyedGroup] | None, offered: Any
) -> None:
    """Plans to load a whole saved form into an optimizer.

    Args:
        plan: gets the changes and problems.
        state: live state by name.
        groups: the optimizer's groups, or None if it saves none.
        offered: the saved form.
    """
    plan_keys(plan, groups is not None, offered, has_state=bool(state))
    if STATE in offered:
        _plan_state(plan, state, offered[STATE])
    if groups is not None and PARAM_GROUPS in offered:
        _plan_groups(plan, {group.key: group for group in groups}, offered[PARAM_GROUPS])


def plan_keys(plan: LoadPlan, saves_groups: bool, offered: Mapping[str, Any], has_state: bool = True) -> None:
    """Compares the outermost keys of a saved form with those of an optimizer that does or does not save groups.

    One without any state needs none: where all of it lies on other ranks, a checkpoint has nothing for this one.
    """
    known = {STATE, PARAM_GROUPS} if saves_groups else {STATE}
    for key in known - offered.keys() - (set() if has_state else {STATE}):
        plan.missing(
            plan.section(key), "load what state_dict() gave, with groups where save_param_groups(True) was called"
        )
    for key in offered.keys() - known:
        plan.unexpected(plan.section(key), "drop it; for param_groups, call save_param_groups(True) before loading")


def _plan_state(plan: LoadPlan, state: dict[str, MutableMapping[str, Any]], offered: Any) -> None:
    if isinstance(offered, Mapping):
        offered = {name: value for name, value in offered.items() if not isinstance(value, Mapping) or value}
        if offered and not state:
            plan.problem(
                plan.section(STATE),
                f"state of {listed(map(plan.seen_as, offered))}",
                "none, as this optimizer has none yet",
                "call init_state() before loading",
            )
            return
        if state and not offered and plan.strict:
            plan.problem(
                plan.section(STATE),
                "no state",
                f"state of {listed(map(plan.seen_as, state))}",
                "it was saved before the first step: call init_state() before saving, or load it into an optimizer "
                "on which init_state() was not called",
            )
            return
    plan.mapping(plan.section(STATE), state, offered, _STATE_REMEDY)


def _plan_groups(plan: LoadPlan, groups: Mapping[str, KeyedGroup], offered: Any) -> None:
    section = plan.section(PARAM_GROUPS)
    if not isinstance(offered, Mapping):
        remedy = "load what state_dict() of a keyed optimizer gave"
        plan.problem(section, f"a {type(offered).__name__}", "a mapping by least FQN", remedy)
        return
    plan.unmatched_names(f"{section}.", groups.keys(), offered.keys(), _GROUPS_REMEDY)
    for key in groups.keys() & offered.keys():
        where = f"{section}.{key}"
        if isinstance(offered[key], Mapping):
            _plan_group(plan, where, groups[key], offered[key])
        else:
            plan.mapping(where, groups[key].saved, offered[key], _REMEDY)


def _plan_group(plan: LoadPlan, where: str, group: KeyedGroup, offered_group: Mapping[str, Any]) -> None:
    saved = group.saved
    _plan_members(plan, where, saved[PARAMS], offered_group)
    own_keys = {ALGORITHM, GIVEN} - group.live.keys()  # options may have these names
    if ALGORITHM in own_keys and _is_of_another(saved, offered_group):
        _plan_another_algorithm(plan, where, saved[ALGORITHM], offered_group[ALGORITHM])
        return
    left_out = {*IMPLEMENTATION_OPTIONS, *group.kept, *own_keys}
    if group.kept.isdisjoint(offered_group):
        plan.loaded_groups.append(group.live)
    if GIVEN in own_keys:
        given = {name: value for name, value in saved.get(GIVEN, {}).items() if name not in group.kept}
        plan.overridden += overridden(where, given, offered_group, offered_group.get(GIVEN))
    offered_group = {name: as_number(value) for name, value in offered_group.items() if name not in left_out}
    into = {name: value for name, value in saved.items() if name not in left_out}
    plan.mapping(where, into, offered_group, _REMEDY)
    plan.then(lambda: saved.update(into))


def _is_of_another(saved: Mapping[str, Any], offered_group: Mapping[str, Any]) -> bool:
    """Whether a saved group is another algorithm's. Older checkpoints and torchrec's do not say."""
    return ALGORITHM in saved and ALGORITHM in offered_group and saved[ALGORITHM] != offered_group[ALGORITHM]


def _plan_another_algorithm(plan: LoadPlan, where: str, here: str, stored: str) -> None:
    key = f"{where}.{ALGORITHM}"
    if plan.strict:
        remedy = (
            f"resume with {stored}; or leave the optimizer out of the app to begin anew with {here}; or load with "
            "strict=False, which takes the state that fits and no options"
        )
        plan.problem(key, f"{stored}, by which it was saved", here, remedy)
        return
    plan.unmatched.unexpected_keys.append(key)
    plan.algorithms.append(f"{where}: saved by {stored}; {here} goes on with the state that fits, and its own options")


def _plan_members(plan: LoadPlan, where: str, names: list[str], offered_group: Mapping[str, Any]) -> None:
    members = offered_group.get(PARAMS, names)
    here, stored = (list(map(plan.seen_as, each)) for each in (names, members))
    plan.unmatched_names(f"{where}.{PARAMS}: ", here, stored, _GROUPS_REMEDY)
    strangers = sorted(set(offered_group.get(UNTOUCHED, ())).difference(members))
    if strangers:
        plan.problem(f"{where}.{UNTOUCHED}", f"{strangers}", f"names among {members}", "read the checkpoint again")
