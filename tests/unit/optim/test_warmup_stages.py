"""Stages of a warm-up: each policy against numbers worked out by hand, seams and ends, and what cannot be a stage."""

import math
from dataclasses import replace

import pytest

from shardopt.errors import StateError
from shardopt.optim.schedules.stages import Schedule, WarmupPolicy, WarmupStage

NONE, LINEAR, CONSTANT = WarmupPolicy.NONE, WarmupPolicy.LINEAR, WarmupPolicy.CONSTANT
POLY, STEP, INVSQRT = WarmupPolicy.POLY, WarmupPolicy.STEP, WarmupPolicy.INVSQRT
COSINE, INTERPOLATE = WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS, WarmupPolicy.INTERPOLATE

RAMP = WarmupStage(LINEAR, max_iters=4, value=0.2)

# Iteration → multiplier, by hand. 0.7071 and 0.8536 are (1 + cos 90°·…)/2 and roots of one half, in full below.
HALF_ROOT = math.sqrt(0.5)
BY_HAND = {
    "none": ([WarmupStage(NONE, max_iters=3, value=7.0)], {0: 1, 2: 1, 3: 1, 50: 1}),
    "none, scaled": ([WarmupStage(NONE, max_iters=3, lr_scale=0.25)], {0: 0.25, 3: 0.25, 50: 0.25}),
    "constant": ([WarmupStage(CONSTANT, max_iters=3, value=0.3)], {0: 0.3, 3: 0.3, 4: 0.3, 50: 0.3}),
    "linear": ([RAMP], {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1, 5: 1, 500: 1}),
    "linear from 0": ([WarmupStage(LINEAR, max_iters=2, value=0)], {0: 0, 1: 0.5, 2: 1, 3: 1}),
    "linear, scaled": ([replace(RAMP, lr_scale=0.5)], {0: 0.1, 2: 0.3, 4: 0.5, 5: 0.5}),
    "two linear": (
        [WarmupStage(LINEAR, max_iters=4, value=0, lr_scale=0.2), WarmupStage(LINEAR, max_iters=8, value=0.2)],
        {0: 0, 2: 0.1, 4: 0.2, 5: 0.4, 6: 0.6, 7: 0.8, 8: 1, 9: 1},
    ),
    "poly": ([WarmupStage(POLY, max_iters=4, value=2)], {0: 1, 1: 0.5625, 2: 0.25, 3: 0.0625, 4: 0, 5: 0, 99: 0}),
    "poly, ends above 0": (
        [WarmupStage(POLY, max_iters=4, value=1, decay_iters=8)],
        {0: 1, 2: 0.75, 4: 0.5, 5: 0.5, 99: 0.5},
    ),
    "poly, over before its stage": (
        [WarmupStage(POLY, max_iters=8, value=0.5, decay_iters=4)],
        {0: 1, 3: 0.5, 4: 0, 5: 0, 8: 0, 9: 0},
    ),
    "linear, poly": ([RAMP, WarmupStage(POLY, max_iters=8, value=1)], {4: 1, 5: 0.75, 6: 0.5, 7: 0.25, 8: 0, 9: 0}),
    "linear, constant, poly": (
        [RAMP, WarmupStage(CONSTANT, max_iters=100), WarmupStage(POLY, max_iters=300, value=2)],
        {4: 1, 5: 1, 100: 1, 200: 0.25, 250: 0.0625, 300: 0, 301: 0},
    ),
    "step": (
        [WarmupStage(STEP, max_iters=7, value=0.5, decay_iters=3)],
        {0: 1, 2: 1, 3: 0.5, 5: 0.5, 6: 0.25, 7: 0.25, 9: 0.25, 99: 0.25},
    ),
    "step, every iteration": ([WarmupStage(STEP, max_iters=3, value=0.5)], {0: 1, 1: 0.5, 2: 0.25, 3: 0.125, 4: 0.125}),
    "linear, step": (
        [RAMP, WarmupStage(STEP, max_iters=12, value=0.5, decay_iters=3)],
        {4: 1, 5: 1, 6: 0.5, 8: 0.5, 9: 0.25, 12: 0.125, 13: 0.125},
    ),
    "inverse root": ([WarmupStage(INVSQRT, max_iters=16)], {0: 1, 1: 1, 2: HALF_ROOT, 4: 0.5, 16: 0.25, 17: 0.25}),
    "linear, inverse root": (
        [RAMP, WarmupStage(INVSQRT, max_iters=64)],
        {4: 1, 8: HALF_ROOT, 16: 0.5, 64: 0.25, 65: 0.25},
    ),
    "cosine": (
        [WarmupStage(COSINE, max_iters=10, value=0.2, sgdr_period=4)],
        {0: 1, 1: 0.6 + 0.4 * HALF_ROOT, 2: 0.6, 3: 0.6 - 0.4 * HALF_ROOT, 4: 1, 6: 0.6, 8: 1, 10: 0.6, 11: 0.6},
    ),
    "one whole cosine": ([WarmupStage(COSINE, max_iters=4, value=0, sgdr_period=4)], {0: 1, 2: 0.5, 4: 0, 5: 0, 8: 0}),
    "linear, cosine": ([RAMP, WarmupStage(COSINE, max_iters=12, value=0, sgdr_period=8)], {4: 1, 8: 0.5, 12: 0, 13: 0}),
    "interpolate": (
        [WarmupStage(INTERPOLATE, max_iters=8, value=0.5, start_interpolating_iters=4, end_value=1.5)],
        {0: 0.5, 3: 0.5, 4: 0.5, 5: 0.75, 6: 1, 8: 1.5, 9: 1.5},
    ),
    "linear, interpolate": (
        [RAMP, WarmupStage(INTERPOLATE, max_iters=8, start_interpolating_iters=4, end_value=0)],
        {4: 1, 5: 0.75, 8: 0, 9: 0},
    ),
}


