"""A save between the backward passes of one step is told of, as gradients are in no checkpoint."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.planning.mid_step import MidStep
from tests.support.fake_rank import fake_rank

LINE = "has gradients of a backward after its last step, and gradients are not saved"


def new_app(kind="torch"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        optimizer = shardopt.keyed("adamw", model.named_parameters())
    return {"model": model, "optimizer": optimizer, "step": 0}


def job(root, app, batch, batches=12, every=3):
    """Calls `batch(app, number)` for each batch, and saves by their number."""
    with checkpoint.Manager(root, every=every) as manager:
        manager.restore(app)
        while app["step"] < batches:
            app["step"] += 1
            batch(app, app["step"])
            manager.save(app["step"], app)


def backward(app):
    app["model"](torch.randn(8, 4)).square().mean().backward()


def accumulate(app, number, set_to_none=True):
    backward(app)
    if number % 2 == 0:
        app["optimizer"].step()
        app["optimizer"].zero_grad(set_to_none)


def told(caplog):
    return [each for each in caplog.messages if LINE in each]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["torch", "keyed"])
def test_saves_by_micro_batches_are_told_of_once(tmp_path, caplog, kind, set_to_none):
    app = new_app(kind)
    job(tmp_path / "run", app, partial(accumulate, set_to_none=set_to_none))
    (line,) = told(caplog)
    assert line.startswith("optimizer has gradients")
    assert not app["optimizer"]._optimizer_step_post_hooks  # none is left


def test_one_that_leaves_its_gradients_until_the_next_step_too(tmp_path, caplog):
    def batch(app, number):
        if number % 2:
            app["optimizer"].zero_grad()
        backward(app)
        if number % 2 == 0:
            app["optimizer"].step()

    job(tmp_path / "run", new_app(), batch)
    assert len(told(caplog)) == 1


def test_saves_after_steps_are_not_told_of(tmp_path, caplog):
    job(tmp_path / "run", new_app(), accumulate, every=2)
    assert not told(caplog)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_other_loops_are_not_told_of(tmp_path, caplog, set_to_none, first):
    def batch(app, number):
        if first:
            app["optimizer"].zero_grad(set_to_none)
        backward(app)
        nn.utils.clip_grad_norm_(app["model"].parameters(), 0.1)
        app["optimizer"].step()
        if not first:
            app["optimizer"].zero_grad(set_to_none)

    job(tmp_path / "run", new_app(), batch)
    assert not told(caplog)


def test_a_step_that_a_scaler_leaves_out_is_not_told_of(tmp_path, caplog):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def batch(app, number):
        app["optimizer"].zero_grad()
        scaler.scale(app["model"](torch.randn(8, 4)).mean() * (torch.inf if number == 9 else 1.0)).backward()
        scaler.step(app["optimizer"])
        scaler.update()

    job(tmp_path / "run", {**new_app(), "scaler": scaler}, batch)
    assert not told(caplog)


def test_gradients_that_another_network_has_left_are_not_told_of(tmp_path, caplog):
    app = new_app()
    app["other"] = nn.Linear(4, 4)
    app["others"] = torch.optim.SGD(app["other"].parameters(), lr=0.1)

    def batch(app, number):
        app["optimizer"].zero_grad()
        app["model"](app["other"](torch.randn(8, 4)).detach()).mean().backward()
        app["optimizer"].step()
        app["others"].zero_grad()
        app["model"](app["other"](torch.randn(8, 4))).mean().backward()  # into the first one, too
        app["others"].step()

    job(tmp_path / "run", app, batch)
    assert not told(caplog)


def add_to_local(gradient):
    gradient._local_tensor.add_(1)


@pytest.mark.parametrize("add", [lambda gradient: gradient.add_(1), add_to_local], ids=["autograd", "fully_shard"])
def test_gradients_that_are_added_to_shards(caplog, add):
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None))
        looking, optimizers = MidStep(), {"optimizer": torch.optim.SGD([weight], lr=0.1)}
        weight.grad = torch.ones_like(weight)
        looking.look(optimizers)
        optimizers["optimizer"].step()
        looking.look(optimizers)
        assert not told(caplog)
        add(weight.grad)
        looking.look(optimizers)
        assert len(told(caplog)) == 1
