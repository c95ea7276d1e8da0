"""State that objects of others' classes gain as they go: a fresh object takes what is stored, or the load refuses."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError
from shardopt.state.flatten import flatten
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


def keyed(model):
    return shardopt.keyed("adamw", model.named_parameters(), lr=0.1)


def of_torch(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [keyed, of_torch])
def test_state_of_an_optimizer_that_no_object_shows_is_refused_before_anything_changed(tmp_path, make):
    """Nothing compares its parameters with those of what is stored: their order, their shapes, the algorithm."""
    app = trainer(make)
    train(app, 0, 3)
    fresh = trainer(make)
    fresh["warming"] = Kept({"steps": 0, "of": [{"optimizer": make(fresh["model"]).state_dict()}]})
    app["warming"] = Kept({"steps": 3, "of": [{"optimizer": app["warming"].optimizer.state_dict()}]})
    checkpoint.save(tmp_path / "hidden", app)
    before = fresh["model"].weight.clone()
    with pytest.raises(MismatchError, match=r"nothing was changed(?s:.*)load the optimizer itself too") as caught:
        checkpoint.load(tmp_path / "hidden", fresh, init_state=True)
    assert "optimizer.state." in str(caught.value) and torch.equal(fresh["model"].weight, before)


@pytest.mark.parametrize("make", [keyed, of_torch])
def test_an_optimizer_within_an_object_is_compared_as_one_of_the_app(tmp_path, make):
    app, fresh = trainer(make), trainer(make)
    train(app, 0, 3)
    checkpoint.save(tmp_path / "c", app)
    with pytest.raises(MismatchError, match=r"warming\.optimizer\.state: (?s:.*)load with init_state=True"):
        checkpoint.load(tmp_path / "c", fresh)
    assert fresh["warming"].steps == 0 and not fresh["warming"].optimizer.state_dict()["state"]
    other = trainer(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(MismatchError, match=r"warming\.optimizer\.(?s:.*)AdamW"):
        checkpoint.load(tmp_path / "c", other, init_state=True)


@pytest.mark.parametrize("make", [keyed, of_torch])
@pytest.mark.parametrize("way", ["alone", "a step", "given too"])
def test_an_optimizer_within_an_object_resumes_bit_for_bit(tmp_path, make, way):
    def app_of():
        app = trainer(make)
        return {**app, "optimizer": app["warming"].optimizer} if way == "given too" else app

    unbroken, app, resumed = app_of(), app_of(), app_of()
    train(unbroken, 0, 6)
    train(app, 0, 3)
    checkpoint.save(tmp_path / "c", app)
    if way == "a step":
        train(resumed, 9, 10)
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    assert resumed["warming"].steps == 3
    train(resumed, 3, 6)
    assert torch.equal(resumed["model"].weight, unbroken["model"].weight)


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


def test_a_buffer_with_such_a_name_is_no_extra_state(tmp_path):
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    models[0].register_buffer("scale_extra_state", torch.ones(3, dtype=torch.float64))
    models[1].register_buffer("scale_extra_state", torch.zeros(3))
    checkpoint.save(tmp_path / "c", {"model": models[0]})
    with pytest.raises(MismatchError, match=r"scale_extra_state: found .*float64"):
        checkpoint.load(tmp_path / "c", {"model": models[1]})


def _sharded(root):
    app = trainer()
    fully_shard(app["model"], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    app["warming"] = Warming(torch.optim.AdamW(app["model"].parameters(), lr=0.1))
    if dist.get_world_size() == 2:
        train(app, 0, 2)
        checkpoint.save(f"{root}/c", app)
        train(app, 2, 4)
        checkpoint.save(f"{root}/later", app)
        return
    checkpoint.load(f"{root}/c", app, init_state=True)
    train(app, 2, 4)
    expected = checkpoint.open(f"{root}/later")
    for key, value in flatten(app).tensors().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole.detach(), expected.read(key))


def test_sharded_state_within_an_object_resumes_on_more_ranks(tmp_path):
    for ranks in (2, 3):
        run_ranks(ranks, _sharded, str(tmp_path))
