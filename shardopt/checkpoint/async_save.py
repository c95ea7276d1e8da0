"""Saving while training: the state is copied to host memory, and a thread takes the copy along `save`'s line.

    app → flatten → describe → copy ↴                      in the call, or beside the next forward and backward
                                    agree → assign → write → commit           in the thread

The thread's ranks talk through the job's store as those of the program do, but beside them: in rounds of their own,
over a connection of their own, and through no collective. So neither waits for the other.

Whether a save has failed is agreed upon in its thread, and so known alike to all ranks once it is done; who was told of
it is not. Therefore the next call asks that first, in a round, and all ranks raise, or none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.checkpoint.planning.replica_check import CheckReplicas, refuse_unknown_choice
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reports import tell
from shardopt.checkpoint.run.metrics import numbers_of
from shardopt.checkpoint.save import Described, Kept, replicas_to_check, save_described
from shardopt.checkpoint.writing.host_memory import HostMemory
from shardopt.checkpoint.writing.pending import PendingSave, hold_steps
from shardopt.checkpoint.writing.staging import Staging
from shardopt.errors import CheckpointError, OptionError, Problem
from shardopt.gc_pause import gc_paused
from shardopt.ranks import DEADLINE_SECONDS, Call, Ranks, SideRanks, as_call, call_on, ranks_of, refuse_lone_processes
from shardopt.staging_fence import copying_until
from shardopt.state import is_constructed
from shardopt.world import Thread, world

Stage = Literal["now", "lazy"]
InFlight = Literal["wait", "refuse"]

_log = logging.getLogger("shardopt.checkpoint")


class AsyncSaver:
    """Saves in the background, one after the other, through host memory that it keeps.

    All ranks of a job must make the same calls of it.
    """

    def __init__(self) -> None:
        self._side = SideRanks("saves in the background")
        self._memory = HostMemory()
        self._kept: Kept = {}
        self._ranks: Ranks | None = None  # those of the last save, beside those of the program
        self._pending: PendingSave | None = None
        self._deadline_seconds = DEADLINE_SECONDS
        self._asked = False  # whether all ranks were asked who was told that the last save has failed
        self._thread: Thread | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def pending(self) -> PendingSave | None:
        """The last save, if there was one."""
        return self._pending

    def save(
        self,
        url: str | os.PathLike[str],
        app: Mapping[str, Any],
        *,
        stage: Stage = "now",
        in_flight: InFlight = "wait",
        durable: bool = True,
        check_replicas: CheckReplicas = "sampled",
        progress: Progress | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        metrics: Mapping[str, float] | None = None,
        afterwards: Callable[[], None] = lambda: None,
    ) -> PendingSave:
        """As `async_save`, whose arguments and errors these are, but for two.

        Args:
            metrics: numbers by name, kept with the checkpoint; rank 0's count.
            afterwards: what the thread does once the checkpoint is committed; `wait` waits for that too.
        """
        begin = world().monotonic()
        _require_choice("stage", stage, ("now", "lazy"))
        _require_choice("in_flight", in_flight, ("wait", "refuse"))
        refuse_unknown_choice(check_replicas)
        call = call_on("saving", url)
        refuse_lone_processes(str(call))
        ranks = ranks_of()
        if in_flight == "refuse":
            self._refuse_second(ranks, call, deadline_seconds)
        self._wait(call)
        side = self._side.of(ranks, deadline_seconds)
        options = _Options(durable, check_replicas, progress, deadline_seconds, afterwards)
        work = _Work(side, os.fspath(url), self._kept, begin, options)
        pending = work.pending
        staged: _Staged | BaseException
        try:
            self._ranks, self._deadline_seconds = side, deadline_seconds
            self._pending, self._asked, self._thread = pending, False, None
            # Begun before the state is copied, as it shows meanwhile that this rank is alive. Not a daemon: a program
            # that ends waits for it, and then says what it should have waited for itself.
            self._thread = world().thread(work.run, "shardopt-save")
            self._thread.start()
            staged = self._stage(app, stage, metrics, pending)
            work.hand_over(staged)
        except BaseException as error:
            # The other ranks are on their way to the thread's first round, in which all are to raise this.
            work.hand_over(error)
            pending.hear_beforehand()
            if self._thread is None or self._thread.ident is None:
                work.run()
            raise
        pending.call_seconds = world().monotonic() - begin
        if isinstance(staged, BaseException) and not isinstance(staged, Exception):
            pending.hear_beforehand()
            raise staged
        return pending

    def wait(self) -> None:
        """Waits for the save that is in flight. Collective where it has failed: then all ranks raise what it has failed
        with if one of them was not told yet, and otherwise none does."""
        self._wait(as_call("waiting for a save in the background"))

    def take_failure(self) -> BaseException | None:
        """Waits for the save that is in flight; gives what it has failed with, if this rank was not told yet. Local."""
        self._finish()
        return self._pending.hear() if self._pending is not None else None

    def close(self, alone: bool = False) -> None:
        """Waits as `wait` does, and gives the host memory back. The next save would allocate it anew.

        Args:
            alone: for a rank that is on its way out by itself: then nobody else is asked.
        """
        try:
            if alone:
                failure = self.take_failure()
                if failure is not None:
                    raise failure
            else:
                self._wait(as_call("closing what saves in the background"))
        finally:
            self._memory.free()
            self._side.forget()
            self._ranks = None

    def _finish(self) -> None:
        """Waits until nothing is in flight, and no step waits for it."""
        if self._pending is not None:
            self._pending.done.wait()
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join()
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _wait(self, call: Call) -> None:
        self._finish()
        pending, side = self._pending, self._ranks
        if pending is None or side is None or pending.failure is None or self._asked:
            return
        ranks = ranks_of()
        if ranks.size == 1 or not side.in_step:  # in step no more: a rank was lost, and nobody can be asked
            pending.raise_failure()
            return
        if not self._side.are_beside(ranks):  # in another process group, of other ranks
            failure = pending.hear()
            if failure is not None:
                _log.error("%s", failure)
            return
        _, all_heard = side.agree(
            Call(str(call), f"{call.same}, after a save that failed"),
            work=lambda: pending.is_heard,
            report=bool,
            decide=all,
            deadline_seconds=self._deadline_seconds,
        )
        self._asked = True
        if not all_heard:
            pending.hear()
            raise pending.failure

    def _stage(
        self, app: Mapping[str, Any], stage: Stage, metrics: Mapping[str, float] | None, pending: PendingSave
    ) -> _Staged | BaseException:
        """The state on its way to the host; or what went wrong, of which all ranks will hear in the thread."""
        try:
            numbers = None if metrics is None else numbers_of(metrics)
            with gc_paused():
                staging = Staging(app, self._memory, lazily=stage == "lazy")
            hold_steps(staging.optimizers, pending, self._hooks)
            if staging.is_lazy:
                copying_until(pending.staged)
            return _Staged(staging, numbers)
        except BaseException as error:
            if not self._hooks:
                with suppress(Exception):  # not even the walk through the state may have worked
                    hold_steps(_optimizers_in(app), pending, self._hooks)
            return error

    def _refuse_second(self, ranks: Ranks, call: Call, deadline_seconds: float) -> None:
        """Raises on all ranks where a save is in flight on one: their clocks differ, and one alone must not go on."""
        last = self._pending
        _, in_flight = ranks.agree(
            call,
            work=lambda: last is not None and not last.done,
            report=bool,
            decide=any,
            deadline_seconds=deadline_seconds,
        )
        if in_flight:
            assert last is not None
            problem = Problem(last.url, "a save in flight", "one at a time", 'save later, or with in_flight="wait"')
            raise CheckpointError(f"{call} was refused", [problem])


@dataclass(frozen=True, slots=True)
class _Options:
    durable: bool
    check_replicas: CheckReplicas
    progress: Progress | None
    deadline_seconds: float
    afterwards: Callable[[], None]


class _Staged(NamedTuple):
    """What a thread saves: the state of the call, and the metrics."""

    state: Staging
    metrics: Mapping[str, float] | None


class _Work:
    """What is done of one save in the background, once, in whichever thread runs it first."""

    def __init__(self, ranks: Ranks, url: str, kept: Kept, begin: float, options: _Options) -> None:
        self._ranks, self._kept, self._begin, self._options = ranks, kept, begin, options
        self._running = world().lock()  # taken for good by who runs it
        self._handed_over = world().event()
        self._staged: _Staged | BaseException | None = None
        self._staging_seconds = 0.0
        self.pending = PendingSave(url)  # last: from now on it has to end

    def hand_over(self, staged: _Staged | BaseException) -> None:
        """What is to be saved, or what went wrong with it on this rank. The first one counts."""
        if self._staged is None:
            self._staged = staged
        self._handed_over.set()

    def run(self) -> None:
        """Saves what is handed over, and tells `pending` of the end."""
        if not self._running.acquire(blocking=False):
            return
        options = self._options
        try:
            with self._ranks.beating(options.deadline_seconds):
                report = save_described(
                    self._ranks,
                    self.pending.url,
                    self._described,
                    self._kept,
                    options.durable,
                    options.deadline_seconds,
                    options.progress,
                )
                seconds = world().monotonic() - self._begin
                self.pending.succeed(replace(report, seconds=seconds, staging_seconds=self._staging_seconds))
                tell("save", self.pending.result())
                options.afterwards()
        except BaseException as error:
            if self.pending.done:
                raise  # of what comes afterwards
            self.pending.fail(error)

    def _described(self) -> Described:
        self._handed_over.wait()
        staged = self._staged
        if not isinstance(staged, _Staged):
            assert staged is not None
            raise staged
        staged.state.finish()
        self.pending.staged.set()
        self._staging_seconds = world().monotonic() - self._begin
        check_replicas = replicas_to_check(self._options.check_replicas, self._ranks)
        return Described(staged.state.describe(check_replicas), staged.metrics)


_default = AsyncSaver()


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
) -> PendingSave:
    """Saves as `save` does, but returns once the state is copied to host memory; a thread writes and commits it.

    Collective: every rank of the job must call it. What is saved is the state at the call, to the bit. Host memory for
    this rank's state (pinned, for what is on a GPU) is allocated at the first save and reused by those that follow.

    The program should call `result()` of the last save before it ends: ending while a save is under way, or without
    having been told that one failed, makes the exit code 1, with the reason on stderr.

    Args:
        url, app: as for `save`.
        stage: "now" copies everything in the call. "lazy" leaves to the thread what only an optimizer's step changes
            (the parameters and the state of the optimizers in `app`, but for those that update within backward), and
            these wait before their next step until it is copied. Until `.staged` of the result, such a tensor must not
            be changed in another way; `checkpoint.load`, `load_state_dict` of keyed optimizers and `swap` of averages
            wait. Other changes make the save fail with the tensor's name, as far as torch counts them: not those by
            fused kernels, nor through `.data`, nor by steps replayed from a CUDA graph, which call no hooks.
        in_flight: what to do while an earlier save is in flight: "wait" for it, or "refuse" this one on all ranks.
        durable, check_replicas, deadline_seconds: as for `save`.
        progress: as for `save`, but called from the background, beside the program; what it raises fails the save.

    Raises:
        CheckpointError: a save is in flight, and was not to be waited for.
        ShardoptError: the save before has failed, and some rank was not told. All ranks raise; nothing was begun.

    What the save itself fails with is raised by the result, with the name of the rank, on every rank; or else at the
    next save, or the next step of an optimizer in `app`, whichever is the first. Ranks may come to different steps
    until they hear of it; the next save is in step again, and raises on all of them if one was not told yet.
    """
    return _default.save(
        url,
        app,
        stage=stage,
        in_flight=in_flight,
        durable=durable,
        check_replicas=check_replicas,
        progress=progress,
        deadline_seconds=deadline_seconds,
    )


def _optimizers_in(app: Any) -> list[Optimizer]:
    """Those that can be told of a failure although the state could not be walked through."""
    values = app.values() if isinstance(app, Mapping) else ()
    return [each for each in values if isinstance(each, Optimizer) and is_constructed(each)]


def _require_choice(name: str, found: str, choices: tuple[str, ...]) -> None:
    if found not in choices:
        problem = Problem(name, repr(found), f"one of {', '.join(map(repr, choices))}", "pass one of them")
        raise OptionError("an argument that cannot be meant", [problem])
