"""Locks, events, conditions, threads, futures and pools of a simulated process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

from tests.simulation.tasks import Killed, Process, Scheduler, Task

_SECONDS = 2e-6  # that a lock takes: enough for another thread to come first


class SimulatedLock:
    """As `threading.Lock`, or `threading.RLock`."""

    def __init__(self, scheduler: Scheduler, reentrant: bool = False) -> None:
        self._scheduler, self._reentrant = scheduler, reentrant
        self.owner: Task | None = None
        self.depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        task = scheduler.current
        if self._reentrant and self.owner is task and task is not None:
            self.depth += 1
            return True
        scheduler.pause(scheduler.draw(_SECONDS))
        if self.owner is None:
            self.owner, self.depth = task, 1
            return True
        end = None if timeout < 0 else scheduler.now + timeout
        while self.owner is not None:
            assert task is not None
            if not blocking:
                return False
            self._waiting.append(task)
            try:
                if not scheduler.block(None if end is None else end - scheduler.now):
                    return False
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        self.owner, self.depth = task, 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.owner = None
            if self._waiting:
                self._scheduler.wake(self._waiting.pop(0))

    def locked(self) -> bool:
        return self.owner is not None

    __enter__ = acquire

    def __exit__(self, *exc_info: Any) -> None:
        self.release()


class SimulatedEvent:
    """As `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        end = None if timeout is None else scheduler.now + timeout
        task = scheduler.current
        while not self._set:
            assert task is not None
            self._waiting.append(task)
            try:
                if not scheduler.block(None if end is None else end - scheduler.now):
                    break
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        return self._set


class SimulatedCondition:
    """As `threading.Condition`, with a lock that its holder may acquire again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = SimulatedLock(scheduler, reentrant=True)
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: Any) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        task, depth = self._scheduler.current, self._lock.depth
        assert task is not None and self._lock.owner is task
        self._waiting.append(task)
        self._lock.depth = 1
        self._lock.release()
        try:
            woken = self._scheduler.block(timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
        self._lock.acquire()
        self._lock.depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else self._scheduler.now + timeout
        while not predicate():
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return True

    def notify(self, n: int = 1) -> None:
        for task in self._waiting[:n]:
            self._scheduler.wake(task)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimulatedThread:
    """As `threading.Thread`."""

    def __init__(self, process: Process, target: Callable[[], object], name: str, daemon: bool) -> None:
        self.name, self.daemon = name, daemon
        self._task = Task(process, target, name, daemon)
        self._task.thread = self  # type: ignore[attr-defined]  # whom `current_thread` returns
        self.ident: int | None = None

    def start(self) -> None:
        self.ident = 1  # only whether there is one is asked
        self._task.start()

    def join(self, timeout: float | None = None) -> None:
        assert self.ident is not None, "cannot join a thread before it is started"
        self._task.join(timeout)

    def is_alive(self) -> bool:
        return self.ident is not None and not self._task.ended


class SimulatedFuture(Future):  # type: ignore[type-arg]  # of anything
    """A future whose waiters are tasks."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._condition = SimulatedCondition(scheduler)  # type: ignore[assignment]  # does what is asked of one


class SimulatedPool(Executor):
    """A pool of threads that are started with their work."""

    def __init__(self, scheduler: Scheduler, process: Process, threads: int, name: str) -> None:
        self._scheduler, self._process, self._threads, self._name = scheduler, process, threads, name
        self._running: list[Task] = []
        self._queued: list[tuple[SimulatedFuture, Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SimulatedFuture:
        future = SimulatedFuture(self._scheduler)
        self._queued.append((future, lambda: fn(*args, **kwargs)))
        if len(self._running) < self._threads:
            task = Task(self._process, self._work, f"{self._name}_{len(self._running)}", daemon=False)
            self._running.append(task)
            task.start()
        return future

    def _work(self) -> None:
        task = self._scheduler.current
        assert task is not None
        while self._queued:
            future, function = self._queued.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._running.remove(task)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, _ in self._queued:
                future.cancel()
        while wait and self._running:
            self._running[0].join()
            if self._process.dead:  # what was not begun then never is
                raise Killed


def wait_for_all(scheduler: Scheduler, futures: Iterable[Future[Any]]) -> None:
    """As `World.wait_for_all`."""
    for future in futures:
        _wait_for(scheduler, future)


def _wait_for(scheduler: Scheduler, future: Future[Any]) -> None:
    event = SimulatedEvent(scheduler)
    future.add_done_callback(lambda _: event.set())
    if not future.done():
        event.wait()


class SimulatedListener:
    """As `shardopt.runtime.signals.Listener`, for the one signal that there is."""

    def __init__(self, process: Process, in_main_thread: Callable[[], None], in_thread: Callable[[], None]) -> None:
        self._process, self._functions = process, (in_main_thread, in_thread)
        process.listeners.append(self._functions)

    def close(self) -> None:
        if self._functions in self._process.listeners:
            self._process.listeners.remove(self._functions)
