"""Compares a checkpoint with an app by key, and lists every difference before any byte of the app changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import gt
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from shardopt.checkpoint.format.manifest import Manifest, StoredTensor
from shardopt.checkpoint.format.tensor_bytes import TORCH_DTYPES, has_no_memory, torch_dtype
from shardopt.checkpoint.loading.names import Names, stored_paths
from shardopt.checkpoint.loading.object_state import StateOfObject, can_cast
from shardopt.checkpoint.loading.options import Choice, Strictness, with_options_of_both
from shardopt.checkpoint.loading.schedules import schedule_problems
from shardopt.checkpoint.loading.tied import extent
from shardopt.checkpoint.loading.torchs.compare import problems_of_torchs
from shardopt.checkpoint.loading.torchs.made_state import of_other_algorithms
from shardopt.checkpoint.loading.torchs.resized import resized_tensor
from shardopt.checkpoint.rearrange.row_state import RowState
from shardopt.checkpoint.saving.planning.tied import tied_in
from shardopt.checkpoint.sources.reading.fetch import describe_tensor, memory_problem
from shardopt.errors import Problem
from shardopt.sharding.pieces import View
from shardopt.sharding.view import view_of
from shardopt.state.paths import STATE, Index, Path, all_but, is_below, join, keys_below, lists_differ, tell_path
from shardopt.state.state import CheckedStateful, FlatState, Leaf, PerRank, RestoreTarget

MISSING = (
    "give its old name with rename={...}, remove it from the app, leave it as it is with "
    'strict=Strictness(missing="ignore"), or load only some keys by select='
)
NOT_STORED = "nothing in the checkpoint"
LENGTH_DIFFERS = (
    "if the run makes this list longer or shorter, empty it before the load (del it[:]), by which it gets what is "
    "stored; otherwise "
)


@dataclass(slots=True)
class Match:
    """The outcome of a comparison: the keys to load, the keys of one side only, and the differences."""

    tensors: dict[str, tuple[View, StoredTensor]] = field(default_factory=dict)
    begins: list[int] = field(default_factory=list)  # of their memory: addresses
    ends: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)  # of the tensors, those that change their dtype
    merged: Mapping[str, RowState] = field(default_factory=dict)  # those whose rows have other parts
    missing: list[str] = field(default_factory=list)  # in the app only
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint only, as far as this rank knows
    problems: list[Problem] = field(default_factory=list)  # differences that do not pass
    warnings: list[Problem] = field(default_factory=list)  # differences that are to be reported, not refused

    def objects(self, flat: FlatState) -> list[RestoreTarget]:
        """Returns the objects at or below which something is loaded, here or for other ranks' parameters."""
        loaded = {key: flat.leaves[key].path for key in (*self.tensors, *self.values, *self.per_rank)}
        below = keys_below(loaded, [each.path for each in flat.targets])
        return [each for each in flat.targets if each.elsewhere or below[each.path]]

    def overlaps(self) -> bool:
        """Whether the memory of any two tensors overlaps; mostly none does."""
        return any(map(gt, sorted(self.ends), sorted(self.begins)[1:]))

    def note(self, problem: Problem, choice: Choice) -> None:
        """Adds a difference to the problems, to the warnings, or to neither."""
        if choice == "raise":
            self.problems.append(problem)
        elif choice == "warn":
            self.warnings.append(problem)


def compare(
    flat: FlatState,
    views: Mapping[str, View],
    names: Names,
    strictness: Strictness,
    world_size: int,
    needs_memory: bool = True,
) -> Match:
    """Matches an app with a checkpoint by key, on one rank.

    Every difference that `strictness` does not let pass is in `problems` of the result. Shapes and kinds always have
    to fit. Whether an `unexpected` key is one depends on the other ranks, which may have a place for it.

    Args:
        names: the checkpoint under the app's names, and which of the app's keys are to be loaded.
        needs_memory: whether tensors without memory to read into are a problem.
    """
    match = Match()
    if strictness.unexpected != "raise" or strictness.missing != "raise":
        names, match.warnings = with_options_of_both(flat, names, strictness)
    stored, chosen, problems = stored_paths(names.manifest), names.chosen, match.problems
    reported = _match_objects(flat, names, stored, strictness, match) if flat.targets else set()
    schedules = flat.schedules()
    for at, problem in schedule_problems(schedules, flat, names) if schedules else ():
        problems.append(problem)
        reported.add(at)

    def is_reported(path: Path) -> bool:
        return any(path[:length] in reported for length in range(len(path) + 1))

    tensors = names.manifest.tensors
    for key, leaf in flat.leaves.items():
        view, tensor = views.get(key), tensors.get(key)
        path = stored.get(key) if tensor is None else tensor.path
        if path is None or key not in chosen or (reported and is_reported(leaf.path)):
            continue
        if lists_differ(path, leaf.path):
            remedy = "nest it in the app as it was when it was saved"
            found: Problem | None = Problem(key, tell_path(path), tell_path(leaf.path), remedy)
        elif view is None or tensor is None:
            found = _match_value(key, leaf, flat, view, names.manifest, match, world_size)
        else:
            shape = tensor.layout.shape
            resized = None if view.shape == shape else resized_tensor(leaf, shape, flat)
            if resized is not None:
                match.values[key], view = resized, view_of(resized, key)
            found = _match_tensor(key, view, tensor, match, strictness, names)
        if found is not None:
            problems.append(found)
    absent = [key for key in flat.leaves if key not in stored and key in chosen]
    match.missing = _missing(absent, flat, views, stored, names) if absent else []
    longer = in_longer_lists({key: flat.leaves[key].path for key in match.missing}, stored) if match.missing else ()
    for key in match.missing:
        if not is_reported(flat.leaves[key].path):
            kind = _kind_of_leaf(flat.leaves[key], views.get(key))
            problem = Problem(key, NOT_STORED, kind, (LENGTH_DIFFERS if key in longer else "") + MISSING)
            match.note(problem, strictness.choice_for_missing(key))
    problems += _unequal_ties(names) if names.aliases else ()
    problems += _not_to_be_filled(match, needs_memory)
    match.unexpected = [
        key for key in stored if key not in flat.leaves and key not in names.aliases and not is_reported(stored[key])
    ]
    return match


