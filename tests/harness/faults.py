"""Faults as data: at rank r, the k-th call of an operation kills the rank, raises, comes back short, or is late.

An operation is named "module:qualified.name" *where it is looked up when called*: `os:fsync` catches `os.fsync(...)`
everywhere, but not a name that some module imported from `os` on its own.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import sleep  # by name, so that a fault on `time:sleep` does not meet itself
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.harness.outcome import Outcome

_ACTIONS = ("kill", "short", "delay")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on one rank.

    Args:
        rank: where.
        operation: "module:qualified.name", such as "os:fsync" or "shardopt.checkpoint.storage:LocalStorage.write".
        at: at which call, counted from 1.
        action: "kill" (SIGKILL instead of the call), "short" (the call gets the first half of its bytes, and its own
            answer is returned), "delay" (the call is made `seconds` later), an errno name ("ENOSPC": the `OSError` of
            that number is raised), or the exception to raise.
        times: how many calls in a row it strikes.
        seconds: how long a delay is.
    """

    rank: int
    operation: str
    at: int = 1
    action: str | BaseException = "kill"
    times: int = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.action, str) and self.action not in _ACTIONS and not hasattr(errno, self.action):
            raise ValueError(f"action {self.action!r}: expected one of {_ACTIONS}, an errno name or an exception")
        if self.at < 1 or self.times < 1:
            raise ValueError(f"at={self.at}, times={self.times}: calls are counted from 1")

    def strike(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries out the fault on this one call."""
        if isinstance(self.action, BaseException):
            raise self.action
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "delay":
            sleep(self.seconds)
        elif self.action == "short":
            args = _first_half(self.operation, args)
        else:
            number = getattr(errno, self.action)
            raise OSError(number, os.strerror(number))
        return call(*args, **kwargs)


def each_operation(outcomes: Iterable[Outcome[Any]], action: str | BaseException = "kill") -> list[Fault]:
    """Makes one fault for every traced call of every rank, in order, for a test of all crash points."""
    faults = []
    for outcome in outcomes:
        seen: Counter[str] = Counter()
        for operation in outcome.calls:
            seen[operation] += 1
            faults.append(Fault(outcome.rank, operation, seen[operation], action))
    return faults


@dataclass
class Watch:
    """The calls so far, and whether a fault struck."""

    calls: list[str] = field(default_factory=list)
    struck: bool = False
    _counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, operation: str) -> int:
        with self._lock:
            self.calls.append(operation)
            self._counts[operation] += 1
            return self._counts[operation]


@contextmanager
def watched(faults: Sequence[Fault], trace: Sequence[str]) -> Iterator[Watch]:
    """Replaces every named operation of this process until the end of the block. Counts are of all its threads."""
    watch = Watch()
    with ExitStack() as stack:
        for operation in dict.fromkeys([*trace, *(fault.operation for fault in faults)]):
            own_faults = [fault for fault in faults if fault.operation == operation]
            stack.callback(_replace(operation, own_faults, watch))
        yield watch


def _replace(operation: str, faults: Sequence[Fault], watch: Watch) -> Callable[[], None]:
    """Puts the wrapper in its place; the returned function puts the original back."""
    owner, name = find_operation(operation)
    inherited = name not in vars(owner)
    original = inspect.getattr_static(owner, name)
    kind = type(original) if isinstance(original, staticmethod | classmethod) else None
    call = original.__func__ if kind else original

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        number = watch.count(operation)
        for fault in faults:
            if fault.at <= number < fault.at + fault.times:
                watch.struck = True
                return fault.strike(call, args, kwargs)
        return call(*args, **kwargs)

    setattr(owner, name, kind(wrapper) if kind else wrapper)
    return functools.partial(delattr, owner, name) if inherited else functools.partial(setattr, owner, name, original)


def find_operation(operation: str) -> tuple[Any, str]:
    """Finds the module or class that has the operation, and the operation's name in it."""
    module, colon, path = operation.partition(":")
    if not colon:
        raise ValueError(f"operation {operation!r}: expected 'module:qualified.name'")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    if not callable(getattr(owner, name)):
        raise TypeError(f"operation {operation!r} is not callable")
    return owner, name


def _first_half(operation: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments with the first buffer, or list of buffers, cut to half its bytes (rounded down)."""
    for index, arg in enumerate(args):
        buffers = arg if isinstance(arg, list | tuple) else [arg]
        try:
            views = [memoryview(buffer).cast("B") for buffer in buffers]
        except TypeError:
            continue
        left = sum(map(len, views)) // 2
        cut = []
        for view in views:
            cut.append(view[:left])
            left -= len(cut[-1])
        return (*args[:index], cut if isinstance(arg, list | tuple) else cut[0], *args[index + 1 :])
    raise TypeError(f"a call of {operation} has no bytes to cut short")
