"""The interface of a source: what a checkpoint has under which key, and the files that its boxes lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.reading.open_file import OpenFile
from shardopt.checkpoint.storage import Storage


class Source(ABC):
    """A checkpoint as it lies in its storage, of whatever format.

    `manifest.files` are its files as far as boxes refer to them (`StoredLayout.files`), each with at most one box of a
    key. All that is read of it on opening is checked; what lies in files is checked when it is read.

    Args:
        storage: the directory that the checkpoint is, or the one that its only file is in.
    """

    format_name: str
    """What writes such checkpoints, for messages."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    manifest: Manifest
    digest: str
    """A text that is equal for equal contents, by which ranks see whether they read the same."""

    @property
    def url(self) -> str:
        return self.storage.url

    @property
    def is_remote(self) -> bool:
        return self.storage.is_remote

    @abstractmethod
    def open_file(self, number: int) -> OpenFile:
        """Opens one of the manifest's files. Raises CorruptionError where it is missing or damaged."""

    def per_rank(self, rank: int) -> Mapping[str, Any]:
        """Returns the values that a rank has stored for itself as `PerRank`, decoded, by key."""
        return {}
