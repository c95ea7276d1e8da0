"""Loads a committed checkpoint into an app, in place:

open → flatten → compare → plan → read in place → hand back to app
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

from shardopt.checkpoint.hosts.finding import opener_on_hosts
from shardopt.checkpoint.hosts.served import is_on_hosts
from shardopt.checkpoint.loading.growing import agreed_growth, growth_here, warn_of_gone
from shardopt.checkpoint.loading.hand_back import hand_back, note_stored_versions, warn_of_what_is_left
from shardopt.checkpoint.loading.init_state import init_unstepped, warn_of_incomplete, without_incomplete_state
from shardopt.checkpoint.loading.names import Names, names_as_stored
from shardopt.checkpoint.loading.names_in_app import names_in_app
from shardopt.checkpoint.loading.options import STRICT, LoadOptions, Strictness, log_passed_over, strictness_of
from shardopt.checkpoint.loading.positional_params import warn_of_order
from shardopt.checkpoint.loading.rank_plan import RankPlan, compare_plans, plan_rank
from shardopt.checkpoint.loading.reconcile import reconcile, refuse_nothing
from shardopt.checkpoint.loading.refusals import (
    CHANGED_NOTHING,
    MAY_HAVE_CHANGED,
    damage_says_state,
    errors_name_writer,
    refusals_name_rules,
)
from shardopt.checkpoint.loading.rules_due import LeftInScript, RulesDue, find_rules_due, said_of_rules
from shardopt.checkpoint.loading.schedules import other_arguments, warn_of_other_rates
from shardopt.checkpoint.loading.torchs.compare import warn_of_other_options
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.rearrange.reader import rearranged
from shardopt.checkpoint.rearrange.row_state import log_merged
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.reports import LoadReport, announce, emit_report
from shardopt.checkpoint.saving.writing.pending import drop_failed_steps
from shardopt.checkpoint.sources.open import is_remote, loaded_from, opener_of, reading
from shardopt.checkpoint.sources.open import open as open_checkpoint
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.broadcast import ShareReads
from shardopt.checkpoint.sources.reading.fetch import casts_to_check, check_all, check_casts, fill
from shardopt.checkpoint.storage import absolute_url, use_options
from shardopt.errors import Problem
from shardopt.ranks import DEADLINE_SECONDS, Group, Ranks, ranks_of
from shardopt.runtime.deferred_checks import failed_steps_remain, taking_state
from shardopt.runtime.gc_pause import gc_paused
from shardopt.runtime.signals import LOADING, is_part_of, refuse_within
from shardopt.runtime.torch_private import out_of_inference_mode
from shardopt.sharding.masters import MastersBeforeLoad
from shardopt.state.flatten import flatten
from shardopt.state.state import FlatState, PerRank, RestoreTarget, Tied
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")

Look = Callable[[], tuple[CheckpointReader, FlatState, Names]]
"""Returns the open checkpoint, the app, and the checkpoint under the app's names.

