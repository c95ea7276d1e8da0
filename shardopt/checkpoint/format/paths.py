"""Paths of values in the nested state, as JSON beside their keys."""

from __future__ import annotations

from typing import Any

from shardopt.checkpoint.format.constants import read_size
from shardopt.state import Index, Path


def encode_path(key: str, path: Path) -> Any:
    """Encodes a path as JSON: null where it is the key split at its dots; else its parts, a list's index as [index]."""
    if list(path) == key.split("."):
        return None
    return [[int(part)] if isinstance(part, Index) else part for part in path]


def decode_path(key: str, wire: Any) -> Path:
    """Decodes a path that `encode_path` wrote. Raises ValueError if it is not one of this key."""
    if wire is None:
        return tuple(key.split("."))
    path = tuple(Index(read_size(*part)) if isinstance(part, list) else part for part in wire)
    if not all(type(part) in (str, int, Index) for part in path) or ".".join(map(str, path)) != key:
        raise ValueError(f"a path that is not that of {key!r}")
    return path
