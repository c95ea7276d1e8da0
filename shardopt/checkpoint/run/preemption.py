"""Preemption: the signals at which a job stops, and how its processes end."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardopt.checkpoint.run.options import is_count, refuse, seconds_problem
from shardopt.errors import Problem

_REMEDY = "pass it as in stop_on=signal.SIGTERM"


@dataclass(frozen=True)
class Preemption:
    """The signals by which a job is told to stop, and how its processes end, for `Manager(stop_on=)`.

    Args:
        signals: one, or several: SIGTERM of most launchers, SIGUSR1 where Slurm is asked for it (`--signal=USR1@60`),
            SIGINT of the terminal (Ctrl-C).
        exit_code: of processes that have left; None is 128 and the number of the signal, as shells have it (on a rank
            that got none, of the first). Where torchrun is to start the job again it must not be 0.
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
        problems += seconds_problem("seconds", self.seconds)
        if self.exit_code is not None and not (is_count(self.exit_code, 0) and self.exit_code <= 255):
            found = repr(self.exit_code)
            problems.append(Problem("exit_code", found, "0 to 255, or None", "give what the launcher looks for"))
        refuse(problems)
        object.__setattr__(self, "signals", signals)

    @property
    def all_signals(self) -> tuple[signal.Signals, ...]:
        """The signals, each once, in the order in which they were given."""
        return self.signals if isinstance(self.signals, tuple) else (self.signals,)


def preemption_of(stop_on: Any) -> Preemption | None:
    """Returns what `stop_on=` of a `Manager` stands for: signals, or a `Preemption`. Raises OptionError."""
    return stop_on if stop_on is None or isinstance(stop_on, Preemption) else Preemption(stop_on)


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
