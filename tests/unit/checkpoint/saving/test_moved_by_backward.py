"""Tables that a library's optimizer moves within backward, as torchrec's: views that have no gradient."""

import logging
import sys
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.planning.frozen import frozen_otherwise
from shardopt.checkpoint.saving.writing.staging import changed_by_steps_alone
from shardopt.errors import AlgorithmError, MismatchError, StateError
from shardopt.optim import CombinedOptimizer, KeyedOptimizer
from shardopt.optim.semi_sync.weights import refuse_unfit
from shardopt.state.flatten import flatten
from shardopt.state.names import ParameterNames


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.over = nn.Embedding(6, 4), nn.Linear(4, 1)


class Fused(torch.optim.Optimizer):
    """Another library's keyed optimizer: steps the views in backward, and keeps a sum of each."""

    def __init__(self, model, others=()):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, self.defaults = (
            OrderedDict(),
            OrderedDict(),
            {},
        )
        view = model.table.weight.detach()
        self.params, self.inner = {"table.weight": view}, list(others)
        self.state = {view: {"sum": torch.zeros(6)}}
        self.param_groups = [{"params": [view], "lr": 0.1}]
        for name, each in self.inner:
            self.params[name] = each
        if self.inner:
            self.adam = torch.optim.Adam([each for _, each in self.inner], lr=0.1)
            self.param_groups += self.adam.param_groups

    def all_state(self):
        return {**self.state, **(self.adam.state if self.inner else {})}

    def state_dict(self):
        names = {each: name for name, each in self.params.items()}
        return {"state": {names[each]: dict(state) for each, state in self.all_state().items()}}

    def load_state_dict(self, state):
        assert state["state"].keys() == self.state_dict()["state"].keys()

    def init_state(self):
        for _, each in self.inner:
            each.grad = torch.zeros_like(each)
        self.adam.step()

    def step(self, closure=None):
        for view, state in self.state.items():
            state["sum"] += 1
            view += 1
        if self.inner:
            self.adam.step()


class Page(KeyedOptimizer):
    """As the page on torchrec has it."""

    updates_in_backward = True

    def __init__(self, fused):
        super().__init__(dict(fused.params), fused.state, list(fused.param_groups))

    def step(self, closure=None):
        pass

    def zero_grad(self, set_to_none=True):
        pass


def both(model):
    dense = shardopt.keyed("adam", model.over.named_parameters("over"), lr=0.1)
    return CombinedOptimizer([("", dense), ("", Page(Fused(model)))])


@pytest.mark.parametrize("form", ["library's", "the page's"])
def test_a_lazy_save_copies_them_in_the_call(form):
    model = Net()
    optimizer = Fused(model) if form == "library's" else both(model)
    dense = shardopt.keyed("adam", model.over.named_parameters("over"), lr=0.1)
    dense.init_state()
    lazy = changed_by_steps_alone(flatten({"model": model, "tables": optimizer, "dense": dense}))
    assert not [key for key in lazy if "table" in key]
    assert form == "the page's" or "model.over.weight" in lazy


def test_who_needs_gradients_refuses_them():
    model = Net()
    optimizer = both(model)
    assert optimizer.updates_in_backward
    with pytest.raises(StateError, match="cannot be clipped"):
        shardopt.GradientClippingOptimizer(optimizer, clipping="norm", max_gradient=1.0)
    with pytest.raises(AlgorithmError):
        refuse_unfit(optimizer, "inner")


def test_frozen_parameters_are_none_of_them():
    model = Net().requires_grad_(False)
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1)
    record = KeyedOptimizer(dict(model.named_parameters()), {}, [{"params": list(model.parameters())}])
    assert not optimizer.updates_in_backward and not record.updates_in_backward


def test_a_save_takes_views_of_the_models_own_memory_and_refuses_others(tmp_path):
    model = Net()
    checkpoint.save(tmp_path / "own", {"model": model, "optimizer": both(model)})
    other = Net()
    with pytest.raises(StateError, match="no parameters of the model"):
        dense = shardopt.keyed("adam", model.over.named_parameters("over"), lr=0.1)
        stale = CombinedOptimizer([("", dense), ("", Page(Fused(other)))])
        checkpoint.save(tmp_path / "other", {"model": model, "optimizer": stale})


