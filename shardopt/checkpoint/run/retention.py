"""Retention: decides which checkpoints of a run stay, as a pure function of those that exist."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shardopt.checkpoint.arguments import is_count, optional_count_problem, refuse
from shardopt.errors import Problem

Mode = Literal["min", "max"]
MOST_LACKING = 10
"""So many saves may lie between evaluations: where more have other metrics alone, the name of one is likely wrong."""


class Best(NamedTuple):
    """Keeps the `n` checkpoints whose metric is the lowest ("min") or the highest ("max")."""

    metric: str
    mode: Mode
    n: int


@dataclass(frozen=True)
class Retention:
    """The rules by which a `Manager` or a `Publisher` keeps checkpoints. A checkpoint stays if any rule keeps it.

    In any case the newest stays, the one that was saved last, and the one that the run was restored from.

    Args:
        last: so many of the newest. None keeps all, regardless of `every` and `best`, unless `seconds` is given.
        every: the first at or after each multiple of this.
        best: `(metric, mode, n)`: the n checkpoints whose metric is the least ("min") or the greatest ("max"). One
            without the metric is never among them.
        seconds: those that were saved less than so many seconds ago, by the clock of rank 0, which looks after each
            save. `Retention(seconds=600)` keeps these and the newest. One that was saved in the future, by another
            clock, is young. One whose time is not known is old.

    Attributes:
        keeps_all: whether no checkpoint is ever removed.

    Raises:
        OptionError: an argument is none; all of them are listed.
    """

    last: int | None = None
    every: int | None = None
    best: Best | tuple[str, Mode, int] | None = None
    seconds: float | None = None
    keeps_all: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = [
            *optional_count_problem("last", self.last, 1),
            *optional_count_problem("every", self.every, 1),
            *_best_problem(self.best),
            *_seconds_problem(self.seconds),
        ]
        refuse(problems)
        for name in ("last", "every"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else int(value))
        if self.best is not None:
            metric, mode, n = self.best
            object.__setattr__(self, "best", Best(metric, mode, int(n)))
        object.__setattr__(self, "keeps_all", self.last is None and self.seconds is None)


def retention_of(keep: Any) -> Retention:
    """Converts a `Manager`'s `keep=`, a `Retention` or a number of the newest, to a `Retention`; None keeps all.

    Raises:
        OptionError: it is none of these.
    """
    if isinstance(keep, Retention):
        return keep
    if keep is not None and not is_count(keep, 1):
        found = repr(keep)
        required = "how many of the newest stay, at least 1, as an int; or a Retention"
        refuse([Problem("keep", found, required, "give it as in keep=3 or keep=Retention(last=3, every=1000)")])
    return Retention(last=keep)


def _best_problem(best: Any) -> list[Problem]:
    """Returns the problem with `best=`, if any."""
    if best is None:
        return []
    if isinstance(best, Sequence) and not isinstance(best, str) and len(best) == 3:
        metric, mode, n = best
        if isinstance(metric, str) and mode in ("min", "max") and is_count(n, 1):
            return []
    required = '(a metric, "min" or "max", how many: at least 1)'
    return [Problem("best", repr(best), required, 'give it as in best=("loss", "min", 2)')]


def _seconds_problem(seconds: Any) -> list[Problem]:
    """Returns the problem with `seconds=`, if any."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is None or (is_number and 0 < seconds < math.inf):
        return []
    return [Problem("seconds", repr(seconds), "more than 0 seconds, and not infinite", "give it as in seconds=600")]


def reasons_to_keep(
    committed: Collection[int],
    rules: Retention,
    metrics: Mapping[int, Mapping[str, float]],
    pinned: Mapping[int, str] | None = None,
    ages: Mapping[int, float] | None = None,
) -> dict[int, list[str]]:
    """Returns the steps whose checkpoints stay, ascending, each with a few words per rule that keeps it.

    Args:
        committed: of checkpoints that are committed, and not known to be damaged; in any order.
        metrics: numbers by name, by step. A checkpoint without the metric, or where it is no number, is never one of
            the best; of equal ones the newer is better.
        pinned: steps that stay in any case, and why: that which the run was resumed from, and that which it has just
            saved.
        ages: seconds since each was saved, by step; negative where clocks differ. A step without one is old.
    """
    steps = sorted(committed)
    rules_and_steps: list[tuple[str, Collection[int]]] = [("newest", steps[-1:])]
    if rules.keeps_all:
        rules_and_steps.append(("no rule", steps[:-1]))
    else:
        if rules.last is not None:
            rules_and_steps.append((f"last {rules.last}", steps[-max(rules.last, 1) :]))
        if rules.every is not None:
            every = rules.every
            firsts = {step // every: step for step in reversed(steps)}  # of each stretch that a multiple begins
            rules_and_steps.append((f"every {every}", [step for n, step in firsts.items() if n or step == 0]))
        if rules.best is not None:
            best = Best(*rules.best)
            values = {step: metrics.get(step, {}).get(best.metric, math.nan) for step in steps}
            rules_and_steps.append((f"best {best.metric}", best_of(values, best)))
        if rules.seconds is not None:
            least, known = rules.seconds, ages or {}
            young = [step for step in steps if known.get(step, math.inf) < least]
            rules_and_steps.append((f"younger than {least:g} s", young))
    rules_and_steps += [(why, {step}.intersection(steps)) for step, why in (pinned or {}).items()]
    reasons: dict[int, list[str]] = {}
    for why, kept in rules_and_steps:
        for step in kept:
            reasons.setdefault(step, []).append(why)
    return dict(sorted(reasons.items()))


def metric_problem(rules: Retention, metrics: Collection[Mapping[str, float]]) -> list[Problem]:
    """Returns the problem with rules whose `best` goes by a metric that no checkpoint has, if so: it keeps none.

    Args:
        metrics: numbers by name, of each checkpoint.
    """
    names = sorted({name for each in metrics for name in each})
    if rules.best is None or rules.keeps_all or not metrics or Best(*rules.best).metric in names:
        return []
    found = f"the metric {Best(*rules.best).metric!r}, which no checkpoint has"
    required = f"one of {', '.join(names)}" if names else "one that is saved with them; they have no metrics"
    return [Problem("best", found, required, "otherwise the rule keeps none of them")]


def best_of(values: Mapping[int, float], best: Best) -> list[int]:
    """Returns the keys of the `best.n` best values, the best last. NaN is never one of them; of equal ones the greater
    key is better.
    """
    sign = 1 if best.mode == "max" else -1
    ranked = sorted((sign * value, key) for key, value in values.items() if not math.isnan(value))
    return [key for _, key in ranked[len(ranked) - min(best.n, len(ranked)) :]]
