"""All shares of a checkpoint as one storage: reads each file on this host if it is here, else from another."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.hosts.holders import Holders
from shardopt.checkpoint.hosts.hosts import Hosts
from shardopt.checkpoint.hosts.share import Share
from shardopt.checkpoint.storage import ReadInto, Span, Storage
from shardopt.errors import CheckpointError
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


class WholeCheckpoint(Storage):
    """A checkpoint on hosts, for reading only.

    Of a file that several hosts have, this host's copy comes first, then the others' in the order of the ring behind
    this one, so that not all ask the same. A copy that is damaged, or cannot be had, is passed over for the next one
    (`pass_over`), with a warning that names it.

    Args:
        name: of its directory.
        record: the bytes of its manifest.
        manifest: the same, decoded.
        holders: the hosts that have each file.
    """

    def __init__(self, hosts: Hosts, name: str, record: bytes, manifest: Manifest, holders: Holders) -> None:
        self.url = hosts.url(name)
        self._hosts, self.name, self.record = hosts, name, record
        self.manifest, self.holders = manifest, holders
        self._nbytes = {file.name: file.nbytes for file in manifest.files}
        own, count = hosts.number, hosts.count
        self._copies = {file: sorted(have, key=lambda host: (host - own) % count) for file, have in holders.items()}
        self._at: Counter[str] = Counter()
        self._lock = world().lock()
        self.share: Share = hosts.share(name)

    def copy_of(self, name: str) -> int:
        return self._at[name]

    def pass_over(self, name: str, copy: int, error: CheckpointError) -> bool:
        with self._lock:
            if self._at[name] != copy:
                return True  # another thread has
            copies = self._copies.get(name, [])
            if copy + 1 >= len(copies):
                return False
            self._at[name] += 1
        host, following = copies[copy], copies[copy + 1]
        _log.warning("%s: the copy of host %d is taken for that of host %d: %s", self.url, following, host, error)
        return True

    def size(self, name: str) -> int:
        if name == MANIFEST_NAME:
            return len(self.record)
        if name not in self._nbytes:
            raise FileNotFoundError(f"{self.url}/{name}")
        host = self._copies[name][self._at[name]]
        return self.share.size(name) if host == self._hosts.number else self._nbytes[name]

    def names(self) -> list[str]:
        return sorted([MANIFEST_NAME, *self._nbytes])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if name == MANIFEST_NAME:
            return self.record[begin:end]
        end = min(self._nbytes[name], end if end is not None else self._nbytes[name])
        data = bytearray(max(end - begin, 0))
        with self.opened(name) as read:
            read([Span(begin, memoryview(data))])
        return bytes(data)

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadInto]:
        host = self._copies[name][self._at[name]]
        if host == self._hosts.number:
            with self.share.opened(name) as read:
                yield read
            return
        client = self._hosts.client(host)

        def fetch(spans: Sequence[Span]) -> None:
            client.read_into(self.name, name, spans)

        yield fetch

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise CheckpointError("a checkpoint on hosts is written share by share", code="host-directory")

    make = write = publish = publish_new = remove = remove_if_empty = child = _refuse

    def parent(self) -> None:
        return None
