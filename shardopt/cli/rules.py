"""The rules of retention as the command line has them, which `ls` shows and `prune` carries out."""

from __future__ import annotations

from shardopt.checkpoint.run.options import check_rules
from shardopt.checkpoint.run.retention import Rules
from shardopt.errors import OptionError, Problem


def parse_rules(keep_last: int | None, keep_every: int | None, best: str | None) -> Rules:
    """Returns the rules that options stand for, as those of `Manager`. Raises OptionError."""
    if keep_last is None and (keep_every is not None or best is not None):
        remedy = "without it all are kept, whatever the other rules"
        raise OptionError("rules that say nothing", [Problem("--keep-last", "nothing", "a number", remedy)])
    return check_rules(keep_last, keep_every, None if best is None else _parse_best(best))


def _parse_best(text: str) -> tuple[str, str, int]:
    metric, mode, n = (*text.rsplit(":", 2), "", "")[:3]
    if not (metric and mode in ("min", "max") and n.isascii() and n.isdigit() and int(n) >= 1):
        problem = Problem("--best", repr(text), "METRIC:min:N or METRIC:max:N", "give it as in --best loss:min:2")
        raise OptionError("arguments that cannot be meant", [problem])
    return metric, mode, int(n)
