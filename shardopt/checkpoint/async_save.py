"""Saving while training: the state is copied to host memory, and a thread takes the copy along `save`'s line.

    app → flatten → describe → copy ↴                      in the call, or beside the next forward and backward
                                    agree → assign → write → commit           in the thread

The thread's ranks talk through the job's store as those of the program do, but beside them: in rounds of their own,
over a connection of their own, and through no collective. So neither waits for the other.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.checkpoint.describe import Description
from shardopt.checkpoint.pause import gc_paused
from shardopt.checkpoint.pending import PendingSave, hold_steps
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.replicas import CheckReplicas, refuse_unknown_choice
from shardopt.checkpoint.reports import tell
from shardopt.checkpoint.save import Kept, replicas_to_check, save_described
from shardopt.checkpoint.staging import HostMemory, Staging
from shardopt.copies import copying_until
from shardopt.errors import CheckpointError, Problem
from shardopt.ranks import DEADLINE_SECONDS, Ranks, ranks_of
from shardopt.state import is_constructed

Stage = Literal["now", "lazy"]
InFlight = Literal["wait", "refuse"]

_numbers = itertools.count()


class AsyncSaver:
    """Saves in the background, one after the other, through host memory that it keeps.

    The ranks of a job must make their savers in the same order, and make the same calls.
    """

    def __init__(self) -> None:
        self._name = f"async-{next(_numbers)}"
        self._memory = HostMemory()
        self._kept: Kept = {}
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None
        self._hooks: list[RemovableHandle] = []
        self._ranks: tuple[Ranks, Ranks] | None = None  # those of the program, and those beside them

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
        metrics: bytes | None = None,
        afterwards: Callable[[], None] = lambda: None,
    ) -> PendingSave:
        """As `async_save`, whose arguments and errors these are, but for two.

        Args:
            metrics: as for `commit`.
            afterwards: what the thread does once the checkpoint is committed; `wait` waits for that too.
        """
        begin = time.monotonic()
        _require_choice("stage", stage, ("now", "lazy"))
        _require_choice("in_flight", in_flight, ("wait", "refuse"))
        refuse_unknown_choice(check_replicas)
        ranks = ranks_of()
        if in_flight == "refuse":
            self._refuse_second(ranks, os.fspath(url), deadline_seconds)
        self.wait()
        beside = self._beside(ranks)
        pending = self._pending = PendingSave(os.fspath(url))
        staging: Staging | BaseException
        try:
            with gc_paused():
                staging = Staging(app, self._memory, lazily=stage == "lazy")
            self._hooks = hold_steps(staging.optimizers, pending)
            if staging.is_lazy:
                copying_until(pending.staged)
        except BaseException as error:
            staging = error  # the other ranks are on their way to the thread, in which all will raise it
            self._hooks = hold_steps(_optimizers_in(app), pending)

        options = durable, check_replicas, progress, deadline_seconds, metrics, afterwards
        # Not a daemon: a program that ends waits for it, and then says what it should have waited for itself.
        self._thread = threading.Thread(
            target=self._in_background, args=(beside, pending, staging, begin, *options), name="shardopt-save"
        )
        try:
            self._thread.start()
        except BaseException as error:
            pending.fail(error)
            raise
        pending.call_seconds = time.monotonic() - begin
        if isinstance(staging, BaseException) and not isinstance(staging, Exception):
            raise staging
        return pending

    def wait(self) -> None:
        """Waits for the save that is in flight; raises what the last one failed with, unless that was told already."""
        if self._pending is not None:
            self._pending.done.wait()
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join()
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._pending.raise_failure()

    def close(self) -> None:
        """Waits as `wait` does, and gives the host memory back. The next save would allocate it anew."""
        try:
            self.wait()
        finally:
            self._memory.free()
            self._ranks = None

    def _in_background(
        self,
        ranks: Ranks,
        pending: PendingSave,
        staging: Staging | BaseException,
        begin: float,
        durable: bool,
        check_replicas: CheckReplicas,
        progress: Progress | None,
        deadline_seconds: float,
        metrics: bytes | None,
        afterwards: Callable[[], None],
    ) -> None:
        """What the thread does."""
        staging_seconds = 0.0

        def described() -> Description:
            nonlocal staging_seconds
            if isinstance(staging, BaseException):
                raise staging
            staging.finish()
            pending.staged.happen()
            staging_seconds = time.monotonic() - begin
            return staging.describe(replicas_to_check(check_replicas, ranks))

        try:
            report = save_described(
                ranks, pending.url, described, self._kept, durable, deadline_seconds, metrics, progress
            )
            pending.succeed(replace(report, seconds=time.monotonic() - begin, staging_seconds=staging_seconds))
            tell("save", pending.result())
        except BaseException as error:
            pending.fail(error)
        else:
            afterwards()

    def _beside(self, ranks: Ranks) -> Ranks:
        if self._ranks is None or self._ranks[0] is not ranks:
            self._ranks = ranks, ranks.beside(self._name)
        return self._ranks[1]

    def _refuse_second(self, ranks: Ranks, url: str, deadline_seconds: float) -> None:
        """Raises on all ranks where a save is in flight on one: their clocks differ, and one alone must not go on."""
        last = self._pending
        _, in_flight = ranks.agree(
            f"saving {url}",
            work=lambda: last is not None and not last.done,
            report=bool,
            decide=any,
            deadline_seconds=deadline_seconds,
        )
        if in_flight:
            assert last is not None
            problem = Problem(last.url, "a save in flight", "one at a time", 'save later, or with in_flight="wait"')
            raise CheckpointError(f"saving {url} was refused", [problem])


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
        ShardoptError: the save before has failed, and nobody was told. Nothing was begun.

    What the save itself fails with is raised by the result, with the name of the rank, on every rank; or else at the
    next save, or the next step of an optimizer in `app`, whichever is the first. Ranks may come to different steps
    until they hear of it.
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
        raise ValueError(f"{name}: found {found!r}; required one of {choices}; pass one of them")
