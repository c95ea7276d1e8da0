"""Tells of optimizers in an app whose parameters nothing in the app holds, such as a criterion's or SAC's log_alpha.

Their moments are saved, and their values are not: a resume would give the moments to new values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.format.tensor_bytes import address_of
from shardopt.checkpoint.saving.planning.app_tensors import children_of, names_of
from shardopt.sharding.view import local_tensors
from shardopt.state.paths import Path, join
from shardopt.state.state import PerRank

_MOST_DEPTH = 3  # of attributes of objects within objects

_log = logging.getLogger("shardopt.checkpoint")


def warn_of_unheld(app: Mapping[str, Any]) -> bool:
    """Logs a warning for each optimizer that trains tensors that nothing else in the app has; returns whether any does.

    What an object of the program's own has in its attributes is taken for held. Local.
    """
    optimizers: dict[str, Optimizer] = {}
    held: set[Any] = set()
    _look_into(app, (), optimizers, held)
    told = False
    for key, optimizer in optimizers.items():
        unheld = [name for child in children_of(optimizer) for name, each in _named(child) if not _is_held(each, held)]
        if unheld:
            told = True
            _log.warning(
                "%s steps %d parameters that nothing in the app holds, such as %s: a resume would give their "
                "moments to new values. Add their module, or the tensor, to the app [stale-parameters]",
                *(key, len(unheld), unheld[0]),
            )
    return told


def _look_into(value: Any, path: Path, optimizers: dict[str, Optimizer], held: set[Any], depth: int = 0) -> None:
    """Adds optimizers by key, and tensors by identity and by the places of their memory."""
    if isinstance(value, Optimizer):
        if not depth:
            optimizers[join(path)] = value
    elif isinstance(value, Tensor | Module):
        tensors = [*value.parameters(), *value.buffers()] if isinstance(value, Module) else [value]
        held.update(map(id, tensors))
        held.update(_place(local) for each in tensors for local in local_tensors(each))
    elif isinstance(value, PerRank):
        _look_into(value.value, path, optimizers, held, depth)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            _look_into(child, (*path, key), optimizers, held, depth)
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            _look_into(child, (*path, number), optimizers, held, depth)
    elif depth < _MOST_DEPTH:
        for child in getattr(value, "__dict__", {}).values():
            _look_into(child, path, optimizers, held, depth + 1)


def _named(optimizer: Any) -> list[tuple[str, Tensor]]:
    """Returns the parameters that an optimizer trains, with what an error may call them."""
    named = names_of(optimizer)
    pairs = [
        (f"one of shape {tuple(each.shape)}", each) for group in optimizer.param_groups for each in group["params"]
    ]
    return [(name, each) for name, each in (pairs if named is None else named.items()) if each.requires_grad]


def _is_held(tensor: Tensor, held: set[Any]) -> bool:
    places = map(_place, local_tensors(tensor))
    return id(tensor) in held or all(place in held or not place[1] for place in places)


def _place(local: Tensor) -> tuple[Any, int]:
    return local.device, address_of(local)
