"""Optimizers that a load has left half loaded: they refuse to step until a load is whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.errors import PartialLoadError

_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
_alone: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Those of them that were loaded by themselves, and are whole once they alone are."""


def mark_partial_load(optimizers: Iterable[Optimizer], what: str) -> None:
    """Makes `step` of these optimizers raise PartialLoadError, until `unmark_partial_load`."""

    def refuse(*unused: Any) -> None:
        raise PartialLoadError(f"{what} did not end well, and left this optimizer partly loaded: load it again, whole")

    for optimizer in optimizers:
        _alone.discard(optimizer)
        if optimizer not in _hooks:
            _hooks[optimizer] = optimizer.register_step_pre_hook(refuse)


def unmark_partial_load(optimizers: Iterable[Optimizer]) -> None:
    """Lets these optimizers step again."""
    for optimizer in optimizers:
        _alone.discard(optimizer)
        hook = _hooks.pop(optimizer, None)
        if hook is not None:
            hook.remove()


@contextmanager
def loading_alone(optimizer: Optimizer) -> Iterator[None]:
    """Marks an optimizer whose load, in the block, fails or is interrupted; a whole one takes such a mark back.

    A mark of a load of more than this optimizer stays, as the rest may not be loaded yet.
    """
    try:
        yield
    except BaseException:
        if optimizer not in _hooks:
            mark_partial_load([optimizer], "load_state_dict")
            _alone.add(optimizer)
        raise
    if optimizer in _alone:
        unmark_partial_load([optimizer])
