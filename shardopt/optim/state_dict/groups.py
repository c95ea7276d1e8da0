"""Names parameters, checks them, and sorts them into groups by pattern."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from shardopt.errors import LayoutError, Problem, StateError
from shardopt.ranks import ranks_of
from shardopt.runtime.torch_gradients import is_flattened
from shardopt.sharding.gradients import takes_gradient
from shardopt.sharding.view import view_of
from shardopt.state.names import before_all, plain_name
from shardopt.state.param_groups import PARAMS
from shardopt.state.state import Tied, refuse_chains

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
GroupsOfNamed = Iterable[Mapping[str, Any]]
"""Groups as torch's optimizers take them, with named parameters: `{"params": module.named_parameters(), ...}`."""

_MOST_NAMES = 20
_ADD = 'add it under its name, add_param_group({"params": {name: tensor}}), or make the optimizer after the model'


class NamedParameters(dict[str, Tensor]):
    """Parameters by their plain names, in order.

    Attributes:
        dropped: the prefix of every name, which is left out of all; of names that are added later, too.
        tied: name → the name that stands for it; of names that are added later, too.
    """

    dropped = ""
    tied: Tied = MappingProxyType({})


def named(
    parameters: NamedTensors, dropped: str | None = None, alone: bool | None = None, tied: Tied | None = None
) -> NamedParameters:
    """Returns the parameters by `plain_name`, without the prefix that DistributedDataParallel adds to all names.

    Args:
        parameters: given back as they are if they have their plain names already.
        dropped: the prefix that is left out of names; None is all of "module." that every name has.
        tied: name → the name of the parameter that it is tied to, maybe on another rank: that is used for both.
        alone: whether this rank trains alone: of several, one may hold no parameters. None is whether the job has one.

    Raises:
        StateError: there are none and this rank is alone, they are not pairs of a name and a tensor, a name comes
            twice, or they are those of FullyShardedDataParallel.
    """
    if isinstance(parameters, NamedParameters):
        return parameters
    refuse_chains(tied or {})
    pairs = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    if not pairs and (ranks_of().size == 1 if alone is None else alone):
        problem = Problem("parameters", "none", "at least one", "pass model.named_parameters()")
        raise StateError("an optimizer got no parameters", [problem], code="bad-parameters")
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, pair)
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            problem = Problem("parameters", f"a {type(pair).__name__}", "(name, tensor)", "pass named_parameters()")
            raise StateError("an optimizer got parameters without names", [problem], code="bad-parameters")
    by_name = NamedParameters()
    by_name.tied = dict(tied or {})
    names = [plain_name(name) for name, _ in pairs]
    by_name.dropped = before_all(names) if dropped is None else dropped
    for name, (_, tensor) in zip(names, pairs, strict=True):
        name = name.removeprefix(by_name.dropped)
        name = by_name.tied.get(name, name)
        if tied and by_name.get(name) is tensor:
            continue
        if name in by_name:
            remedy = "give every parameter a name of its own; those that are tied on one rank share a tensor"
            problem = Problem(name, "two parameters", "one", remedy)
            raise StateError("two parameters have one name", [problem], code="bad-parameters")
        by_name[name] = tensor
    refuse_flattened(by_name)
    return by_name


