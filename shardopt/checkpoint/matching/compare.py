"""Compares a checkpoint with an app by key: every difference, before a byte of the app has changed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.format.manifest import Manifest, StoredTensor
from shardopt.checkpoint.format.tensor_bytes import torch_dtype
from shardopt.checkpoint.matching.group_options import with_options_of_both
from shardopt.checkpoint.matching.optimizer_state import keys_of_state, state_key, with_reason_of_parts
from shardopt.checkpoint.matching.renaming import Names, stored_paths
from shardopt.checkpoint.matching.schedules import schedule_problems
from shardopt.checkpoint.matching.strictness import Choice, Strictness
from shardopt.checkpoint.matching.torchs_own import problems_of_torchs
from shardopt.checkpoint.planning.tied import tied_in
from shardopt.checkpoint.reading.target import describe_tensor, memory_problem
from shardopt.errors import Problem, ShardoptError
from shardopt.param_groups import PARAM_GROUPS, PARAMS, Groups, groups_elsewhere, groups_of, with_options
from shardopt.sharding.pieces import View
from shardopt.state import (
    CheckedStateful,
    FlatState,
    GroupedStateful,
    Handback,
    Leaf,
    PartialStateful,
    Path,
    PerRank,
    is_below,
    join,
    keys_below,
    kinds_differ,
    nest,
    tell_path,
)

_MISSING = (
    "give its old name with rename={...}, remove it from the app, leave it as it is with "
    'strict=Strictness(missing="ignore"), or load some keys alone by select='
)
_UNEXPECTED = (
    "give its new name with rename={...}, add it to the app, leave it out with "
    'strict=Strictness(unexpected="ignore"), or load some keys alone by select='
)
# Where optimizers keep theirs, which follows from what models have.
_OF_OPTIMIZERS = re.compile(r"(^|\.)(state|param_groups)(\.|$)")


@dataclass(slots=True)
class Match:
    """The outcome of a comparison: the keys to be loaded, those of one side only, and the differences."""

    tensors: dict[str, tuple[View, StoredTensor]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)  # of the tensors, those that change their dtype
    missing: list[str] = field(default_factory=list)  # in the app only
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint only, as far as this rank knows
    problems: list[Problem] = field(default_factory=list)  # differences that do not pass
    warnings: list[Problem] = field(default_factory=list)  # differences that are to be reported, not refused

    def objects(self, flat: FlatState) -> list[Handback]:
        """Returns the objects at or below which anything is loaded, on this rank or of other ranks' parameters."""
        loaded = {key: flat.leaves[key].path for key in (*self.tensors, *self.values, *self.per_rank)}
        below = keys_below(loaded, [each.path for each in flat.handbacks])
        return [each for each in flat.handbacks if each.elsewhere or below[each.path]]


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one object: those of the app, and the stored ones."""

    here: list[str]
    stored: list[str]


def compare(flat: FlatState, views: Mapping[str, View], names: Names, strictness: Strictness, world_size: int) -> Match:
    """Matches an app with a checkpoint, by key, on one rank.

    Every difference that `strictness` does not let pass is in `problems` of the result. Shapes and kinds always have
    to fit. Whether an `unexpected` key is one depends on the other ranks, which may have a place for it.

    Args:
        names: the checkpoint under the app's names, and which of the app's keys are to be loaded.
    """
    names, warnings = with_options_of_both(flat, names, strictness)
    manifest = names.manifest
    stored = stored_paths(manifest)
    roots = [each.path for each in flat.handbacks]
    here_below = keys_below({key: leaf.path for key, leaf in flat.leaves.items()}, roots)
    stored_below = keys_below(stored, roots)
    missing = [key for key in flat.leaves if key in names.chosen and key not in stored]
    missing = [key for key in missing if not _is_filled_elsewhere(flat.leaves[key], stored)]
    match = Match(missing=list(_without_tied(missing, views, stored, names)), warnings=warnings)
    problems = match.problems
    reported: set[Path] = set()  # objects with a problem as a whole, which stands for those of their single keys
    for handback in flat.handbacks:
        keys = _Keys(here_below[handback.path], stored_below[handback.path])
        one_sided = _one_sided_state(handback, flat, keys, stored, names)
        if one_sided is not None:
            _apply_choice(one_sided, strictness.uninitialized, problems, match)
            reported.add(handback.path)
            continue
        own_problems = [
            *_object_problems(handback, flat, keys, stored, names, strictness),
            *problems_of_torchs(handback, flat, names, keys.stored, strictness),
            *_problems_of_scalers(handback, names),
        ]
        if own_problems:
            problems += own_problems
            reported.add(handback.path)
    for path, problem_here in schedule_problems(flat, names):
        problems.append(problem_here)
        reported.add(path)

    def is_reported(path: Path) -> bool:
        return bool(reported) and any(path[:length] in reported for length in range(len(path) + 1))

    for key, leaf in flat.leaves.items():
        if key in stored and key in names.chosen and not is_reported(leaf.path):
            view, tensor = views.get(key), manifest.tensors.get(key)
            problem: Problem | None
            if kinds_differ(stored[key], leaf.path):
                remedy = "nest it in the app as it was when it was saved"
                problem = Problem(key, tell_path(stored[key]), tell_path(leaf.path), remedy)
            elif view is not None and tensor is not None:
                problem = _match_tensors(key, view, tensor, match, strictness)
                if problem is not None and tensor.layout.shape != view.shape:
                    problem = with_reason_of_parts(problem, leaf.path, tensor.layout.shape, view.shape, names.manifest)
            else:
                problem = _match_values(key, flat, views, names, match, world_size)
            if problem is not None:
                problems.append(problem)
    for key in match.missing:
        if not is_reported(flat.leaves[key].path):
            problem = Problem(key, "nothing in the checkpoint", _kind_of_leaf(flat, views, key), _MISSING)
            _apply_choice(problem, strictness.missing, problems, match)
    problems += _unequal_values(names)
    here = flat.leaves.keys() | names.aliases.keys()
    match.unexpected = [key for key in stored if key not in here and not is_reported(stored[key])]
    return match


def _is_filled_elsewhere(leaf: Leaf, stored: Mapping[str, Path]) -> bool:
    """Whether a leaf is an empty container of which the checkpoint has something: that is for other ranks."""
    if type(leaf.value) not in (dict, list, tuple) or leaf.value:
        return False
    return any(len(path) > len(leaf.path) and is_below(path, leaf.path) for path in stored.values())


def _without_tied(
    missing: list[str], views: Mapping[str, View], stored: Collection[str], names: Names
) -> Iterator[str]:
    """Yields missing keys but for those of tensors that are filled under another name: both are one memory here."""
    tied = tied_in(views) if any(key in views for key in missing) else {}
    filled = {tied.get(key, key) for key in views if key in stored and key in names.chosen} if tied else set()
    yield from (key for key in missing if tied.get(key, key) not in filled)


def weights_first(problems: Iterable[Problem]) -> list[Problem]:
    """Sorts problems: those of weights first, then those of optimizer state; stable."""
    return sorted(problems, key=lambda problem: _OF_OPTIMIZERS.search(problem.key) is not None)


def judge_unexpected(match: Match, names: Names, strictness: Strictness, keys: Iterable[str]) -> list[Problem]:
    """Notes the stored keys that no rank of the job has a place for; returns a problem for each that is refused."""
    match.unexpected = list(keys)
    refused: list[Problem] = []
    for key in match.unexpected:
        stored = f"{_kind_of_stored(names.manifest, key)} in the checkpoint"
        problem = Problem(key, stored, "nothing under this key", _UNEXPECTED)
        _apply_choice(problem, strictness.unexpected, refused, match)
    return refused


def _unequal_values(names: Names) -> Iterator[Problem]:
    """Yields a problem for each plain value under a name that another stands for, which has another value."""
    for alias, key in names.aliases.items():
        own, other = names.manifest.values.get(alias), names.manifest.values.get(key)
        if key in names.chosen and own is not None and (other is None or own[1] != other[1]):
            stored = f"another value than {key} in the checkpoint"
            yield Problem(alias, stored, "the same: they are declared as tied", "load without tied={...}")


def _apply_choice(problem: Problem, choice: Choice, problems: list[Problem], match: Match) -> None:
    """Adds a difference to the problems or to the warnings, or to neither."""
    if choice == "raise":
        problems.append(problem)
    elif choice == "warn":
        match.warnings.append(problem)


def _match_tensors(key: str, view: View, tensor: StoredTensor, match: Match, strictness: Strictness) -> Problem | None:
    """Adds a tensor of both sides to `match`; returns the problem with it, if there is one."""
    dtype = torch_dtype(tensor.dtype)
    # A rank without a shard of a LocalShardsWrapper cannot know its dtype.
    known = view.dtype if view.pieces or not view.layout.local else dtype
    if tensor.layout.shape != view.shape or dtype != known:
        castable = tensor.layout.shape == view.shape and _can_cast(dtype, view.dtype)
        if not castable or strictness.dtype != "cast":
            remedy = "load it into a tensor of the shape and dtype that were saved"
            if castable:
                remedy += ', or with Strictness(dtype="cast")'
            stored = describe_tensor(tensor.layout.shape, dtype)
            return Problem(key, stored, describe_tensor(view.shape, view.dtype), remedy)
        match.cast.append(key)
    match.tensors[key] = (view, tensor)
    return memory_problem(key, view)


def _match_values(
    key: str, flat: FlatState, views: Mapping[str, View], names: Names, match: Match, world_size: int
) -> Problem | None:
    """Adds a value or value per rank of both sides to `match`; returns the problem with it, if there is one."""
    manifest, value = names.manifest, flat.leaves[key].value
    if key in manifest.per_rank and isinstance(value, PerRank):
        if world_size == manifest.world_size:
            match.per_rank.append(key)
        elif value.on_resize == "raise":
            stored, required = f"values of {manifest.world_size} ranks", f"{world_size} ranks"
            remedy = 'use as many ranks, or PerRank(..., on_resize="keep") to keep the values that are there'
            return Problem(key, stored, required, remedy)
        return None
    if key in manifest.values and key not in views and not isinstance(value, PerRank):
        stored_value = manifest.values[key][1]
        match.values[key] = stored_value
        if not isinstance(stored_value, dict) and any(each.path == flat.leaves[key].path for each in flat.handbacks):
            return Problem(key, _kind_of_stored(manifest, key), "the state of an object", "give the key what was saved")
        return None
    number = _number_for(key, flat, views, manifest)
    if number is not None:
        match.values[key] = number
        return None
    remedy = "give the key the kind that it was saved with"
    return Problem(key, _kind_of_stored(manifest, key), _kind_of_leaf(flat, views, key), remedy)


def _number_for(key: str, flat: FlatState, views: Mapping[str, View], manifest: Manifest) -> Tensor | None:
    """Returns a stored number as the tensor that an optimizer has for it; None where it is none, or is not for one.

    torch before 1.12 had counters and rates in the state of optimizers as numbers.
    """
    stored, view, path = manifest.values.get(key, ((), None))[1], views.get(key), flat.leaves[key].path
    is_state = any(
        isinstance(each.target, torch.optim.Optimizer) and is_below(path, each.path) for each in flat.handbacks
    )
    if type(stored) not in (int, float) or view is None or view.shape != () or not is_state:
        return None
    if type(stored) is float and not view.dtype.is_floating_point:
        return None
    tensor: Tensor = flat.leaves[key].value
    return torch.tensor(stored, dtype=view.dtype, device=tensor.device)


def _can_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a conversion loses no more than digits, of numbers that are not too large."""
    if wanted is torch.float8_e8m0fnu:  # powers of two alone, without a sign or a zero
        return False
    return wanted.is_complex if stored.is_complex else stored.is_floating_point and _is_inexact(wanted)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _one_sided_state(
    handback: Handback, flat: FlatState, keys: _Keys, stored: Mapping[str, Path], names: Names
) -> Problem | None:
    """Returns the problem of an optimizer that has state in the checkpoint and none in the app, or the reverse."""
    if not isinstance(handback.target, torch.optim.Optimizer):
        return None
    chosen = [key for key in keys.here if key in names.chosen]
    if not chosen or not keys.stored:
        return None  # the whole object is on one side only, which is another matter
    live = keys_of_state(handback, (key for key in chosen if isinstance(flat.leaves[key].value, torch.Tensor)))
    saved = keys_of_state(handback, (key for key in keys.stored if key in names.manifest.tensors))
    if not live:
        saved = _belonging(handback, stored, saved, flat)
    if bool(saved) == bool(live):
        return None
    stored_state = f"{'state' if saved else 'no state'} in the checkpoint"
    required = f"{'none: it was never initialized' if saved else 'state'} in the app"
    remedy = "load with init_state=True, or call init_state() before loading (where there is none, take a step)"
    if not saved:
        remedy = (
            "load it into an optimizer that was just made and has none yet, or call init_state() before saving (where "
            "there is none, take a step)"
        )
    return Problem(state_key(handback), stored_state, required, remedy)


