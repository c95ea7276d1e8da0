"""Background tasks: run in turn in a thread; keeps each failure until every rank has raised it once."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from shardopt.world import Thread, world

_ALL = 1 << 30
_log = logging.getLogger("shardopt.checkpoint")

J = TypeVar("J")


class Failures:
    """Holds the failures of tasks by turn number; turns have one order on all ranks. Any thread may call."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all turns."""
        self._lock = world().lock()
        self._begun = self._raised = 0
        self._failed: dict[int, BaseException] = {}

    def begin(self) -> int:
        """Returns the number of the new turn, from 1 on: the same on all ranks."""
        with self._lock:
            self._begun += 1
            return self._begun

    def note(self, number: int, failure: BaseException) -> None:
        """Keeps a failure to be raised, unless another rank's failure of the same turn was raised."""
        with self._lock:
            if number > self._raised:
                self._failed[number] = failure

    @property
    def newest(self) -> int:
        """The number of the last turn that failed and was not raised; 0 for none."""
        with self._lock:
            return max(self._failed, default=0)

    def take(self, until: int | None = None) -> BaseException | None:
        """Returns the last failure once, and drops earlier ones; does not wait. Local.

        Args:
            until: the last number that counts, as some rank's failure of it is raised on all now; None for any.
        """
        with self._lock:
            numbers = [number for number in self._failed if until is None or number <= until]
            failure = self._failed[max(numbers)] if numbers else None
            self._raised = max(self._raised, until or 0)
            self._failed = {number: each for number, each in self._failed.items() if number not in numbers}
            return failure

    def raise_taken(self, until: int | None = None) -> None:
        """Raises the failure that `take` returns, if any."""
        failure = self.take(until)
        if failure is not None:
            raise failure


class Turns(Generic[J]):
    """Runs jobs one after the other in a thread, in the order in which they begin. Any thread may call.

    Args:
        do: does a job; what it raises is logged, and kept in `failures`.
        describe: says what a job is about, for the log: "copying a to b".
        name: of the thread.
        low_priority: whether the thread has a low priority.
    """

    def __init__(
        self, do: Callable[[J], None], describe: Callable[[J], str], name: str, low_priority: bool = False
    ) -> None:
        self._do, self._describe, self._name, self._low_priority = do, describe, name, low_priority
        self.failures = Failures()
        self.reset()
        _made.add(self)

    def reset(self) -> None:
        """Forgets all jobs, and their failures, in a process that has no thread for them."""
        self._changed = world().condition()
        self._jobs: deque[tuple[int, J]] = deque()  # the first is under way
        self._worker: Thread | None = None
        self.failures.reset()

    @property
    def jobs(self) -> list[J]:
        """The unfinished jobs; the first one is running."""
        with self._changed:
            return [job for _, job in self._jobs]

    def begin(self, job: J) -> None:
        """Queues a job for its turn; does not wait."""
        with self._changed:
            if self._worker is None:
                # Not a daemon: a program that ends waits for it. It ends when there is nothing to do.
                worker = world().thread(self._work, self._name)
                worker.start()  # which raises where a process can have no thread more; nothing is begun then
                self._worker = worker
            self._jobs.append((self.failures.begin(), job))

    def begin_alone(self, job: J) -> bool:
        """Begins as `begin` does a job for which no other rank waits. Returns whether there is a thread for it.

        Without one the job has failed like one that was begun, and is dropped: the save that it follows is committed.
        """
        try:
            self.begin(job)
        except RuntimeError as error:  # Python's for a limit of the system
            self._fail(self.failures.begin(), job, error)
            return False
        return True

    def withdraw_waiting(self) -> list[J]:
        """Removes and returns the jobs whose turn has not come."""
        with self._changed:
            waiting = [job for _, job in self._jobs][1:]
            while len(self._jobs) > 1:
                self._jobs.pop()
        return waiting

    def finish(self, seconds: float | None = None) -> None:
        """Waits until all jobs are done, or for so many seconds; keeps failures to be raised later. Local."""
        with self._changed:
            while self._jobs and self._changed.wait(seconds):
                pass

    def _work(self) -> None:
        if self._low_priority:
            world().lower_priority(15)
        while True:
            with self._changed:
                if not self._jobs:
                    self._worker = None
                    return
                number, job = self._jobs[0]
            try:
                self._do(job)
            except BaseException as error:  # the training continues meanwhile
                self._fail(number, job, error)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify(_ALL)

    def _fail(self, number: int, job: J, error: BaseException) -> None:
        _log.error("%s failed in the background: %s", self._describe(job), error)
        self.failures.note(number, error)


class Task:
    """A task that follows a commit: copies on tiers, a mirror, exports or retention. Each has its own `begin`.

    Args:
        turns: in which it is done.

    Attributes:
        failures: that were not raised yet.
    """

    def __init__(self, turns: Turns[Any]) -> None:
        self._turns, self.failures = turns, turns.failures

    def finish(self) -> None:
        """Waits until everything that was begun is done; keeps failures to be raised later. Local."""
        self._turns.finish()

    def close(self) -> None:
        """Waits as `finish` does. Raises a failure that was not raised yet. Local."""
        self.finish()
        self.failures.raise_taken()


_made: WeakSet[Turns[Any]] = WeakSet()


def _reset_in_child() -> None:
    # A forked child has none of the threads, and what they do is its parent's: nothing is waited for.
    for turns in _made:
        turns.reset()


os.register_at_fork(after_in_child=_reset_in_child)
