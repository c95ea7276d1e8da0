"""State in fewer bits follows gradients that change: moments and distances, element by element, against fp32's."""

import itertools
import logging

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import AlgorithmError
from tests.support.low_precision import dequantized

SHAPE = (16, 256)  # 8-bit codes, a block to a row
STORED = {"8 bits": torch.uint8, "bf16": torch.bfloat16}
# How far the mean of an entry over elements, and the root of its mean squared distance from fp32's, may be off.
TOLERANCE = {"8 bits": (0.12, 0.55), "bf16": (0.04, 0.13)}
ALGORITHMS = {
    "adamw": {"weight_decay": 0.0},
    "adam": {"amsgrad": True},
    "adamax": {},
    "rmsprop": {"alpha": 0.999},
    "ademamix": {},
    "adagrad": {},
    "adadelta": {"rho": 0.99, "lr": 1.0},
    "lion": {"lr": 1e-4},
    "nadam": {},
    "radam": {},
    "sgd": {"momentum": 0.99, "dampening": 0.9},
}
CASES = [each for each in itertools.product(ALGORITHMS, STORED) if each != ("adadelta", "8 bits")]
BETAS = ((0.9, 0.95), (0.9, 0.99), (0.95, 0.9999))
SIGNED = {"exp_avg", "exp_avg_slow", "momentum_buffer"}
WIDER = {
    # A maximum keeps what noise in the moment has once lifted.
    ("adam", "8 bits", "max_exp_avg_sq"): (0.25, 0.45),
    # No gradient brings it back: between two runs in fp32 whose gradients have other noise it differs by 0.5.
    ("adadelta", "bf16", "acc_delta"): (0.04, 0.26),
}


def fall(step, noisy):
    """Gradients of which half of each block falls to a tenth after 100 steps."""
    gradient = torch.ones(SHAPE)
    if noisy:
        gradient *= 1 + 0.5 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
    if step >= 100:
        gradient[:, :128] *= 0.1
    return gradient


def numbers_after(algorithm, options, steps, noisy):
    """The parameter's distance from its start, and the entries of state that lie like it, as fp32."""
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = shardopt.keyed(algorithm, {"w": parameter}, **options)
    for step in range(steps):
        parameter.grad = fall(step, noisy)
        optimizer.step()
    found = {"distance": -parameter.detach()}
    state = optimizer.state_dict()["state"]["w"]
    for name, value in state.items():
        if value.shape == SHAPE:
            coded = value.dtype is torch.uint8
            found[name] = dequantized(value, state[f"{name}_scale"], name in SIGNED) if coded else value.float()
    return found


def strays(algorithm, how, steps, noisy, options):
    """What is further from fp32's than it may be: entry, half of the block, ratio of means, distance."""
    wanted = numbers_after(algorithm, options, steps, noisy)
    found = numbers_after(algorithm, {**options, "state_dtype": STORED[how]}, steps, noisy)
    off = []
    for name, exact in wanted.items():
        mean, spread = WIDER.get((algorithm, how, name), TOLERANCE[how])
        for half in (slice(0, 128), slice(128, 256)):
            one, other = exact[:, half].double(), found[name][:, half].double()
            ratio = float(other.mean() / one.mean())
            distance = float(((other - one) / one.abs().mean()).square().mean().sqrt())
            if not (abs(ratio - 1) <= mean and distance <= spread):
                off.append((name, half, round(ratio, 3), round(distance, 3)))
    return off


@pytest.mark.parametrize(("algorithm", "how"), [("adamw", "8 bits"), ("adamax", "bf16")])
def test_state_in_fewer_bits_follows_gradients_that_fall(algorithm, how):
    assert not strays(algorithm, how, 700, True, ALGORITHMS[algorithm])


@pytest.mark.exhaustive
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("algorithm", "how"), CASES)
def test_state_of_every_algorithm_and_form_follows_gradients_that_fall(algorithm, how, noisy):
    assert not strays(algorithm, how, 3000, noisy, ALGORITHMS[algorithm])


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("betas", BETAS)
def test_state_follows_with_every_beta(betas, how):
    assert not strays("adamw", how, 3000, True, {"betas": betas, "weight_decay": 0.0})


