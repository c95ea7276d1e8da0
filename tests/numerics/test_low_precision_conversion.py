"""State of each form made into each other: exactly where that is wider, and told how far off where it is not."""

import copy
import logging
import re
from itertools import product

import pytest
import torch
from torch.distributed.tensor import Shard

import shardopt
from shardopt.errors import MismatchError
from shardopt.sharding.view import local_tensors
from tests.support.fake_rank import fake_rank, shard
from tests.support.low_precision import dequantized

BF16, FP32 = torch.bfloat16, torch.float32
FORMS = {
    "plain": {},
    "bf16": {"state_dtype": BF16},
    "codes": {"state_dtype": torch.uint8},
    "codes, at random": {"state_dtype": torch.uint8, "rounding": "stochastic"},
    "master": {"master_dtype": FP32},
    "bf16, master": {"state_dtype": BF16, "master_dtype": FP32},
    "codes, master": {"state_dtype": torch.uint8, "master_dtype": FP32},
}
OF_FP32 = [name for name in FORMS if "master" not in name]
PAIRS = [(FP32, *pair) for pair in product(OF_FP32, repeat=2)] + [(BF16, *pair) for pair in product(FORMS, repeat=2)]
ALGORITHMS = {"adamw": {}, "sgd": {"momentum": 0.9}, "lion": {}, "rprop": {}}
SHAPES = {"wide": (9, 601), "vector": (77,), "unused": (70, 80)}


def stored_as(form):
    return {option: value for option, value in FORMS[form].items() if option != "rounding"}


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()
    }


def stepped(algorithm, form, dtype):
    params = parameters(dtype)
    optimizer = shardopt.keyed(algorithm, params, **ALGORITHMS[algorithm], **FORMS[form])
    for step in (1, 2, 3):
        for name, gradient in parameters(dtype, step).items():
            params[name].grad = None if name == "unused" else gradient.detach()
        optimizer.step()
    optimizer.init_state()  # of the one without gradients
    return params, optimizer


def numbers(state, name):
    """What an entry stands for, fp32."""
    value = state[name]
    if value.dtype != torch.uint8:
        return value.float()
    signed = name not in ("exp_avg_sq", "step_size")
    return dequantized(value, state[f"{name}_scale"], signed).float().view(value.shape)


