"""Saves an app to a committed checkpoint:

    app → flatten → describe → agree → assign → write → commit

`save_described` is this pipeline from "agree" on, which `async_save` uses too, in a thread of its own and with ranks
that communicate apart from those of the program. Each step is a function of the module that has its name.
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
from shardopt.checkpoint.format.metrics import pack_metrics
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
from shardopt.checkpoint.planning.save_plan import RankWrites, SavePlan
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reports import SaveReport, emit_report
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.checkpoint.storage.common_storage import remove_marker, wait_for_marker, write_marker
from shardopt.checkpoint.writing.pending import raise_failures
from shardopt.checkpoint.writing.write import from_memory, with_progress, write_files
from shardopt.errors import Problem, ShardoptError, StateError
from shardopt.gc_pause import gc_paused
from shardopt.ranks import DEADLINE_SECONDS, Call, Ranks, call_on, ranks_of, refuse_lone_processes
from shardopt.state import flatten
from shardopt.world import world

_MOST_KEPT = 2


class KeptPlan(NamedTuple):
    """The plan of a save, this rank's writes by it, and the geometry fingerprint of this rank's description."""

    plan: SavePlan
    writes: RankWrites
    described: str


Kept = dict[tuple[str, int], KeptPlan]
"""Plans of the last saves, by the fingerprint of all ranks' descriptions and the rank that this process was."""

