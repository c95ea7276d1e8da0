"""Where a save goes, and what makes it a checkpoint there: storage that all ranks see, or a directory on each host."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress

from shardopt.checkpoint.commit import discard, publish_checkpoint, refuse_committed
from shardopt.checkpoint.format.constants import writer_of
from shardopt.checkpoint.format.manifest import Manifest, decode_manifest
from shardopt.checkpoint.hosts.hosts import Hosts, hosts_of, is_on_hosts, split
from shardopt.checkpoint.hosts.share import Share
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.checkpoint.storage.common_storage import remove_marker, wait_for_marker, write_marker
from shardopt.checkpoint.storage.no_space import explain_no_space
from shardopt.checkpoint.writing.unchanged import Base
from shardopt.errors import OptionError, Problem, ShardoptError
from shardopt.ranks import Call, Ranks


class Place:
    """The place of one save, as one rank sees it; the methods are called in this order."""

    @property
    def url(self) -> str:
        """The URL of the checkpoint, once it is open."""
        return self.storage.url

    @property
    def storage(self) -> Storage:
        """The directory that this rank writes to."""
        raise NotImplementedError

    def arrive(self) -> None:
        """Opens the directory, on all ranks, in the round in which the save begins."""
        raise NotImplementedError

    def refuse_taken(self) -> None:
        """Refuses a path that has a checkpoint, on rank 0, where `arrive` has not."""

    def begin(self, save_id: str) -> None:
        """Makes the directory, on rank 0, where `arrive` has not."""

    def wait(self, save_id: str) -> None:
        """Waits until this rank may write; on all ranks."""

    def publish(self, manifest: Manifest, data: bytes, base: Base | None) -> str | None:
        """Commits the files that all ranks have written, on rank 0; returns what all need for `settle`, or None."""
        raise NotImplementedError

    def settle(self, call: Call, published: str) -> None:
        """Does the rest of the commit, where `publish` has returned something. Collective."""

    def discard(self, save_id: str) -> None:
        """Removes what a failed save has written, as far as this rank may; on all ranks."""
        raise NotImplementedError


def place_of(ranks: Ranks, url: str | os.PathLike[str], durable: bool, base: str | None) -> Place:
    """Returns the place at a URL. Collective for one on hosts, the first time that they meet at its directory.

    Raises:
        OptionError: the save is to refer to another one, which is not possible on hosts.
        CheckpointError: a host's directory cannot be used.
    """
    if not is_on_hosts(url):
        return _Shared(ranks, url, durable)
    if base is not None:
        problem = Problem("base", base, "none, for a checkpoint on hosts", "save all of it, or to a shared path")
        raise OptionError("what lies on hosts refers to nothing", [problem])
    root, name = split(url)
    return _OnHosts(ranks, hosts_of(ranks, root), name, durable)


class _Shared(Place):
    """A directory, or prefix of an object store, that all ranks see. Its manifest is the commit."""

    def __init__(self, ranks: Ranks, url: str | os.PathLike[str], durable: bool) -> None:
        self._ranks, self._url, self._durable = ranks, url, durable
        self._storage: Storage | None = None

    @property
    def storage(self) -> Storage:
        if self._storage is None:
            self._storage = storage_of(self._url, self._durable)
        return self._storage

    def arrive(self) -> None:
        assert self.storage

    def refuse_taken(self) -> None:
        refuse_committed(self.storage)

    def begin(self, save_id: str) -> None:
        self.storage.make()
        if self._ranks.size > 1:
            write_marker(self.storage, save_id)

    def wait(self, save_id: str) -> None:
        if self._ranks.rank > 0:
            wait_for_marker(self.storage, save_id)

    def publish(self, manifest: Manifest, data: bytes, base: Base | None) -> None:
        if self._ranks.size > 1:
            remove_marker(self.storage, manifest.save_id)
        publish_checkpoint(self.storage, manifest, data, base)

    def discard(self, save_id: str) -> None:
        # Rank 0 alone: only it could still commit, and has now failed to. Another rank might remove the files of a
        # commit that it does not know of.
        if self._ranks.rank == 0:
            discard(self.storage, save_id)


class _OnHosts(Place):
    """A directory on each host. The commit is that all hosts have the record.

    Where a host is lost before that, the save has failed for those that are left; if all its files turn up again, with
    one record, it is whole all the same, and may be restored.
    """

    def __init__(self, ranks: Ranks, hosts: Hosts, name: str, durable: bool) -> None:
        self._ranks, self._hosts, self._name = ranks, hosts, name
        self._share: Share = hosts.share(name, durable)

    @property
    def url(self) -> str:
        return self._hosts.url(self._name)

    @property
    def storage(self) -> Storage:
        return self._share

    def arrive(self) -> None:
        if self._hosts.is_leader:
            with wrap_os_errors(f"make {self._share.url}"), self._explaining("a directory"):
                self._share.begin()

    def publish(self, manifest: Manifest, data: bytes, base: Base | None) -> str:
        return data.decode()

    def settle(self, call: Call, published: str) -> None:
        hosts, share = self._hosts, self._share

        def keep() -> None:
            if not hosts.is_leader:
                return
            files = decode_manifest(published.encode(), share.url).files
            own = {file.name: file.nbytes for file in files if hosts.of_rank[writer_of(file.name)] == hosts.number}
            with wrap_os_errors(f"commit {share.url}"), self._explaining("a record"):
                share.keep_record(published.encode(), own)

        try:
            self._ranks.agree(call, work=keep)
        except ShardoptError:
            # Where a rank was lost the others may have an answer that this one has not: then nothing is removed.
            if hosts.is_leader and self._ranks.in_step:
                with suppress(OSError):
                    share.clear()
            raise

    def _explaining(self, content: str) -> AbstractContextManager[None]:
        return explain_no_space(self._share, content, lambda: 0, lambda: 0)

    def discard(self, save_id: str) -> None:
        with suppress(Exception):  # the error that is being raised must not be hidden by another
            if self._hosts.is_leader:
                self._share.discard(save_id)
