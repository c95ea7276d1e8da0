"""Names that stand in no key, renamed as keys are: by the objects of the app whose names they are.

An object that has such names (`state.RenamedStateful`) gets its part of the checkpoint as it was saved, and the rules
as a function of its keys. What it puts elsewhere goes there, and all else is renamed by its key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.errors import MismatchError
from shardopt.state import FlatState, Handback, Path, PerRank, RenamedStateful, flatten, join, nest

Rename = Callable[[str], str]


@dataclass(slots=True)
class Within:
    """What objects have made of their parts of a checkpoint.

    Args:
        moved: stored key of what is no plain value → the path in the app where it goes, whatever rules make of its key.
        values: stored key → plain value, with other names in it.
        dropped: stored keys of plain values that are no longer there.
        added: path in the app → plain value, that came in their place.
    """

    moved: dict[str, Path] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    added: dict[Path, Any] = field(default_factory=dict)


def renamed_within(manifest: Manifest, flat: FlatState, rename: Rename) -> Within:
    """Lets the objects of an app rename what is stored for them.

    Args:
        rename: what the rules make of a key.

    Raises:
        MismatchError: rules are ambiguous; lists what they make of which key of the checkpoint.
    """
    within = Within()
    targets = [(each, each.target) for each in flat.handbacks if isinstance(each.target, RenamedStateful)]
    paths = {key: tensor.path for key, tensor in manifest.tensors.items()} | dict(manifest.per_rank) if targets else {}
    paths |= {key: path for key, (path, _) in manifest.values.items()} if targets else {}
    for handback, target in targets:
        parts = _parts_of(handback, paths, rename)
        if len(parts) == 1:  # of several, the rules make one object of many, which is not for it to mend
            ((root, stored),) = parts.items()
            _rename(handback, target, root, stored, manifest, rename, within)
    return within


def _parts_of(handback: Handback, paths: Mapping[str, Path], rename: Rename) -> dict[Path, dict[Path, str]]:
    """What is stored for an object: path at which it was saved → path in its state → stored key.

    It is known by the outermost keys of its state: "opt.state" is where the object called "optimizer" was saved if the
    rules make "optimizer.state" of it. One whose state had no tensor was saved as one plain value, "opt".
    """
    parts: defaultdict[Path, dict[Path, str]] = defaultdict(dict)
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
            parts[root][path[len(root) :]] = key
    return parts


def _rename(
    handback: Handback,
    target: RenamedStateful,
    root: Path,
    stored: Mapping[Path, str],
    manifest: Manifest,
    rename: Rename,
    within: Within,
) -> None:
    """Adds to `within` what an object makes of what is stored for it."""
    before, own = f"{join(root)}.", f"{join(handback.path)}."

    def new_key(key: str) -> str | None:
        renamed = rename(before + key)
        return renamed.removeprefix(own) if renamed.startswith(own) else None

    values = {path: manifest.values[key][1] for path, key in stored.items() if key in manifest.values}
    stand_ins = {path: PerRank(key) for path, key in stored.items() if path not in values}
    saved = nest(values | stand_ins)
    if not isinstance(saved, dict):
        return  # it is no state, as a comparison will tell
    try:
        anew = target.rename_state_dict(saved, new_key)
    except MismatchError as error:
        problems = [replace(problem, key=before + problem.key) for problem in error.problems]
        raise MismatchError(f"{error.message}; nothing was changed", problems) from None
    leaves = {leaf.path[1:]: leaf.value for leaf in flatten({"": _Saved(anew)}).leaves.values()}
    within.dropped |= {stored[path] for path in values.keys() - leaves.keys()}
    for path, value in leaves.items():
        if isinstance(value, PerRank):
            if stored.get(path) != value.value:
                within.moved[value.value] = (*handback.path, *path)
        elif path in values:
            within.values[stored[path]] = value
        else:
            within.added[(*handback.path, *path)] = value


class _Saved:
    """A state that is taken apart as that of the object was when it was saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise AssertionError("it is only taken apart")