def _problems_of_scalers(handback: Handback, names: Names) -> Iterator[Problem]:
    """Yields a problem for a GradScaler of torch's that was saved disabled, and so without state, and is enabled."""
    key = join(handback.path)
    if not isinstance(handback.target, torch.amp.GradScaler) or key not in names.chosen:
        return
    if names.manifest.values.get(key, ((), None))[1] == {} and handback.target.is_enabled():
        remedy = (
            'leave it out of the app, and load with Strictness(unexpected="ignore"): it begins with its own scale; or '
            "make it with enabled=False"
        )
        yield Problem(key, "no state, of a GradScaler that was disabled", "that of one that is enabled", remedy)


def _object_problems(
    handback: Handback,
    flat: FlatState,
    own_keys: _Keys,
    stored: Mapping[str, Path],
    names: Names,
    strictness: Strictness,
) -> Iterator[Problem]:
    """Yields the problems that an object's `check_state_dict` has with its stored state, before that is read."""
    target, path = handback.target, handback.path
    if not isinstance(target, CheckedStateful):
        return
    if isinstance(target, GroupedStateful):
        handback.elsewhere = _options_elsewhere(handback, flat, names.manifest, own_keys.stored)
    own = {key: flat.leaves[key] for key in own_keys.here}
    of_stored = own_keys.stored
    if own.keys().isdisjoint(of_stored) and not handback.elsewhere:
        return  # nothing of it is loaded; its keys are reported one by one
    without_place = [key for key in of_stored if key not in own]
    belonging = _belonging(handback, stored, without_place, flat) if strictness.unexpected == "raise" else []
    keys = [*(key for key in of_stored if key in own), *belonging]
    described: dict[Path, Any] = {}
    if strictness.missing != "raise" or not names.chosen.issuperset(own):
        described |= {at[len(path) :]: leaf.value for leaf in own.values() for at in leaf.paths_here}
    for key in keys:
        for at in (key in own and own[key].names_here) or [_path_here(handback, stored[key], flat)]:
            described[at[len(path) :]] = _description(key, flat, names.manifest, strictness)
    if handback.plain_names:
        own_names: dict[str | int, str] = {plain: name for name, plain in handback.plain_names.items()}
        described = {(own_names.get(at[0], at[0]), *at[1:]): value for at, value in described.items()}
    state = nest(described)
    if handback.groups is not None:
        some = strictness.missing != "raise" or not names.chosen.issuperset(own)
        state[PARAM_GROUPS] = _groups_in(handback, handback.groups, own, names.manifest, some)
        if state[PARAM_GROUPS] is None:
            del state[PARAM_GROUPS]
    choices = {"strict": False} if strictness.lets_objects_differ and isinstance(target, PartialStateful) else {}
    try:
        target.check_state_dict(state, **choices)
    except ShardoptError as error:
        problems = error.problems or [Problem("", error.message, "a state that fits", "see the message")]
        prefix = join(path)
        yield from (replace(p, key=f"{prefix}.{p.key}" if p.key else prefix) for p in problems)


