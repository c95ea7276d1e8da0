"""Converts the groups of optimizers in other formats to options by parameter, as ours are.

    optim.param_groups                                          a list of groups, as in files of torch.save
    optim.param_groups.0.params, optim.param_groups.0.lr        the same list, taken apart to its last values (DCP)
    optim.param_groups.layers.0.weight.lr                       by parameter and option, of flattened optimizer state
    optim.param_groups.layers.0.weight                          here: all options of a parameter, a dict

Only groups whose parameters are names: what numbers mean depends on the app.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from shardopt.checkpoint.format.manifest import StoredTensors
from shardopt.checkpoint.format.values import Values
from shardopt.state.param_groups import are_named, options_by_member
from shardopt.state.paths import PARAM_GROUPS, Index, Path, join, nest
from shardopt.state.values import canonical, encode_value

_STATE = "state"


def path_of(parts: Sequence[str | int]) -> Path:
    """Converts a path of DCP's to our form; every int in it is a position in a list."""
    return tuple(Index(part) if isinstance(part, int) else part for part in parts)


class Regrouped(NamedTuple):
    """Paths of tensors by key, and plain values, as a save of shardopt would have them."""

    tensors: Mapping[str, Path]
    values: Values


def with_options_by_member(tensors: StoredTensors, values: Values) -> tuple[StoredTensors, Values]:
    """Returns the tensors and plain values of a checkpoint in the form that `regrouped` gives."""
    at, regrouped_values = regrouped({key: tensor.path for key, tensor in tensors.items()}, values)
    return StoredTensors((key, each._replace(path=at[key])) for key, each in tensors.items()), regrouped_values


def regrouped(tensors: Mapping[str, Path], values: Values) -> Regrouped:
    """Joins the options of optimizers' groups by parameter, and splits paths of flattened state as ours.

    Groups whose parameters are positions, or that hold tensors, are left as they are.
    """
    of_lists: defaultdict[Path, dict[Path, Any]] = defaultdict(dict)
    of_members: defaultdict[Path, dict[str, dict[str, Any]]] = defaultdict(dict)
    taken: defaultdict[Path, list[str]] = defaultdict(list)
    for key, (path, value) in values.items():
        at = next((i for i, part in enumerate(path) if _is_section(part, PARAM_GROUPS)), None)
        if at is None:
            continue
        root, section, rest = path[:at], str(path[at]), path[at + 1 :]
        if section == PARAM_GROUPS and rest and isinstance(rest[0], Index):
            of_lists[root][rest] = value
        elif section == PARAM_GROUPS and not rest and are_named(value):
            of_lists[root] |= {(Index(i),): group for i, group in enumerate(value)}
        elif section != PARAM_GROUPS and not rest:
            name, _, option = section.removeprefix(f"{PARAM_GROUPS}.").rpartition(".")
            of_members[root].setdefault(name, {})[option] = value
        else:
            continue
        taken[root].append(key)
    found: dict[Path, Mapping[str, Any]] = {}
    for root in taken:
        if any(_is_section(path[len(root)], PARAM_GROUPS) for path in tensors.values() if _is_within(path, root)):
            continue
        groups = nest(of_lists[root]) if root in of_lists else []
        if are_named(groups):
            found[root] = {**options_by_member(groups), **_shared(of_members[root])}
    left = {key for root in found for key in taken[root]}
    options = {
        join((*root, PARAM_GROUPS, name)): ((*root, PARAM_GROUPS, name), each)
        for root, by_member in found.items()
        for name, each in by_member.items()
    }
    kept = {key: (_cut(path, found), value) for key, (path, value) in values.items() if key not in left}
    return Regrouped({key: _cut(path, found) for key, path in tensors.items()}, {**kept, **options})


def _cut(path: Path, names: Mapping[Path, Collection[str]]) -> Path:
    """Splits a path of flattened state ("state.layers.0.weight.exp_avg") into section, parameter and entry.

    Args:
        names: root of an optimizer → those of its parameters.
    """
    for root, known in names.items():
        if len(path) == len(root) + 1 and path[: len(root)] == root and _is_section(path[-1], f"{_STATE}."):
            words = str(path[-1]).split(".")[1:]
            for end in range(len(words) - 1, 0, -1):
                if ".".join(words[:end]) in known:
                    return (*root, _STATE, ".".join(words[:end]), *words[end:])
    return path


def _is_section(part: str | int, section: str) -> bool:
    return isinstance(part, str) and (part == section or part.startswith(f"{section.removesuffix('.')}."))


def _is_within(path: Path, root: Path) -> bool:
    return len(path) > len(root) and path[: len(root)] == root


def _shared(by_member: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the same options with equal ones as one object, which is stored once."""
    first: dict[str, Mapping[str, Any]] = {}
    return {
        name: first.setdefault(canonical(encode_value(dict(sorted(options.items())), name)), options)
        for name, options in by_member.items()
    }
