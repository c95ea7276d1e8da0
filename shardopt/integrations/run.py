"""The checkpoints of a training run in a framework's loop: restored once, saved after steps, closed."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from shardopt.checkpoint import Manager, Preemption, Strictness, load
from shardopt.checkpoint.format.constants import FILE_NAME, MANIFEST_NAME
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.sources.referred import referred_in
from shardopt.checkpoint.storage import is_temporary, storage_of
from shardopt.errors import CheckpointError, Problem, StateError
from shardopt.ranks import ranks_of
from shardopt.runtime.staging_fence import wait_for_copies
from shardopt.state.containers import holds_tensors
from shardopt.state.values import decode_value, encode_value

App = Mapping[str, Any]
_ENCODED = "__encoded__"
_TRAINED = ("model", "models", "optimizer", "optimizers")
_log = logging.getLogger("shardopt")


class FrameworkState:
    """An entry of an app with one plain value: a framework's state beside model, optimizer and schedule.

    Args:
        value: what to save: plain values, and small tensors within them.
        check: gets a saved value before anything is loaded; raises MismatchError where it does not fit.

    Attributes:
        value: after a load, what was saved; else what was given.
    """

    def __init__(
        self, value: dict[str, Any] | None = None, check: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.value = value or {}
        self._check = check

    def state_dict(self) -> dict[str, Any]:
        """Returns the value; as text if it contains tensors, since its keys may change at every save."""
        if not holds_tensors(self.value):
            return self.value
        return {_ENCODED: json.dumps(encode_value(_on_cpu(self.value), "the framework's state"))}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises MismatchError if the framework cannot resume from the saved value."""
        if self._check is not None:
            self._check(_decoded(state_dict))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stores the saved value; changes nothing of the framework's."""
        self.value = _decoded(state_dict)


class TrainingRun:
    """A `checkpoint.Manager` that is made when training begins, and saves after steps.

    Args:
        root: of the run's checkpoints, as for `checkpoint.Manager`.
        every: as for `checkpoint.Manager`.
        start_from: the URL of a checkpoint of another program, from which a run without any checkpoint takes models
            and optimizers; what else is in it stays out. It is opened with the `storage_options` of `options`.
        stop_on: as for `checkpoint.Manager`: at which all ranks save the same step and exit; None for no signal.
        options: others of `checkpoint.Manager`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int | timedelta = 1,
        start_from: str | os.PathLike[str] | None = None,
        stop_on: signal.Signals | Iterable[signal.Signals] | Preemption | None = signal.SIGTERM,
        **options: Any,
    ) -> None:
        self._root, self._every = root, every
        self._stop_on = None if stop_on is None else stop_on if isinstance(stop_on, Preemption) else Preemption(stop_on)
        self._options, self._start_from = options, start_from
        self._manager: Manager | None = None
        self._last = self._final = self._at_root = 0
        self._handlers: dict[int, Any] = {}  # by signal

    @property
    def manager(self) -> Manager:
        """The Manager of the run.

        Raises:
            StateError: training has not begun.
        """
        if self._manager is None:
            problem = Problem("manager", "no training under way", "a run that has begun", "ask during training")
            raise StateError("there is no Manager yet", [problem], code="framework")
        return self._manager

    def begin(self, app: App) -> int:
        """Makes the Manager, and loads the newest checkpoint into `app`; returns its step, or 0. Collective."""
        self._final = self._at_root = 0
        self._manager = Manager(self._root, every=self._every, stop_on=self._stop_on, **self._options)
        if self._stop_on is not None:
            self._handlers = {each: signal.getsignal(each) for each in self._stop_on.all_signals}
        self._last = self._manager.restore(app)
        if self._manager.restored_step is None and self._start_from is not None:
            trained = {name: app[name] for name in _TRAINED if name in app}
            load(
                self._start_from,
                trained,
                init_state=True,
                strict=Strictness(unexpected="ignore"),
                storage_options=self._options.get("storage_options"),
            )
        return self._last

    def take_signal_back(self) -> None:
        """Listens to the signals again, if the framework has installed handlers of its own since `begin`."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def after_step(self, step: int, app: Callable[[], App]) -> None:
        """Saves if the step is due, or if the job is to stop. Collective; call it after every step.

        Args:
            step: the number of steps done; one that was given before is passed over.
            app: makes the app, where it is needed.

        Raises:
            SystemExit: the job was asked to stop, and has saved.
        """
        if step <= self._last:
            return
        every = self._every
        # A step may count for several, of which one is due.
        passed = not isinstance(every, timedelta) and step // every > self._last // every
        self._last, self._at_root = step, step if passed else self._at_root
        if self.manager.should_save(step) or passed:
            self.manager.save(step, app(), force=passed)

    def save_last(self, step: int, app: Callable[[], App]) -> None:
        """Saves the last step if it is not saved yet, and waits until it is copied. Collective."""
        if step > self._final:
            self._final = step
            self.manager.save(step, app(), force=step != self._at_root)
            wait_for_copies()  # a framework may change the weights from here on, such as to those of the best step

    def end(self, step: int, app: Callable[[], App]) -> None:
        """Saves the last step if it is not saved yet, and waits for all running writes. Collective."""
        self.save_last(step, app)
        self.manager.close()
        self._manager, self._handlers = None, {}

    def abort(self) -> None:
        """Closes after an error, with which the program ends. Does nothing if nothing is open."""
        manager, self._manager, self._handlers = self._manager, None, {}
        if manager is not None:
            manager.close()


