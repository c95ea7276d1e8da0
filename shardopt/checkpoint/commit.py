"""Commits a checkpoint by its manifest, which is written last, and removes checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardopt.checkpoint.format.constants import (
    FILE_NAME,
    MANIFEST_NAME,
    file_name,
)
from shardopt.checkpoint.format.manifest import (
    DataFile,
    Manifest,
    RenameRules,
    StoredLayout,
    StoredTensor,
    StoredTensors,
    encode_manifest,
)
from shardopt.checkpoint.format.shared_values import Values, decode_each
from shardopt.checkpoint.planning.save_plan import SavePlan
from shardopt.checkpoint.refer import Unchanged, refer
from shardopt.checkpoint.sources.read_manifest import read_manifest
from shardopt.checkpoint.sources.referred import References, files_by_directory, references_under, referred_in
from shardopt.checkpoint.storage import Storage, is_temporary
from shardopt.checkpoint.storage.no_space import explain_no_space
from shardopt.checkpoint.writing.unchanged import Base
from shardopt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, Problem
from shardopt.world import world

_FEW_FILES = 16  # that are removed one after the other
_THREADS = 4
_FAR_THREADS = 32  # where they wait for answers all the time

_log = logging.getLogger("shardopt.checkpoint")


def refuse_committed(storage: Storage) -> None:
    """Raises CheckpointExistsError if a committed checkpoint stands here."""
    if storage.exists(MANIFEST_NAME):
        raise _taken(storage)


def _taken(storage: Storage) -> CheckpointExistsError:
    remedy = "save to a new path; a committed checkpoint is never written over"
    problem = Problem(storage.url, "a committed checkpoint", "no checkpoint", remedy)
    return CheckpointExistsError("the path is taken", [problem])


def commit(
    storage: Storage,
    save_id: str,
    plan: SavePlan,
    values: Values,
    reports: Sequence[Sequence[Sequence[Any]]],
    metrics: bytes | None = None,
    saved_at: float | None = None,
    renamed: RenameRules | None = None,
) -> int:
    """Commits a checkpoint, once every rank has reported its files. On rank 0 only.

    Args:
        values, reports, metrics, saved_at, renamed: as for `manifest_to_commit`.

    Returns:
        The bytes of all data files that were written.
    """
    manifest, data = manifest_to_commit(save_id, plan, values, reports, metrics, saved_at, renamed=renamed)
    publish_checkpoint(storage, manifest, data)
    return sum(file.nbytes for file in manifest.own_files)


def manifest_to_commit(
    save_id: str,
    plan: SavePlan,
    values: Values,
    reports: Sequence[Sequence[Sequence[Any]]],
    metrics: bytes | None = None,
    saved_at: float | None = None,
    unchanged: Unchanged | None = None,
    seconds: float | None = None,
    renamed: RenameRules | None = None,
) -> tuple[Manifest, bytes]:
    """Makes the manifest of a checkpoint of which every rank has reported its files; returns it, and its bytes.

    Args:
        values: plain values in their typed JSON form.
        reports: by rank, the name, bytes and digest of each file that it wrote.
        metrics: numbers by name, as `pack_metrics` gives them.
        saved_at: when it was saved, in seconds since 1970 began; None for now.
        unchanged: what it refers to an earlier save for; None where that is nothing.
        seconds: how long the save took until now; None where that says nothing of another.
        renamed: the rules of `rename` that the names have been through since the run began; None where it is not known.
    """
    manifest = replace(
        manifest_of(save_id, plan, values, reports, unchanged),
        saved_at=world().wall_clock() if saved_at is None else saved_at,
        metrics={} if metrics is None else json.loads(metrics),
        seconds=seconds,
        renamed=renamed,
    )
    return manifest, encode_manifest(manifest)


def publish_checkpoint(storage: Storage, manifest: Manifest, data: bytes, base: Base | None = None) -> None:
    """Writes the manifest of a checkpoint whose data files are there, unless the path was taken meanwhile.

    Others may be at work here: another save to this path, which it saw free as well, or a job that clears away what it
    takes for the remains of a dead one. So no file of others is touched before the manifest is there, of which only one
    can be; and afterwards the data files must still be there, or the manifest is removed again. `remove_checkpoint`
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
    _refuse_gone(_missing_referred(storage, manifest))
    _, missing = _look_for_files(storage, manifest)
    if missing:
        refuse_committed(storage)  # whose commit has removed them
        remedy = "give all ranks the same path, on storage that they share"
        problems = [Problem(each, "no such file on rank 0", "what was written", remedy) for each in missing]
        raise CheckpointError("rank 0 does not see the files of other ranks", problems)
    try:
        with explain_no_space(storage, "the manifest", data.__len__, lambda: 0):
            exclusive = storage.publish_new(MANIFEST_NAME, data)
    except FileExistsError:
        raise _taken(storage) from None
    there, missing = _look_for_files(storage, manifest)
    gone = _missing_referred(storage, manifest)
    if manifest.referred_files and base is not None and not base.is_there():
        gone.append(f"{base.source.url}/{MANIFEST_NAME}")
    if missing or gone:
        with suppress(FileNotFoundError):  # whoever has removed the files has come to the manifest meanwhile
            if storage.read_rest(MANIFEST_NAME, 0, len(data)) == data:
                storage.remove_durably(MANIFEST_NAME)
        _refuse_gone(gone)
        remedy = "give each job a path of its own"
        problems = [Problem(each, "no such file any more", "what was written", remedy) for each in missing]
        raise CheckpointError("files of the checkpoint were removed while it was committed", problems)
    if exclusive:
        _remove_remains(storage, manifest, there)


