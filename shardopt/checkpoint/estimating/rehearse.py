"""Rehearses a load: compares a stored checkpoint with an app as `load` does, and reads no tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.checkpoint.loading.load import Look, plan_ranks, prepare, refuse_differences
from shardopt.checkpoint.loading.options import STRICT, LoadOptions, Strictness, strictness_of
from shardopt.checkpoint.loading.rank_plan import RankPlan
from shardopt.checkpoint.loading.reconcile import entries_of
from shardopt.checkpoint.loading.refusals import errors_name_writer
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.reports import OfUrl
from shardopt.checkpoint.saving.planning.tied import tied_in
from shardopt.checkpoint.sources.open import reading
from shardopt.checkpoint.storage import absolute_url, use_options
from shardopt.checkpoint.text import nbytes_text, plural
from shardopt.errors import MismatchError, Problem
from shardopt.ranks import DEADLINE_SECONDS, Group, Ranks, ranks_of
from shardopt.runtime.deferred_checks import taking_state
from shardopt.runtime.gc_pause import gc_paused
from shardopt.runtime.signals import LOADING, is_part_of, refuse_within
from shardopt.runtime.torch_private import out_of_inference_mode
from shardopt.state.state import Tied


@dataclass(frozen=True, slots=True)
class CompareReport(OfUrl):
    """Whether a checkpoint would load into an app, and what would not. `str` of it is for people.

    Args:
        url: where the checkpoint is.
        error: what `load` would raise; None if it fits. The same on all ranks.
        loaded: the keys that fit, on this rank.
        missing: keys of the app that the checkpoint has not, on this rank, also where they pass.
        unexpected: keys of the checkpoint that the app has on no rank, also where they pass.
        cast: keys of tensors that would be converted to the app's dtype.
        renamed: key of the app → key in the checkpoint, where they differ.
        warnings: differences of which `load` would warn (`Strictness(...="warn")`).
        bytes_wanted: of tensors, on this rank; 0 if it does not fit.
    """

    url: str
    error: MismatchError | None
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    renamed: Mapping[str, str] | None = None
    warnings: tuple[Problem, ...] = ()
    bytes_wanted: int = 0

    @property
    def fits(self) -> bool:
        """Whether `load` would find nothing to refuse, but for what only a load finds."""
        return self.error is None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems that `load` would raise; of very many the first ones, as there."""
        return () if self.error is None else tuple(self.error.problems)

    @property
    def differing(self) -> tuple[str, ...]:
        """The keys of problems that both sides have, in another shape, dtype or kind."""
        keys = {*self.missing, *self.unexpected}
        one_sided = keys | {f"{entry}.*" for entry in entries_of(keys)}
        return tuple(dict.fromkeys(each.key for each in self.problems if each.key not in one_sided))

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.url} does not fit: {self.error}"
        passed = [f"{len(keys)} {word}" for keys, word in ((self.missing, "missing"), (self.unexpected, "left out"))]
        passed = [text for text in passed if not text.startswith("0 ")]
        wanted = f"{plural(len(self.loaded), 'key')}, {nbytes_text(self.bytes_wanted)} on this rank"
        return f"{self.url} fits: {', '.join([wanted, *passed])}"


def compare(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    strict: bool | Strictness = True,
    select: str | None = None,
    rename: Mapping[str, str] | None = None,
    rearrange: Sequence[AnyRule] = (),
    skip: str | None = None,
    init_state: bool = False,
    deadline_seconds: float = DEADLINE_SECONDS,
    process_group: Group | None = None,
    tied: Tied | None = None,
    base_root: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CompareReport:
    """Compares a stored checkpoint with `app` as `load` does, and reads no tensor. Collective, as `load`.

    Nothing is changed. Tensors of `app` may be on the meta device. The code is that of `load`, so the problems are
    its problems. The manifest is read, and this rank's `PerRank` values.

    Only a load finds that an object of yours refuses its state, and what is in the bytes: damage, missing data files,
    numbers that a cast loses, and tied tensors that are stored with different values.

    Args:
        url, app, strict, select, rename, rearrange, skip: as for `load`.
        init_state: as for `load`. The state is made for the comparison, and dropped again.
        deadline_seconds, process_group, tied, base_root, storage_options: as for `load`.

    Raises:
        OptionError, CheckpointNotFoundError, FormatError, StateError, RankError: as `load`.
        CorruptionError: the manifest is damaged.
    """
    options = LoadOptions(
        strictness=STRICT if strict is True else strictness_of(strict),
        select=select,
        rename=rename,
        rearrange=tuple(rearrange),
        skip=skip,
        share_reads="never",
        init_state=init_state,
        deadline_seconds=deadline_seconds,
        process_group=process_group,
        tied=tied,
        base_root=None if base_root is None else absolute_url(base_root),
        storage_options=storage_options,
        reads=False,
    )
    return _compare_with(absolute_url(url), app, options)


@is_part_of(LOADING)
def _compare_with(url: str, app: Mapping[str, Any], options: LoadOptions) -> CompareReport:
    refuse_within(f"comparing with {url}", but=[LOADING])
    if options.storage_options is not None:
        use_options(url, options.storage_options)
    ranks = ranks_of(options.process_group, options.deadline_seconds)
    with out_of_inference_mode(), reading(url), ranks.beating(), gc_paused(), taking_state():
        return compare_ranks(ranks, f"comparing with {url}", url, app, options)


def compare_ranks(ranks: Ranks, what: str, url: str, app: Mapping[str, Any], options: LoadOptions) -> CompareReport:
    """Compares as `compare` does, between given ranks. Collective."""
    undo: Callable[[], None] | None = None
    try:
        look, _, undo = prepare(ranks, what, url, app, options)
        plan, error = _planned(ranks, what, look, options)
    except MismatchError as found:  # before there was a plan, as of rules that give two keys one name
        return CompareReport(url, found)
    finally:
        if undo is not None:
            undo()
    match, fits = plan.match, error is None
    found_here = (*match.tensors, *match.values, *match.per_rank)
    wrong = {problem.key for problem in error.problems} if error is not None else frozenset[str]()
    return CompareReport(
        url=url,
        error=error,
        loaded=tuple(key for key in found_here if key not in wrong),
        missing=tuple(match.missing),
        unexpected=tuple(match.unexpected),
        cast=tuple(match.cast),
        renamed={key: old for key, old in plan.names.renamed.items() if key in found_here},
        warnings=tuple(match.warnings),
        bytes_wanted=_bytes_of(plan) if fits else 0,
    )


def _planned(ranks: Ranks, what: str, look: Look, options: LoadOptions) -> tuple[RankPlan, MismatchError | None]:
    plan, found = plan_ranks(ranks, what, look, options)
    plan.reader.close()
    try:
        with errors_name_writer(plan.reader.manifest):
            refuse_differences(ranks, what, plan, found, options)
    except MismatchError as error:
        return plan, error
    return plan, None


def _bytes_of(plan: RankPlan) -> int:
    """Returns the stored bytes that would be read; of tied tensors once."""
    tied = tied_in(plan.into)
    plan.into = {key: view for key, view in plan.into.items() if key not in tied}
    return plan.bytes_wanted
