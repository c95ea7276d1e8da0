"""Small sealed records beside the checkpoints of a run: one JSON object each, with its format and a hash."""

from __future__ import annotations

import json
from typing import Any

from shardopt.checkpoint.format.constants import damaged, is_sealed, load_json, seal, without_duplicates


def pack_record(kind: str, **members: Any) -> bytes:
    """Returns the bytes of a record."""
    return seal(json.dumps({"format": kind, **members})[:-1].encode())


def unpack_record(data: bytes, where: str) -> dict[str, Any]:
    """Returns the members of a record from untrusted bytes. Raises CorruptionError."""
    if not is_sealed(data):
        raise damaged(where, "bytes that fail the seal at their end")
    return load_json(data, where, without_duplicates)
