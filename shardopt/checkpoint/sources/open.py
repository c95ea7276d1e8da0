"""Opens a checkpoint, of whatever format: its files tell which it is."""

from __future__ import annotations

import os

from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage, storage_of


def open_source(storage: Storage, base_root: str | os.PathLike[str] | None = None) -> Source:
    """Opens what lies in a storage.

    Args:
        base_root: as for `open_checkpoint`.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: there is nothing to read, or it is damaged, or its
            version is not known.
    """
    return OwnSource(storage, base_root)


def open_checkpoint(url: str | os.PathLike[str], base_root: str | os.PathLike[str] | None = None) -> CheckpointReader:
    """Opens a checkpoint for reading; use it in a `with` statement, or `close` it. Local.

    Args:
        url: of a committed checkpoint.
        base_root: where it refers to files of earlier saves, the directory that has their directories; None for the one
            that it lies in itself, as all checkpoints of a run do. Nothing is ever read from elsewhere.
    """
    return CheckpointReader(open_source(storage_of(url), base_root))
