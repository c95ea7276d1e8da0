"""Groups of parameters by name, as optimizers save them, and the same options by member.

    [{"params": ["a", "b"], "lr": 0.1}, {"params": ["c"], "lr": 0.2}]        groups
    {"a": {"lr": 0.1}, "b": {"lr": 0.1}, "c": {"lr": 0.2}}                   options by member; a and b share one dict

Options belong to parameters: stages, regrouped jobs and checkpoints meet in the second form. torch's own optimizers
have numbers in the place of names: `Numbered` puts one form of their state into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeGuard

from shardopt.errors import Problem, StateError
from shardopt.runtime.late import torch
from shardopt.runtime.signatures import signature
from shardopt.state.paths import PARAM_GROUPS, STATE

PARAMS = "params"
AVERAGING = "__averaging"
"""The key of averages' own state among that of parameters."""
N_AVERAGED = "n_averaged"
"""The key, in averages' own state, of the number of updates, an int64 scalar on the CPU."""
UNTOUCHED = "untouched"
"""The key, in a saved group, of the parameters that have state but no step yet, so that the first step replaces it.

By member: whether it is one of them.
"""
ELSEWHERE = "elsewhere"
"""The key, in a loaded group without parameters here, of the parameters on other ranks with its options."""
ALGORITHM = "algorithm"
"""The key, in a saved group, of the name of the algorithm that steps it, if known."""
OWN = "."
"""Stands before such a name if the class is neither torch's nor ours: a program may rename it, and go on."""
GIVEN = "given"
"""The key, in a saved group, of the options that the code gave, before schedules and the training loop changed any."""
NAMES_OF_TORCH = "param_names"
"""The key, in a group of torch's, of the names that its parameters were given with."""
IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how this process computes a step, not what.

They depend on its device, and are neither saved nor loaded: a job resumed on other hardware would run with what the old
one asked for.
"""
STORAGE_OPTIONS: Mapping[str, str | None] = {"state_dtype": None, "master_dtype": None, "rounding": None}
"""Options that say in how many bits state and parameters are stored, each with its default."""
SAVED_BY = "by which it was saved"
"""In errors, behind what the checkpoint has: a cause of which others follow, so that loads list it first."""

_NOTES = frozenset({ALGORITHM, GIVEN, UNTOUCHED, PARAMS, NAMES_OF_TORCH})
_NAME_LISTS = (PARAMS, UNTOUCHED, ELSEWHERE)

Groups = list[Mapping[str, Any]]
OptionsByMember = Mapping[str, Mapping[str, Any]]


def are_named(groups: Any) -> TypeGuard[Groups]:
    """Whether these are groups whose parameters are names; torch's own have positions."""
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and PARAMS in group and all(_are_names(group.get(each, [])) for each in _NAME_LISTS)
        for group in groups
    )


def are_named_mapping(groups: Any) -> TypeGuard[Mapping[str, Mapping[str, Any]]]:
    """Whether these are groups in the form of earlier versions: a mapping by the least name in each."""
    return (
        isinstance(groups, Mapping)
        and are_named([*groups.values()])
        and all(group[PARAMS] and min(group[PARAMS]) == key for key, group in groups.items())
    )