@contextmanager
def removal_told(path: str | os.PathLike[str]) -> Iterator[None]:
    """Logs that what is left of a checkpoint stays, if its removal fails: no reason to end a training."""
    try:
        yield
    except (OSError, CheckpointError) as error:  # as in a Manager's retention
        remedy = "make it writable, or move it away"
        _log.warning("%s could not be removed, and stays: %s; %s [storage-failed]", path, error, remedy)


def replace_checkpoint(path: str, new: str) -> None:
    """Puts a checkpoint in the place of another, in a file system. Killed at any point, `path` has one of them whole.

    The data files go first, under names of their own; then the manifest replaces the other. A link is removed before
    the new one gets its name, so that a kill between the two leaves only `new`.
    """
    there, beside = storage_of(path), storage_of(new)
    if there.is_link():  # what it points at stays
        os.unlink(path)
        os.rename(new, path)
        return
    moved = [name for name in beside.names() if name != MANIFEST_NAME]
    for name in moved:
        os.replace(os.path.join(new, name), os.path.join(path, name))
    there.publish(MANIFEST_NAME, beside.read(MANIFEST_NAME))
    with removal_told(new):
        remove_checkpoint(beside)
    with removal_told(f"the former {path}"):
        for name in {*there.names()} - {*moved, *referred_in(there)}:
            if FILE_NAME.fullmatch(name) or is_temporary(name):
                there.remove(name)


def of_rank_0(what: str, value: dict[str, Any]) -> dict[str, Any]:
    """Returns rank 0's value, on every rank. Collective.

    Args:
        what: names the value in errors.
        value: plain values, and small tensors within them.

    Raises:
        StateError: there is something else in it, on rank 0.
    """
    ranks = ranks_of(None)
    _, wire = ranks.agree(
        f"taking {what} of rank 0",
        work=lambda: encode_value(_on_cpu(value), what) if ranks.rank == 0 else None,
        report=lambda encoded: encoded,
        decide=lambda reports: reports[0],
    )
    taken: dict[str, Any] = decode_value(wire)
    return taken


def _decoded(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    encoded = state_dict.get(_ENCODED)
    value: dict[str, Any] = dict(state_dict) if encoded is None else decode_value(json.loads(encoded))
    return value


def _on_cpu(value: Any) -> Any:
    """Returns nested plain values with tensors on the CPU, and dict subclasses as dicts."""
    if hasattr(value, "detach"):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _on_cpu(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_on_cpu(inner) for inner in value]
    return tuple(map(_on_cpu, value)) if type(value) is tuple else value
