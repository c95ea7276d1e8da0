"""State of torch's optimizers within other libraries' is made without a step, where some is stored."""

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import Manager
from shardopt.errors import MismatchError
from tests.support.as_torchrecs import Combined, Keyed


def app_of(wraps=True):
    """A model of which one layer gets no gradient, and an optimizer that decays weights much."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("first", "second", "unused")})
    parts = [
        Keyed(dict(model[name].named_parameters(prefix=name)), torch.optim.AdamW(model[name].parameters(), lr=0.1))
        for name in model
    ]
    for each in parts:
        each.param_groups[0]["weight_decay"] = 0.5
    return {"model": model, "optimizer": Combined(parts) if wraps else parts[0]}


def stepped(app, steps=1):
    for _ in range(steps):
        app["optimizer"].zero_grad()
        app["model"]["second"](app["model"]["first"](torch.ones(2))).sum().backward()
        app["optimizer"].step()
    return app


def weights(app):
    return [each.detach().clone() for each in app["model"].parameters()]


@pytest.mark.parametrize("wraps", [True, False])
def test_a_resume_is_the_run_also_with_a_parameter_that_no_gradient_reaches(tmp_path, wraps):
    with Manager(tmp_path) as manager:
        manager.save(1, stepped(app_of(wraps)))
        app = app_of(wraps)
        assert manager.restore(app) == 1
    assert all(map(torch.equal, weights(stepped(app)), weights(stepped(app_of(wraps), 2))))


def test_a_comparison_and_a_refused_load_change_nothing(tmp_path):
    checkpoint.save(tmp_path / "c", stepped(app_of()))
    app = app_of()
    before = weights(app)
    assert checkpoint.compare(tmp_path / "c", app, init_state=True).fits
    with pytest.raises(MismatchError):
        checkpoint.load(tmp_path / "c", {**app, "other": torch.zeros(1)}, init_state=True)
    checkpoint.load(tmp_path / "c", {"optimizer": app["optimizer"]}, init_state=True, select="^optimizer")
    assert all(map(torch.equal, weights(app), before))
    assert all(each.grad is None for each in app["model"].parameters())
    assert len(app["optimizer"].state) == 4


def test_a_refused_load_leaves_no_state(tmp_path):
    checkpoint.save(tmp_path / "c", stepped(app_of()))
    app = app_of()
    with pytest.raises(MismatchError):
        checkpoint.load(tmp_path / "c", {**app, "other": torch.zeros(1)}, init_state=True)
    assert not app["optimizer"].state


def grouped(rates):
    """Two parameters in groups of their own, by rates, or in one."""
    params = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    groups = [{"params": [each], "lr": rate} for each, rate in zip(params.values(), rates, strict=False)]
    inner = torch.optim.SGD(groups if len(rates) > 1 else params.values(), lr=rates[0], momentum=0.9)
    for each in params.values():
        each.grad = torch.ones(2)
    optimizer = Keyed(params, inner)
    optimizer.step()
    return {"params": params, "tables": optimizer}


def test_rates_that_one_group_cannot_have_are_refused_before_anything_changes(tmp_path):
    checkpoint.save(tmp_path / "c", grouped((0.1, 0.2)))
    app = grouped((0.5,))
    before = app["params"]["a"].detach().clone()
    with pytest.raises(MismatchError, match=r"tables\.param_groups: found lr=0\.1 of a; lr=0\.2 of b; .* select=r"):
        checkpoint.load(tmp_path / "c", app)
    assert torch.equal(app["params"]["a"], before)
    checkpoint.load(tmp_path / "c", app, select=r"^(?!tables\.param_groups\.)")  # as it says
    assert not torch.equal(app["params"]["a"], before) and app["tables"].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("rates", [(0.5,), (0.5, 0.6), (0.5, 0.5)])
def test_groups_stay_the_optimizers_own(tmp_path, rates):
    checkpoint.save(tmp_path / "c", grouped((0.1, 0.1)))
    app = grouped(rates)
    checkpoint.load(tmp_path / "c", app)
    assert [group["lr"] for group in app["tables"].param_groups] == [0.1] * len(rates)
