"""Loading, from a committed checkpoint into an app, in place:

open → flatten → compare → plan → read in place → hand back to app
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import xxhash
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from shardopt.checkpoint.matching.compare import Match, compare, in_order, judge_unexpected
from shardopt.checkpoint.matching.init_state import init_unstepped
from shardopt.checkpoint.matching.partial_load import mark_partial_load, unmark_partial_load
from shardopt.checkpoint.matching.strictness import Names, Strictness, strictness_of, under_names_of
from shardopt.checkpoint.matching.tied import refuse_unequal
from shardopt.checkpoint.planning.tied import tied_in
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reading.broadcast import BroadcastReads, Replicas, fingerprint, shared_among
from shardopt.checkpoint.reading.data_file_reader import OpenFile
from shardopt.checkpoint.reading.fetch import casts_to_check, check_all, check_casts, fetch
from shardopt.checkpoint.reading.in_use import reading
from shardopt.checkpoint.reading.read_plan import ReadRequest
from shardopt.checkpoint.reading.reader import CheckpointReader, open_checkpoint
from shardopt.checkpoint.reports import tell
from shardopt.errors import CheckpointError, MismatchError, Problem, ShardoptError
from shardopt.gc_pause import gc_paused
from shardopt.ranks import DEADLINE_SECONDS, Ranks, ranks_of
from shardopt.ranks.failures import names_of
from shardopt.sharding.pieces import View
from shardopt.sharding.view import view_of
from shardopt.staging_fence import wait_for_copies
from shardopt.state import FlatState, Handback, PartialStateful, PerRank, flatten
from shardopt.world import world


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, on this rank.

    Args:
        url: where the checkpoint is.
        save_id: the unique name of the save that it is of.
        loaded: the keys that were loaded.
        missing: keys of the app that the checkpoint has not; left as they were (`strict=False`).
        unexpected: keys of the checkpoint that the app has on no rank; left out (`strict=False`).
        cast: keys of tensors that were converted to the app's dtype.
        renamed: key of the app → key in the checkpoint, where they differ.
        bytes_wanted: of tensors, on this rank.
        bytes_read: from data files, on this rank; the ends of checksummed segments and strided reads add to it.
        seconds: on this rank.
        world_size: of the job that saved it.
        saved_at: when it was saved, in seconds since 1970 began; None where that is not known.
    """

    url: str
    save_id: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]
    renamed: Mapping[str, str]
    bytes_wanted: int
    bytes_read: int
    seconds: float
    world_size: int
    saved_at: float | None


@dataclass(frozen=True, slots=True)
class _Plan:
    reader: CheckpointReader
    flat: FlatState
    names: Names
    match: Match
    into: Mapping[str, View]
    requests: list[tuple[OpenFile, ReadRequest]]
    shared: Mapping[str, View]
    per_rank: Mapping[str, Any]

    @property
    def has_casts_to_check(self) -> bool:
        """Whether anything goes to a dtype that cannot hold all that may be there."""
        return bool(self.match.cast and casts_to_check(self.requests))

    def key_of(self, key: str) -> str:
        """The key in the data files."""
        return self.names.renamed.get(key, key)


class _Reads:
    """What this rank reads and sends, worked out when it is first asked for: in a round, so that all hear of a failure.

    Args:
        alike: whether all ranks hold the same shared tensors; otherwise nothing is sent.
    """

    def __init__(self, plan: _Plan, alike: bool, ranks: Ranks) -> None:
        self._plan, self._alike, self._ranks = plan, alike, ranks

    @cached_property
    def shared(self) -> BroadcastReads:
        return BroadcastReads(self._plan.shared if self._alike else {}, self._ranks)

    @cached_property
    def requests(self) -> list[tuple[OpenFile, ReadRequest]]:
        """Where ranks share: what only this one holds, and its part of the rest."""
        plan = self._plan
        if not (self._alike and plan.shared):
            return plan.requests
        pieces = {key: view.pieces for key, view in plan.into.items() if key not in plan.shared} | self.shared.own()
        return [request for key, own in pieces.items() for request in plan.reader.requests(plan.key_of(key), own)]


