"""Where checkpoints lie: the one place that decides between a local directory and all else that fsspec opens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec  # type: ignore[import-untyped]  # has no type hints
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # as above

from shardopt.checkpoint.storage.directory import Storage
from shardopt.checkpoint.storage.local import LocalStorage
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, ShardoptError


def storage_of(url: str | os.PathLike[str], durable: bool = True) -> Storage:
    """The storage at a path or at any URL that fsspec knows, with fsspec's own configuration and credentials.

    Args:
        durable: whether local files and directories are flushed to the disk before a write returns.
    """
    fs, path = fsspec.core.url_to_fs(os.fspath(url))
    return LocalStorage(path, durable) if isinstance(fs, LocalFileSystem) else RemoteStorage(fs, path)


@contextmanager
def telling(doing: str) -> Iterator[None]:
    """Turns an error of the operating system, or of a file system of fsspec, into a CheckpointError that says more."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardoptError):
            raise
        raise CheckpointError(f"cannot {doing}: {error}") from error
