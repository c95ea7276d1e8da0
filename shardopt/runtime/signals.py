"""Listeners for this process's signals: any number of them, made and closed in any order.

Python's own handlers wait for the main thread to come back from whatever it is in. So a thread gets signals too,
from a pipe into which C writes their numbers (`signal.set_wakeup_fd`).

A handler of the program's own runs in the main thread between any two of its lines. A save in there may wait for the
very call that it has interrupted, or store what half a step has left. So saves, and what waits for them, look at the
stack before they begin. Nothing is marked beforehand: a step pays nothing for this.
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardopt.errors import CheckpointError, Problem

LOADING, SAVING, WAITING, CHANGING = "a load", "a save", "a call that waits for saves", "a change of averages"

_Function = TypeVar("_Function", bound=Callable[..., Any])
_BACKWARD = torch.autograd.backward.__code__
_known: dict[CodeType, str] = {}

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Listener:
    """Handles a signal, instead of the process's earlier handler, until it is closed. Made in the main thread.

    All listeners of a signal get it. Once they are closed, the process does again what it did before the first; a
    handler that the program has put in place since stays, and may put back that of a listener, which then hands on.

    Args:
        in_main_thread: called there between any two of its instructions; so it must not lock.
        in_thread: called in a thread of its own, whatever the main thread is in.
    """

    def __init__(
        self, signum: signal.Signals, in_main_thread: Callable[[], None], in_thread: Callable[[], None]
    ) -> None:
        self.signum, self.in_main_thread, self.in_thread = signum, in_main_thread, in_thread
        self.number = next(_numbers)  # in the order in which they were made
        self._previous: _Handler = signal.getsignal(signum)  # before a signal may come that is handed on to it
        _open.append(self)
        try:
            signal.signal(signum, self._handle)
            _pipe.open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops listening. If called outside the main thread, the handler stays installed, and passes signals on."""
        if self not in _open:
            return
        _open.remove(self)
        if threading.current_thread() is not threading.main_thread():
            return
        owner = _owner_of(signal.getsignal(self.signum))
        if owner is not None and (owner is self or owner not in _open):
            # One that was made later has no handler in place where the program has put back an earlier one.
            later = any(each.signum == self.signum and each.number > owner.number for each in _open)
            before = owner._before()
            if not later and before is not None:
                signal.signal(self.signum, before)
        if not _open:
            _pipe.close()

    def _before(self) -> _Handler:
        """Returns the handler before this one, skipping closed listeners."""
        handler = self._previous
        while (owner := _owner_of(handler)) is not None and owner not in _open:
            handler = owner._previous
        return handler

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        listeners = [each for each in tuple(_open) if each.signum == signum]
        for listener in listeners:
            listener.in_main_thread()
        if listeners:
            return
        before = self._before()
        if callable(before):
            before(signum, frame)
        elif before == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


def _owner_of(handler: _Handler) -> Listener | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Listener) else None


class _Pipe:
    """A pipe into which C writes signal numbers, and the thread that calls listeners while there are any."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._reader = self._writer = self._next = -1

    def open(self) -> None:
        if self._thread is None:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            thread = threading.Thread(target=self._run, name="shardopt-signals", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # none can be had
                self._forget()
                raise
            self._thread = thread
        before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if before != self._writer:
            self._next = before  # of an event loop, say: what comes here is handed on to it

    def close(self) -> None:
        if self._thread is None:
            return
        before = signal.set_wakeup_fd(-1)
        with suppress(ValueError, OSError):  # it may be closed by now
            signal.set_wakeup_fd(self._next if before == self._writer else before)
        os.set_blocking(self._writer, True)
        os.write(self._writer, b"\0")  # not by closing it: forked children may have it open
        self._thread.join()
        self._forget()

    def after_fork_in_child(self) -> None:
        if self._thread is not None:
            signal.set_wakeup_fd(-1)
            self._forget()

    def _forget(self) -> None:
        for fd in (self._reader, self._writer):
            os.close(fd)
        self._thread, self._reader, self._writer, self._next = None, -1, -1, -1

    def _run(self) -> None:
        while True:
            numbers = os.read(self._reader, 4096)
            for number in numbers:
                if number == 0:
                    return
                for listener in tuple(_open):
                    if listener.signum == number:
                        listener.in_thread()
            if self._next != -1:
                with suppress(OSError):
                    os.write(self._next, numbers)


_open: list[Listener] = []
_numbers = itertools.count()
_pipe = _Pipe()
_masks = threading.local()


def _before_fork() -> None:
    # A signal to a child that still has this process's handler would reach this process, by the pipe they share.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, listened())


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    """Restores the default handlers in a forked child, as a signal to it concerns only that process.

    A terminal sends SIGINT to all processes. The child ignores it, as processes that load data must continue until
    this one has saved.
    """
    for listener in _open:
        signal.signal(listener.signum, signal.SIG_IGN if listener.signum == signal.SIGINT else signal.SIG_DFL)
    _open.clear()
    _pipe.after_fork_in_child()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def listened() -> frozenset[int]:
    """Returns the signals that this process listens for."""
    return frozenset(listener.signum for listener in tuple(_open))


def is_part_of(what: str) -> Callable[[_Function], _Function]:
    """Marks a function as one within which `refuse_within` raises."""

    def mark(function: _Function) -> _Function:
        _known[function.__code__] = what
        return function

    return mark


def refuse_within(doing: str, app: object = None, but: Collection[str] = ()) -> None:
    """Raises CheckpointError if this thread is within a marked function, or within an optimizer's step.

    To be called from the function that may be marked itself, which does not count. Local, and without any waiting.

    Args:
        doing: what is not to begin there.
        app: what is to be saved; a backward counts where an optimizer in it steps within backward.
        but: what it may begin in all the same.
    """
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    within: set[CodeType] = set()
    while frame is not None:
        code = frame.f_code
        found = _known.get(code) or (code is _BACKWARD and _steps_in_backward(app) and "a backward")
        if code.co_name == "step":
            found = _step_in(frame.f_locals, within)
        if found and found not in but:
            problem = Problem(
                doing,
                f"{found} under way in this very thread, which a signal handler has interrupted",
                "a thread that is between two steps",
                "let the handler set a flag, and save after the step where it is set; or pass the signal to Manager as "
                "stop_on=, by which all ranks save after the same step and exit",
            )
            raise CheckpointError(f"{doing} cannot begin in the middle of {found}", [problem], code="in-signal-handler")
        within.add(code)
        frame = frame.f_back


def _steps_in_backward(app: object) -> bool:
    """Whether an optimizer of an app steps within backward."""
    # An attribute of a dict may be an entry of it, or an error.
    objects = [each for each in app.values() if not isinstance(each, dict)] if isinstance(app, Mapping) else ()
    return any(getattr(each, "updates_in_backward", False) for each in objects)


def _step_in(names: Any, within: Collection[CodeType]) -> str:
    """Returns what a frame is a step of, by its local names; "" if it is none.

    Args:
        within: the functions that it has called. In its closure nothing has changed yet.
    """
    stepped, closure = names.get("self"), names.get("closure")
    if isinstance(stepped, LRScheduler):
        return "the step of a schedule"
    if not isinstance(stepped, Optimizer):
        return ""
    call = closure if hasattr(closure, "__code__") else getattr(type(closure), "__call__", None)  # noqa: B004  # its code
    return "" if getattr(call, "__code__", None) in within else "the step of an optimizer"
