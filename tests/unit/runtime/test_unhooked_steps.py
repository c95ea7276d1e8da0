"""Optimizers of classes that leave out torch's constructor, as torchrec's `KeyedOptimizerWrapper`: their hooks run."""

import copy
import threading

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.writing import staging
from shardopt.errors import PartialLoadError
from shardopt.runtime.partial_loads import mark_half_stepped
from tests.support.as_torchrecs import Keyed as Shared


class Keyed(Shared):
    """One whose step torch has not wrapped, as it does of a class that is copied."""

    def step(self, closure=None):
        self.inner.step(closure)


class Counting(Keyed):
    """Another class's step within its own."""

    def step(self, closure=None):
        super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """A wrapper without a place for hooks, as those of trainers and torchrec's clipping."""

    def __init__(self, optimizer):
        self._optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure=None):
        self._optimizer.step(closure)


def made(kind=Keyed, size=2):
    model = torch.nn.Linear(size, size)
    optimizer = kind(dict(model.named_parameters()), torch.optim.Adam(model.parameters(), lr=0.1, foreach=False))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", [Keyed, Counting])
@pytest.mark.parametrize("schedule", ["none", "before", "after"])
def test_averages_follow_each_step_once(kind, schedule):
    model, optimizer = made(kind)
    _, other = made(Keyed)
    if schedule == "before":
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    averages = shardopt.EMA(model, decay=0.5)
    end = averages.attach(optimizer)
    shardopt.EMA(model, decay=0.5).attach(other)
    if schedule == "after":
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    for _ in range(3):
        optimizer.step()
    assert averages.state_dict()["state"]["__averaging"]["n_averaged"] == 3
    end()
    optimizer.step()
    assert averages.state_dict()["state"]["__averaging"]["n_averaged"] == 3


def test_averages_follow_once_where_a_program_has_put_a_function_around_a_step():
    """They were updated twice: hooks ran for the function, and within it."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)
    averages = shardopt.EMA(model, decay=0.5)
    averages.attach(optimizer)
    optimizer.step()
    assert averages.state_dict()["state"]["__averaging"]["n_averaged"] == 1


def test_averages_follow_what_a_wrapper_without_hooks_steps():
    model, optimizer = made()
    averages = shardopt.EMA(model, decay=0.5)
    averages.attach(Wrapper(Wrapper(optimizer)))
    Wrapper(optimizer).step()
    assert averages.state_dict()["state"]["__averaging"]["n_averaged"] == 1


def test_a_copy_steps_itself():
    class Own(Counting):  # torch wraps the step of a copy's class
        def step(self, closure=None):
            super().step(closure)

    model, optimizer = made(Own)
    shardopt.EMA(model, decay=0.5).attach(optimizer)()
    before = [each.clone() for each in model.parameters()]
    copied = copy.deepcopy(optimizer)
    for each in copied.params.values():
        each.grad = torch.ones_like(each)
    copied.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert not torch.equal(before[0], next(iter(copied.params.values())))


def test_a_lazy_save_holds_the_step_until_its_copy_is_made(tmp_path, monkeypatch):
    model, optimizer = made(size=300)
    unheld, opened = staging.copy_on_host, threading.Event()

    def held(host, source):
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(30)
        unheld(host, source)

    monkeypatch.setattr(staging, "copy_on_host", held)
    before = model.weight.detach().clone()
    pending = checkpoint.async_save(tmp_path / "c", {"model": model, "optimizer": optimizer}, stage="lazy")
    threading.Timer(0.1, opened.set).start()
    optimizer.step()
    pending.result()
    with checkpoint.open(tmp_path / "c") as reader:
        assert torch.equal(reader.read("model.weight"), before)


def test_one_that_is_half_loaded_refuses_its_step():
    _, optimizer = made()
    mark_half_stepped(optimizer, "a load")
    with pytest.raises(PartialLoadError, match="a load did not end well"):
        optimizer.step()
