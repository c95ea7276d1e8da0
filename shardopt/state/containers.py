"""The entries of containers, also of those that a program's objects have as attributes, and copies of them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Module

from shardopt.state.state import PerRank, is_stateful, like

MAPPINGS = (dict, Mapping)  # a dict is found at once; to ask an abstract class takes as long as all else of a leaf

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
    """Returns the attributes of an object of a program's; None if this is a class, a module, a tensor or has none.

    Asks the object for nothing: a weak proxy of what is gone has no answer.
    """
    if issubclass(type(value), Tensor | Module | ModuleType | type):
        return None
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return iter(attributes.values())


def shallow(node: Any, seen: set[int]) -> Any:
    """Copies only the containers, so that a load does not change those in the object that gave them.

    A number that stands in two places (schedules share the tensors of rates) is copied where it is met again: what is
    loaded may differ in these places, and one memory cannot take both.
    """
    if isinstance(node, Tensor):
        if type(node) is Tensor and node.ndim == 0:
            if id(node) in seen:
                return node.clone()
            seen.add(id(node))
        return node
    if isinstance(node, MAPPINGS):
        # A copy of a module's state dict keeps what rides on it as an attribute: its version notes.
        copied = copy.copy(node) if isinstance(node, dict) and type(node) is not dict else dict(node)
        for part, child in node.items():
            copied[part] = shallow(child, seen)  # one by one: a Counter's update adds
        return copied
    if isinstance(node, list):
        copied_list = copy.copy(node)
        copied_list[:] = [shallow(child, seen) for child in node]
        return copied_list
    if isinstance(node, set):
        return copy.copy(node)
    if isinstance(node, tuple) and (type(node) is tuple or holds_tensors(node)):
        return like(node, [shallow(child, seen) for child in node])
    return node


def holds_tensors(node: Any) -> bool:
    """Whether it contains a tensor, a per-rank value or a stateful object."""
    if isinstance(node, (Tensor, PerRank, np.ndarray)):
        return True
    if isinstance(node, MAPPINGS):
        return any(map(holds_tensors, node.values())) or is_stateful(node)
    if isinstance(node, list | tuple):
        return any(map(holds_tensors, node))
    return is_stateful(node)
