"""The checkpoints of one training run, by step: saved, restored, and taken away when they are no longer wanted."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
from collections.abc import Callable, Mapping
from typing import Any

from shardopt.checkpoint.async_save import AsyncSaver, Stage
from shardopt.checkpoint.format import MANIFEST_NAME, METRICS_NAME, damaged, load_json
from shardopt.checkpoint.initialize import init_unstepped
from shardopt.checkpoint.load import load
from shardopt.checkpoint.pending import PendingSave
from shardopt.checkpoint.retention import Best, Mode, Rules, remove_checkpoint, steps_to_keep
from shardopt.checkpoint.save import SaveReport, save_now
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.strictness import Strictness
from shardopt.checkpoint.unsettled import urls_unsettled
from shardopt.errors import CheckpointError, CorruptionError
from shardopt.ranks import DEADLINE_SECONDS, ranks_of
from shardopt.stopping import Stop

_NAME = re.compile(r"step-(\d{8,})")
_log = logging.getLogger("shardopt.checkpoint")


class Manager:
    """Saves a run's state every so many steps under one root, restores the newest, and keeps what is to be kept.

    All ranks must make the same calls, for the same steps. A root is one job's: two that run at once must not share it.
    Checkpoints are directories `step-00000500`; one without a manifest does not exist to anybody. Such remains of dead
    saves are cleared once a later checkpoint is committed.

    Args:
        root: a path, or a URL that fsspec knows.
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
        self._every = every
        self._rules = Rules(keep_last, keep_every, best_of(best))
        self._stage = stage
        self._deadline_seconds = deadline_seconds
        self._saver: AsyncSaver | None = None
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._resumed: int | None = None
        self._damaged: frozenset[int] = frozenset()
        self._closed = False
        self._stop: Stop | None = None
        if stop_on is not None:
            self._stop = Stop(stop_on, 128 + stop_on if exit_code is None else exit_code, stop_seconds)

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return self._storage.child(_name(step)).url

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending. Local."""
        return [step for step in self._steps_there() if self._storage.child(_name(step)).exists(MANIFEST_NAME)]

    def metrics(self, step: int) -> dict[str, float]:
        """What was given to `save` as the metrics of a step; empty where nothing was. Local."""
        storage = self._storage.child(_name(step))
        try:
            data = storage.read(METRICS_NAME)
        except FileNotFoundError:
            return {}
        where = f"{storage.url}/{METRICS_NAME}"
        try:
            return {name: float(value) for name, value in load_json(data, where).items()}
        except (TypeError, ValueError):
            raise damaged(where, "what is no number") from None

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
        stop = self._stop if self._stops_after(step) else None
        if not (stop or force or self.should_save(step)):
            return None
        if step in self._damaged:
            self._on_rank_0(lambda: remove_checkpoint(self._storage.child(_name(step))))
            self._damaged -= {step}
        noted = None if metrics is None else json.dumps({name: float(each) for name, each in metrics.items()}).encode()
        if self._stage is not None and stop is None:
            return self._save_beside(step, app, self._stage, noted)
        if self._saver is not None:
            self._saver.wait()
        deadline_seconds = min(self._deadline_seconds, stop.deadline_seconds if stop else math.inf)
        report = save_now(self.path(step), app, True, "small", deadline_seconds, noted)
        self._tidy()
        if stop is not None:
            if ranks_of().rank == 0:
                _log.warning("told to stop: saved step %d, and leaving", step)
            stop.leave()
        return report

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
        if self._saver is not None:
            self._saver.wait()
        _, steps = ranks_of().agree(
            f"restoring from {self._storage.url}",
            work=lambda: None,
            decide=lambda _: self.steps(),
            deadline_seconds=self._deadline_seconds,
        )
        damaged: list[int] = []
        for step in map(int, reversed(steps)):
            try:
                init_unstepped(self.path(step), app, self._deadline_seconds)
                load(self.path(step), app, strict=strict, deadline_seconds=self._deadline_seconds)
            except CorruptionError as error:
                damaged.append(step)
                if step == steps[0]:
                    raise
                _log.warning("the checkpoint of step %d is damaged, taking the one before it: %s", step, error)
            else:
                self._resumed, self._damaged = step, frozenset(damaged)
                return step
        return 0

    def close(self) -> None:
        """Waits for the save in the background, and ends the use of this manager. Raises what that save failed with."""
        if self._closed:
            return
        self._closed = True
        if self._stop is not None:
            self._stop.close()
        if self._saver is not None:
            self._saver.close()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # What ended the program is what is to be seen; very likely the save failed for the same reason.
            _log.error("the save in the background has failed too: %s", failure)

    def _stops_after(self, step: int) -> bool:
        return self._stop is not None and self._stop.after(step, ranks_of())

    def _save_beside(self, step: int, app: Mapping[str, Any], stage: Stage, noted: bytes | None) -> PendingSave:
        # Made at the first save: ranks must make their savers in one order, but a Manager that only looks is anybody's.
        self._saver = self._saver or AsyncSaver()
        return self._saver.save(
            self.path(step),
            app,
            stage=stage,
            deadline_seconds=self._deadline_seconds,
            metrics=noted,
            afterwards=self._tidy,
        )

    def _tidy(self) -> None:
        """Removes what is no longer wanted. After a commit, when no save of this manager is under way."""
        self._on_rank_0(self._remove_unwanted)

    def _on_rank_0(self, remove: Callable[[], None]) -> None:
        """What takes away is done by one; if it fails, that is no reason to end a training."""
        if ranks_of().rank == 0:
            try:
                remove()
            except (OSError, CheckpointError) as error:
                _log.warning("old checkpoints could not be removed from %s: %s", self._storage.url, error)

    def _remove_unwanted(self) -> None:
        there = self._steps_there()
        committed = set(self.steps()) - self._damaged
        if not committed:
            return
        if self._rules.best is not None:
            self._metrics = {step: self._metrics.get(step) or self._metrics_or_none(step) for step in committed}
        keep = steps_to_keep(committed, self._rules, self._metrics, self._resumed)
        # Oldest first, and only below the newest: what lies above it may be a save that another process of this job,
        # not dead yet, is about to give up. One of this process may write anywhere.
        writing = {storage_of(url).url for url in urls_unsettled()}
        for step in there:
            if step < max(committed) and step not in keep and self.path(step) not in writing:
                remove_checkpoint(self._storage.child(_name(step)))

    def _metrics_or_none(self, step: int) -> Mapping[str, float]:
        try:
            return self.metrics(step)
        except CorruptionError as error:
            _log.warning("%s", error)
            return {}

    def _steps_there(self) -> list[int]:
        """The steps that have a directory, ascending."""
        found = (_NAME.fullmatch(name) for name in self._storage.names())
        return sorted(int(m[1]) for m in found if m)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Manager was closed; make a new one")


def best_of(given: tuple[str, Mode, int] | None) -> Best | None:
    """What `best=` means. Raises ValueError."""
    if given is None:
        return None
    metric, mode, n = given
    if mode in ("min", "max") and n >= 1:
        return Best(metric, mode, n)
    raise ValueError(f'best: found {given!r}; required (a metric, "min" or "max", at least 1); mend it')


def _name(step: int) -> str:
    return f"step-{step:08d}"