To be called in a round, as it may fail; it looks once.
"""


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
    share_reads: ShareReads = "auto",
    init_state: bool = False,
    progress: Progress | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    process_group: Group | None = None,
    tied: Tied | None = None,
    base_root: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    r"""Loads a checkpoint into `app`, from any ranks, meshes and placements that saved it. Collective.

    Tensors, dicts, lists and sets of `app` are filled in place; other plain values are replaced. Objects get their
    state by `load_state_dict`. What does not fit is found before a byte is changed. Without a tensor, object or
    `PerRank` in it on any rank a container gets what is stored, also if it was empty: CPU tensors, also for arrays,
    then plain values by keys as text, "10" before "9"; lists, also for tuples. Keys of some ranks go to these alone.

    Args:
        url: of a committed checkpoint.
        app: as for `save`.
        strict: whether keys that only one side has are an error; `Strictness` has a choice for each kind of difference.
            False also takes state of another algorithm, by parameter where all is there that the own keeps, but none
            of its options, as the log warns. It merges state of rows. Unexpected is what no rank has a place for.
        select: a regex; only keys of the app in which it is found are loaded, and the others stay as they are.
        rename: regex → replacement, applied in turn, as by `re.sub`, to the checkpoint's keys to make them the app's:
            `{r"\.layers\.": ".blocks."}` renames "model.layers.0.weight" and "optimizer.state.layers.0.weight.exp_avg".
            Names in groups go with state; those within plain values stay. Two keys must not get one name. Rules that a
            `Manager` has recorded with the names are passed by, and all where the checkpoint fits only without them.
        rearrange: rules by which stored tensors are joined, split, stacked, transposed, permuted, sliced or padded,
            with their optimizer state (`checkpoint.rearrange`). They come before all else that changes keys. No
            checkpoint records them: they are applied again to one in the new form wherever they fit it.
        skip: a regex; stored keys in which it is found are left out, as if they were not there, or not known.
        transactional: verify all that will be read before the first byte is changed, at the price of reading it twice.
        share_reads: "always", "never", or "auto" for remote storage only: whether one of several ranks with the same
            box reads it for all. It sends the box over the job's process group, whose own timeout applies.
        init_state: whether keyed optimizers first get state for exactly the parameters with stored state. State that
            was never stepped is dropped where the checkpoint has none; state that was stepped does not fit. Without it
            state on one side alone is refused: it may be the wrong app, or the wrong checkpoint. `Manager.restore`,
            which begins a run with new optimizers, makes what is missing.
        progress: called with the bytes of this rank that are read and those there are to read.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
        process_group, storage_options, base_root: as for `save` and `open`; it need not be the group that saved.
        tied: as for `save`. Where the checkpoint has both names apart, they must be equal.

    Raises:
        OptionError: this rank is not in `process_group`; or a regex of `Strictness(missing=)` is found in no key.
        CheckpointNotFoundError, FormatError: there is nothing here to load.
        MismatchError: the checkpoint does not fit, or has numbers that a cast would lose. All of it is listed.
        StateError: averages are in the model (`EMA.swap`), or ranks with the same keys would load different ones.
            Nothing was changed by these two.
        CorruptionError: stored bytes are not what was written. The message says whether anything was changed by then:
            if so, the optimizers of `app` refuse to step until a load is whole.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    options = LoadOptions(
        strictness=STRICT if strict is True else strictness_of(strict),
        select=select,
        rename=rename,
        rearrange=tuple(rearrange),
        skip=skip,
        transactional=transactional,
        share_reads=share_reads,
        init_state=init_state,
        progress=progress,
        deadline_seconds=deadline_seconds,
        process_group=process_group,
        tied=tied,
        base_root=None if base_root is None else absolute_url(base_root),
        storage_options=storage_options,
    )
    return load_with(url, app, options)


@is_part_of(LOADING)
def load_with(url: str | os.PathLike[str], app: Mapping[str, Any], options: LoadOptions) -> LoadReport:
    """Loads a checkpoint as `load` does. Collective."""
    url = absolute_url(url)
    # Around a call, so that the collector finds the plan gone when it wakes.
    refuse_within(f"loading {url}", but=[LOADING])
    if options.storage_options is not None:
        use_options(url, options.storage_options)
    ranks = ranks_of(options.process_group, options.deadline_seconds)
    # The load replaces the state that the app gives here, and drops the checks of it.
    with out_of_inference_mode(), reading(url), ranks.beating(), gc_paused(), taking_state():
        report, differences = _load(ranks, url, app, options)
    loaded_from.add(os.path.dirname(report.url))
    emit_report("load", report, for_all=ranks.rank == 0)
    if report.missing or report.unexpected:
        log_passed_over(report.url, report.missing, report.unexpected, options.strictness)
    for difference in differences:
        warnings.warn(f"loading {report.url}: {difference} [does-not-fit]", stacklevel=3)
    return report


def prepare(
    ranks: Ranks, what: str, url: str, app: Mapping[str, Any], options: LoadOptions
) -> tuple[Look, RulesDue | None, Callable[[], None] | None]:
    """Opens the checkpoint and the app; with `init_state`, makes optimizers' state. Collective.

    Also returns the rules of `rename` to apply, and a function that takes back the state; None where none was made.
    """
    rules, undo = None, None
    with damage_says_state(CHANGED_NOTHING):
        open_here: Callable[[], CheckpointReader] = partial(open_checkpoint, url, options.base_root)
        if is_on_hosts(url):
            open_here = opener_on_hosts(ranks, what, url)
        elif ranks.size > 1 and is_remote(url):
            open_here = opener_of(ranks, what, url, options.base_root)

        @cache
        def opened() -> CheckpointReader:  # in a round, as all that may fail
            reader = open_here()
            return rearranged(reader, options.rearrange) if options.rearrange else reader

        if options.rename:
            flattened = partial(flatten, app, options.tied)
            rules = find_rules_due(ranks, what, opened, flattened, options)
        due = replace(options, rename=None if rules is None else rules.rename)
        may_be_as_stored = not (due.select or due.skip or due.rename or due.tied)

        @cache
        def look() -> tuple[CheckpointReader, FlatState, Names]:
            reader, flat = opened(), flatten(app, options.tied)
            names = names_as_stored(reader, flat) if may_be_as_stored else None
            names = names or names_in_app(reader, flat, due)
            if options.strictness.missing != "raise":  # else what is incomplete is refused
                names = without_incomplete_state(names, flat)
            return reader, flat, names

        if options.init_state:
            takes_back, extends = isinstance(options.rename, LeftInScript), options.strictness.unexpected != "ignore"
            undo = init_unstepped(ranks, what, look, takes_back, extends)
            if undo is not None:
                look.cache_clear()  # the app has other state now
    return look, rules, undo


