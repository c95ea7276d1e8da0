"""The checkpoints of one training run, by step: saved, restored, and taken away when they are no longer wanted."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from shardopt.checkpoint.async_save import AsyncSaver, Stage
from shardopt.checkpoint.initialize import init_unstepped
from shardopt.checkpoint.keeper import Keeper
from shardopt.checkpoint.load import load
from shardopt.checkpoint.metrics import metrics_of
from shardopt.checkpoint.mirror import Mirror
from shardopt.checkpoint.pending import PendingSave
from shardopt.checkpoint.retention import Mode, Rules, best_of
from shardopt.checkpoint.save import SaveReport, save_now
from shardopt.checkpoint.steps import committed_in, name_of, step_of
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.strictness import Strictness
from shardopt.errors import CorruptionError, ShardoptError
from shardopt.ranks import DEADLINE_SECONDS, ranks_of
from shardopt.stopping import Stop

_log = logging.getLogger("shardopt.checkpoint")


class Manager:
    """Saves a run's state every so many steps under one root, restores the newest, and keeps what is to be kept.

    All ranks must make the same calls, for the same steps. A root is one job's: two that run at once must not share it.
    Checkpoints are directories `step-00000500`; one without a manifest does not exist to anybody. Such remains of dead
    saves are cleared once a later checkpoint is committed.

    Args:
        root: a path, or a URL that fsspec knows.
        mirror: a second root, such as "s3://bucket/run", to which committed checkpoints are copied behind the training
            (`Mirror`); `restore` takes the newest of both, and the same rules remove what is not to be kept there.
        every: `save` writes at steps that are multiples of this.
        keep_last: how many of the newest checkpoints stay; None keeps all.
        keep_every: checkpoints of steps that are multiples of this stay too.
        best: `(metric, mode, n)`: the n checkpoints whose metric is the least ("min") or the greatest ("max") stay too.
            In any case the newest stays, and the one that the run was restored from.
        stage: None blocks training until the checkpoint is committed; "now" and "lazy" write it in the background, as
            `async_save` does, of whose cares these are.
        stop_on: a signal, such as `signal.SIGTERM`. Sent to any one rank it makes all ranks save after the same step,
            the next that none of them has passed, and leave with SystemExit. This needs `save` or `should_save` to be
            called at every step, and the Manager to be made in the main thread.
        exit_code: of processes that have left so; None is 128 and the signal's number, as shells have it. Where
            torchrun is to start the job again it must not be 0.
        stop_seconds: within which a process that was told to stop ends, saved or not.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
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
    ) -> None:
        for name, number in (("every", every), ("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name}: found {number}; required at least 1; give a number of steps or checkpoints")
        self._storage = storage_of(root)
        self._mirror = None if mirror is None else Mirror(root, mirror, deadline_seconds=deadline_seconds)
        self._failed_copy: ShardoptError | None = None
        self._every = every
        self._keeper = Keeper(self._storage, Rules(keep_last, keep_every, best_of(best)), self._mirror)
        self._stage = stage
        self._deadline_seconds = deadline_seconds
        self._saver: AsyncSaver | None = None
        self._closed = False
        self._stop: Stop | None = None
        if stop_on is not None:
            self._stop = Stop(stop_on, 128 + stop_on if exit_code is None else exit_code, stop_seconds)

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return self._storage.child(name_of(step)).url

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending. Local."""
        return committed_in(self._storage)

    def metrics(self, step: int) -> dict[str, float]:
        """What was given to `save` as the metrics of a step; empty where nothing was. Local."""
        return metrics_of(self._storage.child(name_of(step)))

    def should_save(self, step: int) -> bool:
        """Whether `save` would write at this step: it is due, or the job was told to stop."""
        return self._stops_after(step) or step % self._every == 0

    def save(
        self, step: int, app: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None, force: bool = False
    ) -> SaveReport | PendingSave | None:
        """Saves if the step is due (or `force`), else returns None. Collective, as `checkpoint.save`, if it saves.

        With `stage` it returns as soon as `async_save` does. Checkpoints that are no longer wanted are removed when the
        new one is committed.

        Args:
            metrics: numbers by name, kept with the checkpoint; rank 0's count.

        Raises:
            ShardoptError: as `checkpoint.save`, or the save before, in the background, has failed.
            SystemExit: the job was told to stop, and the checkpoint of this step is committed.
        """
        self._require_open()
        if not (force or self.should_save(step)):
            return None
        with ranks_of().beating(self._deadline_seconds):
            return self._save(step, app, metrics)

    def restore(self, app: Mapping[str, Any], *, strict: bool | Strictness = True) -> int:
        """Loads the newest committed checkpoint that is whole into `app`, in place; returns its step.

        Collective, as `checkpoint.load`, and with its errors; all ranks take the same step. One that turns out to be
        damaged is logged, and the one before it is taken. Optimizers that have not stepped yet are initialized where
        the checkpoint has state for them (and they have `init_state`).

        Returns:
            The step of the checkpoint, or 0 where there is none.

        Raises:
            CorruptionError: all checkpoints are damaged. Optimizers in `app` refuse to step.
            MismatchError: a checkpoint does not fit.
        """
        self._require_open()
        with ranks_of().beating(self._deadline_seconds):
            return self._restore(app, strict)

    def _restore(self, app: Mapping[str, Any], strict: bool | Strictness) -> int:
        if self._saver is not None:
            self._saver.wait()
        damaged: list[int] = []
        candidates = self._candidates()
        for step, url in candidates:
            try:
                init_unstepped(url, app, self._deadline_seconds)
                load(url, app, strict=strict, deadline_seconds=self._deadline_seconds)
            except CorruptionError as error:
                if url == self.path(step):
                    damaged.append(step)
                if (step, url) == candidates[-1]:
                    raise
                _log.warning("the checkpoint of step %d is damaged, taking the one before it: %s", step, error)
            else:
                self._keeper.restored(step, damaged)
                return step
        return 0

    def _candidates(self) -> list[tuple[int, str]]:
        """Step and URL of all committed checkpoints, newest first, the same on every rank."""
        if self._mirror is not None:
            found = [(step_of(name), url) for name, url in self._mirror.committed()]
            return [(step, url) for step, url in found if step is not None]
        _, steps = ranks_of().agree(
            f"restoring from {self._storage.url}",
            work=lambda: None,
            decide=lambda _: self.steps(),
            deadline_seconds=self._deadline_seconds,
        )
        return [(int(step), self.path(step)) for step in reversed(steps)]

    def close(self) -> None:
        """Waits for what goes on in the background, and ends the use of this manager. Raises what failed there.

        Collective where a save in the background has failed: then all ranks raise if one of them was not told yet.
        """
        # Within an except or a finally it may be this rank alone that is on its way out, and the others anywhere.
        self._close(alone=sys.exception() is not None)

    def _close(self, alone: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._saver is not None:
                self._saver.close(alone)
        finally:
            try:
                if self._mirror is not None:
                    self._mirror.close()
            finally:
                if self._stop is not None:
                    self._stop.close()  # not before: the signal would end the process, and what is being saved with it
        self._raise_failed_copy()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._close(alone=error is not None)
        except Exception as failure:
            if error is None:
                raise
            # What ended the program is what is to be seen; very likely the save failed for the same reason.
            _log.error("the save in the background has failed too: %s", failure)

    def _stops_after(self, step: int) -> bool:
        return self._stop is not None and self._stop.after(step, ranks_of())

    def _save(self, step: int, app: Mapping[str, Any], metrics: Mapping[str, float] | None) -> SaveReport | PendingSave:
        stop = self._stop if self._stops_after(step) else None
        if self._mirror is not None:
            # Agreed upon: the threads of some ranks may have heard of it, and those of others not yet.
            doing = f"copying checkpoints of {self._storage.url}"
            ranks_of().agree(doing, work=self._raise_failed_copy, deadline_seconds=self._deadline_seconds)
            self._mirror.prepare()
        self._keeper.make_way(step)
        if self._stage is not None and stop is None:
            return self._save_beside(step, app, self._stage, metrics)
        if self._saver is not None:
            self._saver.wait()
        deadline_seconds = min(self._deadline_seconds, stop.deadline_seconds if stop else math.inf)
        report = save_now(self.path(step), app, True, "small", deadline_seconds, metrics)
        self._after_commit(step)
        if stop is not None:
            if ranks_of().rank == 0:
                _log.warning("told to stop: saved step %d, and leaving", step)
            stop.leave()
        return report

    def _save_beside(
        self, step: int, app: Mapping[str, Any], stage: Stage, metrics: Mapping[str, float] | None
    ) -> PendingSave:
        self._saver = self._saver or AsyncSaver()
        return self._saver.save(
            self.path(step),
            app,
            stage=stage,
            deadline_seconds=self._deadline_seconds,
            metrics=metrics,
            afterwards=lambda: self._after_commit(step),
        )

    def _after_commit(self, step: int) -> None:
        """Begins to copy the new checkpoint, and removes what is no longer wanted. No save is under way then."""
        if self._mirror is not None:
            try:
                self._mirror.upload(name_of(step), afterwards=self._keeper.tidy_copies)
            except ShardoptError as error:  # of an earlier one; this one has begun
                self._failed_copy = error
        self._keeper.tidy()

    def _raise_failed_copy(self) -> None:
        failed, self._failed_copy = self._failed_copy, None
        if failed is not None:
            raise failed

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Manager was closed; make a new one")
