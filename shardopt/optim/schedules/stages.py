"""Stages of a warm-up: their fields, the checks of these, and the multiplier of the rate at every iteration."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import NamedTuple

from shardopt.errors import Problem, StateError


@unique
class WarmupPolicy(Enum):
    """The multiplier of a stage as a function of the iteration.

    i is the iteration, the steps done since training began; its multiplier is that of step i + 1. s is the iteration at
    which the stage before ended, 0 for the first stage. N is the stage's `max_iters`, v its `value`. A stage is s < i
    <= N and, if first, i = 0. A stage multiplies the full rate by `lr_scale` times one of the following:

    NONE: 1.

    LINEAR: v + (1 − v)·(i − s)/(N − s), from v to 1. The gradual warm-up of Goyal et al. 2017, "Accurate, Large
    Minibatch SGD", arXiv:1706.02677, section 2.2.

    CONSTANT: v.

    POLY: max(0, 1 − (i − s)/(decay_iters − s))^v, from 1 to 0 at `decay_iters`, and 0 from there on. Liu et al. 2015,
    "ParseNet", arXiv:1506.04579, section 3.3; begun at an iteration other than 0 it is the decay of MLPerf's DLRM
    reference.

    STEP: v^(⌊i/decay_iters⌋ − ⌊s/decay_iters⌋), times v at every multiple of `decay_iters`, counted from iteration 0.
    Goyal et al. 2017, section 5.1.

    INVSQRT: √max(s, 1) / √max(i, 1), 1 until iteration 1 or the begin of the stage. Vaswani et al. 2017, "Attention Is
    All You Need", arXiv:1706.03762, equation 3, after the warm-up.

    COSINE_ANNEALING_WARM_RESTARTS: v + (1 − v)·(1 + cos(π·t/sgdr_period))/2, t = (i − s) mod sgdr_period, from 1 to v
    in each period. SGDR with T_mult = 1, Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5. A period that ends
    with the stage ends at v; torchrec restarts there, and so leaves a full cosine at the full rate.

    INTERPOLATE: v + (end_value − v)·(i − a)/(N − a), a = start_interpolating_iters; v before a, where torchrec's goes
    below v (or above).

    In a first stage that is what torchrec's policy of that name gives, where that is finite. A later stage begins its
    curve where the one before ended, with the multiplier of a first stage at i = 0. In contrast, torchrec continues to
    count from the beginning of training. There a later LINEAR begins in its middle, and a POLY below the rate that it
    is to decay from.
    """

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@dataclass
class WarmupStage:
    """One stage; `WarmupPolicy` has the formulas. A `WarmupOptimizer` takes a copy.

    Args:
        policy: the formula of the multiplier.
        max_iters: the iteration at which the stage ends, counted from the beginning of training; each stage's is
            larger than that of the stage before.
        value: v of the policy: a multiplier, for POLY the exponent; >= 0.
        lr_scale: multiplies the whole stage; >= 0.
        decay_iters: for POLY, the iteration at which the multiplier reaches 0; for STEP, the iterations between
            multiplications. 0 or less stands for `max_iters` with POLY, and for 1 with STEP.
        sgdr_period: of COSINE_ANNEALING_WARM_RESTARTS, in iterations; >= 1.
        start_interpolating_iters: of INTERPOLATE, which needs it: the iteration up to which the multiplier is `value`.
        end_value: of INTERPOLATE, which needs it: the multiplier at `max_iters`; >= 0.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None


class _Policy(NamedTuple):
    """The fields that a policy uses beside `max_iters` and `lr_scale`, and its multiplier from stage, s and i."""

    fields: tuple[str, ...]
    multiplier: Callable[[WarmupStage, int, int], float]


def _linear(stage: WarmupStage, s: int, i: int) -> float:
    return stage.value + (1.0 - stage.value) * (i - s) / (stage.max_iters - s)


def _poly(stage: WarmupStage, s: int, i: int) -> float:
    return float(max(0.0, 1.0 - (i - s) / (stage.decay_iters - s)) ** stage.value)


