"""Calls within calls of one thread, as a signal handler makes them: it runs between any two lines of the main thread.

A save in there may wait for the very call that it has interrupted, or store what half a step has left. So saves, and
what waits for them, look at the stack before they begin. Nothing is marked beforehand: a step pays nothing for this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardopt.errors import CheckpointError, Problem

LOADING, SAVING, WAITING, CHANGING = "a load", "a save", "a call that waits for saves", "a change of averages"

_Function = TypeVar("_Function", bound=Callable[..., Any])
_BACKWARD = torch.autograd.backward.__code__
_known: dict[CodeType, str] = {}


def is_part_of(what: str) -> Callable[[_Function], _Function]:
    """Marks a function as a part of what `refuse_within` is to find under way."""

    def mark(function: _Function) -> _Function:
        _known[function.__code__] = what
        return function

    return mark


def refuse_within(doing: str, app: object = None, but: Collection[str] = ()) -> None:
    """Raises CheckpointError where this thread is in the middle of what is marked, or of the step of an optimizer.

    To be called from the function that may be marked itself, which does not count. Local, and without any waiting.

    Args:
        doing: what is not to begin there.
        app: what is to be saved; a backward counts where an optimizer in it steps within backward.
        but: what it may begin in all the same.
    """
    objects = app.values() if isinstance(app, Mapping) else ()
    in_backward = "a backward" if any(getattr(each, "updates_in_backward", False) for each in objects) else ""
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    within: set[CodeType] = set()
    while frame is not None:
        code = frame.f_code
        found = _known.get(code) or (code is _BACKWARD and in_backward)
        if code.co_name == "step":
            found = _step_in(frame.f_locals, within)
        if found and found not in but:
            problem = Problem(
                doing,
                f"{found} under way in this very thread, which a signal handler has interrupted",
                "a thread that is between two steps",
                "let the handler set a flag, and save after the step where it is set; or pass the signal to Manager as "
                "stop_on=, by which all ranks save after the same step and leave",
            )
            raise CheckpointError(f"{doing} cannot begin in the middle of {found}", [problem])
        within.add(code)
        frame = frame.f_back


def _step_in(names: Any, within: Collection[CodeType]) -> str:
    """Returns what a frame is the step of, by its local names; "" if of nothing.

    Args:
        within: the functions that it has called. In its closure nothing has changed yet.
    """
    stepped, closure = names.get("self"), names.get("closure")
    if isinstance(stepped, LRScheduler):
        return "the step of a schedule"
    if not isinstance(stepped, Optimizer):
        return ""
    call = closure if hasattr(closure, "__code__") else getattr(type(closure), "__call__", None)  # noqa: B004  # its code
    return "" if getattr(call, "__code__", None) in within else "the step of an optimizer"
