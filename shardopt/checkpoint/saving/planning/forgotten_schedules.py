"""Tells of what would begin anew in a resumed run: a schedule of torch's, torchrec's warm-up, an inner optimizer.

An optimizer does not know torch's schedules, only that there are some; so the state that is saved is searched for one.
torchrec's warm-up keeps its position as the state of a parameter that no group has. Where it is saved
(`trainer_optimizers.py` refuses it elsewhere), a new optimizer has no place for it before its first step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardopt.checkpoint.saving.planning.app_tensors import children_of
from shardopt.data.loops import samplers_in_loops
from shardopt.data.sampler import ResumableSampler
from shardopt.runtime.companions import companions_of
from shardopt.runtime.torch_private import is_scheduled
from shardopt.state.containers import entries_of
from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import STATE, Path, is_below, join
from shardopt.state.state import FlatState, PartialStateful, PerRank
from shardopt.state.trainer_optimizers import SHARDOPTS_WARM_UP

_IN_EACH_STATE = "_last_lr"  # the rates that a schedule of torch's has set last

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of those that save state in no group

_MOST_LOOKED_AT = 64
_told_of: weakref.WeakSet[Any] = weakref.WeakSet()  # what goes along with optimizers, and samplers

_log = logging.getLogger("shardopt.checkpoint")


def tell_of_forgotten_schedules(flat: FlatState, members: Sequence[int] | None) -> None:
    """Logs a warning if optimizers have a schedule, and none is saved; once for each optimizer.

    Args:
        members: the numbers in the job of the ranks that save, of which the first one logs; None for all.
    """
    scheduled = {
        join(each.path): each.object
        for each in flat.saved_targets()
        if isinstance(each.object, Optimizer) and each.object not in _seen and is_scheduled(each.object)
    }
    if not scheduled:
        return
    _seen.update(scheduled.values())
    if not is_first(members) or _has_schedule(flat):
        return
    _log.warning(
        "a schedule sets the rates of %s, and none is in the app: a resumed run would begin it anew. Add it "
        '({"schedule": schedule}), or make it in a resumed run with last_epoch= the steps that it had made, less one '
        "[optimizer-state]",
        ", ".join(scheduled),
    )


def tell_of_forgotten_companions(flat: FlatState, members: Sequence[int] | None) -> None:
    """Logs a warning, once for each, of averages, scalers and plateau schedules that the app lacks; as above."""
    optimizers = [(each.path, each.object) for each in flat.saved_targets() if isinstance(each.object, Optimizer)]
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
        if is_first(members) and not _has_state(flat, mark, others):
            _log.warning(
                "%s goes along with %s, and is not in the app: a resumed run would begin it anew. Add it under a key "
                "of its own [optimizer-state]",
                *(type(companion).__name__, join(path)),
            )


def tell_of_forgotten_positions(flat: FlatState, members: Sequence[int] | None) -> None:
    """Logs a warning, once for each, if this is a save within a loop over a sampler, and the app has none; as above."""
    samplers = [each for each in samplers_in_loops() if each not in _told_of]
    if not samplers or not any(isinstance(each.object, Optimizer) for each in flat.saved_targets()):
        return
    objects = [*(each.object for each in flat.targets), *_attributes_in(flat)]
    if any(isinstance(each, ResumableSampler) for each in objects):
        return
    _told_of.update(samplers)
    if is_first(members) and not _has_state(flat, "position"):
        _log.warning(
            "this is a save within a loop over the batches of a sampler, and the app has no position in the data: a "
            'resumed run would see the first samples again. Add the sampler, or its loader ({"data": sampler}) '
            "[data-position]"
        )


def is_first(members: Sequence[int] | None) -> bool:
    """Whether this is the first of the ranks that save; `members` as above."""
    return not dist.is_initialized() or dist.get_rank() == (0 if members is None else members[0])


def tell_of_states_without_group(flat: FlatState, members: Sequence[int] | None) -> None:
    """Logs a warning, once for each optimizer that saves state of a parameter in no group; `members` as above."""
    for each in flat.saved_targets():
        optimizer = each.object
        is_ours = isinstance(optimizer, PartialStateful)
        if is_ours or not isinstance(optimizer, Optimizer) or optimizer in _told or each.held_names is None:
            continue
        roots = [(*each.path, STATE, name) for name in _with_state_in_no_group(optimizer)]
        saved = [join(root) for root in roots if any(is_below(leaf.path, root) for leaf in flat.leaves.values())]
        if not saved:
            continue
        _told.add(optimizer)
        if is_first(members):
            _log.warning(
                "%s is saved, but a new optimizer has no place for it before its first step, so that a restore will "
                "refuse it. Of a warm-up of torchrec's: use %s [optimizer-state]",
                ", ".join(saved),
                SHARDOPTS_WARM_UP,
            )


def tell_of_inner_optimizers(flat: FlatState, members: Sequence[int] | None) -> None:
    """Logs a warning, once for each, of an optimizer in another (of SAM) that does not save its state; as above."""
    for each in flat.saved_targets():
        outer = each.object
        is_keyed = isinstance(outer, PartialStateful) or isinstance(getattr(outer, "params", None), Mapping)
        if is_keyed or not isinstance(outer, Optimizer):
            continue
        for name, inner in vars(outer).items():
            if not isinstance(inner, Optimizer) or inner in _told or not (tensors := _tensors_of(inner)):
                continue
            _told.add(inner)
            if tensors.isdisjoint(id(leaf.value) for leaf in flat.leaves.values()) and is_first(members):
                _log.warning(
                    "%s.%s has state, which that optimizer does not save: a resume would begin it anew. Add it to the "
                    'app under a key of its own ({"inner": optimizer.%s}) [optimizer-state]',
                    *(join(each.path), name, name),
                )


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
    """Yields the attributes of the objects of the app."""
    for each in flat.targets:
        yield from _parts(getattr(each.object, "__dict__", {}))


def _parts(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the values of attributes, and the first ones in their containers.

    A list of schedules is short, and one of data may have millions of entries.
    """
    for value in [*attributes.values()]:  # at once, as a thread may add some
        yield value
        yield from [*islice(entries_of(value) or (), _MOST_LOOKED_AT)]


def _is_state_within(value: Any, mark: str) -> bool:
    if isinstance(value, PerRank):
        return _is_state_within(value.value, mark)
    if isinstance(value, Mapping):
        return mark in value or any(_is_state_within(each, mark) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_is_state_within(each, mark) for each in value)
    return isinstance(value, str) and mark in value  # as a framework's state may be text
