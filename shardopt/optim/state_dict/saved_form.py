"""The saved form of a keyed optimizer, and the plan of loading one into another.

    {"state": {fqn: {name: value}},
     "param_groups": [{"params": [sorted fqns], option: value, ..., "algorithm": name,
                       "given": {option: value}, "untouched": [fqns]}, ...]}

Groups stand in the order of the live ones, those without parameters too. Loading goes by parameter: a live group takes
the options that all of its parameters have, in whatever groups they were saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.optim.state_dict.groups import listed
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.optim.state_dict.options import as_number, is_equal_option, overridden, replaced
from shardopt.state.param_groups import (
    ALGORITHM,
    ELSEWHERE,
    GIVEN,
    IMPLEMENTATION_OPTIONS,
    PARAMS,
    SAVED_BY,
    STORAGE_OPTIONS,
    UNTOUCHED,
    are_named,
    options_by_member,
    options_elsewhere,
    options_of,
    other_algorithm,
)
from shardopt.state.paths import PARAM_GROUPS, STATE
from shardopt.state.state import is_stateful, like

_REMEDY = (
    "load what was saved from the same parameters and options, by checkpoint.load(..., rename={...}) where names have "
    "changed; a schedule adds some: attach the same one first, or leave the schedule out of the app and load with "
    'Strictness(unexpected="ignore") for what another one had added, or Strictness(missing="ignore") for what the new '
    "one adds; set a key of your own in param_groups before the load; or pass strict=False"
)
_STATE_REMEDY = (
    "load what was saved from the same parameters and options, by checkpoint.load(..., rename={...}) where names have "
    "changed, with init_state=True where some have not stepped, or pass strict=False"
)
_GROUPS_REMEDY = (
    "load what was saved from the same parameters, by checkpoint.load(..., rename={...}) where names have changed, or "
    "pass strict=False, which leaves their state as it is"
)


@dataclass(frozen=True, slots=True)
class KeyedGroup:
    """A group of an optimizer, and its saved form.

    Args:
        live: the group's own dict.
        saved: "params", the options as they are, and further entries that are saved.
        kept: the options that a load leaves as they are here.
        has: whether a parameter of another rank is of this group, as far as its pattern tells.
        defaults: of the options, as far as the algorithm has some.
        later: options that the algorithm did not always have, each with its default, which a saved form without it has.
        unlike: those of a saved group's options under which the state here would lie otherwise: name, stored, own.
    """

    live: dict[str, Any]
    saved: dict[str, Any]
    kept: frozenset[str]
    has: Callable[[str], bool]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    later: Mapping[str, Any] = field(default_factory=dict)
    unlike: Callable[[Mapping[str, Any]], Iterable[tuple[str, Any, Any]]] = lambda options: ()

    def where(self, section: str, position: int) -> str:
        """Returns the key of the group for errors: its least parameter, or its position if it is empty."""
        names = self.saved[PARAMS]
        return f"{section}.{names[0]}" if names else f"{section}[{position}]"

    def keep(self, filled: dict[int, Any]) -> None:
        """Enters tensors of options that are kept, before any group takes some: no other that shares one fills it."""
        for value in [self.live[name] for name in self.kept & self.live.keys()]:
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, Tensor):
                    filled.setdefault(id(each), as_number(each))

    def take(self, filled: dict[int, Any]) -> None:
        """Puts the options of `saved` that a load has changed into the group; `filled` as for `replaced`."""
        for name, value in self.saved.items():
            if name in self.live and name != PARAMS and name not in self.kept:
                self.live[name] = replaced(self.live[name], value, filled)


def as_saved(value: Any) -> Any:
    """Copies a value of state: new dicts, lists and tuples, the same tensors, and the state of stateful objects."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        return {name: as_saved(inner) for name, inner in value.items()}
    if is_stateful(value):
        return value.state_dict()
    return like(value, map(as_saved, value)) if isinstance(value, list | tuple) else value


def put_state(state: dict[str, Any], more: Mapping[str, Any], owners: str) -> None:
    """Adds state under new names. Raises StateError if one is taken."""
    taken = sorted(more.keys() & state.keys())
    if taken:
        problems = [Problem(name, f"state of {owners}", "of one of them", "give it another name") for name in taken]
        raise StateError("two optimizers keep state under one name", problems)
    state.update(more)


