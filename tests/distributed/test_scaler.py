"""Loss scaling on real ranks: every kind of parameter at once, and one verdict."""

import math

import pytest
import torch
import torch.distributed as dist

from shardopt import GradScaler, KeyedOptimizer
from shardopt.errors import GradientError
from shardopt.sharding.gradients import local_gradients
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.clipped import LAYOUTS, Meshes, check_scaled, drop_gradient, full_gradient, make_job

RANKS_STAY = True

CASES = {name: case for name, case in LAYOUTS["all"].items() if not name.startswith("mixed dtypes")}

NAMES = ["plain.w", "rows.w", "table.w", "wrapper.w"]


class Steps(KeyedOptimizer):
    """Counts its steps, and does nothing else."""

    def __init__(self, params):
        super().__init__(params, {}, [{"params": list(params.values())}])
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1


def job():
    meshes = Meshes()
    params = make_job(CASES, meshes)
    scaler = GradScaler("cpu", init_scale=4.0)
    return meshes, params, Steps(params), scaler


def unscale_everything():
    _, params, optimizer, scaler = job()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    for name, param in params.items():
        check_scaled(name, param, full_gradient(name, CASES[name]), 0.25)
    return optimizer.steps


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parameters_of_every_kind_are_unscaled_once(ranks):
    assert run_ranks(ranks, unscale_everything) == [1] * ranks


def overflow_on_one_rank(name, value):
    meshes, params, optimizer, scaler = job()
    if meshes.rank == 1:
        next(local for local in local_gradients(params[name]) if local.numel()).view(-1)[0] = value
    else:
        for param in params.values():  # also a rank without a gradient takes part
            drop_gradient(param)
    if meshes.rank != 2:  # and one whose losses are computed elsewhere
        scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return optimizer.steps, scaler.get_scale()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, math.inf) for name in NAMES),
        (NAMES[0], math.nan),  # which is lost where ranks exchange their largest element
        *(pytest.param(name, math.nan, marks=pytest.mark.exhaustive) for name in NAMES[1:]),
    ],
)
def test_what_is_not_finite_on_one_rank_is_seen_by_all(name, value):
    assert run_ranks(4, overflow_on_one_rank, name, value) == [(0, 2.0)] * 4


def fail_on_one_rank():
    meshes, params, optimizer, scaler = job()
    if meshes.rank == 1:
        params["half"] = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        params["half"].grad = torch.ones(2, dtype=torch.float16)
        optimizer = Steps(params)
    scaler.scale(torch.ones(()))
    if meshes.rank == 1:
        with pytest.raises(GradientError, match=r"half\.grad"):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    total = torch.ones(1)
    dist.all_reduce(total)  # ranks are still in step with each other
    return optimizer.steps, total.item()


def test_a_failure_on_one_rank_lets_the_others_skip():
    assert run_ranks(3, fail_on_one_rank) == [(0, 3.0)] * 3


def test_each_unscaling_is_one_all_reduce():
    trace = ["torch.distributed:all_reduce"]
    outcomes = run_ranks_outcomes(2, unscale_everything, trace=trace)
    made = run_ranks_outcomes(2, job, trace=trace)
    for outcome, other in zip(outcomes, made, strict=True):
        assert outcome.ok, outcome.traceback
        assert len(outcome.calls) - len(other.calls) == 1