def options_by_member(groups: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns name → options of its group, without "params"; members with equal options share one dict.

    Raises:
        StateError: a parameter stands in two groups, or is untouched and in none.
    """
    by_member: dict[str, Mapping[str, Any]] = {}
    problems = []
    for group in groups:
        options = options_of(group)
        untouched = set(group.get(UNTOUCHED, ()))
        of_stepped = {**options, UNTOUCHED: False} if UNTOUCHED in group else options
        of_untouched = {**options, UNTOUCHED: True}
        for name in group[PARAMS]:
            if name in by_member:
                twice = Problem(f"{PARAM_GROUPS}.{name}", "a parameter of two groups", "of one", "mend the groups")
                problems.append(twice)
            by_member[name] = of_untouched if name in untouched else of_stepped
        strangers = sorted(untouched.difference(group[PARAMS]))
        if strangers:
            required = f"names among {group[PARAMS]}"
            problems.append(Problem(f"{PARAM_GROUPS}: {UNTOUCHED}", f"{strangers}", required, "mend the groups"))
    if problems:
        raise StateError("groups do not give each parameter its options", problems, code="bad-groups")
    return by_member


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group, without its names."""
    return {name: value for name, value in group.items() if name not in _NAME_LISTS}


def groups_of(by_member: OptionsByMember) -> list[dict[str, Any]]:
    """Returns groups in which each parameter has its options; members that share a dict share a group."""
    members: dict[int, list[str]] = {}
    for name, options in by_member.items():
        members.setdefault(id(options), []).append(name)
    groups = []
    for names in members.values():
        group = {PARAMS: sorted(names), **by_member[names[0]]}
        if UNTOUCHED in group:
            group[UNTOUCHED] = group[PARAMS] if group[UNTOUCHED] else []
        groups.append(group)
    return groups


def groups_elsewhere(by_member: OptionsByMember) -> list[dict[str, Any]]:
    """Returns groups without parameters that carry the options of parameters on other ranks."""
    groups = groups_of(by_member)
    return [{PARAMS: [], ELSEWHERE: group[PARAMS], **options_of(group)} for group in groups]


def options_elsewhere(groups: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the options that `groups_elsewhere` carried: name → options."""
    by_member: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        if group.get(ELSEWHERE):
            by_member |= dict.fromkeys(group[ELSEWHERE], options_of(group))
    return by_member


def with_options(groups: Groups, options: OptionsByMember) -> list[dict[str, Any]]:
    """Returns groups in which parameters have the options of `options` instead.

    A parameter that has none there goes with the first one of its group that has some; where there is none, it keeps
    those that it has.
    """
    here = options_by_member(groups)
    by_member: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        first = next((options[name] for name in group[PARAMS] if name in options), None)
        for name in group[PARAMS]:
            if name in options or first is None:
                by_member[name] = options.get(name, here[name])
            else:
                own = {entry: value for entry, value in here[name].items() if entry == UNTOUCHED}
                by_member[name] = {entry: value for entry, value in first.items() if entry != UNTOUCHED} | own
    return groups_of(by_member)


def as_grouped(groups: Groups, options: OptionsByMember) -> list[dict[str, Any]]:
    """Returns the same groups, each with the options of its first parameter that has some."""
    first = [next((options[name] for name in group[PARAMS] if name in options), {}) for group in groups]
    return [{**group, **own} for group, own in zip(groups, first, strict=True)]


def renamed_group(group: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Returns a group with its parameters renamed, in order."""
    return {option: [*map(rename, value)] if option in _NAME_LISTS else value for option, value in group.items()}


def members_only(group: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns a group with only those of its parameters that are in `names`."""
    return {
        option: [name for name in value if name in names] if option in _NAME_LISTS else value
        for option, value in group.items()
    }


def refuse_unmatched(reports: Sequence[Sequence[Mapping[str, str]]]) -> None:
    """Raises StateError if a pattern of groups matches no parameter on any rank.

    Args:
        reports: by rank, a problem for each pattern that matches nothing there, as JSON.
    """
    everywhere = set.intersection(*({problem["key"] for problem in report} for report in reports))
    problems = [Problem(**problem) for problem in reports[0] if problem["key"] in everywhere]
    if problems:
        raise StateError("a pattern matches no parameter on any rank", problems, code="bad-groups")


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


@dataclass(frozen=True, slots=True)
class Numbered:
    """The named parameters of an optimizer whose state refers to them by number, as torch's own does.

    Args:
        names: of each parameter, by its number.
        parameters: by number.
        groups: as the optimizer's state has them.
        algorithm: the name of the optimizer's class, if it is torch's; after `OWN`, if it is another's; else "".
        in_order: whether its state is of all parameters in their order: then the numbers stay, and groups tell the
            names that they have.
    """

    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    groups: list[dict[str, Any]]
    algorithm: str
    in_order: bool = False

    def named(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's state with names in place of numbers, as a keyed optimizer's."""
        if self.in_order:
            groups = [
                {**group, NAMES_OF_TORCH: names} for group, names in zip(self.groups, self.members(), strict=True)
            ]
            return {**state, PARAM_GROUPS: groups}
        entries = {
            self.names[key] if type(key) is int else key: each
            for key, each in state[STATE].items()
            if type(key) is not int or each
        }
        note = {ALGORITHM: self.algorithm} if self.algorithm else {}
        groups = [
            {PARAMS: names, **_without_dtypes(_options_of_torch(group)), **note}
            for group, names in zip(self.groups, self.members(), strict=True)
        ]
        return {**state, STATE: entries, PARAM_GROUPS: groups}

    def numbered(self, state: Mapping[str, Any], options: OptionsByMember) -> dict[str, Any]:
        """Returns a state with numbers in place of names, and groups with the options of their members.

        State of which the options say that it never had a step is left out: the first step makes it.
        """
        if self.in_order:
            groups = [
                {name: each for name, each in group.items() if name != NAMES_OF_TORCH or name in own}
                for group, own in zip(state[PARAM_GROUPS], self.groups, strict=False)
            ]
            return {**state, PARAM_GROUPS: groups}
        numbers = {name: number for number, name in enumerate(self.names)}
        entries = {
            numbers.get(name, name): each
            for name, each in state[STATE].items()
            if not options.get(name, {}).get(UNTOUCHED)
        }
        groups = [self._with_options(group, options) for group in self.groups]
        return {**state, STATE: entries, PARAM_GROUPS: groups}

    def members(self) -> list[list[str]]:
        """Returns the names in each group."""
        return [[self.names[number] for number in group[PARAMS]] for group in self.groups]

    def _with_options(self, group: Mapping[str, Any], options: OptionsByMember) -> dict[str, Any]:
        stored = next((options[self.names[each]] for each in group[PARAMS] if self.names[each] in options), None)
        if stored is None or other_algorithm(stored, self.algorithm):
            return dict(group)
        taken = {name: _like(value, group.get(name)) for name, value in _options_of_torch(stored).items()}
        return {**group, **taken}


def numbers_in(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """Returns the parameters of an optimizer by their numbers in its state; None if it has no numbers."""
    groups, entries = state.get(PARAM_GROUPS), state.get(STATE)
    if not isinstance(groups, list) or not isinstance(entries, dict):
        return None
    if not all(isinstance(group, dict) and isinstance(group.get(PARAMS), list) for group in groups):
        return None
    live = [group[PARAMS] for group in optimizer.param_groups]
    if [*map(len, live)] != [len(group[PARAMS]) for group in groups]:
        return None
    numbers = [*chain.from_iterable(group[PARAMS] for group in groups)]
    parameters = tuple(chain.from_iterable(live))
    are_positions = all(type(each) is int for each in numbers) and numbers == [*range(len(parameters))]
    are_known = all(type(key) is not int or key in range(len(parameters)) for key in entries)
    return parameters if parameters and are_positions and are_known else None


def other_algorithm(options: Mapping[str, Any], algorithm: str) -> str:
    """Returns the algorithm of stored options if it is known to be another one; else "", also where one is `OWN`.

    Files of torch do not name it. There it is another one if its options are numbers of others alone.
    """
    stored = options.get(ALGORITHM)
    if stored is None and (own := _numbers_of_torchs().get(algorithm)):
        strange = sorted(_numbers_of_torchs()[""].difference(own).intersection(options))
        return f"an algorithm with {', '.join(strange)}" if strange and not own <= options.keys() else ""
    if not (isinstance(stored, str) and stored and algorithm) or OWN in (stored[0], algorithm[0]):
        return ""
    return stored if stored != algorithm else ""


@cache
def _numbers_of_torchs() -> dict[str, set[str]]:
    """Returns the options that are numbers of each of torch's algorithms, without those of nearly all; of any as ""."""
    found: dict[str, set[str]] = {"": set()}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            options = signature(kind).parameters.values()
            numbers = {each.name for each in options if isinstance(each.default, float | int | tuple)}
            flags = {each.name for each in options if isinstance(each.default, bool)}
            found[name] = numbers - flags - {"lr", "eps", "weight_decay"}
            found[""] |= found[name]
    return found


def other_class(options: Mapping[str, Any], algorithm: str) -> str:
    """Returns the class of stored options if another one steps here, and one of the two is `OWN`; else ""."""
    stored = options.get(ALGORITHM)
    if not (isinstance(stored, str) and stored and algorithm) or OWN not in (stored[0], algorithm[0]):
        return ""
    of_torch = any(hasattr(torch.optim, each) for each in (stored, algorithm))  # where an own one may have its name
    return stored if of_torch or stored.lstrip(OWN) != algorithm.lstrip(OWN) else ""


def _options_of_torch(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that say what torch's optimizer computes."""
    return {name: each for name, each in group.items() if name not in _NOTES and name not in IMPLEMENTATION_OPTIONS}


def _without_dtypes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with names in place of dtypes; `_like` makes dtypes of them."""
    return {name: str(each) if isinstance(each, torch.dtype) else each for name, each in options.items()}


def _like(value: Any, own: Any) -> Any:
    """Returns a stored option in the live one's form: a number, a tensor on its device, or a dtype."""
    if isinstance(value, str) and value.startswith("torch.") and not isinstance(own, str):
        named = getattr(torch, value.removeprefix("torch."), None)
        return named if isinstance(named, torch.dtype) else value
    if isinstance(own, torch.Tensor):
        return torch.as_tensor(value, dtype=own.dtype, device=own.device).reshape(own.shape)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and isinstance(own, int | float):
        return value.item()
    return value
