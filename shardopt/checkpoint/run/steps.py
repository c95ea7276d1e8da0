"""Saves the steps of a run to a tier or its root, in the call or in the background; restores the newest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

from shardopt.checkpoint.arguments import refuse
from shardopt.checkpoint.loading.refusals import errors_name_failed_loads
from shardopt.checkpoint.reports import LoadReport, SaveReport, announce
from shardopt.checkpoint.run.after_commit import AfterCommit
from shardopt.checkpoint.run.branches import Branches, CheckpointId, Newer, not_rising
from shardopt.checkpoint.run.context import Candidate, Restored, Run
from shardopt.checkpoint.run.stopping import Stop
from shardopt.checkpoint.run.tiers.tiers import Tiers
from shardopt.checkpoint.saving.async_save import AsyncSaver, Stage
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.planning.app_warnings import AppWarnings
from shardopt.checkpoint.saving.save import save_now
from shardopt.checkpoint.saving.writing.pending import PendingSave, finish_below, take_failures
from shardopt.checkpoint.saving.writing.row_prints import RowPrints
from shardopt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    GradientError,
    Problem,
    UnreadableError,
)

_log = logging.getLogger("shardopt.checkpoint")
_Last = tuple[CheckpointId, SaveReport | PendingSave | None]


class Steps:
    """Saves and restores steps, one after the other. All ranks make the same calls.

    Args:
        run: whose steps these are.
        after: begins what follows each commit.
        stage: as for `async_save`; None to save in the call.
        incremental: whether a save refers to the previous checkpoint.
        terms: of all saves.
        anchor_every: after so many saves one writes all, with deltas beside; None for never. With `incremental`.
    """

    def __init__(
        self,
        run: Run,
        after: AfterCommit,
        stage: Stage | None,
        incremental: bool,
        terms: SaveTerms,
        anchor_every: int | None = None,
    ) -> None:
        self._run, self._after, self._tiers = run, after, after.tiers
        self._stage, self._incremental, self._terms = stage, incremental, terms
        self._anchor_every, self._since_anchor = anchor_every, 0
        self._last: _Last | None = None  # saved or restored
        self._before: _Last | None = None  # the one before the last save in the background, which may fail
        self._prints = RowPrints()  # of saves in the call; those in the background have their own
        self.warnings = AppWarnings()
        self._may_be_mixed = True  # with another run's steps; until a save begins that is not
        self._passed_over = False  # whether the last restore passed over newer steps, which lack files on tiers
        self._rewound_to: CheckpointId | None = None  # by a restore that left newer steps behind
        self.restored_step: int | None = None  # of the last restore; None where there was nothing

    @cached_property
    def background(self) -> AsyncSaver:
        """Saves in the background; made at first use, as a run that is only read needs none."""
        return AsyncSaver(keeps=self._anchor_every is not None)

    def wait_for_save(self) -> None:
        """Waits for a save in the background, if any. Collective if it failed."""
        if "background" in vars(self):  # it is made by the first that needs it, on all ranks
            self.background.wait()

    def branches(self) -> Branches:
        """Returns the branches as all ranks know them. Collective the first time."""
        if not self._run.is_agreed:
            self._run.agree_on_branches(needs_copies=False)
            self._after.copy_newest()
        return self._run.branches

    def save(
        self, step: int, app: Mapping[str, Any], metrics: Mapping[str, float] | None, at_root: bool
    ) -> SaveReport | PendingSave | None:
        """Saves to the first tier that is due, or to the root if none is. Collective.

        Args:
            at_root: whether to save to the root in any case, where nothing is lost with its hosts.

        Returns:
            As `Manager.save`: only metrics are saved where the step is the last saved or restored one, and is there.
        """
        if self._after.copying:
            self._raise_failure_of_copy()
        id = self._id_to_save(int(step))
        urls = [self._run.root.checkpoint(id).url]
        refused: CheckpointError | None = None
        if any(each is not None and each[0].step >= id.step for each in (self._last, self._before)):
            if self._has(id, at_root, metrics):
                return None if self._last is None else self._last[1]
            above = self._last_above(id)
            refused = None if above is None else not_rising(above, urls[0])
        if self._may_be_mixed:
            refused = self._after.of_another_run(id) or refused
            self._may_be_mixed = refused is not None
        terms = self._terms if refused is None else replace(self._terms, refused=refused)
        if self._run.ranks.rank == 0:
            terms = replace(terms, in_eval=self.warnings.of_saved(step, app))
        self._after.prepare(id, in_turn=True)
        if self._tiers is not None and not at_root:
            urls = [*self._tiers.urls(id), *urls]
        saved = self._save(id, urls, app, metrics, terms, self._stage)
        if self._run.ranks.rank == 0:
            self.warnings.of_stored(step, app)
        return saved

    def save_and_leave(
        self, step: int, app: Mapping[str, Any], metrics: Mapping[str, float] | None, stop: Stop
    ) -> NoReturn:
        """Saves to the root despite earlier failures; then logs these, and ends the process. Collective.

        Args:
            stop: by which the job is to stop; its `grace_seconds` count as `deadline_seconds` where those are more.
        """
        earlier = [self.background.take_failure(), *take_failures(), *self._after.take_failures()]
        try:
            id = self._id_to_save(int(step))
            has, above = self._has(id, True, metrics, stops=True), None
            if not has:
                above = self._last_above(id)
                seconds = min(self._terms.deadline_seconds, stop.grace_seconds)
                terms = replace(self._terms, deadline_seconds=seconds)
                if self._run.ranks.rank == 0:
                    terms = replace(terms, in_eval=self.warnings.of_saved(step, app))
                self._after.prepare(id, in_turn=False)
                self._save(id, [self._run.root.checkpoint(id).url], app, metrics, terms, None, raise_earlier=False)
                if self._run.ranks.rank == 0:
                    self.warnings.of_stored(step, app)
        finally:
            for failure in filter(None, earlier):
                _log.error("failed before the stop was requested: %s", failure)
        if self._run.ranks.rank == 0:
            _log.warning("stop requested: %s step %d, exiting", "already saved" if has else "saved", step)
            if above is not None:
                text = "step %d is in the root: a start by restore(app, step=%d) resumes it, others step %d [run-root]"
                _log.error(text, step, step, above.step)
        stop.leave()

    def _id_to_save(self, step: int) -> CheckpointId:
        """Returns the id for a step to save; begins a branch if the restore has passed over newer steps. Collective.

        They may be whole again once the hosts with their files are back, and must not be restored in place of what the
        run has saved meanwhile.
        """
        branches = self.branches()
        if self._passed_over:
            from_step = -1 if self.restored_step is None else self.restored_step
            self._run.take_back(from_step, branches.current, "abandon", (), always=True)
            self._passed_over = False
        return self._run.branches.id_of(step)

    def _last_above(self, id: CheckpointId) -> CheckpointId | None:
        """Returns the last saved or restored step if that is above this one, and there are tiers or a stage. Local.

        A restart would resume it. Else the save itself refuses a step that exists, and retention tells more.
        """
        last = self._last_id()
        if last is None or id.step >= last.step or (self._tiers is None and self._stage is None):
            return None
        return last if self._run.branches.id_of(last.step) == last else None  # as if a restore failed at its end

    def _last_id(self) -> CheckpointId | None:
        """Returns the last saved or restored step; one whose save is known to have failed is none. Local."""
        if self._last is not None and isinstance(self._last[1], PendingSave) and self._last[1].failure is not None:
            self._last = self._before
        return None if self._last is None else self._last[0]

    def _has(self, id: CheckpointId, at_root: bool, metrics: Mapping[str, float] | None, stops: bool = False) -> bool:
        """Whether a step is the last saved or restored one and still exists; logs it, and adds metrics. Collective.

        Args:
            at_root, metrics, stops: as for `AfterCommit.url_of`.
        """
        self.background.finish()  # whether that has failed, ranks know alike then, also if one was at another step
        if self._last_id() != id:
            return False
        self.background.wait()
        url = self._after.url_of(id, at_root, metrics, stops)
        if url is not None and self._run.ranks.rank == 0:
            but = " but metrics under names that it lacks" if metrics else ""
            text = f"step {id.step} is already in {url}, and a step is saved once: nothing is saved{but}"
            if at_root and not stops and not metrics and id == self._rewound_to:
                _log.warning("%s. What was changed since the restore is saved with the next step", text)
            else:
                announce(text)
        return url is not None

    def _save(
        self,
        id: CheckpointId,
        urls: Sequence[str],
        app: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        terms: SaveTerms,
        stage: Stage | None,
        raise_earlier: bool = True,
    ) -> SaveReport | PendingSave:
        """Saves to the first of these URLs that has room, in the call or by stages in the background. Collective.

        Args:
            raise_earlier: as for `save_now`.
        """
        if self._incremental and stage is not None:
            self.background.wait()  # for what this one may refer to
        if self._incremental or len(urls) > 1:
            terms = self._terms_with(terms, urls)
        if stage is not None:
            then = partial(self._after.committed, id)
            pending = self.background.save(urls[0], app, terms, stage=stage, metrics=metrics, afterwards=then)
            self._last_id()  # which leaves out the save before, if that has failed: it has ended
            self._before, self._last = self._last, (id, pending)
            return pending
        if self._incremental:
            terms = replace(terms, prints=self._prints)

        def committed(report: SaveReport) -> None:
            self._last = id, report  # first, as Ctrl-C may interrupt what follows, and the step be saved again
            self._after.committed(id, report)

        return save_now(urls[0], app, terms, metrics, raise_earlier, committed)

    def _terms_with(self, terms: SaveTerms, urls: Sequence[str]) -> SaveTerms:
        """Returns terms with the save to refer to, and the fallback URLs for full tiers."""
        base, chain = self._after.base if self._incremental else None, terms.chain
        if self._anchor_every is not None:
            self._since_anchor = 0 if base is None else self._since_anchor + 1
            chain = "anchor" if self._since_anchor >= self._anchor_every else "link"
            self._since_anchor = 0 if chain == "anchor" else self._since_anchor
        return replace(terms, base=base, fallback_urls=tuple(urls[1:]), chain=chain)

    def restore(
        self,
        load: Callable[[str], LoadReport],
        step: int | None,
        branch: int | None,
        newer: Newer,
        required: bool,
        rename: Mapping[str, str],
    ) -> Restored | None:
        """Loads the newest whole checkpoint, and continues from it; returns None if there is none. Collective.

        Args:
            load: loads from a URL.
            step, branch, newer, required: as for `Manager.restore`.
            rename: rules of names; those of the names in a run that begins.
        """
        run, tiers, failed_step = self._run, self._tiers, None
        try:
            self.wait_for_save()
        except GradientError as error:  # of a step that was taken: the restore is to replace it
            failed_step = error
        if tiers is not None:
            tiers.settle()
        finish_below([run.root.url, *([] if tiers is None else tiers.roots)])  # of another Manager of it
        # Known whether anything is loaded or not: what is saved after a refused load belongs to the branch of now.
        current = run.agree_on_branches(needs_copies=True).current
        seen_from = current if branch is None else branch
        if seen_from > current:
            remedy = "see abandoned_steps() for those that there are"
            refuse([Problem("branch", f"branch {seen_from}", f"one from 0 to {current}", remedy)])
        required = required or step is not None

        restored = restore_newest(partial(self._candidates, seen_from, step, required), load)
        if failed_step is not None:
            if restored is None:
                raise failed_step
            if run.ranks.rank == 0:
                _log.warning("%s", failed_step)
        if step is None and run.ranks.rank == 0:
            run.tell_passed_over(restored, seen_from)
        renamed = tuple(rename.items())  # a new run has the new names
        if restored is not None:
            if step is not None or branch is not None:
                self._take_back(restored.id.step, seen_from, newer)
            renamed = restored.report.rename_rules or ()
        self._last = None if restored is None else (restored.id, None)
        self._rewound_to = None if restored is None or run.branches.current == current else restored.id
        self.restored_step = None if restored is None else restored.id.step
        if renamed != self._terms.renamed:
            self._terms = replace(self._terms, renamed=renamed)
        run.due.restored(self.restored_step or 0, [id.step for id in run.at_root])
        self._passed_over = tiers is not None and self._warn_of_lacking(tiers)
        self._after.restored(restored)
        return restored

    def _candidates(self, seen_from: int, step: int | None, required: bool) -> list[Candidate]:
        """Lists the checkpoints to restore, as `Run.candidates`. Collective."""
        run, tiers = self._run, self._tiers
        if tiers is None:
            return run.candidates(seen_from, step, required)
        on_tiers = tiers.candidates()
        # Also where what follows raises: what the program saves then is newer work.
        self._passed_over = bool(tiers.lacking_after(-1, run.branches.current))
        return run.candidates(seen_from, step, required, on_tiers, tiers.lacking)

    def _warn_of_lacking(self, tiers: Tiers) -> bool:
        """Names the run's steps that are newer than the restored one and lack files; returns whether there are any."""
        step = -1 if self.restored_step is None else self.restored_step
        lacking = tiers.lacking_after(step, self._run.branches.current)
        if self._run.ranks.rank == 0:
            for id, error in lacking.items():
                _log.warning(
                    "step %d is passed over, as it lacks files. A start with the hosts that have them restores it, if "
                    "the run saves nothing before: its next save begins a branch. %s",
                    *(id.step, error),
                )
        return bool(lacking)

    def _take_back(self, step: int, seen_from: int, newer: Newer) -> None:
        on_tiers, lacking = list[Candidate](), False
        if self._tiers is not None:
            self._tiers.drop_promotions()
            on_tiers = self._tiers.candidates()
            lacking = bool(self._tiers.lacking_after(step, seen_from))
        self._run.take_back(step, seen_from, newer, on_tiers, always=lacking)
        if newer == "remove":
            self._after.remove_newer()

    def delete(self, step: int) -> None:
        """Removes a checkpoint everywhere, after all saves and copies are done. Collective."""
        id = self.branches().id_of(step)
        self.wait()
        self._after.delete(id)
        if self._last_id() == id:
            self._last = None

    def wait(self) -> None:
        """Waits for saves and copies in the background, and raises their failures. Collective."""
        self.wait_for_save()
        self._after.finish()
        if self._after.copying:
            self._raise_failure_of_copy()

    def _raise_failure_of_copy(self) -> None:
        """Raises the failure of a copy, on all ranks if any rank has it. Collective."""
        # First, as on all ranks: one that waits for its result is in no round before, and shows no life.
        self.background.finish()
        self._after.raise_failure()


