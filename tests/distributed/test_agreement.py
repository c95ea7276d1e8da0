"""Ranks that drift apart are found, and what differs is named, on all of them alike."""

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt import WarmupOptimizer, WarmupPolicy, WarmupStage
from shardopt.errors import StateError
from shardopt.optim import CombinedOptimizer
from tests.harness import run_ranks
from tests.support.clipped import Case, Meshes, first_stage, last_stage, make_job, on_each_half, table, whole

RANKS_STAY = True

CASES = {
    "w": Case((5, 4), whole),
    "norm": Case((), whole),
    "table": Case((11, 4), table),
    "half": Case((7, 4), on_each_half),
    "first": Case((3,), first_stage),
    "last": Case((2,), last_stage),
}


def build():
    params = make_job(CASES, Meshes())
    groups = [{"match": "norm", "weight_decay": 0.0}]
    return shardopt.keyed("adamw", params, groups=groups, lr=torch.tensor(0.125))


def rate(optimizer):
    next(group for group in optimizer.param_groups if group["weight_decay"])["lr"] = torch.tensor(0.25)


def option(optimizer):
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.5), 0.9)


def counter(optimizer):
    optimizer.state[optimizer.params["half"]]["step"] += 1


def missing(optimizer):
    del optimizer.state[optimizer.params["w"]]


def how_it_computes(optimizer):
    optimizer.param_groups[0]["foreach"] = True


def compare(drift, rank):
    optimizer = build()
    optimizer.step()
    optimizer.check_agreement()
    if dist.get_rank() == rank:
        drift(optimizer)
    try:
        optimizer.check_agreement()
    except StateError as error:
        return str(error)
    return None


DRIFTS = [
    (rate, "param_groups.first.lr", "0.25"),
    (option, "betas", "(0.5, 0.9)"),
    (counter, "state.half.step", "2.0"),
    (missing, "state.w.step", "nothing"),
]


@pytest.mark.parametrize(
    ("drift", "key", "actual", "rank"),
    [
        *((*drift, 1) for drift in DRIFTS),
        (*DRIFTS[-1], 0),  # which is compared first, and knows of less than the others
        *(pytest.param(*drift, 0, marks=pytest.mark.exhaustive) for drift in DRIFTS[:-1]),
    ],
)
def test_what_differs_is_named_with_ranks_and_values(drift, key, actual, rank):
    reported = run_ranks(3, compare, drift, rank)
    assert reported[0] is not None
    assert reported == [reported[0]] * 3
    assert key in reported[0]
    assert f"{actual} on rank {rank}" in reported[0]
    others = sorted({0, 1, 2} - {rank})
    assert f"on ranks {others[0]}, {others[1]}" in reported[0]
    assert len(reported[0].splitlines()) == 2  # that, and nothing else


def test_how_a_rank_computes_may_differ():
    assert run_ranks(2, compare, how_it_computes, 1) == [None, None]


def compare_warmup():
    weight = torch.nn.Parameter(torch.ones(2))
    stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)
    inner = WarmupOptimizer(shardopt.keyed("sgd", {"w": weight}), [stage], lr=1.0)
    optimizer = CombinedOptimizer([("part", inner)])
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.check_agreement()
    if dist.get_rank() == 1:
        optimizer.step()
    with pytest.raises(StateError) as caught:
        optimizer.check_agreement()
    return [problem.key for problem in caught.value.problems]


def test_positions_of_wrappers_are_compared_too():
    keys = run_ranks(2, compare_warmup)
    assert keys[0] == keys[1]
    assert "param_groups.part.w.lr" in keys[0]
    assert any(key.startswith("state.part.__warmup") for key in keys[0])


def test_one_process_agrees_with_itself():
    """Without a process group nothing is compared, so nothing is raised."""
    weight = torch.nn.Parameter(torch.ones(()))
    weight.grad = torch.ones(())
    optimizer = shardopt.keyed("adam", {"w": weight})
    optimizer.step()
    optimizer.check_agreement()


def fail_to_compare():
    optimizer = build()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(1)))  # without a name
    with pytest.raises(Exception) as caught:
        optimizer.check_agreement()
    return "rank 1" in str(caught.value)


def test_a_rank_that_cannot_be_compared_is_named():
    assert run_ranks(2, fail_to_compare) == [True, True]