def _look_for_files(storage: Storage, manifest: Manifest) -> tuple[set[str], list[str]]:
    """Returns the names of all files that are there, and the URLs of those of the manifest that are not."""
    wanted, there = {file.name for file in manifest.own_files}, set(storage.names())
    # A listing may be older than a file (NFS keeps them for a while): a name that is not in it is looked up.
    return there, [f"{storage.url}/{name}" for name in sorted(wanted - there) if not storage.exists(name)]


def _missing_referred(storage: Storage, manifest: Manifest) -> list[str]:
    """Returns the URLs of files in directories beside this one that are not there."""
    missing = []
    for beside, files in files_by_directory(manifest.referred_files, storage):
        absent = sorted({file.name for file in files} - set(beside.names()))
        missing += [f"{beside.url}/{name}" for name in absent if not beside.exists(name)]
    return missing


def _refuse_gone(gone: Sequence[str]) -> None:
    """Raises CheckpointError where something that a save refers to is not there any more."""
    remedy = "save once more; nothing but this run's own rules may remove what is under its root"
    if gone:
        problems = [Problem(each, "removed meanwhile", "what an earlier save has", remedy) for each in gone]
        raise CheckpointError("what the checkpoint refers to was removed while it was saved", problems)


def _remove_remains(storage: Storage, manifest: Manifest, there: set[str]) -> None:
    """Removes data files of other saves: torch's reader takes every one in the directory.

    They are of a save that died, or of one that will find the path taken. The checkpoint is whole without this.
    """
    # Among those that it refers to may be remains here, of what was removed and is saved once more.
    own = {file.name for file in manifest.files}
    remains = [name for name in sorted(there - own) if FILE_NAME.fullmatch(name)]
    try:
        referred = referred_in(storage) if remains else ()
        for name in remains:
            if name not in referred:
                storage.remove(name)
    except (OSError, CheckpointError) as error:
        _log.warning("remains of other saves could not be removed from %s: %s", storage.url, error)


def manifest_of(
    save_id: str,
    plan: SavePlan,
    values: Values,
    reports: Sequence[Sequence[Sequence[Any]]],
    unchanged: Unchanged | None = None,
) -> Manifest:
    """Returns the manifest of the files that the ranks have reported.

    Raises:
        CheckpointError: a rank wrote other files than those that were assigned to it.
    """
    files = tuple(DataFile(*file) for report in reports for file in report)
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
        raise CheckpointError("ranks did not write what they were to write", [problem])
    return Manifest(
        save_id=save_id,
        world_size=len(reports),
        files=files,
        tensors=tensors,
        values=decode_each(values),
        per_rank=plan.geometry.per_rank,
    )


