"""What a load makes of differences, and of the names in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar

from torch.nn import Module

from shardopt.checkpoint.format.manifest import Manifest, StoredTensors
from shardopt.checkpoint.matching.renaming import Within, renamed_within
from shardopt.errors import MismatchError, Problem
from shardopt.names import may_have_wrappers, names_under_wrappers
from shardopt.state import FlatState, PartialStateful, Path, join

T = TypeVar("T")
Values = Mapping[str, tuple[Path, Any]]

Choice = Literal["raise", "warn", "ignore"]


@dataclass(frozen=True, slots=True)
class Strictness:
    """One choice for each kind of difference between a checkpoint and an app; "raise" is the default for all.

    Args:
        missing: keys of the app that the checkpoint has not; they stay as they are.
        unexpected: keys of the checkpoint that the app has not; they are left out.
        dtype: "cast" converts floating point and complex values to the dtype that the app has. Numbers that it cannot
            hold are an error: what goes to a dtype with fewer exponents (fp16 or fp8 from anything wider, fp32 from
            fp64) is read twice for it, before anything is changed; of what does not, as bf16 from fp32, only numbers
            next to the largest can be lost, and are found as they are read.
        uninitialized: an optimizer that has state on one side only; it stays as it is.
    """

    missing: Choice = "raise"
    unexpected: Choice = "raise"
    dtype: Literal["raise", "cast"] = "raise"
    uninitialized: Choice = "raise"

    def __post_init__(self) -> None:
        allowed = {"dtype": ("raise", "cast")}
        for name in ("missing", "unexpected", "dtype", "uninitialized"):
            choices = allowed.get(name, ("raise", "warn", "ignore"))
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: found {getattr(self, name)!r}; required one of {choices}")

    @property
    def lets_objects_differ(self) -> bool:
        """Whether what an object and its stored state have on one side only passes, also within plain values."""
        return self.missing != "raise" and self.unexpected != "raise"


def strictness_of(strict: bool | Strictness) -> Strictness:
    """What `load(..., strict=...)` means: True raises for everything, False ignores keys that only one side has."""
    if isinstance(strict, Strictness):
        return strict
    return Strictness() if strict else Strictness(missing="ignore", unexpected="ignore")


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

    within = renamed_within(manifest, flat, renamed) if rules else Within()
    keys = [key for key in (*manifest.tensors, *manifest.values, *manifest.per_rank) if key not in within.dropped]
    new_key = {key: join(within.moved[key]) if key in within.moved else renamed(key) for key in keys}
    unwrapped = _keys_under_wrappers(new_key.values(), flat)
    new_key = {key: unwrapped.get(name, name) for key, name in new_key.items()}
    added = {join(path): (path, value) for path, value in within.added.items()}
    _refuse_collisions([*new_key.items(), *((key, key) for key in added)])

    def path_of(key: str, path: Path) -> Path:
        if new_key[key] == key and key not in within.moved:
            return path
        leaf = flat.leaves.get(new_key[key])
        if leaf is not None:
            return leaf.path
        return within.moved.get(key) or tuple(new_key[key].split("."))

    def chosen(stored: Mapping[str, T]) -> Iterable[tuple[str, T]]:
        return ((key, its) for key, its in stored.items() if key in new_key and wanted.search(new_key[key]))

    values = added | {
        new_key[key]: (path_of(key, path), within.values.get(key, value))
        for key, (path, value) in manifest.values.items()
        if key in new_key
    }
    named_anew = replace(
        manifest,
        tensors=StoredTensors(
            (new_key[key], tensor._replace(path=path_of(key, tensor.path))) for key, tensor in chosen(manifest.tensors)
        ),
        values={key: its for key, its in _spread(values, flat).items() if wanted.search(key)},
        per_rank={new_key[key]: path_of(key, path) for key, path in chosen(manifest.per_rank)},
    )
    changed = {new: key for key, new in new_key.items() if new != key}
    return Names(named_anew, changed, frozenset(key for key in flat.leaves if wanted.search(key)))


def _keys_under_wrappers(keys: Collection[str], flat: FlatState) -> dict[str, str]:
    """Key that was stored with the names of wrappers in it → the key that it has now, for what modules of the app have.

    Names in a module's state are plain when they are saved (`shardopt.names`); once they were not.
    """
    if not may_have_wrappers([key for key in keys if key not in flat.leaves]):
        return {}
    found: dict[str, str] = {}
    for handback in flat.handbacks:
        if isinstance(handback.target, Module):
            root = f"{join(handback.path)}."
            own = {key.removeprefix(root) for key in flat.leaves if key.startswith(root)}
            stored = {key.removeprefix(root) for key in keys if key.startswith(root)}
            found |= {root + name: root + plain for name, plain in names_under_wrappers(stored, own).items()}
    return found


def _spread(values: Values, flat: FlatState) -> Values:
    """Plain values of a checkpoint in which the parts of an object are apart, also of one that was stored as one value.

    So a `PartialStateful` was stored whose state had no tensor on any rank.
    """
    partial = {join(each.path) for each in flat.handbacks if isinstance(each.target, PartialStateful)}
    wholes = {key for key in partial if isinstance(values.get(key, (None, None))[1], dict)}
    if not wholes:
        return values
    parts = {
        f"{key}.{part}": ((*values[key][0], part), value)
        for key in wholes
        for part, value in values[key][1].items()
        if part != "state" or value
    }
    return {key: its for key, its in values.items() if key not in wholes} | parts


def _refuse_collisions(named: Iterable[tuple[str, str]]) -> None:
    """Refuses pairs of a stored key and its name of which two have one name."""
    taken: dict[str, str] = {}
    for key, name in named:
        if name in taken:
            problem = Problem(name, f"{taken[name]} and {key}", "one stored key for a name", "mend the rules")
            raise MismatchError("the rules of rename give two keys one name", [problem])
        taken[name] = key
