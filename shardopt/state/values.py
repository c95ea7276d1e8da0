"""Encodes plain values as typed JSON; decoding gives back the exact types.

    None, bool, str, finite float, |int| < 2**53, list      as JSON has them
    larger int                                              {"int": "<decimal>"}, from 2**8192 on "0x<hexadecimal>"
    inf, -inf, nan                                          {"float": "inf" | "-inf" | "nan"}
    bytes                                                   {"bytes": "<base64>"}
    tuple, set                                              {"tuple": [...]}, {"set": [...]}
    dict with str or int keys, Counter                      {"dict": [[key, value], ...]}, {"counter": ...} likewise
    NumPy scalar, array                                     {"numpy": ["<dtype.str>", shape or null, "<base64>"]}
    tensor (small, on the CPU; within PerRank, options)     {"tensor": ["float32", shape, "<base64>"]}

A JSON object therefore always has exactly one member, whose name is its type. Anything else is refused by name:
a subclass is not its base, because it would come back as something that it was not. (Of two NumPy scalar types that
are one dtype, such as int64 and longlong, the sized one comes back.)
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardopt.errors import Problem, StateError
from shardopt.runtime.late import torch

_EXACT_INT = 2**53  # larger ones lose digits in readers that hold numbers as doubles
_LONG_INT_BITS = 8192  # Python takes no decimals of more than 4300 digits, for which it needs quadratic time
_DECIMAL, _HEXADECIMAL = re.compile(r"-?[0-9]{1,4096}"), re.compile(r"-?0x[0-9a-f]+")
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")  # other names that np.dtype takes have side effects
_DEPTH_LIMIT = 64
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 2**58  # of a stored array: strides are made of all sizes, even where one is 0
_MOST_PER_KEY, _SPARE = 32, 4096  # jumps from place to place; a few are made on average
_SIDE_BY_SIDE = 10  # places of a set that are looked at after one jump
_LARGE_SET = 50_000
_WORD = (1 << 64) - 1
_ANY = "any"
"""The form of an `OnAnyRank` between ranks; it is stored, and comes back, as a bool."""
_REMEDY = (
    "store plain values (None, bool, int, float, str, bytes, list, tuple, set, dict, Counter, NumPy scalars), "
    "tensors, or an object with state_dict and load_state_dict"
)

_GENERATOR = (
    'give an object whose state_dict() returns {{"state": {}}}, and whose load_state_dict(state) does {}; in a '
    "shardopt.data.PerRankState if each rank draws for itself"
)
_GET_SET = _GENERATOR.format("it.get_state()", 'it.set_state(state["state"])')
_INSTEAD = {
    "torch._C.Generator": _GET_SET,
    "numpy.random.mtrand.RandomState": _GET_SET,
    "numpy.random._generator.Generator": _GENERATOR.format(
        "it.bit_generator.state", 'it.bit_generator.state = state["state"]'
    ),
    "random.Random": _GENERATOR.format("it.getstate()", 'it.setstate(state["state"])'),
    "collections.deque": "keep a list in its place, cut by del it[:-maxlen]",
    "collections.OrderedDict": "store dict(it)",
    "torch.dtype": 'store str(it), of which getattr(torch, name.removeprefix("torch.")) makes it again',
}


@dataclass(frozen=True, slots=True)
class OnAnyRank:
    """A fact that not all ranks know; within a plain value it stands for whether it is so on any rank.

    It is stored as a plain bool.
    """

    value: bool


@functools.cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    """Returns, by name, the dtypes of torch whose tensors can be encoded."""
    dtypes = (getattr(torch, name) for name in dir(torch))
    found = ((str(dtype).removeprefix("torch."), dtype) for dtype in dtypes if isinstance(dtype, torch.dtype))
    return {name: dtype for name, dtype in found if not re.match(r"q|bits", name)}


def encode_value(value: Any, key: str = "value", depth: int = 0) -> Any:
    """Encodes a value as typed JSON.

    Args:
        depth: in how many others it is.

    Raises:
        StateError: a value within `value` has a type that has no form; `key` and the place within it are named.
    """
    if depth > _DEPTH_LIMIT:
        raise _refused(key, f"a value nested deeper than {_DEPTH_LIMIT}")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        if abs(value) < _EXACT_INT:
            return value
        return {"int": str(value) if value.bit_length() <= _LONG_INT_BITS else hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is str:
        return _text(value, key)
    if kind is list:
        return [encode_value(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [encode_value(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(value)]}
    if kind is dict or kind is Counter:
        return {"dict" if kind is dict else "counter": [_encode_item(k, v, key, depth) for k, v in value.items()]}
    return _encode_rare(value, key, depth)


def _encode_rare(value: Any, key: str, depth: int) -> Any:
    """Encodes a value of a type that groups and counters do not have."""
    kind = type(value)
    if kind is OnAnyRank:
        return {_ANY: value.value}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is set:
        return {"set": sorted((encode_value(item, f"{key}{{}}", depth + 1) for item in value), key=repr)}
    if _is_numpy(value):
        shape = list(value.shape) if kind is np.ndarray else None
        return {"numpy": [value.dtype.str, shape, base64.b64encode(value.tobytes()).decode()]}
    is_tensor = kind.__name__ == "Tensor" and kind is torch.Tensor  # torch is not imported to find out
    if is_tensor and value.device.type == "cpu" and value.layout == torch.strided:
        name = str(value.dtype).removeprefix("torch.")
        if name in _torch_dtypes():
            plain = value.detach().resolve_conj().resolve_neg().contiguous()
            raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
            return {"tensor": [name, list(value.shape), base64.b64encode(raw).decode()]}
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise _refused(key, f"a value of type {name}", _INSTEAD.get(name, _REMEDY))


def _is_numpy(value: Any) -> bool:
    """Whether it is a NumPy array or scalar whose dtype can be restored from only its name."""
    if type(value) is not np.ndarray and not (isinstance(value, np.generic) and type(value).__module__ == "numpy"):
        return False
    name = value.dtype.str
    return bool(_NUMPY_DTYPE.fullmatch(name)) and np.dtype(name) == value.dtype


def _encode_item(k: Any, v: Any, key: str, depth: int) -> list[Any]:
    if type(k) is not str and type(k) is not int:
        raise _refused(f"{key}[{k!r}]", f"a dict key of type {type(k).__qualname__}")
    return [encode_value(k, f"{key} (a dict key)", depth + 1), encode_value(v, f"{key}[{k!r}]", depth + 1)]


def _text(value: str, key: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refused(key, "a str that is not valid Unicode") from None
    return value


def _refused(key: str, actual: str, remedy: str = _REMEDY) -> StateError:
    return StateError("a value cannot be stored", [Problem(key, actual, "a plain value", remedy)])


def united(wires: Sequence[Any]) -> Any:
    """Merges the forms that ranks have of one value, which differ only in what each knows of an `OnAnyRank`."""
    first = wires[0]
    if isinstance(first, list):
        return [united(items) for items in zip(*wires, strict=True)]
    if not isinstance(first, dict):
        return first
    ((kind, body),) = first.items()
    bodies = [wire[kind] for wire in wires]
    if kind == _ANY:
        return any(bodies)
    if kind in ("dict", "counter"):
        others = [{canonical(k): v for k, v in entries} for entries in bodies]
        return {kind: [[k, united([by_key[canonical(k)] for by_key in others])] for k, _ in body]}
    return {kind: united(bodies)} if kind == "tuple" else first


def canonical(wire: Any) -> str:
    """Returns a text that is equal for forms of equal values.

    It depends neither on the order of a dict's entries, nor on what a rank knows of an `OnAnyRank`.
    """
    return json.dumps(_ordered(wire), sort_keys=True)


def _ordered(wire: Any) -> Any:
    if isinstance(wire, list):
        return [_ordered(item) for item in wire]
    if isinstance(wire, dict):
        ((kind, body),) = wire.items()
        if kind == _ANY:
            return {kind: None}
        body = _ordered(body)
        return {kind: sorted(body, key=repr) if kind in ("dict", "counter") else body}
    return wire


def decode_value(wire: Any, depth: int = 0) -> Any:
    """Decodes a value from the form that `encode_value` made.

    Args:
        depth: in how many others it is.

    Raises:
        StateError: `wire` is not such a form.
    """
    if depth > 2 * _DEPTH_LIMIT:
        raise _malformed("a value nested too deep")
    if isinstance(wire, str):
        return wire if wire.isascii() else _text(wire, "value")
    if wire is None or isinstance(wire, bool | int | float):
        return wire
    if isinstance(wire, list):
        return [decode_value(item, depth + 1) for item in wire]
    if not isinstance(wire, dict) or len(wire) != 1:
        raise _malformed("an object that has not one member")
    ((kind, body),) = wire.items()
    try:
        return _decode_typed(kind, body, depth)
    except StateError:
        raise
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise _malformed(f"a malformed {kind[:20]!r}") from error


def _decode_typed(kind: str, body: Any, depth: int) -> Any:
    if kind == "int" and (_DECIMAL.fullmatch(body) or _HEXADECIMAL.fullmatch(body)):
        return int(body, 0 if "x" in body else 10)
    if kind == "float" and body in ("inf", "-inf", "nan"):
        return float(body)
    if kind == "bytes":
        return base64.b64decode(body, validate=True)
    if kind == _ANY and isinstance(body, bool):
        return body
    if kind in ("tuple", "set") and isinstance(body, list):
        items = [decode_value(item, depth + 1) for item in body]
        if kind == "set":
            refuse_slow_keys(items, is_set=True)
        return tuple(items) if kind == "tuple" else set(items)
    if kind in ("dict", "counter") and isinstance(body, list):
        keys = [decode_value(k, depth + 1) for k, _ in body]
        if not all(type(key) is str for key in keys):
            other = [type(key).__name__ for key in keys if type(key) is not str and type(key) is not int]
            if other:
                raise _malformed(f"a dict key of type {other[0]}")
            refuse_slow_keys(keys)
        pairs = dict(zip(keys, (decode_value(v, depth + 1) for _, v in body), strict=True))
        return pairs if kind == "dict" else Counter(pairs)
    return _decode_array(kind, body)


def _decode_array(kind: str, body: Any) -> Any:
    """Decodes a value that holds numbers: a NumPy scalar, array, or tensor; other forms are unknown."""
    if kind == "numpy":
        name, shape, raw = body
        if _NUMPY_DTYPE.fullmatch(name):
            flat = np.frombuffer(base64.b64decode(raw, validate=True), dtype=np.dtype(name))
            array = flat.reshape(() if shape is None else _sizes(shape))
            return array[()] if shape is None else array.copy()
    if kind == "tensor":
        name, shape, raw = body
        data, dtype = bytearray(base64.b64decode(raw, validate=True)), _torch_dtypes()[name]
        flat_tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
        return flat_tensor.reshape(_sizes(shape))
    raise _malformed(f"a malformed or unknown {kind[:20]!r}")


def _sizes(shape: Any) -> tuple[int, ...]:
    known = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
    if not known or math.prod(max(size, 1) for size in shape) >= _MOST_ELEMENTS:
        raise _malformed("a malformed shape")
    return tuple(shape)


def _malformed(actual: str) -> StateError:
    problem = Problem("value", actual, "typed JSON", "the checkpoint is damaged")
    return StateError("a stored value is malformed", [problem], code="damaged")


class KeyProbes:
    """The slots where CPython looks for the keys of a growing dict or set, to detect keys chosen to be slow.

    Hashes of texts are salted; those of ints, and of tuples of them, anyone can work out, and choose keys such that
    each comes upon all the places that those before it have taken. Then n keys take a time of n². Here the places are
    walked without them, and counted.

    Args:
        is_set: which of the two; their rules differ.
        keys: that are in it already.
    """

    def __init__(self, is_set: bool = False, keys: Iterable[Any] = ()) -> None:
        self._is_set = is_set
        self._slots: list[int | None] = [None] * 8
        self._used, self._left = 0, _SPARE
        self.add(keys)

    def add(self, keys: Iterable[Any]) -> None:
        """Adds keys, of which texts do not count. Raises ValueError if they were chosen to be slow."""
        for key in keys:
            if type(key) is str or type(key) is bytes:
                continue
            hashed = hash(key) & _WORD
            if self._slots[hashed & (len(self._slots) - 1)] == hashed:
                continue  # found at once
            self._left += _MOST_PER_KEY
            if self._insert(hashed):
                self._used += 1
                self._grow()

    def _insert(self, hashed: int) -> bool:
        """Puts a hash into its slot; returns whether it is new."""
        slots, mask, width = self._slots, len(self._slots) - 1, _SIDE_BY_SIDE if self._is_set else 1
        at, perturb = hashed & mask, hashed
        for jump in range(self._left):
            for place in range(at, at + (width if at + width <= mask + 1 else 1)) if self._is_set else (at,):
                found = slots[place]
                if found is None or found == hashed:
                    self._left -= jump
                    slots[place] = hashed
                    return found is None
            perturb >>= 5
            at = (5 * at + perturb + 1) & mask
        raise ValueError("keys that were chosen to collide")

    def _grow(self) -> None:
        size = len(self._slots)
        if self._is_set:
            if self._used * 5 < (size - 1) * 3:
                return
            least = 1 + self._used * (2 if self._used > _LARGE_SET else 4)
        else:
            if self._used < 2 * size // 3:
                return
            least = 3 * self._used
        before = self._slots
        self._slots = [None] * max(1 << (least - 1).bit_length(), 8)
        for hashed in before:
            if hashed is not None:
                self._left += _MOST_PER_KEY
                self._insert(hashed)


def refuse_slow_keys(keys: list[Any], is_set: bool = False) -> None:
    """Raises ValueError if all keys of a dict or set were chosen to collide."""
    if any(type(key) is not str and key != number for number, key in enumerate(keys)):
        KeyProbes(is_set, keys)
