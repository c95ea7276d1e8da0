"""Every order in which a few tasks can run, step by step, up to a bound: the same orders each time.

A task is a function. It runs in a thread, but only one thread runs at a time, from one operation to the next: before
each of the operations that are named the task stops, and the scheduler decides which continues. What may happen between
two processes at those operations then happens in one, as often as one likes.

An order is bounded by its preemptions: how often a task is stopped that could have continued. Most faults need one or
two (Musuvathi and Qadeer, "Iterative context bounding", 2007), and the number of orders grows with the power of the
bound.
A task can also be killed: then it does nothing more, whatever its handlers try.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.harness.faults import find_operation


class Killed(BaseException):
    """Raised in a task that was killed, instead of its next operation."""


@dataclass
class Ended:
    """The end of a task: a result, an error, or killed."""

    result: Any = None
    error: BaseException | None = None

    @property
    def killed(self) -> bool:
        return isinstance(self.error, Killed)


@dataclass(frozen=True)
class Choice:
    """The task that continues, or is killed, at one step."""

    task: int
    kill: bool = False


@dataclass(frozen=True)
class Step:
    """The choice at one step, and the tasks that could have been chosen."""

    chosen: Choice
    running: int | None  # the task that ran up to here and could continue
    able: tuple[int, ...]
    operation: str

    def __str__(self) -> str:
        return f"{'kill ' if self.chosen.kill else ''}{self.chosen.task}: {self.operation}"


@dataclass
class Run:
    """One order and its results; `ended` by task."""

    steps: list[Step] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __str__(self) -> str:
        how = "\n".join(f"  task {i} ended with {each}" for i, each in enumerate(self.ended))
        return "\n".join(["the order was", *(f"  {step}" for step in self.steps), how])


def orders(
    tasks: Callable[[], Sequence[Callable[[], Any]]], operations: Sequence[str], preemptions: int, kills: int = 0
) -> Iterator[Run]:
    """Runs the tasks in every order with at most so many preemptions and kills, one order after the other.

    Args:
        tasks: makes them anew, with all that they work on, for each order. They must do the same each time.
        operations: before which tasks stop, named as those of faults are ("os:link").
    """
    _run(tasks(), operations, [])  # the first one in a process imports what the others find imported
    waiting: list[list[Choice]] = [[]]
    while waiting:
        prefix = waiting.pop()
        run = _run(tasks(), operations, prefix)
        yield run
        waiting += _others(run.steps, len(prefix), preemptions, kills)


def _others(steps: Sequence[Step], begin: int, preemptions: int, kills: int) -> Iterator[list[Choice]]:
    """Yields the orders that equal this one up to some step from `begin` on, and not in it."""
    for i in range(begin, len(steps)):
        before, step = [each.chosen for each in steps[:i]], steps[i]
        left = preemptions - sum(map(_preempts, steps[:i]))
        for task in step.able:
            if task != step.chosen.task and (step.running is None or left > 0):
                yield [*before, Choice(task)]
        if step.running is not None and sum(each.kill for each in before) < kills:
            yield [*before, Choice(step.running, kill=True)]


def _preempts(step: Step) -> bool:
    return step.running is not None and step.chosen.task != step.running


class _Task(threading.Thread):
    def __init__(self, number: int, function: Callable[[], Any], stopped: threading.Semaphore) -> None:
        super().__init__(name=f"task {number}", daemon=True)
        self.number, self.function, self.stopped = number, function, stopped
        self.may_go_on = threading.Semaphore(0)
        self.operation, self.killed = "begin", False
        self.ended: Ended | None = None

    def run(self) -> None:
        self.may_go_on.acquire()
        try:
            if self.killed:
                raise Killed
            self.ended = Ended(self.function())
        except BaseException as error:
            self.ended = Ended(error=error)
        self.stopped.release()

    def stop_before(self, operation: str) -> None:
        """Called in this task's thread."""
        if not self.killed:
            self.operation = operation
            self.stopped.release()
            self.may_go_on.acquire()
        if self.killed:
            raise Killed

    def go_on(self) -> None:
        """Called by the scheduler; returns when the task has stopped again, or has ended."""
        self.may_go_on.release()
        self.stopped.acquire()
        if self.ended is not None:
            self.join()


def _run(functions: Sequence[Callable[[], Any]], operations: Sequence[str], prefix: Sequence[Choice]) -> Run:
    stopped = threading.Semaphore(0)
    tasks = [_Task(i, function, stopped) for i, function in enumerate(functions)]
    run = Run()
    with _stopping_before(operations):
        for task in tasks:
            task.start()
        running: int | None = None
        while able := tuple(task.number for task in tasks if task.ended is None):
            if running not in able:
                running = None
            choice = (
                prefix[len(run.steps)]
                if len(run.steps) < len(prefix)
                else Choice(able[0] if running is None else running)
            )
            if choice.task not in able:
                for task in tasks:
                    _end(task)
                raise AssertionError(f"the tasks did not do what they did before: {choice} of {able}\n{run}")
            task = tasks[choice.task]
            run.steps.append(Step(choice, running, able, task.operation))
            task.killed = choice.kill
            task.go_on()
            running = choice.task
    run.ended = [task.ended for task in tasks if task.ended is not None]
    return run


def _end(task: _Task) -> None:
    """Kills a task that has stopped, and waits for its end."""
    task.killed = True
    while task.ended is None:
        task.go_on()


@contextmanager
def _stopping_before(operations: Sequence[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for operation in operations:
            owner, name = find_operation(operation)
            call = getattr(owner, name)

            @functools.wraps(call)
            def wrapper(*args: Any, call: Callable[..., Any] = call, operation: str = operation, **kwargs: Any) -> Any:
                task = threading.current_thread()
                if isinstance(task, _Task):
                    task.stop_before(operation)
                return call(*args, **kwargs)

            stack.callback(setattr, owner, name, call)
            setattr(owner, name, wrapper)
        yield
