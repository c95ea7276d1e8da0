"""Compares torch's schedules, which store rates by position of groups, with optimizers, whose groups go by name.

A schedule that was saved with its groups in another order, or in another number, would give each group another one's
rate at its next step, or fail there. Which rate a group started from stands with each of its parameters ("initial_lr"
in the saved options): so a comparison sees where those of the schedule ("base_lrs") are of other groups. But somebody
may have changed them by hand; then the rates that it has set last ("_last_lr") are still those of the groups ("lr").
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shardopt.checkpoint.loading.names import Names
from shardopt.errors import Problem
from shardopt.runtime.signatures import signature
from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import PARAM_GROUPS, Path, join
from shardopt.state.state import FlatState, RestoreTarget

_BASE, _LAST, _INNER = "base_lrs", "_last_lr", "_schedulers"
_LIMITS = ("min_lrs", "max_lrs")  # which the code gives, and groups have not
_BY_POSITION = (_BASE, *_LIMITS, "lr_lambdas")  # not what was set last: groups that are added later are in it
_MOST_NAMES = 3
_REMEDY = (
    "give the groups as they were saved, in the same order; or leave the schedule out of the app, load with "
    'Strictness(unexpected="ignore") while it is attached, and then make it again with last_epoch= the steps that it '
    'had made, less one, and set "lr" of each group to what was loaded, as StepLR changes it when it is made'
)
_MAY_SET_ITS_OWN = (
    "its next step may set its own. To go on from those of the groups, make it again after the load, with last_epoch= "
    "the steps that it has made, less one. If they are those to begin with, make it anew, and call its step() once for "
    "each step that it has made"
)
_NOT_SAVED = (
    'checkpoints of this optimizer have no groups. After this load set "lr" of each group to the rate of the schedule, '
    "and call save_param_groups(True) of the optimizer; in later runs before the load"
)

_NO_ARGUMENTS = frozenset({"self", "optimizer", "last_epoch", "verbose"})
_MADE_OF_ARGUMENTS = ("_schedule_phases", "_milestones", "total_size", "step_ratio")

_log = logging.getLogger("shardopt.checkpoint")


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of the app: its names on this rank, and their first and last rates in the checkpoint."""

    names: Sequence[str]
    rate: float | None
    last: float | None

    def __str__(self) -> str:
        shown = [*self.names[:_MOST_NAMES], *(["..."] if len(self.names) > _MOST_NAMES else [])]
        return f"({', '.join(shown)})" if shown else "(none here)"


def schedule_problems(
    schedules: Iterable[tuple[RestoreTarget, LRScheduler]], flat: FlatState, names: Names
) -> Iterator[tuple[Path, Problem]]:
    """Yields (path, problem) for each schedule whose stored rates belong to other groups than it has now.

    Without tensors in it, a schedule is one value of the checkpoint. What tensors have for rates is not known before
    they are read: `warn_of_other_rates` looks at it afterwards.
    """
    owners = _owners(flat, names)
    for target, schedule in schedules:
        key = join(target.path)
        if key not in names.chosen or key not in names.manifest.values:
            continue
        stored = names.manifest.values[key][1]
        if isinstance(stored, Mapping):
            groups, started_from = _groups_of(_live_groups(schedule), flat, owners)
            for problem in _problems(stored, schedule, groups, started_from, stored.get(_LAST)):
                yield target.path, replace(problem, key=f"{key}.{problem.key}")


def warn_of_other_rates(loaded: Iterable[tuple[RestoreTarget, LRScheduler]], flat: FlatState) -> None:
    """Logs a warning if loaded schedules have set other rates than the groups of their optimizer have now."""
    not_saved = {
        id(group)
        for each in flat.targets
        if isinstance(each.object, Optimizer) and PARAM_GROUPS not in each.state
        for group in each.object.param_groups
    }
    by_groups: dict[int, list[tuple[str, LRScheduler]]] = {}
    for target, schedule in loaded:
        if isinstance(getattr(schedule, _LAST, None), list):  # a class of somebody's may differ
            for first in _live_groups(schedule)[:1]:  # wrappers of an optimizer have its very groups
                by_groups.setdefault(id(first), []).append((join(target.path), schedule))
    for group_id, schedules in by_groups.items():
        groups = _live_groups(schedules[0][1])
        now = [number_of(group.get("lr")) for group in groups]
        last = [[*map(number_of, getattr(schedule, _LAST))] for _, schedule in schedules]
        # One without parameters anywhere has nothing stored. Of several schedules, one has stepped last.
        used = [i for i, group in enumerate(groups) if group[PARAMS]]
        if not all(last) or any(all(i < len(each) and each[i] == now[i] for i in used) for each in last):
            continue
        _log.warning(
            "the rates of %s are %s, and those of its optimizer's groups %s: %s [optimizer-state]",
            ", ".join(name for name, _ in schedules),
            ", ".join(map(str, last)),
            now,
            _NOT_SAVED if group_id in not_saved else _MAY_SET_ITS_OWN,
        )


