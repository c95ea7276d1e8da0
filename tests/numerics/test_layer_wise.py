"""LAMB and LARS in one process: beside a package's, and beside their equations, in float64."""

import copy

import pytest
import pytorch_optimizer
import torch

import shardopt
from shardopt.errors import GradientError

SHAPES = [(7, 5), (64,), (3, 4, 2), ()]
STEPS = 12


def tensors(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def parameters(dtype=torch.float64):
    return {f"w{i}": torch.nn.Parameter(tensor) for i, tensor in enumerate(tensors(0, dtype))}


def train(optimizer, params, first=0, last=STEPS):
    for step in range(first, last):
        for parameter, gradient in zip(params.values(), tensors(1 + step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


# The package adds eps to the norm of the update, too; and it would divide the rate, but for its option.
LAMB = {"weight_decouple": False, "eps": 0.0, "adam_debias": True}
PACKAGES = {
    "lamb": ("LAMB", pytorch_optimizer.Lamb, {"weight_decay": 0.1}, LAMB, {"most_norm": 10.0, "correct_bias": False}),
    "lamb-free": (
        "LAMB",
        pytorch_optimizer.Lamb,
        {"maximize": True, "weight_decay": 0.0},
        LAMB,
        {
            "most_norm": 10.0,
            "correct_bias": False,
        },
    ),
    "lars": ("LARS", pytorch_optimizer.LARS, {"weight_decay": 0.1, "trust_coefficient": 0.1}, {}, {}),
    "lars-nesterov": ("LARS", pytorch_optimizer.LARS, {"nesterov": True, "dampening": 0.3, "maximize": True}, {}, {}),
    "lars-plain": ("LARS", pytorch_optimizer.LARS, {"momentum": 0.0, "weight_decay": 0.1}, {}, {}),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_same_as_the_packages(case):
    name, theirs_class, options, theirs_options, ours_options = PACKAGES[case]
    theirs, ours = parameters(), parameters()
    train(theirs_class(theirs.values(), lr=0.05, foreach=False, **options, **theirs_options), theirs)
    eps = {"eps": 0.0} if name == "LAMB" else {}
    train(shardopt.keyed(name, ours, lr=0.05, **options, **ours_options, **eps), ours)
    for key, parameter in ours.items():
        assert (parameter - theirs[key]).abs().max() <= 1e-10, key
        assert not torch.equal(parameter, parameters()[key])


def test_lamb_is_the_papers_equations_and_a_step_of_zeros_is_none():
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    ours = {**parameters(), "zero": torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))}
    optimizer = shardopt.keyed("LAMB", ours, **options)
    wanted, moments = [tensor.clone() for tensor in tensors(0)], [[0.0, 0.0] for _ in SHAPES]
    for step in range(1, STEPS + 1):
        for number, gradient in enumerate(tensors(step)):
            ours[f"w{number}"].grad = gradient
            pair = moments[number]
            pair[0] = 0.8 * pair[0] + 0.2 * gradient
            pair[1] = 0.95 * pair[1] + 0.05 * gradient**2
            update = (pair[0] / (1 - 0.8**step)) / ((pair[1] / (1 - 0.95**step)) ** 0.5 + 1e-3) + 0.1 * wanted[number]
            wanted[number] = wanted[number] - 0.02 * wanted[number].norm() / update.norm() * update
        ours["zero"].grad = torch.zeros(3, dtype=torch.float64)
        optimizer.step()
    for number, tensor in enumerate(wanted):
        assert (ours[f"w{number}"] - tensor).abs().max() <= 1e-10
    assert not ours["zero"].any()
    ours["zero"].grad = torch.ones(3, dtype=torch.float64)  # the quotient of a parameter of zeros is 1
    optimizer.step()
    assert (ours["zero"] < -1e-3).all()


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_torchs_contract(name):
    """Options out of range, sparse gradients, closures, 16 bits, early state, a state dict that resumes exactly."""
    made = shardopt.algorithms.spec_of(name).optimizer
    for bad in ({"lr": -1.0}, {"weight_decay": -1.0}, {"nesterov": True, "momentum": 0.0}, {"most_norm": 0.0}):
        if set(bad) <= made([torch.zeros(2)]).defaults.keys():
            with pytest.raises(ValueError, match=f"{name}'s {next(iter(bad))}"):
                made([torch.zeros(2)], **bad)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = made([weight], lr=torch.tensor(0.1))
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(GradientError, match="sparse"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(3, 2)) and not optimizer.state[weight]

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    twin = torch.nn.Parameter(weight.detach().clone())
    other = made([twin])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, each in ((weight, optimizer), (twin, other)):
        parameter.grad = torch.full((3, 2), 0.5)
        each.step()
    assert torch.equal(weight, twin)
    narrow, wide = parameters(torch.bfloat16), {}
    early, late = shardopt.keyed(name, narrow), shardopt.keyed(name, copy.deepcopy(narrow))
    early.init_state()
    wide = {key: torch.nn.Parameter(parameter.detach().float()) for key, parameter in narrow.items()}
    of_wide = shardopt.keyed(name, wide)
    for each, params in ((early, narrow), (late, dict(late.params)), (of_wide, wide)):
        train(each, params, last=1)
    for key, parameter in narrow.items():
        assert torch.equal(parameter, late.params[key]) and parameter.dtype == torch.bfloat16
        if wide[key].grad.bfloat16().equal(wide[key].grad):
            assert torch.equal(parameter, wide[key].bfloat16())
