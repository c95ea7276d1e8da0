"""What goes along with an optimizer and has state of its own: averages, loss scalers, plateau schedules.

An optimizer does not know them. A save looks here whether one of them is not in the app.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from shardopt.runtime.torch_private import remove_step_hooks, running_hooks

_of: WeakKeyDictionary[Optimizer, WeakKeyDictionary[Any, str]] = WeakKeyDictionary()


def note_companion(optimizer: Optimizer, companion: Any, mark: str) -> None:
    """Notes what goes along with an optimizer from now on.

    Args:
        mark: a name in its state, by which that is found within another object's.
    """
    _of.setdefault(optimizer, WeakKeyDictionary())[companion] = mark


def step_along(
    optimizer: Optimizer, companion: Any, mark: str, before: Callable[..., Any], after: Callable[..., Any]
) -> Callable[[], None]:
    """Calls a companion before and after each step of an optimizer, once; returns a function that ends this."""
    end = partial(part, optimizer, companion, before, after)
    end()
    note_companion(optimizer, companion, mark)
    running_hooks(optimizer).register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return end


def are_noted() -> bool:
    """Whether anything goes along with any optimizer."""
    return bool(_of)


def part(optimizer: Optimizer, companion: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Ends that a companion is called before and after each step of an optimizer."""
    remove_step_hooks(optimizer, before, after)
    _of.get(optimizer, WeakKeyDictionary[Any, str]()).pop(companion, None)


def companions_of(optimizer: Optimizer) -> dict[Any, str]:
    """Returns what goes along with an optimizer, with a name in the state of each."""
    return dict(_of.get(optimizer, {}))
