"""Tells of what in a run's app would make a resume train otherwise than the run did.

A step that is not the saved one. Parameters that nothing in the app holds, such as a criterion's or SAC's log_alpha:
their moments are saved, and their values are not, so that a resume would give the moments to new values. And parameters
that are not trained, though they were: a layer that the script unfreezes once, at a step before the restored one, stays
frozen in a resumed run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.format.tensor_bytes import address_of
from shardopt.checkpoint.saving.planning.app_tensors import children_of, names_of
from shardopt.sharding.view import local_tensors
from shardopt.state.paths import Path, join
from shardopt.state.state import PerRank

_MOST_DEPTH = 3  # of attributes of objects, and of what is in their lists and dicts
_MOST_WITHIN = 1000  # items of such a list or dict, as a longer one is data

_log = logging.getLogger("shardopt.checkpoint")


class AppWarnings:
    """Warns of what does not fit in the app of one run. On rank 0."""

    def __init__(self) -> None:
        self._told_of_step = False
        self._has_looked = False  # for what optimizers step and the app lacks

    def of_saved(self, step: int, app: Any) -> None:
        """Warns once if the app has another step than the saved one, as in a loop that counts differently."""
        if not isinstance(app, Mapping):
            return
        self._of_unheld(app)
        self._has_looked = True
        counted = app.get("step")
        if type(counted) is not int or counted == step or self._told_of_step:
            return
        self._told_of_step = True
        _log.warning(
            'app["step"] is %d, and the step that is saved %d: after a restore the loop would resume from %d. Set '
            'app["step"] before the save, or call it otherwise in the app if it counts something else [run-root]',
            *(counted, step, counted),
        )

    def of_restored(self, step: int | None, app: Mapping[str, Any], loaded: Collection[str], is_whole: bool) -> None:
        """Warns if the app was restored with another step than the checkpoint has, as after its directory was renamed.

        Args:
            step: that was restored; None for none.
            loaded: keys.
            is_whole: whether the app is all that the run saves.
        """
        counted = app.get("step") if "step" in loaded else None
        if type(counted) is int and counted != step:
            _log.warning(
                'app["step"] is %d, and the step that was restored %d: its directory was renamed, or it was saved so. '
                'Name it as before, or set app["step"] to what restore returns: %d [run-root]',
                *(counted, step, step),
            )
        if step is not None:
            warn_of_frozen(app)
        if is_whole:
            self._of_unheld(app)

    def _of_unheld(self, app: Mapping[str, Any]) -> None:
        if not self._has_looked:
            self._has_looked = warn_of_unheld(app)


def warn_of_unheld(app: Mapping[str, Any]) -> bool:
    """Logs a warning for each optimizer that trains tensors that nothing else in the app has; returns whether any does.

    What an object of the program's own has in its attributes is taken for held. Local.
    """
    optimizers: dict[str, Optimizer] = {}
    held: set[Any] = set()
    _look_into(app, (), optimizers, held)
    told = False
    for key, optimizer in optimizers.items():
        unheld = [
            name for child in children_of(optimizer) for name, each in _named(child, True) if not _is_held(each, held)
        ]
        if unheld:
            told = True
            _log.warning(
                "%s steps %d parameters that nothing in the app holds, such as %s: a resume would give their "
                "moments to new values. Add their module, or the tensor, to the app [stale-parameters]",
                *(key, len(unheld), unheld[0]),
            )
    return told


def warn_of_frozen(app: Mapping[str, Any]) -> None:
    """Logs a warning for each optimizer with state, of steps that were made, of parameters that are frozen. Local."""
    optimizers: dict[str, Optimizer] = {}
    _look_into(app, (), optimizers, set())
    for key, optimizer in optimizers.items():
        children = list(children_of(optimizer))
        frozen = [name for each in children for name, own in _named(each, False) if _has_stepped(each.state.get(own))]
        if frozen:
            _log.warning(
                "%s has made steps of %d parameters that are frozen now, such as %s: if the run unfroze them at a "
                "step, set requires_grad again before the loop; requires_grad is not saved [optimizer-state]",
                *(key, len(frozen), frozen[0]),
            )


def _has_stepped(state: Mapping[str, Any] | None) -> bool:
    step = (state or {}).get("step")
    if isinstance(step, Tensor):
        return any(bool((local > 0).any()) for local in local_tensors(step))
    return bool(state) if step is None else step > 0


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
    elif isinstance(value, Mapping | list | tuple):
        if depth < _MOST_DEPTH and (not depth or len(value) <= _MOST_WITHIN):
            for part, child in value.items() if isinstance(value, Mapping) else enumerate(value):
                _look_into(child, (*path, part), optimizers, held, depth and depth + 1)
    elif depth < _MOST_DEPTH:
        for child in getattr(value, "__dict__", {}).values():
            _look_into(child, path, optimizers, held, depth + 1)


def _named(optimizer: Any, trained: bool) -> list[tuple[str, Tensor]]:
    """Returns the trained or the frozen parameters of an optimizer, with what an error may call them."""
    named = names_of(optimizer)
    pairs = [
        (f"one of shape {tuple(each.shape)}", each) for group in optimizer.param_groups for each in group["params"]
    ]
    return [(name, each) for name, each in (pairs if named is None else named.items()) if each.requires_grad is trained]


def _is_held(tensor: Tensor, held: set[Any]) -> bool:
    places = map(_place, local_tensors(tensor))
    return id(tensor) in held or all(place in held or not place[1] for place in places)


def _place(local: Tensor) -> tuple[Any, int]:
    return local.device, address_of(local)
