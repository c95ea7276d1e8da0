"""What makes a checkpoint exist, and how one is found: its manifest, written last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from shardopt.checkpoint.describe import Agreed
from shardopt.checkpoint.format import DATA_SUFFIX, MANIFEST_NAME, file_name
from shardopt.checkpoint.manifest import (
    DataFile,
    Manifest,
    StoredLayout,
    StoredTensor,
    decode_manifest,
    encode_manifest,
)
from shardopt.checkpoint.plan import Assignment
from shardopt.checkpoint.storage import Storage
from shardopt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, Problem


def refuse_committed(storage: Storage) -> None:
    """Raises CheckpointExistsError if a committed checkpoint stands here."""
    if storage.exists(MANIFEST_NAME):
        remedy = "save to a new path; a committed checkpoint is never written over"
        problem = Problem(storage.url, "a committed checkpoint", "no checkpoint", remedy)
        raise CheckpointExistsError("the path is taken", [problem])


def commit(
    storage: Storage,
    save_id: str,
    agreed: Agreed,
    assigned: Mapping[str, Assignment],
    reports: Sequence[Sequence[Sequence[Any]]],
) -> int:
    """Makes the checkpoint exist, once every rank has reported its files. On rank 0 only.

    Args:
        reports: by rank, the name, bytes and digest of each file that it wrote.

    Returns:
        The bytes of all data files.
    """
    files = tuple(DataFile(*file) for report in reports for file in report)
    number = {file.name: i for i, file in enumerate(files)}
    layouts: dict[Assignment, StoredLayout] = {}
    for key, assignment in assigned.items():
        if assignment not in layouts:
            names = [file_name(save_id, rank, slot) for rank, slot in assignment.writers]
            absent = [name for name in names if name not in number]
            if absent:
                problem = Problem(key, f"no file {absent[0]}", "a file from each rank that writes", "report this")
                raise CheckpointError("a rank did not write what it was to write", [problem])
            shape = agreed.members[key].layout.shape
            layouts[assignment] = StoredLayout(shape, assignment.boxes, tuple(number[name] for name in names))
    manifest = Manifest(
        save_id=save_id,
        world_size=len(reports),
        files=files,
        tensors={
            key: StoredTensor(member.path, member.dtype, layouts[assigned[key]])
            for key, member in agreed.members.items()
        },
        values=agreed.values,
        per_rank=agreed.per_rank,
    )
    # torch's reader takes every data file in the directory, those of a save that died included.
    for name in storage.names():
        if name.endswith(DATA_SUFFIX) and name not in number:
            storage.remove(name)
    refuse_committed(storage)
    storage.publish(MANIFEST_NAME, encode_manifest(manifest))
    return sum(file.nbytes for file in files)


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
