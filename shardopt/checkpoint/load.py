"""Loading, from a committed checkpoint into an app, in place:

open → flatten → compare → plan → read in place → hand back to app
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from torch.optim import Optimizer

from shardopt.checkpoint.hosts.finding import opener_on_hosts
from shardopt.checkpoint.hosts.hosts import is_on_hosts
from shardopt.checkpoint.matching.compare import Match, compare
from shardopt.checkpoint.matching.growing import Growing, growing_in, own_places, warn_of_gone, with_places
from shardopt.checkpoint.matching.init_state import init_unstepped
from shardopt.checkpoint.matching.names_in_app import names_in_app
from shardopt.checkpoint.matching.partial_load import (
    CHANGED_NOTHING,
    MAY_HAVE_CHANGED,
    damage_told,
    mark_partial_load,
    unmark_partial_load,
)
from shardopt.checkpoint.matching.renaming import Names
from shardopt.checkpoint.matching.rules_due import RulesDue, fits_app, rules_due, said_of_rules
from shardopt.checkpoint.matching.schedule_arguments import other_arguments
from shardopt.checkpoint.matching.schedules import warn_of_other_rates
from shardopt.checkpoint.matching.settling import compare_differences, differences_of, is_met, refuse_nothing, settle
from shardopt.checkpoint.matching.strictness import Strictness, log_passed_over, strictness_of
from shardopt.checkpoint.matching.tied import refuse_overlapping, refuse_unequal
from shardopt.checkpoint.planning.tied import refuse_other_ties, refuse_untied, tied_in
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reading.broadcast import BroadcastReads, Replicas, fingerprint, shared_among
from shardopt.checkpoint.reading.fetch import casts_to_check, check_all, check_casts
from shardopt.checkpoint.reading.in_use import reading
from shardopt.checkpoint.reading.open_file import OpenFile, ReadRequest
from shardopt.checkpoint.reading.target import fill
from shardopt.checkpoint.rearrange.reader import rearranged
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.reports import LoadReport, announce, emit_report
from shardopt.checkpoint.sources.open_on_ranks import opener_of
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import absolute_url, use_options
from shardopt.errors import CheckpointError, MismatchError, Problem, ShardoptError
from shardopt.flatten import flatten
from shardopt.gc_pause import gc_paused
from shardopt.param_groups import refuse_unmatched
from shardopt.ranks import DEADLINE_SECONDS, Call, Group, Ranks, as_call, ranks_of
from shardopt.sharding.pieces import Piece, View
from shardopt.sharding.swapped import LOAD_IN_SWAP, refuse_swapped
from shardopt.sharding.view import view_of
from shardopt.signals import LOADING, is_part_of, refuse_within
from shardopt.state import FlatState, Handback, PartialStateful, PerRank, Tied, join
from shardopt.torch_private import out_of_inference_mode
from shardopt.world import world

_LOADING = "loading "
_REFUSED = (
    "mend what it says, and load again, which loads everything anew; or leave the object out of the app, and load with "
    'Strictness(unexpected="ignore")'
)
_log = logging.getLogger("shardopt.checkpoint")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of one load; those of `load`, with `strict` as a `Strictness`."""

    strictness: Strictness
    select: str | None
    rename: Mapping[str, str] | None
    rearrange: Sequence[AnyRule]
    skip: str | None
    transactional: bool
    replicas: Replicas
    init_state: bool
    progress: Progress | None
    group: Group | None
    tied: Tied | None
    base_root: str | os.PathLike[str] | None


class _Look(NamedTuple):
    """An open checkpoint, the app as it is, and the checkpoint under the app's names."""

    reader: CheckpointReader
    flat: FlatState
    names: Names


