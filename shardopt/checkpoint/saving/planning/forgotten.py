"""Tells of what would begin anew in a resumed run: a schedule of torch's, torchrec's warm-up, an inner optimizer.

And what goes along with optimizers (averages, scalers, plateau schedules), the position in the data, the state of DDP's
communication hooks, and metrics of torchmetrics' that save nothing, as none of their states is persistent by default.

An optimizer does not know torch's schedules, only that there are some; so the state that is saved is searched for one.
torchrec's warm-up keeps its position as the state of a parameter that no group has. Where it is saved
(`trainer_optimizers.py` refuses it elsewhere), a new optimizer has no place for it before its first step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from weakref import ProxyTypes, WeakSet, WeakValueDictionary

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardopt.checkpoint.saving.planning.app_tensors import children_of
from shardopt.checkpoint.saving.planning.app_warnings import note_rates
from shardopt.checkpoint.saving.planning.unheld import note_states
from shardopt.data.loops import samplers_in_loops
from shardopt.data.sampler import ResumableSampler
from shardopt.runtime.companions import are_noted, companions_of
from shardopt.runtime.torch_gradients import states_of_communication_hooks
from shardopt.runtime.torch_private import is_scheduled
from shardopt.state.containers import entries_of
from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import STATE, Path, is_below, join
from shardopt.state.state import FlatState, PartialStateful, PerRank, RestoreTarget
from shardopt.state.trainer_optimizers import SHARDOPTS_WARM_UP, layers_of

_IN_EACH_STATE = "_last_lr"  # the rates that a schedule of torch's has set last

_seen: WeakSet[Optimizer] = WeakSet()
_reduced: WeakSet[Optimizer] = WeakSet()  # whose gradients' communication was looked at
_told: WeakSet[Optimizer] = WeakSet()  # of those that save state in no group

_MOST_LOOKED_AT = 64
_told_of: WeakSet[Any] = WeakSet()  # what goes along with optimizers, and samplers
_seen_metrics: WeakValueDictionary[int, Module] = WeakValueDictionary()  # by ids, as metrics define what equals them

_log = logging.getLogger("shardopt.checkpoint")


def tell_of_what_is_lost(flat: FlatState, members: Sequence[int] | None) -> None:
    """Logs warnings of what a resume would miss, or could not load; once for each object that is saved.

    Args:
        members: the numbers in the job of the ranks that save, of which the first one logs; None for all.
    """
    lines = list[str]()
    try:
        saved = [each for each in flat.targets if each.path not in flat.unselected]
        optimizers = [(each.path, each.object) for each in saved if isinstance(each.object, Optimizer)]
        new = [(each, each.object) for each in saved if isinstance(each.object, Optimizer) and each.object not in _seen]
        if scheduled := {join(each.path): own for each, own in new if any(map(is_scheduled, layers_of(each.outer)))}:
            lines += _forgotten_schedules(scheduled, flat)
        others = [each for each in saved if not isinstance(each.object, PartialStateful)]
        if others := [each for each in others if isinstance(each.object, Optimizer)]:
            lines += [
                *_states_without_group(others, flat),
                *_inner_optimizers(others, flat),
                *_unsaved_attributes(others, flat),
            ]
            note_rates(others)
        if beside := [each for each in saved if not isinstance(each.object, Module | Optimizer)]:
            note_states(beside, flat)
        if not_seen := [each for _, each in optimizers if each not in _reduced]:
            lines += _forgotten_hooks(not_seen, flat)
        if are_noted():
            lines += _forgotten_companions(optimizers, flat)
        if optimizers and (samplers := [each for each in samplers_in_loops() if each not in _told_of]):
            lines += _forgotten_positions(samplers, flat)
        if empty := [each for each in saved if not each.state]:
            lines += _unsaved_metrics(empty)
    except Exception as error:  # of an object of the program's: no reason to fail a save
        _log.debug("the app was not looked at for what a resume would lack: %r", error)
    if lines and (not dist.is_initialized() or dist.get_rank() == (0 if members is None else members[0])):
        for line in lines:
            _log.warning("%s", line)


def _forgotten_schedules(scheduled: Mapping[str, Optimizer], flat: FlatState) -> Iterator[str]:
    """Yields a line if no schedule is saved of optimizers that have one; once for each optimizer."""
    _seen.update(scheduled.values())
    if not _has_schedule(flat):
        yield (
            f"a schedule sets the rates of {', '.join(scheduled)}, and none is in the app: a resumed run would begin "
            'it anew. Add it ({"schedule": schedule}), or make it in a resumed run with last_epoch= the steps that it '
            "had made, less one [optimizer-state]"
        )


def _forgotten_hooks(optimizers: Sequence[Optimizer], flat: FlatState) -> Iterator[str]:
    """Yields a line for each state of communication hooks, of the optimizers' parameters, that no object of it has."""
    _reduced.update(optimizers)
    groups = (group for each in optimizers for group in each.param_groups)
    states = states_of_communication_hooks(tensor for group in groups for tensor in group[PARAMS])
    within = {*(id(each.object) for each in flat.targets), *map(id, _attributes_in(flat))} if states else ()
    for state in states:
        if id(state) not in within:
            yield (
                f"a communication hook of DistributedDataParallel has a {type(state).__name__}, which no object of the "
                "app has: a resumed run would begin it anew, and so have other gradients. Add one as in "
                "docs/limits.md#communication-hooks [optimizer-state]"
            )


