"""Commits a checkpoint by its manifest, which is written last, to the storage that all ranks of a save see."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from shardopt.checkpoint.format.constants import FILE_NAME, MANIFEST_NAME, file_name
from shardopt.checkpoint.format.manifest import (
    DataFile,
    Manifest,
    RenameRules,
    StoredLayout,
    StoredTensor,
    StoredTensors,
    encode_manifest,
)
from shardopt.checkpoint.format.values import Values
from shardopt.checkpoint.saving.planning.save_plan import SavePlan
from shardopt.checkpoint.saving.refer import Unchanged, refer
from shardopt.checkpoint.saving.removal import discard
from shardopt.checkpoint.saving.writing.base import Base
from shardopt.checkpoint.saving.writing.no_space import explain_no_space
from shardopt.checkpoint.sources.referred import files_by_directory, referred_in
from shardopt.checkpoint.storage import Storage, storage_of
from shardopt.checkpoint.storage.marker import remove_marker, wait_for_marker, write_marker
from shardopt.checkpoint.text import WHERE_TAKEN
from shardopt.errors import CheckpointError, CheckpointExistsError, Problem
from shardopt.ranks import Call, Ranks
from shardopt.version import WRITER
from shardopt.world import world

Reports = Sequence[Sequence[Sequence[object]]]
"""Name, bytes and digest of each written file, by rank."""

_log = logging.getLogger("shardopt.checkpoint")


class SaveTarget:
    """The destination of one save, as one rank sees it: a directory, or object store prefix, that all ranks see.

    Its manifest is the commit. The methods are called in this order.
    """

    storage: Storage
    """The directory that this rank writes to, after `open`."""
    url: str
    """The URL of the checkpoint, after `open`."""
    base: Base | None = None
    """The earlier save that this one refers to, on ranks that could open it."""

    def __init__(self, ranks: Ranks, url: str | os.PathLike[str], durable: bool) -> None:
        self._ranks, self._url, self._durable = ranks, url, durable
        self._is_made = False  # the directory, by this save

    def open(self) -> None:
        """Opens the directory, on all ranks, in the first round of the save."""
        self.storage = storage_of(self._url, self._durable)
        self.url = self.storage.url

    def refuse_taken(self) -> None:
        """Raises CheckpointExistsError if there is a checkpoint; on rank 0."""
        if self.storage.exists(MANIFEST_NAME):
            raise _taken(self.storage)

    def begin(self, save_id: str) -> None:
        """Makes the directory, on rank 0. Raises NoSpaceError."""
        self._is_made = not (self.storage.is_remote or os.path.isdir(self.storage.url))
        try:
            with explain_no_space(self.storage, "a directory", int, int, save_id):
                self.storage.make()
                if self._ranks.size > 1:
                    write_marker(self.storage, save_id)
        except BaseException:
            self._remove_made()
            raise

    def wait(self, save_id: str) -> None:
        """Waits until this rank may write; on ranks other than rank 0."""
        wait_for_marker(self.storage, save_id)

    def publish(self, manifest: Manifest, data: bytes) -> str | None:
        """Commits the files that all ranks wrote, on rank 0; returns what all ranks need for `settle`, or None."""
        if self._ranks.size > 1:
            remove_marker(self.storage, manifest.save_id)
        publish_checkpoint(self.storage, manifest, data, self.base)
        return None

    def settle(self, call: Call, published: str) -> None:
        """Completes the commit, if `publish` returned something. Collective."""

    def discard(self, save_id: str) -> None:
        """Removes the files of a failed save that this rank may remove; on all ranks."""
        # Rank 0 alone: only it could still commit, and has now failed to. Another rank might remove the files of a
        # commit that it does not know of.
        if self._ranks.rank == 0:
            discard(self.storage, save_id)
            self._remove_made()

    def _remove_made(self) -> None:
        """Removes the directory again if this save has made it, and it is empty: each costs an inode."""
        if self._is_made:
            with suppress(OSError):  # the error that is being raised must not be hidden by another
                self.storage.remove_if_empty()


def refuse_committed(storage: Storage) -> None:
    """Raises CheckpointExistsError if there is a committed checkpoint here."""
    if storage.exists(MANIFEST_NAME):
        raise _taken(storage)


def _taken(storage: Storage) -> CheckpointExistsError:
    problem = Problem(storage.url, "a committed checkpoint", "no checkpoint", WHERE_TAKEN)
    return CheckpointExistsError("the path is taken", [problem])


def make_manifest(
    save_id: str,
    plan: SavePlan,
    values: Values,
    reports: Reports,
    *,
    metrics: Mapping[str, float] | None = None,
    saved_at: float | None = None,
    unchanged: Unchanged | None = None,
    seconds: float | None = None,
    renamed: RenameRules | None = None,
    frozen: tuple[str, ...] | None = None,
    in_eval: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[Manifest, bytes]:
    """Makes the manifest of a checkpoint from all ranks' reports of their files; returns it, and its bytes.

    Args:
        values: plain values as typed JSON; the manifest that is returned has them in its bytes alone.
        metrics: numbers by name; None for none.
        saved_at: when it was saved, in seconds since 1970 began; None for now.
        unchanged: what ranks refer to an earlier save for; None where that is nothing.
        seconds: how long the save took until now; None where that says nothing of another.
        renamed: the rules of `rename` that the names have been through since the run began; None where it is not known.
        frozen: the keys of frozen parameters of optimizers; None where it is not known.
        in_eval: the names of layers in `eval()`, by the key of their module; None where it is not known.

    Raises:
        CheckpointError: a rank wrote other files than those that were assigned to it.
    """
    files = tuple(DataFile(*file) for report in reports for file in report)  # type: ignore[arg-type]  # as JSON has it
    names = [file.name for file in files]
    writers: Sequence[tuple[int, int]] = plan.files
    if unchanged is not None:
        writers, referred, tensors = refer(plan, unchanged)
        files += referred
    else:
        if plan.stored is None:
            plan.stored = _stored_tensors(plan)
        tensors = plan.stored
    wanted = [file_name(save_id, rank, slot) for rank, slot in writers]
    if names != wanted:
        problem = Problem("data files", f"{sorted(set(names) ^ set(wanted))}", "what was assigned", "report this")
        raise CheckpointError("ranks did not write what they were to write", [problem], code="internal")
    manifest = Manifest(
        save_id=save_id,
        world_size=len(reports),
        files=files,
        tensors=tensors,
        per_rank=plan.geometry.per_rank,
        saved_at=world().wall_clock() if saved_at is None else saved_at,
        metrics=metrics or {},
        seconds=seconds,
        renamed=renamed,
        frozen=frozen,
        in_eval=in_eval,
        written_by=WRITER,
        module_versions=plan.geometry.versions or None,
    )
    return manifest, encode_manifest(manifest, values)


def _stored_tensors(plan: SavePlan) -> StoredTensors:
    number = {writer: i for i, writer in enumerate(plan.files)}
    layouts = {
        assignment: StoredLayout(assignment.shape, assignment.boxes, tuple(map(number.__getitem__, assignment.writers)))
        for assignment in set(plan.assigned.values())
    }
    stored = StoredTensors(
        (key, StoredTensor(member.path, member.dtype, layouts[plan.assigned[key]]))
        for key, member in plan.geometry.members.items()
    )
    for key, (tied_to, path) in plan.geometry.tied.items():
        stored[key] = stored[tied_to]._replace(path=path, tied_to=tied_to)
    return stored


def publish_checkpoint(storage: Storage, manifest: Manifest, data: bytes, base: Base | None = None) -> None:
    """Writes the manifest of a checkpoint whose data files exist, unless the path was taken meanwhile.

    Others may be at work here: another save to this path, which it saw free as well, or a job that clears away what it
    takes for the remains of a dead one. So no file of others is touched before the manifest is there, of which only one
    can be; and afterwards it and the data files must be there, or the manifest is removed again. `remove_checkpoint`
    looks for a manifest once more after all else is removed: whichever comes last of the two sees the other's work.

    Of files that it refers to the same is true: they may be removed with a checkpoint beside it until the manifest is
    there, and no longer. `sources/referred.py` is the other half of this.

    Args:
        data: the manifest's bytes.
        base: by whose manifest the save has found what it refers to.

    Raises:
        CheckpointExistsError: another checkpoint was committed here.
        CheckpointError: files of the manifest are not there.
    """
    own = {file.name for file in manifest.files if file.directory is None}
    refers = len(own) < len(manifest.files)
    if refers:
        _refuse_gone(_missing_referred(storage, manifest))
    unlisted = own.difference(storage.names())
    missing = _missing(storage, unlisted) if unlisted else []
    if missing:
        refuse_committed(storage)  # whose commit has removed them
        remedy = "give all ranks the same path, on storage that they share, and each job a path of its own"
        problems = [Problem(each, "no such file on rank 0", "what was written", remedy) for each in missing]
        raise CheckpointError("rank 0 does not see the files of other ranks", problems, code="files-missing")
    try:
        with explain_no_space(storage, "the manifest", data.__len__, lambda: 0, manifest.save_id):
            exclusive = storage.publish_new(MANIFEST_NAME, data)
    except FileExistsError:
        raise _taken(storage) from None
    there = set(storage.names())
    unlisted = {*own, MANIFEST_NAME}.difference(there)
    missing = _missing(storage, unlisted) if unlisted else []
    gone = _missing_referred(storage, manifest) if refers else []
    if refers and base is not None and not base.is_there():
        gone.append(f"{base.source.url}/{MANIFEST_NAME}")
    if missing or gone:
        with suppress(FileNotFoundError):  # whoever has removed the files has come to the manifest meanwhile
            if storage.read_rest(MANIFEST_NAME, 0, len(data)) == data:
                storage.remove_durably(MANIFEST_NAME)
        _refuse_gone(gone)
        remedy = "give each job a path of its own"
        problems = [Problem(each, "no such file any more", "what was written", remedy) for each in missing]
        raise CheckpointError(
            "files of the checkpoint were removed while it was committed", problems, code="files-missing"
        )
    # Files of another save, whose commit will find the path taken, or which died: torch's reader takes every one in the
    # directory. Files that this one refers to may lie here too, where a removed checkpoint is saved again.
    remains = there.difference(file.name for file in manifest.files)
    if exclusive and any(map(FILE_NAME.fullmatch, remains)):
        _remove_remains(storage, remains)


def _missing(storage: Storage, unlisted: set[str]) -> list[str]:
    """Returns the URLs of missing files. Checks each one, as listings may be outdated (NFS caches them)."""
    return [f"{storage.url}/{name}" for name in sorted(unlisted) if not storage.exists(name)]


def _missing_referred(storage: Storage, manifest: Manifest) -> list[str]:
    """Returns the URLs of missing files in directories beside this one."""
    missing = []
    for beside, files in files_by_directory(manifest.referred_files, storage):
        missing += _missing(beside, {file.name for file in files}.difference(beside.names()))
    return missing


def _refuse_gone(gone: Sequence[str]) -> None:
    """Raises CheckpointError if something that a save refers to no longer exists."""
    remedy = "save once more; nothing but this run's own rules may remove what is under its root"
    if gone:
        problems = [Problem(each, "removed meanwhile", "what an earlier save has", remedy) for each in gone]
        raise CheckpointError(
            "what the checkpoint refers to was removed while it was saved", problems, code="files-missing"
        )


def _remove_remains(storage: Storage, remains: set[str]) -> None:
    """Removes data files of other saves that no checkpoint refers to. The checkpoint is whole without this."""
    try:
        for name in sorted(remains - referred_in(storage)):
            if FILE_NAME.fullmatch(name):
                storage.remove(name)
    except (OSError, CheckpointError) as error:
        _log.warning("leftover files of other saves could not be removed from %s: %s", storage.url, error)