def test_a_restore_tells_of_frozen_parameters_and_not_of_tables(tmp_path, caplog):
    model = Net()
    fused = Fused(model)
    fused.step()
    with caplog.at_level(logging.WARNING, logger="shardopt"):
        app = {"model": model, "tables": fused}
        checkpoint.save(tmp_path / "c", app)
        report = replace(checkpoint.load(tmp_path / "c", app), frozen=None)
        frozen_otherwise([(("tables",), fused)], ParameterNames(app), report)
        fused.step()
    assert not caplog.records


def test_state_beside_that_of_tables_is_made_by_the_load(tmp_path):
    model = Net()
    saved = Fused(model, model.over.named_parameters("over"))
    model.over(torch.ones(1, 4)).sum().backward()
    saved.step()
    checkpoint.save(tmp_path / "one", {"model": model, "optimizer": saved})
    fresh = Net()
    optimizer = Fused(fresh, fresh.over.named_parameters("over"))
    app = {"model": fresh, "optimizer": optimizer}
    for strict in (True, checkpoint.Strictness(unexpected="ignore")):
        with pytest.raises(MismatchError) as refused:
            checkpoint.load(tmp_path / "one", app, strict=strict)
        (problem,) = refused.value.problems
        assert problem.key == "optimizer.state.over.bias" and "call init_state() before" in problem.remedy
        assert "unexpected=" not in problem.remedy
    checkpoint.load(tmp_path / "one", app, init_state=True)
    for name, own in saved.state_dict()["state"].items():
        for entry, value in own.items():
            assert torch.equal(value, optimizer.state_dict()["state"][name][entry]), (name, entry)
    assert torch.equal(fresh.over.weight, model.over.weight)


@pytest.mark.parametrize("change", ["none", "by hand", "by a schedule"])
def test_changed_rates_that_an_optimizer_does_not_save_are_told_of_once(tmp_path, caplog, change):
    model = Net()
    optimizer = Fused(model)
    if change == "by a schedule":
        optimizer.param_groups[0]["initial_lr"] = 0.1
    app = {"model": model, "tables": optimizer, "step": 0}
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(app)
        for step in range(1, 4):
            app["step"] = step
            optimizer.param_groups[0]["lr"] *= 1.0 if change == "none" else 0.5
            manager.save(step, app)
    told = [each for each in caplog.messages if "rates of tables have changed" in each]
    assert len(told) == (change == "by hand")


def test_an_optimizer_that_saves_its_rates_is_not_told_of(tmp_path, caplog):
    model = Net()
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1)
    app = {"model": model, "optimizer": optimizer, "step": 0}
    with checkpoint.Manager(tmp_path) as manager:
        for step in range(1, 3):
            app["step"] = step
            optimizer.param_groups[0]["lr"] *= 0.5
            manager.save(step, app)
    assert not [each for each in caplog.messages if "rates of" in each]


def test_rates_are_compared_without_a_state_of_rank_0_alone(tmp_path):
    """Hooks may communicate, as those that gather: the other ranks make no state then."""
    model, made = Net(), []
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1)
    optimizer.register_state_dict_pre_hook(made.append)
    with checkpoint.Manager(tmp_path) as manager:
        for step in range(1, 4):
            optimizer.param_groups[0]["lr"] *= 0.5
            manager.save(step, {"model": model, "optimizer": optimizer})
    assert len(made) == 3


def test_managed_collision_tables_are_told_of_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec", sys)
    kind = type("MCHManagedCollisionModule", (nn.Module,), {"__module__": "torchrec.modules.mc_modules"})
    app = {"model": nn.Sequential(nn.Linear(2, 1), kind()), "step": 0}
    with checkpoint.Manager(tmp_path) as manager:
        for step in range(1, 3):
            app["step"] = step
            manager.save(step, app)
    (line,) = [each for each in caplog.messages if "managed-collision" in each]
    assert line.startswith("model has")
