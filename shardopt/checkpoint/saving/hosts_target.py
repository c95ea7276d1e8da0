"""A save to a directory on each host; it is committed once all hosts have the record."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress

from shardopt.checkpoint.format.constants import writer_of
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.hosts.hosts import hosts_of, split
from shardopt.checkpoint.saving.commit import SaveTarget
from shardopt.checkpoint.saving.writing.no_space import explain_no_space
from shardopt.checkpoint.storage import wrap_os_errors
from shardopt.errors import OptionError, Problem, ShardoptError
from shardopt.ranks import Call, Ranks


class HostsTarget(SaveTarget):
    """The destination of a save as a directory on each host.

    Where a host is lost before all have the record, the save has failed for those that are left; if all its files turn
    up again, with one record, it is whole all the same, and may be restored. Collective to make, the first time that
    the hosts meet at this directory.

    Raises:
        OptionError: the save is to refer to another one, which is not possible on hosts.
        CheckpointError: a host's directory cannot be used.
    """

    def __init__(self, ranks: Ranks, url: str | os.PathLike[str], durable: bool, base: str | None) -> None:
        super().__init__(ranks, url, durable)
        if base is not None:
            problem = Problem("base", base, "none, for a checkpoint on hosts", "save all of it, or to a shared path")
            raise OptionError("what lies on hosts refers to nothing", [problem], code="bad-base")
        root, name = split(url)
        self._hosts = hosts_of(ranks, root)
        self.storage = self._share = self._hosts.share(name, durable)
        self.url = self._hosts.url(name)

    def open(self) -> None:
        if self._hosts.is_leader:
            with wrap_os_errors(f"make {self._share.url}"), self._explaining("a directory"):
                self._share.begin()

    def refuse_taken(self) -> None:
        """Does nothing, as `open` has checked."""

    def begin(self, save_id: str) -> None:
        """Does nothing, as `open` has made the directories."""

    def wait(self, save_id: str) -> None:
        """Does nothing, as all leaders have made their directories by the end of the first round."""

    def publish(self, manifest: Manifest, data: bytes) -> str:
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
