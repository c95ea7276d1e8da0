"""Replaces plain containers of an app by stored ones, if they have no place for a stored tensor.

So are those in the state of an object that is neither torch's nor checks its state, and the extra state of modules.
A record that is empty when a program begins, and is filled as it goes, has other entries in a checkpoint than in the
app, maybe with tensors. No place of the app says what these have to be: they are made as they are stored, on the CPU.
A rank that has tensors of its own there keeps them, as places for what is stored: then nothing grows on any rank.
Entries that some ranks have, under keys of their own, are for these ranks; those that no rank has are for all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.format.tensor_bytes import torch_dtype
from shardopt.checkpoint.loading.names import Names, stored_paths
from shardopt.checkpoint.loading.options import Strictness
from shardopt.errors import Problem
from shardopt.state.paths import PARAM_GROUPS, Path, is_below, join, keys_below, lists_differ, lists_with_gaps, nest
from shardopt.state.state import FlatState, Leaf

_log = logging.getLogger("shardopt.checkpoint")


@dataclass(frozen=True, slots=True)
class Growing:
    """A plain container of the app, or None, that gets what is stored.

    Args:
        replace: puts a value in its place, or into it.
        parts: of what takes its place, by path within it.
        gone: the keys of what the app has there that will be gone.
        problems: lists in it of which elements are not stored or not chosen: those that follow would move up.
    """

    replace: Callable[[Any], None]
    parts: dict[Path, Any]
    gone: Sequence[str]
    problems: Sequence[Problem]

    def put(self) -> None:
        """Puts the loaded value into the app."""
        inner = _inner(self.parts)  # empty on one rank, filled on another
        self.replace(nest({path: value for path, value in self.parts.items() if path not in inner}))


def growing_in(flat: FlatState, names: Names, select: str | None) -> list[str]:
    """Returns the keys of this rank's outermost plain containers whose entries differ from the checkpoint's.

    Args:
        select: as for `load`; a container is taken whole, where its own key is found.
    """
    roots = _outermost(flat, select)
    if not roots:
        return []
    stored, manifest = stored_paths(names.manifest), names.manifest
    here = keys_below({key: leaf.path for key, leaf in flat.leaves.items()}, roots)
    there = keys_below(stored, roots)
    return [
        join(root)
        for root in roots
        if there[root]
        and not (set(there[root]) == set(here[root]) and _fit(there[root], flat, manifest))
        and not any(key in manifest.per_rank or lists_differ(stored[key][: len(root)], root) for key in there[root])
        and _is_one_tree({key: stored[key][len(root) :] for key in there[root]}, manifest.values)
    ]


def may_grow(flat: FlatState, names: Names, select: str | None, keys: Collection[str]) -> bool:
    """Whether all of these keys, which are not stored, are in containers that will be replaced."""
    if not keys:
        return True
    growing = {*growing_in(flat, names, select)}
    roots = [path for path in flat.plain if join(path) in growing]
    return all(is_below(flat.leaves[key].path, *roots) for key in keys)


def growth_here(flat: FlatState, names: Names, keys: Collection[str]) -> tuple[list[str], dict[str, int]]:
    """Returns what a rank has in containers that are plain on some rank, for `agreed_growth`.

    That is the keys of those under which it has places of another kind, and stored key → how many parts of the key's
    path lead to something that it has; nothing for those that only lead to the container.

    Args:
        keys: of the containers.
    """
    roots = [path for path in flat.plain if join(path) in keys]
    plain = {join(path) for path in roots}
    own = [
        key
        for key in keys
        if key not in plain and any(each == key or each.startswith(f"{key}.") for each in flat.leaves)
    ]
    return own, _parts_here(flat, names, roots)


def agreed_growth(keys: Sequence[str], reports: Sequence[tuple[list[str], dict[str, int]]]) -> dict[str, Any]:
    """Returns, on rank 0, the keys of containers that get what is stored, and stored key → parts of a path.

    The latter are for those ranks that have so many parts of it; the key is not there if all ranks have as many.
    """
    own, parts = zip(*reports, strict=True)
    counts = {key: [each.get(key, 0) for each in parts] for key in dict.fromkeys(chain.from_iterable(parts))}
    return {
        "keys": [key for key in keys if not any(key in each for each in own)],
        "parts": {key: max(each) for key, each in counts.items() if min(each) < max(each)},
    }


def with_places(
    flat: FlatState, names: Names, grow: Mapping[str, Any], strictness: Strictness
) -> tuple[FlatState, Names, list[Growing]]:
    """Returns app and checkpoint with places for what is stored, in place of the containers that it replaces.

    Args:
        grow: which containers, and which entries are for which ranks (`agreed_growth`).
        strictness: what the app alone has in them stays there if keys may be missing.
    """
    manifest, stored = names.manifest, stored_paths(names.manifest)
    paths_here = {key: leaf.path for key, leaf in flat.leaves.items()}
    leaves, chosen, growing = dict(flat.leaves), set(names.chosen), list[Growing]()
    roots = [path for path in flat.plain if join(path) in grow["keys"]]
    parts_here = _parts_here(flat, names, roots)
    elsewhere = {key for key, count in grow["parts"].items() if parts_here.get(key, 0) < count}
    all_there, all_here = _below(roots, stored), _below(roots, paths_here)
    for root in roots:
        own = flat.plain[root][0]
        all_there[root] = {key: _as_in(own, path) for key, path in all_there[root].items()}
        parts: dict[Path, Any] = {}
        here = all_here[root]
        there = {key: path for key, path in all_there[root].items() if key not in elsewhere}
        ends = [path for key, path in there.items() if manifest.values.get(key, ((), None))[1] != {}]
        absent = [key for key, path in here.items() if not any(is_below(other, path) for other in there.values())]
        gone = [key for key in absent if not any(is_below(other, here[key]) for other in all_there[root].values())]
        for key, path in here.items():
            stays = key in absent and (key not in gone or strictness.choice_for_missing(key) != "raise")
            if stays and not any(is_below(path, end) for end in ends):
                parts[path] = leaves[key].value
            else:
                del leaves[key]
                chosen.discard(key)
        for key, path in there.items():
            tensor = manifest.tensors.get(key)
            if tensor is not None:
                parts[path] = torch.empty(tensor.layout.shape, dtype=torch_dtype(tensor.dtype), device="cpu")
            leaves[key] = Leaf(stored[key], parts.get(path), partial(parts.__setitem__, path))
            chosen.add(key)
        remedy = f'load the rest with select=r"^(?!{re.escape(join(root))}(\\.|$))"'
        problems = [
            Problem(join((*root, *path)), f"elements {those} of a list", "all of them", remedy)
            for path, those in lists_with_gaps([*parts, *there.values()]).items()
        ]
        gone = [key for key in gone if key not in leaves]
        if is_below(root, *(each.path for each in flat.targets)):
            problems += _named_states(root, there.values())
        growing.append(Growing(flat.plain[root][1], parts, gone, problems))
    return replace(flat, leaves=leaves), replace(names, chosen=frozenset(chosen)), growing


def _named_states(root: Path, paths: Iterable[Path]) -> list[Problem]:
    """Returns the problem of an optimizer's state in a part of an object: it would get names in place of numbers."""
    if not any(path[-2:-1] == (PARAM_GROUPS,) and type(path[-1]) is str for path in paths):
        return []
    found, required = "the state of an optimizer, by the names of its parameters", "an optimizer in this object"
    remedy = "make the optimizers of the object before the load, not in its load_state_dict"
    return [Problem(join(root), found, required, remedy)]


