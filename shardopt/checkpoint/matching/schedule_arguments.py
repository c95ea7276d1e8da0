"""Arguments of torch's schedules: a load takes those of the checkpoint, and says where the code gives others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from shardopt.checkpoint.matching.renaming import Names
from shardopt.checkpoint.matching.schedules import INNER, schedule_in
from shardopt.state import FlatState, join

_NO_ARGUMENTS = frozenset({"self", "optimizer", "last_epoch", "verbose"})
_MADE_OF_ARGUMENTS = ("_schedule_phases", "_milestones", "total_size", "step_ratio")


def other_arguments(flat: FlatState, names: Names) -> list[str]:
    """Returns a line for each schedule that was saved with other arguments, or by another class, than the app's."""
    told = []
    for handback in flat.handbacks:
        schedule, key = schedule_in(handback), join(handback.path)
        if schedule is None:
            continue
        stored = _stored(key, schedule, names)
        told += [f"{key}{line}" for line in _differences(stored, schedule)] if stored else []
    return told


def _stored(key: str, schedule: LRScheduler, names: Names) -> Mapping[str, Any]:
    """Returns what is stored of a schedule: as one value, or where it has tensors, what are none of its entries."""
    values = names.manifest.values
    if key in values:
        whole = values[key][1]
        return whole if isinstance(whole, Mapping) and key in names.chosen else {}
    entries = {name: f"{key}.{name}" for name in vars(schedule)}
    return {name: values[at][1] for name, at in entries.items() if at in values and at in names.chosen}


def _differences(stored: Mapping[str, Any], schedule: LRScheduler) -> Iterator[str]:
    here = _arguments(schedule)
    absent = [name for name in here if name not in stored]
    if absent:
        others = [name for name in stored if name not in vars(schedule) and not name.startswith("_")]
        yield f" is a {type(schedule).__name__} in the code, and was saved by one with {others} in place of {absent}"
        return
    for name, value in here.items():
        if stored[name] != value:
            yield f".{name}: {value!r} in the code, {stored[name]!r} in the checkpoint"
    inner, live = stored.get(INNER), getattr(schedule, INNER, ())
    for i, (state, each) in enumerate(zip(inner, live, strict=False) if isinstance(inner, list) else ()):
        if isinstance(state, Mapping) and isinstance(each, LRScheduler):
            yield from (f".{INNER}.{i}{line}" for line in _differences(state, each))


def _arguments(schedule: LRScheduler) -> dict[str, Any]:
    """Returns the arguments that a schedule keeps, and what its constructor has made of others: plain values alone."""
    named = [name for name in inspect.signature(type(schedule).__init__).parameters if name not in _NO_ARGUMENTS]
    own = vars(schedule)
    return {name: own[name] for name in (*named, *_MADE_OF_ARGUMENTS) if name in own and _is_plain(own[name])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
