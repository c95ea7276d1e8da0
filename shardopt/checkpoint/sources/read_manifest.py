"""The manifest of a committed checkpoint, read from its storage; where there is none, what is there instead."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardopt.checkpoint.format.constants import (
    FILE_NAME,
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    RECORD_NAME,
    damaged,
    is_sealed,
)
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.sources.referred import referred_in
from shardopt.checkpoint.storage import Storage, is_temporary, wrap_os_errors
from shardopt.errors import CheckpointError, CheckpointNotFoundError, Problem

_MOST_LOOKED_INTO = 64  # of directories within one, the last by number and name
_UNFINISHED = "give another path: a save that was not finished is none"
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
    try:
        contents, remedy = _what_is_at(storage)
    except (OSError, CheckpointError) as error:  # that there is no checkpoint is known already
        contents, remedy = f"none, nor what else is there ({error})", "give another path"
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


def _what_is_at(storage: Storage) -> tuple[str, str]:
    """Describes what is where a checkpoint was expected, and the remedy, for an error message."""
    file = storage.as_file()
    if file is not None:
        directory, name = file
        if name == MANIFEST_NAME or FILE_NAME.fullmatch(name):
            return "a file of a checkpoint", f"give the directory that it is in: {directory.url}"
        return "a file", "give the directory of a checkpoint, or a file of safetensors or torch.save"
    names = storage.names()
    if not names:
        return "nothing", "give another path"
    if any(name.endswith(".distcp") for name in names):
        return "files of torch.distributed.checkpoint without their .metadata", _UNFINISHED
    within = _checkpoints_within(storage, names)
    if within:
        others = f" and {len(within) - 1} more" if len(within) > 1 else ""
        remedy = f"give one of them, such as {storage.child(within[0]).url}, or use Manager(...).restore(app)"
        return f"a directory of checkpoints: {within[0]}{others}", remedy
    if RECORD_NAME in names:
        remedy = "load hosts://<this path> in a job on the hosts that have the others"
        return "a host's share of a checkpoint", remedy
    unfinished = [name for name in names if FILE_NAME.fullmatch(name) or is_temporary(name)]
    if unfinished and referred_in(storage):
        remedy = "give another path, and leave these files where they are"
        return "files to which checkpoints beside it refer, of a checkpoint that was removed", remedy
    if unfinished:
        return f"{len(unfinished)} files of a save that was not finished", _UNFINISHED
    return f"{len(names)} files and directories, none of a checkpoint, such as {names[0]}", "give another path"


def _checkpoints_within(storage: Storage, names: Sequence[str]) -> list[str]:
    """Returns the names of checkpoints within a directory, the greatest number first."""

    def by_number(name: str) -> tuple[int, str]:
        digits = re.search(r"(\d+)\D*$", name)
        return int(digits[1]) if digits else -1, name

    directories = sorted((name for name in names if "." not in name), key=by_number, reverse=True)
    return [name for name in directories[:_MOST_LOOKED_INTO] if storage.child(name).exists(MANIFEST_NAME)]