def _stored_tensors(plan: SavePlan) -> StoredTensors:
    number = {writer: i for i, writer in enumerate(plan.files)}
    layouts = {
        assignment: StoredLayout(
            assignment.shape, assignment.boxes, tuple(number[writer] for writer in assignment.writers)
        )
        for assignment in set(plan.assigned.values())
    }
    stored = StoredTensors(
        (key, StoredTensor(member.path, member.dtype, layouts[plan.assigned[key]]))
        for key, member in plan.geometry.members.items()
    )
    for key, (tied_to, path) in plan.geometry.tied.items():
        stored[key] = stored[tied_to]._replace(path=path, tied_to=tied_to)
    return stored


def discard(storage: Storage, save_id: str) -> None:
    """Removes the files of a failed save, and no others, unless it is committed all the same or may yet be.

    Of a copy there may be a second process that makes it anew, and commits it now: then its manifest is removed too.
    """
    with suppress(Exception):  # the error that is being raised must not be hidden by another
        if _committed_id(storage) != save_id and not storage.may_appear(MANIFEST_NAME):
            own = [name for name in storage.names() if FILE_NAME.fullmatch(name) and name.startswith(f"{save_id}-")]
            referred = referred_in(storage) if own else ()  # to the first copies of what is copied again
            removed = [name for name in own if name not in referred]
            for name in removed:
                storage.remove(name)
            if removed and _committed_id(storage) == save_id:
                storage.remove_durably(MANIFEST_NAME)


def _committed_id(storage: Storage) -> str | None:
    """Returns the id of the save that is committed; None where there is none."""
    try:
        return read_manifest(storage)[0].save_id
    except CheckpointNotFoundError:
        return None


def remove_checkpoint(storage: Storage) -> None:
    """Removes a checkpoint, or the remains of one. Killed at any point, it leaves none, or one that is whole.

    Only files that saves write are removed; the directory too, unless somebody else has put something there. Data files
    to which checkpoints beside it refer stay, without a manifest, until the last of these is removed.
    """
    remove_checkpoints([storage])


def remove_checkpoints(storages: Sequence[Storage]) -> None:
    """Removes several checkpoints in the directory of one run as `remove_checkpoint` does; looks once for references.

    Raises:
        CheckpointError: a manifest beside them cannot be read. They are no checkpoints any more then, and have all
            their data files.
    """
    for storage in storages:
        storage.remove_durably(MANIFEST_NAME)  # durably first: without it nobody takes the rest for a checkpoint
    names = {
        storage: [name for name in storage.names() if FILE_NAME.fullmatch(name) or is_temporary(name)]
        for storage in storages
    }
    # After the manifests: from now on no save can refer to what only they had.
    referred = _referred_in([storage for storage in storages if names[storage]])
    for storage in storages:
        _remove_each(storage, [name for name in names[storage] if name not in referred[storage]])
        storage.remove_durably(MANIFEST_NAME)  # of a save that was taken for dead, and committed what is gone now
        storage.remove_if_empty()


def _remove_each(storage: Storage, names: Sequence[str]) -> None:
    """Removes files, as many at a time as a storage can take; a job leaves one or more for each of its ranks."""
    if len(names) <= _FEW_FILES:
        for name in names:
            storage.remove(name)
        return
    threads = _FAR_THREADS if storage.is_remote else _THREADS
    with world().thread_pool(threads, "shardopt-remove") as pool:
        for _ in pool.map(storage.remove, names):
            pass


def _referred_in(storages: Sequence[Storage]) -> dict[Storage, frozenset[str]]:
    """Returns the names of files in these directories to which checkpoints beside them refer."""
    if len(storages) == 1:
        return {storages[0]: referred_in(storages[0])}
    of_roots: dict[str, References] = {}
    referred: dict[Storage, frozenset[str]] = {}
    for storage in storages:
        parent = storage.parent()
        if parent is not None and parent[0].url not in of_roots:
            of_roots[parent[0].url] = references_under(parent[0])
        referred[storage] = frozenset() if parent is None else of_roots[parent[0].url].get(parent[1], frozenset())
    return referred
