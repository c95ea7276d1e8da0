"""Line search by the strong Wolfe conditions: finds a step with a lower loss and a flatter slope.

φ(t) is the loss at a step of t along a direction in which it falls, ψ its slope. A step t is taken where

    φ(t) <= φ(0) + c₁ t ψ(0)        and        |ψ(t)| <= c₂ |ψ(0)|.

Steps grow until an interval must hold such a t, which is then narrowed at the minimum of the cubic through its ends.
Source: Nocedal and Wright, Numerical Optimization (2006), algorithms 3.5 and 3.6 and equation 3.59; what they leave
open (how far to extrapolate, when to give up) is as torch.optim.LBFGS has it, so that steps are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """Loss, slope and gradient at one step along the direction.

    Args:
        step: t.
        loss: φ(t).
        slope: ψ(t).
        gradient: there, as this rank's local tensors.
        peak: the largest absolute value in the whole gradient.
        total: the sum of its absolute values.
    """

    step: float
    loss: float
    slope: float
    gradient: list[Tensor]
    peak: float
    total: float


def strong_wolfe(
    evaluate: Callable[[float], Trial],
    start: Trial,
    first: float,
    too_short: Callable[[float], bool],
    most: int,
    c1: float = 1e-4,
    c2: float = 0.9,
) -> tuple[Trial, int]:
    """Searches for a step that meets the conditions; returns a good one if the budget ends before.

    Args:
        evaluate: gives the trial at a step.
        start: the trial at step 0, whose slope is negative.
        first: the step to try first.
        too_short: whether an interval of steps of this length is not worth narrowing; asked after an evaluation.
        most: after how many evaluations, beyond the first, the search ends.
        c1, c2: as above.

    Returns:
        The trial to take, which may be `start`, and the number of evaluations.
    """

    def high(trial: Trial) -> bool:
        return not trial.loss <= start.loss + c1 * trial.step * start.slope  # so is a loss that is no number

    flat = -c2 * start.slope  # the greatest slope, up or down, that is taken
    previous, trial = start, evaluate(first)
    for count in range(most):
        if high(trial) or (count > 1 and trial.loss >= previous.loss):
            break
        if abs(trial.slope) <= flat:
            return trial, count + 1
        if trial.slope >= 0:
            break
        nearest = trial.step + 0.01 * (trial.step - previous.step)
        step = cubic_minimum(previous, trial, nearest, 10 * trial.step)
        previous, trial = trial, evaluate(step)
    else:
        return (start if start.loss <= trial.loss else trial), most + 1

    ends = [previous, trial]  # the order decides between equal losses
    low = _lower(ends)
    stalled = False
    while count < most:
        left, right = sorted(end.step for end in ends)
        if too_short(right - left):
            break
        step = cubic_minimum(ends[0], ends[1], left, right)
        margin = 0.1 * (right - left)
        near = min(right - step, step - left) < margin
        if near and (stalled or not left < step < right):
            step = right - margin if right - step < step - left else left + margin
            near = False
        stalled = near
        trial = evaluate(step)
        count += 1
        if high(trial) or trial.loss >= ends[low].loss:
            ends[1 - low] = trial
            low = _lower(ends)
            continue
        if abs(trial.slope) <= flat:
            return trial, count + 1
        if trial.slope * (ends[1 - low].step - ends[low].step) >= 0:
            ends[1 - low] = ends[low]
        ends[low] = trial
    return ends[low], count + 1


def cubic_minimum(one: Trial, other: Trial, least: float, greatest: float) -> float:
    """Minimises the cubic through two losses and slopes; returns the middle of the bounds if it has no minimum.

    Args:
        one, other: in any order.
        least, greatest: the bounds, which the result is moved to where it lies outside.
    """
    left, right = sorted((one, other), key=lambda trial: trial.step)
    width = right.step - left.step
    middle = (least + greatest) / 2
    if width == 0:
        return middle
    d1 = left.slope + right.slope - 3 * (right.loss - left.loss) / width
    square = d1 * d1 - left.slope * right.slope
    if not square >= 0:  # it has none, or is not finite
        return middle
    d2 = sqrt(square)
    below = right.slope - left.slope + 2 * d2
    if below == 0:
        return middle
    step = right.step - width * (right.slope + d2 - d1) / below
    return min(max(step, least), greatest) if isfinite(step) else middle


def _lower(ends: Sequence[Trial]) -> int:
    return 1 if ends[1].loss < ends[0].loss else 0
