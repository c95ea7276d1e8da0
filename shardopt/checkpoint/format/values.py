"""Encodes paths and plain values as members of a JSON object; a value that many keys share, once.

    {"values": {key: [path, value]}, "shared_values": [value, ...], "shared": {key: [path, number]}}

Values count as the same where they are one object; that is kept on the way there and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardopt.checkpoint.format.constants import read_size
from shardopt.state.paths import Index, Path
from shardopt.state.values import decode_value, encode_value

Values = Mapping[str, tuple[Path, Any]]
"""Plain values by key, with their paths."""

_SHARED = {"dict", "counter"}  # the forms of values that are stored once for all keys that have one object


def encode_path(key: str, path: Path) -> Any:
    """Encodes a path as JSON: null if it is the key split at its dots, else its parts, with list indices as [index]."""
    if list(path) == key.split("."):
        return None
    return [[int(part)] if isinstance(part, Index) else part for part in path]


def decode_path(key: str, wire: Any) -> Path:
    """Decodes a path that `encode_path` wrote. Raises ValueError if it does not belong to this key."""
    if wire is None:
        return tuple(key.split("."))
    try:
        if ".".join(wire) == key:  # names alone, as nearly all
            return tuple(wire)
    except TypeError:
        pass
    path = tuple(Index(read_size(*part)) if isinstance(part, list) else part for part in wire)
    if not all(type(part) in (str, int, Index) for part in path) or ".".join(map(str, path)) != key:
        raise ValueError(f"a path that is not that of {key!r}")
    return path


def encode_each(values: Values) -> dict[str, tuple[Path, Any]]:
    """Encodes values as typed JSON, each object only once. Raises StateError as `encode_value`."""
    done: dict[int, Any] = {}
    encoded = {}
    for key, (path, value) in values.items():
        if not isinstance(value, dict):
            encoded[key] = path, encode_value(value, key)
            continue
        if id(value) not in done:
            done[id(value)] = encode_value(value, key)
        encoded[key] = path, done[id(value)]
    return encoded


def decode_each(wires: Values) -> dict[str, tuple[Path, Any]]:
    """Decodes values from typed JSON, each form only once; its keys then share the value. Raises StateError."""
    forms = {id(wire): wire for _, wire in wires.values() if isinstance(wire, dict)}
    done = {form: decode_value(wire) for form, wire in forms.items()}
    return {
        key: (path, done[id(wire)] if isinstance(wire, dict) else decode_value(wire))
        for key, (path, wire) in wires.items()
    }


def pack(wires: Values) -> dict[str, Any]:
    """Returns values in typed JSON as members of a JSON object."""
    uses = Counter(id(wire) for _, wire in wires.values() if type(wire) is dict and not _SHARED.isdisjoint(wire))
    numbers: dict[int, int] = {}
    packed: dict[str, Any] = {"values": {}}
    shared_values: list[Any] = []
    shared: dict[str, Any] = {}
    for key in sorted(wires):  # numbers that do not depend on the order of keys
        path, wire = wires[key]
        if uses[id(wire)] > 1:
            number = numbers.setdefault(id(wire), len(numbers))
            if number == len(shared_values):
                shared_values.append(wire)
            shared[key] = [encode_path(key, path), number]
        else:
            packed["values"][key] = [encode_path(key, path), wire]
    return packed | ({"shared_values": shared_values, "shared": shared} if shared else {})


def unpack(members: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    """Returns the values that `pack` put into the members; keys with equal values share one object.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: they are malformed.
    """
    shared_values = members.get("shared_values", [])
    if not isinstance(shared_values, list):
        raise ValueError("shared values that are no list")
    wires = {key: (decode_path(key, path), wire) for key, (path, wire) in members["values"].items()}
    for key, (path, number) in members.get("shared", {}).items():
        if key in wires or type(number) is not int or number < 0:
            raise ValueError(f"the shared value of {key!r}")
        wires[key] = decode_path(key, path), shared_values[number]
    return wires
