"""Checks that all ranks see one directory to save to: rank 0 writes a marker file, and the others look for it.

Only local paths are checked, since each host may have a disk of its own there; an object store is one for all. The
marker is named like a data file, so it is cleared away together with the files of a dead save.
"""

from __future__ import annotations

from shardopt.checkpoint.format.constants import file_name
from shardopt.checkpoint.storage import Storage, storage_of
from shardopt.errors import CheckpointError, Problem
from shardopt.world import world

_LOOK_SECONDS = 10.0  # for which clients of NFS may not see what is new
_PAUSE_SECONDS = 0.1
_NO_SLOT = 999_999_999  # of no data file: a file of this save, as `discard` sees it, and not one of tensors


def write_marker(storage: Storage, save_id: str) -> None:
    """Writes the marker; on rank 0, after it has made the directory, before others may write."""
    if not storage.is_remote:
        storage_of(storage.url, durable=False).write(_marker_name(save_id), [])


def wait_for_marker(storage: Storage, save_id: str) -> None:
    """Waits until the marker is visible; on the other ranks, before they write.

    Raises:
        CheckpointError: this rank sees another directory than rank 0.
    """
    if storage.is_remote:
        return
    end = world().monotonic() + _LOOK_SECONDS
    while not storage.exists(_marker_name(save_id)):
        if world().monotonic() >= end:
            required = "a directory that all ranks see"
            problem = Problem(
                storage.url,
                "not what rank 0 has made there",
                required,
                "save to storage that all ranks share, by one path",
            )
            raise CheckpointError("ranks do not share the storage", [problem], code="files-missing")
        storage.names()  # makes a client of NFS ask the server again
        world().sleep(_PAUSE_SECONDS)


def remove_marker(storage: Storage, save_id: str) -> None:
    """Removes the marker; on rank 0, after all have seen it."""
    if not storage.is_remote:
        storage.remove(_marker_name(save_id))


def is_marker(name: str) -> bool:
    """Whether a file is a marker, which has no bytes, and which ranks of a save that is under way may look for."""
    return name.endswith(_marker_name(""))


def _marker_name(save_id: str) -> str:
    return file_name(save_id, 0, _NO_SLOT)
