"""Decays of moving averages that start small, so that the first weights are soon forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardopt.errors import Problem, StateError


@dataclass(frozen=True)
class _Ramp:
    """A decay as a function of the number of updates; a value, so that it can be copied and pickled."""

    decay: float
    inv_gamma: float
    power: float | None

    def __call__(self, n: int) -> float:
        ramped = (1 + n) / (10 + n) if self.power is None else 1 - (1 + n / self.inv_gamma) ** -self.power
        return min(ramped, self.decay)


def ramped_decay(
    decay: float = 0.9999, *, inv_gamma: float = 1.0, power: float | None = None
) -> Callable[[int], float]:
    """Makes a decay for `EMA` that rises to `decay` with the number n of updates so far.

    It is min(decay, (1 + n) / (10 + n)); with a power, min(decay, 1 − (1 + n / inv_gamma)^−power). A power of 2/3 suits
    runs of a million steps, 3/4 shorter ones. Checkpoints have n, so that a resumed run continues the ramp.

    Args:
        decay: the last value, in [0, 1].
        inv_gamma: by how many updates the ramp is stretched, more than 0.
        power: more than 0, or None.

    Raises:
        StateError: an argument is out of its range.
    """
    demands = [
        ("decay", decay, "a number in [0, 1]", 0 <= decay <= 1),
        ("inv_gamma", inv_gamma, "a number above 0", inv_gamma > 0),
        ("power", power, "a number above 0, or None", power is None or power > 0),
    ]
    problems = [
        Problem(key, repr(value), required, "pass one in this range")
        for key, value, required, kept in demands
        if not kept
    ]
    if problems:
        raise StateError("invalid arguments of a decay ramp", problems, code="averages")
    return _Ramp(decay, inv_gamma, power)
