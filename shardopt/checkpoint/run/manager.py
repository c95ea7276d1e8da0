"""The checkpoints of one training run, by step: saved, restored, and removed when they are no longer wanted."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

from shardopt.checkpoint.async_save import AsyncSaver, Stage
from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.format.metrics import numbers_of
from shardopt.checkpoint.hosts.hosts import is_on_hosts
from shardopt.checkpoint.load import load
from shardopt.checkpoint.matching.strictness import Strictness
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reading.broadcast import Replicas
from shardopt.checkpoint.reports import LoadReport, SaveReport, announce
from shardopt.checkpoint.run.branches import Beyond, Branches
from shardopt.checkpoint.run.export import Export, Exporter
from shardopt.checkpoint.run.history import History
from shardopt.checkpoint.run.keeper import Keeper
from shardopt.checkpoint.run.metrics import metrics_of
from shardopt.checkpoint.run.mirror import Mirror
from shardopt.checkpoint.run.options import (
    check_restore_options,
    check_run_options,
    check_step,
    refuse_unknown_branch,
    rules_of,
    signal_of,
)
from shardopt.checkpoint.run.restoring import restore_newest, summary_of
from shardopt.checkpoint.run.retention import Mode
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.slow_saves import SlowSaves
from shardopt.checkpoint.run.steps import Place
from shardopt.checkpoint.run.tiers import Tier, Tiers, refuse_unfit_tiers
from shardopt.checkpoint.save import SaveOptions, save_now
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.writing.pending import PendingSave, take_failures
from shardopt.errors import ShardoptError, StateError
from shardopt.ranks import DEADLINE_SECONDS, Group, ranks_of
from shardopt.state import Tied, refuse_no_regex
from shardopt.stopping import Stop
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


class Manager:
    """Saves a run's state every so many steps under one root, restores the newest, and keeps what is to be kept.

    All ranks must make the same calls, for the same steps. A root is one job's: two that run at once must not share it.
    Checkpoints are directories `step-00000500`; one without a manifest does not exist to anybody. Such remains of dead
    saves are cleared once a later checkpoint is committed. Taken back to an earlier step (`restore(app, step=...)`) a
    run goes on upon a branch, in directories `step-00000500-b1`, and what was saved beyond is no longer part of it.

    Args:
        root: a path, or a URL that fsspec knows.
        tiers: directories that each host has for itself, the fastest first (`Tier`). A save goes to the first that is
            due, or to the root where none is, and from there behind the training to its neighbours' hosts, the other
            tiers that are due, and the root (`every`). `restore` takes the newest step that is whole anywhere. Not with
            `incremental`.
        mirror: a second root, such as "s3://bucket/run", to which committed checkpoints are copied behind the training
            (`Mirror`); `restore` takes the newest of both, and the same rules remove what is not to be kept there.
        every: `save` writes at steps that are multiples of this.
        keep_last: how many of the newest checkpoints stay; None keeps all.
        keep_every: checkpoints of steps that are multiples of this stay too.
        best: `(metric, mode, n)`: the n checkpoints whose metric is the least ("min") or the greatest ("max") stay too.
            In any case the newest stays, the one that was saved last, and the one that the run was restored from.
        stage: None blocks training until the checkpoint is committed; "now" and "lazy" write it in the background, as
            `async_save` does, of whose cares these are.
        stop_on: a signal, such as `signal.SIGTERM`. Sent to any one rank it makes all ranks save after the same step,
            the next that none of them has passed, and leave with SystemExit. This needs `save` or `should_save` to be
            called at every step, and the Manager to be made in the main thread. Failures of an earlier save or copy are
            logged then, once this one is saved.
        exit_code: of processes that have left so; None is 128 and the signal's number, as shells have it. Where
            torchrun is to start the job again it must not be 0.
        stop_seconds: within which a process that got the signal ends, saved or not. Rank 0 logs a warning, once, if the
            save that the run is restored from, or a later one, took more than half of it.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
        group: the ranks of the run, where they are not all of the job: a process group, or a device mesh. Others make
            no Manager for its root. Making it is collective then, as is its use.
        tied: parameters that are tied across ranks, as for `checkpoint.save`.
        incremental: whether a save refers to the one before for what has not changed since, as by `save(..., base=)`;
            the first one, or one after which the one before is gone, writes everything. Files that are referred to stay
            as long as a checkpoint that does, whatever the rules say of their own.
        select: a regex; only keys in which it is found are saved, as by `save(..., select=)`.
        export: the last or best checkpoint is also written as a folder that Hugging Face's `from_pretrained` reads, by
            rank 0 behind the training. A failure is logged, and raised by `close` on that rank.

    Raises:
        OptionError: arguments of the wrong type or out of their range; all of them are listed. Or this rank is not in
            `group`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        tiers: Sequence[Tier] = (),
        mirror: str | os.PathLike[str] | None = None,
        every: int = 1,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: tuple[str, Mode, int] | None = None,
        stage: Stage | None = None,
        stop_on: signal.Signals | None = None,
        exit_code: int | None = None,
        stop_seconds: float = 25.0,
        deadline_seconds: float = DEADLINE_SECONDS,
        group: Group | None = None,
        tied: Tied | None = None,
        incremental: bool = False,
        select: str | None = None,
        export: Export | None = None,
    ) -> None:
        check_run_options(
            root, mirror, every, keep_last, keep_every, best, stage, stop_on, exit_code, stop_seconds, deadline_seconds
        )
        self._group, self._tied = group, tied
        self._incremental, self._select = incremental, select
        refuse_no_regex("select", select)
        self._base: str | None = None  # the URL of the last checkpoint that is known under the root
        ranks_of(group)  # which refuses a rank that is not in it
        self._root = Root(storage_of(root))
        self._copies = None if mirror is None else Root(storage_of(mirror))
        self._mirror = None if mirror is None else Mirror(root, mirror, deadline_seconds=deadline_seconds, group=group)
        self._failed_copy: ShardoptError | None = None
        self._exporter = None if export is None or ranks_of(group).rank else Exporter(export)
        self._every = int(every)
        self._keeper = Keeper(self._root, self._copies, rules_of(keep_last, keep_every, best), self._mirror, group)
        self._stage = stage
        self._deadline_seconds = deadline_seconds
        self._saver: AsyncSaver | None = None
        self._closed = False
        self._history = History(self._root, self._copies, self._mirror, deadline_seconds, group)
        self._known: dict[Place, str] = {}  # what this Manager has committed or was restored from, and where
        self._last: tuple[Place, SaveReport | PendingSave] | None = None
        self._stop: Stop | None = None
        stop_signal = signal_of(stop_on)
        if stop_signal is not None:
            self._stop = Stop(stop_signal, 128 + stop_signal if exit_code is None else exit_code, stop_seconds)
        roots = [each.storage for each in (self._root, self._copies) if each is not None]
        refuse_unfit_tiers(tiers, roots, incremental)
        self._committing = world().lock()
        self._tiers = Tiers(tiers, self._root, deadline_seconds, group, self._copies)
        self._keeper.promoting = self._tiers.promoting
        self._slow_saves = SlowSaves(None if self._stop is None or ranks_of(group).rank else stop_seconds)

    def path(self, step: int) -> str:
        """Returns the URL of the checkpoint of a step, whether there is one or not. Local."""
        return self._root.checkpoint(self._history.place_of_step(step)).url

    @property
    def branch(self) -> int:
        """The branch that the run is on: 0, until it is taken back to an earlier step. Local."""
        return self._history.current_branch()

    def steps(self) -> list[int]:
        """Returns the steps of all committed checkpoints of the run, ascending. Local."""
        run, _ = self._history.committed_here()
        return [place.step for place in run]

    def set_aside(self) -> dict[int, list[int]]:
        """Returns by branch the steps that were saved on it and are no part of the run since it was taken back. Local.

        `restore(app, step=..., branch=...)` takes the run back to one of them.
        """
        _, others = self._history.committed_here()
        return {branch: [each.step for each in others if each.branch == branch] for _, branch in others}

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics that `save` got for a step; empty where it got none. Local."""
        return metrics_of(self._root.checkpoint(self._history.place_of_step(step)))

    def should_save(self, step: int) -> bool:
        """Whether `save` would write at this step: it is due, here or on a tier, or the job is to stop."""
        return self._stops_after(step) or step % self._every == 0 or self._tiers.is_due(step)

    def where(self) -> dict[int, dict[str, int | None]]:
        """Returns where each step of the run is whole: under which paths of tiers, and under the root. Collective.

        With each tier is the number of hosts that may be lost without it, and None with the root.
        """
        found: dict[int, dict[str, int | None]] = {
            step: dict(tiers) for step, tiers in self._tiers.where(self._branches()).items()
        }
        for step in self.steps():
            found.setdefault(step, {})[self._root.url] = None
        return dict(sorted(found.items()))

    def save(
        self, step: int, app: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None, force: bool = False
    ) -> SaveReport | PendingSave | None:
        """Saves if the step is due (or `force`), else returns None. Collective, as `checkpoint.save`, if it saves.

        With `stage` it returns as soon as `async_save` does. Checkpoints that are no longer wanted are removed when the
        new one is committed.

        Where this Manager has committed the step already, or was restored from it, nothing is saved, and a line says
        so; it returns what the save returned if that was the last one, else None.

        Args:
            metrics: numbers by name, kept with the checkpoint; rank 0's count.

        Raises:
            ShardoptError: as `checkpoint.save`, or the save before, in the background, has failed.
            CheckpointExistsError: somebody else has committed this step.
            SystemExit: the job is to stop, and the checkpoint of this step is committed.
        """
        self._require_open()
        check_step(step)
        if not (force or self.should_save(step)):
            return None
        with ranks_of(self._group).beating(self._deadline_seconds):
            if self._stops_after(step):
                self._save_and_leave(step, app, metrics)
            self._raise_failed_copy_everywhere()
            return self._save_step(step, app, metrics, None, force)

    def restore(
        self,
        app: Mapping[str, Any],
        *,
        step: int | None = None,
        branch: int | None = None,
        beyond: Beyond = "set_aside",
        required: bool = False,
        strict: bool | Strictness = True,
        select: str | None = None,
        rename: Mapping[str, str] | None = None,
        transactional: bool = False,
        replicas: Replicas = "auto",
        progress: Progress | None = None,
    ) -> int:
        """Loads the newest committed checkpoint that is whole into `app`, in place; returns its step.

        Collective, as `checkpoint.load`, and with its errors; all ranks take the same step. One that turns out to be
        damaged, or cannot be read from its disk, is logged, and the one before it is taken. Keyed optimizers get state
        for the parameters that the checkpoint has state for, as by `load(..., init_state=True)`. Rank 0 reports
        what was restored: in the log at INFO, and on stderr in a program that has configured no logging.

        Args:
            step: takes the run back to this step, which must be whole: what was saved beyond it is no longer part of
                the run, for this job and all that restore it later. The run goes on upon a new branch, so that it may
                save the same steps once more. Only to look at an earlier step, `checkpoint.load(manager.path(step),
                app, init_state=True)`. None for the newest.
            branch: the branch to look for checkpoints on, a key of `set_aside`; None for the one that the run is on.
            beyond: the fate of the checkpoints beyond `step`: "set_aside" leaves them where they are, out of the
                run's way and of its rules'; "remove" removes them, once this one is loaded.
            required: whether it is an error that there is no checkpoint. A disk that is not mounted looks as a run that
                has not begun: give True wherever one must have been saved.
            select: as for `load`: other keys of the app stay as they are. Left in the script it holds at every start:
                a job that is started again comes back with these keys alone, and with a new optimizer's state and a
                step of 0 where it does not find them. The line about the restore says so. To begin with some weights
                of another run, load these by `checkpoint.load(url, app, select=...)` where `restore` has returned 0.
            strict, rename, transactional, replicas, progress: as for `load`.

        Returns:
            The step of the checkpoint, or 0 where there is none.

        Raises:
            OptionError: an argument is none.
            CheckpointNotFoundError: there is no checkpoint, and one is required; or none of that step.
            CorruptionError: all checkpoints, or all of that step, are damaged. Optimizers in `app` refuse to step.
            CheckpointError: a root cannot be read, or not all ranks see the same.
            MismatchError: a checkpoint does not fit.
        """
        self._require_open()
        check_restore_options(step, branch, beyond)

        def load_from(url: str) -> LoadReport:
            return load(
                url,
                app,
                strict=strict,
                select=select,
                rename=rename,
                transactional=transactional,
                replicas=replicas,
                init_state=True,
                progress=progress,
                deadline_seconds=self._deadline_seconds,
                group=self._group,
                tied=self._tied,
            )

        with ranks_of(self._group).beating(self._deadline_seconds):
            return self._restore(load_from, step, branch, beyond, required, select)

    def _restore(
        self,
        load_from: Callable[[str], LoadReport],
        step: int | None,
        branch: int | None,
        beyond: Beyond,
        required: bool,
        select: str | None,
    ) -> int:
        if self._saver is not None:
            self._saver.wait()
        self._tiers.wait()
        # Known whether anything is loaded or not: what is saved after a refused load belongs to the branch of now.
        branches = self._keeper.branches = self._history.agree_on_branches(needs_copies=True)
        seen_from = branches.current if branch is None else branch
        refuse_unknown_branch(seen_from, branches.current)
        restored = restore_newest(
            lambda: self._history.candidates(seen_from, step, required or step is not None, self._tiers.candidates()),
            load_from,
        )
        if restored is None:
            self._tiers.restored(None, None, branches, False, lambda: None)
            if ranks_of(self._group).rank == 0:
                where = self._root.url if self._root.is_there() else f"{self._root.url}, which is not there"
                announce(f"restored nothing: there is no checkpoint in {where}")
            return 0
        place = restored.candidate.place
        if step is not None or branch is not None:
            self._take_back(place.step, seen_from, beyond)
        self._known = {place: restored.candidate.url}
        is_here = restored.candidate.url == self._root.checkpoint(place).url  # and not a copy elsewhere
        self._base = restored.candidate.url if is_here else None
        self._last = None
        self._keeper.restored(place, restored.damaged)
        self._upload_newest(restored.damaged)
        seconds = restored.report.save_seconds
        self._tiers.restored(
            place,
            restored.candidate.url,
            self._keeper.branches,
            place.step % self._every == 0,
            lambda: self._after_commit_here(place, seconds, None),
        )
        self._announce(summary_of(restored, select))
        self._slow_saves.look_at(restored.candidate.url, restored.report.save_seconds)
        return place.step

    def wait(self) -> None:
        """Waits for saves and copies in the background, and raises their failures.

        Collective, with the errors of `save`. To be called before `destroy_process_group` where this Manager is to go
        on in another group: it does so by itself, from `restore` on.
        """
        self._require_open()
        with ranks_of(self._group).beating(self._deadline_seconds):
            if self._saver is not None:
                self._saver.wait()
            self._tiers.wait()
            if self._mirror is not None:
                self._mirror.wait()
            self._raise_failed_copy_everywhere()

    def close(self) -> None:
        """Waits for saves and copies in the background, and ends the use of this manager. Raises their failures.

        Collective where a save in the background has failed: then all ranks raise if one of them has not raised it yet.
        An export that has failed is rank 0's own, and raised there alone.
        """
        # Within an except or a finally it may be this rank alone that is on its way out, and the others anywhere.
        self._close(alone=sys.exception() is not None)

    def _close(self, alone: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last_first:  # each is closed, whatever another raises
            last_first.callback(self._keeper.close)
            if self._exporter is not None:
                last_first.callback(self._exporter.close)
            if self._stop is not None:
                # Not before the others: the signal would end the process, and what is being saved with it.
                last_first.callback(self._stop.close)
            if self._mirror is not None:
                last_first.callback(self._mirror.close)
            last_first.callback(self._tiers.close)
            if self._saver is not None:
                last_first.callback(self._saver.close, alone)
        self._raise_failed_copy()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._close(alone=error is not None)
        except Exception as failure:
            if error is None:
                raise
            # The error that ended the program is the one to raise; very likely the save failed for the same reason.
            _log.error("the save in the background has failed too: %s", failure)

    def _stops_after(self, step: int) -> bool:
        return self._stop is not None and self._stop.after(step, ranks_of(self._group), self._deadline_seconds)

    def _branches(self) -> Branches:
        """Returns the branches as all ranks know them. Collective the first time."""
        if self._history.branches is None:
            self._keeper.branches = self._history.agree_on_branches(needs_copies=False)
            self._upload_newest()
        return self._keeper.branches

    def _take_back(self, step: int, seen_from: int, beyond: Beyond) -> None:
        self._history.take_back(step, seen_from, beyond, self._tiers.candidates())
        self._keeper.branches = self._history.branches or Branches()
        if beyond == "remove":
            ranks_of(self._group).agree(  # in a round, so that no rank is taken for dead meanwhile
                f"removing what is beyond step {step} from {self._root.url}",
                work=lambda: None,
                decide=lambda _: self._keeper.remove_beyond(),
                deadline_seconds=self._deadline_seconds,
            )

    def _upload_newest(self, damaged: Collection[str] = ()) -> None:
        """Begins to copy the newest checkpoint, as an earlier process of the job may not have been done with it."""
        if self._mirror is not None:
            newest = self._history.newest_under_root(damaged)
            if newest is not None:
                self._upload(newest)

    def _is_known(self, place: Place, at_root: bool) -> bool:
        """Whether this Manager has committed a checkpoint, or was restored from it, and it is there. Collective.

        Args:
            at_root: whether one that a tier alone has does not count; it may be on its way to the root.
        """
        if self._saver is not None and self._last is not None and self._last[0] == place:
            self._saver.wait()  # which may have failed, and then is no checkpoint
        if at_root and is_on_hosts(self._known.get(place, "")):
            self._tiers.wait()
        url = self._known.get(place)
        if url is None or (at_root and is_on_hosts(url)):
            return False
        _, is_there = ranks_of(self._group).agree(
            f"looking for step {place.step} in {self._root.url}",
            work=lambda: None,
            decide=lambda _: is_on_hosts(url) or storage_of(url).exists(MANIFEST_NAME),
            deadline_seconds=self._deadline_seconds,
        )
        if is_there:
            self._announce(f"step {place.step} is in {url} already: nothing was saved")
        return bool(is_there)

    def _save_and_leave(self, step: int, app: Mapping[str, Any], metrics: Mapping[str, float] | None) -> NoReturn:
        """Makes the last save of a job that is to stop; then logs earlier failures, and ends the process."""
        assert self._stop is not None
        earlier = self._earlier_failures()
        try:
            self._save_step(step, app, metrics, self._stop)
        finally:
            for failure in earlier:
                _log.error("before the job was told to stop, this had failed: %s", failure)
        if ranks_of(self._group).rank == 0:
            _log.warning("told to stop: saved step %d, and leaving", step)
        self._stop.leave()

    def _save_step(
        self,
        step: int,
        app: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        stop: Stop | None,
        force: bool = False,
    ) -> SaveReport | PendingSave | None:
        place = self._branches().place(int(step))
        to_root = stop is not None or force  # nothing that is lost with its hosts
        if self._is_known(place, to_root):
            return self._last[1] if self._last is not None and self._last[0] == place else None
        if self._mirror is not None:
            self._mirror.prepare()
        with self._committing:
            self._keeper.make_way(place)
        on_tiers = [] if to_root else self._tiers.urls(place)
        if self._tiers and stop is None:
            self._tiers.make_room()
        url, *instead = (*on_tiers, self._root.checkpoint(place).url)
        numbers = _numbers_or_none(metrics)
        if self._stage is not None and stop is None:
            self._saver = self._saver or AsyncSaver()
            if self._incremental:
                self._saver.wait()  # for what this one may refer to
            pending = self._saver.save(
                url,
                app,
                self._save_options(self._deadline_seconds, instead),
                stage=self._stage,
                metrics=metrics,
                afterwards=lambda report: self._after_commit(place, report, numbers, True),
            )
            self._last = place, pending
            return pending
        if self._saver is not None and stop is None:
            self._saver.wait()
        deadline_seconds = min(self._deadline_seconds, stop.deadline_seconds if stop else math.inf)
        options = self._save_options(deadline_seconds, instead)
        report = save_now(url, app, options, metrics, raise_earlier=stop is None)
        self._after_commit(place, report, numbers, stop is None)
        self._last = place, report
        return report

    def _save_options(self, deadline_seconds: float, instead: Sequence[str]) -> SaveOptions:
        return SaveOptions(
            deadline_seconds=deadline_seconds,
            group=self._group,
            tied=self._tied,
            base=self._base if self._incremental else None,
            base_required=False,
            select=self._select,
            instead=tuple(instead),
        )

    def _after_commit(self, place: Place, report: SaveReport, metrics: Mapping[str, float], in_turn: bool) -> None:
        """Begins to copy the new checkpoint, and removes those no longer wanted. No save is under way then.

        Args:
            in_turn: whether what is begun is begun after what tiers have begun: in one order on all ranks.
        """
        self._known[place] = report.url
        after = partial(self._after_commit_here, place, report.seconds, metrics)
        if is_on_hosts(report.url):
            self._tiers.committed(place, report.url, place.step % self._every == 0, after)
        elif self._tiers and in_turn:
            self._tiers.committed_at_root(place, after)
        else:
            after()

    def _after_commit_here(self, place: Place, seconds: float | None, metrics: Mapping[str, float] | None) -> None:
        """Does the same for a checkpoint that is under the root; one from a tier may come beside another save.

        Args:
            metrics: None where they are to be read.
        """
        checkpoint = self._root.checkpoint(place)
        url = checkpoint.url
        metrics = metrics_of(checkpoint) if metrics is None else metrics
        with self._committing:
            self._slow_saves.look_at(url, seconds)
            self._known[place] = self._base = url
            if self._mirror is not None:
                self._upload(place)
            if self._exporter is not None:
                self._exporter.offer(place, url, metrics)
            self._keeper.tidy(place, metrics)

    def _upload(self, place: Place) -> None:
        assert self._mirror is not None
        try:
            self._mirror.upload(place.name, afterwards=lambda _: self._keeper.tidy_copies())
        except ShardoptError as error:  # of an earlier one; this one has begun
            self._failed_copy = error

    def _raise_failed_copy(self) -> None:
        failed, self._failed_copy = self._failed_copy or self._tiers.take_failure(), None
        if failed is not None:
            raise failed

    def _raise_failed_copy_everywhere(self) -> None:
        """Raises the failure of a copy on all ranks: threads of some may not have met it yet. Collective."""
        if self._mirror is not None or self._tiers:
            if self._saver is not None:
                # First, as on all ranks: one that waits for its result is in no round before, and shows no life.
                self._saver.finish()
            doing = f"copying checkpoints of {self._root.url}"
            ranks_of(self._group).agree(doing, work=self._raise_failed_copy, deadline_seconds=self._deadline_seconds)

    def _earlier_failures(self) -> list[BaseException]:
        """Takes the failures of this rank's saves and copies that were not raised yet; waits for the save in flight."""
        failures = [self._saver.take_failure()] if self._saver is not None else []
        failures += [*take_failures(), self._failed_copy, self._tiers.take_failure()]
        self._failed_copy = None
        if self._mirror is not None:
            failures.append(self._mirror.take_failure())
        return [failure for failure in failures if failure is not None]

    def _announce(self, text: str) -> None:
        if ranks_of(self._group).rank == 0:
            announce(text)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Manager was closed; make a new one")


def _numbers_or_none(metrics: Mapping[str, float] | None) -> Mapping[str, float]:
    """Returns metrics as they are now; none where something is no number, which the save refuses, on all ranks."""
    try:
        return {} if metrics is None else numbers_of(metrics)
    except StateError:
        return {}
