"""Checks of numbers that ranks exchanged in a step; run once these are on the host, so that no step waits.

On an accelerator a step is taken before the host knows that it should not have been. Step k + 2 runs the checks of step
k, on all ranks: by then their numbers have arrived, and no rank raises a step before another. Whoever is to keep state
runs the rest before, as there the host waits anyhow:

    with taking_state() as checks:
        flat = flatten(app)                 # `state_dict` leaves its checks to `checks`
    ...
    checks.settle()                         # in any thread, before the state is written

What a check has raised counts until a load has replaced all that the step has changed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from shardopt.world import world

_STEPS_UNTIL_RUN = 2  # in the step right after the host would wait for the device


class Parameters(Protocol):
    """Parameters as they were after a step."""

    def are_replaced(self) -> bool:
        """Whether all of them have other values since, which no step has given them."""


class _Check:
    """One check, with its numbers.

    Args:
        step: of its owner, in which it was deferred.
    """

    def __init__(self, owner: DeferredChecks, step: int, numbers: Tensor, verify: Callable[[Tensor], None]) -> None:
        self.owner, self.step, self._verify, self._device = owner, step, verify, numbers.device
        self._copied: Any = None
        if numbers.is_cpu:
            self._numbers = numbers.clone()
            return
        with self._on_device():  # of the numbers, which need not be the current one
            self._numbers = empty_pinned(numbers)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.get_device_module(self._device).Event()
            self._copied.record()

    def _on_device(self) -> Any:
        # Not every kind of device can be made the current one (of MPS there is one alone).
        return getattr(torch.get_device_module(self._device), "device", nullcontext)(self._device)

    def wait(self) -> None:
        """Waits until the numbers are on the host. May be called in any thread."""
        if self._copied is not None:
            with self._on_device():  # a new thread has device 0, for which a context would be made
                if not self._copied.query():
                    self._copied.synchronize()

    def run(self) -> None:
        """Waits, and runs the check; its owner, which no longer has it, notes what it raises."""
        self.wait()
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
        failure: what a check has raised; state with such a step in it is not saved until loads have replaced it.
    """

    def __init__(self) -> None:
        self._step = 0
        self._waiting: list[_Check] = []
        self.failure: Exception | None = None
        self._to_raise: dict[int, Exception] = {}  # by the step that has failed, as far as no step has raised it
        self._stepped: Parameters | None = None  # by the last step
        self._state_is_replaced = False  # since a step has failed, but not its parameters

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
        check = _Check(self, self._step, numbers, verify)
        with _lock:
            self._waiting.append(check)
            _with_waiting.add(self)

    def done(self, check: _Check, failure: Exception | None) -> None:
        """Drops a finished check, and notes what it raised, for saves and for a later step.

        In one go, so that another thread finds it either waiting or failed; and not where a load has dropped it since.
        """
        with _lock:
            if check not in self._waiting:
                return
            self._waiting.remove(check)
            if not self._waiting:
                _with_waiting.discard(self)
            if failure is not None:
                # Without its traceback, whose frames keep what the failed step computed.
                self._to_raise.setdefault(check.step, copy(failure))
                self.failure = self.failure or copy(failure)
                _failed.add(self)

    def begin_step(self) -> None:
        """Begins a step: runs the checks of the step before the last one. Waits for no later step.

        Raises:
            Exception: as a check of that step raises it, here or in a save before; once, in the same step on all ranks.
        """
        self._step += 1
        due = self._step - _STEPS_UNTIL_RUN
        _run_all(check for check in self.waiting if check.step <= due)
        if self.failure is None:
            return
        self._drop_if_replaced()
        with _lock:
            failures = [self._to_raise.pop(step) for step in sorted(self._to_raise) if step <= due]
        for failure in failures:
            raise failure

    def end_step(self, stepped: Callable[[], Parameters]) -> None:
        """Ends a step, whether it has failed or not.

        Args:
            stepped: gives the parameters that it may have changed; not asked where nothing is checked later.
        """
        if self._waiting or self.failure is not None:
            self._stepped, self._state_is_replaced = stepped(), False

    def settle(self) -> None:
        """Runs all checks, once their numbers have arrived; while anyone takes state it is left to that.

        Raises:
            Exception: as a check of a step has raised it that no load has replaced; each time.
        """
        taking = tuple(_taking)
        for each in taking:
            each.owners.append(self)
        if not taking:
            _run_all(self.waiting)
            self._drop_if_replaced()
            if self.failure is not None:
                raise copy(self.failure)

    def state_is_loaded(self) -> None:
        """Drops all checks and failures, as a load has replaced the state that they are about.

        Where it has not replaced the parameters of the last step, checks are run, and failures stay until these are
        replaced too: they have the update that should not have been made.
        """
        if self._has_other_parameters():
            for check in self.waiting:
                check.wait()  # the device still writes to its numbers
            self._drop()
            return
        _run_all(self.waiting)
        self._state_is_replaced = True

    def _has_other_parameters(self) -> bool:
        return self._stepped is None or self._stepped.are_replaced()

    def _drop_if_replaced(self) -> None:
        if self.failure is not None and self._state_is_replaced and self._has_other_parameters():
            self._drop()

    def _drop(self) -> None:
        with _lock:
            self._waiting.clear()
            self._to_raise.clear()
            self.failure, self._stepped, self._state_is_replaced = None, None, False
            _with_waiting.discard(self)
            _failed.discard(self)


