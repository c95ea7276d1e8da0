"""Chooses what a conversion writes, with names and dtypes: `select`, `skip`, `rename` and `dtype`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shardopt.checkpoint.converting.averages import averages_in, with_averages, with_masters
from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.manifest import Manifest, RenameRules, StoredTensors
from shardopt.checkpoint.format.tensor_bytes import dtype_name, stored_dtype, torch_dtype
from shardopt.checkpoint.loading.names_in_app import contents
from shardopt.checkpoint.loading.renaming import Rename, refuse_collisions, renamer
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.box import Box
from shardopt.state.paths import PARAM_GROUPS, Path, join
from shardopt.state.versions import Versions, plain_roots, renamed_versions

_STATE = "state"
_log = logging.getLogger("shardopt.checkpoint")


class ChosenTensor(NamedTuple):
    """A tensor that a conversion writes.

    Args:
        key, path: its new name, and its place in nested state.
        stored: its key in the source.
        dtype: in which it is written.
        boxes: in which it is stored, ascending by offsets.
        tied_to: the key of the chosen tensor that is one memory with it and stands for both, if there is one.
    """

    key: str
    path: Path
    stored: str
    dtype: Dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The tensors and values that a conversion writes, by new name; `left_out` has the stored keys of all others."""

    reader: CheckpointReader
    tensors: Mapping[str, ChosenTensor]
    values: Mapping[str, tuple[Path, Any]]
    per_rank: Mapping[str, Path]
    left_out: tuple[str, ...] = ()
    stored_per_rank: Mapping[str, str] = field(default_factory=dict)
    renamed: RenameRules | None = None  # that the names have been through by then
    module_versions: Versions | None = None

    @property
    def written(self) -> list[ChosenTensor]:
        """The tensors whose bytes are written: all except those tied to another."""
        return [tensor for tensor in self.tensors.values() if tensor.tied_to is None]


def choose(
    reader: CheckpointReader,
    select: str | None = None,
    skip: str | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    tensors_of_models_alone: bool = False,
    weights: str | None = None,
    may_be_empty: bool = False,
) -> Choice:
    """Drops the stored keys of `skip`, renames the others, and selects among the new names; see `convert`.

    Args:
        tensors_of_models_alone: leave out plain values, and the state of optimizers and averages where there is no
            `select`.
        may_be_empty: whether nothing may be left.

    Raises:
        MismatchError: two keys get one name, nothing is left, `dtype` is no floating-point one, or `weights` names
            no averages.
        FormatError: something is stored in a way that is not known, and not to be skipped.
    """
    if dtype is not None and not dtype.is_floating_point:
        problem = Problem("dtype", dtype_name(dtype), "a floating-point dtype", "leave it out to keep what is stored")
        raise MismatchError("tensors cannot be cast", [problem], code="cannot-convert")
    manifest = contents(reader, skip)
    stored_as: dict[str, str] = {}
    if weights is not None:
        manifest, stored_as = _with_averages(manifest, weights)
    renamed = renamer(rename)
    roots, averages = _optimizers_and_averages(manifest)
    new_key = {key: renamed(key) for key in (*manifest.tensors, *manifest.per_rank)}
    new_key |= {key: _renamed_value(key, path, renamed) for key, (path, _) in manifest.values.items()}
    wanted = re.compile(select or "")
    own_choice = tensors_of_models_alone and select is None

    def is_chosen(key: str) -> bool:
        if own_choice and (key in averages or is_optimizer_state(key, roots)):
            return False
        return bool(wanted.search(new_key[key]))

    keys = [key for key in manifest.tensors if is_chosen(key)]
    values = {key: each for key, each in manifest.values.items() if is_chosen(key) and not tensors_of_models_alone}
    per_rank = [key for key in manifest.per_rank if is_chosen(key) and not tensors_of_models_alone]
    chosen = {*keys, *values, *per_rank}
    if own_choice:
        _warn_of_training_weights(reader.url, manifest.values.values())
    refuse_collisions((key, name) for key, name in new_key.items() if key in chosen)
    if not (keys or values or may_be_empty):
        names = ", ".join(sorted(new_key.values())[:20])
        problem = Problem(f"select={select!r}, skip={skip!r}", "nothing", "a key at least", f"there are: {names}")
        raise MismatchError("there is nothing to convert", [problem], code="nothing-selected")
    tied = _tied_among(manifest.tensors, keys)
    tensors = {}
    for key in keys:
        path, stored, layout, *_ = manifest.tensors[key]
        cast = dtype is not None and torch_dtype(stored).is_floating_point and not is_optimizer_state(key, roots)
        tensors[new_key[key]] = ChosenTensor(
            new_key[key],
            renamed_path(path, new_key[key]),
            stored_as.get(key, key),
            stored_dtype(dtype, key) if cast and dtype is not None else stored,
            layout.shape,
            tuple(sorted(layout.boxes)),
            new_key[tied[key]] if key in tied else None,
        )
    own, versions = reader.manifest, manifest.module_versions
    if versions and reader.source.is_foreign:
        versions = plain_roots(versions, manifest.tensors)
    every = {*own.tensors, *own.values, *own.per_rank, *reader.source.unread, *reader.left_out}
    return Choice(
        reader,
        tensors,
        {new_key[key]: (renamed_path(path, new_key[key]), value) for key, (path, value) in values.items()},
        {new_key[key]: renamed_path(manifest.per_rank[key], new_key[key]) for key in per_rank},
        tuple(sorted(every.difference(stored_as.get(key, key) for key in chosen))),
        {new_key[key]: key for key in per_rank},
        tuple(dict.fromkeys((*(manifest.renamed or ()), *rename.items()))) if rename else manifest.renamed,
        versions if versions is None or not rename else renamed_versions(versions, new_key),
    )