def in_longer_lists(paths: Mapping[str, Path], others: Iterable[str]) -> set[str]:
    """Returns the keys at or within elements of lists that the other side, with these keys, does not have."""
    within = {key: path for key, path in paths.items() if Index in map(type, path)}
    known = {key[:end] for key in others for end, each in enumerate(f"{key}.") if each == "."} if within else set()
    return {
        key
        for key, path in within.items()
        if any(type(part) is Index and join(path[:length]) not in known for length, part in enumerate(path, 1))
    }


def _match_objects(
    flat: FlatState, names: Names, stored: Mapping[str, Path], strictness: Strictness, match: Match
) -> set[Path]:
    """Notes what does not fit objects as a whole; returns their paths, whose single missing keys are not reported."""
    roots = [each.path for each in flat.targets]
    here = keys_below({key: leaf.path for key, leaf in flat.leaves.items()}, roots)
    there = keys_below(stored, roots)
    reported: set[Path] = set()
    for target in flat.targets:
        path, unnamed = target.path, target.unnamed
        choices = () if unnamed is None else (strictness.choice_for_missing(unnamed.key), strictness.unexpected)
        if unnamed and "raise" in choices and not names.chosen.isdisjoint(here[path]):
            match.problems.append(unnamed)
            reported.add(path)
            continue
        own = {key: flat.leaves[key] for key in here[path]}
        state = StateOfObject(target, flat, names, stored, own, there[path])
        one_sided = state.one_sided()
        # Another algorithm may have saved nothing that this one has: then it is the difference, or passes.
        if one_sided is not None and not of_other_algorithms(target, names.manifest, flat.tied):
            match.note(one_sided, strictness.uninitialized)
            reported.add(path)
            continue
        problems = [*state.refused(strictness)] if isinstance(target.object, CheckedStateful) else []
        is_torchs = target.groups is None and isinstance(target.object, Optimizer | GradScaler)
        problems += filter(None, [state.regrouped()])
        if target.numbered is not None or is_torchs:
            problems += problems_of_torchs(target, flat, names, there[path], strictness)
        if problems:
            match.problems += problems
            reported.add(path)
    return reported


def _unequal_ties(names: Names) -> Iterator[Problem]:
    """Yields a problem for each plain value that is declared as tied, and is stored otherwise than its tie."""
    values = names.manifest.values
    for alias, key in names.aliases.items():
        own, other = values.get(alias), values.get(key)
        if key in names.chosen and own is not None and (other is None or own[1] != other[1]):
            stored = f"another value than {key} in the checkpoint"
            yield Problem(alias, stored, "the same: they are declared as tied", "load without tied={...}")


def _missing(
    absent: Iterable[str], flat: FlatState, views: Mapping[str, View], stored: Mapping[str, Path], names: Names
) -> list[str]:
    """Returns the app's keys that lack a stored value and need one.

    An empty container of which the checkpoint has something lacks nothing: that is for other ranks. Nor does a tensor
    that is filled under another name: both are one memory here.
    """
    tied = tied_in(views) if any(key in views for key in absent) else {}
    filled = {tied.get(key, key) for key in views if key in stored and key in names.chosen} if tied else set()
    missing = []
    for key in absent:
        leaf = flat.leaves[key]
        is_empty = type(leaf.value) in (dict, list, tuple) and not leaf.value
        if is_empty and any(len(path) > len(leaf.path) and is_below(path, leaf.path) for path in stored.values()):
            continue
        if tied.get(key, key) not in filled:
            missing.append(key)
    return missing


