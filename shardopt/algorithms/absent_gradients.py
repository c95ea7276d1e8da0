"""Gradients that some ranks lack or refuse: all ranks of a parameter raise it, from the counts that they exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isinf, isnan

from torch import Tensor

from shardopt.errors import GradientError, Problem

ABSENT = "gradients are absent on some ranks, or refused there"
LATE = "an earlier step was taken all the same; load a checkpoint"


def refuse_absent(demands: Iterable[tuple[str, bool]], counts: Iterable[Sequence[float]]) -> None:
    """Raises if some ranks of a parameter have a gradient and others have none, or one refuses its gradients.

    Args:
        demands: name of each parameter, and whether all of its ranks must have a gradient, or none.
        counts: for each how many ranks have one, and how many have none (NaN where a rank refuses it, infinite where
            one refuses that of another parameter, which need not be shared); the same on all ranks.

    Raises:
        GradientError: some have one and others do not, or one refuses it or another.
    """
    problems, of_others = [], list[str]()
    for (name, all_or_none), (have, lack) in zip(demands, counts, strict=True):
        if isnan(lack):
            problems.append(absent(name, "one that a rank refuses"))
        elif isinf(lack):
            of_others.append(name)
        elif all_or_none and have and lack:
            problems.append(absent(name, f"one on {have:g} of its ranks, none on {lack:g}"))
    if not problems and of_others:
        problems = [refused_with_another(of_others, "a rank refuses another parameter's")]
    if problems:
        raise GradientError(ABSENT, problems, code="missing-gradient")


def refuse_absent_late(demands: Sequence[tuple[str, bool]], counts: Tensor) -> None:
    """Raises as `refuse_absent` for the counts of an earlier step, [2 N] of N parameters."""
    with told_late():
        refuse_absent(demands, counts.view(-1, 2).tolist())


@contextmanager
def told_late() -> Iterator[None]:
    """Adds to gradient errors that they belong to an earlier step, which was taken."""
    try:
        yield
    except GradientError as error:
        error.restate(f"{error.message}: {LATE}")
        raise


def absent(name: str, present: str) -> Problem:
    """Describes a gradient that not all ranks of a parameter have."""
    remedy = "give it zeros where a rank has nothing to do with it"
    return Problem(f"{name}.grad", present, "one on all of its ranks, or on none", remedy)


def refused_with_another(names: Sequence[str], present: str) -> Problem:
    """Describes gradients that are good, if there are any, of parameters one of whose ranks refuses another one's."""
    others = f", nor in those of {len(names) - 1} others" if len(names) > 1 else ""
    found = f"no fault in it{others}, but {present}"
    return Problem(f"{names[0]}.grad", found, "good ones of all parameters", "see the error of that rank")
