"""Runs a suite that knows nothing of accelerators on one: `DEVICE=cuda pytest -p tests.accelerator.plugin tests/...`.

`DEVICE` is the stand-in if it is not set. With `LATE=1` the default stream of the stand-in is late.
"""

import os

import pytest
import torch

KIND = os.environ.get("DEVICE", "standin")

if KIND == "standin":
    from tests.standin import device
    from tests.standin import group as group  # registers the backend


@pytest.fixture(autouse=True)
def on_the_device():
    torch.set_default_device(KIND)
    if KIND == "standin":
        device.C.late(os.environ.get("LATE") == "1")
    yield
    torch.set_default_device(None)
    if KIND == "standin":
        device.C.late(False)
        assert not device.C.violations()
