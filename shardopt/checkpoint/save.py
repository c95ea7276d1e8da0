"""Saving, from an app to a committed checkpoint:

    app → flatten → describe → agree → assign → write → commit

`save_described` is the line from the third word on, which `async_save` takes too, in a thread of its own and with
ranks that talk beside those of the program. Each step is a function of the module that has its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import xxhash

from shardopt.checkpoint.commit import commit, discard, refuse_committed
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.planning.describe import (
    Description,
    Values,
    describe,
    geometry_of,
    merge_geometry,
    merge_values,
)
from shardopt.checkpoint.planning.replica_check import (
    CheckReplicas,
    refuse_drifted,
    refuse_unknown_choice,
    summaries_agree,
)
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reports import tell
from shardopt.checkpoint.run.metrics import pack_metrics
from shardopt.checkpoint.storage import Storage, storage_of, telling
from shardopt.checkpoint.storage.common_storage import leave_mark, look_for_mark, remove_mark
from shardopt.checkpoint.writing.tracking import raise_failures
from shardopt.checkpoint.writing.write import OwnParts, SavePlan, counting, from_memory, write_files
from shardopt.errors import Problem, ShardoptError, StateError
from shardopt.gc_pause import gc_paused
from shardopt.ranks import DEADLINE_SECONDS, Call, Ranks, call_on, ranks_of, refuse_lone_processes
from shardopt.state import flatten
from shardopt.world import world

_MOST_KEPT = 2


class KeptPlan(NamedTuple):
    """The plan of a save, this rank's part of it, and the fingerprint of what this rank described."""

    plan: SavePlan
    own: OwnParts
    described: str


Kept = dict[tuple[str, int], KeptPlan]
"""Plans of the last saves, by the fingerprint of what all ranks described and the rank that this process was."""

_kept: Kept = {}


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
        stall_seconds: how long the program was kept from its work: all the time by `save`; by `async_save` in the call
            itself, and before a step that came while state was still being copied.
        staging_seconds: from the call until all of this rank's state was copied to host memory; `save` copies nothing.
        writing_seconds: for writing the data files, and until every rank had written and the manifest was there.
    """

    url: str
    save_id: str
    tensors: int
    bytes_written: int
    bytes_total: int
    seconds: float
    stall_seconds: float = 0.0
    staging_seconds: float = 0.0
    writing_seconds: float = 0.0


def save(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    durable: bool = True,
    check_replicas: CheckReplicas = "sampled",
    progress: Progress | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> SaveReport:
    """Writes the state of `app` to a new checkpoint at `url`. Collective: every rank of the job must call it.

    Nothing exists at `url` for any reader until all of it is durable; if any rank fails, nothing ever does, and
    every rank raises the same error. `app` is not changed.

    Args:
        url: a path, or a URL that fsspec knows; a directory that holds no committed checkpoint.
        app: by name, objects with `state_dict` and `load_state_dict`, tensors (plain, DTensor, ShardedTensor), plain
            values, and dicts and lists of these. What is not a shard must be equal on all ranks, or in `PerRank`.
            Objects are asked in the order of `app`, which ranks must share if a `state_dict` communicates.
        durable: whether local files are flushed to the disk before the commit. Without it a save is faster, and a
            machine that loses power afterwards may lose the checkpoint.
        check_replicas: what is compared before it is written of tensors that several ranks hold. "sampled" compares
            hashes of all bytes of tensors of up to 64 KiB, and of 64 blocks of 1 KiB of larger ones: the first, the
            last, and others at equal distances between them, the same in every save. "all" compares all bytes, "none"
            none. Plain tensors that are not compared whole are written whole by one rank each; DTensors, whose
            placements say that they are replicas, are cut among those that hold them.
        progress: called with the bytes of this rank that are written and those there are to write.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.

    Raises:
        CheckpointExistsError: a committed checkpoint stands there.
        StateError, LayoutError: something in `app` cannot be stored, or differs between ranks.
        CheckpointError: a rank could not write.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    refuse_unknown_choice(check_replicas)
    return save_now(url, app, durable, check_replicas, deadline_seconds, progress=progress)


def save_now(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    durable: bool,
    check_replicas: CheckReplicas,
    deadline_seconds: float,
    metrics: Mapping[str, float] | None = None,
    progress: Progress | None = None,
    raise_earlier: bool = True,
) -> SaveReport:
    """The line itself.

    Args:
        metrics: numbers by name, kept with the checkpoint; rank 0's count.
        raise_earlier: whether a failure of a save in the background of which some rank was not told is raised, on all
            ranks, in the place of this save. Otherwise it stays to be told (`take_failures`).
    """
    begin = world().monotonic()
    refuse_lone_processes(f"saving {os.fspath(url)}")
    ranks = ranks_of()

    def described() -> Described:
        description = describe(flatten(app), replicas_to_check(check_replicas, ranks))
        if raise_earlier:
            raise_failures()  # once the state is there: to ask for it may be collective, and only some ranks may raise
        return Described(description, metrics)

    # Around a call, so that the collector finds nothing left of it when it wakes.
    with ranks.beating(deadline_seconds), gc_paused():
        report = save_described(ranks, url, described, _kept, durable, deadline_seconds, progress)
    seconds = world().monotonic() - begin
    report = replace(report, seconds=seconds, stall_seconds=seconds)
    tell("save", report)
    return report