def _groups_in(
    handback: Handback, groups: Groups, own: Mapping[str, Leaf], manifest: Manifest, some: bool
) -> list[Any] | None:
    """Returns the groups of an object's state with the options that are stored; None if there are none for them.

    Args:
        own: the leaves of the object.
        some: whether parameters for which no options are stored may go with others.
    """
    section = (*handback.path, PARAM_GROUPS)
    options = {
        str(at[-1]): manifest.values[key][1]
        for key, leaf in own.items()
        if key in manifest.values
        for at in leaf.paths_here
        if at[:-1] == section
    }
    malformed = [each for each in options.values() if not isinstance(each, Mapping)]
    if malformed:
        return malformed
    elsewhere = groups_elsewhere(handback.elsewhere)
    if some or not any(group[PARAMS] for group in groups):
        return with_options(groups, options) + elsewhere if options or elsewhere else groups
    return groups_of(options) + elsewhere if options else None


def _options_elsewhere(
    handback: Handback, flat: FlatState, manifest: Manifest, keys: Iterable[str]
) -> dict[str, Mapping[str, Any]]:
    """Returns the stored options of an object's parameters that are on other ranks alone."""
    section = (*handback.path, PARAM_GROUPS)
    values = ((key, *manifest.values[key]) for key in keys if key in manifest.values)
    return {
        flat.tied.get(str(path[-1]), str(path[-1])): value
        for key, path, value in values
        if path[:-1] == section and key not in flat.leaves and isinstance(value, Mapping)
    }


