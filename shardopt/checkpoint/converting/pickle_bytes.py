"""Writes pickles of plain values and tensors: only what `torch.load(weights_only=True)` accepts. Protocol 2, as torch.

Python's own pickler writes them, after a look at each value: all are of types that are known, and of equal values the
bytes are equal in every process.
"""

from __future__ import annotations

import codecs
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype
from shardopt.errors import Problem, StateError

_DEPTH_LIMIT = 200
_MOST_INT_BYTES = 255
_LEGACY_STORAGES = {
    **{"float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "bool": "Bool"},
    **{"int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte"},
    **{"complex128": "ComplexDouble", "complex64": "ComplexFloat"},
}
"""Dtypes whose storages have their own class in torch's pickles. All others use byte storage, and name the dtype."""


class _Call:
    """The call of a function, which is pickled in the place of a value."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _Storage(NamedTuple):
    """A storage, which is pickled as a reference: its class, its record, and how many items it has."""

    kind: type
    record: str
    items: int


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", value.kind, value.record, "cpu", value.items) if type(value) is _Storage else None


class StoredElsewhere(NamedTuple):
    """A contiguous tensor whose bytes are a record of the pickle's archive.

    Args:
        record: name of the record, under "data/".
    """

    record: str
    dtype: Dtype
    shape: tuple[int, ...]

    def rebuilt(self) -> _Call:
        """Returns the call by which torch makes it."""
        legacy, numel = _LEGACY_STORAGES.get(self.dtype.name), prod(self.shape)
        if legacy:
            storage = _Storage(getattr(torch, f"{legacy}Storage"), self.record, numel)
            return _Call(torch._utils._rebuild_tensor_v2, storage, *self._form())
        storage = _Storage(torch.UntypedStorage, self.record, numel * self.dtype.itemsize)
        return _Call(torch._utils._rebuild_tensor_v3, storage, *self._form(), getattr(torch, self.dtype.name))

    def _form(self) -> tuple[Any, ...]:
        """Returns offset, shape, strides, whether a gradient is required, and hooks."""
        strides = torch.empty(self.shape, device="meta").stride()
        return 0, (*self.shape,), strides, False, OrderedDict()


def pickle_of(value: Any, key: str, record_of: Callable[[Tensor], str]) -> bytes:
    """Returns the pickle of a value.

    Args:
        key: of the value, for errors.
        record_of: keeps a tensor that stands among plain values; returns the name of its record.

    Raises:
        StateError: something in it has no form that `weights_only` would take: a NumPy scalar, say.
    """
    data = io.BytesIO()
    _Pickler(data, protocol=2).dump(_Plain(key, record_of).plain(value, "", 0))
    return data.getvalue()


class _Plain:
    """Replaces what would be pickled otherwise than torch reads it, or otherwise in another process."""

    def __init__(self, key: str, record_of: Callable[[Tensor], str]) -> None:
        self._key, self._record_of = key, record_of
        self._texts: dict[str, str] = {}  # a pickle says which texts are one object

    def plain(self, value: Any, place: str, depth: int) -> Any:
        """Returns what is pickled in the place of a value. Raises StateError."""
        kind = type(value)
        if depth > _DEPTH_LIMIT:
            raise self._refused(place, f"a value nested deeper than {_DEPTH_LIMIT}")
        if kind is int and value.bit_length() // 8 >= _MOST_INT_BYTES:
            raise self._refused(place, f"an integer of {value.bit_length()} bits")
        if kind in (type(None), bool, int, float):
            return value
        if kind is str:
            return self._texts.setdefault(value, value)
        if kind is bytes:  # not Python's way, which is another one for empty bytes
            return _Call(codecs.encode, self.plain(value.decode("latin1"), place, depth), "latin1")
        if kind is Tensor and value.device.type == "cpu" and value.layout == torch.strided:
            dtype = Dtype(str(value.dtype).removeprefix("torch."), value.itemsize, None)
            value = StoredElsewhere(self._record_of(value), dtype, tuple(value.shape))
        if isinstance(value, StoredElsewhere):
            return value.rebuilt()
        return self._container(value, place, depth)

    def _container(self, value: Any, place: str, depth: int) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return kind([self.plain(each, f"{place}[{i}]", depth + 1) for i, each in enumerate(value)])
        if kind is dict:
            return {
                self.plain(name, f"{place} (a key)", depth + 1): self.plain(each, f"{place}[{name!r}]", depth + 1)
                for name, each in value.items()
            }
        if kind is set:
            return _Call(set, self.plain(sorted(value, key=repr), place, depth + 1))
        if kind is Counter:
            return _Call(Counter, self.plain(dict(value), place, depth + 1))
        raise self._refused(place, f"a value of type {kind.__module__}.{kind.__qualname__}")

    def _refused(self, place: str, found: str) -> StateError:
        required = "plain values (None, bool, int, float, str, bytes, list, tuple, set, dict, Counter) and tensors"
        problem = Problem(self._key + place, found, required, "leave it out with skip=")
        return StateError("a value cannot be written in torch's format", [problem], code="cannot-convert")
