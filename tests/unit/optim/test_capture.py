"""Steps that are captured into a CUDA graph: own algorithms, whose numbers of the host replays would repeat, refuse."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardopt
from shardopt.errors import AlgorithmError
from shardopt.runtime import accelerator

OWN = (
    *("adafactor", "lamb", "lars", "lion", "ademamix", "schedulefreeadamw", "schedulefreesgd", "muon", "soap"),
    *("shampoo", "rowwiseadam", "rowwiseadagrad", "sparseadam", "lbfgs", "8-bit"),
)


@pytest.fixture
def cuda(monkeypatch):
    module = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(accelerator, "module_in_use", lambda: ("cuda", module))
    return module


def made(name):
    """Returns a parameter of one step, and what steps it."""
    weight = nn.Parameter(torch.randn(6, 6))
    options = {"state_dtype": torch.uint8} if name == "8-bit" else {}
    optimizer = shardopt.keyed("adamw" if name == "8-bit" else name, {"w": weight}, **options)

    def step():
        weight.grad = torch.randn(6, 6)
        if name == "sparseadam":
            weight.grad = weight.grad.to_sparse(1)
        optimizer.step(lambda: weight.square().sum()) if name == "lbfgs" else optimizer.step()

    return weight, optimizer, step


@pytest.mark.parametrize("name", OWN)
def test_a_captured_step_of_an_own_algorithm_is_refused_and_changes_nothing(name, cuda):
    cuda.is_current_stream_capturing = lambda: False
    weight, optimizer, step = made(name)
    step()
    before, state = weight.detach().clone(), str(optimizer.state_dict())
    cuda.is_current_stream_capturing = lambda: True
    with pytest.raises(AlgorithmError, match="captured into a graph"):
        step()
    assert torch.equal(weight, before) and str(optimizer.state_dict()) == state
    cuda.is_current_stream_capturing = lambda: False
    step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("options", [{"state_dtype": torch.uint8}, {}], ids=["8-bit", "lion"])
def test_so_is_one_within_backward(options, cuda):
    model = nn.Linear(4, 4)
    shardopt.in_backward(model, "adamw" if options else "lion", **options)
    with pytest.raises(AlgorithmError, match="captured into a graph"):
        model(torch.randn(2, 4)).sum().backward()


def test_an_accelerator_that_the_process_does_not_work_with_is_not_asked(cuda):
    cuda.is_initialized = lambda: False
    _, _, step = made("lion")
    step()


def test_the_compiler_is_left_to_decide_what_it_captures(cuda):
    assert accelerator.is_capturing()
    assert not torch.compile(accelerator.is_capturing, fullgraph=True, backend="eager")()
