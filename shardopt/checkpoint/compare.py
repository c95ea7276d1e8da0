"""Does a checkpoint fit an app? Every difference is found here, before a byte of the app has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardopt.checkpoint.manifest import Manifest, StoredTensor
from shardopt.checkpoint.memory import dtype_name, torch_dtype
from shardopt.errors import MismatchError, Problem, ShardoptError
from shardopt.sharding.view import View
from shardopt.state import CheckedStateful, FlatState, Handback, Path, PerRank, join, nest

_MISSING = "save it, remove it from the app, or load with strict=False to leave it as it is"
_UNEXPECTED = "add it to the app, or load with strict=False to leave it out"


@dataclass(slots=True)
class Match:
    """What is to be loaded: the keys that both sides have, and what only one side has."""

    tensors: dict[str, tuple[View, StoredTensor]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # in the app only
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint only


def compare(flat: FlatState, views: Mapping[str, View], manifest: Manifest, strict: bool, world_size: int) -> Match:
    """Matches an app with a checkpoint, by key.

    Raises:
        MismatchError: with every difference, each with key, found, required and remedy. Missing and unexpected keys
            are differences only if `strict`; shapes, dtypes and kinds always are.
    """
    stored = dict(_stored_paths(manifest))
    match = Match(
        missing=[key for key in flat.leaves if key not in stored],
        unexpected=[key for key in stored if key not in flat.leaves],
    )
    problems: list[Problem] = []
    settled: list[Path] = []  # what an object says of itself as a whole stands for its single keys
    for handback in flat.handbacks:
        found = list(_object_problems(handback, flat, stored, manifest, strict))
        if found:
            problems += found
            settled.append(handback.path)
    singly = list(_key_problems(flat, views, manifest, match, world_size))
    if strict:
        singly += [
            Problem(key, "nothing in the checkpoint", _kind_of_leaf(flat, views, key), _MISSING)
            for key in match.missing
        ]
        singly += [
            Problem(key, f"{_kind_of_stored(manifest, key)} in the checkpoint", "nothing under this key", _UNEXPECTED)
            for key in match.unexpected
        ]
    paths = {key: leaf.path for key, leaf in flat.leaves.items()} | stored
    problems += [problem for problem in singly if not _below(paths[problem.key], settled)]
    if problems:
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", problems)
    return match


def _stored_paths(manifest: Manifest) -> Iterator[tuple[str, Path]]:
    yield from ((key, tensor.path) for key, tensor in manifest.tensors.items())
    yield from ((key, path) for key, (path, _) in manifest.values.items())
    yield from manifest.per_rank.items()


def _key_problems(
    flat: FlatState, views: Mapping[str, View], manifest: Manifest, match: Match, world_size: int
) -> Iterator[Problem]:
    """Differences of keys that both sides have; fills `match` with those that fit."""
    for key, leaf in flat.leaves.items():
        tensor, view = manifest.tensors.get(key), views.get(key)
        if tensor is not None and view is not None:
            fits = tensor.layout.shape == view.shape and torch_dtype(tensor.dtype) == view.dtype
            if not fits:
                remedy = "load it into a tensor of the shape and dtype that were saved"
                yield Problem(key, _kind_of_stored(manifest, key), _kind_of_leaf(flat, views, key), remedy)
            match.tensors[key] = (view, tensor)
        elif key in manifest.per_rank and isinstance(leaf.value, PerRank):
            if world_size == manifest.world_size:
                match.per_rank.append(key)
            elif leaf.value.on_resize == "raise":
                found, required = f"values of {manifest.world_size} ranks", f"{world_size} ranks"
                remedy = 'use as many ranks, or PerRank(..., on_resize="keep") to keep the values that are there'
                yield Problem(key, found, required, remedy)
        elif key in manifest.values and view is None and not isinstance(leaf.value, PerRank):
            match.values[key] = manifest.values[key][1]
        elif tensor is not None or key in manifest.values or key in manifest.per_rank:
            remedy = "give the key the kind that it was saved with"
            yield Problem(key, _kind_of_stored(manifest, key), _kind_of_leaf(flat, views, key), remedy)


def _object_problems(
    handback: Handback, flat: FlatState, stored: Mapping[str, Path], manifest: Manifest, strict: bool
) -> Iterator[Problem]:
    """What an object of the app has to say of the state that it would get, before any of it is read."""
    target, path = handback.target, handback.path
    keys = [key for key in stored if stored[key][: len(path)] == path]
    own = [key for key, leaf in flat.leaves.items() if leaf.path[: len(path)] == path]
    if not strict:
        keys = [key for key in keys if key in flat.leaves]
    if not keys:
        return  # its keys are missing, one by one
    if isinstance(target, CheckedStateful):
        described = {stored[key][len(path) :]: _description(manifest, key) for key in keys}
        if not strict:
            own_leaves = {flat.leaves[key].path[len(path) :]: flat.leaves[key].value for key in own}
            described = own_leaves | described
        try:
            target.check_state_dict(nest(described))
        except ShardoptError as error:
            problems = error.problems or [Problem("", error.message, "a state that fits", "see the message")]
            prefix = join(path)
            yield from (replace(p, key=f"{prefix}.{p.key}" if p.key else prefix) for p in problems)
    elif strict and isinstance(target, torch.optim.Optimizer):
        state = (*path, "state")
        saved = any(_below(stored[key], [state]) for key in keys if key in manifest.tensors)
        there = any(_below(leaf.path, [state]) for leaf in flat.leaves.values() if leaf.path != state)
        if saved != there:
            found, required = ("state", "none: it was never stepped") if saved else ("no state", "state")
            remedy = "use shardopt.keyed and its init_state(), or take a step before " + ("load" if saved else "save")
            yield Problem(join(state), f"{found} in the checkpoint", f"{required} in the app", remedy)


def _description(manifest: Manifest, key: str) -> Any:
    """A stored value as `check_state_dict` gets it."""
    if key in manifest.tensors:
        tensor = manifest.tensors[key]
        return torch.empty(tensor.layout.shape, dtype=torch_dtype(tensor.dtype), device="meta")
    return manifest.values[key][1] if key in manifest.values else None


def _kind_of_stored(manifest: Manifest, key: str) -> str:
    if key in manifest.tensors:
        tensor = manifest.tensors[key]
        return f"a tensor of {tensor.dtype.name} {list(tensor.layout.shape)}"
    if key in manifest.values:
        return f"a plain value ({type(manifest.values[key][1]).__name__})"
    return "a value per rank"


def _kind_of_leaf(flat: FlatState, views: Mapping[str, View], key: str) -> str:
    if key in views:
        return f"a tensor of {dtype_name(views[key].dtype)} {list(views[key].shape)}"
    value = flat.leaves[key].value
    return "a value per rank" if isinstance(value, PerRank) else f"a plain value ({type(value).__name__})"


def _below(path: Path, roots: Iterable[Path]) -> bool:
    return any(path[: len(root)] == root for root in roots)