@pytest.mark.parametrize(("stages", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_multipliers_are_those_worked_out_by_hand(stages, expected):
    schedule = Schedule(stages)
    assert {i: schedule.multiplier(i) for i in expected} == pytest.approx(expected, rel=1e-12, abs=1e-12)


def torchrecs(stage, i):
    """The multiplier that torchrec 1.9 computes in a first stage, where its formula is finite and has not left it."""
    return (
        stage.lr_scale
        * {
            NONE: lambda: 1.0,
            LINEAR: lambda: stage.value + (1.0 - stage.value) * i / stage.max_iters,
            CONSTANT: lambda: stage.value,
            POLY: lambda: (1 - i / stage.decay_iters) ** stage.value,
            STEP: lambda: stage.value ** (i // stage.decay_iters),
            INVSQRT: lambda: i**-0.5,
            COSINE: lambda: (
                stage.value
                + (1 - stage.value) * (1 + math.cos(math.pi * (i % stage.sgdr_period) / stage.sgdr_period)) / 2
            ),
            INTERPOLATE: lambda: (
                stage.value
                + (stage.end_value - stage.value)
                * (i - stage.start_interpolating_iters)
                / (stage.max_iters - stage.start_interpolating_iters)
            ),
        }[stage.policy]()
    )


@pytest.mark.parametrize("policy", WarmupPolicy)
def test_a_first_stage_is_torchrecs(policy):
    stage = WarmupStage(
        policy,
        max_iters=50,
        value=0.3,
        lr_scale=0.7,
        decay_iters=60,
        sgdr_period=7,
        start_interpolating_iters=0,
        end_value=2.0,
    )
    schedule = Schedule([stage])
    for i in range(1, 51):
        assert schedule.multiplier(i) == pytest.approx(torchrecs(stage, i), rel=1e-14)


LATER = [
    WarmupStage(
        policy,
        max_iters=2000,
        value=1.0 if policy in (LINEAR, CONSTANT, INTERPOLATE) else 0.5,
        decay_iters=2000,
        sgdr_period=1000,
        start_interpolating_iters=1000,
        end_value=0.0,
    )
    for policy in WarmupPolicy
]


@pytest.mark.parametrize("stage", LATER, ids=lambda stage: stage.policy.value)
@pytest.mark.parametrize("lr_scale", [1.0, 0.01])
def test_no_jump_at_the_seam_nor_after_the_end(stage, lr_scale):
    """The seam is continuous where the ramp's end and the decay's scale are one."""
    ramp = WarmupStage(LINEAR, max_iters=1000, value=0.1, lr_scale=lr_scale)
    schedule = Schedule([ramp, replace(stage, lr_scale=lr_scale)])
    assert schedule.multiplier(1000) == pytest.approx(lr_scale)
    assert schedule.multiplier(1001) == pytest.approx(lr_scale, rel=0.005)
    last = schedule.multiplier(2000)
    assert {schedule.multiplier(i) for i in (2001, 2002, 10**6, 2**62)} == {last}


@pytest.mark.parametrize("policy", WarmupPolicy)
@pytest.mark.parametrize("start", [0, 3])
def test_multipliers_are_finite_and_never_negative(policy, start):
    stage = WarmupStage(
        policy, max_iters=20, value=0.0, decay_iters=9, sgdr_period=5, start_interpolating_iters=12, end_value=0.0
    )
    stages = [WarmupStage(NONE, max_iters=start), stage] if start else [stage]
    values = [Schedule(stages).multiplier(i) for i in range(30)]
    assert all(math.isfinite(value) and value >= 0 for value in values)


def test_stages_by_iteration():
    """As torchrec counts them: a stage still has its last iteration, and after the last stage comes one more."""
    schedule = Schedule([RAMP, WarmupStage(POLY, max_iters=8)])
    assert [schedule.stage_at(i) for i in (0, 4, 5, 8, 9, 100)] == [0, 0, 1, 1, 2, 2]
    assert schedule.end == 8


def test_description_has_what_matters_and_nothing_else():
    described = Schedule([RAMP, WarmupStage(STEP, max_iters=8, value=0.5)]).described()
    assert described == [
        "linear max_iters=4 lr_scale=1.0 value=0.2",
        "step max_iters=8 lr_scale=1.0 value=0.5 decay_iters=1",
    ]
    assert Schedule([replace(RAMP, sgdr_period=9, decay_iters=3, lr_scale=1)]).described() == described[:1]


def test_stages_are_copied_and_left_alone():
    stage = WarmupStage(POLY, max_iters=8)
    schedule = Schedule([stage])
    assert stage == WarmupStage(POLY, max_iters=8)
    stage.max_iters = 2
    assert schedule.multiplier(4) == 0.5


WRONG = {
    "stages": [],
    "stages[0]": ["linear"],
    "stages[0].max_iters": [WarmupStage(max_iters=0)],
    "stages[0].max_iters ": [WarmupStage(max_iters=2.0)],
    "stages[0].max_iters  ": [WarmupStage(max_iters=True)],
    "stages[1].max_iters": [RAMP, WarmupStage(CONSTANT, max_iters=4)],
    "stages[0].value": [WarmupStage(max_iters=2, value=-0.1)],
    "stages[0].value ": [WarmupStage(max_iters=2, value=math.nan)],
    "stages[0].lr_scale": [WarmupStage(max_iters=2, lr_scale=math.inf)],
    "stages[0].decay_iters": [WarmupStage(max_iters=2, decay_iters=1.5)],
    "stages[1].decay_iters": [RAMP, WarmupStage(POLY, max_iters=9, decay_iters=4)],
    "stages[0].sgdr_period": [WarmupStage(COSINE, max_iters=2, sgdr_period=0)],
    "stages[0].start_interpolating_iters": [WarmupStage(INTERPOLATE, max_iters=2, end_value=1.0)],
    "stages[0].start_interpolating_iters ": [
        WarmupStage(INTERPOLATE, max_iters=2, end_value=1.0, start_interpolating_iters=2)
    ],
    "stages[0].end_value": [WarmupStage(INTERPOLATE, max_iters=2, start_interpolating_iters=1)],
    "stages[0] ": [WarmupStage(STEP, max_iters=100_000, value=2.0)],
}


@pytest.mark.parametrize(("key", "stages"), WRONG.items(), ids=WRONG)
def test_what_cannot_be_a_stage_is_named(key, stages):
    with pytest.raises(StateError) as raised:
        Schedule(stages)
    assert [problem.key for problem in raised.value.problems] == [key.strip()]


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(StateError) as raised:
        Schedule([WarmupStage(max_iters=0, value=-1), WarmupStage("linear", max_iters=5), WarmupStage(max_iters=-3)])
    keys = [problem.key for problem in raised.value.problems]
    assert keys == ["stages[0].max_iters", "stages[0].value", "stages[1]", "stages[2].max_iters"]
