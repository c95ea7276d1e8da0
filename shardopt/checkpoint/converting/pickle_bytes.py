"""Writes pickles of plain values opcode by opcode: only what `torch.load(weights_only=True)` accepts.

Nothing here can run or be told to run anything: there are plain values, tensors, and what other formats write for their
own records (`Global`, `Call`, `Instance`), which this package never makes itself. Protocol 2, as torch writes.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.format.constants import Dtype
from shardopt.errors import Problem, StateError

_DEPTH_LIMIT = 200
_LEGACY_STORAGES = {
    **{"float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "bool": "Bool"},
    **{"int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte"},
    **{"complex128": "ComplexDouble", "complex64": "ComplexFloat"},
}
"""Dtypes whose storages have their own class in torch's pickles. All others use byte storage, and name the dtype."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function of a module, by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a function with these arguments."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object made without `__init__`: its class, and its attributes or the argument of its `__setstate__`."""

    kind: Global
    state: Mapping[str, Any] | tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict as pairs, for keys that cannot be dict keys here."""

    items: Sequence[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class StoredElsewhere:
    """A contiguous tensor whose bytes are a record of the pickle's archive.

    Args:
        record: name of the record, under "data/".
    """

    record: str
    dtype: Dtype
    shape: tuple[int, ...]


def pickle_of(value: Any, key: str, record_of: Callable[[Tensor], str]) -> bytes:
    """Returns the pickle of a value.

    Args:
        key: of the value, for errors.
        record_of: keeps a tensor that stands among plain values; returns the name of its record.

    Raises:
        StateError: something in it has no form that `weights_only` would take: a NumPy scalar, say.
    """
    writer = _Writer(key, record_of)
    writer.put(value, "", 0)
    return b"\x80\x02" + b"".join(writer.codes) + b"."


def size_of(numbers: tuple[int, ...]) -> Call:
    """Returns the pickled form of a torch.Size."""
    return Call(Global("torch", "Size"), (tuple(numbers),))


class _Writer:
    def __init__(self, key: str, record_of: Callable[[Tensor], str]) -> None:
        self.codes: list[bytes] = []
        self._key, self._record_of = key, record_of
        self._globals: dict[Global, int] = {}

    def put(self, value: Any, place: str, depth: int) -> None:
        if depth > _DEPTH_LIMIT:
            raise self._refused(place, f"a value nested deeper than {_DEPTH_LIMIT}")
        put = _PUT.get(type(value))
        if put is None:
            raise self._refused(place, f"a value of type {type(value).__module__}.{type(value).__qualname__}")
        put(self, value, place, depth)

    def _items(self, value: Sequence[Any], place: str, depth: int) -> None:
        self.codes.append(b"(" if type(value) is tuple else b"](")
        for i, item in enumerate(value):
            self.put(item, f"{place}[{i}]", depth + 1)
        self.codes.append(b"t" if type(value) is tuple else b"e")

    def _pairs(self, value: Mapping[Any, Any] | Pairs, place: str, depth: int) -> None:
        self.codes.append(b"}(")
        for name, item in value.items if isinstance(value, Pairs) else value.items():
            self.put(name, f"{place} (a key)", depth + 1)
            self.put(item, f"{place}[{name!r}]", depth + 1)
        self.codes.append(b"u")

    def _instance(self, value: Instance, place: str, depth: int) -> None:
        self._global(value.kind)
        self.codes.append(b")\x81")
        if value.state:
            self.put(value.state, place, depth + 1)
            self.codes.append(b"b")

    def _int(self, value: int, place: str) -> bytes:
        if 0 <= value < 256:
            return b"K" + bytes([value])
        if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(digits) > 255:
            raise self._refused(place, f"an integer of {value.bit_length()} bits")
        return b"\x8a" + bytes([len(digits)]) + digits

    def _global(self, which: Global) -> None:
        number = self._globals.get(which)
        if number is not None:
            self.codes.append(b"j" + struct.pack("<I", number))
            return
        number = self._globals[which] = len(self._globals)
        self.codes.append(f"c{which.module}\n{which.name}\n".encode() + b"r" + struct.pack("<I", number))

    def _call(self, function: Global, arguments: tuple[Any, ...], place: str, depth: int) -> None:
        self._global(function)
        self.put(arguments, place, depth + 1)
        self.codes.append(b"R")

    def _tensor(self, value: Tensor, place: str, depth: int) -> None:
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise self._refused(place, "a value of type torch.Tensor")
        self._stored_elsewhere(_stored(value, self._record_of(value)), place, depth)

    def _stored_elsewhere(self, tensor: StoredElsewhere, place: str, depth: int) -> None:
        legacy = _LEGACY_STORAGES.get(tensor.dtype.name)
        numel, strides = prod(tensor.shape), _strides(tensor.shape)
        kind = Global("torch", f"{legacy}Storage") if legacy else Global("torch.storage", "UntypedStorage")
        items = numel if legacy else numel * tensor.dtype.itemsize
        rebuild = Global("torch._utils", "_rebuild_tensor_v2" if legacy else "_rebuild_tensor_v3")
        self._global(rebuild)
        self.codes.append(b"(")
        self.put(("storage", kind, tensor.record, "cpu", items), place, depth + 1)
        self.codes.append(b"Q")
        no_hooks = Call(Global("collections", "OrderedDict"), ())
        for item in (0, tensor.shape, strides, False, no_hooks):
            self.put(item, place, depth + 1)
        if not legacy:
            self._global(Global("torch", tensor.dtype.name))
        self.codes.append(b"tR")

    def _refused(self, place: str, found: str) -> StateError:
        required = "plain values (None, bool, int, float, str, bytes, list, tuple, set, dict, Counter) and tensors"
        problem = Problem(self._key + place, found, required, "leave it out with skip=")
        return StateError("a value cannot be written in torch's format", [problem], code="cannot-convert")


_PUT: dict[type, Callable[[_Writer, Any, str, int], None]] = {
    type(None): lambda writer, *_: writer.codes.append(b"N"),
    bool: lambda writer, value, *_: writer.codes.append(b"\x88" if value else b"\x89"),
    int: lambda writer, value, place, _: writer.codes.append(writer._int(value, place)),
    float: lambda writer, value, *_: writer.codes.append(b"G" + struct.pack(">d", value)),
    str: lambda writer, value, *_: writer.codes.append(_text(value)),
    bytes: lambda writer, value, *at: writer._call(
        Global("_codecs", "encode"), (value.decode("latin1"), "latin1"), *at
    ),
    list: _Writer._items,
    tuple: _Writer._items,
    dict: _Writer._pairs,
    Pairs: _Writer._pairs,
    Counter: lambda writer, value, *at: writer._call(Global("collections", "Counter"), (dict(value),), *at),
    set: lambda writer, value, *at: writer._call(Global("__builtin__", "set"), (sorted(value, key=repr),), *at),
    Tensor: _Writer._tensor,
    StoredElsewhere: _Writer._stored_elsewhere,
    Global: lambda writer, value, *_: writer._global(value),
    Call: lambda writer, value, *at: writer._call(value.function, value.arguments, *at),
    Instance: _Writer._instance,
}
"""Writes a value, by its type; values of other types cannot be written."""


def _stored(tensor: Tensor, record: str) -> StoredElsewhere:
    from_dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredElsewhere(record, Dtype(from_dtype, tensor.itemsize, None), tuple(tensor.shape))


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, as torch computes them."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