def _live_groups(schedule: LRScheduler) -> list[dict[str, Any]]:
    """Returns the groups of a schedule's optimizer; none if its class does not keep the optimizer as torch's do."""
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    return list(groups) if isinstance(groups, list | tuple) else []


def _problems(
    stored: Mapping[str, Any],
    schedule: LRScheduler,
    groups: Sequence[_Group],
    started_from: frozenset[float],
    last: Any,
) -> Iterator[Problem]:
    """Yields the first problem of a schedule's stored state; for a composed schedule, that of each part.

    Args:
        started_from: the rates from which all groups in the checkpoint started.
        last: the rates that the schedule has set last, or the one that is made of it and others.
    """
    inner, live = stored.get(_INNER), getattr(schedule, _INNER, None)
    if isinstance(inner, list) and isinstance(live, Sequence):
        if len(inner) != len(live):
            remedy = "make the schedule of as many as it was saved with"
            yield Problem(_INNER, f"{len(inner)} schedules", f"{len(live)}, as in the app", remedy)
            return
        for i, (state, each) in enumerate(zip(inner, live, strict=True)):
            if isinstance(state, Mapping) and isinstance(each, LRScheduler):
                for problem in _problems(state, each, groups, started_from, last):
                    yield replace(problem, key=f"{_INNER}.{i}.{problem.key}")
    for name in _BY_POSITION:
        saved, here = stored.get(name), getattr(schedule, name, None)
        if not isinstance(saved, list) or not isinstance(here, list):
            continue
        if len(saved) != len(here):
            told = ", ".join(f"{i} {group}" for i, group in enumerate(groups))
            yield Problem(name, f"those of {len(saved)} groups", f"of {len(here)}: {told}", _REMEDY)
            return
        if name in _LIMITS and saved != here and sorted(saved) == sorted(here):
            yield Problem(name, f"{saved}", f"{here}, as the code gives them", _REMEDY)
            return
        # Rates that somebody has changed in the schedule by hand are left alone: nothing says whose they are.
        if name == _BASE and _are_of_groups(saved, groups, started_from):
            other = {
                i: group
                for i, (rate, group) in enumerate(zip(saved, groups, strict=False))
                if group.rate is not None and group.rate != rate
            }
            if other and not _were_changed(saved, last, groups, other):
                told = ", ".join(f"{group.rate} for group {i} {group}" for i, group in other.items())
                yield Problem(name, f"{saved}, by the groups as they were saved", told, _REMEDY)
                return


def _are_of_groups(saved: Sequence[Any], groups: Sequence[_Group], started_from: frozenset[float]) -> bool:
    """Whether a schedule's first rates are those of all groups, except groups without parameters."""
    if not all(map(_is_number, saved)) or not started_from.issubset(saved):
        return False
    return started_from.issuperset(saved) or any(group.rate is None for group in groups)


def _were_changed(saved: Sequence[float], last: Any, groups: Sequence[_Group], other: Mapping[int, _Group]) -> bool:
    """Whether a schedule's first rates were changed by hand, rather than belong to other groups.

    Then the rates that it has set last are of these groups, and no exchange of groups with one last rate explains the
    first ones.

    Args:
        saved: the first rates.
        other: the groups, by position, that have started from other ones.
    """
    if not isinstance(last, list) or len(last) != len(saved) or not all(map(_is_number, last)):
        return False
    known = [(rate, group.last) for rate, group in zip(last, groups, strict=False) if group.last is not None]
    if any(rate != of_group for rate, of_group in known) or len(set(last)) == 1:
        return False  # in a warmup from 0 all have one
    started = sorted((last[i], group.rate or 0.0) for i, group in other.items())
    return started != sorted((last[i], saved[i]) for i in other)


@dataclass(frozen=True, slots=True)
class _Owner:
    """An optimizer of the app: the names in each group, by the group's identity, and the options stored for them."""

    names: Mapping[int, Sequence[str]]
    stored: Mapping[str, Mapping[str, Any]]