@dataclass(slots=True, eq=False)
class StateChecks:
    """The checks that the process had pending when state was taken, and the failures of its optimizers.

    Args:
        owners: the checks of the optimizers whose state is taken.
    """

    owners: list[DeferredChecks] = field(default_factory=list)
    _waiting: list[_Check] = field(default_factory=list)
    _failures: list[Exception] = field(default_factory=list)

    def settle(self) -> None:
        """Waits until the numbers are on the host, and raises the first failure. In any thread; local to the rank."""
        failures = list(self._failures)
        for check in self._waiting:  # all of them: what has none that wait is forgotten with its optimizer
            try:
                check.run()
            except Exception as error:
                failures.append(error)
        for failure in failures:
            raise copy(failure)


def settle_checks() -> None:
    """Runs all pending checks of all optimizers in the process, once their numbers have arrived.

    Local to the rank.

    Raises:
        Exception: as a check raises it; no check runs twice.
    """
    for check in [check for owner in tuple(_with_waiting) for check in owner.waiting]:
        check.run()


def has_failed_steps() -> bool:
    """Whether a step of the process is known to have failed, and no load has replaced what it has changed. Local."""
    return any(owner.failure is not None for owner in _with_failures())


def failed_steps_remain() -> bool:
    """Whether a step of the process has failed, and no load has replaced what it has changed.

    Runs the checks of all optimizers before, once their numbers have arrived. Local to the rank.
    """
    if _with_waiting:
        _run_all([check for owner in tuple(_with_waiting) for check in owner.waiting])
    return bool(_failed) and bool(_failures())


@contextmanager
def taking_state() -> Iterator[StateChecks]:
    """Within this context, optimizers' `state_dict` does not settle checks; the yielded object collects them.

    So `state_dict`, which may be collective in another object, is called on all ranks where a check fails on some. It
    holds in all threads, as an app may ask its optimizers in threads of its own. So a `state_dict` that another thread
    calls meanwhile does not raise either: what takes the state does.
    """
    checks = StateChecks()
    _taking.append(checks)
    try:
        yield checks
    finally:
        _taking.remove(checks)
    # Of all optimizers: an app may have the parameters without the optimizer that has stepped them. Checks of later
    # steps are not about this state.
    if _failed:
        checks._failures = _failures(checks.owners)
    with _lock:
        checks._waiting = [check for owner in _with_waiting for check in owner.waiting]


def is_taking_state() -> bool:
    """Whether `taking_state` is open, in any thread."""
    return bool(_taking)


def empty_pinned(like: Tensor) -> Tensor:
    """Returns memory of the host for a copy of a tensor: pinned, or plain where it cannot be pinned."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _run_all(checks: Iterable[_Check]) -> None:
    """Runs checks; what they raise is noted."""
    for check in checks:
        with suppress(Exception):
            check.run()


def _failures(owners: Iterable[DeferredChecks] = ()) -> list[Exception]:
    """Returns the failures of all optimizers that loads have not replaced.

    Args:
        owners: those that are known to be in use.
    """
    _drop_what_is_replaced()
    if any(owner not in owners for owner in _with_failures()):
        gc.collect()  # one that nobody has any more steps nothing
    with _lock:
        return [owner.failure for owner in _failed if owner.failure is not None]


def _drop_what_is_replaced() -> None:
    # Apart from the collection of garbage, which would find the last owner in this frame.
    for owner in _with_failures():
        owner._drop_if_replaced()


def _with_failures() -> tuple[DeferredChecks, ...]:
    with _lock:  # other threads add to it
        return tuple(_failed)


_lock = world().lock()
_with_waiting: set[DeferredChecks] = set()  # kept until they were run, though the optimizer is gone
_failed: WeakSet[DeferredChecks] = WeakSet()
_taking: list[StateChecks] = []  # of all threads


def _forget_in_child() -> None:
    """Forgets the threads that take state, which a forked child does not have; one may have held the lock."""
    global _lock
    _lock = world().lock()
    _taking.clear()


os.register_at_fork(after_in_child=_forget_in_child)
