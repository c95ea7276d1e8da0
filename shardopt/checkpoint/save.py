"""Saving, from an app to a committed checkpoint:

    app → flatten → describe → agree → assign → write → commit

`save` is the whole line; each step is a function of the module that has its name.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from shardopt.checkpoint.commit import commit, discard, refuse_committed
from shardopt.checkpoint.describe import (
    Description,
    Values,
    describe,
    geometry_of,
    merge_geometry,
    merge_values,
)
from shardopt.checkpoint.manifest import DataFile
from shardopt.checkpoint.pause import gc_paused
from shardopt.checkpoint.replicas import CheckReplicas, refuse_drifted, summaries_agree
from shardopt.checkpoint.storage import Storage, storage_of, telling
from shardopt.checkpoint.write import OwnParts, SavePlan, from_memory, write_files
from shardopt.ranks import DEADLINE_SECONDS, Ranks, ranks_of
from shardopt.state import FlatState, flatten
from shardopt.values import encode_value

_MOST_KEPT = 2
_kept: dict[tuple[str, int], tuple[SavePlan, OwnParts]] = {}
"""Plans of the last saves, by the fingerprint of what all ranks described and the rank that this process was."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Args:
        url: where the checkpoint is.
        save_id: the unique name of this save, which begins the names of its data files.
        tensors: how many tensors the checkpoint holds.
        bytes_written: by this rank.
        bytes_total: by all ranks, headers and checksums included.
        seconds: on this rank, from the call to the commit.
    """

    url: str
    save_id: str
    tensors: int
    bytes_written: int
    bytes_total: int
    seconds: float


def save(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    durable: bool = True,
    check_replicas: CheckReplicas = "small",
    deadline_seconds: float = DEADLINE_SECONDS,
) -> SaveReport:
    """Writes the state of `app` to a new checkpoint at `url`. Collective: every rank of the job must call it.

    Nothing exists at `url` for any reader until all of it is durable; if any rank fails, nothing ever does, and
    every rank raises the same error. `app` is not changed.

    Args:
        url: a path, or a URL that fsspec knows; a directory that holds no committed checkpoint.
        app: by name, objects with `state_dict` and `load_state_dict`, tensors (plain, DTensor, ShardedTensor), plain
            values, and dicts and lists of these. What is not a shard must be equal on all ranks, or in `PerRank`.
        durable: whether local files are flushed to the disk before the commit. Without it a save is faster, and a
            machine that loses power afterwards may lose the checkpoint.
        check_replicas: which tensors that several ranks hold are compared before they are written: "small" ones (of at
            most 4 KiB), "all", or "none".
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.

    Raises:
        CheckpointExistsError: a committed checkpoint stands there.
        StateError, LayoutError: something in `app` cannot be stored, or differs between ranks.
        CheckpointError: a rank could not write.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    with gc_paused():  # around a call, so that the collector finds nothing left of it when it wakes
        return _save(url, app, durable, check_replicas, deadline_seconds)


def _save(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    durable: bool,
    check_replicas: CheckReplicas,
    deadline_seconds: float,
) -> SaveReport:
    """The line itself."""
    begin = time.monotonic()
    ranks = ranks_of()
    what = f"saving {os.fspath(url)}"

    (storage, flat, description), opened = ranks.agree(
        what,
        work=lambda: (storage_of(url, durable), *_describe(app, check_replicas if ranks.size > 1 else "none")),
        report=lambda done: _fingerprints(done[2], ranks.rank),
        decide=lambda reports: _open(storage_of(url, durable), reports),
        deadline_seconds=deadline_seconds,
    )
    plan, own, values = _plan(ranks, what, description, opened, deadline_seconds)
    save_id = opened["save_id"]
    try:
        files, bytes_total = ranks.agree(
            what,
            work=lambda: _write(storage, save_id, plan, own, flat, description),
            report=lambda files: [[file.name, file.nbytes, file.digest] for file in files],
            decide=lambda reports: _commit(storage, save_id, plan, values, reports),
            deadline_seconds=deadline_seconds,
        )
    except BaseException:
        # Rank 0 alone: it is the one that could still commit, and has now failed to. Were another to clear up, it
        # might take the files from under a commit that it has not heard of.
        if ranks.rank == 0:
            discard(storage, save_id)
        raise
    bytes_written = sum(file.nbytes for file in files)
    seconds = time.monotonic() - begin
    return SaveReport(storage.url, save_id, len(plan.geometry.members), bytes_written, bytes_total, seconds)


