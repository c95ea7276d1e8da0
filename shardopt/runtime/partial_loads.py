"""Optimizers that a load has left half loaded: steps and saves are refused until a load is whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.errors import PartialLoadError

_marked: weakref.WeakKeyDictionary[Optimizer, tuple[str, RemovableHandle]] = weakref.WeakKeyDictionary()
"""Those that are marked: by which load, and the hook of their steps."""
_alone: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Those of them that were loaded by themselves, and are whole once they alone are."""


def mark_partial_load(optimizers: Iterable[Optimizer], what: str) -> None:
    """Makes steps and saves of these optimizers raise PartialLoadError, until `unmark_partial_load`."""

    def refuse(*unused: Any) -> None:
        raise _refusal(what)

    for optimizer in optimizers:
        _alone.discard(optimizer)
        if optimizer not in _marked:
            _marked[optimizer] = what, optimizer.register_step_pre_hook(refuse)


def unmark_partial_load(optimizers: Iterable[Optimizer]) -> None:
    """Lets these optimizers, and their parts, be stepped and saved again."""
    for optimizer in _with_parts(optimizers) if _marked else ():
        _unmark(optimizer)


def refuse_partly_loaded(optimizers: Iterable[Optimizer]) -> None:
    """Raises PartialLoadError if one of these optimizers, or a part of one, is marked."""
    for optimizer in _with_parts(optimizers) if _marked else ():
        if optimizer in _marked:
            raise _refusal(_marked[optimizer][0])


def _unmark(optimizer: Optimizer) -> None:
    _alone.discard(optimizer)
    if optimizer in _marked:
        _marked.pop(optimizer)[1].remove()


def _refusal(what: str) -> PartialLoadError:
    return PartialLoadError(f"{what} did not end well, and left this optimizer partly loaded: load it again, whole")


def _with_parts(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """Yields each, and the parts of composites: who loads one by itself, and then the composite, has loaded all."""
    for optimizer in optimizers:
        yield optimizer
        yield from _with_parts(getattr(optimizer, "_children", ()))


@contextmanager
def loading_alone(optimizer: Optimizer) -> Iterator[None]:
    """Marks an optimizer whose load, in the block, fails or is interrupted; a whole one takes such a mark back.

    A mark of a load of more than this optimizer stays, as the rest may not be loaded yet.
    """
    try:
        yield
    except BaseException:
        if optimizer not in _marked:
            mark_partial_load([optimizer], "load_state_dict")
            _alone.add(optimizer)
        raise
    for each in list(_with_parts([optimizer])) if _alone else ():
        if each in _alone:
            _unmark(each)
