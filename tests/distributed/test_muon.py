"""Muon on real ranks: the same bits as torch's Muon on whole matrices in one process, however they are sharded."""

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt.sharding.view import view_of
from tests.distributed.matrices import SHAPES, give_gradient, matrices, same, value
from tests.harness import run_ranks

STEPS = 6
ABSENT = {2: {"plain", "rows", "table", "grid"}, 4: SHAPES.keys() - {"uneven"}}
OPTIONS = {"lr": 0.03, "momentum": 0.9}


def gradient(name, step, dtype=torch.float32):
    return None if name in ABSENT.get(step, ()) else value(name, step + 1, dtype)


def alone(options, steps=STEPS, dtype=torch.float32):
    """Parameters and momentum after torch's own steps on whole matrices."""
    whole = {name: torch.nn.Parameter(value(name, 0, dtype)) for name in SHAPES if 0 not in SHAPES[name]}
    optimizer = torch.optim.Muon(whole.values(), **options)
    for step in range(steps):
        for name, parameter in whole.items():
            parameter.grad = gradient(name, step, dtype)
        optimizer.step()
    return whole, {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in whole.items()}


def train(optimizer, parameters, steps=range(STEPS), dtype=torch.float32):
    for step in steps:
        for name, parameter in parameters.items():
            give_gradient(parameter, gradient(name, step, dtype))
        optimizer.step()


def differing(options, dtype=torch.float32):
    """The names of parameters and momenta on this rank that differ from torch's."""
    parameters = matrices(dtype)
    optimizer = shardopt.keyed("muon", parameters, **options)
    train(optimizer, parameters, dtype=dtype)
    whole, momentum = alone(options, dtype=dtype)
    state = optimizer.state_dict()["state"]
    assert state.keys() - {"empty"} == whole.keys()
    found = [name for name in whole if not same(parameters[name], whole[name].detach())]
    return found + [f"{name}.momentum" for name in whole if not same(state[name]["momentum_buffer"], momentum[name])]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_same_bits_as_torch_on_whole_matrices(ranks):
    assert run_ranks(ranks, differing, OPTIONS) == [[]] * ranks