def first_names(parameters: Mapping[str, Tensor]) -> dict[Tensor, str]:
    """Returns tensor → name; for a tensor with several names (tied parameters) the first."""
    names: dict[Tensor, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(tensor, name)
    return names


def refuse_unknown(argument: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises StateError for names that an optimizer does not have."""
    unknown = sorted(set(names).difference(known))
    if unknown:
        remedy = "mend their spelling; within combined optimizers the key of each stands before its names"
        problem = Problem(argument, listed(unknown), f"some of {listed(known)}", remedy)
        raise StateError("a name is not known", [problem], code="bad-options")


def refuse_flattened(parameters: Mapping[str, Tensor]) -> None:
    """Raises for parameters of FullyShardedDataParallel (FSDP1), which do not say what they are pieces of.

    A rank has a flat piece of each, of its own length or none: a norm would take them for replicas, and a checkpoint
    for the parameters.

    Raises:
        StateError: names each.
    """
    problems = [
        Problem(
            key=name,
            found="a flat piece of FullyShardedDataParallel",
            required="a parameter that says how it is sharded",
            remedy="shard the model with torch.distributed.fsdp.fully_shard in its place, and then make this",
        )
        for name, tensor in parameters.items()
        if is_flattened(tensor)
    ]
    if problems:
        raise StateError(
            "FullyShardedDataParallel (FSDP1) is not supported; fully_shard (FSDP2) is", problems, code="bad-parameters"
        )


def refuse_unfit_groups(
    groups: Any, names: Mapping[Tensor, str], required: Collection[str] = (), once: bool = True
) -> None:
    """Checks groups, which anyone may have changed, against the parameters of their optimizer.

    Args:
        groups: of the optimizer, live or to be.
        names: parameter → FQN.
        required: the options that each group needs.
        once: whether a parameter may stand in one place only. Steps take one that stands in two, as torch's do, twice;
            but groups go by names where they are saved.

    Raises:
        StateError: names each value that is no group, each tensor that the optimizer does not know, each parameter that
            stands in two places, and each option that is missing.
    """
    problems = []
    places: dict[Tensor, str] = {}
    for number, group in enumerate(groups):
        where = f"param_groups[{number}]"
        params = group.get("params") if isinstance(group, MutableMapping) else None
        if not isinstance(params, list | tuple):
            value = f"a {type(group).__name__}" if params is None else f'"params" in a {type(params).__name__}'
            problems.append(
                Problem(where, value, 'a dict with a list of parameters under "params"', "use add_param_group")
            )
            continue
        for option in (option for option in required if option not in group):
            remedy = "use add_param_group, which fills in what is not given"
            problems.append(Problem(f"{where}.{option}", "nothing", "a value, as in every group", remedy))
        for place, param in enumerate(params):
            at = f'{where}["params"][{place}]'
            if not isinstance(param, Tensor) or param not in names:
                problems.append(Problem(at, described(param), f"one of {listed(names.values())}", _ADD))
            elif once and param in places:
                other = f"{names[param]}, which {places[param]} is"
                problems.append(Problem(at, other, "each parameter once", "take it out of one of them"))
            else:
                places[param] = at
    if problems:
        raise StateError("groups of an optimizer do not fit its parameters", problems, code="bad-groups")


def described(value: Any) -> str:
    """Describes a tensor without a name, in a few words."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    try:
        view = view_of(value)
    except LayoutError:  # not a kind of tensor that is known here
        return f"a {type(value).__name__} that the optimizer does not know"
    return f"a tensor of {view.dtype} and shape {view.shape} that the optimizer does not know"


def refuse_non_leaf_tensors(parameters: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]] = ()) -> None:
    """Raises for tensors that are no leaves of autograd, as torch does, unless the step itself is differentiable.

    Args:
        parameters: name → tensor.
        groups: options that say whether the step is.

    Raises:
        StateError: names each such tensor.
    """
    if any(group.get("differentiable") for group in groups):
        return
    problems = [
        Problem(name, "a tensor that autograd computed", "a parameter", "pass the leaf, or a detached tensor")
        for name, tensor in parameters.items()
        if takes_gradient(tensor) and not (tensor.is_leaf or tensor.retains_grad)
    ]
    if problems:
        raise StateError("a tensor that is not a leaf cannot be optimized", problems, code="bad-parameters")


@dataclass(frozen=True, slots=True)
class OneOf:
    """A pattern that matches exactly these names."""

    names: frozenset[str]

    @property
    def pattern(self) -> str:
        """The names, for messages."""
        return listed(sorted(self.names))

    def search(self, name: str) -> bool:
        """Whether it is one of the names."""
        return name in self.names


Pattern = re.Pattern[str] | OneOf


def named_in_groups(
    given: NamedTensors | GroupsOfNamed,
    groups: Collection[Mapping[str, Any]],
    alone: bool | None = None,
    tied: Tied | None = None,
) -> tuple[NamedParameters, list[dict[str, Any]] | None]:
    """Returns named parameters like `named`, also from groups as torch's optimizers take them.

    Returns:
        The parameters; and those groups with `OneOf` their names under "match", or None where none were given so.

    Raises:
        StateError: as `named`; or there are `groups` by pattern, too.
    """
    entries: Any = given if isinstance(given, Mapping) else list(given)
    if not entries or isinstance(entries, dict) or not all(isinstance(e, Mapping) and PARAMS in e for e in entries):
        return named(entries, alone=alone, tied=tied), None
    if groups:
        both = "groups by pattern beside groups with parameters"
        problem = Problem("groups", both, "one of them", "drop one")
        raise StateError("invalid parameter groups", [problem], code="bad-groups")
    members = [[*(each.items() if isinstance(each, Mapping) else each)] for each in (e[PARAMS] for e in entries)]
    params = named([pair for pairs in members for pair in pairs], alone=alone, tied=tied)
    made = []
    for pairs, entry in zip(members, entries, strict=True):
        names = [plain_name(name).removeprefix(params.dropped) for name, _ in pairs]
        match = OneOf(frozenset(params.tied.get(name, name) for name in names))
        made.append({**{name: value for name, value in entry.items() if name != PARAMS}, "match": match})
    return params, made