def is_exact(then, now):
    """fp32 holds what any form stands for; codes times their scales are no bf16 numbers."""
    return now.dtype in (FP32, then.dtype)


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        pytest.param(
            *pair, marks=() if number % 6 == 0 else pytest.mark.exhaustive, id=f"{pair[0]}, {pair[1]} to {pair[2]}"
        )
        for number, pair in enumerate(PAIRS)
    ],
)
def test_state_of_every_form_becomes_every_other(dtype, one, other, caplog):
    for algorithm in ALGORITHMS:
        params, first = stepped(algorithm, one, dtype)
        twins = copy.deepcopy(params)
        second = shardopt.keyed(algorithm, twins, **ALGORITHMS[algorithm], **FORMS[other])
        second.init_state()
        if FORMS[one] != FORMS[other]:
            # Another rounding alone is no other form of what is stored, and is refused as any other option.
            remedy = "rounding" if stored_as(one) == stored_as(other) else "convert_state=True"
            with pytest.raises(MismatchError, match=remedy):
                second.load_state_dict(first.state_dict())
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shardopt"):
            second.load_state_dict(first.state_dict(), convert_state=True)
        told = [float(error) for error in re.findall(r"at most (\S+) of", caplog.text)]
        for option, value in FORMS[other].items():
            assert second.param_groups[0][option] == str(value).removeprefix("torch.")
        states = first.state_dict()["state"], second.state_dict()["state"]
        lossy = False
        for name in ("wide", "vector"):
            then, now = (state[name] for state in states)
            for entry in now:
                if entry.endswith("_scale") or entry == "step":
                    continue
                if entry == "master":
                    assert torch.equal(now[entry], then[entry] if entry in then else params[name].float())
                    continue
                before, after = numbers(then, entry), numbers(now, entry)
                if is_exact(then[entry], now[entry]):
                    assert torch.equal(before, after), (algorithm, name, entry)
                else:
                    lossy = lossy or not torch.equal(before, after)
                    largest = before.abs().max()
                    assert (before - after).abs().max() <= largest * (max(told, default=0.0) * 1.05)
                    assert (before - after).abs().max() <= largest / 16
            assert torch.equal(params[name], twins[name])
        if "master" in one and "master" not in other:
            assert "master of 3 parameters: torch.float32 to none" in caplog.text
        elif FORMS[one] == FORMS[other]:
            assert not caplog.text
        assert not lossy or told
        # Back: what was widened has its bits again.
        third = shardopt.keyed(algorithm, parameters(dtype), **ALGORITHMS[algorithm], **FORMS[one])
        third.init_state()
        third.load_state_dict(second.state_dict(), convert_state=True)
        again = third.state_dict()["state"]
        for name in ("wide", "vector"):
            for entry, value in states[0][name].items():
                wide = entry in states[1][name] and is_exact(value, states[1][name][entry])
                if wide and entry != "step" and not entry.endswith("_scale"):
                    assert torch.equal(again[name][entry], value), (algorithm, name, entry)
        if "step" not in states[0].get("unused", {"step": 0}) and "at random" in other:
            continue  # it may have had steps, by all that is known: what is drawn is that of a later one
        # A parameter that never had a step begins as it would have.
        fresh = shardopt.keyed(algorithm, parameters(dtype), **ALGORITHMS[algorithm], **FORMS[other])
        for optimizer in (second, fresh):
            optimizer.params["unused"].grad = parameters(dtype, 9)["unused"].detach()
            for name in ("wide", "vector"):
                optimizer.params[name].grad = None
            optimizer.step()
        assert torch.equal(second.params["unused"], fresh.params["unused"]), algorithm


def test_shards_are_converted_by_themselves_and_codes_of_cut_rows_are_refused():
    whole, gradient = torch.randn(70, 300), torch.randn(70, 300)
    with fake_rank(1, 2) as mesh:
        for dim in (0, 1):
            parameter = torch.nn.Parameter(shard(whole, mesh, Shard(dim)))
            one = shardopt.keyed("adamw", {"w": parameter})
            parameter.grad = shard(gradient, mesh, Shard(dim))
            one.step()
            other = shardopt.keyed("adamw", {"w": parameter}, state_dtype=torch.uint8)
            other.init_state()
            if dim == 1:
                with pytest.raises(MismatchError, match=r"state\.w: found exp_avg in more than 8 bits"):
                    other.load_state_dict(one.state_dict(), convert_state=True)
                continue
            other.load_state_dict(one.state_dict(), convert_state=True)
            state, wanted = other.state_dict()["state"]["w"], one.state_dict()["state"]["w"]
            assert state["exp_avg"].placements == parameter.placements
            here = {name: local_tensors(value)[0] for name, value in state.items()}
            off = numbers(here, "exp_avg") - local_tensors(wanted["exp_avg"])[0]
            assert off.abs().max() <= gradient.abs().max() / 160


@pytest.mark.parametrize("convert", [False, True])
def test_a_run_that_was_never_stepped_keeps_the_first_step_sizes(convert):
    """Those that Rprop's first step takes from its rate."""
    trained = []
    for early in (False, True):
        params = parameters(FP32)
        optimizer = shardopt.keyed("rprop", params, lr=0.3)
        if early:
            stored = shardopt.keyed("rprop", parameters(FP32), lr=0.3, state_dtype=BF16)
            stored.init_state()
            optimizer.init_state()
            optimizer.load_state_dict(stored.state_dict(), **{"convert_state" if convert else "convert_dtype": True})
        for name, gradient in parameters(FP32, 1).items():
            params[name].grad = gradient.detach()
        optimizer.step()
        trained.append(params)
    for name in SHAPES:
        assert torch.equal(*(params[name] for params in trained))
