"""Saves an app to a committed checkpoint:

    app → flatten → describe → agree → assign → write → commit

`save_described` is this pipeline from "agree" on, which `async_save` uses too, in a thread of its own and with ranks
that communicate apart from those of the program. Each step is a function of the module that has its name.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardopt.checkpoint.agree_base import BaseOnRanks
from shardopt.checkpoint.agree_plan import Comparison, Kept, Planned, Planning, compare_reports, report_state
from shardopt.checkpoint.commit import manifest_to_commit
from shardopt.checkpoint.format.manifest import DataFile, RenameRules
from shardopt.checkpoint.format.metrics import pack_metrics
from shardopt.checkpoint.place import Place, place_of
from shardopt.checkpoint.planning.describe import Description, describe
from shardopt.checkpoint.planning.replica_check import CheckReplicas, refuse_unknown_choice
from shardopt.checkpoint.planning.save_plan import RankWrites
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.refer import Unchanged
from shardopt.checkpoint.reports import SaveReport, emit_report
from shardopt.checkpoint.storage import Storage, absolute_url, use_options, wrap_os_errors
from shardopt.checkpoint.writing.pending import raise_failures
from shardopt.checkpoint.writing.unchanged import Base, PartsBySlot, cut_by_changes, pack_parts
from shardopt.checkpoint.writing.write import from_memory, with_progress, write_files
from shardopt.errors import NoSpaceError, OptionError, Problem, RankError, StateError
from shardopt.flatten import flatten
from shardopt.gc_pause import gc_paused
from shardopt.ranks import DEADLINE_SECONDS, Group, Ranks, call_on, ranks_of, refuse_lone_processes
from shardopt.signals import SAVING, is_part_of, refuse_within
from shardopt.state import Tied, refuse_chains, refuse_no_regex
from shardopt.torch_private import out_of_inference_mode
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")
_kept: Kept = {}


@dataclass(frozen=True)
class SaveOptions:
    """How the saves of a `Manager` are made, with the meanings that `save` has for these.

    Args:
        durable, check_replicas, progress, select: as for `save`.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it; in restores
            too.
        tied: as for `save`; in restores too.

    Raises:
        ValueError: `check_replicas` is none of its values.
        OptionError: another argument is none; all of them are listed.
    """

    durable: bool = True
    check_replicas: CheckReplicas = "sampled"
    progress: Progress | None = None
    deadline_seconds: float = DEADLINE_SECONDS
    tied: Tied | None = None
    select: str | None = None

    def __post_init__(self) -> None:
        refuse_unknown_choice(self.check_replicas)
        refuse_no_regex("select", self.select)
        refuse_chains(self.tied or {})
        seconds, problems = self.deadline_seconds, []
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            problems.append(Problem("deadline_seconds", repr(seconds), "more than 0 seconds", "give a number"))
        if not isinstance(self.durable, bool):
            problems.append(Problem("durable", repr(self.durable), "one of True, False", "pass one of them"))
        if problems:
            raise OptionError("arguments that cannot be meant", problems)


@dataclass(frozen=True)
class SaveTerms(SaveOptions):
    """All options of one save.

    `group` and `base` are as for `save`. `base_required` is whether it is an error that there is no such base, or a
    damaged one; otherwise all is written. `instead` are URLs to save to, in turn, where there is no room. `renamed` are
    the rules of `rename` that the names have been through since the run began; None where that is not known.
    """

    group: Group | None = None
    base: str | None = None
    base_required: bool = True
    instead: tuple[str, ...] = ()
    renamed: RenameRules | None = None


DEFAULT_OPTIONS = SaveTerms()


def save(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    durable: bool = True,
    check_replicas: CheckReplicas = "sampled",
    progress: Progress | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    group: Group | None = None,
    tied: Tied | None = None,
    base: str | os.PathLike[str] | None = None,
    select: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Writes the state of `app` to a new checkpoint at `url`. Collective: every rank (of `group`) must call it.

    Nothing exists at `url` for any reader until all of it is durable; if any rank fails, nothing ever does, and
    every rank raises the same error. `app` is not changed.

    Args:
        url: a path, or a URL that fsspec knows; a directory that holds no committed checkpoint.
        app: by name, objects with `state_dict` and `load_state_dict`, tensors (plain, DTensor, ShardedTensor), plain
            values, and dicts and lists of these. What is not a shard must be equal on all ranks, or in `PerRank`.
            Objects are asked in the order of `app`, which ranks must share if a `state_dict` communicates.
        durable: whether local files are flushed to the disk before the commit. Without it a save is faster, and a
            machine that loses power afterwards may lose the checkpoint.
        check_replicas: the bytes compared before the commit of tensors that several ranks hold. "sampled" compares
            hashes of all bytes of tensors of up to 64 KiB, and of 64 blocks of 1 KiB of larger ones: the first, the
            last, and others at equal distances between them, the same in every save. "all" compares all bytes, "none"
            none. Plain tensors that are not compared whole are written whole by one rank each; DTensors, whose
            placements say that they are replicas, are cut among those that hold them.
        progress: called with the bytes of this rank that are written and those there are to write.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
        group: the ranks that save, where they are not all of the job: a process group, or a device mesh. Others make no
            call, and must not hold a shard that none of these has. Files and values per rank are numbered within it.
        tied: name → the name that stands for it, of parameters that are tied, maybe on different ranks only:
            `{"output.weight": "embed.weight"}` where stages of a pipeline each have one of the two. Wherever the first
            is part of a path in `app`, the second is meant; the tensor is stored once, and can be had by both. The same
            on every rank.
        base: an earlier checkpoint in a directory beside this one, which must be there: boxes and rows that have the
            same checksums in it are not written again, and the manifest refers to its data files. None writes all.
        select: a regex; only keys in which it is found are saved.
        storage_options: arguments of fsspec's file system for this URL, such as an endpoint and credentials; whatever
            this process opens at or below it from now on takes them too. They are stored nowhere, and in no message.

    Raises:
        OptionError: this rank is not in `group`.
        CheckpointExistsError: a committed checkpoint stands there.
        StateError, LayoutError: something in `app` cannot be stored, or differs between ranks.
        CheckpointError: a rank could not write. Or this thread is in the middle of a save, a load or a step, as where a
            signal handler saves; nothing was begun.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    refuse_within(f"saving {os.fspath(url)}", app)
    for each in (url, base):
        if each is not None:
            use_options(each, storage_options)
    base_url = None if base is None else absolute_url(base)
    options = SaveTerms(durable, check_replicas, progress, deadline_seconds, tied, select, group, base_url)
    return save_now(absolute_url(url), app, options)


@is_part_of(SAVING)
def save_now(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    options: SaveTerms,
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
    ranks = ranks_of(options.group, options.deadline_seconds)

    def described() -> Described:
        flat = flatten(app, options.tied).selected(options.select)
        description = describe(flat, replicas_to_check(options.check_replicas, ranks), ranks.job_numbers)
        if raise_earlier:
            raise_failures()  # after the state was taken, which may be collective: only some ranks may raise
        return Described(description, metrics)

    # Around a call, so that its locals are gone when the collector is switched on again.
    with out_of_inference_mode(), ranks.beating(), gc_paused():
        report = save_described(ranks, url, described, _kept, options)
    seconds = world().monotonic() - begin
    report = replace(report, seconds=seconds, stall_seconds=seconds)
    emit_report("save", report)
    return report


def replicas_to_check(wanted: CheckReplicas, ranks: Ranks) -> CheckReplicas:
    """Returns "none" where there is one rank, which has nothing to compare; otherwise the choice."""
    return wanted if ranks.size > 1 else "none"


class Described(NamedTuple):
    """The state that a rank saves, and metrics as for `save_now`.

    `copied`, where there is one, waits until what this rank writes is copied, and returns the state and the writes
    as they are to be taken from the copies.
    """

    state: Description
    metrics: Mapping[str, float] | None
    copied: Callable[[RankWrites], tuple[Description, RankWrites]] | None = None


def save_described(
    ranks: Ranks,
    url: str | os.PathLike[str],
    described: Callable[[], Described],
    kept: Kept,
    options: SaveTerms,
) -> SaveReport:
    """Writes the state that each rank describes, and commits it. Collective.

    Args:
        ranks: that save.
        described: this rank's state, whose tensors stay as they are until this returns; if it raises, all ranks do.
        kept: plans of earlier saves of these ranks; the plan of this one is added.

    Raises:
        ShardoptError: as `save`.
    """
    for instead in options.instead:
        try:
            return _save_to(ranks, url, described, kept, options)
        except NoSpaceError as error:
            if ranks.rank == 0:
                _log.warning("%s; saving to %s instead", error, instead)
            url = instead
    return _save_to(ranks, url, described, kept, options)


def _save_to(
    ranks: Ranks,
    url: str | os.PathLike[str],
    described: Callable[[], Described],
    kept: Kept,
    options: SaveTerms,
) -> SaveReport:
    begin = world().monotonic()
    call = call_on("saving", url)
    bases = BaseOnRanks(options.base, options.base_required)
    place = place_of(ranks, url, options.durable, options.base)

    def describe_here() -> tuple[Described, str, bytes | None]:
        here = described()
        place.arrive()
        metrics_json = None if here.metrics is None else pack_metrics(here.metrics)
        return here, here.state.geometry_fingerprint(), metrics_json

    (here, geometry, metrics_json), decision, section = ranks.agree_in_sections(
        call,
        work=describe_here,
        report=lambda done: report_state(done[0].state, done[1], ranks.rank, kept),
        decide=lambda reports: _begin(place, reports, bases),
        section_of=lambda decision, rank: bases.section_of(decision["base"], rank),
    )
    bases.take(decision["base"], section)
    del section
    storage, save_id = place.storage, decision["save_id"]
    comparison = Comparison.from_json(decision["comparison"])
    planning = Planning(ranks, call, here.state, geometry, comparison)

    def write() -> tuple[_Written, Planning]:
        state, own = here.state, planned
        if here.copied is not None and isinstance(own, Planned):
            state, writes = here.copied(own.writes)
            own = own._replace(writes=writes)
        base = bases.opened(storage)
        place.wait(save_id)
        written = _write(storage, save_id, own, state, options.progress, base)
        return written, replace(planning, description=state)

    try:
        planned = planning.plan_or_error(kept)
        begin_writing = world().monotonic()
        (written, planning), committed = ranks.agree(
            call,
            work=write,
            report=lambda done: [done[0].report(), done[1].report(planned)],
            decide=lambda reports: _commit(
                place,
                save_id,
                planning,
                planned,
                reports,
                metrics_json,
                bases.opened(storage),
                options,
                begin,
            ),
        )
        if committed["drifted"]:
            planning.refuse_drifted(committed["drifted"], planned)
        if committed["published"] is not None:
            place.settle(call, committed["published"])
    except BaseException:
        place.discard(save_id)
        raise
    if committed["buffers"]:
        with suppress(RankError):  # committed it is; the next call says who is lost
            planning.tell_buffers(committed["buffers"], planned)
    end = world().monotonic()
    return SaveReport(
        url=place.url,
        save_id=save_id,
        tensors=committed["tensors"],
        bytes_written=sum(file.nbytes for file in written.files),
        bytes_total=committed["bytes"],
        seconds=end - begin,
        writing_seconds=end - begin_writing,
        bytes_unchanged=written.unchanged_bytes,
    )


class _Written(NamedTuple):
    """What a rank has written, and what it has left out for an earlier save has it."""

    files: list[DataFile]
    parts: PartsBySlot
    unchanged_bytes: int

    def report(self) -> list[Any]:
        """Returns it as JSON for rank 0."""
        return [[[file.name, file.nbytes, file.digest] for file in self.files], pack_parts(self.parts)]


def _begin(place: Place, reports: Sequence[Any], bases: BaseOnRanks) -> tuple[dict[str, Any], list[bytes]]:
    """Begins a save, on rank 0: refuses a taken path, names the save, and compares what ranks describe.

    Returns what all ranks get, and what those need of it that refer to an earlier save.
    """
    comparison = compare_reports(reports)
    save_id = world().random_name(6)
    storage = place.storage
    with wrap_os_errors(f"make {storage.url}"):
        place.refuse_taken()
        base, sections = bases.begin(storage, len(reports))
        place.begin(save_id)
    return {"save_id": save_id, "comparison": comparison.to_json(), "base": base}, sections


def _write(
    storage: Storage,
    save_id: str,
    planned: Planned | BaseException,
    description: Description,
    progress: Progress | None,
    base: Base | None,
) -> _Written:
    if isinstance(planned, BaseException):
        raise planned
    plan, writes, _ = planned
    per_rank = json.dumps(description.own_values).encode() if plan.geometry.per_rank else None
    with wrap_os_errors(f"write to {storage.url}"):
        parts: PartsBySlot = {}
        unchanged_bytes = 0
        if base is not None:
            writes, parts, unchanged_bytes = cut_by_changes(base, writes, description.views)
        chunks_of = with_progress(from_memory(description.views), writes, progress)
        files = write_files(storage, save_id, writes, chunks_of, per_rank)
        return _Written(files, parts, unchanged_bytes)


def _commit(
    place: Place,
    save_id: str,
    planning: Planning,
    planned: Planned | BaseException,
    reports: Sequence[Any],
    metrics: bytes | None,
    base: Base | None,
    options: SaveTerms,
    begin: float,
) -> dict[str, Any]:
    assert isinstance(planned, Planned)  # else this rank had failed, and would not commit
    values, drifted, buffers = planning.judge([report for _, report in reports], planned)
    if drifted:
        return {"drifted": drifted, "buffers": []}
    geometry = planned.plan.geometry
    if options.select is not None and not (geometry.members or geometry.per_rank or values):
        problem = Problem("select", repr(options.select), "a regex that is found in some key", "mend the regex")
        raise StateError("there is nothing to save", [problem])
    written = [of_rank for of_rank, _ in reports]
    unchanged = None
    if base is not None and any(parts for _, parts in written):
        unchanged = Unchanged(base, [parts for _, parts in written])
    files = [files for files, _ in written]
    seconds = world().monotonic() - begin
    manifest, data = manifest_to_commit(
        save_id,
        planned.plan,
        values,
        files,
        metrics,
        unchanged=unchanged,
        seconds=seconds,
        renamed=options.renamed,
    )
    with wrap_os_errors(f"commit {place.storage.url}"):
        published = place.publish(manifest, data, None if unchanged is None else unchanged.base)
    return {
        "drifted": [],
        "buffers": buffers,
        "bytes": sum(file.nbytes for file in manifest.own_files),
        "tensors": len(geometry.members) + len(geometry.tied),
        "published": published,
    }
