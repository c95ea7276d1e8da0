"""Which names ties give and take; says nothing of what the tensors hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardopt.checkpoint.rearrange.binding import first_match
from shardopt.checkpoint.rearrange.notation import Name, renamed_path
from shardopt.checkpoint.rearrange.rules import AnyRule, Tie
from shardopt.state.paths import Path


def second_names(rule: Tie, paths: Mapping[str, Path]) -> Iterator[tuple[str, str, Path]]:
    """Yields the second name that a tie gives each of its tensors, with the first name and the second one's path."""
    for key, path in paths.items():
        found = Name(rule.name).find(key, path)
        if found is None or found.after:
            continue
        name = Name(rule.also).fill(found.fields)
        also = f"{found.before}{name}"
        if also not in paths:
            yield also, key, renamed_path(path, len(found.before), len(found.name), name)


def names_to_leave_out(rule: Tie, paths: Mapping[str, Path], rules: Sequence[AnyRule]) -> Iterator[tuple[str, str]]:
    """Yields the second names that a reversed tie leaves out if the tensors are equal, each with its first name."""
    for key, path in paths.items():
        found = Name(rule.also).find(key, path)
        if found is None or found.after or first_match(key, path, rules)[1] is not None:
            continue
        name = f"{found.before}{Name(rule.name).fill(found.fields)}"
        if name in paths:
            yield key, name
