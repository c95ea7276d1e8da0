"""Follows the weights that a publisher writes: brings those of a program to the newest step, in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from shardopt.checkpoint.arguments import optional_count_problem, refuse
from shardopt.checkpoint.hosts.served import follow_at
from shardopt.checkpoint.hosts.served_roots import FollowedRoot
from shardopt.checkpoint.loading.hand_back import refuse_other_versions
from shardopt.checkpoint.loading.load import compare_with_app
from shardopt.checkpoint.loading.names import Names, names_as_stored
from shardopt.checkpoint.loading.names_in_app import names_in_app
from shardopt.checkpoint.loading.options import STRICT, LoadOptions, Strictness, strictness_of
from shardopt.checkpoint.loading.rank_plan import RankPlan
from shardopt.checkpoint.rearrange.reader import rearranged
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.reports import OfUrl, emit_report
from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.run.options import check_run_options
from shardopt.checkpoint.saving.options import SaveOptions
from shardopt.checkpoint.sources.detect_format import open_source
from shardopt.checkpoint.sources.open import reading
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import hold, release, use_options
from shardopt.checkpoint.stream.chains import ChainReader, KnownFiles
from shardopt.checkpoint.stream.root import Published, StreamRoot
from shardopt.checkpoint.stream.served import Weights, rearrange_problems, rename_problems, weights_of
from shardopt.checkpoint.stream.staged import Held, Place, Staged, part_of
from shardopt.checkpoint.text import seconds_text
from shardopt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    Problem,
    StateError,
    UnreadableError,
)
from shardopt.ranks import DEADLINE_SECONDS, Group, Ranks, ranks_of
from shardopt.runtime.gc_pause import gc_paused
from shardopt.runtime.torch_private import out_of_inference_mode
from shardopt.state.flatten import flatten
from shardopt.state.state import FlatState
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


@dataclass(frozen=True, slots=True)
class UpdateReport(OfUrl):
    """The report of an update, on this rank.

    Args:
        url: of the published step.
        step: that the weights are of now.
        previous: that they were of before; None for none.
        bytes_read: from data files.
        seconds: of the call.
        pause_seconds: for which serving was kept out.
        age_seconds: from the commit of the step to the end of the update, by the clocks of both hosts.
        whole: of how many parts all bytes were read, and not the changes alone.
        parts: of weights, on this rank.
        changed: the names in the app, in its order, of tensors that were written on this rank; no others have changed.
            Of names that are one tensor, the first.
    """

    url: str
    step: int
    previous: int | None
    bytes_read: int
    seconds: float
    pause_seconds: float
    age_seconds: float | None
    whole: int
    parts: int
    changed: tuple[str, ...]


class Follower:
    """Brings weights in place to the newest step that a `Publisher` has committed under a root. Never a mixture.

    With several ranks all calls are collective, except `step` and `serving`: all ranks take the same step, or none.

    Args:
        root: of the publisher, as it gave it.
        app: a module, or tensors by name: plain, or sharded in any layout. Their memory is updated.
        rename, rearrange: as for `load`: from the published names and tensors to those of `app`.
        strict: as for `load`.
        memory_bytes: memory, beside `app`, for what is read before it is applied: of the device for changes of tensors
            that are there, else of the host. What does not fit is read during the pause.
        silence_seconds: without a new step for so long, a warning says so.
        deadline_seconds: how long a rank may show no sign of life, and how long an update waits for `serving`.
        process_group: the ranks that follow together: a process group, or a device mesh. None is the job, or this
            process where there is none.
        storage_options: as for `load`. Of `hosts://`: `key_file` is that of the publisher.

    Raises:
        OptionError: arguments of the wrong type or out of their range.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        app: Weights,
        *,
        rename: Mapping[str, str] | None = None,
        rearrange: Sequence[AnyRule] = (),
        strict: bool | Strictness = True,
        memory_bytes: int = 1 << 30,
        silence_seconds: float = 600.0,
        deadline_seconds: float = DEADLINE_SECONDS,
        process_group: Group | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        problems = [*rename_problems(rename), *rearrange_problems(rearrange)]
        if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int) or memory_bytes < 0:
            problems.append(Problem("memory_bytes", repr(memory_bytes), "0 or more, as an int", "give a number"))
        for name, value in (("silence_seconds", silence_seconds), ("deadline_seconds", deadline_seconds)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                problems.append(Problem(name, repr(value), "more than 0 seconds", "give a number"))
        if not isinstance(strict, bool | Strictness):
            problems.append(Problem("strict", repr(strict), "True, False or a Strictness", "pass one of them"))
        refuse(problems)
        weights_of(app, "app")
        self._served = follow_at(os.fspath(root), storage_options) if isinstance(root, str | os.PathLike) else None
        if self._served is None and isinstance(root, str | os.PathLike):
            use_options(root, storage_options)
        check_run_options(root, None, None, 1, None, False, SaveOptions())
        self._root, self._app, self._closed = StreamRoot(hold(root, self)), app, False
        self._memory_bytes, self._silence_seconds = memory_bytes, silence_seconds
        self._options = LoadOptions(
            strictness=STRICT if strict is True else strictness_of(strict),
            rename=rename,
            rearrange=tuple(rearrange),
            share_reads="never",
            deadline_seconds=deadline_seconds,
            process_group=process_group,
            selects=False,
        )
        self._known: KnownFiles = {}
        self._held: dict[Place, Held] = {}
        self._at: Published | None = None
        self._previous: int | None = None
        self._is_torn = False
        self._damaged: set[Published] = set()
        self._changed, self._serving, self._pausing = world().condition(), 0, False
        self._seen: tuple[Published | None, float] = (None, world().monotonic())
        self._has_warned = False

    @property
    def step(self) -> int | None:
        """The step that the weights are of. None before the first update, and after one that was interrupted. Local."""
        return None if self._at is None or self._is_torn else self._at.id.step

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Keeps updates from changing weights while the context is open; gives their step. Local; from any thread.

        What was queued on devices meanwhile is waited for by the next update, on whatever stream it is.

        Raises:
            StateError: there are no whole weights: no update was made, or the last one was interrupted.
            CheckpointError: an update takes longer than `deadline_seconds`.
        """
        with self._changed:
            self._wait_until(lambda: not self._pausing, "an update to end")
            if self.step is None:
                found = "weights of which an update was interrupted" if self._is_torn else "no published weights yet"
                problem = Problem(self._root.url, found, "those of one step", "call update() until it returns a report")
                raise StateError("the weights are not to be used", [problem], code="following")
            self._serving += 1
            step = self.step
        try:
            yield step
        finally:
            with self._changed:
                self._serving -= 1
                self._changed.notify(1 << 30)

    def poll(self) -> int | None:
        """Returns the newest published step, if the weights are of another one; reads none of it. Collective."""
        found = self._newest(self._ranks(), self._damaged)
        return None if found is None or not self._takes(found) else found.id.step

    def update(self, step: int | None = None) -> UpdateReport | None:
        """Brings the weights to the newest published step, or to a given one. Collective.

        Reading and checking go on while other threads use the weights; only applying keeps `serving` out. If an update
        fails before that, nothing was changed. What has no room in `memory_bytes` is neither read nor checked before:
        damage there, or a number that a dtype of the app cannot hold, leaves torn weights. A step that is damaged is
        logged, and the next older one taken that is newer than the weights.

        Returns:
            A report; None where there is nothing new.

        Raises:
            OptionError: the step is none.
            MismatchError: the published weights do not fit. All of it is listed; nothing was changed. Or a dtype of the
                app cannot hold a number.
            CheckpointNotFoundError: the given step is not there; or the weights are torn, and no step is there.
            CorruptionError: the given step is damaged; or the weights are torn, and all steps are.
            CheckpointError, RankError: it cannot be read, or `serving` was not left in time, or a rank failed.
        """
        refuse(optional_count_problem("step", step, 0))
        ranks, begin = self._ranks(), world().monotonic()
        failure: CheckpointError | None = None
        passed_over = set() if self._is_torn else set(self._damaged)  # better damage said again than torn weights
        while True:
            found = self._newest(ranks, passed_over if step is None else set(), step)
            if found is None and step is not None:
                raise self._not_found("no such step", f"step {step}")
            if found is None or not self._takes(found, step):
                if self._is_torn:
                    raise failure or self._not_found("no step", "one to replace weights that are torn")
                return None
            url = self._root.checkpoint(found.id).url
            try:
                with out_of_inference_mode(), torch.no_grad(), reading(url), ranks.beating(), gc_paused():
                    report = self._update(ranks, found, url, begin)
            except (CorruptionError, CheckpointNotFoundError) as error:
                if step is not None:
                    raise
                failure = error
                passed_over.add(found)
                # A disk may come back, and a manifest that rank 0 sees may be seen by all a moment later.
                if not isinstance(error, UnreadableError | CheckpointNotFoundError):
                    self._damaged.add(found)
                if ranks.rank == 0:
                    _log.warning("step %d cannot be taken, looking for another one: %s", found.id.step, error)
            else:
                emit_report("update", report, for_all=ranks.rank == 0)
                return report

    def _takes(self, found: Published, asked_for: int | None = None) -> bool:
        """Whether weights are to be brought to a step."""
        if self._is_torn or self._at is None or asked_for is not None:
            return self._is_torn or found != self._at
        return found.is_after(self._at)

    def _update(self, ranks: Ranks, found: Published, url: str, begin: float) -> UpdateReport:
        what = f"updating to step {found.id.step} of {self._root.url}"
        known: KnownFiles = dict(self._known)
        chains: list[ChainReader] = []

        @cache
        def look() -> tuple[CheckpointReader, FlatState, Names]:
            # Not by its URL: one process may follow roots of one name on hosts of two jobs.
            own = ChainReader(open_source(self._root.checkpoint(found.id)), known)
            chains[:] = [own]
            reader = rearranged(own, self._options.rearrange) if self._options.rearrange else own
            flat = flatten(weights_of(self._app, "app"))
            names = None if self._options.rename else names_as_stored(reader, flat)
            return reader, flat, names or names_in_app(reader, flat, self._options)

        plan = compare_with_app(ranks, what, look, self._options)
        staged, _ = ranks.agree(what, work=lambda: self._staged(plan, chains[0]))
        before, pause = self._at, self._apply(ranks, what, staged, found)
        if before is not None and before.stream != found.stream and ranks.rank == 0:
            _log.warning("%s was begun again: step %d is its newest now", self._root.url, found.id.step)
        self._known = known
        chains[0].keep_files()
        saved_at = plan.reader.manifest.saved_at
        previous, self._previous = self._previous, found.id.step
        return UpdateReport(
            changed=staged.written_in(plan.into),
            url=url,
            step=found.id.step,
            previous=previous,
            bytes_read=staged.bytes_read,
            seconds=world().monotonic() - begin,
            pause_seconds=pause,
            age_seconds=None if saved_at is None else world().wall_clock() - saved_at,
            whole=staged.whole,
            parts=len(staged.parts),
        )

    def _staged(self, plan: RankPlan, reader: ChainReader) -> Staged:
        """Reads and checks what changes, as far as it has room in host memory."""
        refuse_other_versions(plan.flat.noted, plan.reader, plan.stored_keys(), self._app)
        held = {} if self._is_torn else self._held
        parts = [part_of(request, held) for request in plan.requests]
        staged = Staged(parts, plan.tensors, reader.delta_files, self._memory_bytes)
        staged.read()
        return staged

    def _apply(self, ranks: Ranks, what: str, staged: Staged, found: Published) -> float:
        """Applies what was staged, while serving is kept out; returns for how many seconds."""
        doing = f"{what} (applying)"
        try:
            begin = self._enter_pause(ranks, doing)
            self._is_torn = True
            ranks.agree(doing, work=staged.apply)
            self._at, self._is_torn = found, False  # in the pause: who serves next is told the step of these weights
            pause = world().monotonic() - begin
        finally:  # also of a pause that was interrupted as it began
            with self._changed:
                self._pausing = False
                self._changed.notify(1 << 30)
        self._held = staged.held()
        return pause

    def _enter_pause(self, ranks: Ranks, doing: str) -> float:
        def enter() -> None:
            with self._changed:
                self._pausing = True
                self._wait_until(lambda: not self._serving, "serving to end")

        ranks.agree(f"{doing} after serving", work=enter)
        return world().monotonic()

    def _wait_until(self, is_so: Callable[[], bool], waited_for: str) -> None:
        """Waits, with the condition held, until something is so; raises CheckpointError after the deadline."""
        seconds = self._options.deadline_seconds
        end = world().monotonic() + seconds
        while not is_so():
            left = end - world().monotonic()
            if left <= 0:
                problem = Problem(self._root.url, f"waited {seconds:g} s", waited_for, "serve in shorter turns")
                raise CheckpointError("the weights were not updated", [problem], code="following")
            self._changed.wait(left)

    def close(self) -> None:
        """Ends the use of the root's store (`storage_options`), and frees host memory. Local.

        The weights stay as they are, and are served as before; an update raises RuntimeError.
        """
        if self._closed:
            return
        self._closed, self._held, self._known = True, {}, {}
        release(self._root.storage)
        if isinstance(self._served, FollowedRoot):
            self._served.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ranks(self) -> Ranks:
        if self._closed:
            raise RuntimeError("this Follower was closed; make a new one")
        return ranks_of(self._options.process_group, self._options.deadline_seconds)

    def _newest(self, ranks: Ranks, but: Set[Published], step: int | None = None) -> Published | None:
        """Returns the newest committed step, or a given one, except some that cannot be taken. Collective."""
        what = "steps" if step is None else f"step {step}"
        look = partial(self._root.newest, but, step, None if self._at is None else self._at.stream)
        answer = ranks.on_rank_0(f"looking for {what} in {self._root.url}", look)
        found = None if answer is None else Published(CheckpointId(*answer[0]), answer[1])
        if step is None:
            self._note(found, ranks)
        return found

    def _not_found(self, found: str, required: str) -> CheckpointNotFoundError:
        problem = Problem(self._root.url, found, required, "give one that is published, or publish one")
        return CheckpointNotFoundError("there is nothing to update to", [problem])

    def _note(self, newest: Published | None, ranks: Ranks) -> None:
        """Notes what is there; warns once of a publisher that has not been heard of for long."""
        last, since = self._seen
        if newest != last:
            self._seen, self._has_warned = (newest, world().monotonic()), False
        elif not self._has_warned and world().monotonic() - since > self._silence_seconds and ranks.rank == 0:
            self._has_warned = True
            what = "no step" if newest is None else f"nothing after step {newest.id.step}"
            seconds = seconds_text(world().monotonic() - since)
            _log.warning("%s was published in %s for %s [following]", what, self._root.url, seconds)
