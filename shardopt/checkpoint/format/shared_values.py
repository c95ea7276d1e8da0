"""Plain values of which many keys have the same, each stored once, such as the options of a group for each member.

    {"values": {key: [path, value]}, "shared_values": [value, ...], "shared": {key: [path, number]}}

Values count as the same where they are one object; that is kept on the way there and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from shardopt.checkpoint.format.paths import decode_path, encode_path
from shardopt.state import Path
from shardopt.values import decode_value, encode_value

Values = Mapping[str, tuple[Path, Any]]
"""Plain values by key, with their paths."""


def encode_each(values: Values) -> dict[str, tuple[Path, Any]]:
    """Encodes values as typed JSON, one object only once. Raises StateError as `encode_value`."""
    return _each(values, encode_value)


def decode_each(wires: Values) -> dict[str, tuple[Path, Any]]:
    """Decodes values from typed JSON, one form only once, which its keys then share. Raises StateError."""
    return _each(wires, lambda wire, _: decode_value(wire))


def _each(values: Values, convert: Callable[[Any, str], Any]) -> dict[str, tuple[Path, Any]]:
    done: dict[int, Any] = {}
    converted = {}
    for key, (path, value) in values.items():
        if isinstance(value, dict):
            if id(value) not in done:
                done[id(value)] = convert(value, key)
            converted[key] = (path, done[id(value)])
        else:
            converted[key] = (path, convert(value, key))
    return converted


def pack(wires: Values) -> dict[str, Any]:
    """Returns values that are in typed JSON as members of a JSON object."""
    uses = Counter(id(wire) for _, wire in wires.values() if isinstance(wire, dict))
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
    """Returns the values that `pack` put into the members, one object for those that share one.

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
