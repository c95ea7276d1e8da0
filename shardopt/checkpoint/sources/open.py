"""Opens a checkpoint, of whatever format: its files tell which it is."""

from __future__ import annotations

import os

from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage, storage_of


def open_source(storage: Storage) -> Source:
    """Opens what lies in a storage.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: there is nothing to read, or it is damaged, or its
            version is not known.
    """
    return OwnSource(storage)


def open_checkpoint(url: str | os.PathLike[str]) -> CheckpointReader:
    """Opens a checkpoint for reading; use it in a `with` statement, or `close` it. Local."""
    return CheckpointReader(open_source(storage_of(url)))