def plan_keys(plan: LoadPlan, saves_groups: bool, offered: Mapping[str, Any], has_state: bool = True) -> None:
    """Compares the outermost keys of a saved form with those of an optimizer, which may or may not save groups.

    One without any state needs none: where all of it lies on other ranks, a checkpoint has nothing for this one.
    """
    known = {STATE, PARAM_GROUPS} if saves_groups else {STATE}
    for key in known - offered.keys() - (set() if has_state else {STATE}):
        plan.missing(
            plan.section(key), "load what state_dict() gave, with groups where save_param_groups(True) was called"
        )
    for key in offered.keys() - known:
        plan.unexpected(plan.section(key), "drop it; for param_groups, call save_param_groups(True) before loading")


def plan_state(plan: LoadPlan, state: dict[str, MutableMapping[str, Any]], offered: Any) -> None:
    """Plans to load state by name into live state."""
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


def plan_groups(plan: LoadPlan, groups: Sequence[KeyedGroup], offered: Any) -> None:
    """Plans to load the options of groups."""
    section = plan.section(PARAM_GROUPS)
    if not are_named(offered):
        remedy = "load what state_dict() of a keyed optimizer gave"
        plan.problem(section, f"a {type(offered).__name__}", 'a list of groups with names under "params"', remedy)
        return
    try:
        by_member = options_by_member(offered)
    except StateError as error:
        plan.problems.extend(error.problems)
        return
    names = [name for group in groups for name in group.saved[PARAMS]]
    plan.unmatched_names(f"{section}.", names, by_member, _GROUPS_REMEDY)
    theirs = [group for group in offered if not group.get(ELSEWHERE)]
    for position, group in enumerate(groups):
        members = {name: by_member[name] for name in group.saved[PARAMS] if name in by_member}
        if not group.saved[PARAMS]:  # no member here decides
            others = {name: options for name, options in options_elsewhere(offered).items() if group.has(name)}
            trial = LoadPlan()
            if others and not plan.strict:
                _common_options(trial, "", others, (*IMPLEMENTATION_OPTIONS, GIVEN, UNTOUCHED))
            if not trial.problems:  # else some may be of parameters that are left out
                members = dict(sorted(others.items()))
        if members:
            _plan_group(plan, f"{section}.{next(iter(members))}", group, members)
        elif len(groups) == len(theirs) and not group.saved[PARAMS] and not theirs[position][PARAMS]:
            _plan_group(plan, group.where(section, position), group, {"": options_of(offered[position])})


def _plan_group(plan: LoadPlan, where: str, group: KeyedGroup, by_member: Mapping[str, Mapping[str, Any]]) -> None:
    """Plans to load the options of a group's members, given by member, into the group."""
    saved, variants = group.saved, _distinct(by_member)
    own_keys = {ALGORITHM, GIVEN} - group.live.keys()  # options may have these names
    if ALGORITHM in own_keys and ALGORITHM in saved:  # older checkpoints and torchrec's do not say
        others = dict.fromkeys(other_algorithm(each, saved[ALGORITHM]) for each in variants)
        for algorithm in filter(None, others):
            _plan_another_algorithm(plan, where, saved[ALGORITHM], algorithm)
        if any(others):
            return
    for each in variants:
        for name, stored, here in group.unlike(each):
            remedy = f"resume with {name}={stored!r}, by which the state was made"
            plan.problem(f"{where}.{name}", f"{stored!r}, {SAVED_BY}", repr(here), remedy)
    left_out = {*IMPLEMENTATION_OPTIONS, *group.kept, *own_keys, PARAMS, UNTOUCHED}
    if any(STORAGE_OPTIONS.keys() <= each.keys() for each in (saved, *variants)):
        _plan_storage(plan, where, group, by_member)
        left_out |= STORAGE_OPTIONS.keys()
    options = _common_options(plan, where, by_member, left_out, group.live)
    plan.loaded_options.append((group.live, {name for name in options if f"initial_{name}" not in group.kept}))
    if GIVEN in own_keys:
        given, defaults = (
            {name: value for name, value in each.items() if name not in group.kept}
            for each in (saved.get(GIVEN, {}), group.defaults)
        )
        for each in variants:
            differing = overridden(where, given, options, each.get(GIVEN), defaults)
            plan.overridden += [override for override in differing if override not in plan.overridden]
    left_out |= {name for name, before in group.later.items() if name not in options and saved.get(name) == before}
    into = {name: value for name, value in saved.items() if name not in left_out}
    plan.mapping(where, into, options, _REMEDY)
    plan.then(lambda: saved.update(into))


