"""Optimizers nested in any order to depth 4: loading what was saved is the identity, and resuming is exact."""

import copy
import re
import tempfile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardopt
from shardopt import (
    GradientClipping,
    GradientClippingOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    checkpoint,
)
from shardopt.optim import CombinedOptimizer, OptimizerWrapper
from tests.support.drawn import examples
from tests.support.optimizers import Counting, same, train

WRAPPERS = ["wrap", "clip", "count", "warm"]


@st.composite
def trees(draw, depth=4):
    """Nested tuples: ("adam",), ("wrap", tree), ("combine", [(key or None, tree), ...])."""
    kind = draw(st.sampled_from(["leaf", *WRAPPERS, "combine", "combine"] if depth else ["leaf"]))
    if kind == "leaf":
        return (draw(st.sampled_from(["adam", "sgd", "adagrad", "rprop"])),)
    if kind != "combine":
        return kind, draw(trees(depth=depth - 1))
    keys = draw(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=3))
    return kind, [(key, draw(trees(depth=depth - 1))) for key in keys]


OF_LEAVES = {
    "adam": {"lr": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "rprop": {"lr": 0.01},
}


RAMP_AND_DECAY = [WarmupStage(max_iters=2, value=0.5), WarmupStage(WarmupPolicy.POLY, max_iters=3, decay_iters=5)]


def built(tree, numbers=None, spell=str):
    """The optimizer that a tree tells of; every parameter and every wrapper with state has a name of its own."""
    numbers = iter(range(10_000)) if numbers is None else numbers
    kind, *parts = tree
    number = next(numbers)
    if kind in OF_LEAVES:
        params = {
            f"{spell(number)}.w": torch.nn.Parameter(torch.ones(2, 2)),
            f"{spell(number)}.b": torch.nn.Parameter(torch.full((3,), 0.5)),
        }
        return shardopt.keyed(kind, params, groups=[{"match": "b", "lr": 0.03}], **OF_LEAVES[kind])
    if kind == "combine":
        children = [(f"{key}{i}" if key else "", built(part, numbers, spell)) for i, (key, part) in enumerate(parts[0])]
        return CombinedOptimizer([child if child[0] else child[1] for child in children])
    inner = built(parts[0], numbers, spell)
    if kind == "warm":
        return WarmupOptimizer(inner, RAMP_AND_DECAY, lr=0.2, param_name=f"__warmup{number}")
    if kind == "clip":
        return GradientClippingOptimizer(inner, GradientClipping.NORM if number % 2 else GradientClipping.VALUE, 0.25)
    return OptimizerWrapper(inner) if kind == "wrap" else Counting(inner, f"__count{number}")


def step(optimizer, number):
    train(optimizer, dict(optimizer.params), first=number)


def alike(one, other):
    assert same(one.state_dict(), other.state_dict())
    assert list(one.params) == list(other.params)
    assert all(map(torch.equal, one.params.values(), other.params.values()))


@settings(max_examples=examples(60))
@given(tree=trees(), steps=st.integers(0, 2))
def test_loading_what_was_saved_is_the_identity_for_any_nesting(tree, steps):
    optimizer, untouched = built(tree), built(tree)
    optimizer.init_state()
    untouched.init_state()
    for i in range(steps):
        step(optimizer, i)
        step(untouched, i)
    alike(optimizer, untouched)
    saved = copy.deepcopy(optimizer.state_dict())
    assert optimizer.load_state_dict(saved) == ([], [])
    alike(optimizer, untouched)
    step(optimizer, steps)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    optimizer.load_state_dict(saved)
    assert same(optimizer.state_dict(), saved)
    assert (
        sum(isinstance(key, torch.Tensor) for key in optimizer.state)
        == len(optimizer.params)
        == len(saved["state"]) - sum(map(str(tree).count, ("count", "warm")))
    )


@settings(max_examples=examples(40))
@given(tree=trees(), steps=st.integers(1, 2))
def test_steps_after_a_checkpoint_of_any_nesting_are_those_of_an_uninterrupted_run(tree, steps):
    optimizer, resumed = built(tree), built(tree)
    for i in range(steps):
        step(optimizer, i)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    for parameter in resumed.params.values():
        parameter.data.fill_(7)
    resumed.init_state()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, {"model": dict(optimizer.params), "optimizer": optimizer})
        checkpoint.load(folder, {"model": dict(resumed.params), "optimizer": resumed})
    for i in range(steps, steps + 2):
        step(optimizer, i)
        step(resumed, i)
    alike(optimizer, resumed)


@settings(max_examples=examples(40))
@given(tree=trees(), steps=st.integers(0, 2))
def test_any_nesting_resumes_under_other_names(tree, steps):
    optimizer = built(tree)
    renamed = built(tree, spell=lambda number: f"z{number}.inner" if number % 2 else str(number))
    optimizer.init_state()
    renamed.init_state()
    for i in range(steps):
        step(optimizer, i)
    for k, group in enumerate(optimizer.param_groups):
        group["lr"] *= 0.5 + k
    rules = {r"\.(\d*[13579])\.([wb])\b": r".z\1.inner.\2"}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, {"model": dict(optimizer.params), "optimizer": optimizer})
        checkpoint.load(folder, {"model": dict(renamed.params), "optimizer": renamed}, rename=rules)
    for i in range(steps, steps + 2):
        step(optimizer, i)
        step(renamed, i)
    assert all(map(torch.equal, optimizer.params.values(), renamed.params.values()))
    for group, other in zip(optimizer.param_groups, renamed.param_groups, strict=True):
        assert {**group, "params": len(group["params"])} == {**other, "params": len(other["params"])}
    names = {name: re.sub(*next(iter(rules.items())), f".{name}")[1:] for name in optimizer.state_dict()["state"]}
    state, others = optimizer.state_dict()["state"], renamed.state_dict()["state"]
    assert same({names[name]: entries for name, entries in state.items()}, others)