@dataclass(frozen=True, slots=True)
class Places:
    """The positions of one optimizer's groups among all groups given to `keyed`.

    Args:
        patterns: of all groups in their order; after them comes the group of what none matches.
        places: of each group of the optimizer.
    """

    patterns: tuple[Pattern, ...] = ()
    places: tuple[int, ...] = ()

    def has(self, position: int, name: str) -> bool:
        """Whether a parameter belongs to the group at a position; unknown for groups added later."""
        return position < len(self.places) and _place_of(name, self.patterns) == self.places[position]


def _place_of(name: str, patterns: Sequence[Pattern]) -> int:
    return next((place for place, pattern in enumerate(patterns) if pattern.search(name)), len(patterns))


class Sorted(NamedTuple):
    """Parameters sorted into groups.

    Args:
        groups: options and parameters of each, and last those that no pattern matched, under no options.
        patterns: of all but that.
        unmatched: a problem for each pattern that is the first match of no parameter.
    """

    groups: list[tuple[dict[str, Any], dict[str, Tensor]]]
    patterns: tuple[Pattern, ...]
    unmatched: list[Problem]


def by_pattern(parameters: Mapping[str, Tensor], groups: Collection[Mapping[str, Any]]) -> Sorted:
    """Sorts parameters into groups: each goes to the first group whose pattern matches its name, or to a last one.

    Every group keeps its place, also where it is empty: another rank, or another job that resumes, may have parameters
    for it, and schedules are to have the same rates there.

    Args:
        parameters: name → tensor; a tensor with several names goes where its first name goes, with all its names.
        groups: mappings with "match", a regular expression that is searched for in the name, and options.

    Raises:
        StateError: "match" is missing or is no regular expression.
    """
    if isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups):
        problem = Problem("groups", repr(groups), "a list of dicts", 'write [{"match": r"norm|bias", ...}]')
        raise StateError("invalid parameter groups", [problem], code="bad-groups")
    patterns = tuple(_pattern(position, group) for position, group in enumerate(groups))
    members: list[dict[str, Tensor]] = [{} for _ in (*patterns, "the rest")]
    first_name = first_names(parameters)
    for name, tensor in parameters.items():
        members[_place_of(first_name[tensor], patterns)][name] = tensor
    unmatched = []
    for i, pattern in enumerate(patterns):
        if not members[i]:
            matches = [name for name in parameters if pattern.search(name)]
            why = f"whose matches an earlier group took ({listed(matches)})" if matches else "which is found in no name"
            found = f"the pattern {pattern.pattern!r}, {why}"
            required = "at least one parameter whose first match it is"
            remedy = f"mend or drop the pattern; the names are {listed(parameters)}"
            unmatched.append(Problem(f"groups[{i}]", found, required, remedy))
    options = [{name: value for name, value in group.items() if name != "match"} for group in groups]
    return Sorted(list(zip([*options, {}], members, strict=True)), patterns, unmatched)


def listed(names: Iterable[str]) -> str:
    """Lists up to twenty names, for a sentence."""
    names = list(names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _pattern(position: int, group: Mapping[str, Any]) -> Pattern:
    match = group.get("match")
    if isinstance(match, OneOf):
        return match
    try:
        return re.compile(match)  # type: ignore[arg-type]  # anything may be given; re reports what is wrong with it
    except (TypeError, re.error) as error:
        problem = Problem(
            key=f"groups[{position}].match",
            found=f"{match!r} ({error})",
            required="a regular expression for parameter names",
            remedy='write {"match": r"norm|bias", ...}',
        )
        raise StateError("a group has no pattern", [problem], code="bad-groups") from None
