"""Muon on real ranks: the same bits as torch's Muon on whole matrices in one process, however they are sharded."""

import pytest
import torch

import shardopt
from tests.distributed.matrices import SHAPES, give_gradient, matrices, same, value
from tests.harness import run_ranks

STEPS = 6
ABSENT = {2: {"plain", "rows", "table", "grid"}, 4: SHAPES.keys() - {"uneven"}}
OPTIONS = {"lr": 0.03, "momentum": 0.9}


def gradient(name, step, dtype=torch.float32):
    return None if name in ABSENT.get(step, ()) else value(name, step + 1, dtype)


def alone(options, make, dtype=torch.float32):
    """Parameters and momentum after steps on whole matrices, with an optimizer that is not told of any ranks."""
    whole = {name: torch.nn.Parameter(value(name, 0, dtype)) for name in SHAPES if 0 not in SHAPES[name]}
    optimizer = make(whole, **options)
    for step in range(STEPS):
        for name, parameter in whole.items():
            parameter.grad = gradient(name, step, dtype)
        optimizer.step()
    return whole, {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in whole.items()}


def torchs(parameters, **options):
    return torch.optim.Muon(parameters.values(), **options)


def ours(parameters, **options):
    return shardopt.keyed("muon", parameters, **options)


def train(optimizer, parameters, steps=range(STEPS), dtype=torch.float32):
    for step in steps:
        for name, parameter in parameters.items():
            give_gradient(parameter, gradient(name, step, dtype))
        optimizer.step()


def differing(options, make=torchs, dtype=torch.float32):
    """The names of parameters and momenta on this rank that differ from those of whole matrices."""
    parameters = matrices(dtype)
    optimizer = ours(parameters, **options)
    train(optimizer, parameters, dtype=dtype)
    whole, momentum = alone(options, make, dtype)
    state = optimizer.state_dict()["state"]
    assert state.keys() - {"empty"} == whole.keys()
    found = [name for name in whole if not same(parameters[name], whole[name].detach())]
    return found + [f"{name}.momentum" for name in whole if not same(state[name]["momentum_buffer"], momentum[name])]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_same_bits_as_torch_on_whole_matrices(ranks):
    assert run_ranks(ranks, differing, OPTIONS) == [[]] * ranks


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({**OPTIONS, "ns_dtype": "float32"}, torch.float32),
        (OPTIONS, torch.bfloat16),
        ({**OPTIONS, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, torch.bfloat16),
    ],
    ids=["float32", "bfloat16", "bfloat16-adjusted"],
)
def test_same_bits_on_any_number_of_ranks(options, dtype):
    assert run_ranks(4, differing, options, ours, dtype) == [[]] * 4