def _match_tensor(
    key: str, view: View, tensor: StoredTensor, match: Match, strictness: Strictness, names: Names
) -> Problem | None:
    """Compares the tensors that both sides have under a key; returns the problem with them, if any."""
    dtype, shape = TORCH_DTYPES[tensor.dtype.name], tensor.layout.shape
    # A rank without a shard of a LocalShardsWrapper cannot know its dtype.
    known = view.dtype if view.pieces or not view.layout.local else dtype
    if shape != view.shape or dtype != known:
        castable = shape == view.shape and can_cast(dtype, view.dtype)
        if not castable or strictness.dtype != "cast":
            remedy = "load it into a tensor of the shape and dtype that were saved"
            if castable:
                remedy += ', or with Strictness(dtype="cast")'
            if shape != view.shape and 0 in view.shape:
                remedy += "; of what grows as a run goes on keep a list of tensors, which gets what is stored"
            if shape != view.shape and (strictness.choice_for_missing(key) != "raise" or STATE in tensor.path):
                remedy += f", or leave it as it is with {_skip_of(names.renamed.get(key, key))}"
            required = describe_tensor(view.shape, view.dtype)
            return Problem(key, describe_tensor(shape, dtype), required, remedy)
        match.cast.append(key)
    match.tensors[key] = (view, tensor)
    return None


def _skip_of(key: str) -> str:
    """Returns the argument that leaves out the stored tensors of a module, of which this is one."""
    module = key.rpartition(".")[0]
    return f'skip=r"^{re.escape(module)}\\."' if "." in module else f'skip=r"^{re.escape(key)}$"'


def _not_to_be_filled(match: Match, needs_memory: bool) -> Iterator[Problem]:
    """Yields a problem for each tensor that cannot be read into; without memory alone, only if that is needed.

    Notes where the memory of the others is, if it is needed.
    """
    for key, (view, _) in match.tensors.items():
        for _, memory in view.pieces:
            is_plain = memory.is_contiguous()
            if not needs_memory and (is_plain or has_no_memory(memory)):
                continue
            begin = memory.data_ptr()
            if not (is_plain and begin) and (problem := memory_problem(key, memory)) is not None:
                yield problem
                break
            match.begins.append(begin)
            match.ends.append(begin + (memory.nbytes if is_plain else extent(memory)))


def _match_value(
    key: str, leaf: Leaf, flat: FlatState, view: View | None, manifest: Manifest, match: Match, world_size: int
) -> Problem | None:
    """Compares a plain value or a value per rank, like `_match_tensor`; one side may lack it."""
    value = leaf.value
    if key in manifest.per_rank and isinstance(value, PerRank):
        if world_size == manifest.world_size:
            match.per_rank.append(key)
        elif value.on_resize == "raise":
            stored, required = f"values of {manifest.world_size} ranks", f"{world_size} ranks"
            remedy = (
                'use as many ranks; or keep what is there: on_resize="keep" of its RandomState, PerRankState or '
                f"PerRank, or, where it has no on_resize, load all else: select={all_but(key)}"
            )
            return Problem(key, stored, required, remedy)
        return None
    if key in manifest.values and view is None and not isinstance(value, PerRank):
        stored_value = manifest.values[key][1]
        match.values[key] = stored_value
        if not isinstance(stored_value, dict) and any(each.path == leaf.path for each in flat.targets):
            return Problem(key, kind_of_stored(manifest, key), "the state of an object", "give the key what was saved")
        return None
    number = _number_for(leaf, view, flat, manifest.values.get(key, ((), None))[1])
    if number is not None:
        match.values[key] = number
        return None
    remedy = "give the key the kind that it was saved with"
    if key not in manifest.per_rank and not is_below(leaf.path, *(each.path for each in flat.targets)):
        remedy += ", or None, which takes any"
    return Problem(key, kind_of_stored(manifest, key), _kind_of_leaf(leaf, view), remedy)


def _number_for(leaf: Leaf, view: View | None, flat: FlatState, stored: Any) -> Tensor | None:
    """Returns a stored number as the tensor in which an optimizer holds it; None if it is not for a tensor.

    torch before 1.12 had counters and rates in the state of optimizers as numbers.
    """
    if view is None or view.shape != () or type(stored) not in (int, float):
        return None
    roots = [each.path for each in flat.targets if isinstance(each.object, Optimizer)]
    if not is_below(leaf.path, *roots) or (type(stored) is float and not view.dtype.is_floating_point):
        return None
    return torch.tensor(stored, dtype=view.dtype, device=leaf.value.device)


def kind_of_stored(manifest: Manifest, key: str) -> str:
    """Returns the kind of what is stored under a key, for messages."""
    if key in manifest.tensors:
        tensor = manifest.tensors[key]
        return describe_tensor(tensor.layout.shape, torch_dtype(tensor.dtype))
    if key in manifest.values:
        return f"a plain value ({type(manifest.values[key][1]).__name__})"
    return "a value per rank"


def _kind_of_leaf(leaf: Leaf, view: View | None) -> str:
    if view is not None:
        return describe_tensor(view.shape, view.dtype)
    return "a value per rank" if isinstance(leaf.value, PerRank) else f"a plain value ({type(leaf.value).__name__})"