@dataclass(frozen=True, slots=True)
class _Plan:
    """One rank's plan of a load.

    Args:
        into: the tensors to be filled by the app's keys, of tied ones the first.
        shared: those of `into` of which each box is read by one of the ranks that have it.
        per_rank: the stored values of this rank, by stored key.
        may_grow: the keys of plain containers of which other things are stored.
        growing: those that get what is stored.
    """

    reader: CheckpointReader
    flat: FlatState
    names: Names
    match: Match
    into: Mapping[str, View]
    shared: Mapping[str, View]
    per_rank: Mapping[str, Any]
    may_grow: Sequence[str] = ()
    growing: Sequence[Growing] = ()

    @property
    def bytes_wanted(self) -> int:
        """The bytes that fill `into`, as they are stored."""
        tensors = self.names.manifest.tensors
        return sum(
            piece.box.numel * tensors[key].dtype.itemsize for key, view in self.into.items() for piece in view.pieces
        )

    def key_of(self, key: str) -> str:
        """Returns the key under which the checkpoint has a tensor or value of the app."""
        return self.names.renamed.get(key, key)


class _Reads:
    """A rank's reads and sends. To be made, and changed, within a round: what fails in it reaches all ranks.

    At first it takes for granted that all ranks hold the same shared tensors, and opens the files of what this one then
    is to read. It learns in the round whether they do; where they do not, nothing is sent.
    """

    def __init__(self, plan: _Plan, ranks: Ranks) -> None:
        self.plan = plan
        self.shared = BroadcastReads(plan.shared, ranks)
        apart = {key: view.pieces for key, view in plan.into.items() if key not in plan.shared}
        self.requests = self._requests({**apart, **self.shared.own_pieces()})

    @property
    def has_casts_to_check(self) -> bool:
        """Whether any tensor is cast to a dtype that cannot hold all numbers of the stored one."""
        return bool(self.plan.match.cast and casts_to_check(self.requests))

    def read_alone(self, ranks: Ranks) -> None:
        """Has this rank read all that it holds, and send nothing."""
        self.plan.reader.close()  # of open files only the entries of this rank's share were kept
        self.shared = BroadcastReads({}, ranks)
        self.requests = self._requests({key: view.pieces for key, view in self.plan.into.items()})

    def _requests(self, pieces: Mapping[str, Sequence[Piece]]) -> list[tuple[OpenFile, ReadRequest]]:
        reader, key_of = self.plan.reader, self.plan.key_of
        reader.open_ahead({key_of(key): each for key, each in pieces.items()})
        return [request for key, each in pieces.items() for request in reader.requests(key_of(key), each)]