def _forgotten_companions(optimizers: Sequence[tuple[Path, Optimizer]], flat: FlatState) -> Iterator[str]:
    """Yields a line for each of averages, scalers and plateau schedules that the app lacks."""
    there = {id(each.object) for each in flat.targets}
    lacking = [
        (path, companion, mark)
        for path, outer in optimizers
        for optimizer in (outer, *children_of(outer))
        for companion, mark in companions_of(optimizer).items()
        if id(companion) not in there and companion not in _told_of
    ]
    within = set(map(id, _attributes_in(flat))) if lacking else set()
    for path, companion, mark in lacking:
        if id(companion) in within or companion in _told_of:
            continue
        _told_of.add(companion)
        others = [target.path for target in flat.targets if isinstance(companion, type(target.object))]
        if not _has_state(flat, mark, others):
            yield (
                f"{type(companion).__name__} goes along with {join(path)}, and is not in the app: a resumed run would "
                "begin it anew. Add it under a key of its own [optimizer-state]"
            )


def _forgotten_positions(samplers: Sequence[Any], flat: FlatState) -> Iterator[str]:
    """Yields a line for samplers in whose loops this save is, if the app has none."""
    objects = [*(each.object for each in flat.targets), *_attributes_in(flat)]
    if any(isinstance(each, ResumableSampler) for each in objects):
        return
    _told_of.update(samplers)
    if not _has_state(flat, "position"):
        yield (
            "this is a save within a loop over the batches of a sampler, and the app has no position in the data: a "
            'resumed run would see the first samples again. Add the sampler, or its loader ({"data": sampler}) '
            "[data-position]"
        )


def _states_without_group(others: Sequence[RestoreTarget], flat: FlatState) -> Iterator[str]:
    """Yields a line for each optimizer that saves state of a parameter in no group."""
    for each in others:
        optimizer: Any = each.object
        if optimizer in _told or each.held_names is None:
            continue
        roots = [(*each.path, STATE, name) for name in _with_state_in_no_group(optimizer)]
        saved = [join(root) for root in roots if any(is_below(leaf.path, root) for leaf in flat.leaves.values())]
        if saved:
            _told.add(optimizer)
            yield (
                f"{', '.join(saved)} is saved, but a new optimizer has no place for it before its first step, so that "
                f"a restore will refuse it. Of a warm-up of torchrec's: use {SHARDOPTS_WARM_UP} [optimizer-state]"
            )


def _inner_optimizers(others: Sequence[RestoreTarget], flat: FlatState) -> Iterator[str]:
    """Yields a line for each optimizer in another (of SAM) that does not save its state."""
    for each in others:
        outer = each.object
        if isinstance(getattr(outer, "params", None), Mapping):
            continue
        for name, value in [*vars(outer).items()]:
            inner = [
                each
                for each in _with_entries(value)
                if isinstance(each, Optimizer) and each not in _told and _tensors_of(each)
            ]
            _told.update(inner)
            saved = {id(leaf.value) for leaf in flat.leaves.values()} if inner else set()
            if any(saved.isdisjoint(_tensors_of(each)) for each in inner):
                yield (
                    f"{join(each.path)}.{name} has state, which that optimizer does not save: a resume would begin it "
                    f'anew. Add it to the app under a key of its own ({{"inner": optimizer.{name}}}) [optimizer-state]'
                )


