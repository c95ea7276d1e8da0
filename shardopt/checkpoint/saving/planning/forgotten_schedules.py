"""Tells of a schedule of torch's that is not saved beside its optimizer: a resumed run would begin it anew.

The optimizer does not know its schedules, only that there are some; so the state that is saved is searched for one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardopt.runtime.torch_private import is_scheduled
from shardopt.state.paths import join
from shardopt.state.state import FlatState, PerRank

_IN_EACH_STATE = "_last_lr"  # the rates that a schedule of torch's has set last

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()

_log = logging.getLogger("shardopt.checkpoint")


def tell_of_forgotten_schedules(flat: FlatState) -> None:
    """Logs a warning on rank 0 if optimizers have a schedule, and none is saved; once for each optimizer."""
    scheduled = {
        join(each.path): each.object
        for each in flat.targets
        if isinstance(each.object, Optimizer) and each.object not in _seen and is_scheduled(each.object)
    }
    if not scheduled:
        return
    _seen.update(scheduled.values())
    if (dist.is_initialized() and dist.get_rank()) or _has_schedule(flat):
        return
    _log.warning(
        "a schedule sets the rates of %s, and none is in the app: a resumed run would begin it anew. Add it "
        '({"schedule": schedule}), or make it in a resumed run with last_epoch= the steps that it had made, less one '
        "[optimizer-state]",
        ", ".join(scheduled),
    )


def _has_schedule(flat: FlatState) -> bool:
    """Whether a schedule is an object of the app or an attribute of one, or its state is in what is saved."""
    within = (value for each in flat.targets for value in _parts(getattr(each.object, "__dict__", {})))
    if flat.schedules() or any(isinstance(value, LRScheduler) for value in within):
        return True
    return any(_IN_EACH_STATE in leaf.path or _is_state_within(leaf.value) for leaf in flat.leaves.values())


def _parts(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the values of attributes, and those in their lists, tuples and dicts."""
    for value in attributes.values():
        yield value
        yield from value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _is_state_within(value: Any) -> bool:
    if isinstance(value, PerRank):
        return _is_state_within(value.value)
    if isinstance(value, Mapping):
        return _IN_EACH_STATE in value or any(map(_is_state_within, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_state_within, value))
    return isinstance(value, str) and _IN_EACH_STATE in value  # as a framework's state may be text