def _load(ranks: Ranks, url: str, app: Mapping[str, Any], options: LoadOptions) -> tuple[LoadReport, list[Problem]]:
    """Loads, step by step; with `init_state`, first makes optimizers' state. Also returns the warnings."""
    what = f"loading {url}"
    look, rules, undo = prepare(ranks, what, url, app, options)
    with ExitStack() as unless_read:
        if undo is not None:
            unless_read.callback(undo)
        begin = world().monotonic()
        with damage_says_state(CHANGED_NOTHING), nullcontext() if rules is None else refusals_name_rules(rules):
            plan = compare_with_app(ranks, what, look, options)
            match, names, manifest = plan.match, plan.names, plan.reader.manifest
            schedules = plan.flat.schedules() if ranks.rank == 0 else []
            arguments = other_arguments(schedules, names) if schedules else []  # as they are before the load
        with damage_says_state(MAY_HAVE_CHANGED), errors_name_writer(manifest):
            bytes_read, loaded = _read(ranks, what, plan, options, unless_read)
    renamed = {key: old for key, old in names.renamed.items() if key in match.tensors or key in match.values}
    if ranks.rank == 0:
        if schedules:
            warn_of_other_rates([each for each in schedules if any(each[0] is own for own in loaded)], plan.flat)
        for line in arguments:
            _log.warning("a schedule resumes as it was saved: %s [optimizer-state]", line)
        _tell_of_differences(plan, loaded, ranks.size)
        if rules is not None:
            announce(f"{what}: {said_of_rules(renamed, rules, plan.reader.url)}")
    report = LoadReport(
        url=plan.reader.url,
        save_id=manifest.save_id,
        loaded=tuple(dict.fromkeys((*match.tensors, *match.values, *match.per_rank))),
        missing=tuple(match.missing),
        unexpected=tuple(match.unexpected),
        cast=tuple(match.cast),
        renamed=renamed,
        bytes_wanted=plan.bytes_wanted,
        bytes_read=bytes_read,
        seconds=world().monotonic() - begin,
        world_size=manifest.world_size,
        saved_at=manifest.saved_at,
        left_out=(*plan.reader.left_out, *names.incomplete),
        merged=tuple(match.merged),
        save_seconds=manifest.seconds,
        rename_rules=manifest.renamed if rules is None else rules.been_through,
        frozen=manifest.frozen,
        in_eval=manifest.in_eval,
    )
    if match.merged:
        log_merged(report.url, match.merged)
    return report, match.warnings


def _tell_of_differences(plan: RankPlan, loaded: Sequence[RestoreTarget], world_size: int) -> None:
    """Logs what a load has taken that the code has otherwise, has left out, or has taken on trust."""
    warn_of_other_options(plan.flat, plan.match.values)
    manifest = plan.names.manifest
    if manifest.world_size != world_size and (kept := [*manifest.per_rank.keys() & plan.flat.leaves.keys()]):
        text = "%s: values of %d ranks, where %d load: each rank keeps the one that it has, as the program has set it"
        _log.info(text, ", ".join(sorted(kept)), manifest.world_size, world_size)
    if plan.names.incomplete:
        warn_of_incomplete(plan.names.incomplete)
    for each in loaded:
        if each.in_doubt:
            warn_of_order(each)
    if plan.growing:
        warn_of_gone(plan.growing)


def compare_with_app(ranks: Ranks, what: str, look: Look, options: LoadOptions) -> RankPlan:
    """Plans this rank's reads, once all ranks know that everything fits; changes nothing."""
    plan, found = plan_ranks(ranks, what, look, options)
    with errors_name_writer(plan.reader.manifest):
        refuse_differences(ranks, what, plan, found, options)
        with_casts = found["with_casts"]
        if not found["alike"]:
            _, with_casts = ranks.agree(what, plan.read_alone, report=lambda _: plan.has_casts_to_check, decide=any)
        if with_casts:
            names = {old: key for key, old in plan.names.renamed.items()}
            ranks.agree(what, work=lambda: check_casts(casts_to_check(plan.requests), names))
        if options.transactional:
            doing = f"{what} (transactional)"  # by which ranks notice that some of them do not verify
            ranks.agree(doing, work=lambda: check_all(plan.requests))
    return plan


