"""Tells of torchmetrics' metrics in the app that save nothing, as none of their states is persistent by default."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

from torch.nn import Module, ModuleDict, ModuleList

from shardopt.checkpoint.saving.planning.forgotten_schedules import is_first
from shardopt.state.paths import join
from shardopt.state.state import RestoreTarget

_seen: WeakValueDictionary[int, Module] = WeakValueDictionary()  # by their ids, as metrics define what equals them

_log = logging.getLogger("shardopt.checkpoint")


def tell_of_unsaved_metrics(empty: Sequence[RestoreTarget], members: Sequence[int] | None) -> None:
    """Logs a warning, once for each, if objects without anything in their state are metrics.

    The first of the ranks that save does; `members` are their numbers in the job, None for all. Metrics within a module
    of the program's own may be meant to begin anew; those that somebody has put into the app are not, also in torch's
    containers of modules.
    """
    new = {
        join(each.path): each.object
        for each in empty
        if isinstance(each.object, Module) and id(each.object) not in _seen and _is_or_lists_metric(each.object)
    }
    _seen.update((id(module), module) for module in new.values())
    if new and is_first(members):
        _log.warning(
            "nothing of %s is saved, as no state of the metric is persistent: a resumed run would begin it anew. Call "
            "its persistent(True) before saves and loads, or leave it out of the app [cannot-store]",
            ", ".join(new),
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
