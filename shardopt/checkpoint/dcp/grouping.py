"""Converts plain values between shardopt and torch.distributed.checkpoint (DCP), which splits containers.

    optim.param_groups.0.params, optim.param_groups.0.lr        DCP, of groups in a list
    optim.param_groups.layers.0.weight.lr                       DCP, of flattened optimizer state
    optim.param_groups.layers.0.weight                          here: all options of a parameter, a dict

What else is one value here, such as the state of a schedule, stays in parts: `checkpoint.load` puts them together as
the app has them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from shardopt.checkpoint.format.values import Values
from shardopt.errors import MismatchError, Problem
from shardopt.state.param_groups import IMPLEMENTATION_OPTIONS, PARAMS, UNTOUCHED
from shardopt.state.paths import PARAM_GROUPS, Index, Path, join
from shardopt.state.values import canonical, encode_value

_STATE = "state"
_NOTES = ("algorithm", "given")  # that keyed optimizers add to the options of a group, and torch's do not


def parts_of(path: Path) -> tuple[str | int, ...]:
    """Returns a path in DCP's form, in which every dict key is a str."""
    return tuple(int(part) if isinstance(part, Index) else str(part) for part in path)


def in_parts(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yields the parts that DCP splits a plain value into, with their paths; nothing for empty dicts."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from in_parts((*path, str(name)), inner)
    elif isinstance(value, list) and not _is_one_value(value):
        for i, inner in enumerate(value):
            yield from in_parts((*path, Index(i)), inner)
    else:
        yield path, value


def _is_one_value(value: Any) -> bool:
    return not isinstance(value, Mapping) and (not isinstance(value, list) or all(map(_is_one_value, value)))


class StoredOptions:
    """The options of optimizers' parameters in a checkpoint, by the keys that DCP asks for.

    Args:
        values: of the checkpoint.
    """

    def __init__(self, values: Values) -> None:
        self._of: defaultdict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)  # section → by member
        for path, value in values.values():
            if len(path) > 1 and path[-2] == PARAM_GROUPS and isinstance(value, Mapping):
                self._of[join(path[:-1])][str(path[-1])] = value
        sections = "|".join(map(re.escape, sorted(self._of, key=len, reverse=True)))
        self._pattern = re.compile(rf"({sections})\.(.+)") if sections else None

    def has(self, key: str) -> bool:
        """Whether a key is of listed groups, or of an option of how to compute, which is not stored."""
        found = self._split(key)
        return found is not None and (found[1] is not None or found[2].rpartition(".")[2] in IMPLEMENTATION_OPTIONS)

    def read(self, key: str, given: Mapping[str, Any]) -> tuple[bool, Any]:
        """Returns whether a key that `has` accepts is stored, and its value; groups are built from their members.

        Args:
            given: by key, the values of the state that is loaded into: the members of its groups.

        Raises:
            MismatchError: parameters of a group have no options in the checkpoint, or have different ones.
        """
        found = self._split(key)
        assert found is not None
        section, position, option = found
        if position is None or option == PARAMS or option in IMPLEMENTATION_OPTIONS:
            return False, None
        members = given.get(f"{section}.{position}.{PARAMS}")
        if not isinstance(members, list | tuple) or not members:
            return False, None
        stored = self._of[section]
        unknown = [name for name in members if name not in stored]
        if unknown:
            remedy = "load what was saved from the same parameters"
            problems = [
                Problem(f"{section}.{name}", "no options in the checkpoint", "some", remedy) for name in unknown
            ]
            raise MismatchError("the checkpoint does not fit", problems)
        if option == UNTOUCHED:
            return True, [name for name in members if stored[name].get(UNTOUCHED)]
        values = {name: _within(stored[name], option) for name in members}
        first = values[members[0]]
        other = next((name for name, value in values.items() if not _is_same(value, first)), None)
        if other is not None:
            several = f"{_told(first)} of {members[0]}, {_told(values[other])} of {other}"
            remedy = "put these parameters into groups of their own"
            problem = Problem(f"{section}.{members[0]}.{option}", several, "one value for all of a group", remedy)
            raise MismatchError("the checkpoint does not fit", [problem])
        if first is _NOTHING and option.partition(".")[0] not in _NOTES:
            problem = Problem(
                key, "no such option in the checkpoint", "one", "load what was saved with the same options"
            )
            raise MismatchError("the checkpoint does not fit", [problem])
        return first is not _NOTHING, None if first is _NOTHING else first

    def _split(self, key: str) -> tuple[str, int | None, str] | None:
        """Returns a key's section, position of the group (None if by member) and option; None for other keys."""
        found = self._pattern.fullmatch(key) if self._pattern else None
        if found is None:
            return None
        section, rest = found.groups()
        position, _, option = rest.partition(".")
        if position.isdecimal() and option and rest.rpartition(".")[0] not in self._of[section]:
            return section, int(position), option
        return section, None, rest


_NOTHING: Any = object()


def _told(value: Any) -> str:
    return "nothing" if value is _NOTHING else repr(value)


def _is_same(one: Any, other: Any) -> bool:
    if one is _NOTHING or other is _NOTHING:
        return one is other
    return bool(canonical(encode_value(one)) == canonical(encode_value(other)))


def _within(options: Mapping[str, Any], option: str) -> Any:
    """Returns an option, or an entry of one that is a dict ("given.lr"); _NOTHING if it does not exist."""
    value: Any = options
    for part in option.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _NOTHING
        value = value[part]
    return value
