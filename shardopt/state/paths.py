"""Paths: the place of a leaf in nested state, as a tuple of keys and positions. Joined by dots, a path is a key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

STATE = "state"
PARAM_GROUPS = "param_groups"
"""The outermost names in an optimizer's state, as torch has them."""


class Index(int):
    """A position in a list or tuple, as a part of a path; a plain int is a dict's key."""

    __slots__ = ()


Path = tuple[str | int, ...]


def join(path: Path) -> str:
    """Joins the parts of a path by dots to its key."""
    return ".".join(map(str, path))


def all_but(key: str) -> str:
    """Returns the regex, as it is written, that finds all keys but those beside this one, and below its parent."""
    return f'r"^(?!{re.escape(key.rpartition(".")[0] or key)}(\\.|$))"'


def is_below(path: Path, *roots: Path) -> bool:
    """Whether a path is one of the roots, or below one."""
    for root in roots:  # noqa: SIM110  # asked of every key, and `any` of a generator takes three times as long
        if path[: len(root)] == root:
            return True
    return False


def keys_below(paths: Mapping[str, Path], roots: Iterable[Path]) -> dict[Path, list[str]]:
    """Returns root → the keys whose paths are at or below it, for all roots in one pass."""
    below: dict[Path, list[str]] = {root: [] for root in roots}
    if not below:
        return below
    lengths = sorted({len(root) for root in below})
    for key, path in paths.items():
        for length in lengths:
            if length <= len(path) and (keys := below.get(path[:length])) is not None:
                keys.append(key)
    return below


def kinds_differ(one: Path, other: Path, kind: Callable[[Any], Any] = type) -> bool:
    """Whether two paths with equal parts differ in what a part is: a list's position, a dict's key 0, or "0".

    They may well be cut in other places: a module has one part for what a dict of dicts has several for.
    """
    try:
        "".join(one + other)  # type: ignore[arg-type]  # a quick look at whether all parts are str
    except TypeError:
        return [*map(str, one)] == [*map(str, other)] and [*map(kind, one)] != [*map(kind, other)]
    return False


lists_differ = partial(kinds_differ, kind=lambda part: type(part) is Index)
"""Whether two paths with equal parts differ in which of them are positions in lists.

That a dict's key is 0 in one, and "0" in the other, is no difference: DCP stores no other keys than texts.
"""


def tell_path(path: Path) -> str:
    """Formats a path for errors, with the kind of its end: "app['x'][0] (a dict's key)", "app['x'][0] (of a list)"."""
    kind = "of a list" if path and isinstance(path[-1], Index) else "a dict's key"
    return f"app{''.join(f'[{part!r}]' for part in path)} ({kind})"


def lists_with_gaps(paths: Iterable[Path]) -> dict[Path, list[int]]:
    """Returns the path of each list that lacks elements before its last → the elements that these paths have."""
    there: dict[Path, set[int]] = {}
    for path in paths:
        for i, part in enumerate(path):
            if isinstance(part, Index):
                there.setdefault(path[:i], set()).add(part)
    return {path: sorted(each) for path, each in there.items() if each != {*range(len(each))}}


def nest(leaves: Mapping[Path, Any]) -> Any:
    """Nests leaves by path: makes dicts, and lists where a path has an `Index`; these have no gaps."""
    if () in leaves:
        return leaves[()]
    branches: dict[str | int, dict[Path, Any]] = {}
    for path, value in leaves.items():
        branches.setdefault(path[0], {})[path[1:]] = value
    nested = {part: nest(branch) for part, branch in branches.items()}
    if nested and all(isinstance(part, Index) for part in nested):
        return [nested[part] for part in sorted(nested)]
    return nested
