"""The background work of one save: runs in a thread, from the staged state to the report.

hand over      the call has described its state, and copied it; or it copies later, `copy_by_plan`
run            the thread: describes from the copies, and saves as `save` does
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardopt.checkpoint.reports import SaveReport, emit_report
from shardopt.checkpoint.saving.agree_plan import PlanCache
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.planning.describe import Description
from shardopt.checkpoint.saving.planning.save_plan import RankWrites
from shardopt.checkpoint.saving.save import Described, save_described
from shardopt.checkpoint.saving.writing.pending import PendingSave
from shardopt.checkpoint.saving.writing.staging import Staging
from shardopt.ranks import Ranks
from shardopt.world import world

_RETURN_SECONDS = 1e-3  # in which the call returns: else it waits for the interpreter, which this thread has for 5 ms
_PLAN_SECONDS = 2.0  # for which a call waits until the save is planned, to copy no more than this rank writes


class Staged(NamedTuple):
    """The state at the time of the call, and the metrics, as handed over to the thread."""

    state: Staging
    metrics: Mapping[str, float] | None


class BackgroundSave:
    """The work of one save in the background, done once, in the first thread that runs it."""

    def __init__(
        self,
        ranks: Ranks,
        url: str,
        plans: PlanCache,
        begin: float,
        options: SaveTerms,
        afterwards: Callable[[SaveReport], None],
    ) -> None:
        self._ranks, self._plans, self._begin = ranks, plans, begin
        self._options, self._afterwards = replace(options, in_background=True), afterwards
        self._running = world().lock()  # acquired for good by the thread that runs it
        self._handed_over = world().event()
        self._staged: Staged | BaseException | None = None
        self._writes: RankWrites | None = None  # of this rank, once they are planned
        self._planned = world().event()
        self._copied = world().event()
        self._copy_error: BaseException | None = None
        self._staging_seconds = 0.0
        self.pending = PendingSave(url)

    def hand_over(self, staged: Staged | BaseException) -> None:
        """Hands over the state to save, or this rank's error of staging. The first call counts."""
        if self._staged is None:
            self._staged = staged
        self._handed_over.set()

    def copy_by_plan(self, staging: Staging) -> None:
        """Copies what this rank writes, within the call, after the save is planned.

        Where other ranks are late, all that it holds: training is not to wait for them here.
        """
        try:
            self._planned.wait(_PLAN_SECONDS)
            if not self.pending.done:
                staging.copy_by_plan(self._writes)
        except Exception as error:
            self.end_copying(error)  # which all ranks will raise in the thread
        else:
            self.end_copying()

    def end_copying(self, error: BaseException | None = None) -> None:
        """Signals that the call has made its copies, or cannot. The first call counts."""
        if not self._copied.is_set():
            self._copy_error = error
        self._copied.set()

    def run(self) -> None:
        """Saves the staged state, and ends `pending`."""
        if not self._running.acquire(blocking=False):
            return
        options = self._options
        try:
            with self._ranks.beating():
                report = save_described(self._ranks, self.pending.url, self._described, self._plans, options)
                seconds = world().monotonic() - self._begin
                self.pending.succeed(replace(report, seconds=seconds, staging_seconds=self._staging_seconds))
                emit_report("save", self.pending.result(), for_all=self._ranks.rank == 0)
                self._afterwards(self.pending.result())
        except BaseException as error:
            if self.pending.done:
                raise  # of `afterwards`
            self.pending.fail(error)
        finally:
            self._planned.set()  # where it was not: nobody is to wait for it any more

    def _described(self) -> Described:
        self._handed_over.wait()
        world().sleep(_RETURN_SECONDS)
        staged = self._staged
        if not isinstance(staged, Staged):
            assert staged is not None
            raise staged
        if staged.state.is_by_plan:
            state = staged.state.describe_before()
            return Described(state, staged.metrics, lambda writes: self._by_plan(staged, writes), staged.state.learn)
        self._finish(staged.state)
        return Described(self._state_of(staged), staged.metrics, None, staged.state.learn)

    def _by_plan(self, staged: Staged, writes: RankWrites) -> tuple[Description, RankWrites]:
        self._writes = writes
        self._planned.set()
        if staged.state.waits_for_plan:
            self._copied.wait()
            if self._copy_error is not None:
                raise self._copy_error
        self._finish(staged.state, writes)
        return self._state_of(staged), staged.state.placed(writes)

    def _finish(self, staging: Staging, writes: RankWrites | None = None) -> None:
        """Makes the remaining copies, once: a save that goes to another directory, for space, writes the same ones."""
        if self.pending.staged:
            return
        try:
            staging.finish(writes)
        except BaseException as error:
            self._staged = error  # for that directory too: another rank's may have been that there is no space
            raise
        self.pending.staged.set()
        self._staging_seconds = world().monotonic() - self._begin

    def _state_of(self, staged: Staged) -> Description:
        return staged.state.describe(self._options.check_replicas if self._ranks.size > 1 else "none")
