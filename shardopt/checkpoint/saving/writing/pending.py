"""Pending saves: background saves as the program sees them, and the registry of unreported ones."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.checkpoint.reports import SaveReport
from shardopt.checkpoint.sources.own import tell_of_saves
from shardopt.errors import GradientError, PartialLoadError, RankError
from shardopt.redaction import redacted
from shardopt.runtime.deferred_checks import has_failed_steps
from shardopt.runtime.partial_loads import is_partly_loaded
from shardopt.runtime.program_end import fail_at_end_if
from shardopt.runtime.signals import refuse_within
from shardopt.runtime.staging_fence import Event
from shardopt.runtime.torch_private import running_hooks
from shardopt.sharding.view import addresses_of
from shardopt.state.state import FlatState
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


class PendingSave:
    """A save in the background, as `async_save` returns it.

    Args:
        url: where the checkpoint will be.

    Attributes:
        url: where the checkpoint will be.
        staged: is set when this rank's state was copied to host memory, and may be changed in any way. (Where it was
            to be copied lazily; otherwise it may be changed as soon as the call has returned: on an accelerator by what
            comes after the current stream of the call.)
        done: is set when the checkpoint is committed, or has failed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.staged = Event()
        self.done = Event()
        self.call_seconds = 0.0  # how long `async_save` took
        self._waited_seconds = 0.0  # by optimizers before their steps
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._reported = False
        self.optimizers: WeakSet[Optimizer] = WeakSet()  # that are saved
        self._parameters: list[ref[Tensor]] = []  # of these
        self._owners: list[ref[Any]] = []  # these; where there are none, the modules that are saved
        self.is_of_any = True  # whether nothing tells of which run this is: it saves no optimizer and no module
        self._replaced = False  # whether a load has replaced the state since

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint is committed, and returns the report of the save. Local.

        A failure that it raises counts as reported on this rank. If it was not reported on other ranks, the next
        collective call (`save`, `async_save`, or a `Manager`'s) raises it again, on all ranks.

        Args:
            timeout: in seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: it is not committed yet.
            CheckpointError: this thread is in the middle of a save, which a signal handler has interrupted.
            ShardoptError: the save has failed, with what `save` raises, the same on every rank.
        """
        if not self.done:
            refuse_within(f"waiting for the save of {self.url}")
        if not self.done.wait(timeout):
            raise TimeoutError(f"saving {redacted(self.url)} is still under way after {timeout:g} s")
        if self._error is not None:
            self._set_reported()
            raise self._error
        assert self._report is not None
        return replace(self._report, stall_seconds=self.call_seconds + self._waited_seconds)

    @property
    def failure(self) -> BaseException | None:
        """The error of the save, the same on all ranks, whether or not it was reported."""
        return self._error if self.done else None

    @property
    def is_reported(self) -> bool:
        """Whether the failure of the save was reported on this rank, or is one of a step that a load has replaced."""
        return self._reported or self._is_of_replaced_step

    @property
    def _is_of_replaced_step(self) -> bool:
        if isinstance(self.failure, PartialLoadError):
            return self._replaced and not any(map(is_partly_loaded, self.optimizers))
        return self._replaced and isinstance(self.failure, GradientError)

    def take_failure(self) -> BaseException | None:
        """Returns the failure of the save unless it was reported on this rank, and marks it. Does not wait."""
        if self.failure is None or self.is_reported:
            return None
        self._set_reported()
        return self.failure

    def hold(self, owner: Optimizer | Module) -> None:
        """Notes an object that is saved, by which later saves of the run are known, also where it has no element."""
        if isinstance(owner, Optimizer):
            self.optimizers.add(owner)
            self._parameters += map(ref, _parameters_of([owner]))
        self._owners.append(ref(owner))
        self.is_of_any = False

    def is_of(self, objects: AbstractSet[int], addresses: AbstractSet[int]) -> bool:
        """Whether this saves an object with one of these ids, or an optimizer of a parameter at an address. Local."""
        if any((owner := each()) is not None and id(owner) in objects for each in self._owners):
            return True
        alive = [each for parameter in self._parameters if (each := parameter()) is not None]
        return not addresses.isdisjoint(addresses_of(alive))

    def mark_reported(self) -> None:
        """Marks the failure as reported in advance, for a call that raises the same error itself."""
        self._reported = True
        if self.done:
            untrack(self)

    def mark_replaced(self) -> None:
        """Notes that a load has replaced the state: that a step of it had failed is logged, and not raised any more.

        Collective in effect, as the load: the save has failed, or will fail, on all ranks.
        """
        self._replaced = True
        if self.done:
            self._drop_failed_step()

    def _drop_failed_step(self) -> None:
        if self._is_of_replaced_step and not self._reported:
            self._set_reported()
            _log.warning("a load has replaced the state whose save failed: %s", self._error)

    def raise_failure(self) -> None:
        """Raises the failure of the save, unless it was reported on this rank. Local."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def exit_message(self) -> str:
        """Returns the line for stderr if the program ends before this save was reported."""
        if self._error is not None:
            return f"the program ended before it was reported that saving {redacted(self.url)} failed: {self._error}"
        end = "was committed all the same" if self._report is not None else "was given up"
        return (
            f"the program ended while saving {redacted(self.url)} was under way, which {end}; "
            "call result() of what async_save returns, or close the Manager, before the end"
        )

    def succeed(self, report: SaveReport) -> None:
        """Ends a committed save. Called by the thread that saves."""
        self._report = report
        self._end()

    def fail(self, error: BaseException) -> None:
        """Ends a failed save, which has no checkpoint. Called by the thread that saves."""
        self._error = error
        self._end()

    def abandon_in_child(self) -> None:
        """Ends the save in a forked child, which has no thread to continue it."""
        self._reported, where = True, "in the process that this one was forked from"
        self._error = RankError(f"saving {self.url} continues {where}", code="save-in-flight")
        self.staged.set_in_child()
        self.done.set_in_child()

    def _end(self) -> None:
        if self._error is None and world().main_thread_lives():
            untrack(self)
        self.staged.set()
        self.done.set()
        if self._reported:  # read after `done` is set, as `mark_reported` reads `done` after it has set this
            untrack(self)
        elif self._replaced:
            self._drop_failed_step()

    def _set_reported(self) -> None:
        self._reported = True
        untrack(self)

    def before_step(self, *unused: Any) -> None:
        """Waits for the copy, and raises a failed save's error: the step-pre-hook of optimizers being saved.

        Local: where threads end at different times, ranks raise before different steps. A step that had failed is not
        raised here where the optimizer knows of it, which raises it in the same step on all ranks.
        """
        if not self.staged:
            begin = world().monotonic()
            self.staged.wait()
            self._waited_seconds += world().monotonic() - begin
        if not (isinstance(self.failure, GradientError) and has_failed_steps()):
            self.raise_failure()


def hold_steps(
    optimizers: Sequence[Optimizer], modules: Iterable[Module], pending: PendingSave, hooks: list[RemovableHandle]
) -> None:
    """Delays the steps of optimizers until the tensors that they change are copied.

    Args:
        modules: by which the run is known where there are no optimizers.
        hooks: the handles are appended to it, even where a later optimizer refuses the hook. Removing them ends it.
    """
    for optimizer in optimizers:
        pending.hold(optimizer)
        hooks.append(running_hooks(optimizer).register_step_pre_hook(pending.before_step))
    for module in () if optimizers else modules:
        pending.hold(module)


_tracked: list[PendingSave] = []
"""The saves that were not reported to the program yet."""


def track(save: PendingSave) -> None:
    """Adds a save, which whoever calls ends from now on, whatever interrupts: else the program ends with an error."""
    _tracked.append(save)


def untrack(save: PendingSave) -> None:
    """Removes a save whose end was reported to the program, or need not be."""
    with suppress(ValueError):  # two threads may do so
        _tracked.remove(save)


def tracked_urls() -> list[str]:
    """Returns the URLs at which saves of this process may still be writing."""
    return [save.url for save in tuple(_tracked)]


def _urls_in_flight() -> list[str]:
    return [save.url for save in tuple(_tracked) if not save.done]


def finish_below(urls: Iterable[str]) -> None:
    """Waits until no save of this process is in flight below these URLs, whoever began it. Local."""
    tracked = tuple(_tracked)
    below = tuple(f"{_without_links(url).rstrip('/')}/" for url in urls) if tracked else ()
    for save in tracked:
        if _without_links(save.url).startswith(below):
            save.done.wait()


def _without_links(url: str) -> str:
    return url if "://" in url else os.path.realpath(url)


def take_failures() -> list[BaseException]:
    """Returns the failures of background saves that were not reported on this rank, once. Local.

    Who waits for one of these saves still gets its failure: it may belong to another run of this process.
    """
    failed = [save for save in tuple(_tracked) if save.failure is not None and not save.is_reported]
    for save in failed:
        untrack(save)
    return [save.failure for save in failed if save.failure is not None]


def drop_failed_steps() -> None:
    """Has saves that were begun before raise no failed step any more, as a load has replaced it. Local."""
    for save in tuple(_tracked):
        save.mark_replaced()


def raise_failures(flat: FlatState) -> None:
    """Raises the first failure that was not reported of a save of this state; leaves the others for the next call.

    That of others is left to them: several runs of one process, as of a sweep, do not fail each other. That of a save
    without optimizers and modules may be of any run. It is raised here once, and also by who waits for that save.
    Local: called within a round, so that all ranks raise.
    """
    failed = [save for save in tuple(_tracked) if save.failure is not None and not save.is_reported]
    if not failed:
        return
    objects = {id(each.object) for each in flat.targets}
    optimizers = [each.object for each in flat.targets if isinstance(each.object, Optimizer)]
    addresses = addresses_of([*flat.tensors().values(), *_parameters_of(optimizers)]) - {0}
    for save in failed:
        if save.is_of_any:
            untrack(save)
            assert save.failure is not None
            raise save.failure
        if save.is_of(objects, addresses):
            save.raise_failure()


def _parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def _fails_at_end() -> bool:
    """Whether a save has not ended, or its failure was not reported: then it says so."""
    for save in _tracked:
        with suppress(OSError, ValueError):  # of a stderr that cannot be written
            print(f"shardopt: {save.exit_message()}", file=sys.stderr, flush=True)
    return bool(_tracked)


def _abandon_in_child() -> None:
    # A forked child has none of the threads that save.
    for save in _tracked:
        save.abandon_in_child()
    _tracked.clear()


fail_at_end_if(_fails_at_end)
tell_of_saves(_urls_in_flight)
os.register_at_fork(after_in_child=_abandon_in_child)