def replicas_to_check(wanted: CheckReplicas, ranks: Ranks) -> CheckReplicas:
    """What there is to compare: nothing where there is one rank."""
    return wanted if ranks.size > 1 else "none"


class Described(NamedTuple):
    """What a rank has to save: its state, and metrics as for `save_now`."""

    state: Description
    metrics: Mapping[str, float] | None


def save_described(
    ranks: Ranks,
    url: str | os.PathLike[str],
    described: Callable[[], Described],
    kept: Kept,
    durable: bool,
    deadline_seconds: float,
    progress: Progress | None = None,
) -> SaveReport:
    """Writes the state that each rank describes, and commits it. Collective.

    Args:
        ranks: those who save.
        described: this rank's state, whose tensors stay as they are until this returns; if it raises, all ranks do.
        kept: plans of earlier saves of these ranks, into which those of this one go.

    Raises:
        What `save` does.
    """
    begin = world().monotonic()
    call = call_on("saving", url)

    def begin_here() -> tuple[Description, str, Storage, bytes | None]:
        state, metrics = described()
        noted = None if metrics is None else pack_metrics(metrics)
        return state, state.geometry_fingerprint(), storage_of(url, durable), noted

    (description, geometry, storage, noted), opened = ranks.agree(
        call,
        work=begin_here,
        report=lambda done: _report(*done[:2], ranks.rank, kept),
        decide=lambda reports: _begin(storage_of(url, durable), reports),
        deadline_seconds=deadline_seconds,
    )
    save_id = opened["save_id"]
    try:
        planned = _planned(ranks, call, description, geometry, opened, kept, deadline_seconds)
        begin_writing = world().monotonic()
        files, bytes_total = ranks.agree(
            call,
            work=lambda: _write(storage, save_id, planned, description, progress, ranks.rank),
            report=lambda files: [[file.name, file.nbytes, file.digest] for file in files],
            decide=lambda reports: _commit(storage, save_id, planned, reports, noted),
            deadline_seconds=deadline_seconds,
        )
    except BaseException:
        # Rank 0 alone: it is the one that could still commit, and has now failed to. Were another to clear up, it
        # might take the files from under a commit that it has not heard of.
        if ranks.rank == 0:
            discard(storage, save_id)
        raise
    end = world().monotonic()
    assert isinstance(planned, _Planned)
    return SaveReport(
        url=storage.url,
        save_id=save_id,
        tensors=len(planned.plan.geometry.members) + len(planned.plan.geometry.tied),
        bytes_written=sum(file.nbytes for file in files),
        bytes_total=bytes_total,
        seconds=end - begin,
        writing_seconds=end - begin_writing,
    )


class _Report(NamedTuple):
    """What rank 0 hears of each rank at first.

    Args:
        geometry, values: fingerprints of what the rank describes.
        partial: whether it knows of some tensor only what it holds itself.
        check_replicas: what was asked for.
        contents: a summary of the replicas' hashes, in groups by who holds them according to the plan `guess`.
        guess: the kept plan that this save most likely goes by; "" where there is none.
        kept: all plans that the rank has.
    """

    geometry: str
    values: str
    partial: bool
    check_replicas: CheckReplicas
    contents: dict[str, str]
    guess: str
    kept: list[str]


def _report(description: Description, geometry: str, rank: int, plans: Kept) -> _Report:
    own = {job: each for (job, kept_for), each in plans.items() if kept_for == rank}
    guess = next((job for job, each in reversed(own.items()) if each.described == geometry), "")
    # Ranks that have other keys beside those that they share can be compared in these alone, which only a plan tells.
    contents = description.contents_summary(own[guess].plan.geometry.members if guess else {})
    values = description.values_fingerprint()
    return _Report(geometry, values, description.is_partial, description.check_replicas, contents, guess, [*own])