def warn_of_gone(growing: Iterable[Growing]) -> None:
    """Logs which entries of containers are removed because the checkpoint lacks them."""
    gone = [key for each in growing for key in each.gone]
    if gone:
        more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
        _log.warning(
            "containers are as saved; these entries of the app are gone: %s%s [does-not-fit]",
            ", ".join(gone[:3]),
            more,
        )


def _parts_here(flat: FlatState, names: Names, roots: Collection[Path]) -> dict[str, int]:
    """Returns stored key → how many parts of its path lead to something in the app, if more than to its container."""
    here = keys_below({key: leaf.path for key, leaf in flat.leaves.items()}, roots)
    paths = (flat.leaves[key].path for keys in here.values() for key in keys)
    known = {path[:length] for path in paths for length in range(1, len(path) + 1)}
    stored, found = stored_paths(names.manifest), {}
    for root, keys in keys_below(stored, roots).items():
        for key in keys:
            count = sum(stored[key][:length] in known for length in range(len(root) + 1, len(stored[key]) + 1))
            if count:
                found[key] = len(root) + count
    return found


def _outermost(flat: FlatState, select: str | None) -> list[Path]:
    """Returns the paths of the plain containers, and of None, that are within no other.

    A number or a text is no place that waits to be filled: another kind there is a mistake.
    """
    wanted = re.compile(select or "").search
    found: set[Path] = set()
    for path, (node, _) in flat.plain.items():  # containers come before what is in them
        is_open = node is None or (isinstance(node, Mapping | Sequence | Set) and not isinstance(node, str | bytes))
        if is_open and wanted(join(path)) and not any(path[:length] in found for length in range(1, len(path))):
            found.add(path)
    return [*found]


def _fit(keys: Iterable[str], flat: FlatState, manifest: Manifest) -> bool:
    """Whether the app has a place of its shape for each stored tensor, as in the extra state of a module."""
    places = ((flat.leaves[key].value, manifest.tensors[key].layout.shape) for key in keys if key in manifest.tensors)
    return all(isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape) for value, shape in places)


def _below(roots: Collection[Path], paths: Mapping[str, Path]) -> dict[Path, dict[str, Path]]:
    """Returns root → the keys at or below it, and their paths within it."""
    below = keys_below(paths, roots)
    return {root: {key: paths[key][len(root) :] for key in keys} for root, keys in below.items()}


def _as_in(own: Any, path: Path) -> Path:
    """Returns a path with the app's kinds of dict keys: int where all of a dict are, as DCP stores only texts."""
    parts: list[str | int] = []
    for part in path:
        known = own if isinstance(own, Mapping) else {}
        if type(part) is str and known and all(type(name) is int for name in known) and part.lstrip("-").isdecimal():
            part = int(part)
        parts.append(part)
        own = known.get(part)
    return tuple(parts)


def _is_one_tree(parts: Mapping[str, Path], values: Mapping[str, tuple[Path, Any]]) -> bool:
    """Whether only empty values stand at paths that lead to other values."""
    inner = _inner(parts.values())
    return not any(path in inner and values.get(key, ((), True))[1] for key, path in parts.items())


def _inner(paths: Iterable[Path]) -> set[Path]:
    """Returns the paths that lead to other paths."""
    return {path[:length] for path in paths for length in range(len(path))}
