"""The entries of containers that a program's objects have as attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module

_VALUES_OF: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    **{each: each.__iter__ for each in (list, tuple, deque)},
}


def entries_of(value: Any) -> Iterator[Any] | None:
    """Returns the entries of a dict, list, tuple or deque; None if this is none, as a proxy of one.

    By the plain classes' own methods: a program's class may do more where it is iterated, as a loader does. Whoever
    does not take the entries at once may meet those that another thread has added, which is an error.
    """
    kind = type(value)  # a weakref.proxy claims to be of another class, whose methods refuse it
    return next((iter(values(value)) for each, values in _VALUES_OF.items() if issubclass(kind, each)), None)


def attributes_of(value: Any) -> Iterator[Any] | None:
    """Returns the attributes of an object of a program's; None if this is a class, a module, a tensor or has none."""
    is_other = isinstance(value, Tensor | Module | ModuleType | type) or not hasattr(value, "__dict__")
    return None if is_other else iter(vars(value).values())
