"""Retention: which checkpoints of a run stay, as a pure function of those there are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

Mode = Literal["min", "max"]


class Best(NamedTuple):
    """To keep the `n` checkpoints whose metric is the least ("min") or the greatest ("max")."""

    metric: str
    mode: Mode
    n: int


class Rules(NamedTuple):
    """Rules of retention, each of which keeps some besides those of the others; the newest stays in any case.

    Args:
        keep_last: so many of the newest; None keeps all there are.
        keep_every: those of steps that are multiples of this.
        best: those of the best metrics.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    best: Best | None = None


def steps_to_keep(
    committed: Collection[int],
    rules: Rules,
    metrics: Mapping[int, Mapping[str, float]],
    pinned: Collection[int] = (),
) -> frozenset[int]:
    """The steps whose checkpoints stay; see `reasons_to_keep`."""
    return frozenset(reasons_to_keep(committed, rules, metrics, dict.fromkeys(pinned, "pinned")))


def reasons_to_keep(
    committed: Collection[int],
    rules: Rules,
    metrics: Mapping[int, Mapping[str, float]],
    pinned: Mapping[int, str] | None = None,
) -> dict[int, list[str]]:
    """The steps whose checkpoints stay, ascending, and why: a few words for each rule that keeps it.

    Args:
        committed: of checkpoints that are committed, and not known to be damaged; in any order.
        metrics: numbers by name, by step. A checkpoint without the metric, or where it is no number, is never one of
            the best; of equal ones the newer is better.
        pinned: steps that stay in any case, and why: that which the run was resumed from, and that which it has just
            saved.
    """
    steps = sorted(committed)
    rules_and_steps: list[tuple[str, Collection[int]]] = [("newest", steps[-1:])]
    if rules.keep_last is None:
        rules_and_steps.append(("no rule", steps[:-1]))
    else:
        rules_and_steps.append((f"last {rules.keep_last}", steps[-max(rules.keep_last, 1) :]))
        if rules.keep_every is not None:
            every = rules.keep_every
            rules_and_steps.append((f"every {every}", [step for step in steps if step % every == 0]))
        if rules.best is not None:
            rules_and_steps.append((f"best {rules.best.metric}", _best(steps, rules.best, metrics)))
    rules_and_steps += [(why, {step}.intersection(steps)) for step, why in (pinned or {}).items()]
    reasons: dict[int, list[str]] = {}
    for why, kept in rules_and_steps:
        for step in kept:
            reasons.setdefault(step, []).append(why)
    return dict(sorted(reasons.items()))


def _best(committed: Collection[int], best: Best, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
    sign = 1 if best.mode == "max" else -1
    measured = {step: metrics.get(step, {}).get(best.metric, math.nan) for step in committed}
    ranked = sorted((sign * value, step) for step, value in measured.items() if not math.isnan(value))
    return [step for _, step in ranked[len(ranked) - min(best.n, len(ranked)) :]]
