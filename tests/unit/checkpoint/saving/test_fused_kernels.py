"""Fused tables have a kernel beside their optimizer: its rate follows a load, and what no state has is told of."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardopt import checkpoint
from tests.support.as_torchrecs import Combined, Keyed


class Kernel:
    """As FBGEMM's."""

    def __init__(self, rate, algorithm):
        self.rate, self.optimizer = rate, SimpleNamespace(name=algorithm)

    def get_learning_rate(self):
        return self.rate


class Fused(Keyed):
    """As torchrec's fused optimizer, which sets the rate of its kernel between steps."""

    def __init__(self, params, kernel):
        super().__init__(params, torch.optim.SGD(params.values(), lr=kernel.rate))
        self._emb_module = kernel

    def zero_grad(self, set_to_none=True):
        self._emb_module.rate = self.param_groups[0]["lr"]


def fused_app(rate, algorithm="EXACT_ROWWISE_ADAGRAD"):
    table = nn.Parameter(torch.zeros(2, 2))
    fused = Fused({"table": table}, Kernel(rate, algorithm))
    return {"model": {"table": table}, "optimizer": Combined([fused]), "step": 0}, fused


class Trainer:
    """Has the optimizer's state as a part of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.fixture
def fbgemm(monkeypatch):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", sys)


@pytest.mark.parametrize("around", [lambda optimizer: optimizer, Trainer])
def test_a_load_gives_kernels_the_rates_of_their_groups(tmp_path, fbgemm, around):
    app, fused = fused_app(0.5)
    checkpoint.save(tmp_path / "c", {**app, "optimizer": around(app["optimizer"])})
    app, fused = fused_app(0.1)
    checkpoint.load(tmp_path / "c", {**app, "optimizer": around(app["optimizer"])})
    assert fused.param_groups[0]["lr"] == fused._emb_module.rate == 0.5


def test_a_kernel_with_another_rate_than_its_group_is_told_of_once(tmp_path, caplog, fbgemm):
    app, fused = fused_app(0.5)
    with checkpoint.Manager(tmp_path) as manager:
        for step in range(1, 5):
            app["step"] = step
            if step > 1:
                fused.param_groups[0]["lr"] = 0.5 / step
            manager.save(step, app)
            assert sum("fused tables" in each for each in caplog.messages) == (step > 1)
    (line,) = [each for each in caplog.messages if "fused tables" in each]
    assert line.startswith("optimizer has fused tables that the next backward moves by another rate")


@pytest.mark.parametrize("algorithm", ["ADAM", "PARTIAL_ROWWISE_LAMB", "EXACT_ADAGRAD"])
def test_kernels_that_count_steps_anew_are_told_of_once(tmp_path, caplog, fbgemm, algorithm):
    """Not in a run that begins, nor where the program has set the count that the run had."""

    def job(steps, count):
        app, fused = fused_app(0.5, algorithm)
        kernel = fused._emb_module
        kernel.iter, kernel.iter_cpu = torch.tensor([count]), torch.tensor([0])
        caplog.clear()
        with checkpoint.Manager(tmp_path) as manager:
            manager.restore(app)
            for app["step"] in steps:
                kernel.iter_cpu.fill_(int(kernel.iter_cpu) or int(kernel.iter)).add_(1)  # as a forward does
                manager.save(app["step"], app)
        return [each for each in caplog.messages if "FBGEMM's count" in each]

    assert job([1, 2, 3], count=0) == []
    assert job([4, 5], count=3) == []
    lines = job([6, 7], count=0)
    assert len(lines) == (algorithm != "EXACT_ADAGRAD")
    assert all("is less than 6 here" in line for line in lines)