def _storage(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's options for storage, with torch's way to store as the default."""
    if not STORAGE_OPTIONS.keys() <= group.keys():
        return {**STORAGE_OPTIONS}
    options = {name: group[name] for name in STORAGE_OPTIONS}
    if options["rounding"] == "nearest" and options["state_dtype"] is None:
        options["rounding"] = None  # which says the same of such a group
    return options


def _plan_storage(plan: LoadPlan, where: str, group: KeyedGroup, by_member: Mapping[str, Mapping[str, Any]]) -> None:
    """Notes the parameters whose state was saved in another form than here; the first one for each form."""
    here, noted = _storage(group.saved), set()
    for member, options in by_member.items():
        for name, stored in _storage(options).items():
            converted = plan.convert_state or (plan.convert_dtype and {stored, here[name]} == {None, "bfloat16"})
            kept = name == "rounding" and name in group.kept
            if name == "rounding" and not kept and (stored, here[name]) == ("nearest", None):
                plan.rounded_anew.append(plan.seen_as(member or where))  # earlier versions' default, and the one of now
                continue
            if stored == here[name] or converted or kept or (name, stored) in noted:
                continue
            noted.add((name, stored))
            key = f"{plan.section(PARAM_GROUPS)}.{member}" if member else where
            plan.problem(f"{key}.{name}", f"{stored!r}, {SAVED_BY}", repr(here[name]), _storage_remedy(name, stored))


def _storage_remedy(name: str, stored: Any) -> str:
    resume = f"resume with {name}={stored!r}" if stored != STORAGE_OPTIONS[name] else f"resume without {name}"
    if name == "rounding":
        return f'{resume}; or call keep_options("rounding") before loading, to round as the code says'
    return (
        f"{resume}; or load into an optimizer that stores as it was saved, and give its state_dict() to "
        "load_state_dict(..., convert_state=True) of this one"
    )


def _common_options(
    plan: LoadPlan,
    where: str,
    by_member: Mapping[str, Mapping[str, Any]],
    left_out: Collection[str],
    here: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the options that all members of a group share; notes those that differ, with the members.

    Args:
        here: the options that the group has.
    """
    first, *others = _distinct(by_member)
    common = {name: as_number(value) for name, value in first.items() if name not in left_out}
    names = dict.fromkeys(name for options in (first, *others) for name in options if name not in left_out)
    for name in names if others else ():
        variants: list[tuple[Any, list[str]]] = []
        for member, options in by_member.items():
            value = as_number(options.get(name, _ABSENT))
            same = next((members for other, members in variants if is_equal_option(value, other)), None)
            if same is None:
                variants.append((value, [member]))
            else:
                same.append(member)
        if len(variants) > 1:
            several = "; ".join(f"{value!r} of {listed(map(plan.seen_as, members))}" for value, members in variants)
            plan.problem(
                f"{where}.{name}", several, "one value for all parameters of a group", _disagree_remedy(name, here)
            )
            common.setdefault(name, None)
    return common


def _disagree_remedy(name: str, here: Collection[str]) -> str:
    """Returns the remedy for an option that differs between members of a group, and that the group may lack."""
    kept = name if name in here else name.removeprefix("initial_")
    other = (
        f'call keep_options("{kept}") before loading, to keep what the code gives'
        if kept in here
        else 'load with Strictness(unexpected="ignore"), which leaves it out'
    )
    return f"put these parameters into groups of their own, as they were saved; or {other}"


class _Absent:
    """Stands for an option that a member lacks."""

    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _distinct(by_member: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns each distinct set of options once; most members share one."""
    return list({id(options): options for options in by_member.values()}.values())


def _plan_another_algorithm(plan: LoadPlan, where: str, here: str, stored: str) -> None:
    key = f"{where}.{ALGORITHM}"
    if plan.strict:
        remedy = (
            f"resume with {stored}; or begin anew with {here}: leave the optimizer out of the app, and load with "
            'Strictness(unexpected="ignore"); or load with strict=False, which takes the state that fits and no options'
        )
        plan.problem(key, f"{stored}, {SAVED_BY}", here, remedy)
        return
    plan.unmatched.unexpected_keys.append(key)
    plan.algorithms.append(f"{where}: saved by {stored}; {here} takes the state that fits, with its own options")