def _step(stage: WarmupStage, s: int, i: int) -> float:
    return float(stage.value ** (i // stage.decay_iters - s // stage.decay_iters))


def _inverse_sqrt(stage: WarmupStage, s: int, i: int) -> float:
    return math.sqrt(max(s, 1)) / math.sqrt(max(i, 1))


def _cosine_restarts(stage: WarmupStage, s: int, i: int) -> float:
    t = (i - s) % stage.sgdr_period
    if t == 0 and i == stage.max_iters:
        t = stage.sgdr_period
    return stage.value + (1.0 - stage.value) * 0.5 * (1.0 + math.cos(math.pi * t / stage.sgdr_period))


def _interpolate(stage: WarmupStage, s: int, i: int) -> float:
    a, end = stage.start_interpolating_iters or 0, stage.end_value or 0.0  # `Schedule` refuses stages without these
    return stage.value + (end - stage.value) * max(0, i - a) / (stage.max_iters - a)


_POLICIES = {
    WarmupPolicy.NONE: _Policy((), lambda stage, s, i: 1.0),
    WarmupPolicy.LINEAR: _Policy(("value",), _linear),
    WarmupPolicy.CONSTANT: _Policy(("value",), lambda stage, s, i: stage.value),
    WarmupPolicy.POLY: _Policy(("value", "decay_iters"), _poly),
    WarmupPolicy.STEP: _Policy(("value", "decay_iters"), _step),
    WarmupPolicy.INVSQRT: _Policy((), _inverse_sqrt),
    WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS: _Policy(("value", "sgdr_period"), _cosine_restarts),
    WarmupPolicy.INTERPOLATE: _Policy(("value", "start_interpolating_iters", "end_value"), _interpolate),
}


class Schedule:
    """The multiplier at every iteration of all stages; after the last stage it stays constant.

    Args:
        stages: are copied.

    Raises:
        StateError: there are none, or a field has a bad value; names each.
    """

    def __init__(self, stages: Sequence[WarmupStage]) -> None:
        if not stages:
            remedy = "pass a stage, as [WarmupStage(WarmupPolicy.LINEAR, max_iters=1000, value=0.01)]"
            problem = Problem("stages", "none", "at least one", remedy)
            raise StateError("a warm-up has no stages", [problem], code="warm-up")
        problems = [problem for k in range(len(stages)) for problem in _wrong_fields(stages, k)]
        if problems:
            raise StateError("a warm-up cannot have these stages", problems, code="warm-up")
        self._stages = [_with_defaults(stage) for stage in stages]
        self._ends = [stage.max_iters for stage in stages]
        self._starts = [0, *self._ends[:-1]]
        problems = list(self._wrong_multipliers())
        if problems:
            raise StateError("a warm-up cannot have these stages", problems, code="warm-up")

    @property
    def end(self) -> int:
        """The last iteration of the last stage."""
        return self._ends[-1]

    def stage_at(self, iteration: int) -> int:
        """Returns the index of the stage that an iteration is in; the number of stages after the last one."""
        return bisect_left(self._ends, iteration)

    def multiplier(self, iteration: int) -> float:
        """Returns the multiplier of the full rate in step `iteration + 1`."""
        k = min(self.stage_at(iteration), len(self._stages) - 1)
        return self._at(k, min(max(iteration, self._starts[k]), self._ends[k]))

    def described(self) -> list[str]:
        """Returns each stage as a line with everything that its multiplier depends on, and nothing else."""
        return [line_of(stage) for stage in self.numbers()]

    def numbers(self) -> list[dict[str, float]]:
        """Returns each stage as saved: its policy with its last iteration, and the other fields of its line."""
        return [
            {
                stage.policy.value: stage.max_iters,
                **{name: getattr(stage, name) for name in ("lr_scale", *_fields(stage))},
            }
            for stage in self._stages
        ]

    def _at(self, k: int, iteration: int) -> float:
        stage = self._stages[k]
        return _POLICIES[stage.policy].multiplier(stage, self._starts[k], iteration) * stage.lr_scale

    def _wrong_multipliers(self) -> Iterator[Problem]:
        """Yields problems of a stage that depend on other stages: a decay that ends before it begins, an overflow."""
        for k, (stage, start) in enumerate(zip(self._stages, self._starts, strict=True)):
            if stage.policy is WarmupPolicy.POLY and stage.decay_iters <= start:
                described = f"{stage.decay_iters}, while the stage begins at {start}"
                remedy = "count it from the beginning of training"
                yield Problem(f"stages[{k}].decay_iters", described, "a later iteration", remedy)
            elif self._overflows(k):
                described = f"{self.described()[k]}, which overflows"
                yield Problem(f"stages[{k}]", described, "a finite multiplier", "lower its value")

    def _overflows(self, k: int) -> bool:
        try:
            return not math.isfinite(self._at(k, self._ends[k]))
        except OverflowError:
            return True


def line_of(stage: object) -> str:
    """Returns a saved stage as a line; an earlier version saved it as one."""
    if not isinstance(stage, Mapping) or not stage:
        return str(stage)
    (policy, end), *others = stage.items()
    return " ".join([f"{policy} max_iters={end!r}", *(f"{name}={value!r}" for name, value in others)])


def _fields(stage: WarmupStage) -> tuple[str, ...]:
    return _POLICIES[stage.policy].fields


def _with_defaults(stage: WarmupStage) -> WarmupStage:
    """Copies a stage, with Python's own numbers, and with its default `decay_iters`."""
    decay_iters = int(stage.decay_iters)
    if decay_iters <= 0:
        decay_iters = 1 if stage.policy is WarmupPolicy.STEP else stage.max_iters
    end_value = None if stage.end_value is None else float(stage.end_value)
    return replace(
        stage, value=float(stage.value), lr_scale=float(stage.lr_scale), decay_iters=decay_iters, end_value=end_value
    )


def _wrong_fields(stages: Sequence[WarmupStage], k: int) -> Iterator[Problem]:
    stage = stages[k]
    if not isinstance(stage, WarmupStage) or not isinstance(stage.policy, WarmupPolicy):
        remedy = "write WarmupStage(WarmupPolicy.LINEAR, max_iters=1000, value=0.01)"
        yield Problem(f"stages[{k}]", repr(stage), "a WarmupStage with a WarmupPolicy", remedy)
        return
    before = stages[k - 1].max_iters if k and isinstance(stages[k - 1], WarmupStage) else 0
    least = before + 1 if isinstance(before, int) else 1
    needed: dict[str, str] = {}
    if not is_integer(stage.max_iters) or stage.max_iters < least:
        needed["max_iters"] = f"an integer of at least {least}, counted from the beginning of training"
    for name in ("value", "lr_scale"):
        if not is_rate(getattr(stage, name)):
            needed[name] = "a finite number that is not negative"
    if not is_integer(stage.decay_iters):
        needed["decay_iters"] = "an integer"
    if "sgdr_period" in _fields(stage) and not (is_integer(stage.sgdr_period) and stage.sgdr_period >= 1):
        needed["sgdr_period"] = "an integer of at least 1"
    if stage.policy is WarmupPolicy.INTERPOLATE:
        a = stage.start_interpolating_iters
        if not is_integer(a) or "max_iters" in needed or not 0 <= a < stage.max_iters:  # type: ignore[operator]  # an integer here
            needed["start_interpolating_iters"] = "an integer from 0 to below max_iters"
        if not is_rate(stage.end_value):
            needed["end_value"] = "a finite number that is not negative"
    for name, required in needed.items():
        yield Problem(
            f"stages[{k}].{name}", repr(getattr(stage, name)), required, f"mend this {stage.policy.value} stage"
        )


def is_integer(value: object) -> bool:
    """Whether the value is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_rate(value: object) -> bool:
    """Whether the value is a finite number ≥ 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
