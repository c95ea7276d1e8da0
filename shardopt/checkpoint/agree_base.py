"""The earlier save that a save refers to, on all ranks: where storage is remote, rank 0 alone reads its manifest.

In the first round of a save rank 0 opens it, and says what it has found. Where that is in remote storage the manifest
goes to the others as a section of the answer; what lies on a local disk each rank reads for itself, as it may have it
under another path.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any

from shardopt.checkpoint.sources.read_manifest import manifest_bytes
from shardopt.checkpoint.storage import Storage, storage_of
from shardopt.checkpoint.writing.unchanged import Base
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError

_log = logging.getLogger("shardopt.checkpoint")


class BaseOnRanks:
    """The base of one save on this rank, opened once.

    Args:
        url: of the earlier save, on rank 0; None for none.
        required: whether it is an error that there is no such save, or a damaged one; otherwise all is written.
    """

    def __init__(self, url: str | None, required: bool) -> None:
        self._url, self._required = url, required
        self._digest = ""
        self._manifest: bytes | None = None  # compressed, until it is opened here
        self._base: Base | None = None

    def begin(self, storage: Storage, ranks: int) -> tuple[list[Any] | None, list[bytes]]:
        """Opens it on rank 0; returns what all ranks get of it, and the section that they need then.

        Args:
            storage: where the new checkpoint is to be.
            ranks: that save.
        """
        if self._url is None:
            return None, []
        source = storage_of(self._url)
        is_handed_on = source.is_remote and ranks > 1
        try:
            data = manifest_bytes(source) if is_handed_on else None
            self._base = Base(self._url, storage, data)
        except (CheckpointNotFoundError, CorruptionError) as error:
            if self._required:
                raise
            _log.warning("everything is written anew: %s", error)
            return None, []
        return [self._url, self._base.digest, is_handed_on], [] if data is None else [zlib.compress(data, 1)]

    def section_of(self, begun: list[Any] | None, rank: int) -> int | None:
        """Returns the section that a rank needs of what rank 0 has found; None for none."""
        return 0 if begun is not None and begun[2] and rank > 0 else None

    def take(self, begun: list[Any] | None, section: bytes) -> None:
        """Takes what rank 0 has found."""
        self._url = None
        if begun is not None:
            self._url, self._digest, _ = begun
            self._manifest = section or None

    def opened(self, storage: Storage) -> Base | None:
        """Returns it, as rank 0 has opened it; None where there is none, or this rank cannot see the same."""
        if self._url is None:
            return None
        if self._base is None:
            data = None if self._manifest is None else zlib.decompress(self._manifest)
            self._manifest = None
            try:
                self._base = Base(self._url, storage, data)
            except CheckpointError as error:
                _log.warning("all that this rank has is written anew: %s", error)
                return None
        if self._base.digest != self._digest:
            _log.warning(
                "all that this rank has is written anew: it sees another checkpoint at %s than rank 0", self._url
            )
            return None
        return self._base
