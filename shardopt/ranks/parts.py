"""JSON in a store, in several parts where it is large."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from shardopt.world import Store

_PART_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB


def pack(value: Any) -> bytes:
    """Encodes JSON as `put` takes it. Raises TypeError and ValueError."""
    return json.dumps(value, separators=(",", ":")).encode()


def put(store: Store, key: str, data: bytes) -> list[str]:
    """Writes data, which is not empty, in as many parts as it takes; returns their keys."""
    parts = [data[i : i + _PART_BYTES] for i in range(0, len(data), _PART_BYTES)]
    keys = [f"{key}/{i}" for i in range(len(parts))]
    for part_key, part in zip(keys[1:], parts[1:], strict=True):
        set_bytes(store, part_key, part)
    set_bytes(store, keys[0], b"%d\n" % len(parts) + parts[0])  # last: it has the number of the others
    return keys


def get(store: Store, key: str) -> tuple[Any, list[str]]:
    """Reads JSON that was written with `put`, once `are_put`; returns it and the keys of its parts."""
    data, keys = get_bytes(store, key)
    return json.loads(data), keys


def get_bytes(store: Store, key: str) -> tuple[bytes, list[str]]:
    """Reads what was written with `put`, once `are_put`; returns it and the keys of its parts."""
    count, _, first = store.get(f"{key}/0").partition(b"\n")
    keys = [f"{key}/{i}" for i in range(int(count))]
    rest = [store.get(part_key) for part_key in keys[1:]]
    return b"".join([first, *rest]), keys


def are_put(store: Store, keys: Iterable[str]) -> bool:
    """Whether all of these were written with `put`, whole."""
    return store.check([f"{key}/0" for key in keys])


def set_bytes(store: Store, key: str, data: bytes) -> None:
    """Writes one value as it is."""
    store.set(key, data)  # type: ignore[arg-type]  # declared as str, takes bytes as they are