def _optimizers_and_averages(manifest: Manifest) -> tuple[set[tuple[str, ...]], set[str]]:
    """Returns the paths of optimizers, and the keys of averages."""
    averages = {key for each in averages_in(manifest.tensors).values() for key in each.keys}
    roots = optimizer_roots((*manifest.tensors, *manifest.values))
    roots |= _roots_without_groups([each.path for key, each in manifest.tensors.items() if key not in averages])
    return roots, averages


def _with_averages(manifest: Manifest, weights: str) -> tuple[Manifest, dict[str, str]]:
    """Returns a manifest with averages in place of weights and their masters, and the averages' keys by theirs."""
    averaged, instead = with_averages(manifest.tensors, weights)
    roots, others = _optimizers_and_averages(replace(manifest, tensors=averaged))
    averaged, of_masters = with_masters(averaged, instead, lambda key: key in others or is_optimizer_state(key, roots))
    return replace(manifest, tensors=averaged), instead | of_masters


def optimizer_roots(keys: Iterable[str]) -> set[tuple[str, ...]]:
    """Returns the paths of optimizers: those with options of groups, "param_groups", below them."""
    roots = set()
    for key in keys:
        segments = key.split(".")
        if PARAM_GROUPS in segments:
            roots.add(tuple(segments[: segments.index(PARAM_GROUPS)]))
    return roots


def _roots_without_groups(paths: Sequence[Path]) -> set[tuple[str, ...]]:
    """Returns the paths of optimizers saved without groups, found by state under the names of parameters."""
    names = {path[-1] for path in paths}
    state = [path for path in paths if len(path) > 3 and path[-3] == _STATE and path[-2] in names]
    return {tuple(join(path[:-3]).split(".")) for path in state}


def is_optimizer_state(key: str, roots: set[tuple[str, ...]]) -> bool:
    """Whether a key belongs to an optimizer: its state, or the options of its groups."""
    segments = key.split(".")
    return any(segment in (_STATE, PARAM_GROUPS) and tuple(segments[:i]) in roots for i, segment in enumerate(segments))


def _warn_of_training_weights(url: str, values: Iterable[tuple[Path, Any]]) -> None:
    """Logs a warning if a model was saved with the weights that Schedule-Free trains instead of their averages."""
    if any(
        PARAM_GROUPS in path and isinstance(value, dict) and value.get("train_mode") is True for path, value in values
    ):
        _log.warning(
            "%s has the weights that a Schedule-Free optimizer trains, and not their averages, which are what is "
            "released: save between optimizer.eval() and optimizer.train() for these [averages]",
            url,
        )


def _renamed_value(key: str, path: Path, renamed: Rename) -> str:
    """Returns the new key of a plain value; the options of a parameter are renamed like its state."""
    if len(path) < 2 or path[-2] != PARAM_GROUPS:
        return renamed(key)
    state = renamed(join((*path[:-2], _STATE, path[-1])))
    before = join((*path[:-2], _STATE)) + "."
    if not state.startswith(before):  # the optimizer has another name as well
        before = f"{_STATE}." if state.startswith(f"{_STATE}.") else f"{state.partition(f'.{_STATE}.')[0]}.{_STATE}."
    if not state.startswith(before):
        return renamed(key)
    return f"{before.removesuffix(f'{_STATE}.')}{PARAM_GROUPS}.{state.removeprefix(before)}"


def renamed_path(path: Path, new_key: str) -> Path:
    """Returns the path of a renamed key.

    Parts that also occur in the new key stay parts, the first and last ones above all. The text between two of them
    becomes one part.
    """
    if join(path) == new_key:
        return path
    first, rest, end = 0, new_key.split("."), len(path)
    tail: list[str | int] = []
    while first < end and rest[: len(_segments(path[first]))] == _segments(path[first]):
        rest = rest[len(_segments(path[first])) :]
        first += 1
    while first < end and rest and rest[-len(_segments(path[end - 1])) :] == _segments(path[end - 1]):
        end -= 1
        rest = rest[: -len(_segments(path[end]))]
        tail.insert(0, path[end])
    middle: list[str | int] = []
    for part in path[first:end]:
        segments = _segments(part)
        at = next((i for i in range(len(rest)) if rest[i : i + len(segments)] == segments), None)
        if at is not None:
            middle += [".".join(rest[:at]), part] if at else [part]
            rest = rest[at + len(segments) :]
    return *path[:first], *middle, *([".".join(rest)] if rest else []), *tail


def _segments(part: str | int) -> list[str]:
    return str(part).split(".")


def _tied_among(tensors: StoredTensors, keys: Sequence[str]) -> dict[str, str]:
    """Maps chosen keys to the chosen key tied with them: the one that is stored, or the first."""
    first: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: tensors[key].tied_to is not None):  # stable: those that are stored first
        first.setdefault(tensors[key].tied_to or key, key)
    return {key: name for key in keys if (name := first[tensors[key].tied_to or key]) != key}