_kept: Kept = {}


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The options that `save` and `async_save` share, with the meanings that they have there.

    Raises:
        ValueError: `check_replicas` is none of its values.
    """

    durable: bool = True
    check_replicas: CheckReplicas = "sampled"
    progress: Progress | None = None
    deadline_seconds: float = DEADLINE_SECONDS

    def __post_init__(self) -> None:
        refuse_unknown_choice(self.check_replicas)


DEFAULT_OPTIONS = SaveOptions()


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
        check_replicas: which bytes of tensors that several ranks hold are compared before writing. "sampled" compares
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
    return save_now(url, app, SaveOptions(durable, check_replicas, progress, deadline_seconds))


def save_now(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    options: SaveOptions,
    metrics: Mapping[str, float] | None = None,
    raise_earlier: bool = True,
) -> SaveReport:
    """Saves as `save` does, with the arguments that only a `Manager` gives.

    Args:
        metrics: numbers by name, kept with the checkpoint; rank 0's count.
        raise_earlier: whether a failure of a save in the background that was not reported on some rank is raised, on
            all ranks, in the place of this save. Otherwise it remains to be reported (`take_failures`).
    """
    begin = world().monotonic()
    refuse_lone_processes(f"saving {os.fspath(url)}")
    ranks = ranks_of()

    def described() -> Described:
        description = describe(flatten(app), replicas_to_check(options.check_replicas, ranks))
        if raise_earlier:
            raise_failures()  # after the state was taken, which may be collective: only some ranks may raise
        return Described(description, metrics)

    # Around a call, so that its locals are gone when the collector is switched on again.
    with ranks.beating(options.deadline_seconds), gc_paused():
        report = save_described(ranks, url, described, _kept, options)
    seconds = world().monotonic() - begin
    report = replace(report, seconds=seconds, stall_seconds=seconds)
    emit_report("save", report)
    return report


def replicas_to_check(wanted: CheckReplicas, ranks: Ranks) -> CheckReplicas:
    """Returns "none" where there is one rank, which has nothing to compare; otherwise the choice."""
    return wanted if ranks.size > 1 else "none"


class Described(NamedTuple):
    """The state that a rank saves, and metrics as for `save_now`."""

    state: Description
    metrics: Mapping[str, float] | None


def save_described(
    ranks: Ranks,
    url: str | os.PathLike[str],
    described: Callable[[], Described],
    kept: Kept,
    options: SaveOptions,
) -> SaveReport:
    """Writes the state that each rank describes, and commits it. Collective.

    Args:
        ranks: that save.
        described: this rank's state, whose tensors stay as they are until this returns; if it raises, all ranks do.
        kept: plans of earlier saves of these ranks; the plan of this one is added.

    Raises:
        ShardoptError: as `save`.
    """
    begin = world().monotonic()
    call = call_on("saving", url)

    def describe_here() -> tuple[Description, str, Storage, bytes | None]:
        state, metrics = described()
        metrics_json = None if metrics is None else pack_metrics(metrics)
        return state, state.geometry_fingerprint(), storage_of(url, options.durable), metrics_json

    (description, geometry, storage, metrics_json), decision = ranks.agree(
        call,
        work=describe_here,
        report=lambda done: _report_state(*done[:2], ranks.rank, kept),
        decide=lambda reports: _begin(storage_of(url, options.durable), reports),
        deadline_seconds=options.deadline_seconds,
    )
    save_id = decision["save_id"]
    try:
        planned = _plan_or_error(ranks, call, description, geometry, decision, kept, options.deadline_seconds)
        begin_writing = world().monotonic()
        files, bytes_total = ranks.agree(
            call,
            work=lambda: _write(storage, save_id, planned, description, options.progress, ranks.rank),
            report=lambda files: [[file.name, file.nbytes, file.digest] for file in files],
            decide=lambda reports: _commit(storage, save_id, planned, reports, metrics_json),
            deadline_seconds=options.deadline_seconds,
        )
    except BaseException:
        # Rank 0 alone: only it could still commit, and has now failed to. Another rank might remove the files of a
        # commit that it does not know of.
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
    """The report of a rank to rank 0 in the first round.

    Args:
        geometry, values: fingerprints of what the rank describes.
        partial: whether it knows of some tensor only the boxes that it holds itself.
        check_replicas: the argument.
        contents: a summary of the replicas' hashes, in groups by their holders according to the plan `guess`.
        guess: the kept plan that this save most likely uses; "" where there is none.
        kept: all plans that the rank has.
    """

    geometry: str
    values: str
    partial: bool
    check_replicas: CheckReplicas
    contents: dict[str, str]
    guess: str
    kept: list[str]


def _report_state(description: Description, geometry: str, rank: int, plans: Kept) -> _Report:
    kept = {job: each for (job, kept_for), each in plans.items() if kept_for == rank}
    guess = next((job for job, each in reversed(kept.items()) if each.described == geometry), "")
    # Of ranks that also have keys of their own only the shared ones can be compared, which only a plan knows.
    contents = description.contents_summary(kept[guess].plan.geometry.members if guess else {})
    values = description.values_fingerprint()
    return _Report(geometry, values, description.is_partial, description.check_replicas, contents, guess, [*kept])


def _begin(storage: Storage, reports: list[Any]) -> dict[str, Any]:
    """Begins a save, on rank 0: refuses a taken path, names the save, and decides what ranks must exchange."""
    parsed = [_Report(*report) for report in reports]
    _refuse_different_choices([each.check_replicas for each in parsed])
    save_id = world().random_name(6)
    with wrap_os_errors(f"make {storage.url}"):
        refuse_committed(storage)
        storage.make()
        if len(reports) > 1:
            write_marker(storage, save_id)
    geometries = [each.geometry for each in parsed]
    job = xxhash.xxh3_128_hexdigest("".join([parsed[0].check_replicas, *geometries]).encode())
    geometry_alike = len(set(geometries)) == 1 and not any(each.partial for each in parsed)
    # Summaries are of the same groups of keys where all have made them by the plan that holds.
    guesses = {each.guess for each in parsed}
    comparable = guesses == {job} or (guesses == {""} and geometry_alike)
    return {
        "save_id": save_id,
        "geometry": job,
        "geometry_kept": all(job in each.kept for each in parsed),
        "geometry_alike": geometry_alike,
        "values_alike": len({each.values for each in parsed}) == 1,
        "contents_alike": comparable and summaries_agree(each.contents for each in parsed),
    }


def _refuse_different_choices(choices: Sequence[str]) -> None:
    """Raises StateError where ranks have different choices, since then their plans would differ too."""
    other = next((rank for rank, choice in enumerate(choices) if choice != choices[0]), None)
    if other is not None:
        difference = f"{choices[0]!r} on rank 0, {choices[other]!r} on rank {other}"
        problem = Problem("check_replicas", difference, "the same on every rank", "pass the same on every rank")
        raise StateError("ranks ask for different comparisons", [problem])


class _Planned(NamedTuple):
    """The plan of this save, this rank's writes by it, and the plain values of the job."""

    plan: SavePlan
    writes: RankWrites
    values: Values


