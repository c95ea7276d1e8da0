"""Runs a suite that knows nothing of accelerators on one: `DEVICE=cuda pytest -p tests.accelerator.plugin tests/...`.

`DEVICE` is the stand-in if it is not set. With `LATE=1` the default stream of the stand-in is late. CUDA's random
functions take no generator of the CPU, which the stand-in's do: numbers from one are made on the CPU and copied.
"""

import functools
import os

import pytest
import torch
import torch.utils._device

KIND = os.environ.get("DEVICE", "standin")

if KIND == "standin":
    from tests.standin import device
    from tests.standin import group as group  # registers the backend


RANDOM = ("rand", "randn", "randint", "randperm")
torch.utils._device._device_constructors()  # which keeps the functions that it finds first: not those of below


def on_the_cpu(made):
    """Has a random function work where its generator is."""

    @functools.wraps(made)
    def function(*args, generator=None, **kwargs):
        if generator is None or generator.device.type == KIND or "device" in kwargs:
            return made(*args, generator=generator, **kwargs)
        trained = kwargs.pop("requires_grad", False)
        return made(*args, generator=generator, device="cpu", **kwargs).to(KIND).requires_grad_(trained)

    return function


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch):
    torch.set_default_device(KIND)
    for name in RANDOM:
        monkeypatch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
    assert torch.randn(1).device.type == KIND
    if KIND == "standin":
        device.C.late(os.environ.get("LATE") == "1")
    yield
    torch.set_default_device(None)
    if KIND == "standin":
        device.C.late(False)
        assert not device.C.violations()