def _belonging(handback: Handback, stored: Mapping[str, Path], keys: Iterable[str], flat: FlatState) -> list[str]:
    """Returns those of an object's stored keys that belong on this rank, whether it has a place for them or not."""
    target, root = handback.target, len(handback.path)
    names = handback.held_names()
    if names is not None:
        within = ((key, _path_here(handback, stored[key], flat)[root:]) for key in keys)
        return [key for key, path in within if len(path) < 2 or _belongs(path, names)]
    return [] if isinstance(target, CheckedStateful) else list(keys)


def _path_here(handback: Handback, path: Path, flat: FlatState) -> Path:
    """Returns the path that an entry of an object has on this rank, which may have its parameter under another name."""
    at = len(handback.path) + 1
    names = handback.held_names() if flat.tied and len(path) > at else None
    if names is None:
        return path
    return (*path[:at], flat.name_here(path[at], names), *path[at + 1 :])


def _belongs(path: Path, names: Collection[str]) -> bool:
    """Whether a stored entry of an object is for this rank; options are for the ranks that have their parameter."""
    return path[1] in names if path[0] == "state" else path[0] != PARAM_GROUPS


def _description(key: str, flat: FlatState, manifest: Manifest, strictness: Strictness) -> Any:
    """Returns a stored entry as `check_state_dict` gets it: tensors on the meta device, plain values as they are."""
    if key in manifest.tensors:
        tensor = manifest.tensors[key]
        dtype = torch_dtype(tensor.dtype)
        own = flat.leaves[key].value if key in flat.leaves else None
        if strictness.dtype == "cast" and isinstance(own, torch.Tensor) and _can_cast(dtype, own.dtype):
            dtype = own.dtype
        return torch.empty(tensor.layout.shape, dtype=dtype, device="meta")
    return manifest.values[key][1] if key in manifest.values else None


def _kind_of_stored(manifest: Manifest, key: str) -> str:
    if key in manifest.tensors:
        tensor = manifest.tensors[key]
        return describe_tensor(tensor.layout.shape, torch_dtype(tensor.dtype))
    if key in manifest.values:
        return f"a plain value ({type(manifest.values[key][1]).__name__})"
    return "a value per rank"


def _kind_of_leaf(flat: FlatState, views: Mapping[str, View], key: str) -> str:
    if key in views:
        return describe_tensor(views[key].shape, views[key].dtype)
    value = flat.leaves[key].value
    return "a value per rank" if isinstance(value, PerRank) else f"a plain value ({type(value).__name__})"