def _describe(app: Mapping[str, Any], check_replicas: CheckReplicas) -> tuple[FlatState, Description]:
    flat = flatten(app)
    return flat, describe(flat, check_replicas)


def _fingerprints(description: Description, rank: int) -> list[Any]:
    geometry, values = description.geometry_fingerprint(), description.values_fingerprint()
    kept = [job for job, kept_for in _kept if kept_for == rank]
    return [geometry, description.is_partial, values, description.contents_summary(), kept]


def _open(storage: Storage, reports: list[Any]) -> dict[str, Any]:
    """On rank 0: refuses a path that is taken, names the save, and tells what ranks must exchange."""
    with telling(f"make {storage.url}"):
        refuse_committed(storage)
        storage.make()
    geometries, partial, values, contents, kept = zip(*reports, strict=True)
    job = xxhash.xxh3_128_hexdigest("".join(geometries).encode())
    return {
        "save_id": secrets.token_hex(6),
        "geometry": job,
        "geometry_kept": all(job in own for own in kept),
        "geometry_alike": len(set(geometries)) == 1 and not any(partial),
        "values_alike": len(set(values)) == 1,
        "contents_alike": summaries_agree(contents),
    }


def _plan(
    ranks: Ranks, what: str, description: Description, opened: Mapping[str, Any], deadline_seconds: float
) -> tuple[SavePlan, OwnParts, Values]:
    """Who writes what, and the plain values. The plan is kept for the next save of the same geometry."""
    ask_geometry = not (opened["geometry_kept"] or opened["geometry_alike"])
    wire: dict[str, Any] = {}
    if ask_geometry:
        wire["geometry"] = description.geometry_json()
    if ask_geometry or not opened["contents_alike"]:
        wire["contents"] = description.contents
    if not opened["values_alike"]:
        wire["values"] = description.values_json()
    all_wires = _exchange(ranks, what, wire, deadline_seconds) if wire else []

    if not opened["geometry_kept"]:
        if ask_geometry:
            geometry = merge_geometry([each["geometry"] for each in all_wires])
        else:
            geometry = geometry_of(description, ranks.size)
        plan = SavePlan(geometry, ranks.size)
        _kept[opened["geometry"], ranks.rank] = plan, OwnParts(plan, ranks.rank, description.views)
        while len(_kept) > _MOST_KEPT:
            del _kept[next(iter(_kept))]
    plan, own = _kept[opened["geometry"], ranks.rank]
    if "contents" in wire:
        refuse_drifted([each["contents"] for each in all_wires])
    if opened["values_alike"]:
        return plan, own, description.values
    return plan, own, merge_values([each["values"] for each in all_wires], plan.geometry)


def _exchange(ranks: Ranks, what: str, wire: dict[str, Any], deadline_seconds: float) -> list[dict[str, Any]]:
    """What every rank has to say, by rank; many ranks say the same, so each text travels once."""
    _, (texts, number_of) = ranks.agree(
        what,
        work=lambda: json.dumps(wire),
        report=lambda text: text,
        decide=lambda texts: [list(dict.fromkeys(texts)), [list(dict.fromkeys(texts)).index(text) for text in texts]],
        deadline_seconds=deadline_seconds,
    )
    distinct = [json.loads(text) for text in texts]
    return [distinct[number] for number in number_of]


def _write(
    storage: Storage, save_id: str, plan: SavePlan, own: OwnParts, flat: FlatState, description: Description
) -> list[DataFile]:
    values = {key: encode_value(each.value, key) for key, each in flat.per_rank().items()}
    per_rank = json.dumps(values).encode() if plan.geometry.per_rank else None
    with telling(f"write to {storage.url}"):
        return write_files(storage, save_id, own, from_memory(description.views), per_rank)


def _commit(storage: Storage, save_id: str, plan: SavePlan, values: Values, reports: Sequence[Any]) -> int:
    with telling(f"commit {storage.url}"):
        return commit(storage, save_id, plan, values, reports)
