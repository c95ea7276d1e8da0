"""Converts checkpoints of formats 1 and 2 to the present form: each parameter's options under a key of its own.

    "optimizer.param_groups": {"a": {"params": ["a", "b"], "lr": 0.1}}      one value, groups by the least name in each
    "optimizer.param_groups.a": {"lr": 0.1}, "optimizer.param_groups.b": {"lr": 0.1}            what becomes of it

An optimizer whose state had no tensor was one value as a whole; where options had tensors, each was a value of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shardopt.errors import StateError
from shardopt.state.param_groups import are_named_mapping, options_by_member
from shardopt.state.paths import PARAM_GROUPS, Path, join, nest

Values = Mapping[str, tuple[Path, Any]]

_STATE = "state"
_GLOBAL = re.compile(r"(?<![^.])global\.")


def with_options_by_member(
    values: Values, tensors: Mapping[str, tuple[Any, ...]]
) -> tuple[dict[str, tuple[Path, Any]], dict[str, Path]]:
    """Returns plain values with groups of parameters split into options by parameter; all other values stay.

    State of no parameter, which had the least name of a group in its own, gets the name that it has now.

    Args:
        values: decoded, by key, with their paths.
        tensors: by key, the path first.

    Returns:
        The values, and the new paths of tensors that get another key.
    """
    entries = dict(_spread(values))
    members: dict[Path, set[str]] = {}
    for section, keys in _sections(entries).items():
        groups = nest({entries[key][0][len(section) :]: entries[key][1] for key in keys})
        if not are_named_mapping(groups):
            continue
        try:
            by_member = options_by_member(groups.values())
        except StateError:
            continue  # no optimizer of ours has written it
        for key in keys:
            del entries[key]
        entries |= {join((*section, name)): ((*section, name), options) for name, options in by_member.items()}
        members[section[:-1]] = set(by_member)
    for key, (path, value) in list(entries.items()):
        new = _without_name(path, members)
        if new is not None:
            del entries[key]
            entries[join(new)] = new, value
    moved = {key: _without_name(tensor[0], members) for key, tensor in tensors.items()} if members else {}
    return entries, {key: path for key, path in moved.items() if path is not None}


def _without_name(path: Path, members: Mapping[Path, Collection[str]]) -> Path | None:
    """Returns a path with the parameter's name removed, if the state belongs to no parameter; None for other paths."""
    at = path.index(_STATE) if _STATE in path else 0
    while at and path[:at] not in members:
        at = path.index(_STATE, at + 1) if _STATE in path[at + 1 :] else 0
    name = path[at + 1] if at and len(path) > at + 1 else None
    if not isinstance(name, str) or name in members[path[:at]]:
        return None
    for each in _GLOBAL.finditer(name):
        before, after = name[: each.start()], name[each.end() :]
        if before + after in members[path[:at]]:
            return (*path[: at + 1], f"{before}__global__", *path[at + 2 :])
    return None


def _spread(values: Values) -> Iterator[tuple[str, tuple[Path, Any]]]:
    """Yields the values; splits those of whole optimizers by the outermost keys of their state."""
    for key, (path, value) in values.items():
        if not isinstance(value, dict) or not are_named_mapping(value.get(PARAM_GROUPS)):
            yield key, (path, value)
            continue
        for part, section in value.items():
            if part == _STATE and isinstance(section, dict):
                paths: dict[Path, Any] = {(*path, part, name): entries for name, entries in section.items()}
                yield from ((join(at), (at, entries)) for at, entries in paths.items())
            else:
                yield join((*path, part)), ((*path, part), section)


def _sections(values: Values) -> dict[Path, list[str]]:
    """Returns the path of each "param_groups", with the keys of the values at or below it."""
    sections: dict[Path, list[str]] = {}
    for key, (path, _) in values.items():
        if PARAM_GROUPS in path:
            at = path.index(PARAM_GROUPS)
            if len(path) in (at + 1, at + 3):
                sections.setdefault(path[: at + 1], []).append(key)
    return sections
