"""Parameters on the host of a job on an accelerator, as FSDP2's CPUOffloadPolicy leaves them."""

import torch
from torch import nn

import shardopt
from tests.accelerator.support import needs_standin, on_accelerator

pytestmark = needs_standin


def on_one_rank(standin):
    return {each.__name__: each(standin) for each in (unscaled, updated_by_a_rate_of_the_device)}


def unscaled(standin):
    """Gradients of 1 that are on the CPU, whose scale is on the device."""
    weight, found = nn.Parameter(torch.zeros(4)), []
    optimizer = shardopt.keyed("sgd", {"w": weight}, lr=1.0)
    for scale in (4.0, 8.0, 16.0):
        scaler = shardopt.GradScaler(standin.KIND, init_scale=scale)
        weight.grad = torch.full((4,), scale)
        scaler.unscale_(optimizer)
        found.append(weight.grad.tolist()[0])
    return found


def updated_by_a_rate_of_the_device(standin):
    found = []
    for lr in (torch.tensor(0.5).to(standin.KIND), 0.5):
        weight = nn.Parameter(torch.ones(4, 4))
        weight.grad = torch.arange(16.0).view(4, 4)
        shardopt.keyed("adafactor", {"w": weight}, lr=lr).step()
        found.append(weight.tolist())
    return found[0] == found[1]


def test_parameters_on_the_host_are_changed_in_order():
    (found,) = on_accelerator(1, on_one_rank)
    assert found == {"unscaled": [1.0, 1.0, 1.0], "updated_by_a_rate_of_the_device": True}
