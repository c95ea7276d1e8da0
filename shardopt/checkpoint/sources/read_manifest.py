"""The manifest of a committed checkpoint, read from its storage."""

from __future__ import annotations

from shardopt.checkpoint.format.constants import MANIFEST_LIMIT_BYTES, MANIFEST_NAME, damaged, is_sealed
from shardopt.checkpoint.format.manifest import Manifest, decode_manifest
from shardopt.checkpoint.sources.not_a_checkpoint import what_is_at
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.errors import CheckpointNotFoundError, Problem

_MOST_LOOKS = 4
"""At a manifest that another one replaces each time between the look at its size and the read."""


def manifest_bytes(storage: Storage) -> bytes | None:
    """Returns the bytes of the manifest, None where there is none. Raises CorruptionError where it is too large."""
    where = f"{storage.url}/{MANIFEST_NAME}"
    data = b""
    with wrap_os_errors(f"read {where}"):
        try:
            nbytes = storage.size(MANIFEST_NAME)
            for _ in range(_MOST_LOOKS):
                if nbytes > MANIFEST_LIMIT_BYTES:
                    raise damaged(where, f"{nbytes} bytes, more than the limit of {MANIFEST_LIMIT_BYTES}")
                data = storage.read(MANIFEST_NAME, 0, nbytes)
                if is_sealed(data):
                    break
                nbytes = storage.size(MANIFEST_NAME)
                if nbytes == len(data):
                    break  # all of it, and damaged
        except FileNotFoundError:
            return None
    return data


def not_found(storage: Storage) -> CheckpointNotFoundError:
    """Returns the error for a place without a checkpoint, which says what is there instead."""
    contents, remedy = what_is_at(storage)
    problem = Problem(storage.url, contents, f"a committed checkpoint (with {MANIFEST_NAME})", remedy)
    return CheckpointNotFoundError("there is no checkpoint", [problem])


def read_manifest(storage: Storage) -> tuple[Manifest, bytes]:
    """Returns the manifest of a committed checkpoint, decoded, and its bytes.

    Raises:
        CheckpointNotFoundError: there is none; what lies in the directory besides does not matter.
        CorruptionError, FormatError: it is damaged, or for a newer reader.
    """
    data = manifest_bytes(storage)
    if data is None:
        raise not_found(storage)
    return decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}"), data