def _unsaved_attributes(others: Sequence[RestoreTarget], flat: FlatState) -> Iterator[str]:
    """Yields a line for each optimizer of a program's own that saves no state, and has tensors as attributes."""
    for each in others:
        optimizer: Any = each.object
        by_torch = type(optimizer).state_dict is Optimizer.state_dict and "state_dict" not in vars(optimizer)
        if (
            optimizer.state
            or not by_torch
            or optimizer in _told
            or f"{type(optimizer).__module__}.".startswith("torch.")
        ):
            continue
        known = {id(leaf.value) for leaf in flat.leaves.values()}
        known |= {id(tensor) for group in optimizer.param_groups for tensor in group[PARAMS]}
        own = {name: _with_entries(value) for name, value in [*vars(optimizer).items()]}
        lost = [
            name
            for name, values in own.items()
            if any(isinstance(each, Tensor) and each.numel() > 1 and id(each) not in known for each in values)
        ]  # no single numbers, such as a rate
        if lost:
            _told.add(optimizer)
            yield (
                f"{join(each.path)} keeps tensors in {', '.join(lost)}, and its state_dict() has no state: a resume "
                "would begin them anew. Keep them in its state[parameter] [optimizer-state]"
            )


def _unsaved_metrics(empty: Sequence[RestoreTarget]) -> Iterator[str]:
    """Yields a line for objects without anything in their state that are metrics, once for each.

    Metrics within a module of the program's own may be meant to begin anew; those that somebody has put into the app
    are not, also in torch's containers of modules.
    """
    new = {
        join(each.path): each.object
        for each in empty
        if isinstance(each.object, Module) and id(each.object) not in _seen_metrics and _is_or_lists_metric(each.object)
    }
    _seen_metrics.update((id(module), module) for module in new.values())
    if new:
        yield (
            f"nothing of {', '.join(new)} is saved, as no state of the metric is persistent: a resumed run would begin "
            "it anew. Call its persistent(True) before saves and loads, and on several ranks, as each counts for "
            "itself, put PerRank(dict(metric.state_dict())) into the app; or leave it out [cannot-store]"
        )


def _is_or_lists_metric(module: Module) -> bool:
    """Whether it is a metric with states, which torchmetrics' have by name, or around one; or a container of such."""
    if isinstance(module, ModuleDict | ModuleList):
        return any(map(_is_or_lists_metric, module.children()))
    if not callable(getattr(module, "persistent", None)):
        return False
    # Not of a collection of torchmetrics' (a ModuleDict): asked for its own, it would copy states among its members.
    parts = (each for each in module.modules() if not isinstance(each, ModuleDict))
    states = (getattr(each, "metric_state", None) for each in parts)
    return any(isinstance(each, Mapping) and len(each) > 0 for each in states)


def _tensors_of(optimizer: Optimizer) -> set[int]:
    entries = (entries for entries in optimizer.state.values() if isinstance(entries, Mapping))
    return {id(value) for each in entries for value in each.values() if isinstance(value, Tensor)}


def _with_state_in_no_group(optimizer: Optimizer) -> list[str]:
    """Returns the parameters, by name, of another library's keyed optimizer that have state and are in no group."""
    params, state = getattr(optimizer, "params", None), optimizer.state
    if not isinstance(params, Mapping) or not isinstance(state, Mapping):
        return []  # torch's own
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group[PARAMS]}
    return [name for name, each in params.items() if id(each) not in stepped and state.get(each)]


def _has_schedule(flat: FlatState) -> bool:
    """Whether a schedule is an object of the app or an attribute of one, or its state is in what is saved."""
    if flat.schedules() or any(isinstance(value, LRScheduler) for value in _attributes_in(flat)):
        return True
    return _has_state(flat, _IN_EACH_STATE)


def _has_state(flat: FlatState, mark: str, besides: Sequence[Path] = ()) -> bool:
    """Whether a name is in what is saved, in whatever form, but not below some paths."""
    return any(
        (mark in leaf.path or _is_state_within(leaf.value, mark)) and not is_below(leaf.path, *besides)
        for leaf in flat.leaves.values()
    )


def _attributes_in(flat: FlatState) -> Iterator[Any]:
    """Yields the attributes of the objects of the app, and the first entries of those that are containers."""
    for each in flat.targets:
        for value in [*getattr(each.object, "__dict__", {}).values()]:  # at once, as a thread may add some
            yield from _with_entries(value)


def _with_entries(value: Any) -> list[Any]:
    """Returns a value, and its first entries: a list of schedules is short, and one of data may have millions.

    Without weak proxies: one of what is gone does not even answer of which class it is.
    """
    found = [value, *islice(entries_of(value) or (), _MOST_LOOKED_AT)]
    return [each for each in found if type(each) not in ProxyTypes]


def _is_state_within(value: Any, mark: str) -> bool:
    if isinstance(value, PerRank):
        return _is_state_within(value.value, mark)
    if isinstance(value, Mapping):
        return mark in value or any(_is_state_within(each, mark) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_is_state_within(each, mark) for each in value)
    return isinstance(value, str) and mark in value  # as a framework's state may be text
