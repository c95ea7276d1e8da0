"""Stand-ins for the globals of plain values that `state/values.py` can store: Python's own, and NumPy's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from shardopt.checkpoint.format.constants import MOST_DIMENSIONS, all_sizes, is_shape
from shardopt.checkpoint.sources.pickled.bounds import Keys
from shardopt.checkpoint.sources.pickled.stand_ins import ByteArray, StandIn, Unknown

_NUMPY_NAME = re.compile(r"[biufc]\d{1,2}")  # other names that np.dtype takes have side effects
_BYTE_ORDERS = ("<", ">", "|", "=")


def _dict(items: Any = ()) -> dict[Any, Any]:
    """Stands for OrderedDict, as any dict keeps its order. `items` are pairs, or a dict."""
    if type(items) is dict:
        return dict(items)
    if type(items) not in (list, tuple):
        raise TypeError("entries that are none")
    pairs = [(key, value) for key, value in items]
    Keys(len(pairs)).check([key for key, _ in pairs], {})
    return dict(pairs)


def _dict_with_default(_default: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _dict(items)


def _counter(counts: Any = None) -> Counter[Any]:
    if type(counts) is not dict:
        raise TypeError("counts that are no dict")
    made: Counter[Any] = Counter()
    dict.update(made, counts)
    return made


def _set(items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise TypeError("items that are no list")
    Keys(len(items)).check(items, set())
    return set(items)


def _bytes_of_text(text: Any, encoding: Any) -> bytes:
    """Stands for `_codecs.encode`, by which protocol 2 pickles bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes that are no text in Latin 1")
    return text.encode("latin-1")


def _empty_bytes(*arguments: Any) -> bytes:
    """Stands for `bytes`, by which protocol 2 pickles empty bytes."""
    if arguments:
        raise TypeError("bytes with arguments")
    return b""


class _NumpyDtype(StandIn):
    """A dtype of NumPy, whose byte order comes as state. `kind` is such as "f8"; None if it cannot be stored."""

    __slots__ = ("kind", "order")

    def __init__(self, kind: Any, _align: Any = False, _copy: Any = False) -> None:
        super().__init__("numpy.dtype")
        if type(kind) is not str:
            raise TypeError("a dtype without a name")
        self.kind = kind if _NUMPY_NAME.fullmatch(kind) else None
        self.order = "="

    def build(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 2 or state[1] not in _BYTE_ORDERS:
            raise TypeError("a dtype without a byte order")
        if any(part is not None for part in state[2:5]):  # parts of a structure
            self.kind = None
        self.order = state[1]

    def dtype(self) -> np.dtype[Any] | None:
        if self.kind is None:
            return None
        order = "|" if self.kind in ("b1", "i1", "u1") else self.order
        return np.dtype(order + self.kind)


class _Array(StandIn):
    """An array under construction, whose contents all come as state."""

    __slots__ = ("array",)

    def __init__(self, kind: Any) -> None:
        super().__init__(kind.name if isinstance(kind, Unknown) else "numpy.ndarray")
        self.array: Any = self

    def build(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise TypeError("an array without its state")
        _, shape, dtype, is_fortran, data = state
        if self.name == _ARRAY_CLASS:  # others have attributes, or are more than their bytes
            self.array = _filled(data, dtype, shape, "F" if is_fortran else "C")

    def settled(self) -> Any:
        return self.array


def _empty_array(kind: Any, _shape: Any, _type: Any) -> _Array:
    """Stands for NumPy's `_reconstruct`."""
    return _Array(kind)


def _filled(data: Any, dtype: Any, shape: Any, order: Any = "C") -> Any:
    """Stands for NumPy's `_frombuffer`."""
    if not isinstance(dtype, _NumpyDtype):
        raise TypeError("an array without a dtype")
    known = dtype.dtype()
    data = data.data if isinstance(data, ByteArray) else data
    if known is None or type(data) is not bytes:
        return Unknown(_ARRAY_CLASS)  # of Python's objects, texts, structures
    known_shape = type(shape) is tuple and len(shape) <= MOST_DIMENSIONS // 2 and all_sizes(shape) and is_shape(shape)
    if not known_shape or order not in ("C", "F"):
        raise TypeError("an array without a shape")
    if prod(shape) * known.itemsize != len(data):
        raise ValueError("an array of another size")
    flat = np.frombuffer(data, dtype=known) if data else np.empty(0, dtype=known)
    return np.array(flat.reshape(shape, order=order), order=order)


def _scalar(dtype: Any, data: Any = None) -> Any:
    if not isinstance(dtype, _NumpyDtype):
        raise TypeError("a scalar without a dtype")
    known = dtype.dtype()
    if known is None:
        return Unknown("numpy.generic")
    if type(data) is not bytes or len(data) != known.itemsize:
        raise ValueError("a scalar of another size")
    return np.frombuffer(data, dtype=known)[0]


_ARRAY_CLASS = "numpy.ndarray"
_NUMPY_FUNCTIONS = {
    "multiarray.scalar": _scalar,
    "multiarray._reconstruct": _empty_array,
    "numeric._frombuffer": _filled,
}

PLAIN_GLOBALS: Mapping[str, Callable[..., Any] | Any] = {
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _dict_with_default,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.bytes": _empty_bytes,
    "_codecs.encode": _bytes_of_text,
    "numpy.dtype": _NumpyDtype,
    **{f"numpy.{core}.{name}": made for core in ("_core", "core") for name, made in _NUMPY_FUNCTIONS.items()},
}
"""Stand-ins for the globals that pickles of plain values contain."""
