"""A checkpoint under the names of an app: `rename` and `select`, applied to keys and to names that stand in no key.

An object that has names which are no keys (`state.RenamedStateful`), such as those of the parameters in a group,
renames them itself: it gets what is stored for it as it was saved, and the rules as a function of its keys. The entries
that it puts elsewhere go there, and all else is renamed by its key.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from torch.nn import Module

from shardopt.checkpoint.format.manifest import Manifest, StoredTensors
from shardopt.errors import MismatchError, Problem
from shardopt.names import may_have_wrappers, names_under_wrappers
from shardopt.state import FlatState, Handback, PartialStateful, Path, PerRank, RenamedStateful, flatten, join, nest

T = TypeVar("T")
Values = Mapping[str, tuple[Path, Any]]
Rename = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Names:
    """A checkpoint under the names of an app.

    Args:
        manifest: with the app's keys and paths, without what is not selected.
        renamed: key of the app → key in the data files, where they differ.
        chosen: the app's keys that are to be loaded.
    """

    manifest: Manifest
    renamed: Mapping[str, str]
    chosen: frozenset[str]


def under_names_of(manifest: Manifest, flat: FlatState, select: str | None, rename: Mapping[str, str] | None) -> Names:
    """Applies `rename` (regex → replacement, in turn) to stored keys, and `select` (a regex) to keys on both sides.

    Raises:
        MismatchError: two stored keys get one name, or rules are ambiguous about names that stand in no key.
    """
    if not (select or rename or _keys_under_wrappers((*manifest.tensors, *manifest.values, *manifest.per_rank), flat)):
        return Names(replace(manifest, values=_spread(manifest.values, flat)), {}, frozenset(flat.leaves))
    rules = [(re.compile(pattern), into) for pattern, into in (rename or {}).items()]
    wanted = re.compile(select or "")

    @cache
    def renamed(key: str) -> str:
        for pattern, into in rules:
            key = pattern.sub(into, key)
        return key

    by_objects = _renamed_by_objects(manifest, flat, renamed) if rules else _ObjectRenames()
    keys = [key for key in (*manifest.tensors, *manifest.values, *manifest.per_rank) if key not in by_objects.dropped]
    new_key = {key: join(by_objects.moved[key]) if key in by_objects.moved else renamed(key) for key in keys}
    unwrapped = _keys_under_wrappers(new_key.values(), flat)
    new_key = {key: unwrapped.get(name, name) for key, name in new_key.items()}
    added = {join(path): (path, value) for path, value in by_objects.added.items()}
    _refuse_collisions([*new_key.items(), *((key, key) for key in added)])

    def path_of(key: str, path: Path) -> Path:
        if new_key[key] == key and key not in by_objects.moved:
            return path
        leaf = flat.leaves.get(new_key[key])
        if leaf is not None:
            return leaf.path
        return by_objects.moved.get(key) or tuple(new_key[key].split("."))

    def chosen(stored: Mapping[str, T]) -> Iterable[tuple[str, T]]:
        return ((key, entry) for key, entry in stored.items() if key in new_key and wanted.search(new_key[key]))

    values = added | {
        new_key[key]: (path_of(key, path), by_objects.values.get(key, value))
        for key, (path, value) in manifest.values.items()
        if key in new_key
    }
    renamed_manifest = replace(
        manifest,
        tensors=StoredTensors(
            (new_key[key], tensor._replace(path=path_of(key, tensor.path))) for key, tensor in chosen(manifest.tensors)
        ),
        values={key: entry for key, entry in _spread(values, flat).items() if wanted.search(key)},
        per_rank={new_key[key]: path_of(key, path) for key, path in chosen(manifest.per_rank)},
    )
    changed = {new: key for key, new in new_key.items() if new != key}
    return Names(renamed_manifest, changed, frozenset(key for key in flat.leaves if wanted.search(key)))


def _keys_under_wrappers(keys: Collection[str], flat: FlatState) -> dict[str, str]:
    """Maps stored keys with the names of wrappers in them to the keys that modules of the app have without these.

    Names in a module's state are plain when they are saved (`shardopt.names`); early checkpoints have all.
    """
    if not may_have_wrappers([key for key in keys if key not in flat.leaves]):
        return {}
    unwrapped: dict[str, str] = {}
    for handback in flat.handbacks:
        if isinstance(handback.target, Module):
            root = f"{join(handback.path)}."
            own = {key.removeprefix(root) for key in flat.leaves if key.startswith(root)}
            stored = {key.removeprefix(root) for key in keys if key.startswith(root)}
            unwrapped |= {root + name: root + plain for name, plain in names_under_wrappers(stored, own).items()}
    return unwrapped


def _spread(values: Values, flat: FlatState) -> Values:
    """Splits the value of each `PartialStateful` that was stored as one: its state had no tensor on any rank."""
    partial = {join(each.path) for each in flat.handbacks if isinstance(each.target, PartialStateful)}
    wholes = {key for key in partial if isinstance(values.get(key, (None, None))[1], dict)}
    if not wholes:
        return values
    entries = {
        f"{key}.{name}": ((*values[key][0], name), value)
        for key in wholes
        for name, value in values[key][1].items()
        if name != "state" or value
    }
    return {key: entry for key, entry in values.items() if key not in wholes} | entries


def _refuse_collisions(named: Iterable[tuple[str, str]]) -> None:
    """Raises MismatchError where two stored keys get one name.

    Args:
        named: stored key and name.
    """
    taken: dict[str, str] = {}
    for key, name in named:
        if name in taken:
            problem = Problem(name, f"{taken[name]} and {key}", "one stored key for a name", "mend the rules")
            raise MismatchError("the rules of rename give two keys one name", [problem])
        taken[name] = key


@dataclass(slots=True)
class _ObjectRenames:
    """Stored entries that objects of the app have renamed by themselves.

    Args:
        moved: stored key of a tensor or value per rank → its path in the app, whatever rules make of its key.
        values: stored key → plain value, with other names in it.
        dropped: stored keys of plain values that are no longer there.
        added: path in the app → plain value, that came in their place.
    """

    moved: dict[str, Path] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    added: dict[Path, Any] = field(default_factory=dict)


def _renamed_by_objects(manifest: Manifest, flat: FlatState, rename: Rename) -> _ObjectRenames:
    """Lets the objects of an app rename what is stored for them.

    Args:
        rename: applies the rules to a key.

    Raises:
        MismatchError: rules are ambiguous; lists what they make of which key of the checkpoint.
    """
    renames = _ObjectRenames()
    targets = [(each, each.target) for each in flat.handbacks if isinstance(each.target, RenamedStateful)]
    paths = {key: tensor.path for key, tensor in manifest.tensors.items()} | dict(manifest.per_rank) if targets else {}
    paths |= {key: path for key, (path, _) in manifest.values.items()} if targets else {}
    for handback, target in targets:
        by_root = _stored_for(handback, paths, rename)
        if len(by_root) == 1:  # of several, the rules make one object of many, which is not for it to mend
            ((root, stored),) = by_root.items()
            _rename(handback, target, root, stored, manifest, rename, renames)
    return renames


def _stored_for(handback: Handback, paths: Mapping[str, Path], rename: Rename) -> dict[Path, dict[Path, str]]:
    """Finds the entries of an object: path at which it was saved → path in its state → stored key.

    An object is known by the outermost keys of its state: "opt.state" is where the object called "optimizer" was saved
    if the rules make "optimizer.state" of it. One whose state had no tensor was saved as one plain value, "opt".
    """
    by_root: defaultdict[Path, dict[Path, str]] = defaultdict(dict)
    new_keys: dict[Path, str] = {}
    for key, path in paths.items():
        ends = [i for i, part in enumerate(path) if part in handback.state]
        for section in [path[: i + 1] for i in ends]:
            if section not in new_keys:
                new_keys[section] = rename(join(section))
        root = next((path[:i] for i in ends if new_keys[path[: i + 1]] == join((*handback.path, path[i]))), None)
        if root is None and rename(key) == join(handback.path):
            root = path
        if root is not None:
            by_root[root][path[len(root) :]] = key
    return by_root


def _rename(
    handback: Handback,
    target: RenamedStateful,
    root: Path,
    stored: Mapping[Path, str],
    manifest: Manifest,
    rename: Rename,
    renames: _ObjectRenames,
) -> None:
    """Lets one object rename what is stored for it, and adds the outcome to `renames`."""
    before, own = f"{join(root)}.", f"{join(handback.path)}."

    def new_key(key: str) -> str | None:
        name = rename(before + key)
        return name.removeprefix(own) if name.startswith(own) else None

    values = {path: manifest.values[key][1] for path, key in stored.items() if key in manifest.values}
    stand_ins = {path: PerRank(key) for path, key in stored.items() if path not in values}
    saved = nest(values | stand_ins)
    if not isinstance(saved, dict):
        return  # it is no state, which the comparison refuses
    try:
        renamed_state = target.rename_state_dict(saved, new_key)
    except MismatchError as error:
        problems = [replace(problem, key=before + problem.key) for problem in error.problems]
        raise MismatchError(f"{error.message}; nothing was changed", problems) from None
    renamed = {leaf.path[1:]: leaf.value for leaf in flatten({"": _Saved(renamed_state)}).leaves.values()}
    renames.dropped |= {stored[path] for path in values.keys() - renamed.keys()}
    for path, value in renamed.items():
        if isinstance(value, PerRank):
            if stored.get(path) != value.value:
                renames.moved[value.value] = (*handback.path, *path)
        elif path in values:
            renames.values[stored[path]] = value
        else:
            renames.added[(*handback.path, *path)] = value


class _Saved:
    """Holds a state so that `flatten` takes it apart as it did that of the object when it was saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise AssertionError("it is only taken apart")
