"""What retention keeps over a run: how many checkpoints at its end, and their bytes. Pure; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardopt.checkpoint.arguments import count_problem, refuse
from shardopt.checkpoint.run.retention import Best, Retention, reasons_to_keep
from shardopt.errors import Problem

_MOST_SAVES = 10_000_000


class Kept(NamedTuple):
    """The checkpoints of a run when it ends.

    Args:
        saves: how many are saved.
        checkpoints: how many of them stay at the end.
        nbytes: of these.
        peak_bytes: the most at any time, also after a restart: those that stay, the one that the run was restored from,
            and the one whose save is under way.
    """

    saves: int
    checkpoints: int
    nbytes: int
    peak_bytes: int


def kept_over_run(
    nbytes: int, rules: Retention, steps: int, every: int = 1, seconds_per_step: float | None = None
) -> Kept:
    """Returns what the rules keep of a run.

    The best by a metric are counted as if none of them stays for another reason. Each checkpoint counts whole, as
    without `incremental=True`.

    Args:
        nbytes: of one checkpoint.
        rules: of the run's `Manager`.
        steps: of the run.
        every: the run saves at steps that are multiples of this.
        seconds_per_step: of the run; None if no rule asks for the age of a checkpoint.

    Raises:
        OptionError: `steps`, `every` or `seconds_per_step` is out of range, or the last is missing.
    """
    problems = [*count_problem("steps", steps, 1), *count_problem("every", every, 1)]
    if rules.seconds is not None and not (seconds_per_step is not None and seconds_per_step > 0):
        remedy = "pass how long a step takes: the rules keep checkpoints by their age"
        problems.append(Problem("seconds_per_step", repr(seconds_per_step), "more than 0 seconds", remedy))
    if not problems and steps // every > _MOST_SAVES:
        found = f"{steps // every} saves"
        problems.append(Problem("steps", found, f"at most {_MOST_SAVES} saves", "give fewer steps, or a larger every"))
    refuse(problems)
    saved = range(every, steps + 1, every)
    if not saved:
        return Kept(0, 0, 0, 0)
    kept = _count(saved, rules, seconds_per_step)
    before_last = _count(saved[:-1], rules, seconds_per_step) if len(saved) > 1 else 0
    most = min(max(before_last + 1, kept) + 1, len(saved))  # one more, unless all are there already: that of a restart
    return Kept(len(saved), kept, kept * nbytes, most * nbytes)


def _count(saved: Sequence[int], rules: Retention, seconds_per_step: float | None) -> int:
    """Returns how many checkpoints stay once the last of them is committed. Never fewer than before it."""
    ages = None if seconds_per_step is None else {step: (saved[-1] - step) * seconds_per_step for step in saved}
    kept = len(reasons_to_keep(saved, rules, {}, ages=ages))
    best = 0 if rules.best is None or rules.keeps_all else Best(*rules.best).n
    return min(kept + best, len(saved))