@is_part_of(LOADING)
def load(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    strict: bool | Strictness = True,
    select: str | None = None,
    rename: Mapping[str, str] | None = None,
    rearrange: Sequence[AnyRule] = (),
    skip: str | None = None,
    transactional: bool = False,
    replicas: Replicas = "auto",
    init_state: bool = False,
    progress: Progress | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    group: Group | None = None,
    tied: Tied | None = None,
    base_root: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    r"""Loads a checkpoint into `app`, whatever ranks, meshes and placements it was saved from. Collective.

    Tensors are filled in their own memory; plain values are replaced in the dicts and lists of `app` that hold them;
    objects get their state through `load_state_dict`. What does not fit is found before a byte is changed. A container
    or value under a key of `app`, without a tensor, object or `PerRank` in it on any rank, is replaced whole by what is
    stored: an empty dict by the records that it got later, their tensors on the CPU in the stored dtype and shape.

    Args:
        url: of a committed checkpoint.
        app: as for `save`.
        strict: whether keys that only one side has are an error; `Strictness` has a choice for each kind of difference.
            False passes over such differences also in the groups of keyed optimizers, and takes the state that fits
            from an optimizer of another algorithm, but none of its options: a warning in the log names it. A key of
            the checkpoint may be left to other ranks; it is unexpected if no rank has a place for it.
        select: a regex; only keys of the app in which it is found are loaded, and the others stay as they are.
        rename: regex → replacement, applied in turn, as by `re.sub`, to the checkpoint's keys to make them the app's:
            `{r"\.layers\.": ".blocks."}` renames "model.layers.0.weight" and "optimizer.state.layers.0.weight.exp_avg".
            Parameters in the groups of keyed optimizers, nested in any way, are renamed as their state is:
            "layers.0.weight" as the key "optimizer.state.layers.0.weight". So `^model\.layers\.` renames the model
            alone, and needs `^optimizer\.state\.layers\.` beside it; `^layers\.` fits no key. Refused are rules by
            which two keys get one name. Names within plain values stay. Rules that the checkpoint's names have been
            through already are passed by (`Manager.restore`; spelled otherwise, a rule is another one). Without a
            rule among these, rules by which it does not fit are passed by where all of it fits as it is. Rank 0 says
            what was renamed.
        rearrange: rules by which stored tensors are joined, split, stacked, transposed, permuted, sliced or padded
            on their way, with their optimizer state (`checkpoint.rearrange`); before all else that changes keys; no
            tensor is held in memory for it. Options and counters of parameters that become one must be equal; state of
            another layout than its parameter is refused. What rules leave out is listed in the report.
        skip: a regex; what is stored under keys in which it is found is left out, as if it were not there. Keys are the
            checkpoint's own. In one of another format it is the way around what is not known there.
        transactional: verify all that will be read before the first byte is changed, at the price of reading it twice.
        replicas: what is done about boxes that several ranks hold: each holder may "read" them, or one of them reads
            and sends to the others ("exchange", over the job's process group, whose own timeout holds for the sends).
            "auto" exchanges where storage is remote: a local disk's cache is faster than what joins processes.
        init_state: whether keyed optimizers get state for the parameters that the checkpoint has state for, as by
            `init_state(names=...)`, and lose state that was never stepped where it has none: to training that is the
            same as none. State that was stepped stays, and does not fit. Otherwise what is in `app` is what counts.
        progress: called with the bytes of this rank that are read and those there are to read.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
        group: the ranks that load, where they are not all of the job: a process group, or a device mesh. Others make no
            call. It need not be the group that saved.
        tied: as for `save`. Where the checkpoint has both names apart, they must be equal.
        base_root: as for `open`.
        storage_options: as for `save`.

    Raises:
        OptionError: this rank is not in `group`.
        CheckpointNotFoundError, FormatError: there is nothing here to load.
        MismatchError: the checkpoint does not fit, or has numbers that a cast would turn into infinities or others;
            every difference is listed, and nothing was changed.
        StateError: averages stand in a tensor that would be loaded (`EMA.swap`). Nothing was changed.
        CorruptionError: stored bytes are not what was written. Its message says whether anything was changed by then:
            where that is met in the middle, the optimizers of `app` refuse to step until a load is whole.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    options = LoadOptions(
        strictness=strictness_of(strict),
        select=select,
        rename=rename,
        rearrange=tuple(rearrange),
        skip=skip,
        transactional=transactional,
        replicas=replicas,
        init_state=init_state,
        progress=progress,
        group=group,
        tied=tied,
        base_root=None if base_root is None else absolute_url(base_root),
    )
    url = absolute_url(url)
    # Around a call, so that the collector finds the plan gone when it wakes.
    refuse_within(f"loading {os.fspath(url)}", but=[LOADING])
    use_options(url, storage_options)
    ranks = ranks_of(group, deadline_seconds)
    with out_of_inference_mode(), reading(url), ranks.beating(), gc_paused():
        report, differences = _load(ranks, url, app, options)
    emit_report("load", report)
    log_passed_over(report.url, report.missing, report.unexpected, options.strictness)
    for difference in differences:
        warnings.warn(f"loading {report.url}: {difference}", stacklevel=2)
    return report


def _load(
    ranks: Ranks, url: str | os.PathLike[str], app: Mapping[str, Any], options: LoadOptions
) -> tuple[LoadReport, list[Problem]]:
    """Loads, with state made for optimizers where `init_state` asks for it; returns what to warn of as well."""
    what = f"{_LOADING}{os.fspath(url)}"
    with damage_told(CHANGED_NOTHING):
        if is_on_hosts(url):
            open_here = opener_on_hosts(ranks, what, url)
        else:
            open_here = opener_of(ranks, what, url, options.base_root)

    @cache
    def opened() -> CheckpointReader:  # in a round, as all that may fail
        return rearranged(open_here(), options.rearrange)

    rules = None if not options.rename else _rules_due(ranks, what, opened, app, options)
    rename = None if rules is None else rules.rename

    @cache
    def look() -> _Look:  # in a round, too
        reader, flat = opened(), flatten(app, options.tied)
        return _Look(reader, flat, names_in_app(reader, flat, options.select, rename, options.skip))

    def load_into() -> tuple[LoadReport, list[Problem]]:
        report, differences = _load_into(ranks, what, look, options)
        if rules is None:
            return report, differences
        if ranks.rank == 0:
            announce(f"{what}: {said_of_rules(report.renamed, rules, report.url)}")
        return replace(report, rename_rules=rules.been_through), differences

    if not options.init_state:
        return load_into()
    with damage_told(CHANGED_NOTHING):
        undo = init_unstepped(ranks, what, look)
        if undo is not None:
            look.cache_clear()  # the app has other state now
    try:
        return load_into()
    except ShardoptError:
        if undo is not None:
            undo()
        raise


def _rules_due(
    ranks: Ranks, what: str, opened: Callable[[], CheckpointReader], app: Mapping[str, Any], options: LoadOptions
) -> RulesDue:
    """Finds out, in a round, which rules of `rename` the checkpoint's names have not been through yet."""
    rename = options.rename or {}

    def look() -> tuple[bool, bool]:
        reader = opened()
        if reader.manifest.renamed:  # which decides
            return False, True
        return fits_app(reader, flatten(app, options.tied), options.select, rename, options.skip)

    with damage_told(CHANGED_NOTHING):
        call = Call(what, f"{as_call(what).same} with rename")  # which not all of them may have been given
        _, fits = ranks.agree(call, look, report=list, decide=lambda reports: reports)
    return rules_due(rename, opened().manifest.renamed, fits)


def _load_into(
    ranks: Ranks, what: str, look: Callable[[], _Look], options: LoadOptions
) -> tuple[LoadReport, list[Problem]]:
    """Loads into the state that `app` has, step by step; returns what to warn of as well."""
    begin = world().monotonic()
    with damage_told(CHANGED_NOTHING):
        reads = _compare(ranks, what, look, options)
        arguments = other_arguments(reads.plan.flat, reads.plan.names) if ranks.rank == 0 else []
    with damage_told(MAY_HAVE_CHANGED):
        bytes_read, loaded = _read(ranks, what, reads, options)
    if ranks.rank == 0:
        warn_of_other_rates(loaded)
        warn_of_gone(reads.plan.growing)
        for line in arguments:
            _log.warning("a schedule goes on as it was saved: %s", line)
    plan = reads.plan
    report = LoadReport(
        url=plan.reader.url,
        save_id=plan.reader.manifest.save_id,
        loaded=(*plan.match.tensors, *plan.match.values, *plan.match.per_rank),
        missing=tuple(plan.match.missing),
        unexpected=tuple(plan.match.unexpected),
        cast=tuple(plan.match.cast),
        renamed={
            key: old for key, old in plan.names.renamed.items() if key in plan.match.tensors or key in plan.match.values
        },
        bytes_wanted=plan.bytes_wanted,
        bytes_read=bytes_read,
        seconds=world().monotonic() - begin,
        world_size=plan.reader.manifest.world_size,
        saved_at=plan.reader.manifest.saved_at,
        left_out=plan.reader.left_out,
        save_seconds=plan.reader.manifest.seconds,
        rename_rules=plan.reader.manifest.renamed,
    )
    return report, plan.match.warnings


def _compare(ranks: Ranks, what: str, look: Callable[[], _Look], options: LoadOptions) -> _Reads:
    """Plans the reads of this rank, once all ranks know that everything fits; changes nothing."""

    def report_plan(reads: _Reads) -> list[Any]:
        plan = reads.plan
        return [
            plan.reader.digest,
            fingerprint(plan.shared),
            differences_of(plan.match, plan.names),
            reads.has_casts_to_check,
            plan.flat.unmatched_patterns(),
            dict(plan.flat.tied),
            is_met(plan.flat, plan.names),
            plan.may_grow,
        ]

    def agree_on(plan: Callable[[], _Plan]) -> tuple[_Reads, dict[str, Any]]:
        return ranks.agree(
            what,
            work=lambda: _Reads(plan(), ranks),
            report=report_plan,
            decide=lambda reports: _compare_ranks(what.removeprefix(_LOADING), reports),
        )

    reads, opened = agree_on(lambda: _plan(look(), options, ranks))
    if opened["may_grow"]:
        first = reads.plan
        first.reader.close()
        _, growing = ranks.agree(
            what,
            work=lambda: own_places(first.flat, opened["may_grow"]),
            report=list,
            decide=lambda reports: [key for key in opened["may_grow"] if not any(key in own for own in reports)],
        )
        reads, opened = agree_on(lambda: _plan(_Look(first.reader, first.flat, first.names), options, ranks, growing))
    plan, with_casts = reads.plan, opened["with_casts"]
    if opened["with_differences"]:
        settle(ranks, what, plan.match, plan.names, options.strictness, opened["with_differences"])
    if not opened["is_met"]:
        refuse_nothing(plan.reader.manifest, plan.flat, options.select)
    if not opened["alike"]:
        _, with_casts = ranks.agree(
            what,
            work=lambda: reads.read_alone(ranks),
            report=lambda _: reads.has_casts_to_check,
            decide=any,
        )
    if with_casts:
        ranks.agree(what, work=lambda: _check_casts(plan, reads))
    if options.transactional:
        doing = f"{what} (transactional)"  # by which ranks notice that some of them do not verify
        ranks.agree(doing, work=lambda: check_all(reads.requests))
    return reads


def _read(ranks: Ranks, what: str, reads: _Reads, options: LoadOptions) -> tuple[int, list[Handback]]:
    """Fills the app; returns the bytes that this rank read, and the objects that got their state back."""
    plan = reads.plan
    loaded = plan.match.objects(plan.flat)
    optimizers = [each.target for each in loaded if isinstance(each.target, Optimizer)]

    def fill_marked() -> int:
        mark_partial_load(optimizers, what)  # in the round, as an optimizer may refuse
        return fill(reads.requests, options.progress)

    bytes_read, _ = ranks.agree(what, work=fill_marked)
    lenient = options.strictness.lets_objects_differ
    # A round of its own: nobody is to wait for what its reader failed to read, or to hand back what others lack.
    ranks.agree(what, work=lambda: _hand_back(plan, reads.shared, loaded, lenient))
    unmark_partial_load(optimizers)
    return bytes_read, loaded


def _plan(look: _Look, options: LoadOptions, ranks: Ranks, grow: Collection[str] | None = None) -> _Plan:
    """Plans what this rank loads; refuses what does not fit, or notes it, to be settled with the other ranks.

    Args:
        grow: the keys of containers that are to get what is stored; None where that is not agreed yet.
    """
    reader, flat, names = look
    growing: list[Growing] = []
    if grow:
        flat, names, growing = with_places(flat, names, grow, options.strictness)
    tensors = flat.tensors()
    views = {key: view_of(tensor, key) for key, tensor in tensors.items()}
    members = ranks.job_numbers
    if members is not None:
        views = {key: view.numbered_in(members) for key, view in views.items()}
    refuse_untied(flat, views)
    match = compare(flat, views, names, options.strictness, ranks.size)
    differs = match.problems or match.missing or match.unexpected
    may_grow = growing_in(flat, names, options.select) if differs and grow is None else []
    if match.problems or may_grow:
        return _Plan(reader, flat, names, match, {}, {}, {}, may_grow)
    old = names.renamed
    per_rank = reader.per_rank(ranks.rank) if match.per_rank else {}
    _refuse_missing([key for key in match.per_rank if old.get(key, key) not in per_rank], ranks.rank)
    into = {key: view for key, (view, _) in match.tensors.items()}
    tied = tied_in(into)
    aliases = {key: first for key, first in names.aliases.items() if key in names.manifest.tensors and first in into}
    refuse_unequal(reader, into | {key: into[first] for key, first in aliases.items()}, tied | aliases, old)
    into = {key: view for key, view in into.items() if key not in tied}
    refuse_swapped(LOAD_IN_SWAP, (tensors[key] for key in into))
    refuse_overlapping(reader, into, old)
    share = options.replicas == "exchange" or (options.replicas == "auto" and reader.is_remote)
    shared = shared_among(into, ranks.size) if share else {}
    return _Plan(reader, flat, names, match, into, shared, per_rank, growing=growing)


def _refuse_missing(keys: list[str], rank: int) -> None:
    if keys:
        remedy = "pass it on the ranks that saved it"
        problems = [Problem(key, f"no value of rank {rank}", "one, as this rank passes it", remedy) for key in keys]
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", problems)


def _check_casts(plan: _Plan, reads: _Reads) -> None:
    check_casts(casts_to_check(reads.requests), {old: key for key, old in plan.names.renamed.items()})


def _compare_ranks(url: str, reports: list[list[Any]]) -> dict[str, Any]:
    """On rank 0: whether all ranks hold the same shared tensors, and which of them have met which differences, or
    casts to check.

    Raises:
        CheckpointError: ranks would load from different checkpoints.
        StateError: a pattern of groups matches nothing on any rank, or they declare other parameters as tied.
    """
    digests, fingerprints, differences, casts, unmatched, tied, met, may_grow = zip(*reports, strict=True)
    refuse_unmatched(unmatched)
    refuse_other_ties(tied)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        seen = f"another checkpoint on rank {other} than on rank 0"
        problem = Problem(url, seen, "the same on every rank", "check what is mounted there")
        raise CheckpointError("ranks do not see the same checkpoint", [problem])
    return {
        "alike": len(set(fingerprints)) == 1,
        "with_differences": compare_differences(differences),
        "with_casts": any(casts),
        "is_met": any(met),
        "may_grow": [*dict.fromkeys(chain.from_iterable(may_grow))],
    }


def _hand_back(plan: _Plan, shared: BroadcastReads, loaded: list[Handback], lenient: bool) -> None:
    shared.exchange()
    for key, value in plan.match.values.items():
        plan.flat.leaves[key].replace(value)
    for key in plan.match.per_rank:
        leaf = plan.flat.leaves[key]
        leaf.replace(PerRank(plan.per_rank[plan.key_of(key)], leaf.value.on_resize))
    for each in plan.growing:
        each.put()
    for number, handback in enumerate(loaded):
        choices = {"strict": False} if lenient and isinstance(handback.target, PartialStateful) else {}
        try:
            handback.target.load_state_dict(handback.filled_state(), **choices)
        except Exception as error:
            come = _how_far(handback, loaded[:number], loaded[number + 1 :])
            if isinstance(error, ShardoptError):
                error.message = f"{error.message}; {come}"
                error.args = (error.message,)
                raise
            kind, key = type(handback.target).__name__, join(handback.path)
            problem = Problem(key, f"{type(error).__name__}: {error}", f"a {kind} that takes its state", _REFUSED)
            raise CheckpointError(f"an object refused the state that was saved; {come}", [problem]) from error


def _how_far(handback: Handback, loaded: Sequence[Handback], left: Sequence[Handback]) -> str:
    """Tells how far a load has come when an object refused its state."""
    done, ahead = (", ".join(join(each.path) for each in those) or "none" for those in (loaded, [handback, *left]))
    return f"tensors are read, objects loaded: {done}; not loaded: {ahead}. {MAY_HAVE_CHANGED}"
