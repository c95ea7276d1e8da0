"""Estimates of state on an accelerator: bytes, the host memory of copies and buffers, and samples that lie there."""

import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.estimating import measure
from tests.accelerator.support import needs_standin, on_accelerator

pytestmark = needs_standin


def estimated(standin, root):
    """Returns an estimate before the first step, the bytes of a save after it, and where the samples were."""
    devices, noise_of = set(), measure.noise_of

    def noted(nbytes, device):
        devices.add(device.type)
        return noise_of(nbytes, device)

    measure.noise_of = noted
    model = torch.nn.Linear(700, 900).to("standin")
    app = {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters(), lr=0.1)}
    estimate = checkpoint.estimate(app, root, measure_seconds=60)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    app["optimizer"].step()
    return estimate, checkpoint.save(f"{root}/c", app).bytes_total, devices


def test_state_on_an_accelerator_is_estimated_by_samples_there(tmp_path):
    ((estimate, saved, devices),) = on_accelerator(1, estimated, str(tmp_path))
    assert estimate.bytes_by_rank == (saved,) and devices == {"standin"}
    assert estimate.save_seconds > 0 and estimate.load_seconds > 0
    staged, least = estimate.host_bytes["stage"], 3 * 4 * 700 * 900
    assert least < staged < saved and estimate.host_bytes["load"] > least  # two pinned buffers
