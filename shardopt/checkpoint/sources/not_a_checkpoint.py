"""Recognizes what is at a path and no checkpoint: remains of saves, roots of runs, other files; with a remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardopt.checkpoint.format.constants import FILE_NAME, MANIFEST_NAME, RECORD_NAME
from shardopt.checkpoint.sources.referred import referred_in
from shardopt.checkpoint.storage import Storage, is_temporary
from shardopt.errors import CheckpointError

_MOST_LOOKED_INTO = 64  # of directories within one, the last by number and name
_UNFINISHED = "give another path: a save that was not finished is none"


def what_is_at(storage: Storage) -> tuple[str, str]:
    """Describes what lies where a checkpoint was expected, and the remedy, for an error message."""
    try:
        return _what_is_at(storage)
    except (OSError, CheckpointError) as error:  # that there is no checkpoint is known already
        return f"none, nor what else is there ({error})", "give another path"


def _what_is_at(storage: Storage) -> tuple[str, str]:
    file = storage.as_file()
    if file is not None:
        return _what_file(*file)
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


def _what_file(directory: Storage, name: str) -> tuple[str, str]:
    if name == MANIFEST_NAME or FILE_NAME.fullmatch(name):
        return "a file of a checkpoint", f"give the directory that it is in: {directory.url}"
    return "a file", "give the directory of a checkpoint, or a file of safetensors or torch.save"


def _checkpoints_within(storage: Storage, names: Sequence[str]) -> list[str]:
    """Returns the names of checkpoints within a directory, the greatest number first."""

    def by_number(name: str) -> tuple[int, str]:
        digits = re.search(r"(\d+)\D*$", name)
        return int(digits[1]) if digits else -1, name

    directories = sorted((name for name in names if "." not in name), key=by_number, reverse=True)
    return [name for name in directories[:_MOST_LOOKED_INTO] if storage.child(name).exists(MANIFEST_NAME)]
