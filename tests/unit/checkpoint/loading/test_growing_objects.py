"""State that objects of others' classes gain as they go: a fresh object takes what is stored, or the load refuses."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks
from tests.unit.checkpoint.loading.test_growing import same


class Warming:
    """Steps an optimizer that it holds, as trainers and schedules of the user's own do."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        self.optimizer.step()

    def state_dict(self):
        return {"steps": self.steps, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])


class Kept:
    """Gives the state that it was given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def trainer(make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return {"model": model, "warming": Warming(make(model))}


def train(app, begin, end):
    for step in range(begin, end):
        app["model"](torch.full((3, 4), float(step))).square().mean().backward()
        app["warming"].step()
        app["model"].zero_grad()


def test_an_optimizer_within_an_object_resumes_bit_for_bit(tmp_path):
    unbroken = trainer()
    train(unbroken, 0, 6)
    app = trainer()
    train(app, 0, 3)
    checkpoint.save(tmp_path / "c", app)
    resumed = trainer()
    report = checkpoint.load(tmp_path / "c", resumed)
    assert "warming.optimizer.state.0.exp_avg" in report.loaded and resumed["warming"].steps == 3
    train(resumed, 3, 6)
    assert torch.equal(resumed["model"].weight, unbroken["model"].weight)
    moments = [each["warming"].optimizer.state_dict()["state"] for each in (resumed, unbroken)]
    assert all(torch.equal(moments[0][i][name], moments[1][i][name]) for i in (0, 1) for name in moments[1][i])
    checkpoint.load(tmp_path / "c", resumed)  # which has places by now
    assert resumed["warming"].steps == 3


@pytest.mark.parametrize(
    ("fresh", "filled"),
    [
        ({"mean": None}, {"mean": torch.ones(2)}),
        ({}, {"mean": torch.ones(2), "n": 3}),
        ({"n": 0, "by name": {}}, {"n": 2, "by name": {"a": {"b": torch.ones(2)}, "c": 1}}),
        ({"seen": [], "n": 0}, {"seen": [torch.ones(2), torch.zeros(1)], "n": 2}),
        ({"weight": torch.zeros(2), "best": None}, {"weight": torch.ones(2), "best": {"weight": torch.ones(2)}}),
    ],
    ids=str,
)
def test_what_an_object_has_gained_comes_back(tmp_path, fresh, filled):
    checkpoint.save(tmp_path / "c", {"own": Kept(filled)})
    app = {"own": Kept(fresh)}
    checkpoint.load(tmp_path / "c", app)
    assert same(app["own"].state, filled)


def test_an_optimizer_with_a_say_in_its_state_is_refused_before_anything_changed(tmp_path):
    def keyed(model):
        return shardopt.keyed("adamw", model.named_parameters(), lr=0.1)

    app = trainer(keyed)
    train(app, 0, 2)
    checkpoint.save(tmp_path / "c", app)
    fresh = trainer(keyed)
    before = fresh["model"].weight.clone()
    with pytest.raises(MismatchError, match=r"nothing was changed(?s:.*)give the app the optimizer too") as caught:
        checkpoint.load(tmp_path / "c", fresh)
    assert "warming.optimizer.state.weight.exp_avg" in str(caught.value)
    assert torch.equal(fresh["model"].weight, before)
    fresh["warming"].optimizer.init_state()
    checkpoint.load(tmp_path / "c", fresh)
    assert fresh["warming"].steps == 2 and torch.equal(fresh["model"].weight, app["model"].weight)


class Scaled(torch.nn.Linear):
    """Keeps bytes of any length, as layers in fp8 do."""

    notes: object = torch.zeros(0, dtype=torch.uint8)

    def get_extra_state(self):
        return self.notes

    def set_extra_state(self, state):
        self.notes = state


@pytest.mark.parametrize(
    ("fresh", "saved"),
    [
        (torch.zeros(2, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)),
        (torch.zeros(9, dtype=torch.uint8), torch.arange(2, dtype=torch.uint8)),
        (torch.zeros(2, dtype=torch.uint8), torch.arange(2, dtype=torch.uint8)),
        (None, {"amax": torch.ones(3)}),
        (None, torch.ones(3)),
        ({}, {"n": 3}),
    ],
    ids=str,
)
def test_extra_state_of_a_module_has_any_form(tmp_path, fresh, saved):
    models = [torch.nn.Sequential(Scaled(2, 2), torch.nn.Linear(2, 2), Scaled(2, 2)) for _ in range(2)]
    models[0][0].notes, models[1][0].notes = saved, fresh
    models[0][2].notes, models[1][2].notes = torch.ones(3), (place := torch.zeros(3))
    checkpoint.save(tmp_path / "c", {"model": models[0]})
    checkpoint.load(tmp_path / "c", {"model": models[1]})
    assert same(models[1][0].notes, saved)
    assert models[1][2].notes.data_ptr() == place.data_ptr() and place.tolist() == [1, 1, 1]  # in place, as it fits
    assert torch.equal(models[1][0].weight, models[0][0].weight)
    with pytest.raises(MismatchError, match=r"model\.1\.weight"):  # weights keep their shapes
        checkpoint.load(tmp_path / "c", {"model": torch.nn.Sequential(Scaled(2, 2), torch.nn.Linear(2, 3))})


def _sharded(root):
    def app_of(sharded):
        app = trainer()
        if sharded:
            fully_shard(app["model"], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            app["warming"] = Warming(torch.optim.AdamW(app["model"].parameters(), lr=0.1))
        return app

    app = app_of(True)
    train(app, 0, 2)
    checkpoint.save(f"{root}/c", app)
    with pytest.raises(MismatchError, match=r"nothing was changed(?s:.*)give the app the optimizer too"):
        checkpoint.load(f"{root}/c", app_of(True))
    fresh = app_of(True)
    train(fresh, 0, 1)
    checkpoint.load(f"{root}/c", fresh)
    assert torch.equal(fresh["model"].weight.full_tensor(), app["model"].weight.full_tensor())
    replicated = app_of(False)  # whole tensors on each rank
    checkpoint.load(f"{root}/c", replicated)
    moment = replicated["warming"].optimizer.state_dict()["state"][0]["exp_avg"]
    stored = app["warming"].optimizer.state_dict()["state"][0]["exp_avg"].full_tensor()
    assert replicated["warming"].steps == 2 and torch.equal(moment, stored)


def test_sharded_state_within_an_object(tmp_path):
    run_ranks(2, _sharded, str(tmp_path))
