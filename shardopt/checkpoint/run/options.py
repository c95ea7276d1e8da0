"""Checks the arguments of a `Manager`, all at once, and names each bad one. Has `Preemption`, one of them."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from shardopt.checkpoint.arguments import choice_problem, count_problem, is_count, optional_count_problem, refuse
from shardopt.checkpoint.run.export import Export
from shardopt.checkpoint.saving.options import SaveOptions
from shardopt.checkpoint.storage import is_in_archive, storage_of
from shardopt.errors import Problem
from shardopt.world import world

_REMEDY = "pass it as in stop_on=signal.SIGTERM"


def check_run_options(
    root: Any, mirror: tuple[str, Any] | None, export: Any, every: Any, stage: Any, stops: bool, options: Any
) -> None:
    """Checks those arguments of the constructor that do not check themselves. Raises OptionError.

    Args:
        mirror: the name of that argument, and its URL.
        export: an `Export`, or None.
        stops: whether there are signals to listen for.
        options: of saves, a `SaveOptions`.
    """
    places = [("root", root), *(() if mirror is None else (mirror,))]
    problems = []
    if isinstance(export, Export):
        places.append(("export.url", export.url))
    elif export is not None:
        problems.append(Problem("export", repr(export), "an Export", "give it as in Export(url)"))
    problems += _place_problems(places)
    if not is_count(every, 1) and not (isinstance(every, timedelta) and every > timedelta(0)):
        required = "at least 1, as an int, or a timedelta of more than 0"
        problems.append(Problem("every", repr(every), required, "give a number of steps, or a time"))
    problems += choice_problem("stage", stage, (None, "now", "lazy"))
    if stops and not world().in_main_thread():
        thread = f"a Manager that is made in the thread {world().current_thread().name!r}"
        listens = "the main thread: only it can listen for signals"
        problems.append(Problem("stop_on", thread, listens, "make it there"))
    if not isinstance(options, SaveOptions):
        problems.append(Problem("options", repr(options), "a SaveOptions", "give it as in SaveOptions(durable=False)"))
    refuse(problems)


def check_step(step: Any) -> None:
    """Checks the step of a save. Raises OptionError."""
    refuse(count_problem("step", step, 0))


def check_restore_options(step: Any, branch: Any, newer: Any) -> None:
    """Checks the arguments with which a restore rewinds a run. Raises OptionError."""
    refuse(
        [
            *optional_count_problem("step", step, 0),
            *optional_count_problem("branch", branch, 0),
            *choice_problem("newer", newer, ("abandon", "remove")),
        ]
    )


def _is_no_directory(path: str) -> bool:
    """Whether something other than a directory is there. Failing disks are left to the first round, for all ranks."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return os.path.islink(path)
    except OSError:
        return False


def _place_problems(places: Iterable[tuple[str, Any]]) -> list[Problem]:
    """Returns the problems with the places that a run writes to, by argument: each needs one of its own."""
    problems = []
    taken: dict[str, str] = {}
    for name, path in places:
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
            problems.append(Problem(name, repr(path), "a path or a URL", "give where the checkpoints are to be"))
            continue
        if is_in_archive(path):
            found = f"{os.fspath(path)}, in an archive, which cannot be written"
            problems.append(Problem(name, found, "a place to save to", "unpack it, or load from it by URL"))
            continue
        storage = storage_of(path)
        url = storage.url if storage.is_remote else os.path.realpath(storage.url)
        if not storage.is_remote and _is_no_directory(storage.url):
            problems.append(Problem(name, f"{storage.url}, which is no directory", "a directory", "give another path"))
        if (other := taken.setdefault(url, name)) != name:
            found = f"{url}, which is {'the root' if other == 'root' else other} too"
            problems.append(Problem(name, found, "another place", "give it a place of its own"))
    return problems


@dataclass(frozen=True)
class Preemption:
    """The signals that tell a job to stop, and how its processes end; for `Manager(stop_on=)`.

    Args:
        signals: one, or several: SIGTERM of most launchers, SIGUSR1 where Slurm is asked for it (`--signal=USR1@60`),
            SIGINT of the terminal (Ctrl-C).
        exit_code: of processes that have left. None is 128 plus the number of the signal, as in shells (on a rank that
            got no signal, of the first). Where torchrun is to start the job again it must not be 0.
        seconds: within which a process that got a signal ends, saved or not. Rank 0 logs a warning, once, if the save
            that the run is restored from, or a later one, took more than half of it.

    Raises:
        OptionError: an argument is none; all of them are listed.
    """

    signals: signal.Signals | Iterable[signal.Signals] = signal.SIGTERM
    exit_code: int | None = None
    seconds: float = 25.0

    def __post_init__(self) -> None:
        signals, problems = _signals_of(self.signals)
        seconds = self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            problems.append(Problem("seconds", repr(seconds), "more than 0 seconds", "give a number"))
        if self.exit_code is not None and not (is_count(self.exit_code, 0) and self.exit_code <= 255):
            found = repr(self.exit_code)
            problems.append(Problem("exit_code", found, "0 to 255, or None", "give what the launcher looks for"))
        refuse(problems)
        object.__setattr__(self, "signals", signals)

    @property
    def all_signals(self) -> tuple[signal.Signals, ...]:
        """The signals, each once, in the given order."""
        return self.signals if isinstance(self.signals, tuple) else (self.signals,)


def _signals_of(signals: Any) -> tuple[tuple[signal.Signals, ...], list[Problem]]:
    several = isinstance(signals, Iterable) and not isinstance(signals, str)
    given = [*signals] if several else [signals]
    problems = [] if given else [Problem("stop_on", "no signal", "a signal", _REMEDY)]
    found = []
    for each in given:
        try:
            if isinstance(each, bool) or not isinstance(each, int):
                raise ValueError(each)
            found.append(signal.Signals(each))
        except ValueError:
            problems.append(Problem("stop_on", repr(each), "a signal", _REMEDY))
    for each in found:
        if each in (signal.SIGKILL, signal.SIGSTOP):
            problems.append(Problem("stop_on", repr(each), "a signal that a process can handle", _REMEDY))
    return tuple(dict.fromkeys(found)), problems
