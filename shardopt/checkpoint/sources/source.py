"""The interface of a source: the contents of a checkpoint by key, and the files that hold its boxes."""

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
    """A checkpoint in its storage, in any format.

    `manifest.files` are its files as far as boxes refer to them (`StoredLayout.files`), each with at most one box of a
    key. All that is read of it on opening is checked; what lies in files is checked when it is read.
    """

    format_name: str
    """The writer of such checkpoints, for messages."""

    storage: Storage
    """The directory of the checkpoint, or of its only file."""
    url: str
    manifest: Manifest
    is_foreign = True
    """Whether its keys and plain values are in another library's form."""
    keeps_empty_dicts = True
    """Whether empty dicts are stored. If not, an app's empty dict lacks nothing."""
    unread: Mapping[str, str] = MappingProxyType({})
    """The keys of contents stored in an unknown way, each with a description."""
    read_through: Collection[str] = frozenset()
    """Keys in the files that are offered only as part of others: codes and scales, from which weights are computed."""
    unsummed_bytes = 0
    """Of what was read on opening, those that no checksum covers: only their structure was checked."""
    digest: str
    """A text that is equal for equal contents, by which ranks check that they read the same."""

    @abstractmethod
    def open_file(self, number: int, keys: Collection[str] | None = None) -> OpenFile:
        """Opens one of the manifest's files, from which likely only these keys (in it) are needed; None for all.

        Raises:
            CorruptionError: it is missing or damaged.
        """

    def per_rank(self, rank: int) -> Mapping[str, Any]:
        """Returns the values that a rank stored for itself as `PerRank`, decoded, by key."""
        return {}


def ambiguous(storage: Storage, contents: str, remedy: str = "give the path of one of the files") -> FormatError:
    """Returns the error for a directory with more than one thing that could be read."""
    problem = Problem(storage.url, contents, "one checkpoint", remedy)
    return FormatError("which checkpoint is meant is not clear", [problem], code="no-checkpoint")
