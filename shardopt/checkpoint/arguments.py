"""Checks arguments that are counts and choices; reports all invalid arguments of a call in one error."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from shardopt.errors import OptionError, Problem


def is_count(value: Any, least: int) -> bool:
    """Whether a value is an int of at least `least`; True and False are not."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def refuse(problems: Iterable[Problem]) -> None:
    """Raises OptionError if there are problems."""
    problems = list(problems)
    if problems:
        raise OptionError("invalid arguments", problems)


def count_problem(name: str, value: Any, least: int) -> list[Problem]:
    """Returns the problem with a number of steps or checkpoints, if any."""
    if is_count(value, least):
        return []
    return [Problem(name, repr(value), f"at least {least}, as an int", "give a number of steps or checkpoints")]


def optional_count_problem(name: str, value: Any, least: int) -> list[Problem]:
    """Like `count_problem`, for a number that may be None."""
    return [] if value is None else count_problem(name, value, least)


def choice_problem(name: str, value: Any, choices: Sequence[Any]) -> list[Problem]:
    """Returns the problem with a choice between a few values, if any."""
    if any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        return []
    return [Problem(name, repr(value), f"one of {', '.join(map(repr, choices))}", "pass one of them")]
