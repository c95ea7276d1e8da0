"""A save that goes on in the background, as the program sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.checkpoint.save import SaveReport
from shardopt.checkpoint.writing.tracking import track, untrack
from shardopt.errors import RankError
from shardopt.staging_fence import Event
from shardopt.world import world


class PendingSave:
    """What `async_save` returns.

    Attributes:
        url: where the checkpoint will be.
        staged: happens when this rank's state was copied to host memory, and may be changed in any way. (Where it was
            to be copied lazily; otherwise it may be changed as soon as the call has returned.)
        done: happens when the checkpoint is committed, or has failed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.staged = Event()
        self.done = Event()
        self.call_seconds = 0.0  # how long `async_save` took
        self._waited_seconds = 0.0  # by optimizers before their steps
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._told = False
        self._outlived = False  # whether the program ended before the save did
        track(self)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint is committed, and tells what was done. Local.

        A failure that it raises is heard of on this rank. Where others have not heard of it, the next collective call
        (`save`, `async_save`, or of a `Manager`) raises it once more, on all ranks.

        Args:
            timeout: in seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: it is not committed yet.
            ShardoptError: the save has failed, with what `save` raises, the same on every rank.
        """
        if not self.done.wait(timeout):
            raise TimeoutError(f"saving {self.url} is still under way after {timeout:g} s")
        if self._error is not None:
            self._tell()
            raise self._error
        assert self._report is not None
        return replace(self._report, stall_seconds=self.call_seconds + self._waited_seconds)

    @property
    def failure(self) -> BaseException | None:
        """What the save has failed with, the same on all ranks, whether this rank has heard of it or not."""
        return self._error if self.done else None

    @property
    def is_heard(self) -> bool:
        """Whether this rank was told what the save has failed with."""
        return self._told

    def hear(self) -> BaseException | None:
        """What the save has failed with, if it has and this rank was not told yet; does not wait."""
        if self.failure is None or self._told:
            return None
        self._tell()
        return self.failure

    def hear_beforehand(self) -> None:
        """For whoever raises in the call itself what the save will fail with."""
        self._told = True
        if self.done:
            untrack(self)

    def raise_failure(self) -> None:
        """Raises what `hear` gives. Local."""
        failure = self.hear()
        if failure is not None:
            raise failure

    def complaint(self) -> str:
        """What to say of it where the program has ended."""
        if self._error is not None:
            return f"the program ended without being told that saving {self.url} failed: {self._error}"
        end = "was committed all the same" if self._report is not None else "was given up"
        return (
            f"the program ended while saving {self.url} was under way, which {end}; "
            "call result() of what async_save returns, or close the Manager, before the end"
        )

    def succeed(self, report: SaveReport) -> None:
        """For the thread that saves: the checkpoint is committed."""
        self._report = report
        self._end()

    def fail(self, error: BaseException) -> None:
        """For the thread that saves: there will be no checkpoint."""
        self._error = error
        self._end()

    def abandon_in_child(self) -> None:
        """In a process that was forked: nobody goes on with it here."""
        self._error, self._told = (
            RankError(f"saving {self.url} goes on in the process that this one was forked from"),
            True,
        )
        self.staged.set_in_child()
        self.done.set_in_child()

    def _end(self) -> None:
        if self._error is None and world().main_thread_lives():
            untrack(self)
        self.staged.set()
        self.done.set()
        if self._told:  # asked once this is done, as `hear_beforehand` asks whether it is once it was told
            untrack(self)

    def _tell(self) -> None:
        self._told = True
        untrack(self)

    def before_step(self, *unused: Any) -> None:
        """The hook of an optimizer whose state is saved: waits for the copy; tells that the save has failed.

        Local: where threads end at other times, ranks hear of it before different steps.
        """
        if not self.staged:
            begin = world().monotonic()
            self.staged.wait()
            self._waited_seconds += world().monotonic() - begin
        self.raise_failure()


def hold_steps(optimizers: Iterable[Optimizer], pending: PendingSave, hooks: list[RemovableHandle]) -> None:
    """Makes optimizers wait with their steps until what they change is copied.

    Args:
        hooks: gets the handles, of those that could be made to wait even if one could not. Removing them ends it.
    """
    for optimizer in optimizers:
        hooks.append(optimizer.register_step_pre_hook(pending.before_step))
