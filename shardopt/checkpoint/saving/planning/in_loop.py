"""Tells of what the loop that saves has in its variables, and its app lacks.

A loss scaler, a plateau schedule or a loader with a position begins anew in a resumed run, and so do averages and
target networks, which no optimizer steps. No object of the app knows them; the functions that called the save do.
Objects with a `state_dict` are told of at the first save, modules once they have changed from one save to the next.

An app with an object of the program's own may hold any of them, and is not told of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import ref

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardopt.checkpoint.saving.planning.app_tensors import children_of, places_of
from shardopt.checkpoint.saving.planning.unheld import Found, may_hold_others, optimizers_in, tensors_of
from shardopt.runtime.live_objects import variables_of_callers
from shardopt.sharding.view import local_tensors
from shardopt.state.containers import attributes_of, entries_of

_MARKS = {GradScaler: "_growth_tracker", ReduceLROnPlateau: "num_bad_epochs"}  # names in the state of each
_OURS = __name__.partition(".")[0]
_MOST_ENTRIES = 64  # of a container that are looked at: it may have millions of data
_SAMPLED_TENSORS, _SAMPLED_ELEMENTS = 8, 8  # of each module

_log = logging.getLogger("shardopt.checkpoint")


class LoopWarnings:
    """Warns of what is in the loop of one run, and not in its app. On rank 0."""

    def __init__(self) -> None:
        self._saves = 0
        self._modules: dict[str, tuple[ref[Module], str]] = {}  # of the first save, by name, with a sample of elements

    def of_saved(self, found: Found) -> None:
        """Looks at the variables of the functions that have called a save; at the first two saves. Local."""
        self._saves += 1
        is_training = any(isinstance(each, Optimizer) for _, each in found)  # and not weights for others to use
        if self._saves > 2 or not is_training or any(may_hold_others(each) for _, each in found):
            return
        variables = variables_of_callers()
        beside = {
            f"{name} ({type(module).__name__})": (ref(module), _sample_of(module))
            for name, module in _modules_beside(variables, found)
        }
        before, self._modules = self._modules, beside
        if self._saves == 1 and (names := _forgotten_in(variables, found)):
            _tell(names, "in the loop that saves have a state", "in the loop that saves has a state")
        elif names := [name for name in beside if name in before and _has_changed(before[name], beside[name])]:
            _tell(names, "in the loop have changed since the last save", "in the loop has changed since the last save")


def _tell(names: list[str], have: str, has: str) -> None:
    are, them = (f"{have} and are", "them") if len(names) > 1 else (f"{has} and is", "it")
    _log.warning(
        "%s %s not in the app: a resumed run would begin %s anew. Add %s to the app, unless the loop makes %s again "
        "from what is there [optimizer-state]",
        *(", ".join(names), are, them, them, them),
    )


def _forgotten_in(variables: Mapping[str, Any], found: Found) -> list[str]:
    """Returns the names of objects with a state that is not in an app."""
    of_app = [each for _, each in found]
    there = {id(part) for each in of_app for part in (each, *_parts_of(each))}
    kept = {str(part) for path, _ in found for part in path}
    keys = {str(part).lower() for path, _ in found for part in path[:-1]}  # of dicts, as a state_dict is one
    optimizers = optimizers_in(found).values()
    stepped = {id(each) for outer in optimizers for each in (outer, *children_of(outer))}
    names: dict[int, str] = {}
    for name, value in variables.items():
        word = name.removeprefix("self.").strip("_").lower()
        if (
            _has_state(value)
            and id(value) not in there
            and not any(word in key or key in word for key in keys)
            and not any(isinstance(value, kind) and mark in kept for kind, mark in _MARKS.items())
            and not _is_around(value, of_app)
            and not (isinstance(value, ReduceLROnPlateau) and id(value.optimizer) not in stepped)
        ):
            names.setdefault(id(value), f"{name} ({type(value).__name__})")
    return [*names.values()]


def _has_state(value: Any) -> bool:
    """Whether an object has a state of its own that nothing else is known to tell of; asks it for nothing."""
    kind = type(value)  # of a proxy, too
    if issubclass(kind, GradScaler):
        return kind.__module__.partition(".")[0] != _OURS and vars(value).get("_scale") is not None
    if issubclass(kind, Module | Optimizer | Tensor | Mapping | type) or kind.__module__.partition(".")[0] == _OURS:
        return False
    if issubclass(kind, LRScheduler) and not issubclass(kind, ReduceLROnPlateau):
        return False  # its optimizer knows it
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def _is_around(value: Any, of_app: list[Any]) -> bool:
    """Whether an object only passes on what is in the app: a loader its sampler, or a job's state its model."""
    ids = {id(each) for each in of_app}
    parts = _parts_of(value)
    own = [part for part in parts if id(part) in ids]
    has_model = any(isinstance(part, Module) for part in own)  # and no averages of it
    return any(map(_has_state, own)) or (has_model and not any(isinstance(part, Tensor) for part in parts))


def _parts_of(value: Any) -> list[Any]:
    """Returns the attributes of an object, and the first entries of it and of these where they are containers."""
    own = [*(attributes_of(value) or ())]
    return [*own, *(part for each in (value, *own) for part in islice(entries_of(each) or (), _MOST_ENTRIES))]


def _modules_beside(variables: Mapping[str, Any], found: Found) -> Iterator[tuple[str, Module]]:
    """Yields the modules with tensors that the app has not, each once."""
    modules = {
        id(each): (name, each) for name, each in reversed([*variables.items()]) if issubclass(type(each), Module)
    }
    held = {id(each) for _, value in found for each in tensors_of(value)} if modules else set()
    left = [(name, each) for name, each in modules.values() if not held.issuperset(map(id, tensors_of(each)))]
    places = {place for _, value in found for each in tensors_of(value) for place in places_of(each)} if left else set()
    for name, module in left:
        if any(not places.issuperset(places_of(each)) for each in tensors_of(module)):
            yield name, module


def _sample_of(module: Module) -> str:
    """Returns some elements of a module."""
    tensors = [each for each in tensors_of(module) if not (each.is_meta or is_lazy(each))][:_SAMPLED_TENSORS]
    rows = [
        local[(0,) * (local.ndim - 1)][:_SAMPLED_ELEMENTS] if local.ndim else local
        for each in tensors
        for local in local_tensors(each)
        if local.numel()
    ]
    return repr([each.detach().tolist() for each in rows])


def _has_changed(before: tuple[ref[Module], str], now: tuple[ref[Module], str]) -> bool:
    return before[0]() is now[0]() and before[1] != now[1]