@pytest.mark.parametrize("how", STORED)
def test_a_maximum_stays_while_the_largest_of_its_block_grows(how):
    """The gradients of one half end after 30 steps; those of the other grow from step 60 on."""
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    options = {"amsgrad": True, "betas": (0.9, 0.9), "state_dtype": STORED[how]}
    optimizer = shardopt.keyed("adam", {"w": parameter}, **options)
    for step in range(150):
        parameter.grad = torch.ones(SHAPE)
        parameter.grad[:, :128] *= (1 + torch.arange(128) / 128) * (step < 30)
        parameter.grad[:, 128:] *= 1.04 ** max(0, step - 60)
        optimizer.step()
    state = optimizer.state_dict()["state"]["w"]
    found = state["max_exp_avg_sq"]
    found = dequantized(found, state["max_exp_avg_sq_scale"], False) if how == "8 bits" else found.float()
    wanted = (1 + torch.arange(128) / 128) ** 2 * (1 - 0.9**30)
    off = found[:, :128] / wanted - 1
    assert float(off.mean().abs()) < 0.05 and float(off.abs().max()) < 0.25


LOST = {
    "8 bits": ("adamw", {"state_dtype": torch.uint8}, "share of 0.001, and state in uint8 loses changes below 0.062"),
    "bf16": ("ademamix", {"state_dtype": torch.bfloat16}, "share of 0.0001"),
    "a sum": ("adagrad", {"state_dtype": torch.bfloat16}, "share of 0,"),
    "RMSprop": ("rmsprop", {"state_dtype": torch.uint8, "alpha": 0.99}, "share of 0.01,"),
}


@pytest.mark.parametrize("case", LOST)
def test_rounding_to_nearest_that_cannot_follow_is_said(case, caplog):
    algorithm, options, said = LOST[case]
    shardopt.algorithms.low_precision.options._log_lost_changes.cache_clear()
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    with caplog.at_level(logging.WARNING, "shardopt"):
        shardopt.keyed(algorithm, {"w": parameter}, **options)
        assert not caplog.records
        for _ in range(2):
            shardopt.keyed(algorithm, {"w": parameter}, rounding="nearest", **options)
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_rounding_to_nearest_that_follows_is_not_spoken_of(caplog):
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    options = {"state_dtype": torch.bfloat16, "rounding": "nearest", "betas": (0.9, 0.99)}
    with caplog.at_level(logging.WARNING, "shardopt"):
        shardopt.keyed("adamw", {"w": parameter}, **options)
    assert not caplog.records


def test_adadelta_refuses_8_bits():
    weights = {"w": torch.nn.Parameter(torch.zeros(SHAPE)), "other": torch.nn.Parameter(torch.zeros(SHAPE))}
    eight = {"state_dtype": torch.uint8}
    for options in (eight, {**eight, "rounding": "stochastic"}, {"groups": [{"match": "other", **eight}]}):
        with pytest.raises(AlgorithmError, match=r"state_dtype: found 'uint8'.* Adadelta.* 'bfloat16' or None"):
            shardopt.keyed("adadelta", weights, **options)


@pytest.mark.parametrize("rounding", ["nearest", None])
def test_8_bit_state_of_adadelta_that_was_saved_is_converted(rounding, tmp_path):
    """As the refusal says."""

    def adadelta(**options):
        return shardopt.keyed("adadelta", {"w": parameter}, **options)

    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    earlier = adadelta(state_dtype=torch.uint8, rounding="nearest")
    parameter.grad = torch.ones(SHAPE)
    earlier.step()
    earlier.param_groups[0]["rounding"] = rounding
    checkpoint.save(tmp_path / "saved", {"optimizer": earlier})
    saved, now = adadelta(state_dtype=torch.uint8, rounding="nearest"), adadelta(state_dtype=torch.bfloat16)
    if rounding is None:
        saved.keep_options("rounding")
    checkpoint.load(tmp_path / "saved", {"optimizer": saved}, init_state=True)
    now.init_state()
    now.load_state_dict(saved.state_dict(), convert_state=True)
    now.step()
    state = now.state_dict()["state"]["w"]
    assert state["acc_delta"].dtype is torch.bfloat16 and float(state["step"]) == 2


def test_a_checkpoint_of_the_earlier_default_loads_and_follows_from_there(tmp_path, caplog):
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    options = {"state_dtype": torch.uint8}
    before = shardopt.keyed("adamw", {"w": parameter}, rounding="nearest", **options)
    parameter.grad = torch.ones(SHAPE)
    before.step()
    checkpoint.save(tmp_path / "saved", {"optimizer": before})
    after = shardopt.keyed("adamw", {"w": parameter}, **options)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shardopt"):
        checkpoint.load(tmp_path / "saved", {"optimizer": after}, init_state=True)
    assert after.param_groups[0]["rounding"] is None
    assert ["rounded at random from here on" in record.getMessage() for record in caplog.records] == [True]
    state, then = after.state_dict()["state"]["w"], before.state_dict()["state"]["w"]
    assert all(torch.equal(state[name], then[name]) for name in then)