def plan_ranks(ranks: Ranks, what: str, look: Look, options: LoadOptions) -> tuple[RankPlan, dict[str, Any]]:
    """Plans this rank's load, with its differences; also returns what rank 0 has found in all plans. Collective."""

    def plan_here(grow: Mapping[str, Any] | None = None) -> RankPlan:
        reader, flat, names = look()
        with errors_name_writer(reader.manifest):
            return plan_rank(reader, flat, names, ranks, options, grow)

    report = partial(RankPlan.report, url=what.removeprefix("loading "), is_alone=ranks.size == 1)
    plan, found = ranks.agree(what, plan_here, report, compare_plans)
    if found["may_grow"]:
        growing = _agree_to_grow(ranks, what, plan, found["may_grow"])
        plan, found = ranks.agree(what, partial(plan_here, growing), report, compare_plans)
    return plan, found


def refuse_differences(ranks: Ranks, what: str, plan: RankPlan, found: dict[str, Any], options: LoadOptions) -> None:
    """Raises MismatchError for differences of any rank that do not pass. Collective."""
    if found["with_differences"]:
        reconcile(ranks, what, plan.match, plan.names, options.strictness, found["with_differences"], options.selects)
    if not found["is_met"]:
        refuse_nothing(plan.reader.manifest, plan.flat, options.select)


def _agree_to_grow(ranks: Ranks, what: str, plan: RankPlan, keys: Sequence[str]) -> dict[str, Any]:
    """Returns which plain containers get what is stored, and on which ranks (`agreed_growth`). Collective."""
    plan.reader.close()
    growing: dict[str, Any]
    _, growing = ranks.agree(
        what,
        work=lambda: growth_here(plan.flat, plan.names, keys),
        report=list,
        decide=partial(agreed_growth, keys),
    )
    return growing


def _read(
    ranks: Ranks, what: str, plan: RankPlan, options: LoadOptions, unless_read: ExitStack
) -> tuple[int, list[RestoreTarget]]:
    """Fills the app; returns the bytes that this rank read, and the objects that got their state back.

    Args:
        unless_read: has what takes back the state that was made for this load; emptied once the app is loaded.
    """
    loaded, changing, leaves = plan.match.objects(plan.flat), plan.changing(what), plan.flat.leaves

    def fill_marked() -> int:
        for each in changing.values():
            each.begin()  # in the round, as an optimizer may refuse
        return fill(plan.requests, plan.tensors, options.progress)

    def put_back() -> bool:
        if plan.broadcast is not None:
            plan.broadcast.exchange()
        is_lost = masters.settle()  # before a hand-back makes parameters of their masters
        try:
            for key, value in plan.match.values.items():
                leaves[key].replace(value)
            for key in plan.match.per_rank:
                stored = plan.per_rank[plan.names.renamed.get(key, key)]
                leaves[key].replace(PerRank(stored, leaves[key].value.on_resize))
            for each in plan.growing:
                each.put()
            note_stored_versions(plan.flat.noted, plan.reader, plan.names.renamed, plan.stored_keys)
            hand_back(loaded, options.strictness.lets_objects_differ)
        finally:  # behind the optimizers' own loads, which take marks back before all ranks know how this one ended
            for marked in changing.values():
                marked.begin_late()
        return is_lost

    masters = MastersBeforeLoad()
    bytes_read, _ = ranks.agree(what, work=fill_marked)
    # A round of its own: nobody is to wait for what its reader failed to read, or to hand back what others lack.
    _, (failed_steps, is_lost, not_mended) = ranks.agree(
        what,
        work=put_back,
        report=lambda lost: [failed_steps_remain(), lost, [key for key, each in changing.items() if not each.mends]],
        decide=lambda each: [*map(any, list(zip(*each, strict=True))[:2]), [key for *_, keys in each for key in keys]],
    )
    unless_read.pop_all()  # first: an interrupt behind this leaves loaded state, perhaps with its mark
    for key, each in changing.items():
        each.end(mends=key not in not_mended)
    if not failed_steps:
        drop_failed_steps()
    if ranks.rank == 0 and (is_lost or not_mended):
        warn_of_what_is_left(what, is_lost, not_mended)
    return bytes_read, loaded
