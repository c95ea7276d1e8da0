"""Saves a step of a run: to a tier or to the root, in the call or in the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from shardopt.checkpoint.async_save import AsyncSaver, Stage
from shardopt.checkpoint.format.manifest import RenameRules
from shardopt.checkpoint.format.metrics import numbers_of
from shardopt.checkpoint.reports import SaveReport, announce
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.saving.behind import Behind
from shardopt.checkpoint.run.steps import Place
from shardopt.checkpoint.run.tiers.tiers import Tiers
from shardopt.checkpoint.save import SaveTerms, save_now
from shardopt.checkpoint.writing.pending import PendingSave, take_failures
from shardopt.errors import StateError
from shardopt.ranks import ranks_of


class StepSaver:
    """Saves steps, one after the other. All ranks make the same calls.

    Args:
        root: of the run.
        tiers: of the run, which may be none.
        behind: begins what follows each commit.
        stage: as for `async_save`; None to save in the call.
        incremental: whether a save refers to the one before.
        options: of all saves.
    """

    def __init__(
        self, root: Root, tiers: Tiers, behind: Behind, stage: Stage | None, incremental: bool, options: SaveTerms
    ) -> None:
        self._root, self._tiers, self._behind = root, tiers, behind
        self._stage, self._incremental, self._options = stage, incremental, options
        self._last: tuple[Place, SaveReport | PendingSave] | None = None

    @cached_property
    def background(self) -> AsyncSaver:
        """Saves in the background; made at first use, as a run that is only looked at needs none."""
        return AsyncSaver()

    def has(self, place: Place, at_root: bool) -> bool:
        """Whether a step was committed or restored here, and is there; says so. Collective.

        Args:
            at_root: as for `Behind.url_of`.
        """
        if self._last is not None and self._last[0] == place:
            self.background.wait()  # which may have failed, and then is no checkpoint
        url = self._behind.url_of(place, at_root)
        if url is not None and ranks_of(self._options.group).rank == 0:
            announce(f"step {place.step} is in {url} already: nothing was saved")
        return url is not None

    def result_of(self, place: Place) -> SaveReport | PendingSave | None:
        """Returns what the last save has returned, if it was this one. Local."""
        return self._last[1] if self._last is not None and self._last[0] == place else None

    def save(
        self, place: Place, app: Mapping[str, Any], metrics: Mapping[str, float] | None, at_root: bool
    ) -> SaveReport | PendingSave:
        """Saves to the first tier that is due, or to the root where none is. Collective.

        Args:
            at_root: whether to save to the root in any case, where nothing is lost with its hosts.
        """
        self._behind.prepare(place, in_turn=True)
        on_tiers = [] if at_root else self._tiers.urls(place)
        url, *instead = (*on_tiers, self._root.checkpoint(place).url)
        if self._stage is None:
            return self._save_now(place, url, app, metrics, self._options_with(*instead), in_turn=True)
        if self._incremental:
            self.background.wait()  # for what this one may refer to
        numbers = _numbers_or_none(metrics)
        pending = self.background.save(
            url,
            app,
            self._options_with(*instead),
            stage=self._stage,
            metrics=metrics,
            afterwards=lambda report: self._behind.committed(place, report, numbers, in_turn=True),
        )
        self._last = place, pending
        return pending

    def save_last(
        self, place: Place, app: Mapping[str, Any], metrics: Mapping[str, float] | None, seconds: float
    ) -> None:
        """Saves to the root, in the call, whatever has failed before. Collective.

        Args:
            seconds: as `deadline_seconds`, where those are more.
        """
        self._behind.prepare(place, in_turn=False)
        options = self._options_with()
        options = replace(options, deadline_seconds=min(options.deadline_seconds, seconds))
        self._save_now(place, self._root.checkpoint(place).url, app, metrics, options, in_turn=False)

    def restored(self, renamed: RenameRules) -> None:
        """Forgets the last save: the run goes on from what was restored. Local.

        Args:
            renamed: the rules of `rename` that its names have been through, which the run's checkpoints tell from now.
        """
        self._last, self._options = None, replace(self._options, renamed=renamed)

    def delete(self, place: Place) -> None:
        """Removes a checkpoint wherever it is, once nothing is being saved or copied. Collective."""
        self.wait()
        self._behind.delete(place)
        if self._last is not None and self._last[0] == place:
            self._last = None

    def wait(self) -> None:
        """Waits for saves and copies in the background, and raises their failures. Collective."""
        self.background.wait()
        self._behind.finish()
        self.raise_failure_of_copy()

    def raise_failure_of_copy(self) -> None:
        """Raises the failure of a copy, on all ranks if one of them has met it. Collective where anything is copied."""
        if self._behind.copies:
            # First, as on all ranks: one that waits for its result is in no round before, and shows no life.
            self.background.finish()
            self._behind.raise_failure()

    def take_failures(self) -> list[BaseException]:
        """Takes the failures of saves and copies that were not raised on this rank; waits for the save in flight."""
        saves = [self.background.take_failure(), *take_failures()]
        return [each for each in (*saves, *self._behind.take_failures()) if each is not None]

    def _save_now(
        self,
        place: Place,
        url: str,
        app: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        options: SaveTerms,
        in_turn: bool,
    ) -> SaveReport:
        numbers = _numbers_or_none(metrics)
        report = save_now(url, app, options, metrics, raise_earlier=in_turn)
        self._behind.committed(place, report, numbers, in_turn)
        self._last = place, report
        return report

    def _options_with(self, *instead: str) -> SaveTerms:
        return replace(self._options, base=self._behind.base if self._incremental else None, instead=instead)


def _numbers_or_none(metrics: Mapping[str, float] | None) -> Mapping[str, float]:
    """Returns metrics as they are now; none where something is no number, which the save refuses, on all ranks."""
    try:
        return {} if metrics is None else numbers_of(metrics)
    except StateError:
        return {}
