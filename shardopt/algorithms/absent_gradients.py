"""Gradients that some ranks of a parameter have and others have not, found by numbers that the ranks have added up."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from torch import Tensor

from shardopt.errors import GradientError, Problem


def refuse_absent(demands: Sequence[tuple[str, bool]], counts: Tensor) -> None:
    """Raises where some ranks of a parameter have a gradient and others have none.

    Args:
        demands: name of each of N parameters, and whether all of its ranks must have a gradient, or none.
        counts: [2 N], for each parameter how many ranks have one, and how many have none (NaN where a rank refuses its
            own); on the CPU, the same on all ranks.

    Raises:
        GradientError: some have one and others do not, or one refuses its own.
    """
    problems = []
    for (name, all_or_none), (have, lack) in zip(demands, counts.view(-1, 2).tolist(), strict=True):
        if isnan(lack):
            present = "one that a rank refuses"
        elif all_or_none and have and lack:
            present = f"one on {have:g} of its ranks, none on {lack:g}"
        else:
            continue
        remedy = "give it zeros where a rank had nothing to do with it"
        problems.append(Problem(f"{name}.grad", present, "one on all of its ranks, or on none", remedy))
    if problems:
        raise GradientError("gradients are absent on some ranks, or refused there", problems)
