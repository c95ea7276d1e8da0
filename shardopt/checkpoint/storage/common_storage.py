"""Whether all ranks see the directory that they save to: rank 0 leaves a mark there, for which the others look.

Only on local paths, which may be disks that each host has for itself; an object store is one for all. The mark has a
name like that of a data file, so that what clears away a dead save clears it away too.
"""

from __future__ import annotations

from shardopt.checkpoint.format.constants import file_name
from shardopt.checkpoint.storage import Storage, storage_of
from shardopt.errors import CheckpointError, Problem
from shardopt.world import world

_LOOK_SECONDS = 10.0  # for which clients of NFS may not see what is new
_PAUSE_SECONDS = 0.1
_NO_SLOT = 999_999_999  # of no data file: a file of this save, as `discard` sees it, and not one of tensors


def leave_mark(storage: Storage, save_id: str) -> None:
    """On rank 0, once it has made the directory, and before others may write."""
    if not storage.is_remote:
        storage_of(storage.url, durable=False).write(_mark(save_id), [])


def look_for_mark(storage: Storage, save_id: str) -> None:
    """On the other ranks, before they write.

    Raises:
        CheckpointError: this rank sees another directory than rank 0.
    """
    if storage.is_remote:
        return
    end = world().monotonic() + _LOOK_SECONDS
    while not storage.exists(_mark(save_id)):
        if world().monotonic() >= end:
            found, required = "not what rank 0 has made there", "a directory that all ranks see"
            problem = Problem(storage.url, found, required, "save to storage that all ranks share, by one path")
            raise CheckpointError("ranks do not share the storage", [problem])
        storage.names()  # which has a client of NFS ask again
        world().sleep(_PAUSE_SECONDS)


def remove_mark(storage: Storage, save_id: str) -> None:
    """On rank 0, once all have looked."""
    if not storage.is_remote:
        storage.remove(_mark(save_id))


def _mark(save_id: str) -> str:
    return file_name(save_id, 0, _NO_SLOT)
