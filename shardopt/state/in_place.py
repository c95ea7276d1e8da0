"""Puts loaded plain values into the containers that an app has: the program may have these by other names, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import torch

from shardopt.errors import Problem, StateError
from shardopt.state.paths import Path, join
from shardopt.state.values import canonical, encode_value


def put(node: Any, replace: Callable[[Any], None], filled: dict[int, Any], value: Any) -> None:
    """Puts a value where a node is, by `replace`; arguments as of `filled_with`."""
    replace(filled_with(node, value, filled))


def filled_with(node: Any, value: Any, filled: dict[int, Any]) -> Any:
    """Returns the node itself, filled with the entries of `value`, if they are of one kind; else `value`.

    So are lists, sets, and dicts within each other, also in tuples. A dict of the app of any class takes those of a
    dict, but a Counter those of a Counter.

    Args:
        filled: by its id, what a node was filled with. One that stands in two places cannot take two values.
    """
    if node is value:
        return node
    if type(node) is type(value) is tuple:
        return tuple(filled_with(*pair, filled) for pair in zip(node, value, strict=False)) + value[len(node) :]
    is_mapping = isinstance(node, MutableMapping) and isinstance(value, dict)
    if is_mapping and isinstance(node, Counter) != isinstance(value, Counter):
        return value
    if not (is_mapping or any(isinstance(node, kind) and isinstance(value, kind) for kind in (list, set))):
        return value
    other = filled.setdefault(id(node), value)
    if other is not value and canonical(encode_value(other)) != canonical(encode_value(value)):
        return value
    if isinstance(node, list):
        node[:] = [filled_with(*pair, filled) for pair in zip(node, value, strict=False)] + value[len(node) :]
        return node
    if is_mapping:
        value = {key: filled_with(node.get(key), each, filled) for key, each in value.items()}
    node.clear()
    node.update(value)
    return node


def as_tensor(array: np.ndarray[Any, Any], path: Path) -> torch.Tensor:
    """Returns a tensor that shares the array's memory, so that loading in place reaches the array."""
    if isinstance(array, np.ma.MaskedArray):
        actual, required = "a masked array", "a plain one"
    elif not array.flags.writeable:
        actual, required = "a read-only NumPy array", "one that a load can write to"
    else:
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError):
            actual = f"a NumPy array of {array.dtype} with strides {array.strides}"
            required = "a dtype that torch has, in this machine's byte order, and no negative strides"
    raise StateError("an array cannot be stored", [Problem(join(path), actual, required, "convert or copy it")])
