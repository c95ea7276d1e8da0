"""Steps that are captured into a CUDA graph: those with numbers of the host, which replays would repeat, refuse."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardopt
from shardopt.errors import AlgorithmError
from shardopt.optim.semi_sync.semisync_optimizer import SemisyncOptimizer
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


COUNTING = {
    "warm-up": lambda optimizer, model: shardopt.WarmupOptimizer(
        optimizer, [shardopt.WarmupStage(max_iters=9)], lr=0.1
    ),
    "semi-sync": lambda optimizer, model: shardopt.SemiSync(optimizer, every=2, process_group=None),
    "semi-sync of torchrec": lambda optimizer, model: SemisyncOptimizer(
        list(model.parameters()), optimizer, shardopt.keyed("sgd", model.named_parameters(), lr=0.1), 2
    ),
    "averages": lambda optimizer, model: [optimizer, shardopt.EMA(model).attach(optimizer)][0],
}


@pytest.mark.parametrize("kind", COUNTING)
def test_so_is_a_step_of_torchs_algorithms_where_the_host_counts_steps_beside(kind, cuda):
    cuda.is_current_stream_capturing = lambda: False
    model = nn.Linear(4, 4)
    optimizer = COUNTING[kind](shardopt.keyed("sgd", model.named_parameters(), lr=0.1), model)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    before, state = model.weight.detach().clone(), str(optimizer.state_dict())
    cuda.is_current_stream_capturing = lambda: True
    with pytest.raises(AlgorithmError, match="captured into a graph"):
        optimizer.step()
    assert torch.equal(model.weight, before) and str(optimizer.state_dict()) == state


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, shardopt.GradScaler])
def test_a_step_by_a_scaler_is_refused_as_it_asks_the_device_whether_to_step(scaler, cuda):
    weight, scaler = nn.Parameter(torch.ones(4)), scaler("cpu")
    optimizer = shardopt.keyed("adamw", {"w": weight})
    scaler.scale(weight.sum()).backward()
    with pytest.raises(AlgorithmError, match="GradScaler: found a step that is captured into a graph"):
        scaler.step(optimizer)
    cuda.is_current_stream_capturing = lambda: False
    scaler.step(optimizer)
    assert (weight < 1).all()


def test_averages_are_updated_outside_of_a_graph(cuda):
    averages = shardopt.EMA(nn.Linear(4, 4))
    with pytest.raises(AlgorithmError, match="call their update"):
        averages.update()
    assert averages.n_averaged == 0
    cuda.is_current_stream_capturing = lambda: False
    averages.update()
    assert averages.n_averaged == 1


def test_an_accelerator_that_the_process_does_not_work_with_is_not_asked(cuda):
    cuda.is_initialized = lambda: False
    _, _, step = made("lion")
    step()


def test_the_compiler_is_left_to_decide_what_it_captures(cuda):
    assert accelerator.is_capturing()
    assert not torch.compile(accelerator.is_capturing, fullgraph=True, backend="eager")()
