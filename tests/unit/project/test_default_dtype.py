"""Where torch's default dtype is not fp32: what is computed stays what it is."""

import pytest
import torch
from torch import nn

import shardopt


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float64], ids=str)
def default(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_gradients_are_clipped_alike(default, dtype):
    weight = nn.Parameter(torch.zeros(3, dtype=dtype))
    weight.grad = torch.tensor([3.0, 4.0, 12.0], dtype=dtype)
    optimizer = shardopt.GradientClippingOptimizer(
        shardopt.keyed("sgd", {"w": weight}, lr=0.5), shardopt.GradientClipping.NORM, 1.0
    )
    optimizer.step()
    expected = -0.5 * torch.tensor([3.0, 4.0, 12.0], dtype=torch.float64) / 13
    torch.testing.assert_close(
        weight.double(), expected.double(), rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=0
    )


def test_a_scaler_steps(default):
    weight = nn.Parameter(torch.ones(2, dtype=torch.float32))
    optimizer = shardopt.keyed("sgd", {"w": weight}, lr=0.5)
    scaler = shardopt.GradScaler("cpu", init_scale=4.0)
    scaler.scale((weight * weight).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]


def test_stochastic_weight_averages_are_means_of_fp32(default):
    model = nn.Linear(1, 1, bias=False, dtype=torch.float32)
    swa = shardopt.SWA(model)
    for value in range(1, 8):
        nn.init.constant_(model.weight, value)
        swa.update()
    with swa.swap():
        assert model.weight.item() == pytest.approx(4.0, rel=1e-6)