def _owners(flat: FlatState, names: Names) -> dict[int, _Owner]:
    """Returns the optimizer of each group, by the group's identity, if the app saves groups by name."""
    stored: dict[Path, dict[str, Mapping[str, Any]]] = {}
    for path, options in names.manifest.values.values():
        if len(path) > 1 and path[-2] == PARAM_GROUPS and isinstance(options, Mapping):
            stored.setdefault(path[:-2], {})[str(path[-1])] = options
    owners: dict[int, _Owner] = {}
    for target in flat.targets:
        live = target.object.param_groups if isinstance(target.object, Optimizer) else []
        if target.groups is None or len(live) != len(target.groups):
            continue
        members = {id(group): saved[PARAMS] for group, saved in zip(live, target.groups, strict=True)}
        owner = _Owner(members, stored.get(target.path, {}))
        for group in members:
            owners.setdefault(group, owner)
    return owners


def _groups_of(
    groups: Sequence[Mapping[str, Any]], flat: FlatState, owners: Mapping[int, _Owner]
) -> tuple[list[_Group], frozenset[float]]:
    """Returns an optimizer's groups, as far as this app has them by name, and the first rates of all stored groups."""
    owner = next((owners[id(group)] for group in groups if id(group) in owners), None)
    if owner is None:
        return [_Group((), None, None) for _ in groups], frozenset()
    first, last = (
        {name: options[rate] for name, options in owner.stored.items() if _is_number(options.get(rate))}
        for rate in ("initial_lr", "lr")
    )

    def rate_in(rates: Mapping[str, float], members: Sequence[str]) -> float | None:
        of_members = (rates.get(flat.tied.get(name, name)) for name in members)
        return next((rate for rate in of_members if rate is not None), None)

    by_group = (owner.names.get(id(group), ()) for group in groups)
    found = [_Group(members, rate_in(first, members), rate_in(last, members)) for members in by_group]
    return found, frozenset(first.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def number_of(value: Any) -> Any:
    """Returns a number in a tensor; any other value as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def other_arguments(schedules: Iterable[tuple[RestoreTarget, LRScheduler]], names: Names) -> list[str]:
    """Returns a line for each schedule that was saved with other arguments, or by another class, than the app's."""
    lines = []
    for target, schedule in schedules:
        key = join(target.path)
        stored = _stored(key, schedule, names)
        lines += [f"{key}{line}" for line in _differences(stored, schedule)] if stored else []
    return lines


def _stored(key: str, schedule: LRScheduler, names: Names) -> Mapping[str, Any]:
    """Returns the stored state of a schedule: one value or, if it has tensors, all entries that are none."""
    values = names.manifest.values
    if key in values:
        whole = values[key][1]
        return whole if isinstance(whole, Mapping) and key in names.chosen else {}
    entries = {name: f"{key}.{name}" for name in vars(schedule)}
    return {name: values[at][1] for name, at in entries.items() if at in values and at in names.chosen}


def _differences(stored: Mapping[str, Any], schedule: LRScheduler) -> Iterator[str]:
    here = _arguments(schedule)
    absent = [name for name in here if name not in stored]
    others = [name for name in stored if name not in vars(schedule) and not name.startswith("_")]
    is_torchs = type(schedule).__module__ == lr_scheduler.__name__  # another's attributes may come later
    if absent or (is_torchs and not _arguments_of_torchs().isdisjoint(others)):
        told = " in place of ".join(str(each) for each in (others, absent) if each)
        preposition = "with" if others else "without"
        yield f" is a {type(schedule).__name__} in the code, and was saved by one {preposition} {told}"
        return
    for name, value in here.items():
        if stored[name] != value:
            yield f".{name}: {value!r} in the code, {stored[name]!r} in the checkpoint"
    inner, live = stored.get(_INNER), getattr(schedule, _INNER, ())
    for i, (state, each) in enumerate(zip(inner, live, strict=False) if isinstance(inner, list) else ()):
        if isinstance(state, Mapping) and isinstance(each, LRScheduler):
            yield from (f".{_INNER}.{i}{line}" for line in _differences(state, each))


@cache
def _arguments_of_torchs() -> frozenset[str]:
    """Returns the names of arguments that any of torch's schedules takes."""
    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and issubclass(kind, LRScheduler)]
    names = {name for kind in kinds for name in signature(kind.__init__).parameters}
    return frozenset(names - _NO_ARGUMENTS)


def _arguments(schedule: LRScheduler) -> dict[str, Any]:
    """Returns the plain arguments that a schedule keeps, and what its constructor made of others."""
    named = [name for name in signature(type(schedule).__init__).parameters if name not in _NO_ARGUMENTS]
    own = vars(schedule)
    return {name: own[name] for name in (*named, *_MADE_OF_ARGUMENTS) if name in own and _is_plain(own[name])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
