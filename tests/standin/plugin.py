"""Runs a suite that knows nothing of it on the stand-in: `pytest -p tests.standin.plugin`; with LATE=1, its default
stream is late."""

import os

import pytest
import torch

from tests.standin import device
from tests.standin import group as group  # registers the backend


@pytest.fixture(autouse=True)
def on_the_standin():
    torch.set_default_device("standin")
    device.C.late(os.environ.get("LATE") == "1")
    yield
    torch.set_default_device(None)
    device.C.late(False)
    assert not device.C.violations()
