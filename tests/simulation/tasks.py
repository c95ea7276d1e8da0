"""Simulated time, processes and tasks: one runs at a time, and which one continues follows from a seed alone.

A task is a greenlet: it continues where it stopped, in the one real thread there is, and stops wherever it waits or
does something that others may see. Each such operation takes simulated time, which is drawn; so tasks meet in another
order with every seed, and in the same order with the same one.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]  # has no type hints


class Killed(BaseException):
    """Raised in the tasks of a process that was killed, in the place of whatever they would do next."""


class Process:
    """A process: its tasks, and what modules keep once for each process.

    Attributes:
        dead: whether it was killed, or has ended: none of its operations has any effect then.
        stopped: whether it is stopped, as by SIGSTOP.
        operations: how many operations it has done that others may see; faults are placed by this number.
        keeps: module namespace, name and value of all that modules keep once for each process.
        address, rank, job_size, group, planning_seconds, gives_up: given by the job, if it is of one.
    """

    def __init__(self, scheduler: Scheduler, name: str, host: str = "") -> None:
        self.scheduler, self.name, self.host = scheduler, name, host
        scheduler.processes.append(self)
        self.dead = self.stopped = False
        self.operations = 0
        self.tasks: list[Task] = []
        self.main: Task | None = None
        self.main_ended = False
        self.keeps: list[tuple[dict[str, Any], str, Any]] = []
        self.address = ""
        self.rank, self.job_size = 0, 1
        self.group: Any
        self.planning_seconds = 0.0
        self.gives_up: Callable[[], None]
        self.at_operation: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self.at_exit: list[Callable[[], None]] = []  # by the program, once its threads have ended
        self.at_end: list[Callable[[], None]] = []  # by the system, whatever ends it
        self.listeners: list[tuple[Callable[[], None], Callable[[], None]]] = []  # for the signal; in the main thread,
        # and in one of their own
        self._held: list[tuple[Task, int]] = []

    def start(self, function: Callable[[], object]) -> None:
        """Starts the main thread; the process ends with it, once threads that are no daemons have ended too."""

        def main() -> None:
            try:
                function()
            finally:
                if not self.dead:
                    self.main_ended = True
                    for task in list(self.tasks):
                        if not task.daemon and task is not self.main:
                            task.join()
                    for exit_function in self.at_exit:
                        exit_function()
                    self.kill()

        self.main = Task(self, main, "MainThread", daemon=False)
        self.main.start()

    def kill(self) -> None:
        """Ends it, as by SIGKILL."""
        if not self.dead:
            self.dead, self.stopped = True, False
            self.scheduler.note(self.name, "is gone")
            self.scheduler.changed = True
            for task in self.tasks:
                if not task.ended and task is not self.scheduler.current:
                    self.scheduler.push(self.scheduler.now, task)
            self._held = []
            for function in self.at_end:
                function()

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in its main thread, as by SIGINT."""
        main = self.main
        if not self.dead and main is not None and not self.main_ended:
            self.scheduler.note(self.name, "is interrupted")
            if main is self.scheduler.current:
                raise KeyboardInterrupt
            main.interrupted = True
            self.scheduler.push(self.scheduler.now, main)

    def signal(self) -> None:
        """Sends it the signal of preemption: the end of a process that does not listen."""
        if self.dead:
            return
        self.scheduler.note(self.name, "gets a signal")
        if not self.listeners:
            self.kill()
        for in_main_thread, in_thread in self.listeners:
            in_main_thread()
            Task(self, in_thread, "signals", daemon=True).start()

    def stop(self) -> None:
        """Stops it, as by SIGSTOP."""
        if not self.dead:
            self.stopped = self.scheduler.changed = True
            self.scheduler.note(self.name, "stops")

    def go_on(self) -> None:
        """Has it continue, as by SIGCONT."""
        if self.stopped:
            self.stopped, self.scheduler.changed = False, True
            self.scheduler.note(self.name, "continues")
            held, self._held = self._held, []
            for task, token in held:
                if task.token == token:
                    self.scheduler.push(self.scheduler.now, task)

    def hold(self, task: Task) -> None:
        """Keeps a task that is due until the process continues."""
        self._held.append((task, task.token))


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, function: Callable[[], object], name: str, daemon: bool) -> None:
        self.process, self.name, self.daemon = process, name, daemon
        self.token = 0  # grows with each wait, so that what is due of an earlier one is known
        self.woken = False
        self.ended = self.interrupted = False
        self.grad_mode = True
        self._function = function
        self._waiting: list[Task] = []
        self.greenlet: greenlet | None = None

    def start(self) -> None:
        self.process.tasks.append(self)
        scheduler = self.process.scheduler
        self.greenlet = greenlet(self._run, scheduler.hub)
        scheduler.push(scheduler.now + scheduler.draw(20e-6), self)

    def _run(self, *unused: object) -> None:
        try:
            self._function()
        except Killed:
            pass
        except BaseException as error:
            self.process.scheduler.escaped(self, error)
        finally:
            self.ended = self.process.scheduler.changed = True
            if self in self.process.tasks and not self.process.dead:
                self.process.tasks.remove(self)
            waiting, self._waiting = self._waiting, []
            for task in waiting:
                self.process.scheduler.wake(task)

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended."""
        scheduler = self.process.scheduler
        end = None if timeout is None else scheduler.now + timeout
        task = scheduler.current
        while not self.ended:
            assert task is not None
            self._waiting.append(task)
            try:
                if not scheduler.block(None if end is None else end - scheduler.now):
                    return
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)

    def stack(self) -> str:
        """Returns where it waits, the last lines of it."""
        frame = None if self.greenlet is None else self.greenlet.gr_frame
        lines = traceback.format_stack(frame)[-14:] if frame is not None else ["  (not started)\n"]
        return f"{self.process.name}, {self.name}:\n" + "".join(lines)


class Scheduler:
    """Simulated time and all that is due in it.

    Attributes:
        now: seconds since the beginning.
        trace: what happened: when, where, and what.
        processes: all that were started.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._random = self.random.random
        self.now = 0.0
        self.trace: list[tuple[float, str, str]] = []
        self.processes: list[Process] = []
        self.hub = getcurrent()
        self.current: Task | None = None
        self.errors: list[str] = []
        self.changed = True  # whether something was that may end a run: a process or a thread has ended, or stopped
        self._due: list[tuple[float, int, Task | Callable[[], None], int]] = []
        self._pushed = 0
        self._loaded: Process | None = None

    def note(self, who: str, what: str) -> None:
        """Adds a line to the trace."""
        self.trace.append((self.now, who, what))

    def draw(self, seconds: float) -> float:
        """Draws how long something takes that takes so long."""
        drawn = self._random()
        # Now and then far longer: what comes before all else in one run comes after all else in another.
        return seconds * (0.5 + drawn) if drawn < 0.95 else seconds * (1 + 600 * (drawn - 0.95))

    def at(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls a function, that does not wait, at a time."""
        self._pushed += 1
        heapq.heappush(self._due, (max(seconds, self.now), self._pushed, function, 0))

    def push(self, seconds: float, task: Task) -> None:
        """Has a task continue at a time, unless it has by then for another reason."""
        self._pushed += 1
        heapq.heappush(self._due, (seconds, self._pushed, task, task.token))

    def pause(self, seconds: float) -> None:
        """Stops the current task for so long."""
        task = self.current
        assert task is not None
        process = task.process
        if process.dead:
            raise Killed
        then = self.now + seconds
        due = self._due
        if (not due or due[0][0] > then) and not process.stopped:
            self.now = then  # nobody else is due before
            return
        task.token += 1
        self._pushed += 1
        heapq.heappush(due, (then, self._pushed, task, task.token))
        self.hub.switch()

    def block(self, timeout: float | None = None) -> bool:
        """Stops the current task until it is woken; returns whether it was, within the time."""
        task = self.current
        assert task is not None
        if task.process.dead:
            raise Killed
        task.token += 1
        task.woken = False
        if timeout is not None:
            self.push(self.now + max(timeout, 0.0), task)
        self.hub.switch()
        return task.woken

    def wake(self, task: Task) -> None:
        """Has a task continue that is in `block`."""
        if not task.woken and not task.ended:
            task.woken = True
            self.push(self.now + self.draw(10e-6), task)

    def operate(self, what: str, seconds: float, looks_only: bool = False) -> None:
        """Stops the current task before an operation that others may see, for as long as it takes on its way.

        Args:
            looks_only: whether it may be repeated any number of times while it waits: those are not counted.

        Raises:
            Killed: the process was killed before it.
        """
        task = self.current
        assert task is not None
        process = task.process
        if process.dead:
            raise Killed
        self.trace.append((self.now, process.name, what))
        if not looks_only:
            self.count(process)
        self.pause(self.draw(seconds))

    def count(self, process: Process) -> None:
        """Counts an operation of a process, and has the faults happen that are placed at it."""
        process.operations += 1
        for function in process.at_operation.pop(process.operations, ()):
            function()
        if process.dead:
            raise Killed

    def run(self, done: Callable[[], bool], until: float) -> bool:
        """Runs all that is due until it is done; returns False where it is not, at a time or with nothing due."""
        self.changed = True
        due, pop = self._due, heapq.heappop
        while True:
            if self.changed:
                self.changed = False
                if done():
                    return True
            if not due or due[0][0] > until:
                return done()
            then, _, what, token = pop(due)
            if then > self.now:
                self.now = then
            if not isinstance(what, Task):
                what()
            elif what.token == token and not what.ended:
                self._resume(what)

    def _resume(self, task: Task) -> None:
        process = task.process
        if process.stopped:
            process.hold(task)
            return
        task.token += 1
        if process is not self._loaded:
            for namespace, name, value in process.keeps:
                namespace[name] = value
            self._loaded = process
        self.current = task
        if torch.is_grad_enabled() is not task.grad_mode:
            torch._C._set_grad_enabled(task.grad_mode)
        body = task.greenlet
        assert body is not None
        if process.dead:
            if body:
                body.throw(Killed)
            else:
                task.ended = True  # before it has begun
        elif task.interrupted:
            task.interrupted = False
            body.throw(KeyboardInterrupt)
        else:
            body.switch()
        task.grad_mode = torch.is_grad_enabled()
        self.current = None

    def escaped(self, task: Task, error: BaseException) -> None:
        """Notes an error that ended a thread."""
        if task is not task.process.main:
            text = "".join(traceback.format_exception(error)[-6:])
            self.errors.append(f"{task.process.name}, {task.name} ended with {text}")

    def give_up(self) -> None:
        """Drops what is due: all processes were killed, and have had their turn."""
        self._due.clear()
        self._loaded = None
