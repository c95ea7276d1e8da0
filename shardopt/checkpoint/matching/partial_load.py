"""Partial loads: an optimizer that is being loaded refuses to step until it is loaded whole, and errors say how far a
load has come.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.errors import CorruptionError, PartialLoadError

CHANGED_NOTHING = "this load changed nothing"
MAY_HAVE_CHANGED = "the app may be loaded in part, and optimizers in it refuse to step until a load is whole"

_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


def mark_partial_load(optimizers: Iterable[Optimizer], what: str) -> None:
    """Makes `step` of these optimizers raise PartialLoadError, until they are unmarked."""

    def refuse(*unused: Any) -> None:
        raise PartialLoadError(f"{what} did not end well, and left this optimizer partly loaded: load it again, whole")

    for optimizer in optimizers:
        if optimizer not in _hooks:
            _hooks[optimizer] = optimizer.register_step_pre_hook(refuse)


def unmark_partial_load(optimizers: Iterable[Optimizer]) -> None:
    """Lets them step again."""
    for optimizer in optimizers:
        hook = _hooks.pop(optimizer, None)
        if hook is not None:
            hook.remove()


@contextmanager
def damage_told(state: str) -> Iterator[None]:
    """Adds to errors about damage in what state it leaves the app: `CHANGED_NOTHING` or `MAY_HAVE_CHANGED`."""
    try:
        yield
    except CorruptionError as error:
        error.message = f"{error.message}; {state}"
        error.args = (error.message,)
        raise
