"""torch's implementation is chosen for each tensor by itself: replicas have other tensors beside them on each rank."""

from functools import partial

import pytest
import torch
from torch import nn

import shardopt

STEPS = 4
ALGORITHMS = {
    "sgd": {"momentum": 0.9, "dampening": 0.5},
    "adam": {},
    "adamw": {"weight_decay": 0.1},
    "adagrad": {},
}
BESIDE = {
    "later": {},  # gets its first gradient in the third step
    "float16": {"dtype": torch.float16},
    "complex": {"dtype": torch.complex64},  # torch gathers none for fused
    "turned": {},  # gradients whose elements lie in another order
    "gap": {},  # a column of a wider matrix
}


def made(name, dtype):
    generator = torch.Generator().manual_seed(len(name))
    whole = torch.randn(6, 5, generator=generator).to(dtype)
    return nn.Parameter(whole[:, :3] if name == "gap" else whole[:, :3].contiguous())


def gradient_of(name, step, dtype):
    if name == "later" and step < 2:
        return None
    gradient = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + len(name))).to(dtype)
    return gradient.t().contiguous().t() if name == "turned" else gradient


def trained(algorithm, dtype, *names):
    params = {name: made(name, BESIDE.get(name, {}).get("dtype", dtype)) for name in names}
    optimizer = shardopt.keyed(algorithm, params, lr=0.1, **ALGORITHMS[algorithm])
    for step in range(STEPS):
        for name, parameter in params.items():
            parameter.grad = gradient_of(name, step, parameter.dtype)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return {name: [parameter.detach(), *state[name].values()] for name, parameter in params.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_bits_of_a_parameter_do_not_depend_on_what_is_beside_it(algorithm, beside, dtype):
    together = trained(algorithm, dtype, "w", beside)
    for name in ("w", beside):
        for here, alone in zip(together[name], trained(algorithm, dtype, name)[name], strict=True):
            assert torch.equal(here, alone), name


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have their parameter's dtype")
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad"])
def test_gradients_of_another_dtype_step_as_in_torch(algorithm):
    """From the second step on: the first has seen the tensors lie in order."""
    found = []
    for make in (getattr(torch.optim, algorithm), lambda params, lr: shardopt.keyed(algorithm, params, lr=lr)):
        params = {name: nn.Parameter(torch.ones(3)) for name in "pq"}
        optimizer = make(params.items(), lr=0.1)
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16):
            params["q"].grad = None
            params["q"].grad_dtype = dtype
            params["p"].grad, params["q"].grad = torch.full((3,), 0.3), torch.full((3,), 0.3, dtype=dtype)
            optimizer.step()
        found.append([each.tolist() for each in params.values()])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("algorithm", "options", "entry"), [("SGD", {"momentum": 0.9}, "momentum_buffer"), ("Adagrad", {}, "sum")]
)
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_state_of_another_dtype_steps_as_in_torch(algorithm, options, entry, dtype, other):
    """State that a program has converted: torch's loops take it, and its fused kernels raise in the middle."""
    found = []
    for make in (getattr(torch.optim, algorithm), partial(shardopt.keyed, algorithm)):
        params = {name: nn.Parameter(torch.linspace(0.5, 1, 5, dtype=dtype)) for name in "pq"}
        optimizer = make(params.items(), lr=0.1, **options)
        for _ in range(3):
            for each in params.values():
                each.grad = torch.full_like(each, 0.3)
            optimizer.step()
            state = optimizer.state[params["q"]]
            state[entry] = state[entry].to(other)
        found.append((params["p"].detach(), [*params["q"].tolist(), *optimizer.state[params["q"]][entry].tolist()]))
    torch.testing.assert_close(found[0][0], found[1][0])  # which may be fused
    assert found[0][1] == found[1][1]
