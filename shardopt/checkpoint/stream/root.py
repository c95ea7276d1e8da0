"""The root of a publisher, as it and its followers see it: the steps of a stream, and the record of its identity."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import NamedTuple

from shardopt.checkpoint.format.constants import damaged, pack_record, unpack_record
from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.run.root import ID, ID_BYTES, STREAM_NAME, Root, record_in
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.errors import CorruptionError
from shardopt.world import world

_STREAM_FORMAT = "shardopt-stream"


class Published(NamedTuple):
    """A published step.

    Args:
        id: its own.
        stream: the identity of the stream that it is of, 32 hexadecimal digits: another one where somebody has emptied
            the root, and it was begun again. None where it is not known.
    """

    id: CheckpointId
    stream: str | None

    def is_after(self, other: Published) -> bool:
        """Whether those who have another step are to take it: it was published later, or in another stream."""
        if self.stream != other.stream:
            return True
        return (self.id.branch, self.id.step) > (other.id.branch, other.id.step)


class StreamRoot(Root):
    """Reads and writes the files directly under the root of a publisher. Local to the calling rank."""

    publishes = True

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._stream_id: str | None = None  # of a publisher, to write the record again

    def ids(self) -> list[CheckpointId]:
        """Lists as that of a run; a publisher writes the record again that a lifecycle rule has removed."""
        ids = super().ids()
        if self._stream_id is not None and STREAM_NAME not in self.seen.names:
            with wrap_os_errors(f"look into {self.url}"):
                self._write_stream(self._stream_id)
        return ids

    def claim(self, reads_first: bool = False) -> None:
        """Makes this the root of a publisher, after a listing; as that of a run."""
        super().claim(reads_first)
        if STREAM_NAME not in self.seen.names:
            with wrap_os_errors(f"write {self.url}/{STREAM_NAME}"):
                self.storage.make()
                self._write_stream(world().random_name(ID_BYTES))
        if not self.is_on_hosts:
            with contextlib.suppress(CorruptionError):
                self._stream_id = self._stream()

    def _is_other_kind(self) -> bool:
        return bool(self.seen.ids) and not self.is_on_hosts and STREAM_NAME not in self.seen.names

    def _remedy(self) -> str:
        remedy = super()._remedy()
        if STREAM_NAME not in self.seen.names:
            remedy += f"; if this is a publisher's, whose {STREAM_NAME} something else has removed, remove the rest"
        return remedy

    def newest(
        self, but: Set[Published] = frozenset(), step: int | None = None, stream: str | None = None
    ) -> Published | None:
        """Returns the newest step that is published here; None if there is none.

        Args:
            but: steps that do not count.
            step: the only one that counts; None for any.
            stream: its identity where the record is lost.
        """
        ids, listed = self.ids(), list[CheckpointId]()
        found: Published | None = None
        while ids != listed:
            branches = self.branches()
            # Before it is asked which are committed: those of a stream that has ended are not any more.
            stream = self._stream() or stream
            own = [Published(id, stream) for id in reversed(ids) if branches.has(id) and step in (None, id.step)]
            own = [each for each in own if each not in but]
            found = next((each for each in own if self.is_committed(each.id)), None)
            newer = own if found is None else own[: own.index(found)]
            # One of these may have been committed since it was looked at, and those before it removed before they were.
            # Upwards: what was removed was so for a newer one.
            for each in reversed(newer):
                found = each if self.is_committed(each.id) else found
            if not newer or found in newer:
                break
            listed, ids = ids, self.ids()
        return found

    def _write_stream(self, id: str) -> None:
        self.storage.publish(STREAM_NAME, pack_record(_STREAM_FORMAT, id=id))

    def _stream(self) -> str | None:
        """Returns the identity of the stream; None without a record. Raises CheckpointError and CorruptionError."""
        data = record_in(self.storage, STREAM_NAME)
        if data is None:
            return None
        wire = unpack_record(data, f"{self.url}/{STREAM_NAME}")
        number = wire.get("id")
        if wire.get("format") != _STREAM_FORMAT or not (isinstance(number, str) and ID.fullmatch(number)):
            raise damaged(f"{self.url}/{STREAM_NAME}", "no record of a stream")
        return number