def _plan_or_error(ranks: Ranks, call: Call, *args: Any) -> _Planned | BaseException:
    """Returns the result of `_plan`, or the error of this rank alone, to be raised on all ranks in the next round."""
    try:
        return _plan(ranks, call, *args)
    except ShardoptError:
        raise  # of a round, or derived from the results of one: all ranks raise it
    except BaseException as error:
        return error


def _plan(
    ranks: Ranks,
    call: Call,
    description: Description,
    geometry_fingerprint: str,
    decision: Mapping[str, Any],
    kept: Kept,
    deadline_seconds: float,
) -> _Planned:
    """Plans the save. The plan is kept for the next save of the same geometry."""
    ask_geometry = not (decision["geometry_kept"] or decision["geometry_alike"])
    message: dict[str, Any] = {}
    if ask_geometry:
        message["geometry"] = description.geometry_json()
    if ask_geometry or not decision["contents_alike"]:
        message["contents"] = description.contents
    if not decision["values_alike"]:
        message["values"] = description.values_json()
    messages = _exchange(ranks, call, message, deadline_seconds) if message else []

    if not decision["geometry_kept"]:
        if ask_geometry:
            geometry = merge_geometry([each["geometry"] for each in messages])
        else:
            geometry = geometry_of(description, ranks.size)
        plan = SavePlan(geometry, ranks.size, cut_plain=description.check_replicas == "all")
        writes = RankWrites(plan, ranks.rank, description.views)
        kept[decision["geometry"], ranks.rank] = KeptPlan(plan, writes, geometry_fingerprint)
        while len(kept) > _MOST_KEPT:
            del kept[next(iter(kept))]
    plan, writes, _ = kept[decision["geometry"], ranks.rank]
    if "contents" in message:
        refuse_drifted([each["contents"] for each in messages])
    if decision["values_alike"]:
        return _Planned(plan, writes, description.values)
    return _Planned(plan, writes, merge_values([each["values"] for each in messages], plan.geometry))


def _exchange(ranks: Ranks, call: Call, message: dict[str, Any], deadline_seconds: float) -> list[dict[str, Any]]:
    """Returns the message of every rank, by rank; equal ones are sent once."""
    _, (texts, number_of) = ranks.agree(
        call,
        work=lambda: json.dumps(message),
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
    plan, writes, _ = planned
    per_rank = json.dumps(description.own_values).encode() if plan.geometry.per_rank else None
    with wrap_os_errors(f"write to {storage.url}"):
        if rank > 0:
            wait_for_marker(storage, save_id)
        chunks_of = with_progress(from_memory(description.views), writes, progress)
        return write_files(storage, save_id, writes, chunks_of, per_rank)


def _commit(
    storage: Storage, save_id: str, planned: _Planned | BaseException, reports: Sequence[Any], metrics: bytes | None
) -> int:
    assert isinstance(planned, _Planned)  # else this rank had failed, and would not commit
    with wrap_os_errors(f"commit {storage.url}"):
        if len(reports) > 1:
            remove_marker(storage, save_id)
        return commit(storage, save_id, planned.plan, planned.values, reports, metrics)
