"""A run that is taken back in its process, to a step at which a parameter had no state yet."""

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError


def program(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).double()
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    elif kind == "combined":
        parts = [
            (name, shardopt.keyed("adamw", part.named_parameters(), lr=0.1)) for name, part in model.named_children()
        ]
        optimizer = shardopt.optim.CombinedOptimizer(parts)
    else:
        optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    if kind == "clipped":
        optimizer = shardopt.GradientClippingOptimizer(optimizer, "norm", max_gradient=1.0)
    return {"model": model, "optimizer": optimizer, "step": 0}


def step(app, *, with_last):
    torch.manual_seed(app["step"])
    for name, parameter in app["model"].named_parameters():
        parameter.grad = None if name == "1.weight" and not with_last else torch.randn_like(parameter)
    app["optimizer"].step()
    app["step"] += 1


@pytest.mark.parametrize("kind", ["keyed", "torch", "clipped", "combined"])
def test_state_that_a_step_did_not_have_is_gone(tmp_path, kind):
    app = program(kind)
    manager = checkpoint.Manager(tmp_path)
    step(app, with_last=False)
    manager.save(1, app)
    step(app, with_last=True)
    manager.save(2, app)
    step(app, with_last=True)
    assert manager.restore(app, step=1) == 1
    fresh = program(kind)
    assert checkpoint.Manager(tmp_path).restore(fresh) == 1
    last = app["model"].get_parameter("1.weight")
    assert not app["optimizer"].state.get(last)
    for each in (app, fresh):
        for _ in range(3):
            step(each, with_last=True)
    for mine, other in zip(app["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert torch.equal(mine, other)
        theirs = fresh["optimizer"].state[other]
        assert {name: value.tolist() for name, value in app["optimizer"].state[mine].items()} == {
            name: value.tolist() for name, value in theirs.items()
        }


@pytest.mark.parametrize("kind", ["keyed", "torch", "clipped", "combined"])
def test_it_is_there_again_where_the_restore_is_refused(tmp_path, kind):
    app = program(kind)
    manager = checkpoint.Manager(tmp_path)
    step(app, with_last=False)
    manager.save(1, app)
    step(app, with_last=True)
    before = {
        name: value.clone() for name, value in app["optimizer"].state[app["model"].get_parameter("1.weight")].items()
    }
    with pytest.raises(MismatchError, match="extra"):
        manager.restore({**app, "extra": torch.zeros(2)}, step=1)
    after = app["optimizer"].state[app["model"].get_parameter("1.weight")]
    assert {name: value.tolist() for name, value in after.items()} == {
        name: value.tolist() for name, value in before.items()
    }
    step(app, with_last=True)


@pytest.mark.parametrize("kind", ["keyed", "torch"])
def test_state_stays_refused_where_the_checkpoint_does_not_know_the_parameter(tmp_path, kind):
    """As a checkpoint of the weights alone: that is none of an optimizer without state."""
    app = program(kind)
    step(app, with_last=True)
    checkpoint.save(tmp_path / "weights", {"model": app["model"], "step": 1})
    with pytest.raises(MismatchError, match=r"optimizer\.state"):
        checkpoint.load(tmp_path / "weights", app, init_state=True)
