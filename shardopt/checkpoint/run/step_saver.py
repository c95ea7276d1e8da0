"""Saves the steps of a run that are due: to a tier or to the root, in the call or in the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from shardopt.checkpoint.async_save import AsyncSaver, Stage
from shardopt.checkpoint.format.manifest import RenameRules
from shardopt.checkpoint.format.metrics import numbers_of
from shardopt.checkpoint.reports import SaveReport, announce
from shardopt.checkpoint.run.after_commit import AfterCommit
from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.run.context import Run
from shardopt.checkpoint.run.restoring import Restored
from shardopt.checkpoint.save import SaveTerms, save_now
from shardopt.checkpoint.writing.pending import PendingSave, take_failures
from shardopt.errors import StateError


class StepSaver:
    """Saves steps, one after the other. All ranks make the same calls.

    Args:
        run: whose steps these are.
        after: begins what follows each commit.
        stage: as for `async_save`; None to save in the call.
        incremental: whether a save refers to the one before.
        terms: of all saves.
    """

    def __init__(self, run: Run, after: AfterCommit, stage: Stage | None, incremental: bool, terms: SaveTerms) -> None:
        self._run, self.after, self._tiers = run, after, after.tiers
        self._stage, self._incremental, self._terms = stage, incremental, terms
        self._last: tuple[CheckpointId, SaveReport | PendingSave] | None = None

    @cached_property
    def background(self) -> AsyncSaver:
        """Saves in the background; made at first use, as a run that is only looked at needs none."""
        return AsyncSaver()

    def is_due(self, step: int) -> bool:
        """Whether a step is due at the root or on a tier. By time collective, as `Due.at`."""
        return self._run.due.at(step) or (self._tiers is not None and self._tiers.is_due(step))

    def has(self, id: CheckpointId, at_root: bool) -> bool:
        """Whether a step was committed or restored here, and is there; says so. Collective.

        Args:
            at_root: as for `AfterCommit.url_of`.
        """
        if self._last is not None and self._last[0] == id:
            self.background.wait()  # which may have failed, and then is no checkpoint
        url = self.after.url_of(id, at_root)
        if url is not None and self._run.ranks.rank == 0:
            announce(f"step {id.step} is in {url} already: nothing was saved")
        return url is not None

    def result_of(self, id: CheckpointId) -> SaveReport | PendingSave | None:
        """Returns what the last save has returned, if it was this one. Local."""
        return self._last[1] if self._last is not None and self._last[0] == id else None

    def save(
        self, id: CheckpointId, app: Mapping[str, Any], metrics: Mapping[str, float] | None, at_root: bool
    ) -> SaveReport | PendingSave:
        """Saves to the first tier that is due, or to the root where none is. Collective.

        Args:
            at_root: whether to save to the root in any case, where nothing is lost with its hosts.
        """
        self.after.prepare(id, in_turn=True)
        urls: tuple[str, ...] = (self._run.root.checkpoint(id).url,)
        if self._tiers is not None and not at_root:
            urls = (*self._tiers.urls(id), *urls)
        if self._stage is None:
            return self._save_now(id, urls, app, metrics, self._terms, in_turn=True)
        if self._incremental:
            self.background.wait()  # for what this one may refer to
        numbers = _numbers_or_none(metrics)
        pending = self.background.save(
            urls[0],
            app,
            self._terms_with(self._terms, urls),
            stage=self._stage,
            metrics=metrics,
            afterwards=lambda report: self.after.committed(id, report, numbers, in_turn=True),
        )
        self._last = id, pending
        return pending

    def save_last(
        self, id: CheckpointId, app: Mapping[str, Any], metrics: Mapping[str, float] | None, seconds: float
    ) -> None:
        """Saves to the root, in the call, whatever has failed before. Collective.

        Args:
            seconds: as `deadline_seconds`, where those are more.
        """
        self.after.prepare(id, in_turn=False)
        terms = replace(self._terms, deadline_seconds=min(self._terms.deadline_seconds, seconds))
        self._save_now(id, (self._run.root.checkpoint(id).url,), app, metrics, terms, in_turn=False)

    def _save_now(
        self,
        id: CheckpointId,
        urls: tuple[str, ...],
        app: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        terms: SaveTerms,
        in_turn: bool,
    ) -> SaveReport:
        numbers = _numbers_or_none(metrics)
        report = save_now(urls[0], app, self._terms_with(terms, urls), metrics, raise_earlier=in_turn)
        self.after.committed(id, report, numbers, in_turn)
        self._last = id, report
        return report

    def _terms_with(self, terms: SaveTerms, urls: tuple[str, ...]) -> SaveTerms:
        """Returns terms with what the save may refer to, and where it goes where there is no room."""
        if not self._incremental and len(urls) == 1:
            return terms
        return replace(terms, base=self.after.base if self._incremental else None, instead=urls[1:])

    def restored(self, restored: Restored | None, renamed: RenameRules) -> None:
        """Forgets the last save: the run goes on from what was restored. Collective.

        Args:
            restored: the checkpoint; None where there was none.
            renamed: the rules of `rename` that its names have been through, which the run's checkpoints tell from now.
        """
        self._last, self._terms = None, replace(self._terms, renamed=renamed)
        self.after.restored(restored)

    def delete(self, id: CheckpointId) -> None:
        """Removes a checkpoint wherever it is, once nothing is being saved or copied. Collective."""
        self.wait()
        self.after.delete(id)
        if self._last is not None and self._last[0] == id:
            self._last = None

    def wait(self) -> None:
        """Waits for saves and copies in the background, and raises their failures. Collective."""
        self.background.wait()
        self.after.finish()
        self.raise_failure_of_copy()

    def raise_failure_of_copy(self) -> None:
        """Raises the failure of a copy, on all ranks if one of them has met it. Collective where anything is copied."""
        if self.after.copies:
            # First, as on all ranks: one that waits for its result is in no round before, and shows no life.
            self.background.finish()
            self.after.raise_failure()

    def take_failures(self) -> list[BaseException]:
        """Takes the failures of saves and copies that were not raised on this rank; waits for the save in flight."""
        saves = [self.background.take_failure(), *take_failures()]
        return [each for each in (*saves, *self.after.take_failures()) if each is not None]


def _numbers_or_none(metrics: Mapping[str, float] | None) -> Mapping[str, float]:
    """Returns metrics as they are now; none where something is no number, which the save refuses, on all ranks."""
    try:
        return {} if metrics is None else numbers_of(metrics)
    except StateError:
        return {}