def restore_newest(look: Callable[[], list[Candidate]], load: Callable[[str], LoadReport]) -> Restored | None:
    """Loads the first whole checkpoint of the candidates; returns None if there are none. Collective.

    Args:
        look: returns the candidates, the best first, the same on every rank. Called again after each that did not
            load, since another process of the job, which is not dead yet, may have removed that one for a newer one.
        load: loads from a URL.

    Raises:
        CorruptionError, CheckpointNotFoundError: there were some, and none is whole: the error of the last one.
        The errors of `load` that are not about damage. All say if a load before them may have changed the app.
    """
    failures: dict[str, CheckpointError] = {}
    tried_twice: set[str] = set()
    changed_by: list[str] = []
    while True:
        with errors_name_failed_loads(changed_by):
            candidates = look()
            candidate = next((each for each in candidates if each.url not in failures), None)
            if candidate is None:
                for failure in reversed(failures.values()):
                    raise failure
                return None
        try:
            with errors_name_failed_loads(changed_by, candidate.url):
                report = load(candidate.url)
        except (CorruptionError, CheckpointNotFoundError) as error:
            if isinstance(error, UnreadableError) and candidate.url not in tried_twice:
                tried_twice.add(candidate.url)  # a disk may come back, and what it has is newer than all else
                _log.warning("%s: trying again", error)
                continue
            failures[candidate.url] = error
            is_gone = isinstance(error, CheckpointNotFoundError) or error.code == "no-checkpoint"
            what = "gone" if is_gone else "damaged"
            is_last = all(each.url in failures for each in candidates)
            then = "and there is no other checkpoint" if is_last else "resuming from the previous checkpoint"
            _log.warning("step %d is %s, %s: %s", candidate.id.step, what, then, error)
        else:
            return Restored(*candidate, report, frozenset(failures) & {each.url for each in candidates})
