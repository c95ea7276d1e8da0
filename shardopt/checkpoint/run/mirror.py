"""Copies checkpoints from fast local disks to a remote store, in the background.

A copy is verified while it is read, every rank uploads what it wrote, and the manifest goes last, once all have agreed
that their files are there: so a checkpoint of the remote root is as whole as any. A run restores from whichever root
has the newest; of one step the local copy comes first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.reports import OfUrl, emit_report
from shardopt.checkpoint.run.background import Task, Turns
from shardopt.checkpoint.run.branches import by_numbers
from shardopt.checkpoint.run.copying import copy_over_ranks
from shardopt.checkpoint.run.root import committed_or_unread, refuse_seen_by_some
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.storage import Storage, hold, storage_of, wrap_os_errors
from shardopt.errors import CheckpointError
from shardopt.ranks import DEADLINE_SECONDS, Group, Ranks, SharedGroup, SideRanks
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


@dataclass(frozen=True, slots=True)
class UploadReport(OfUrl):
    """The outcome of an upload.

    Args:
        url: of the copy.
        save_id: of the checkpoint.
        bytes_written: by this rank.
        bytes_total: of the checkpoint's own files, by all ranks; what it refers to is copied once for several.
        seconds: on this rank, from its turn to the commit.
    """

    url: str
    save_id: str
    bytes_written: int
    bytes_total: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Upload:
    """A checkpoint to be copied, by the name of its directory, and the callbacks before and after the copy."""

    ranks: Ranks  # of the side channel
    name: str
    beforehand: Callable[[str], None]
    afterwards: Callable[[Storage], None]


class MirrorCopier(Task):
    """Copies committed checkpoints from one root to another, in the background. All ranks must make the same calls.

    Args:
        local: where checkpoints are saved: a path that all ranks see, as `save` wants it.
        remote: where the copies go, such as "s3://bucket/run".
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
        process_group: the ranks that copy, where they are not all of the job.
    """

    def __init__(
        self,
        local: str | os.PathLike[str],
        remote: str | os.PathLike[str],
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        process_group: Group | None = None,
    ) -> None:
        self._group = SharedGroup(process_group, deadline_seconds)
        self._local, self.remote = storage_of(local), hold(remote, self)
        self._side = SideRanks("copies of checkpoints")
        self._referred: frozenset[str] = frozenset()  # directories that get what the one being copied refers to
        super().__init__(Turns(self._copy, self._describe, "shardopt-mirror"))
        self.report: UploadReport | None = None  # of the last upload that was made

    def prepare(self) -> None:
        """Opens the ranks' side channel for copies, if `upload` has not yet; collective then."""
        self._side.of(self._group.ranks)

    def upload(self, name: str, afterwards: Callable[[Storage], None] = lambda copies: None) -> None:
        """Begins to copy a committed checkpoint, after those before it. Collective; does not wait.

        A checkpoint that waits for its turn is left out once a newer one waits behind it. So copies may lag behind
        saves, but never further and further. A checkpoint that is there already is left out, too. Another checkpoint of
        that name is never written over: then the upload fails with CheckpointExistsError. One that somebody removes
        meanwhile is left out too, which is logged.

        Files that stand beside those of the checkpoint are copied too; directories and names with a dot first are not.

        Args:
            name: of its directory in the local root, such as "step-00000500". It must stay until it is copied
                (`uploading`).
            afterwards: called by the thread with the remote root, once the copy is committed.

        Raises:
            ShardoptError: an earlier upload has failed, and that was not raised yet. This one was begun all the same.
        """
        earlier = self.failures.take()
        self.begin(name, lambda save_id: None, afterwards)
        if earlier is not None:
            raise earlier

    def begin(self, name: str, beforehand: Callable[[str], None], afterwards: Callable[[Storage], None]) -> None:
        """Begins a copy as `upload` does, but keeps an earlier failure to be taken. Collective; does not wait.

        Args:
            beforehand: called by rank 0's thread with the id of the save, before a copy is made; if it raises, none is.
        """
        ranks = self._side.of(self._group.ranks)
        self._turns.begin(_Upload(ranks, name, beforehand, afterwards))

    def uploading(self) -> frozenset[str]:
        """Returns the names of checkpoints that are being or will be copied, and must not be removed. Local."""
        return frozenset(each.name for each in self._turns.jobs)

    def filling(self) -> frozenset[str]:
        """Returns the directories to which the running copy adds files that its checkpoint refers to. Local.

        They must not be removed: the copy that refers to them is not there yet.
        """
        return self._referred

    def committed(self) -> list[tuple[str, str]]:
        """Returns the name and URL of every committed checkpoint of both roots, newest first. Collective.

        Newest are those with the greatest numbers in their names. Of one name the local copy comes first; it counts
        only if every rank sees it.

        Raises:
            CheckpointError: one of the roots cannot be read, or some ranks see checkpoints in the local one and others
                none. The newest cannot be known then.
        """

        def decide(names: list[list[str]]) -> list[list[str]]:
            refuse_seen_by_some(self._local.url, [bool(each) for each in names])
            return [sorted(set.intersection(*map(set, names))), _committed(self.remote)]

        _, (local, remote) = self._group.ranks.agree(
            f"looking for checkpoints in {self._local.url} and {self.remote.url}",
            work=lambda: _committed(self._local),
            report=lambda names: names,
            decide=decide,
        )
        both = sorted({*local, *remote}, key=by_numbers, reverse=True)
        places = ((self._local, local), (self.remote, remote))
        return [(name, root.child(name).url) for name in both for root, names in places if name in names]

    def wait(self) -> None:
        """Waits until no copy is running. Raises the failure of an upload, if it was not raised yet."""
        self.close()

    def __enter__(self) -> MirrorCopier:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _describe(self, upload: _Upload) -> str:
        return f"copying {self._local.child(upload.name).url} to {self.remote.child(upload.name).url}"

    def _copy(self, upload: _Upload) -> None:
        """Copies a checkpoint in its turn; skips it if a newer one waits."""
        begin, ranks = world().monotonic(), upload.ranks
        source, target = self._local.child(upload.name), self.remote.child(upload.name)

        def read() -> tuple[Manifest, bytes]:
            manifest, data = read_manifest(source)
            self._referred = frozenset(file.directory for file in manifest.referred_files if file.directory)
            if ranks.rank == 0:
                upload.beforehand(manifest.save_id)
            return manifest, data

        with ranks.beating():
            try:
                copied = copy_over_ranks(ranks, source, target, read, lambda: self._turns.jobs[-1] is upload)
            except CheckpointError:  # on all ranks
                if not ranks.on_rank_0(self._describe(upload), lambda: _is_gone(self._local, upload.name)):
                    raise
                copied = None
            finally:
                self._referred = frozenset()
            if copied is None:
                return
            manifest, nbytes = copied
            total = sum(file.nbytes for file in manifest.own_files)
            self.report = UploadReport(target.url, manifest.save_id, nbytes, total, world().monotonic() - begin)
            emit_report("upload", self.report, for_all=ranks.rank == 0)
            upload.afterwards(self.remote)


def _is_gone(root: Storage, name: str) -> bool:
    """Whether a checkpoint is not there any more, but its root is, and not a disk less; logs it. On rank 0."""
    checkpoint = root.child(name)
    with wrap_os_errors(f"look into {checkpoint.url}"):
        if checkpoint.exists(MANIFEST_NAME) or not root.names():
            return False
    _log.warning("%s is not copied: it was removed before, as by `shardopt prune`", checkpoint.url)
    return True


def _committed(root: Storage) -> list[str]:
    with wrap_os_errors(f"look into {root.url}"):
        names = root.names()
    return committed_or_unread(root, names)
