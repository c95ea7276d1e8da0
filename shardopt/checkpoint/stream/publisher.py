"""Publishes the weights of a training job, step by step, for followers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from shardopt.checkpoint.arguments import count_problem, refuse
from shardopt.checkpoint.hosts.served import publish_at
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.run.after_commit import AfterCommit
from shardopt.checkpoint.run.context import Run
from shardopt.checkpoint.run.options import check_run_options, check_step
from shardopt.checkpoint.run.retention import Retention, retention_of
from shardopt.checkpoint.run.steps import Steps
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.writing.pending import PendingSave
from shardopt.checkpoint.storage import hold, release, use_options
from shardopt.checkpoint.stream.arranged import Arranged
from shardopt.checkpoint.stream.dtypes import Dtypes, Forms, dtype_problems
from shardopt.checkpoint.stream.root import StreamRoot
from shardopt.checkpoint.stream.served import (
    Weights,
    rearrange_problems,
    rename_problems,
    renamed,
    weights_of,
)
from shardopt.errors import Problem
from shardopt.ranks import DEADLINE_SECONDS, Group, SharedGroup
from shardopt.runtime.signals import SAVING, WAITING, is_part_of, refuse_within
from shardopt.state.versions import notes_of, with_notes

_log = logging.getLogger("shardopt.checkpoint")


class Publisher:
    """Commits the weights of a job under a root, in the background, as changes of the step before.

    All ranks make the same calls. Each step is a checkpoint that `load`, `open` and `convert` read like any other, and
    that a `Follower` takes over by the changes alone. Of a box whose elements changed here and there, positions and
    values are written; see `docs/streams.md`.

    A job that starts again publishes right after `restore`: until then followers have the weights of steps that are
    lost. The first step that it publishes is whole. If it is not after the newest published one, what was published
    from there on is removed, and followers take the new steps.

    Args:
        root: a path, or a URL that fsspec knows; for nothing else. Or `hosts://` with an absolute path, as in
            "hosts:///dev/shm/weights": each rank writes to that directory of its host, which serves it to followers.
        anchor_every: after so many steps all weights are written too, for followers that join and for those that find
            damage. Between two of them steps depend on one another.
        keep: how many of the newest steps stay, or a `Retention`; None keeps all. Files stay as long as a kept step
            needs them.
        rename: regex → replacement, applied in turn, as by `re.sub`, to the names of weights after `rearrange`.
        rearrange: rules as for `load`, from the tensors of the model to the published ones: what a `Follower` with
            these rules would make of a publication without. The same on all ranks. No weight moves between ranks. What
            changes its order within a dimension, such as rotary pairs, is copied to host memory, which is kept.
        dtype: of the published weights, if they are of floating point; None for their own. Or regex → dtype: the first
            that is found in a name of the model decides, and the other weights keep theirs. There "int8_rows" stores a
            table [N, D] as uint8, with `<name>_scale` and `<name>_offset`, [N], fp32, for `dequantize_rows`. The same
            on all ranks. They are cast before they are rearranged and compared, in memory of their device.
        durable: as for `save`.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
        process_group: the ranks that publish, where they are not all of the job: a process group, or a device mesh.
        storage_options: as for `save`. Of `hosts://`: `key_file` is a path to which rank 0 writes where the hosts are,
            and the key by which followers of other jobs are admitted, who need that file; without it followers are
            ranks of this job. `max_connections` (256) and `max_bytes_per_second` bound what each host serves to them.

    Raises:
        OptionError: arguments of the wrong type or out of their range. Or this rank is not in `process_group`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        anchor_every: int = 50,
        keep: int | Retention | None = 4,
        rename: Mapping[str, str] | None = None,
        rearrange: Sequence[AnyRule] = (),
        dtype: Forms = None,
        durable: bool = True,
        deadline_seconds: float = DEADLINE_SECONDS,
        process_group: Group | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        problems = [*count_problem("anchor_every", anchor_every, 1), *rename_problems(rename)]
        problems += [*rearrange_problems(rearrange), *dtype_problems(dtype)]
        refuse(problems)
        rules, group = retention_of(keep), SharedGroup(process_group, deadline_seconds)
        terms = SaveTerms(
            durable=durable, deadline_seconds=deadline_seconds, process_group=process_group, base_required=False
        )
        _ = group.ranks  # refused where it is not in the group: before a root is published at, or held
        self._served = publish_at(os.fspath(root), storage_options) if isinstance(root, str | os.PathLike) else None
        if self._served is None and isinstance(root, str | os.PathLike):
            use_options(root, storage_options)
        check_run_options(root, None, None, 1, "now", False, terms)
        self._rename, self._dtypes = dict(rename or {}), Dtypes(dtype)
        self._arranged = Arranged(rearrange) if rearrange else None
        self._run = Run(StreamRoot(hold(root, self)), group, None, 1, rules)
        self._after = AfterCommit(self._run, None, None, None)
        self._steps = Steps(self._run, self._after, "now", True, terms, anchor_every)
        self._last: tuple[int, PendingSave] | None = None
        self._closed = False

    @is_part_of(SAVING)
    def publish(self, step: int, model: Weights, *, metrics: Mapping[str, float] | None = None) -> PendingSave:
        """Publishes weights as they are at the call; returns once they are in host memory. Collective.

        The step before is waited for, as the new one refers to it.

        Args:
            step: greater than that before.
            model: a module, of which parameters and persistent buffers count; or tensors by name.
            metrics: numbers by name, kept with the step; of one name the lowest rank's counts.

        Returns:
            The save in the background: its `result()` waits for the commit, and raises its failure. So does the next
            call.

        Raises:
            OptionError: the step is none, or `model`, or two weights get one name.
            MismatchError: the weights of all ranks do not fit the rules of `rearrange`: none of them names a weight, a
                join lacks one, shapes, sizes or dtypes do not fit, two tensors get one name, or a reversed `Tie` has
                weights that are not tied. All ranks raise, and nothing is published.
            MismatchError: a weight has a number that its `dtype` cannot hold: one that would become infinite, or NaN or
                infinity in a row of 8 bits. Or no weight has a name for a regex of `dtype`, or "int8_rows" finds no
                table. All ranks raise, and nothing is published.
            RuntimeError: torch's own, as in a training step: a rank died while ranks reduced the extremes of rows in 8
                bits that they share. Nothing is published.
            ShardoptError: as `async_save`, or the step before has failed; or ranks have different rules.
        """
        if self._closed:
            raise RuntimeError("this Publisher was closed; make a new one")
        check_step(step)
        weights = weights_of(model, "model")
        given, notes = weights.keys(), notes_of(weights)
        refuse_within(f"publishing step {step} to {self._run.root.url}", weights)
        with self._run.ranks.beating():
            self._refuse_earlier(step)
            weights = self._dtypes.of(self._run.ranks, weights)
            if self._arranged is not None:
                weights = self._arranged.of(self._run.ranks, weights)
            weights = renamed(weights, self._rename)
            if weights.keys() == given:  # the notes are by these names
                weights = with_notes(weights, notes)
            if self._last is None:
                if self._served is not None:
                    self._served.meet(self._run.ranks)
                self._take_back(step)
            pending = self._steps.save(step, weights, metrics, at_root=True)
        assert isinstance(pending, PendingSave)
        self._last = step, pending
        return pending

    def _refuse_earlier(self, step: int) -> None:
        """Raises OptionError for a step that is not after the last one, unless that one has failed."""
        if self._last is None or step > self._last[0]:
            return
        last, pending = self._last
        pending.done.wait()
        if step < last or pending.failure is None:
            refuse([Problem("step", str(step), f"more than {last}, which was published", "count steps up")])

    def _take_back(self, step: int) -> None:
        """Removes what an earlier job published from a step on. Collective."""
        branches, newest = self._steps.branches(), self._run.newest()
        # A job that was taken back to a later step may have published nothing, and nothing earlier may be left. Then
        # this step would be on an earlier branch, and older than what followers have.
        is_before = branches.id_of(step).branch != branches.current
        if (newest is not None and newest.step >= step) or is_before:
            if self._run.ranks.rank == 0 and newest is not None and newest.step >= step:
                _log.warning("step %d was published before: steps %d to %d are removed", step, step, newest.step)
            self._run.take_back(step - 1, branches.current, "remove", [], always=is_before)

    @is_part_of(WAITING)
    def wait(self) -> None:
        """Waits for the step in the background. Raises its failure. Collective where it has failed."""
        with self._run.ranks.beating():
            self._steps.wait()

    @is_part_of(WAITING)
    def close(self) -> None:
        """Waits as `wait` does, and frees the host memory."""
        self._close(alone=False)

    def _close(self, alone: bool) -> None:
        if self._closed:
            return
        self._closed, self._arranged = True, None  # which has host memory, too
        with ExitStack() as last_first:
            last_first.callback(release, self._run.root.storage)
            if self._served is not None:
                last_first.callback(self._served.close)
            last_first.callback(self._after.close_own)
            last_first.callback(self._after.close)
            last_first.callback(self._steps.background.close, alone)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._close(alone=error is not None)
        except Exception as failure:
            if error is None:
                raise
            _log.error("the step in the background has failed too: %s", failure)
