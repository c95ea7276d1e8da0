"""Lists one host's shares of checkpoints on a tier, and the tiers that a run had; needs no job, changes nothing.

    tiers.json    {"format": "shardopt-tiers", "tiers": [{"path": "/dev/shm/run-7", "every": 5, …}]}

lies under the root of a run and names the tiers that its last job had. It is for those who look alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardopt.checkpoint.format.constants import (
    MANIFEST_LIMIT_BYTES,
    RECORD_NAME,
    damaged,
    is_sealed,
    pack_record,
    unpack_record,
    writer_of,
)
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.hosts.directory import PREFIX, is_host_directory
from shardopt.checkpoint.run.branches import CheckpointId, ids_in
from shardopt.checkpoint.run.root import LABEL_NAME, RunIdentity, run_at
from shardopt.checkpoint.sources.reading.open_file import DataFileReader
from shardopt.checkpoint.sources.reading.verified_chunks import verify
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.errors import CheckpointError, CorruptionError, Problem

TIERS_NAME = "tiers.json"
_FORMAT = "shardopt-tiers"

Have = Literal["all", "some", "unfinished", "damaged", "unreadable"]


@dataclass(frozen=True, slots=True)
class HostShare:
    """One host's share of a checkpoint that is spread over hosts, as far as this host can tell by itself.

    Args:
        url: of the share.
        have: "all": the record, and every file that it names. "some": the other files are on other hosts, or lost.
            "unfinished": no record. "damaged": the record is, or a file has other bytes than it names. "unreadable": it
            could not be looked at.
        problems: why it is damaged or unreadable.
        id: its step and branch.
        saved_at, world_size: of the save; None where there is no record to tell, and so for what follows.
        ranks: those of which this host has all files, its own and others', ascending.
        files, nbytes: of the whole checkpoint.
        files_here, nbytes_here: of those that this host has.
    """

    url: str
    have: Have
    problems: tuple[Problem, ...]
    id: CheckpointId
    saved_at: float | None = None
    world_size: int | None = None
    ranks: tuple[int, ...] = ()
    files: int | None = None
    nbytes: int | None = None
    files_here: int | None = None
    nbytes_here: int | None = None


@dataclass(frozen=True, slots=True)
class TierListing:
    """The contents of one host's directory of a tier. `run` is None if no record says which run it belongs to."""

    url: str
    run: RunIdentity | None
    shares: tuple[HostShare, ...]


def is_tier(url: str | os.PathLike[str]) -> bool:
    """Whether a URL, with or without "hosts://", is a host's own directory for shares of checkpoints."""
    return is_host_directory(os.fspath(url).removeprefix(PREFIX))


def list_tier(url: str | os.PathLike[str], verify_bytes: bool = False) -> TierListing:
    """Lists this host's shares on a tier. Local, changes nothing.

    Args:
        verify_bytes: whether to read every byte of each file.

    Raises:
        CheckpointError: the directory cannot be read. CorruptionError: the record of its run is damaged.
    """
    storage = storage_of(os.fspath(url).removeprefix(PREFIX))
    with wrap_os_errors(f"look into {storage.url}"):
        ids = ids_in(storage.names())
    shares = (_look_at(storage.child(id.name), id, verify_bytes) for id in ids)
    return TierListing(storage.url, run_at(storage, LABEL_NAME), tuple(each for each in shares if each is not None))


def _look_at(storage: Storage, id: CheckpointId, verify_bytes: bool) -> HostShare | None:
    """Describes a share; None if the run has removed it meanwhile, as its files are then gone or overwritten."""
    seen = _describe(storage, id, verify_bytes)
    try:
        is_there = seen.have not in ("damaged", "unreadable") or storage.exists(RECORD_NAME)
    except OSError:
        is_there = True
    return seen if is_there else None


def _describe(storage: Storage, id: CheckpointId, verify_bytes: bool) -> HostShare:
    try:
        with wrap_os_errors(f"look into {storage.url}"):
            try:
                data = storage.read(RECORD_NAME, 0, MANIFEST_LIMIT_BYTES)
            except FileNotFoundError:
                return HostShare(storage.url, "unfinished", (), id)
            where = f"{storage.url}/{RECORD_NAME}"
            if not is_sealed(data):
                raise damaged(where, "bytes that fail the seal at their end")
            return _compared(storage, id, decode_manifest(data, where), verify_bytes)
    except CheckpointError as error:
        have: Have = "damaged" if isinstance(error, CorruptionError) else "unreadable"
        problems = error.problems or (Problem(storage.url, error.message, "what was written", "take another copy"),)
        return HostShare(storage.url, have, tuple(problems), id)


def _compared(storage: Storage, id: CheckpointId, manifest: Manifest, verify_bytes: bool) -> HostShare:
    there = set(storage.names())
    here = [file for file in manifest.files if file.name in there]
    problems: list[Problem] = []
    for file in here:
        size = storage.size(file.name)
        if size != file.nbytes:
            remedy = "restore from another one"
            problems.append(Problem(f"{storage.url}/{file.name}", f"{size} bytes", f"{file.nbytes}", remedy))
        elif verify_bytes:
            try:
                verify(DataFileReader(storage, file))
            except CorruptionError as error:
                problems += error.problems
    elsewhere = {writer_of(file.name) for file in manifest.files if file.name not in there}
    return HostShare(
        storage.url,
        "damaged" if problems else "all" if len(here) == len(manifest.files) else "some",
        tuple(problems),
        id,
        saved_at=manifest.saved_at,
        world_size=manifest.world_size,
        ranks=tuple(sorted({writer_of(file.name) for file in here} - elsewhere)),
        files=len(manifest.files),
        nbytes=sum(file.nbytes for file in manifest.files),
        files_here=len(here),
        nbytes_here=sum(file.nbytes for file in here),
    )


def note_tiers(root: Storage, tiers: Sequence[Mapping[str, Any]]) -> None:
    """Writes a record of the run's tiers under a root, unless it exists. Raises CheckpointError."""
    data = pack_record(_FORMAT, tiers=list(tiers))
    with wrap_os_errors(f"write {root.url}/{TIERS_NAME}"):
        try:
            is_there = root.read_rest(TIERS_NAME, 0, len(data)) == data
        except FileNotFoundError:
            is_there = False
        if not is_there:
            root.publish(TIERS_NAME, data)


def tiers_at(root: Storage) -> list[dict[str, Any]]:
    """Returns the tiers of the run's last job, by path; none if it had none.

    Raises:
        CheckpointError: they cannot be read. CorruptionError: what is written there is damaged.
    """
    where = f"{root.url}/{TIERS_NAME}"
    with wrap_os_errors(f"look into {root.url}"):
        try:
            data = root.read_record(TIERS_NAME)
        except (FileNotFoundError, NotADirectoryError):  # or it is a file
            return []
    tiers = unpack_record(data, where).get("tiers")
    if not isinstance(tiers, list) or not all(isinstance(each, dict) and "path" in each for each in tiers):
        raise damaged(where, "no list of tiers")
    return tiers


def tier_here(path: str, run: RunIdentity | None, verify_bytes: bool = False) -> TierListing | None:
    """Lists this host's shares on a tier of a run; None if it has no such directory, or one of another run."""
    if not is_tier(path):
        return None
    listing = list_tier(path, verify_bytes)
    return listing if listing.run is not None and run is not None and listing.run.id == run.id else None
