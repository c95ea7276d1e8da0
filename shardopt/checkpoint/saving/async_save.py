"""Saves during training: copies the state to host memory, from which a thread saves it as `save` does.

    app → flatten → describe → copy ↴                      in the call, or beside the next forward and backward
                                    agree → assign → write → commit           in the thread

The thread's ranks communicate through the job's store as those of the program do, but apart from them: in rounds of
their own, over a connection of their own, and through no collective. So neither waits for the other.

Whether a save has failed is agreed upon in its thread, and so known alike to all ranks once it is done; on which ranks
it was reported is not. Therefore the next call agrees on that first, in a round, and all ranks raise, or none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.checkpoint.arguments import choice_problem, refuse
from shardopt.checkpoint.format.metrics import numbers_of
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reports import SaveReport
from shardopt.checkpoint.saving.agree_plan import PlanCache
from shardopt.checkpoint.saving.background_save import BackgroundSave, Staged
from shardopt.checkpoint.saving.options import DEFAULT_OPTIONS, SaveTerms
from shardopt.checkpoint.saving.planning.replica_check import CheckReplicas
from shardopt.checkpoint.saving.writing.earlier import Kept
from shardopt.checkpoint.saving.writing.pending import PendingSave, hold_steps, track
from shardopt.checkpoint.saving.writing.row_prints import RowPrints
from shardopt.checkpoint.saving.writing.staging import Offsets, Shares, Staging
from shardopt.checkpoint.storage import absolute_url, use_options
from shardopt.errors import CheckpointError, Problem
from shardopt.ranks import (
    DEADLINE_SECONDS,
    Call,
    Group,
    Ranks,
    SideRanks,
    as_call,
    call_on,
    ranks_of,
    refuse_lone_processes,
)
from shardopt.runtime.gc_pause import gc_paused
from shardopt.runtime.host_memory import HostMemory
from shardopt.runtime.signals import SAVING, is_part_of, refuse_within
from shardopt.runtime.staging_fence import copying_until
from shardopt.runtime.torch_private import out_of_inference_mode
from shardopt.state.containers import entries_of
from shardopt.state.state import Tied
from shardopt.state.trainer_optimizers import is_constructed
from shardopt.world import Thread, world

Stage = Literal["now", "lazy"]
InFlight = Literal["wait", "refuse"]

_log = logging.getLogger("shardopt.checkpoint")


class AsyncSaver:
    """Saves in the background, one save at a time, through host memory that is reused between saves.

    All ranks of a job must make the same calls.

    Args:
        keeps: whether the bytes of a save stay in memory of their own, to be compared with those of the next one.
    """

    def __init__(self, keeps: bool = False) -> None:
        self._side = SideRanks("saves in the background")
        self._kept = Kept() if keeps else None
        self._prints = None if keeps else RowPrints()  # of bytes that are not kept
        self._memories = [(HostMemory(), Shares(HostMemory(), HostMemory())) for _ in range(1 + keeps)]
        self._plans: PlanCache = {}
        self._offsets: Offsets = {}
        self._ranks: Ranks | None = None  # of the last save, apart from those of the program
        self._group: Group | None = None  # of the last save
        self._pending: PendingSave | None = None
        self._agreed_on_failure = False  # whether ranks have agreed on raising the failure of the last save
        self._thread: Thread | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def pending(self) -> PendingSave | None:
        """The last save, if any."""
        return self._pending

    @is_part_of(SAVING)
    def save(
        self,
        url: str | os.PathLike[str],
        app: Mapping[str, Any],
        options: SaveTerms = DEFAULT_OPTIONS,
        *,
        stage: Stage = "now",
        in_flight: InFlight = "wait",
        metrics: Mapping[str, float] | None = None,
        afterwards: Callable[[SaveReport], None] = lambda _: None,
    ) -> PendingSave:
        """Saves as `async_save` does, with its errors.

        Args:
            url, app, stage, in_flight: as for `async_save`.
            options: its other arguments.
            metrics: numbers by name, kept with the checkpoint; of one name the lowest rank's counts.
            afterwards: called by the thread, with the report, once the checkpoint is committed; `wait` waits for that
                too.
        """
        begin, url = world().monotonic(), absolute_url(url)
        options = replace(options, kept=self._kept, prints=self._prints)
        in_flight_problem = choice_problem("in_flight", in_flight, ("wait", "refuse"))
        refuse([*choice_problem("stage", stage, ("now", "lazy")), *in_flight_problem])
        call = call_on("saving", url)
        refuse_lone_processes(str(call))
        ranks = ranks_of(options.process_group, options.deadline_seconds)
        if in_flight == "refuse":
            self._refuse_second(ranks, call)
        self._wait(call, options.process_group)
        self._group, self._thread = options.process_group, None  # that of the last save has ended
        side = self._side.of(ranks)
        background = BackgroundSave(side, url, self._plans, begin, options, afterwards)
        pending = background.pending
        staged: Staged | BaseException
        try:
            self._ranks, self._pending, self._agreed_on_failure = side, pending, False
            track(pending)
            # Started before the state is copied, as it sends heartbeats meanwhile. Not a daemon: a program that ends
            # waits for it, and then reports that it should have waited itself.
            self._thread = world().thread(background.run, "shardopt-save")
            _start(self._thread)
            staged = self._stage(app, stage, metrics, pending, ranks, options)
            background.hand_over(staged)
            if isinstance(staged, Staged) and staged.state.waits_for_plan:
                with out_of_inference_mode():
                    background.copy_by_plan(staged.state)
        except BaseException as error:
            # The other ranks go into the thread's first round, in which all are to raise this.
            background.hand_over(error)
            background.end_copying(error)
            pending.mark_reported()
            if self._thread is None or self._thread.ident is None:
                background.run()
            raise
        pending.call_seconds = world().monotonic() - begin
        if isinstance(staged, BaseException) and not isinstance(staged, Exception):
            pending.mark_reported()
            raise staged
        return pending

    def wait(self) -> None:
        """Waits for the save in flight.

        Collective where it has failed: then all ranks raise the failure if it was not reported on one of them.
        """
        self._wait(as_call("waiting for a save in the background"), self._group)

    def take_failure(self) -> BaseException | None:
        """Waits for the save in flight; returns a failure that was not reported on this rank. Local."""
        self.finish()
        return self._pending.take_failure() if self._pending is not None else None

    def close(self, alone: bool = False) -> None:
        """Waits as `wait` does, and frees the host memory, which the next save would allocate again.

        Args:
            alone: for a rank that leaves by itself: then no other rank is waited for.
        """
        try:
            if alone:
                self.finish()
                if self._pending is not None:
                    self._pending.raise_failure()
            else:
                self._wait(as_call("closing what saves in the background"), self._group)
        finally:
            if self._kept is not None:
                self._kept.forget()
            if self._prints is not None:
                self._prints.forget()
            for memory, shares in self._memories:
                memory.free()
                shares.free()
            self._side.forget()
            self._ranks = None
            self._offsets.clear()

    def finish(self) -> None:
        """Waits until no save is in flight and no step waits for one; keeps a failure to be raised later. Local."""
        if self._pending is not None:
            self._pending.done.wait()
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join()
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _wait(self, call: Call, process_group: Group | None) -> None:
        self.finish()
        pending, side = self._pending, self._ranks
        if pending is None or side is None or pending.failure is None or self._agreed_on_failure:
            return
        ranks = ranks_of(process_group)
        if ranks.size == 1 or not side.in_step:  # not in step: a rank was lost, and no round is possible
            pending.raise_failure()
            return
        if not self._side.are_beside(ranks):  # in another process group, of other ranks
            failure = pending.take_failure()
            if failure is not None:
                _log.error("%s", failure)
            return
        _, all_reported = side.agree(
            Call(str(call), f"{call.same}, after a save that failed"),
            work=lambda: pending.is_reported,
            report=bool,
            decide=all,
        )
        self._agreed_on_failure = True
        if not all_reported:
            pending.take_failure()
            raise pending.failure

    def _stage(
        self,
        app: Mapping[str, Any],
        stage: Stage,
        metrics: Mapping[str, float] | None,
        pending: PendingSave,
        ranks: Ranks,
        options: SaveTerms,
    ) -> Staged | BaseException:
        """Returns the staged state; or the error, which all ranks raise in the thread."""
        try:
            numbers = None if metrics is None else numbers_of(metrics)
            with out_of_inference_mode(), gc_paused():
                tied, select, lazily = options.tied, options.select, stage == "lazy"
                check_replicas = options.check_replicas if ranks.size > 1 else "none"
                memory, all_shares = self._memories[0 if self._kept is None else self._kept.begin()]
                shares = all_shares if ranks.size > 1 else None
                offsets, members = self._offsets, ranks.job_numbers
                staging = Staging(app, memory, lazily, members, tied, select, shares, check_replicas, offsets)
            hold_steps(staging.optimizers, staging.modules, pending, self._hooks)
            if options.refused is not None:
                raise options.refused
            if staging.is_lazy:
                copying_until(pending.staged)
            return Staged(staging, numbers)
        except BaseException as error:
            if not self._hooks:
                with suppress(Exception):  # not even `flatten` may have worked
                    found = [*_objects_in(app)]
                    optimizers = [each for each in found if isinstance(each, Optimizer) and is_constructed(each)]
                    modules = [each for each in found if isinstance(each, Module)]
                    hold_steps(optimizers, modules, pending, self._hooks)
            return error

    def _refuse_second(self, ranks: Ranks, call: Call) -> None:
        """Raises on all ranks if a save is in flight on any: as clocks differ, no rank may decide by itself."""
        last = self._pending
        _, in_flight = ranks.agree(
            call,
            work=lambda: last is not None and not last.done,
            report=bool,
            decide=any,
        )
        if in_flight:
            assert last is not None
            problem = Problem(last.url, "a save in flight", "one at a time", 'save later, or with in_flight="wait"')
            raise CheckpointError(f"{call} was refused", [problem], code="save-in-flight")


_default = AsyncSaver()
_of_members: dict[tuple[int, ...], AsyncSaver] = {}
"""Savers by their ranks' numbers, as a rank in several groups must not wait in one for another's save."""


def _saver_of(process_group: Group | None) -> AsyncSaver:
    """Returns the saver of a process group. Collective whenever `ranks_of` is."""
    ranks = ranks_of(process_group)
    if process_group is None or ranks.job_numbers is None:
        return _default
    return _of_members.setdefault(ranks.members, AsyncSaver())


def async_save(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    stage: Stage = "now",
    in_flight: InFlight = "wait",
    durable: bool = True,
    check_replicas: CheckReplicas = "sampled",
    progress: Progress | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    process_group: Group | None = None,
    tied: Tied | None = None,
    base: str | os.PathLike[str] | None = None,
    select: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> PendingSave:
    """Saves as `save` does, but returns once the state is in host memory; a thread writes and commits it.

    Collective: every rank of the job, or of `process_group`, must call it. Exactly the state at the call is saved.
    Host memory for this rank's state (pinned, for what is on a GPU) is allocated at the first save, and reused later.
    If other ranks also hold 16 MiB of it or more, there is host memory only for what this rank writes. The copy then
    waits until all ranks have planned the save: in the call for at most two seconds, with "lazy" in the thread. After
    two seconds the call copies everything.

    The program should call `result()` of the last save before it ends. If it ends during a save, or before a failed
    save was reported, the exit code is 1, with the reason on stderr.

    Args:
        url, app: as for `save`.
        stage: "now" copies everything in the call. "lazy" leaves to the thread what only an optimizer's step changes:
            parameters and state of the optimizers in `app`, except those that update within backward. These optimizers,
            and all keyed ones, wait before their next step until the copy is made. Until `.staged` of the result, such
            a tensor must not be changed in another way; `checkpoint.load`, `load_state_dict` of keyed optimizers and
            `swap` of averages wait. Other changes make the save fail with the tensor's name, as far as torch counts
            them. It does not count changes by fused kernels, through `.data`, or by steps replayed from a CUDA graph,
            which call no hooks.
        in_flight: what to do while an earlier save of these ranks is in flight: "wait" for it, or "refuse" this one on
            all of them.
        durable, deadline_seconds, process_group, tied, base, select, storage_options: as for `save`.
        check_replicas: as for `save`. For "sampled" the samples are copied with the state, at the call; for "all"
            everything that this rank holds is, whoever writes it.
        progress: as for `save`, but called from the thread, beside the program; an error that it raises fails the save.

    Raises:
        CheckpointError: a save is in flight, and was not to be waited for. Or this thread is in the middle of a save, a
            load or a step, as where a signal handler saves.
        ShardoptError: the save before has failed, which was not reported on some rank. All ranks raise; nothing was
            begun.

    The result raises the failure of the save itself, with the name of the rank, on every rank. If nobody asks for it,
    the next `async_save`, `save` of these parameters or step of an optimizer in `app` raises it. Until then, ranks may
    be at different steps. The next save is in step again, and raises on all ranks if the failure is unreported on any.
    A step that lacked a gradient on an accelerator is raised by its own optimizer, in the same step on all ranks. A
    load that replaces all that the step has changed silences the save.
    """
    refuse_within(f"saving {os.fspath(url)}", app)
    for each in (url, base) if storage_options is not None else ():
        if each is not None:
            use_options(each, storage_options)
    base_url = None if base is None else absolute_url(base)
    options = SaveTerms(durable, check_replicas, progress, deadline_seconds, tied, select, process_group, base_url)
    return _saver_of(process_group).save(url, app, options, stage=stage, in_flight=in_flight)


def _objects_in(value: Any) -> Iterator[Any]:
    """Yields what is in an app's dicts and lists: by this a failure is reported even if the app cannot be flattened."""
    entries = value.values() if isinstance(value, Mapping) else entries_of(value)
    if entries is None:
        yield value
    for each in entries or ():
        yield from _objects_in(each)


def _start(thread: Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:  # Python's for a limit of the system
        remedy = "raise ulimit -u or the container's limit of pids, or save without stage="
        problem = Problem("threads", str(error), "one more for a save in the background", remedy)
        raise CheckpointError("a save in the background cannot begin", [problem], code="save-in-flight") from error