def _begin(storage: Storage, reports: list[Any]) -> dict[str, Any]:
    """On rank 0: refuses a path that is taken, names the save, and tells what ranks must exchange."""
    told = [_Report(*report) for report in reports]
    _refuse_other_choices([each.check_replicas for each in told])
    save_id = world().random_name(6)
    with telling(f"make {storage.url}"):
        refuse_committed(storage)
        storage.make()
        if len(reports) > 1:
            leave_mark(storage, save_id)
    geometries = [each.geometry for each in told]
    job = xxhash.xxh3_128_hexdigest("".join([told[0].check_replicas, *geometries]).encode())
    geometry_alike = len(set(geometries)) == 1 and not any(each.partial for each in told)
    # Summaries are of the same groups of keys where all have made them by the plan that holds.
    guesses = {each.guess for each in told}
    comparable = guesses == {job} or (guesses == {""} and geometry_alike)
    return {
        "save_id": save_id,
        "geometry": job,
        "geometry_kept": all(job in each.kept for each in told),
        "geometry_alike": geometry_alike,
        "values_alike": len({each.values for each in told}) == 1,
        "contents_alike": comparable and summaries_agree(each.contents for each in told),
    }


def _refuse_other_choices(choices: Sequence[str]) -> None:
    """Ranks that compare other things would plan otherwise too."""
    other = next((rank for rank, choice in enumerate(choices) if choice != choices[0]), None)
    if other is not None:
        found = f"{choices[0]!r} on rank 0, {choices[other]!r} on rank {other}"
        problem = Problem("check_replicas", found, "the same on every rank", "pass the same on every rank")
        raise StateError("ranks ask for different comparisons", [problem])


class _Planned(NamedTuple):
    """Who writes what, what this rank writes, and the plain values."""

    plan: SavePlan
    own: OwnParts
    values: Values


def _planned(ranks: Ranks, call: Call, *args: Any) -> _Planned | BaseException:
    """What `_plan` gives, or what has kept this rank alone from it, to be raised in the next round, where all hear."""
    try:
        return _plan(ranks, call, *args)
    except ShardoptError:
        raise  # of a round, or worked out from what all have heard in one: all ranks raise it
    except BaseException as error:
        return error


def _plan(
    ranks: Ranks,
    call: Call,
    description: Description,
    geometry_fingerprint: str,
    opened: Mapping[str, Any],
    kept: Kept,
    deadline_seconds: float,
) -> _Planned:
    """Who writes what, and the plain values. The plan is kept for the next save of the same geometry."""
    ask_geometry = not (opened["geometry_kept"] or opened["geometry_alike"])
    wire: dict[str, Any] = {}
    if ask_geometry:
        wire["geometry"] = description.geometry_json()
    if ask_geometry or not opened["contents_alike"]:
        wire["contents"] = description.contents
    if not opened["values_alike"]:
        wire["values"] = description.values_json()
    all_wires = _exchange(ranks, call, wire, deadline_seconds) if wire else []

    if not opened["geometry_kept"]:
        if ask_geometry:
            geometry = merge_geometry([each["geometry"] for each in all_wires])
        else:
            geometry = geometry_of(description, ranks.size)
        plan = SavePlan(geometry, ranks.size, cut_plain=description.check_replicas == "all")
        own = OwnParts(plan, ranks.rank, description.views)
        kept[opened["geometry"], ranks.rank] = KeptPlan(plan, own, geometry_fingerprint)
        while len(kept) > _MOST_KEPT:
            del kept[next(iter(kept))]
    plan, own, _ = kept[opened["geometry"], ranks.rank]
    if "contents" in wire:
        refuse_drifted([each["contents"] for each in all_wires])
    if opened["values_alike"]:
        return _Planned(plan, own, description.values)
    return _Planned(plan, own, merge_values([each["values"] for each in all_wires], plan.geometry))


def _exchange(ranks: Ranks, call: Call, wire: dict[str, Any], deadline_seconds: float) -> list[dict[str, Any]]:
    """What every rank has to say, by rank; many ranks say the same, so each text travels once."""
    _, (texts, number_of) = ranks.agree(
        call,
        work=lambda: json.dumps(wire),
        report=lambda text: text,
        decide=lambda texts: [list(dict.fromkeys(texts)), [list(dict.fromkeys(texts)).index(text) for text in texts]],
        deadline_seconds=deadline_seconds,
    )
    distinct = [json.loads(text) for text in texts]
    return [distinct[number] for number in number_of]


def _write(
    storage: Storage,
    save_id: str,
    planned: _Planned | BaseException,
    description: Description,
    progress: Progress | None,
    rank: int,
) -> list[DataFile]:
    if isinstance(planned, BaseException):
        raise planned
    plan, own, _ = planned
    per_rank = json.dumps(description.own_values).encode() if plan.geometry.per_rank else None
    with telling(f"write to {storage.url}"):
        if rank > 0:
            look_for_mark(storage, save_id)
        return write_files(storage, save_id, own, counting(from_memory(description.views), own, progress), per_rank)


def _commit(
    storage: Storage, save_id: str, planned: _Planned | BaseException, reports: Sequence[Any], metrics: bytes | None
) -> int:
    assert isinstance(planned, _Planned)  # or this rank had failed, and would not commit
    with telling(f"commit {storage.url}"):
        if len(reports) > 1:
            remove_mark(storage, save_id)
        return commit(storage, save_id, planned.plan, planned.values, reports, metrics)
