"""Checks of numbers that ranks exchanged in a step; run once these are on the host, so that no step waits.

On an accelerator a step is taken before the host knows that it should not have been. The next step runs what has
arrived. Whoever is to keep state runs the rest before, as there the host waits anyhow:

    with taking_state() as checks:
        flat = flatten(app)                 # `state_dict` leaves its checks to `checks`
    ...
    checks.settle()                         # in any thread, before the state is written
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from shardopt.world import world


class _Check:
    """One check, with its numbers."""

    def __init__(self, owner: DeferredChecks, numbers: Tensor, verify: Callable[[Tensor], None]) -> None:
        self.owner, self._verify, self._device = owner, verify, numbers.device
        self._copied: Any = None
        if numbers.is_cpu:
            self._numbers = numbers.clone()
            return
        with self._on_device():  # of the numbers, which need not be the current one
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.get_device_module(self._device).Event()
            self._copied.record()

    def _on_device(self) -> Any:
        # Not every kind of device can be made the current one (of MPS there is one alone).
        return getattr(torch.get_device_module(self._device), "device", nullcontext)(self._device)

    def has_arrived(self) -> bool:
        """Whether the numbers are on the host. Does not wait."""
        return self._copied is None or bool(self._copied.query())

    def wait(self) -> None:
        """Waits until the numbers are on the host. May be called in any thread."""
        if self._copied is not None:
            with self._on_device():  # a new thread has device 0, for which a context would be made
                if not self._copied.query():
                    self._copied.synchronize()

    def run(self) -> None:
        """Runs the check; its owner, which no longer has it, notes what it raises."""
        error = None
        try:
            self._verify(self._numbers)
        except Exception as raised:
            error = raised
        self.owner.done(self, error)
        if error is not None:
            raise error


class DeferredChecks:
    """The pending checks of one optimizer. A copy has none.

    Attributes:
        failure: what a check has raised; state with such a step in it is not saved until a load replaces it.
    """

    def __init__(self) -> None:
        self._waiting: list[_Check] = []
        self.failure: Exception | None = None
        self._refused = False  # whether a step has raised it

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredChecks, ()

    @property
    def waiting(self) -> tuple[_Check, ...]:
        """The pending checks."""
        return tuple(self._waiting)

    def defer(self, numbers: Tensor, verify: Callable[[Tensor], None]) -> None:
        """Queues a check of numbers, to be run once they are on the host. Does not wait.

        Args:
            numbers: on any device; copied.
            verify: gets them on the CPU, and raises where something is wrong with them.
        """
        check = _Check(self, numbers, verify)
        with _lock:
            self._waiting.append(check)
            _with_waiting.add(self)

    def done(self, check: _Check, failure: Exception | None) -> None:
        """Drops a finished check, and notes what it raised, for saves and for the next step.

        In one go, so that another thread finds it either waiting or failed; and not where a load has dropped it since.
        Of several failures the first counts that no step has raised.
        """
        with _lock:
            if check not in self._waiting:
                return
            self._waiting.remove(check)
            if not self._waiting:
                _with_waiting.discard(self)
            if failure is not None and (self.failure is None or self._refused):
                # Without its traceback, whose frames keep what the failed step computed.
                self.failure, self._refused = copy(failure), False
                _failed.add(self)

    def run_ready(self) -> None:
        """Runs the checks whose numbers have arrived, before a step. Waits for nothing.

        Raises:
            Exception: as a check raises it, here or in a save since the last step; once.
        """
        for check in self.waiting:
            if not check.has_arrived():
                break
            with suppress(Exception):  # noted
                check.run()
        if self.failure is not None and not self._refused:
            self._refused = True
            raise copy(self.failure)

    def settle(self) -> None:
        """Runs all checks, once their numbers have arrived; within `taking_state` that is left to its caller.

        Raises:
            Exception: as a check raises it; no check runs twice.
        """
        taken = _taken.get()
        if taken is not None:
            taken.add(self)
            return
        _run(self.waiting)

    def discard(self) -> None:
        """Drops all checks, for example after a load, which has replaced what they are about."""
        for check in self.waiting:
            check.wait()  # the device still writes to its numbers
        with _lock:
            self._waiting.clear()
            self.failure, self._refused = None, False
            _with_waiting.discard(self)
            _failed.discard(self)


NO_CHECKS = DeferredChecks()
"""The checks of steps that leave nothing to check later."""


class StateChecks:
    """The checks that the process had pending when state was taken, and the failures of its optimizers."""

    def __init__(self) -> None:
        self._owners: list[DeferredChecks] = []
        self._waiting: list[_Check] = []
        self._failures: list[Exception] = []

    def add(self, owner: DeferredChecks) -> None:
        """Adds the checks of an optimizer whose state is taken."""
        self._owners.append(owner)

    def end(self) -> None:
        """Fixes the set of checks; those of later steps are not about this state.

        Of all optimizers: an app may have the parameters without the optimizer that has stepped them.
        """
        if any(owner not in self._owners for owner in tuple(_failed)):
            gc.collect()  # one that nobody has any more steps nothing
        with _lock:
            self._waiting = [check for owner in _with_waiting for check in owner.waiting]
            self._failures = [owner.failure for owner in _failed if owner.failure is not None]

    def settle(self) -> None:
        """Waits until the numbers are on the host, and raises the first failure. In any thread; local to the rank."""
        for failure in self._failures:
            raise copy(failure)
        _run(self._waiting)


def settle_checks() -> None:
    """Runs all pending checks of all optimizers in the process, once their numbers have arrived.

    Local to the rank.

    Raises:
        Exception: as a check raises it; no check runs twice.
    """
    _run([check for owner in tuple(_with_waiting) for check in owner.waiting])


@contextmanager
def taking_state() -> Iterator[StateChecks]:
    """Within this context, optimizers' `state_dict` does not settle checks; the yielded object collects them.

    So `state_dict`, which may be collective in another object, is called on all ranks where a check fails on some.
    """
    checks = StateChecks()
    before = _taken.set(checks)
    try:
        yield checks
    finally:
        _taken.reset(before)
    checks.end()


def _run(checks: Any) -> None:
    for check in checks:
        check.wait()
        check.run()


_lock = world().lock()
_with_waiting: set[DeferredChecks] = set()  # kept until they were run, though the optimizer is gone
_failed: WeakSet[DeferredChecks] = WeakSet()
_taken: ContextVar[StateChecks | None] = ContextVar("taken", default=None)
