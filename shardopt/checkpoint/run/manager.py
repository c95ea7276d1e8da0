"""The checkpoints of one training run, by step: saves, restores, and removes them when they are no longer wanted."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any

from shardopt.checkpoint.loading.load import load_with
from shardopt.checkpoint.loading.options import STRICT, LoadOptions, Strictness, strictness_of
from shardopt.checkpoint.loading.rules_due import LeftInScript
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.reports import SaveReport, announce
from shardopt.checkpoint.run.after_commit import AfterCommit
from shardopt.checkpoint.run.branches import Newer
from shardopt.checkpoint.run.context import Run, summary_of
from shardopt.checkpoint.run.destinations import Destination, refuse_unfit_tiers, tiers_and_mirror
from shardopt.checkpoint.run.export import Export, Exporter
from shardopt.checkpoint.run.metrics import noted_of
from shardopt.checkpoint.run.mirror import MirrorCopier
from shardopt.checkpoint.run.options import (
    Preemption,
    check_restore_options,
    check_run_options,
    check_step,
)
from shardopt.checkpoint.run.retention import Retention, retention_of
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.run.steps import Steps
from shardopt.checkpoint.run.stopping import Stop
from shardopt.checkpoint.run.tiers.tiers import Tiers
from shardopt.checkpoint.saving.async_save import Stage
from shardopt.checkpoint.saving.options import DEFAULT_OPTIONS, SaveOptions, SaveTerms
from shardopt.checkpoint.saving.writing.pending import PendingSave
from shardopt.checkpoint.sources.reading.broadcast import ShareReads
from shardopt.checkpoint.storage import hold, release, use_options
from shardopt.ranks import Group, SharedGroup, refuse_lone_processes
from shardopt.runtime.deferred_checks import settle_checks
from shardopt.runtime.signals import LOADING, SAVING, WAITING, is_part_of, refuse_within

_log = logging.getLogger("shardopt.checkpoint")


class Manager:
    """Saves a run's state at regular steps under one root, restores the newest checkpoint, and applies retention.

    All ranks must make the same calls, for the same steps. A root is one job's: two that run at once must not share it.
    Checkpoints are directories `step-00000500`; one without a manifest does not exist to anybody. Such remains of dead
    saves are cleared once a later checkpoint is committed. A run taken back to an earlier step (`restore(app,
    step=...)`) continues on a branch, in directories `step-00000500-b1`. What was saved after that step leaves the run.

    Args:
        root: a path, or a URL that fsspec knows.
        destinations: where checkpoints are beside the root: any number of `Tier`, the fastest first, and after them at
            most one `Mirror`. `restore` takes the newest step that is whole anywhere.
            Tiers are directories that each host has for itself. A save goes to the first that is due, or to the root
            where none is. From there it is copied in the background to neighbours' hosts, to the other tiers that are
            due, and to the root (`every`). Not with `incremental`.
            A mirror is a second root, such as "s3://bucket/run". Committed checkpoints are copied there in the
            background, and removed by the same rules.
        every: `save` writes at the first step at or after each multiple of this, or after each such `timedelta` by rank
            0's clock; `save` or `should_save` must then be called at every step.
        keep: how many of the newest checkpoints stay, or a `Retention`; None keeps all. In any case the newest stays,
            the one that was saved last, the one that the run was restored from, and, without a restore, all others'.
        stage: None blocks training until the checkpoint is committed; "now" and "lazy" write it in the background, as
            `async_save` does, whose limits are theirs too.
        stop_on: a signal, such as `signal.SIGTERM`, several, or a `Preemption`. Sent to any one rank, it makes all
            ranks save after the same step, the next one that no rank has passed, and leave with SystemExit. `save` or
            `should_save` must be called at every step, for one such Manager alone, made in the main thread. Failures of
            an earlier save or copy are logged then, once this one is saved.
        options: of all saves (`SaveOptions`).
        process_group: the ranks of the run, where they are not all of the job: a process group, or a device mesh.
            Others make no Manager for its root. Making it is collective then, as is its use.
        incremental: whether a save refers to the previous checkpoint for what has not changed since, as with
            `save(..., base=)`.
            The first save of a run writes everything, as where the one before is gone. Files stay while a checkpoint
            refers to them, even if the rules drop their own.
        export: the last or best checkpoint is also written as a folder that Hugging Face's `from_pretrained` reads, by
            rank 0 in the background. A failure is logged; `close` raises it on that rank, if this process saved it.
        storage_options: arguments of fsspec's file system for the root, such as an endpoint and credentials. They apply
            to everything that this process opens at or below its URL. They are never stored or printed. A path takes
            none.

    Raises:
        OptionError: arguments of the wrong type or out of their range; all of them are listed. Or this rank is not in
            `process_group`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        destinations: Sequence[Destination] = (),
        every: int | timedelta = 1,
        keep: int | Retention | None = None,
        stage: Stage | None = None,
        stop_on: signal.Signals | Iterable[signal.Signals] | Preemption | None = None,
        options: SaveOptions = DEFAULT_OPTIONS,
        process_group: Group | None = None,
        incremental: bool = False,
        export: Export | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        tiers, mirror = tiers_and_mirror(destinations)
        given = [(root, storage_options)] + ([] if mirror is None else [(mirror.url, mirror.storage_options)])
        for url, of_url in given:
            if isinstance(url, str | os.PathLike):
                use_options(url, of_url)
        rules = retention_of(keep)
        preemption = stop_on if stop_on is None or isinstance(stop_on, Preemption) else Preemption(stop_on)
        copies = None if mirror is None else (f"destinations[{len(tiers)}].url", mirror.url)
        check_run_options(root, copies, export, every, stage, preemption is not None, options)
        with ExitStack() as if_it_fails:  # whoever keeps the error keeps this frame, too
            roots = [hold(url, self) for url, _ in given]
            if_it_fails.callback(release, *roots)
            refuse_unfit_tiers(tiers, roots, incremental)
            given_terms = {each.name: getattr(options, each.name) for each in fields(SaveOptions)}
            terms = SaveTerms(**given_terms, process_group=process_group, base_required=False, renamed=())
            seconds = options.deadline_seconds
            shared = SharedGroup(process_group, seconds)
            rank = shared.ranks.rank  # refused where it is not in the group
            copier = None
            if mirror is not None:
                copier = MirrorCopier(root, mirror.url, deadline_seconds=seconds, process_group=process_group)
                if_it_fails.callback(release, copier.remote)
            self._run = Run(Root(roots[0]), shared, copier, every, rules)
            self._tiers = Tiers(self._run, tiers) if tiers else None
            self._after = AfterCommit(
                self._run,
                self._tiers,
                None if export is None or rank else Exporter(self._run, export),
                None if preemption is None or rank else preemption.seconds,
            )
            self._steps = Steps(self._run, self._after, stage, incremental, terms)
            self._tied, self._closed = options.tied, False
            self._stop = None if preemption is None else Stop(preemption)
            if_it_fails.pop_all()

    def path(self, step: int) -> str:
        """Returns the URL of the checkpoint of a step, whether or not it exists. Local."""
        return self._run.root.checkpoint(self._run.branches_here().id_of(step)).url

    @property
    def branch(self) -> int:
        """The branch that the run is on: 0 until the run is taken back to an earlier step. Local."""
        return self._run.branches_here().current

    def steps(self) -> list[int]:
        """Returns the run's committed steps under its root, ascending. Local: others may list what rank 0 removes."""
        return [id.step for id in self._run.committed_here()[0]]

    @property
    def latest_step(self) -> int | None:
        """The greatest of `steps()`; None if there is none. Local."""
        return max(self.steps(), default=None)

    @property
    def restored_step(self) -> int | None:
        """The step of the last `restore`; None if that found no checkpoint, so that the run is a new one. Local."""
        return self._steps.restored_step

    def abandoned_steps(self) -> dict[int, list[int]]:
        """Returns, by branch, the steps that left the run when it was taken back. Local.

        `restore(app, step=..., branch=...)` rewinds the run to one of them.
        """
        steps: dict[int, list[int]] = {}
        for id in self._run.committed_here()[1]:
            steps.setdefault(id.branch, []).append(id.step)
        return steps

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step that is committed under the root, also added ones; else empty. Local."""
        return {**noted_of(self._run.root.checkpoint(self._run.branches_here().id_of(step))).metrics}

    @is_part_of(SAVING)
    def add_metrics(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Adds metrics to a saved checkpoint, for example from a later evaluation. Collective.

        They count for any job's `Retention(best=)` at the next removal, and for `Export(best=)` of this one at once; of
        one name the last counts. Waits for a save of the step. They are beside the checkpoint in root and mirror.

        Args:
            metrics: numbers by name; None on ranks without any. Those of the lowest rank that gives a name count.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            StateError: something is no number.
            ShardoptError: a save in the background has failed.
        """
        self._require_open()
        check_step(step)
        refuse_within(f"adding metrics to step {step} of {self._run.root.url}")
        with self._run.ranks.beating():
            self._steps.wait_for_save()
            self._after.add_metrics(self._steps.branches().id_of(int(step)), metrics)

    @is_part_of(SAVING)
    def delete(self, step: int) -> None:
        """Removes the checkpoint of a step of the run from root, mirror and tiers. Collective.

        Saves, copies and exports in the background are waited for. Data files to which later checkpoints refer stay, as
        long as these do. Also the newest may be removed, and then a restore takes the previous one.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: it could not be removed.
            ShardoptError: a save or a copy in the background has failed.
        """
        self._require_open()
        check_step(step)
        refuse_within(f"removing step {step} of {self._run.root.url}")
        with self._run.ranks.beating():
            self._steps.delete(int(step))

    def should_save(self, step: int) -> bool:
        """Whether `save` would write at this step: the step is due at the root or a tier, or the job is to stop."""
        stops = self._stop is not None and self._stop.after(step, self._run.ranks)
        return self._run.due.at(step) or (self._tiers is not None and self._tiers.is_due(step)) or stops

    @is_part_of(WAITING)
    def where(self) -> dict[int, dict[str, int | None]]:
        """Returns, for each step, the paths of tiers where it is whole, and the root's if committed there. Collective.

        With each tier is the number of hosts that may be lost without it, and None with the root.
        """
        self._steps.branches()
        found = {} if self._tiers is None else self._tiers.where()
        for step in self.steps():
            found.setdefault(step, {})[self._run.root.url] = None
        return dict(sorted(found.items()))

    @is_part_of(SAVING)
    def save(
        self, step: int, app: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None, force: bool = False
    ) -> SaveReport | PendingSave | None:
        """Saves if the step is due (or `force`, alike on all ranks), else returns None. Collective if it saves.

        With `stage` it returns as `async_save` does. Checkpoints no longer wanted are removed after the commit.

        Steps rise. The last saved or restored one is not saved again; returns the report of its save, or None.

        Args:
            metrics: numbers by name, kept with the checkpoint or added to it. Of one name the lowest rank's counts.

        Raises:
            ShardoptError: as `checkpoint.save`, or the save before, in the background, has failed.
            CheckpointExistsError: the step exists; or, with tiers or a stage, is below the last saved or restored one.
            CheckpointError: a first save, without a restore, is below a step of another run. Or a signal handler saves.
            SystemExit: the job is to stop, and the checkpoint of this step is committed.
        """
        self._require_open()
        if type(step) is not int or step < 0:
            check_step(step)
        if not self._run.due.passed(step, force or self.should_save(step)):
            self._steps.warnings.of_passed(app)
            return None
        refuse_within(f"saving step {step} of {self._run.root.url}", app)
        with self._run.ranks.beating():
            if self._stop is not None and self._stop.after(step, self._run.ranks):
                self._steps.save_and_leave(step, app, metrics, self._stop)
            return self._steps.save(step, app, metrics, at_root=force)

    @is_part_of(LOADING)
    def restore(
        self,
        app: Mapping[str, Any],
        *,
        step: int | None = None,
        branch: int | None = None,
        newer: Newer = "abandon",
        required: bool = False,
        strict: bool | Strictness = True,
        select: str | None = None,
        rename: Mapping[str, str] | None = None,
        rearrange: Sequence[AnyRule] = (),
        skip: str | None = None,
        transactional: bool = False,
        share_reads: ShareReads = "auto",
        progress: Progress | None = None,
    ) -> int:
        """Loads the newest whole committed checkpoint into `app`, in place; returns its step, or 0 if there is none.

        A checkpoint may be of step 0 too: before you load weights into a new run, ask whether `restored_step` is None.
        Collective, as `checkpoint.load`, and with its errors; all ranks take the same step. A damaged or unreadable one
        is logged, and the previous one is taken. Keyed optimizers of a restarted run have no state, and get it as with
        `load(..., init_state=True)`. Rank 0 logs what was restored at INFO, or prints it without logging configured.

        Args:
            step: rewinds the run to this whole step. What was saved after it leaves the run, for this job and later
                restores. The run continues on a new branch, and may save the same steps again. `requires_grad` stays as
                it is. Only to look, `checkpoint.load(manager.path(step), app, init_state=True)`. None: the newest.
            branch: the branch to look for checkpoints on, a key of `abandoned_steps`; None for that of the run.
            newer: what happens to checkpoints that were saved after `step`. "abandon" leaves them in place, ignored by
                the run and its rules. "remove" removes them, once this one is loaded.
            required: whether no checkpoint is an error, as a disk that is not mounted looks like a new run.
            select: as for `load`. Left in the script, it applies at every start; a log line says so. For weights of
                another run, `checkpoint.load(url, app, select=...)` where `restored_step` is None.
            rename: as for `load`. Rules may stay in the script, and be added: each is applied once, as the run's
                checkpoints record which rules their names have been through. One without a record that fits is loaded
                as it is; a line says how to apply the rules.
            rearrange: as for `load`, for the restore of a checkpoint in the old form alone. Rules must not stay in the
                script: no checkpoint records them, and a square matrix would be transposed again at each start.
            strict, skip, transactional, share_reads, progress: as for `load`.

        Raises:
            OptionError: an argument is none.
            CheckpointNotFoundError: there is no checkpoint, and one is required; or none of that step.
            CorruptionError: all checkpoints, or all of that step, are damaged. It says if `app` may be loaded in part.
            CheckpointError: a root cannot be read, or is a checkpoint itself, or not all ranks see the same.
            MismatchError: a checkpoint does not fit. It says if one before, which was damaged, may be loaded in part.
        """
        self._require_open()
        refuse_within(f"restoring {self._run.root.url}", but=[LOADING])
        refuse_lone_processes(f"restoring {self._run.root.url}")
        if step is not None or branch is not None or newer != "abandon":
            check_restore_options(step, branch, newer)
        run, rename = self._run, rename or {}
        options = LoadOptions(
            strictness=STRICT if strict is True else strictness_of(strict),
            select=select,
            rename=LeftInScript(rename),
            rearrange=tuple(rearrange),
            skip=skip,
            transactional=transactional,
            share_reads=share_reads,
            init_state=True,
            progress=progress,
            deadline_seconds=run.ranks.deadline_seconds,
            process_group=run.group.process_group,
            tied=self._tied,
        )
        load_from = partial(load_with, app=app, options=options)
        with run.ranks.beating():
            restored = self._steps.restore(load_from, step, branch, newer, required, rename)
        if run.ranks.rank == 0:
            announce(run.root.tell_none() if restored is None else summary_of(restored, select))
            report = None if restored is None else restored.report
            self._steps.warnings.of_restored(self._steps.restored_step, app, report, is_whole=select is None)
        return 0 if restored is None else restored.id.step

    @is_part_of(WAITING)
    def wait(self) -> None:
        """Waits for saves and copies in the background, and raises their failures.

        Collective, with the errors of `save`. Call it before `destroy_process_group`; `restore` finds the next group.
        """
        self._require_open()
        refuse_within(f"waiting for saves of {self._run.root.url}")
        with self._run.ranks.beating():
            self._steps.wait()

    def close(self) -> None:
        """Waits for saves and copies in the background, and closes this manager. Raises their failures.

        Collective where a save in the background has failed: then all ranks raise if one of them has not raised it yet.
        An export's failure is raised on rank 0 alone, a GradientError of an accelerator's last step where it is seen.
        """
        # Within an except or a finally it may be this rank alone that is on its way out, and the others anywhere.
        self._close(alone=sys.exception() is not None)

    @is_part_of(WAITING)
    def _close(self, alone: bool) -> None:
        if self._closed:
            return
        refuse_within(f"closing the Manager of {self._run.root.url}")
        self._closed = True
        with ExitStack() as last_first:  # each is closed, whatever another raises
            last_first.callback(release, *(root.storage for root in self._run.roots))
            last_first.callback((lambda: None) if alone else settle_checks)  # of steps after the last save
            last_first.callback(self._after.close_own)
            if self._stop is not None:
                # Not before the others: the signal would end the process, and what is being saved with it.
                last_first.callback(self._stop.close)
            last_first.callback(self._after.close)
            last_first.callback(self._steps.background.close, alone)

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

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Manager was closed; make a new one")
