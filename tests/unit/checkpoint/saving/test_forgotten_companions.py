"""What goes along with the app's optimizers, and the position in its data, are told of if the app lacks them."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.planning.forgotten import tell_of_what_is_lost
from shardopt.integrations.loader import ResumableLoader
from shardopt.state.flatten import flatten
from tests.support.fake_rank import fake_rank

SAMPLES = TensorDataset(torch.ones(16, 2))


class Trainer:
    """An object of the program that saves others."""

    def __init__(self, **parts):
        self.parts, self.hidden = parts, lambda: parts

    def state_dict(self):
        return {name: part.state_dict() for name, part in self.hidden().items()}

    def load_state_dict(self, state): ...


class Hidden(Trainer):
    def __init__(self, **parts):
        self.hidden = lambda: parts


def app_of():
    model = torch.nn.Linear(2, 1)
    return {"model": model, "optimizer": shardopt.keyed("sgd", model.named_parameters(), lr=0.1)}


def companion(kind, app):
    optimizer = app["optimizer"]
    if kind == "EMA":
        ema = shardopt.EMA(app["model"])
        ema.attach(optimizer)
        return ema
    if kind == "GradScaler":
        scaler = shardopt.GradScaler("cpu")
        scaler.scale(app["model"](torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler
    plateau = shardopt.optim.ReduceLROnPlateau(optimizer)
    plateau.step(1.0)
    return plateau


@pytest.mark.parametrize("kind", ["EMA", "GradScaler", "ReduceLROnPlateau"])
def test_what_goes_along_with_an_optimizer_is_told_of_once_if_the_app_lacks_it(tmp_path, caplog, kind):
    app = app_of()
    first, second = (companion(kind, app) for _ in range(2))
    of_others = companion(kind, app_of())
    app["first"] = first
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, app, force=True)
        manager.save(2, app, force=True)
    (line,) = caplog.messages
    assert line.startswith(f"{kind} goes along with optimizer, and is not in the app")
    assert all(each is not None for each in (of_others, second))


@pytest.mark.parametrize("kind", ["EMA", "GradScaler", "ReduceLROnPlateau"])
@pytest.mark.parametrize(
    "form", [lambda each: Trainer(it=each), lambda each: Hidden(it=each), lambda each: {"state": each.state_dict()}]
)
def test_what_is_saved_in_another_form_is_not_told_of(tmp_path, caplog, kind, form):
    app = app_of()
    each = companion(kind, app)
    checkpoint.save(tmp_path, app | {"other": form(each)}, durable=False)
    assert not caplog.messages


def test_averages_that_are_detached_and_a_child_of_the_apps_optimizer(tmp_path, caplog):
    app = app_of()
    ema = shardopt.EMA(app["model"])
    ema.attach(app["optimizer"])()
    combined = shardopt.optim.CombinedOptimizer([("part", app["optimizer"])])
    checkpoint.save(tmp_path / "1", app | {"optimizer": combined}, durable=False)
    assert not caplog.messages
    ema.attach(app["optimizer"])
    checkpoint.save(tmp_path / "2", app | {"optimizer": combined}, select=r"^model\.", durable=False)
    assert not caplog.messages
    checkpoint.save(tmp_path / "3", app | {"optimizer": combined}, durable=False)
    assert len(caplog.messages) == 1 and "EMA goes along with optimizer" in caplog.text


def loop(kind, size=16):
    if kind == "loader":
        loader = ResumableLoader(SAMPLES, batch_size=4)
        return loader, iter(loader)
    data = shardopt.ResumableSampler(size, batch_size=4)
    return data, data.through(DataLoader(SAMPLES, batch_sampler=data))


@pytest.mark.parametrize("kind", ["sampler", "loader"])
def test_a_save_in_a_loop_over_a_sampler_that_the_app_lacks_is_told_of_once(tmp_path, caplog, kind):
    app = app_of()
    _, batches = loop(kind)
    with checkpoint.Manager(tmp_path) as manager:
        for step, _ in enumerate(batches, 1):
            manager.save(step, {"model": app["model"]}, force=True)
            assert not caplog.messages
            break
        for step, _ in enumerate(batches, 2):
            manager.save(step, app, force=True)
    (line,) = caplog.messages
    assert "no position in the data" in line and "[data-position]" in line


@pytest.mark.parametrize("kind", ["sampler", "loader"])
@pytest.mark.parametrize(
    "form",
    [lambda each: each, lambda each: Trainer(it=each), lambda each: Hidden(it=each), lambda each: each.state_dict()],
)
def test_a_save_in_a_loop_that_has_the_position_in_any_form_is_not_told_of(tmp_path, caplog, kind, form):
    data, batches = loop(kind)
    next(batches)
    checkpoint.save(tmp_path, app_of() | {"data": form(data)}, durable=False)
    assert not caplog.messages


def test_loops_that_have_ended_and_those_of_an_evaluation_are_not_told_of(tmp_path, caplog):
    data, batches = loop("sampler")
    _, evaluated = loop("sampler")
    _, left = loop("sampler")
    assert len([*evaluated]) == 4
    for _ in left:
        break
    del left
    checkpoint.save(tmp_path / "1", app_of(), durable=False)
    next(batches)
    _, evaluated = loop("sampler")
    next(evaluated)
    checkpoint.save(tmp_path / "2", app_of() | {"data": data}, durable=False)
    assert not caplog.messages


class HookState:
    """As that of torch's hooks: no weak reference can be had of it."""

    __slots__ = ("iter",)


class Holder(Trainer):
    def __init__(self, state):
        self.state, self.hidden = state, dict


CONSTANT = {"nothing": None, "number": 4, "options": ("bf16", torch.bfloat16, 0.1)}


@pytest.mark.parametrize("kept", ["module", "wrapped", "in a tuple", "by the app", "group", "failed", *CONSTANT])
def test_the_state_of_a_communication_hook_is_told_of_once_if_the_app_lacks_it(caplog, kept, monkeypatch):
    # As in a program that has imported torch's hooks; not in the other tests of this process.
    monkeypatch.setitem(sys.modules, "torch.distributed.algorithms.ddp_comm_hooks", ModuleType("hooks"))
    module = torch.nn.Linear(2, 1)
    app = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    with fake_rank(0, 1):
        wrapped = DistributedDataParallel(module)
        state = {**CONSTANT, "group": torch.distributed.group.WORLD}.get(kept, HookState())
        wrapped.register_comm_hook((state, 1) if kept == "in a tuple" else state, lambda state, bucket: bucket)
        if kept == "failed":  # as one whose constructor has raised, and that an error still has
            del wrapped._comm_hooks
        app |= {"model": wrapped if kept == "wrapped" else module}
        if kept == "by the app":
            app["hook"] = Holder(state)
        for _ in range(2):
            tell_of_what_is_lost(flatten(app), None)
    assert len(caplog.messages) == (kept in ("module", "wrapped", "in a tuple"))
