"""Parses rules from the command line: retention, for `ls` and `prune`, and renaming."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from shardopt.checkpoint.run.retention import Mode, Retention
from shardopt.errors import OptionError, Problem

_FLAGS = {"last": "--keep-last", "every": "--keep-every", "seconds": "--keep-seconds"}
"""Argument of `Retention` → its flag."""


def parse_rules(
    keep_last: int | None,
    keep_every: int | None,
    best: str | None,
    keep_seconds: float | None,
    required: bool = False,
) -> Retention:
    """Returns the retention rules that options ask for, as for `Manager`.

    Args:
        required: whether rules that keep all are refused; they are refused in any case if others were given.

    Raises:
        OptionError: an option is none, or there is no rule.
    """
    if keep_last is None and keep_seconds is None and (required or keep_every is not None or best is not None):
        remedy = "without one of them all are kept, whatever the other rules"
        problem = Problem("--keep-last, --keep-seconds", "neither", "one of them", remedy)
        raise OptionError("no rule was given", [problem])
    try:
        return Retention(keep_last, keep_every, None if best is None else _parse_best(best), keep_seconds)
    except OptionError as error:
        error.problems = tuple(replace(each, key=_FLAGS.get(each.key, each.key)) for each in error.problems)
        raise


def _parse_best(text: str) -> tuple[str, Mode, int]:
    metric, mode, n = (*text.rsplit(":", 2), "", "")[:3]
    if not (metric and mode in ("min", "max") and n.isascii() and n.isdigit() and int(n) >= 1):
        problem = Problem("--best", repr(text), "METRIC:min:N or METRIC:max:N", "give it as in --best loss:min:2")
        raise OptionError("invalid arguments", [problem])
    return metric, "min" if mode == "min" else "max", int(n)


def parse_rename(rename: Sequence[str]) -> dict[str, str]:
    """Returns regex → replacement from options "PATTERN=INTO", in their order. Raises OptionError."""
    rules: dict[str, str] = {}
    for each in rename:
        pattern, equals, into = each.rpartition("=")  # of a pattern's own there may be some: (?=…)
        try:
            re.compile(pattern).sub(into, "")
            wrong = "" if equals and pattern else "no PATTERN=INTO"
        except (re.error, IndexError) as error:
            wrong = str(error)
        if wrong:
            problem = Problem("--rename", repr(each), "PATTERN=INTO, with a regular expression", wrong)
            raise OptionError("invalid arguments", [problem])
        rules[pattern] = into
    return rules