def load(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    strict: bool | Strictness = True,
    select: str | None = None,
    rename: Mapping[str, str] | None = None,
    transactional: bool = False,
    replicas: Replicas = "auto",
    init_state: bool = False,
    progress: Progress | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> LoadReport:
    r"""Loads a checkpoint into `app`, whatever ranks, meshes and placements it was saved from. Collective.

    Tensors are filled in their own memory; plain values are replaced in the dicts and lists of `app` that hold them;
    objects get their state through `load_state_dict`. What does not fit is found before a byte is changed.

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
            which two parameters get one name, or one is called otherwise in its group than in its state. Other names
            within plain values stay.
        transactional: verify all that will be read before the first byte is changed, at the price of reading it twice.
        replicas: what is done about boxes that several ranks hold: each holder may "read" them, or one of them reads
            and sends to the others ("exchange", over the job's process group, whose own timeout holds for the sends).
            "auto" exchanges where storage is remote: a local disk's cache is faster than what joins processes.
        init_state: whether keyed optimizers get state for the parameters that the checkpoint has state for, as by
            `init_state(names=...)`, and lose state that was never stepped where it has none: to training that is the
            same as none. State that was stepped stays, and does not fit. Otherwise what is in `app` is what counts.
        progress: called with the bytes of this rank that are read and those there are to read.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.

    Raises:
        CheckpointNotFoundError, FormatError: there is nothing here to load.
        MismatchError: the checkpoint does not fit, or has numbers that a cast would turn into infinities or others;
            every difference is listed, and nothing was changed.
        CorruptionError: stored bytes are not what was written. Where that is met in the middle, the optimizers of
            `app` refuse to step until a load is whole.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    # Around a call, so that the collector finds the plan gone when it wakes.
    with reading(url), ranks_of().beating(deadline_seconds), gc_paused():
        report, differences = _load(
            url,
            app,
            strictness_of(strict),
            select,
            rename,
            transactional,
            replicas,
            init_state,
            progress,
            deadline_seconds,
        )
    tell("load", report)
    for difference in differences:
        warnings.warn(f"loading {report.url}: {difference}", stacklevel=2)
    return report


def _load(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    strictness: Strictness,
    select: str | None,
    rename: Mapping[str, str] | None,
    transactional: bool,
    replicas: Replicas,
    init_state: bool,
    progress: Progress | None,
    deadline_seconds: float,
) -> tuple[LoadReport, list[Problem]]:
    """The line itself, with optimizers that have room for what is loaded; returns what to warn of as well."""
    ranks = ranks_of()
    what = f"loading {os.fspath(url)}"
    options = strictness, select, rename, transactional, replicas, progress, deadline_seconds
    if not init_state:
        return _load_into(ranks, what, url, app, *options)
    undo = init_unstepped(ranks, what, url, app, select, rename, deadline_seconds)
    try:
        return _load_into(ranks, what, url, app, *options)
    except ShardoptError:
        undo()
        raise


def _load_into(
    ranks: Ranks,
    what: str,
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    strictness: Strictness,
    select: str | None,
    rename: Mapping[str, str] | None,
    transactional: bool,
    replicas: Replicas,
    progress: Progress | None,
    deadline_seconds: float,
) -> tuple[LoadReport, list[Problem]]:
    """The line itself; returns what to warn of as well."""
    begin = world().monotonic()
    plan, opened = ranks.agree(
        what,
        work=lambda: _plan(url, app, strictness, select, rename, replicas, ranks),
        report=lambda plan: [
            plan.reader.digest,
            fingerprint(plan.shared),
            _fingerprint_of_differences(plan.match),
            plan.has_casts_to_check,
        ],
        decide=lambda reports: _compare_ranks(str(url), reports),
        deadline_seconds=deadline_seconds,
    )
    if opened["with_differences"]:
        _settle_differences(ranks, what, plan, strictness, opened["with_differences"], deadline_seconds)
    reads = _Reads(plan, opened["alike"], ranks)
    if opened["with_casts"]:
        ranks.agree(what, work=lambda: _check_casts(plan, reads), deadline_seconds=deadline_seconds)
    if transactional:
        doing = f"{what} (transactional)"  # by which ranks notice that some of them do not verify
        ranks.agree(doing, work=lambda: check_all(reads.requests), deadline_seconds=deadline_seconds)
    loaded = [each for each in plan.flat.handbacks if plan.match.loads_into(each.path, plan.flat)]
    optimizers = [each.target for each in loaded if isinstance(each.target, Optimizer)]

    def fill() -> int:
        mark_partial_load(optimizers, what)  # in the round, as an optimizer may refuse
        return _fill(reads.requests, progress)

    bytes_read, _ = ranks.agree(what, work=fill, deadline_seconds=deadline_seconds)
    lenient = strictness.lets_objects_differ
    # A round of its own: nobody is to wait for what its reader failed to read, or to hand back what others lack.
    ranks.agree(what, work=lambda: _hand_back(plan, reads.shared, loaded, lenient), deadline_seconds=deadline_seconds)
    unmark_partial_load(optimizers)

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
        bytes_wanted=sum(request.wanted.numel * request.dtype.itemsize for _, request in plan.requests),
        bytes_read=bytes_read,
        seconds=world().monotonic() - begin,
        world_size=plan.reader.manifest.world_size,
        saved_at=plan.reader.manifest.saved_at,
    )
    return report, plan.match.warnings


def _plan(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    strictness: Strictness,
    select: str | None,
    rename: Mapping[str, str] | None,
    replicas: Replicas,
    ranks: Ranks,
) -> _Plan:
    """Everything that can be refused is refused here, or found, to be settled with the other ranks."""
    reader = open_checkpoint(url)
    flat = flatten(app)
    names = under_names_of(reader.manifest, flat, select, rename)
    views = {key: view_of(tensor, key) for key, tensor in flat.tensors().items()}
    match = compare(flat, views, names, strictness, ranks.size)
    if match.problems:
        return _Plan(reader, flat, names, match, {}, [], {}, {})
    old = names.renamed
    per_rank = reader.per_rank(ranks.rank) if match.per_rank else {}
    _refuse_missing([key for key in match.per_rank if old.get(key, key) not in per_rank], ranks.rank)
    into = {key: view for key, (view, _) in match.tensors.items()}
    tied = tied_in(into)
    refuse_unequal(reader, into, tied, old)
    into = {key: view for key, view in into.items() if key not in tied}
    requests = [request for key, view in into.items() for request in reader.requests(old.get(key, key), view.pieces)]
    share = replicas == "exchange" or (replicas == "auto" and reader.is_remote)
    return _Plan(reader, flat, names, match, into, requests, shared_among(into, ranks.size) if share else {}, per_rank)


def _refuse_missing(keys: list[str], rank: int) -> None:
    if keys:
        remedy = "pass it on the ranks that saved it"
        problems = [Problem(key, f"no value of rank {rank}", "one, as this rank passes it", remedy) for key in keys]
        raise MismatchError("the checkpoint does not fit the app; nothing was changed", problems)


def _check_casts(plan: _Plan, reads: _Reads) -> None:
    check_casts(casts_to_check(reads.requests), {old: key for key, old in plan.names.renamed.items()})


def _fingerprint_of_differences(match: Match) -> str:
    """Equal on ranks that differ alike from the checkpoint; empty where nothing does."""
    if not (match.problems or match.unexpected):
        return ""
    return xxhash.xxh3_128_hexdigest(json.dumps(_differences(match)).encode())


def _differences(match: Match) -> list[Any]:
    return [[asdict(problem) for problem in match.problems], match.unexpected]


def _compare_ranks(url: str, reports: list[list[Any]]) -> dict[str, Any]:
    """On rank 0: whether all ranks hold the same shared tensors, and which of them have met which differences, or
    casts to check.

    Raises:
        CheckpointError: ranks would load from different checkpoints.
    """
    digests, fingerprints, differences, casts = zip(*reports, strict=True)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        found = f"another checkpoint on rank {other} than on rank 0"
        problem = Problem(url, found, "the same on every rank", "check what is mounted there")
        raise CheckpointError("ranks do not see the same checkpoint", [problem])
    ranks_with: dict[str, list[int]] = {}
    for rank, difference in enumerate(differences):
        ranks_with.setdefault(difference, []).append(rank)
    with_differences = list(ranks_with.values()) if any(differences) else []
    return {
        "alike": len(set(fingerprints)) == 1,
        "with_differences": with_differences,
        "with_casts": any(casts),
    }


def _settle_differences(
    ranks: Ranks, what: str, plan: _Plan, strictness: Strictness, alike: list[list[int]], deadline_seconds: float
) -> None:
    """Refuses what does not fit on some rank, and stored keys that no rank has a place for. Collective.

    Args:
        alike: the ranks that differ alike from the checkpoint, of which the first tells what all have found.

    Raises:
        MismatchError: lists each difference once, with the ranks that have it.
    """
    speakers = [those[0] for those in alike]

    def merge(reports: list[Any]) -> list[Any]:
        heard = [reports[rank] for rank in speakers]
        nobodys = set.intersection(*(set(unexpected) for _, unexpected in heard))
        ranks_with: dict[Problem, list[int]] = {}
        for (problems, _), those in zip(heard, alike, strict=True):
            for problem in problems:
                ranks_with.setdefault(Problem(**problem), []).extend(those)
        merged = [[asdict(problem), sorted(those)] for problem, those in ranks_with.items()]
        return [merged, [key for key in plan.match.unexpected if key in nobodys]]

    _, (merged, unexpected) = ranks.agree(
        what,
        work=lambda: _differences(plan.match) if ranks.rank in speakers else None,
        report=lambda found: found,
        decide=merge,
        deadline_seconds=deadline_seconds,
    )
    problems = judge_unexpected(plan.match, plan.names, strictness, unexpected)
    failed = set(range(ranks.size)) if problems else {rank for _, those in merged for rank in those}
    if failed:
        local = [_on(those, ranks.size, Problem(**problem)) for problem, those in merged]
        where = f"{what} failed on {names_of(sorted(failed))}: " if len(failed) < ranks.size else ""
        raise MismatchError(
            f"{where}the checkpoint does not fit the app; nothing was changed", in_order([*local, *problems])
        )


def _on(those: list[int], size: int, problem: Problem) -> Problem:
    """A problem, with the ranks that have met it where those are not all."""
    return problem if len(those) == size else replace(problem, found=f"{problem.found} (on {names_of(those)})")


def _fill(requests: list[tuple[OpenFile, ReadRequest]], progress: Progress | None) -> int:
    wait_for_copies()  # a save in the background may still be taking what this changes
    # Autograd is to refuse a backward through values that are gone: what is read past torch counts as no change.
    increment_version([request.target for _, request in requests])
    return fetch(requests, progress)


def _hand_back(plan: _Plan, shared: BroadcastReads, loaded: list[Handback], lenient: bool) -> None:
    shared.exchange()
    for key, value in plan.match.values.items():
        plan.flat.leaves[key].replace(value)
    for key in plan.match.per_rank:
        leaf = plan.flat.leaves[key]
        leaf.replace(PerRank(plan.per_rank[plan.key_of(key)], leaf.value.on_resize))
    for handback in loaded:
        choices = {"strict": False} if lenient and isinstance(handback.target, PartialStateful) else {}
        handback.target.load_state_dict(handback.state, **choices)
