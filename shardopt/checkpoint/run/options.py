"""Checks the arguments of a `Manager`: each by name, all of them at once."""

from __future__ import annotations

import math
import operator
import os
import signal
import stat
from collections.abc import Iterable, Sequence
from typing import Any, cast

from shardopt.checkpoint.run.retention import Best, Mode, Rules
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import OptionError, Problem
from shardopt.world import world


def check_run_options(
    root: Any,
    mirror: Any,
    every: Any,
    keep_last: Any,
    keep_every: Any,
    best: Any,
    stage: Any,
    stop_on: Any,
    exit_code: Any,
    stop_seconds: Any,
    deadline_seconds: Any,
) -> None:
    """Checks the arguments of the constructor. Raises OptionError."""
    _refuse(
        [
            *_root_problems(root, mirror),
            *_count_problem("every", every, 1),
            *_rules_problems(keep_last, keep_every, best),
            *_choice_problem("stage", stage, (None, "now", "lazy")),
            *_stop_problems(stop_on, exit_code, stop_seconds),
            *_seconds_problem("deadline_seconds", deadline_seconds),
        ]
    )


def check_rules(keep_last: Any, keep_every: Any, best: Any) -> Rules:
    """Checks the rules of retention, and returns them. Raises OptionError."""
    _refuse(_rules_problems(keep_last, keep_every, best))
    return rules_of(keep_last, keep_every, best)


def _rules_problems(keep_last: Any, keep_every: Any, best: Any) -> list[Problem]:
    """Returns the problems of the rules of retention."""
    return [
        *_optional_count_problem("keep_last", keep_last, 1),
        *_optional_count_problem("keep_every", keep_every, 1),
        *_best_problem(best),
    ]


def check_step(step: Any) -> None:
    """Checks the step of a save. Raises OptionError."""
    _refuse(_count_problem("step", step, 0))


def check_restore_options(step: Any, branch: Any, beyond: Any) -> None:
    """Checks the arguments by which a restore takes a run back. Raises OptionError."""
    _refuse(
        [
            *_optional_count_problem("step", step, 0),
            *_optional_count_problem("branch", branch, 0),
            *_choice_problem("beyond", beyond, ("set_aside", "remove")),
        ]
    )


def refuse_unknown_branch(branch: int, current: int) -> None:
    """Raises OptionError for a branch that a run does not have."""
    if branch > current:
        remedy = "see set_aside() for those that there are"
        _refuse([Problem("branch", f"branch {branch}", f"one from 0 to {current}", remedy)])


def rules_of(keep_last: int | None, keep_every: int | None, best: Sequence[Any] | None) -> Rules:
    """Returns the rules of retention that checked arguments stand for."""
    last, multiples = (None if number is None else int(number) for number in (keep_last, keep_every))
    return Rules(last, multiples, None if best is None else Best(best[0], cast(Mode, best[1]), int(best[2])))


def signal_of(stop_on: Any) -> signal.Signals | None:
    """Returns the signal that `stop_on=` names. Raises ValueError if it is none."""
    if stop_on is None:
        return None
    if isinstance(stop_on, bool) or not isinstance(stop_on, int):
        raise ValueError(stop_on)
    return signal.Signals(stop_on)


def _is_count(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least so much; True and False are none."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def _refuse(problems: Iterable[Problem]) -> None:
    """Raises OptionError if there are any."""
    problems = list(problems)
    if problems:
        raise OptionError("arguments that cannot be meant", problems)


def _count_problem(name: str, value: Any, least: int) -> list[Problem]:
    """Returns the problem of a number of steps or checkpoints, if there is one."""
    if _is_count(value, least):
        return []
    return [Problem(name, repr(value), f"at least {least}, as an int", "give a number of steps or checkpoints")]


def _optional_count_problem(name: str, value: Any, least: int) -> list[Problem]:
    """Returns the same of a number that may be None."""
    return [] if value is None else _count_problem(name, value, least)


def _seconds_problem(name: str, value: Any) -> list[Problem]:
    """Returns the problem of a length of time, if there is one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value > 0 and not math.isnan(value):
        return []
    return [Problem(name, repr(value), "more than 0 seconds", "give a number")]


def _choice_problem(name: str, value: Any, choices: Sequence[Any]) -> list[Problem]:
    """Returns the problem of a choice between a few values, if there is one."""
    if any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        return []
    return [Problem(name, repr(value), f"one of {', '.join(map(repr, choices))}", "pass one of them")]


def _best_problem(best: Any) -> list[Problem]:
    """Returns the problem of `best=`, if there is one."""
    if best is None:
        return []
    if isinstance(best, Sequence) and not isinstance(best, str) and len(best) == 3:
        metric, mode, n = best
        if isinstance(metric, str) and mode in ("min", "max") and _is_count(n, 1):
            return []
    required = '(a metric, "min" or "max", how many: at least 1)'
    return [Problem("best", repr(best), required, 'give it as in best=("loss", "min", 2)')]


def _stop_problems(stop_on: Any, exit_code: Any, stop_seconds: Any) -> list[Problem]:
    """Returns the problems of the arguments about a signal."""
    problems = _seconds_problem("stop_seconds", stop_seconds)
    if exit_code is not None and not (_is_count(exit_code, 0) and exit_code <= 255):
        problems.append(Problem("exit_code", repr(exit_code), "0 to 255, or None", "give what the launcher looks for"))
    try:
        stop_signal = signal_of(stop_on)
    except ValueError:
        problems.append(Problem("stop_on", repr(stop_on), "a signal", "pass it as in stop_on=signal.SIGTERM"))
        return problems
    if stop_signal in (signal.SIGKILL, signal.SIGSTOP):
        required = "a signal that a process can handle"
        problems.append(Problem("stop_on", repr(stop_on), required, "pass it as in stop_on=signal.SIGTERM"))
    elif stop_signal is not None and not world().in_main_thread():
        thread = f"a Manager that is made in the thread {world().current_thread().name!r}"
        required = "the main thread, which alone can listen for signals"
        problems.append(Problem("stop_on", thread, required, "make it there"))
    return problems


def _is_no_directory(path: str) -> bool:
    """Whether something else stands there. Of a disk that fails the first round tells, and so on all ranks."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return os.path.islink(path)
    except OSError:
        return False


def _root_problems(root: Any, mirror: Any) -> list[Problem]:
    """Returns the problems of the two roots."""
    problems = []
    urls = {}
    for name, path in (("root", root), ("mirror", mirror)):
        if path is None and name == "mirror":
            continue
        if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
            problems.append(Problem(name, repr(path), "a path or a URL", "give where the checkpoints are to be"))
            continue
        storage = storage_of(path)
        urls[name] = storage.url if storage.is_remote else os.path.realpath(storage.url)
        if not storage.is_remote and _is_no_directory(storage.url):
            problems.append(Problem(name, f"{storage.url}, which is no directory", "a directory", "give another path"))
    if len(urls) == 2 and urls["root"] == urls["mirror"]:
        remedy = "give the copies a place of their own"
        problems.append(Problem("mirror", f"{urls['mirror']}, which is the root too", "another place", remedy))
    return problems
