"""Plain values as typed JSON: what comes back has the exact type of what went in.

    None, bool, str, finite float, |int| < 2**53, list      as JSON has them
    larger int                                              {"int": "<decimal>"}
    inf, -inf, nan                                          {"float": "inf" | "-inf" | "nan"}
    bytes                                                   {"bytes": "<base64>"}
    tuple, set                                              {"tuple": [...]}, {"set": [...]}
    dict with str or int keys, Counter                      {"dict": [[key, value], ...]}, {"counter": ...} likewise
    NumPy scalar, array                                     {"numpy": ["<dtype.str>", shape or null, "<base64>"]}
    tensor (small, on the CPU; within PerRank)              {"tensor": ["float32", shape, "<base64>"]}

A JSON object therefore always has exactly one member, whose name is its type. Anything else is refused by name:
a subclass is not its base, because it would come back as something that it was not.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from shardopt.errors import Problem, StateError

_EXACT_INT = 2**53  # larger ones lose digits in readers that hold numbers as doubles
_DEPTH_LIMIT = 64
_DIGITS_LIMIT = 4096
_REMEDY = (
    "store plain values (None, bool, int, float, str, bytes, list, tuple, set, dict, Counter, NumPy scalars), "
    "tensors, or an object with state_dict and load_state_dict"
)


def encode_value(value: Any, key: str = "value") -> Any:
    """The typed JSON form of `value`.

    Raises:
        StateError: a value within `value` has a type that has no form; `key` and the place within it are named.
    """
    return _encode(value, key, 0)


def _encode(value: Any, key: str, depth: int) -> Any:
    if depth > _DEPTH_LIMIT:
        raise _refused(key, f"a value nested deeper than {_DEPTH_LIMIT}")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if abs(value) < _EXACT_INT else {"int": str(value)} if _short(value) else _too_long(key)
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is str:
        return _text(value, key)
    if kind is list:
        return [_encode(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is tuple:
        return {"tuple": [_encode(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(value)]}
    if kind is set:
        return {"set": sorted((_encode(item, f"{key}{{}}", depth + 1) for item in value), key=repr)}
    if kind is dict or kind is Counter:
        return {"dict" if kind is dict else "counter": [_encode_item(k, v, key, depth) for k, v in value.items()]}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {"numpy": [value.dtype.str, shape, base64.b64encode(value.tobytes()).decode()]}
    if kind is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided:
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(raw).decode()]}
    raise _refused(key, f"a value of type {kind.__module__}.{kind.__qualname__}")


def _short(value: int) -> bool:
    return value.bit_length() < 3 * _DIGITS_LIMIT


def _too_long(key: str) -> Any:
    raise _refused(key, f"an int of more than {3 * _DIGITS_LIMIT} bits")


def _encode_item(k: Any, v: Any, key: str, depth: int) -> list[Any]:
    if type(k) is not str and type(k) is not int:
        raise _refused(f"{key}[{k!r}]", f"a dict key of type {type(k).__qualname__}")
    return [_encode(k, f"{key} (a dict key)", depth + 1), _encode(v, f"{key}[{k!r}]", depth + 1)]


def _text(value: str, key: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refused(key, "a str that is not valid Unicode") from None
    return value


def _refused(key: str, found: str) -> StateError:
    return StateError("a value cannot be stored", [Problem(key, found, "a plain value", _REMEDY)])


def canonical(wire: Any) -> str:
    """A text that is equal for the forms of equal values: the order of a dict's entries does not count in it."""
    return json.dumps(_ordered(wire), sort_keys=True)


def _ordered(wire: Any) -> Any:
    if isinstance(wire, list):
        return [_ordered(item) for item in wire]
    if isinstance(wire, dict):
        ((kind, body),) = wire.items()
        body = _ordered(body)
        return {kind: sorted(body, key=repr) if kind in ("dict", "counter") else body}
    return wire


def decode_value(wire: Any) -> Any:
    """The value that `encode_value` gave the form of.

    Raises:
        StateError: `wire` is not such a form.
    """
    return _decode(wire, 0)


def _decode(wire: Any, depth: int) -> Any:
    if depth > 2 * _DEPTH_LIMIT:
        raise _malformed("nested too deep")
    if wire is None or isinstance(wire, bool | str | int | float):
        return wire
    if isinstance(wire, list):
        return [_decode(item, depth + 1) for item in wire]
    if not isinstance(wire, dict) or len(wire) != 1:
        raise _malformed(f"{str(wire)[:80]}")
    ((kind, body),) = wire.items()
    try:
        return _decode_typed(kind, body, depth)
    except (TypeError, ValueError, IndexError, RuntimeError, AttributeError, OverflowError) as error:
        if isinstance(error, StateError):
            raise
        raise _malformed(f"{kind}: {str(body)[:80]}") from error


def _decode_typed(kind: str, body: Any, depth: int) -> Any:
    if kind == "int" and isinstance(body, str) and len(body) <= _DIGITS_LIMIT:
        return int(body)
    if kind == "float" and body in ("inf", "-inf", "nan"):
        return float(body)
    if kind == "bytes":
        return base64.b64decode(body, validate=True)
    if kind in ("tuple", "set") and isinstance(body, list):
        items = [_decode(item, depth + 1) for item in body]
        return tuple(items) if kind == "tuple" else set(items)
    if kind in ("dict", "counter") and isinstance(body, list):
        pairs = {_dict_key(_decode(k, depth + 1)): _decode(v, depth + 1) for k, v in body}
        return pairs if kind == "dict" else Counter(pairs)
    if kind == "numpy":
        name, shape, raw = body
        dtype = np.dtype(name)
        if dtype.kind in "biufc":
            flat = np.frombuffer(base64.b64decode(raw, validate=True), dtype=dtype)
            return flat[0] if shape is None else flat.reshape(shape).copy()
    if kind == "tensor":
        name, shape, raw = body
        known = getattr(torch, name)
        if isinstance(known, torch.dtype):
            data = bytearray(base64.b64decode(raw, validate=True))
            flat_tensor = torch.frombuffer(data, dtype=known) if data else torch.empty(0, dtype=known)
            return flat_tensor.reshape(shape)
    raise _malformed(f"{kind}: {str(body)[:80]}")


def _dict_key(key: Any) -> str | int:
    if type(key) is not str and type(key) is not int:
        raise _malformed(f"dict key {str(key)[:80]}")
    return key


def _malformed(found: str) -> StateError:
    problem = Problem("value", found, "typed JSON", "the checkpoint is damaged")
    return StateError("a stored value is malformed", [problem])
