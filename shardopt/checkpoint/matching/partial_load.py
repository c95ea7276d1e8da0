"""Optimizers that are being loaded refuse to step until they are loaded whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.errors import PartialLoadError

_marks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


def mark_partial_load(optimizers: Iterable[Optimizer], what: str) -> None:
    """From now on, `step` of these optimizers raises PartialLoadError."""

    def refuse(*unused: Any) -> None:
        raise PartialLoadError(f"{what} did not end well, and left this optimizer partly loaded: load it again, whole")

    for optimizer in optimizers:
        if optimizer not in _marks:
            _marks[optimizer] = optimizer.register_step_pre_hook(refuse)


def unmark_partial_load(optimizers: Iterable[Optimizer]) -> None:
    """Lets them step again."""
    for optimizer in optimizers:
        mark = _marks.pop(optimizer, None)
        if mark is not None:
            mark.remove()
