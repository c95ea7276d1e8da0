"""Optimizers that trainers of other libraries have wrapped in classes of their own."""

from __future__ import annotations

from functools import cache

import torch
from torch.optim import Optimizer

from shardopt.errors import Problem, StateError
from shardopt.state.paths import Path, join
from shardopt.state.state import Stateful


def unwrapped(node: Stateful, path: Path = ()) -> Stateful:
    """Returns the optimizer inside the class that another library's trainer has put around it.

    Such a wrapper (of Accelerate, Lightning, Fabric) is an Optimizer to isinstance, but none of its constructors has
    run: so it has no place for hooks, by which a load keeps an optimizer that is half loaded from stepping.

    Raises:
        StateError: it is not one optimizer that it wraps.
    """
    while isinstance(node, Optimizer) and not is_constructed(node):
        inner = list({id(each): each for each in vars(node).values() if isinstance(each, Optimizer)}.values())
        if len(inner) != 1:
            actual = f"a {type(node).__module__}.{type(node).__qualname__}, whose constructor has not run torch's"
            required = f"an optimizer of torch's classes, or what wraps one (found {len(inner)} in it)"
            remedy = "pass the optimizer itself, or save it by its library"
            problem = Problem(join(path) or "app", actual, required, remedy)
            raise StateError("what stands for an optimizer cannot be saved and loaded", [problem])
        node = inner[0]
    return node


def is_constructed(optimizer: Optimizer) -> bool:
    """Whether the constructor of torch's Optimizer has run, without which it takes no hooks."""
    return not _hooks_of_optimizers().isdisjoint(vars(optimizer))


@cache
def _hooks_of_optimizers() -> frozenset[str]:
    """Returns the names of the attributes in which torch's optimizers keep their hooks."""
    some = torch.optim.SGD([torch.empty(0, device="cpu")])
    return frozenset(name for name in vars(some) if name.endswith("hooks"))
