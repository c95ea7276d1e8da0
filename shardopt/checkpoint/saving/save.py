"""Saves an app to a committed checkpoint:

    app → flatten → describe → agree → assign → write → commit

`save_described` is this pipeline from "agree" on, which `async_save` uses too, in a thread of its own and with ranks
that communicate apart from those of the program. Each step is a function of the module that has its name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from shardopt.checkpoint.format.metrics import first_given, numbers_of
from shardopt.checkpoint.hosts.served import is_on_hosts
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reports import SaveReport, emit_report
from shardopt.checkpoint.saving.agree_plan import Comparison, PlanCache, Planning, compare_reports
from shardopt.checkpoint.saving.commit import SaveTarget, make_manifest
from shardopt.checkpoint.saving.hosts_target import HostsTarget
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.planning.describe import Description, describe
from shardopt.checkpoint.saving.planning.drift import refuse_drifted, tell_buffers
from shardopt.checkpoint.saving.planning.forgotten import tell_of_what_is_lost
from shardopt.checkpoint.saving.planning.replica_check import CheckReplicas
from shardopt.checkpoint.saving.planning.save_plan import RankWrites
from shardopt.checkpoint.saving.refer import Unchanged
from shardopt.checkpoint.saving.writing.base import FoundBase, find_base, open_found
from shardopt.checkpoint.saving.writing.low_priority import write_beside_training
from shardopt.checkpoint.saving.writing.pending import raise_failures
from shardopt.checkpoint.saving.writing.row_prints import RowPrints
from shardopt.checkpoint.saving.writing.unchanged import compared_with
from shardopt.checkpoint.saving.writing.write import memory_of, write_files
from shardopt.checkpoint.storage import absolute_url, use_options, wrap_os_errors
from shardopt.errors import NoSpaceError, Problem, RankError, StateError
from shardopt.ranks import DEADLINE_SECONDS, Group, Ranks, call_on, ranks_of, refuse_lone_processes
from shardopt.runtime.deferred_checks import taking_state
from shardopt.runtime.gc_pause import gc_paused
from shardopt.runtime.signals import SAVING, is_part_of, refuse_within
from shardopt.runtime.torch_private import out_of_inference_mode
from shardopt.state.flatten import flatten
from shardopt.state.state import Tied
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")
_plans: PlanCache = {}
_prints = RowPrints()


def save(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    durable: bool = True,
    check_replicas: CheckReplicas = "sampled",
    progress: Progress | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    process_group: Group | None = None,
    tied: Tied | None = None,
    base: str | os.PathLike[str] | None = None,
    select: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Writes the state of `app` to a new checkpoint at `url`. Collective: every rank (of `process_group`) must call it.

    Nothing exists at `url` for any reader until all of it is durable. If any rank fails, nothing ever does, and every
    rank raises the same error. `app` is not changed.

    Args:
        url: a path, or a URL that fsspec knows; a directory that holds no committed checkpoint.
        app: by name, objects with `state_dict` and `load_state_dict`, tensors (plain, DTensor, ShardedTensor), plain
            values, and dicts and lists of these. What is not a shard must be equal on all ranks, or in `PerRank`.
            Objects are asked in the order of `app`, which ranks must share if a `state_dict` communicates.
        durable: whether local files are flushed to the disk before the commit. Without it a save is faster, and a
            machine that loses power afterwards may lose the checkpoint. One in the background is no faster beside
            training that keeps all cores busy: it goes through the page cache, which takes more processor time.
        check_replicas: the bytes compared before the commit of tensors that several ranks hold. "sampled" hashes all
            bytes of tensors of up to 64 KiB. Of larger ones it hashes 64 blocks of 1 KiB: the first, the last, and
            others at equal distances, the same in every save. "all" compares all bytes, "none" none. Plain tensors that
            are not compared whole are written whole, each by one rank. DTensors, whose placements say that they are
            replicas, are cut among their holders.
        progress: called with the bytes of this rank that are written and those there are to write.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
        process_group: the ranks that save, where they are not all of the job: a process group, or a device mesh. Others
            make no call, and must not hold a shard that none of these has. Files and values per rank are numbered
            within it.
        tied: name → the name that stands for it, for tied parameters, possibly on different ranks only.
            `{"output.weight": "embed.weight"}` fits pipeline stages that have one of the two each. Wherever the first
            is part of a path in `app`, the second is meant; the tensor is stored once, and can be loaded under both.
            The same on every rank.
        base: an earlier checkpoint in a directory beside this one, which must exist. Boxes and rows with equal
            checksums there are not written again; the manifest refers to its data files. Of a box on a disk with a few
            changed elements, only these are written. The touched rows of a table are found by at most 8 bytes of each
            row that this process keeps after such a save. None writes all.
        select: a regex; only keys in which it is found are saved.
        storage_options: arguments of fsspec's file system for this URL, such as an endpoint and credentials. They apply
            to everything that this process opens at or below it from now on. They are stored nowhere, and in no
            message.

    Raises:
        OptionError: this rank is not in `process_group`.
        CheckpointExistsError: there is a committed checkpoint.
        StateError, LayoutError: something in `app` cannot be stored, or differs between ranks.
        CheckpointError: a rank could not write. Or this thread is in the middle of a save, a load or a step, as where a
            signal handler saves; nothing was begun.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    refuse_within(f"saving {os.fspath(url)}", app)
    for each in (url, base) if storage_options is not None else ():
        if each is not None:
            use_options(each, storage_options)
    at = None if base is None else absolute_url(base)
    options = SaveTerms(
        durable, check_replicas, progress, deadline_seconds, tied, select, process_group, base=at, prints=_prints
    )
    return save_now(absolute_url(url), app, options)


@is_part_of(SAVING)
def save_now(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    options: SaveTerms,
    metrics: Mapping[str, float] | None = None,
    raise_earlier: bool = True,
    committed: Callable[[SaveReport], None] = lambda _: None,
) -> SaveReport:
    """Saves as `save` does, with additional arguments that only a `Manager` passes.

    Args:
        metrics: numbers by name, kept with the checkpoint; of one name the lowest rank's counts.
        raise_earlier: whether a failure of a save of this state in the background that was not reported on some rank
            is raised, on all ranks, instead of this save. Otherwise it remains to be reported (`take_failures`).
        committed: called with the report as soon as the checkpoint is there, before a log line says so.
    """
    begin = world().monotonic()
    refuse_lone_processes(f"saving {os.fspath(url)}")
    ranks = ranks_of(options.process_group, options.deadline_seconds)
    check_replicas = options.check_replicas if ranks.size > 1 else "none"

    def described() -> Described:
        with taking_state() as checks:
            flat = flatten(app, options.tied)
        if options.select is not None:
            flat = flat.selected(options.select)
        description = describe(flat, check_replicas, ranks.job_numbers, ranks.size == 1)
        tell_of_what_is_lost(flat, ranks.job_numbers)
        checks.settle()  # after the state was taken, which may be collective: only some ranks may raise
        if raise_earlier:
            raise_failures(flat)
        if options.refused is not None:
            raise options.refused
        return Described(description, None if metrics is None else numbers_of(metrics))

    # Around a call, so that its locals are gone when the collector is switched on again.
    with out_of_inference_mode(), ranks.beating(), gc_paused():
        report = save_described(ranks, url, described, _plans, options)
    seconds = world().monotonic() - begin
    report = replace(report, seconds=seconds, stall_seconds=seconds)
    committed(report)
    emit_report("save", report, for_all=ranks.rank == 0)
    return report


class Described(NamedTuple):
    """The described state of a rank to save, and the metrics. `note` is called with the writes that were made.

    `copied`, where there is one, waits until what this rank writes is copied, and returns state and writes of copies.
    """

    state: Description
    metrics: Mapping[str, float] | None
    copied: Callable[[RankWrites], tuple[Description, RankWrites]] | None = None
    note: Callable[[RankWrites], None] = lambda _: None


def save_described(
    ranks: Ranks, url: str | os.PathLike[str], described: Callable[[], Described], plans: PlanCache, options: SaveTerms
) -> SaveReport:
    """Writes and commits the state that each rank describes. Collective.

    Args:
        ranks: that save.
        described: this rank's state, whose tensors stay as they are until this returns; if it raises, all ranks do.
        plans: of earlier saves of these ranks; the plan of this one is added.

    Raises:
        ShardoptError: as `save`.
    """
    if options.fallback_urls:
        return _save_where_there_is_room(ranks, url, described, plans, options)
    begin, call = world().monotonic(), call_on("saving", url)
    durable, on_hosts = options.durable, is_on_hosts(url)
    target = HostsTarget(ranks, url, durable, options.base) if on_hosts else SaveTarget(ranks, url, durable)
    planning = Planning(ranks, call, plans)

    def describe_here() -> Described:
        here = described()
        target.open()
        return here

    here, decision, section = ranks.agree_in_sections(
        call,
        work=describe_here,
        report=lambda here: planning.report_state(here.state),
        decide=lambda reports: _begin(target, reports, options, ranks.size),
        section_of=lambda decision, rank: 0 if rank and decision["base"] and decision["base"][2] else None,
    )
    save_id = decision["save_id"]

    def write() -> _Written:
        nonlocal here
        if error is not None:
            raise error
        writes = planning.planned.writes
        if here.copied is not None:
            planning.description, writes = here.copied(writes)
            here = here._replace(state=planning.description)  # so that what was copied can be freed
        if ranks.rank and decision["base"] is not None:
            target.base = open_found(FoundBase(*decision["base"]), section, target.storage)
        if ranks.rank:
            target.wait(save_id)
        work = partial(_write, target, save_id, planning, writes, here, options)
        return write_beside_training(writes, work) if options.in_background else work()

    try:
        error = planning.plan(Comparison(*decision["comparison"]))
        begin_writing = world().monotonic()
        written, committed = ranks.agree(
            call,
            work=write,
            report=lambda written: [written.files, written.parts, planning.report(), here.metrics],
            decide=lambda reports: _commit(target, save_id, planning, reports, options, begin),
        )
        if committed["drifted"]:
            planning.look_into(refuse_drifted, committed["drifted"])
        if committed["published"] is not None:
            target.settle(call, committed["published"])
    except BaseException:
        target.discard(save_id)
        raise
    if committed["buffers"]:
        with suppress(RankError):  # committed it is; the next call says who is lost
            planning.look_into(tell_buffers, committed["buffers"])
    end = world().monotonic()
    return SaveReport(
        url=target.url,
        save_id=save_id,
        bytes_written=written.nbytes,
        seconds=end - begin,
        writing_seconds=end - begin_writing,
        bytes_unchanged=written.unchanged_bytes,
        **committed["report"],
    )


def _save_where_there_is_room(
    ranks: Ranks, url: str | os.PathLike[str], described: Callable[[], Described], plans: PlanCache, options: SaveTerms
) -> SaveReport:
    """Saves as `save_described` does, to the first of several URLs that has space. Collective."""
    each_alone = replace(options, fallback_urls=())
    for fallback in options.fallback_urls:
        try:
            return save_described(ranks, url, described, plans, each_alone)
        except NoSpaceError as error:
            if ranks.rank == 0:
                _log.warning("%s; saving to %s instead", error, fallback)
            url = fallback
    return save_described(ranks, url, described, plans, each_alone)


class _Written(NamedTuple):
    """The files that a rank wrote, and the parts that it left to an earlier save, as JSON."""

    files: list[list[Any]]
    parts: dict[str, Any]
    nbytes: int
    unchanged_bytes: int


def _begin(
    target: SaveTarget, reports: Sequence[Any], options: SaveTerms, size: int
) -> tuple[dict[str, Any], list[bytes]]:
    """Begins the save on rank 0. Returns what all ranks get, and the section of it that opens the base."""
    comparison, save_id = compare_reports(reports), world().random_name(6)
    found: FoundBase | None = None
    sections: list[bytes] = []
    with wrap_os_errors(f"make {target.storage.url}"):
        target.refuse_taken()
        if options.base is not None:
            target.base, found, sections = find_base(options.base, options.base_required, target.storage, size)
        target.begin(save_id)
    return {"save_id": save_id, "comparison": comparison, "base": found}, sections


def _write(
    target: SaveTarget, save_id: str, planning: Planning, writes: RankWrites, here: Described, options: SaveTerms
) -> _Written:
    """Writes this rank's files, without what the base has."""
    storage, views, per_rank = target.storage, planning.description.views, planning.per_rank()
    left, parts, unchanged_bytes = writes, dict[str, Any](), 0
    with wrap_os_errors(f"write to {storage.url}"):
        if target.base is not None:
            target.base.kept, target.base.prints = options.kept, options.prints
            if options.prints is not None:
                options.prints.begin(target.base.manifest.save_id, save_id)
            left, parts, unchanged_bytes = compared_with(target.base, writes, views, options.chain)
        files = write_files(storage, save_id, left, partial(memory_of, views=views), per_rank, options.progress)
        here.note(left)
        if options.kept is not None:
            options.kept.end(save_id, ((each, memory_of(each, views)) for of in writes.slots.values() for each in of))
    as_json = [[file.name, file.nbytes, file.digest] for file in files]
    return _Written(as_json, parts, sum(file.nbytes for file in files), unchanged_bytes)


