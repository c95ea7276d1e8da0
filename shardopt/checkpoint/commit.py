"""What makes a checkpoint exist, and how one is found: its manifest, written last."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardopt.checkpoint.describe import Values
from shardopt.checkpoint.format import (
    FILE_NAME,
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    damaged,
    file_name,
)
from shardopt.checkpoint.manifest import (
    DataFile,
    Manifest,
    StoredLayout,
    StoredTensor,
    StoredTensors,
    decode_manifest,
    encode_manifest,
)
from shardopt.checkpoint.storage import Storage, telling
from shardopt.checkpoint.write import SavePlan
from shardopt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, Problem
from shardopt.values import decode_value


def refuse_committed(storage: Storage) -> None:
    """Raises CheckpointExistsError if a committed checkpoint stands here."""
    if storage.exists(MANIFEST_NAME):
        remedy = "save to a new path; a committed checkpoint is never written over"
        problem = Problem(storage.url, "a committed checkpoint", "no checkpoint", remedy)
        raise CheckpointExistsError("the path is taken", [problem])


def commit(
    storage: Storage,
    save_id: str,
    plan: SavePlan,
    values: Values,
    reports: Sequence[Sequence[Sequence[Any]]],
    metrics: bytes | None = None,
    saved_at: float | None = None,
) -> int:
    """Makes the checkpoint exist, once every rank has reported its files. On rank 0 only.

    Args:
        values: plain values in their typed JSON form.
        reports: by rank, the name, bytes and digest of each file that it wrote.
        metrics: numbers by name, as `pack_metrics` gives them.
        saved_at: when it was saved, in seconds since 1970 began; None for now.

    Returns:
        The bytes of all data files.
    """
    manifest = replace(
        manifest_of(save_id, plan, values, reports),
        saved_at=time.time() if saved_at is None else saved_at,
        metrics={} if metrics is None else json.loads(metrics),
    )
    data = encode_manifest(manifest)
    settle_files(storage, manifest)
    refuse_committed(storage)
    storage.publish(MANIFEST_NAME, data)
    return sum(file.nbytes for file in manifest.files)


def settle_files(storage: Storage, manifest: Manifest) -> set[str]:
    """Refuses to commit where files of the manifest are not there; removes what other saves have left.

    Returns:
        The names of all files that were there before.
    """
    wanted, there = {file.name for file in manifest.files}, set(storage.names())
    # A listing may be older than a file (NFS keeps them for a while): what is not in it is asked for by name.
    unseen = [name for name in sorted(wanted - there) if not storage.exists(name)]
    if unseen:
        remedy = "give all ranks the same path, on storage that they share"
        problems = [
            Problem(f"{storage.url}/{name}", "no such file on rank 0", "what was written", remedy) for name in unseen
        ]
        raise CheckpointError("rank 0 does not see the files of other ranks", problems)
    # torch's reader takes every data file in the directory, those of a save that died included.
    for name in there - wanted:
        if FILE_NAME.fullmatch(name):
            storage.remove(name)
    return there


def manifest_of(save_id: str, plan: SavePlan, values: Values, reports: Sequence[Sequence[Sequence[Any]]]) -> Manifest:
    """The manifest of files that the ranks have reported.

    Raises:
        CheckpointError: a rank wrote other files than those that were assigned to it.
    """
    files = tuple(DataFile(*file) for report in reports for file in report)
    found = [file.name for file in files]
    if plan.stored is None:
        plan.stored = _stored_tensors(plan)
    wanted = [file_name(save_id, rank, slot) for rank, slot in plan.files]
    if found != wanted:
        problem = Problem("data files", f"{sorted(set(found) ^ set(wanted))}", "what was assigned", "report this")
        raise CheckpointError("ranks did not write what they were to write", [problem])
    return Manifest(
        save_id=save_id,
        world_size=len(reports),
        files=files,
        tensors=plan.stored,
        values={key: (path, decode_value(value)) for key, (path, value) in values.items()},
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
    return StoredTensors(
        (key, StoredTensor(member.path, member.dtype, layouts[plan.assigned[key]]))
        for key, member in plan.geometry.members.items()
    )


def discard(storage: Storage, save_id: str) -> None:
    """Removes what a failed save has written, unless it was committed all the same."""
    with suppress(Exception):  # the error that brought us here must not be hidden by another
        if not storage.exists(MANIFEST_NAME):
            for name in storage.names():
                if name.startswith(save_id):
                    storage.remove(name)


def read_manifest(storage: Storage) -> tuple[Manifest, bytes]:
    """The manifest of a committed checkpoint, and its bytes.

    Raises:
        CheckpointNotFoundError: there is none; what lies in the directory besides does not matter.
        CorruptionError, FormatError: it is damaged, or for a newer reader.
    """
    where = f"{storage.url}/{MANIFEST_NAME}"
    with telling(f"read {where}"):
        try:
            nbytes = storage.size(MANIFEST_NAME)
            if nbytes > MANIFEST_LIMIT_BYTES:
                raise damaged(where, f"{nbytes} bytes, more than the limit of {MANIFEST_LIMIT_BYTES}")
            data = storage.read(MANIFEST_NAME, 0, nbytes)
        except FileNotFoundError:
            there = storage.names()
            found = f"{len(there)} files of a save that was not finished" if there else "nothing"
            problem = Problem(storage.url, found, f"a committed checkpoint (with {MANIFEST_NAME})", "give another path")
            raise CheckpointNotFoundError("there is no checkpoint", [problem]) from None
    return decode_manifest(data, where), data
