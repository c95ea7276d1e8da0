"""The buffers of an app: tensors of modules of which each rank may have values of its own, such as running statistics.

Batch norm under data parallelism counts on each rank what that rank has seen. As where a model is broadcast, the first
rank that holds a buffer speaks for all. Parameters and the state of optimizers are never buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from shardopt.sharding.pieces import View
from shardopt.sharding.view import local_tensors
from shardopt.state import FlatState


def buffers_in(flat: FlatState, views: Mapping[str, View]) -> frozenset[str]:
    """Returns the keys of tensors that lie in the memory of a buffer of some module, or of an average of one.

    Modules are those of the app, and those that other objects of the app have as attributes.

    Args:
        views: of this rank's tensors.
    """
    memory = {_place(local) for each in flat.targets for local in _buffers_of(each.object, each.state)}
    if not memory:
        return frozenset()
    return frozenset(key for key, view in views.items() if any(_place(piece.tensor) in memory for piece in view.pieces))


def _buffers_of(target: object, state: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the local tensors of what ranks may have with other values in the state of an object."""
    averages = getattr(target, "averages_of_buffers", None)
    if isinstance(target, Optimizer) or all(isinstance(each, Parameter) for each in state.values()):
        return
    if averages is not None:
        yield from averages()
        return
    for module in [target] if isinstance(target, Module) else _modules_within(target):
        owned = {_place(local) for each in module.parameters() for local in local_tensors(each)}
        for buffer in module.buffers():
            yield from (local for local in local_tensors(buffer) if local.data_ptr() and _place(local) not in owned)


def _modules_within(target: object) -> Iterator[Module]:
    """Yields the modules that an object has as attributes, and those in lists and dicts that begin with one."""
    for value in getattr(target, "__dict__", {}).values():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if isinstance(next(iter(values), None), Module):
            yield from (each for each in values if isinstance(each, Module))


def _place(local: Tensor) -> tuple[torch.device, int]:
    return local.device, local.data_ptr()
