"""What makes a checkpoint exist, and how one is found: its manifest, written last."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shardopt.checkpoint.describe import Values
from shardopt.checkpoint.format import DATA_SUFFIX, MANIFEST_NAME, file_name
from shardopt.checkpoint.manifest import (
    DataFile,
    Manifest,
    StoredLayout,
    StoredTensor,
    StoredTensors,
    decode_manifest,
    encode_manifest,
)
from shardopt.checkpoint.storage import Storage
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
    storage: Storage, save_id: str, plan: SavePlan, values: Values, reports: Sequence[Sequence[Sequence[Any]]]
) -> int:
    """Makes the checkpoint exist, once every rank has reported its files. On rank 0 only.

    Args:
        values: plain values in their typed JSON form.
        reports: by rank, the name, bytes and digest of each file that it wrote.

    Returns:
        The bytes of all data files.
    """
    manifest = manifest_of(save_id, plan, values, reports)
    names = {file.name for file in manifest.files}
    # torch's reader takes every data file in the directory, those of a save that died included.
    for name in storage.names():
        if name.endswith(DATA_SUFFIX) and name not in names:
            storage.remove(name)
    refuse_committed(storage)
    storage.publish(MANIFEST_NAME, encode_manifest(manifest))
    return sum(file.nbytes for file in manifest.files)


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
    try:
        data = storage.read(MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        there = storage.names()
        found = f"{len(there)} files of a save that was not finished" if there else "nothing"
        problem = Problem(storage.url, found, f"a committed checkpoint (with {MANIFEST_NAME})", "give another path")
        raise CheckpointNotFoundError("there is no checkpoint", [problem]) from None
    return decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}"), data
