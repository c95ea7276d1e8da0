"""Tells of torchmetrics' metrics in the app that save nothing, as none of their states is persistent by default."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.nn import Module

from shardopt.state.paths import join
from shardopt.state.state import FlatState

_seen: WeakValueDictionary[int, Module] = WeakValueDictionary()  # by their ids, as metrics define what equals them

_log = logging.getLogger("shardopt.checkpoint")


def tell_of_unsaved_metrics(flat: FlatState) -> None:
    """Logs a warning on rank 0 if objects of the app are metrics without anything in their state; once for each.

    Metrics within a module of the program's own may be meant to begin anew; those that somebody has put into the app
    are not.
    """
    empty = {
        join(each.path): each.object
        for each in flat.targets
        if not each.state and isinstance(each.object, Module) and _has_metric(each.object)
    }
    new = {key: module for key, module in empty.items() if id(module) not in _seen}
    _seen.update((id(module), module) for module in new.values())
    if new and not (dist.is_initialized() and dist.get_rank()):
        _log.warning(
            "nothing of %s is saved, as no state of the metric is persistent: a resumed run would begin it anew. Call "
            "its persistent(True) before saves and loads, or leave it out of the app [cannot-store]",
            ", ".join(new),
        )


def _has_metric(module: Module) -> bool:
    """Whether it is or has a metric with states, which torchmetrics' have by name."""
    metrics = (each for each in module.modules() if callable(getattr(each, "persistent", None)))
    states = (getattr(each, "metric_state", None) for each in metrics)
    return any(isinstance(each, Mapping) and len(each) > 0 for each in states)
