"""The interface of a source: what a checkpoint has under which key, and the files that its boxes lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.sources.reading.open_file import OpenFile
from shardopt.checkpoint.storage import Storage
from shardopt.errors import FormatError, Problem


class Source(ABC):
    """A checkpoint as it lies in its storage, of whatever format.

    `manifest.files` are its files as far as boxes refer to them (`StoredLayout.files`), each with at most one box of a
    key. All that is read of it on opening is checked; what lies in files is checked when it is read.
    """

    format_name: str
    """What writes such checkpoints, for messages."""

    storage: Storage
    """The directory that the checkpoint is, or the one that its only file is in."""
    url: str
    manifest: Manifest
    is_foreign = True
    """Whether its keys and plain values are those of another library, and not as ours are."""
    keeps_empty_dicts = True
    """Whether a dict without entries is stored. Where it is not, an empty one of an app lacks nothing."""
    unread: Mapping[str, str] = MappingProxyType({})
    """The keys of what is stored in a way that is not known, each with what it is."""
    read_through: Collection[str] = frozenset()
    """The keys that files have, and that stand for others: codes and scales, of which weights are made."""
    digest: str
    """A text that is equal for equal contents, by which ranks see whether they read the same."""

    @abstractmethod
    def open_file(self, number: int, keys: Collection[str] | None = None) -> OpenFile:
        """Opens one of the manifest's files, of which only these keys (in it) are likely needed; None for all.

        Raises:
            CorruptionError: it is missing or damaged.
        """

    def per_rank(self, rank: int) -> Mapping[str, Any]:
        """Returns the values that a rank has stored for itself as `PerRank`, decoded, by key."""
        return {}


def ambiguous(storage: Storage, contents: str) -> FormatError:
    """Returns the error for a directory in which there is more than one thing that could be read."""
    problem = Problem(storage.url, contents, "one checkpoint", "give the path of one of the files")
    return FormatError("which checkpoint is meant is not clear", [problem], code="no-checkpoint")