def _commit(
    target: SaveTarget,
    save_id: str,
    planning: Planning,
    reports: Sequence[Any],
    options: SaveTerms,
    begin: float,
) -> dict[str, Any]:
    """Commits the files that all ranks report, unless replicas have drifted; on rank 0."""
    files, parts, states, given = zip(*reports, strict=True)
    metrics = first_given(given)
    values, frozen, drifted, buffers = planning.judge(states)
    if drifted:
        return {"drifted": drifted, "buffers": []}
    plan, geometry = planning.planned.plan, planning.planned.plan.geometry
    if options.select is not None and not (geometry.members or geometry.per_rank or values):
        problem = Problem("select", repr(options.select), "a regex that is found in some key", "mend the regex")
        raise StateError("there is nothing to save", [problem], code="nothing-selected")
    unchanged = Unchanged(target.base, parts) if target.base is not None and any(parts) else None
    manifest, data = make_manifest(
        save_id,
        plan,
        values,
        files,
        metrics=metrics,
        unchanged=unchanged,
        seconds=world().monotonic() - begin,
        renamed=options.renamed,
        frozen=frozen,
        in_eval=options.in_eval,
    )
    with wrap_os_errors(f"commit {target.storage.url}"):
        published = target.publish(manifest, data)
    return {
        "drifted": [],
        "buffers": buffers,
        "published": published,
        "report": {
            "bytes_total": sum(file.nbytes for file in manifest.files if file.directory is None),
            "tensors": len(geometry.members) + len(geometry.tied),
            "metrics": metrics,
        },
    }
