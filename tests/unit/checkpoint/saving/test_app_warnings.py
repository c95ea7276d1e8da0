"""Optimizers by whose parameters a resume would train otherwise: those that the app lacks, and those frozen again."""

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint

LINE = "steps 1 parameters that nothing in the app holds, such as {}: a resume would give their moments to new values"


def make(kind):
    model, log_alpha = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))
    named = [*model.named_parameters("model"), ("log_alpha", log_alpha)]
    if kind == "keyed":
        return model, log_alpha, shardopt.keyed("adam", named, lr=0.1)
    return model, log_alpha, torch.optim.Adam([each for _, each in named] if kind == "torch" else named)


@pytest.mark.parametrize("kind", ["keyed", "torch", "named"])
@pytest.mark.parametrize("stage", [None, "now"])
def test_a_parameter_that_nothing_in_the_app_holds_is_told_of_once(tmp_path, caplog, kind, stage):
    model, _, optimizer = make(kind)
    app = {"model": model, "optimizers": [optimizer], "step": 0}
    name = "one of shape (1,)" if kind == "torch" else "log_alpha"
    for last in (2, 4):  # at the first save of a new run, and at its restore
        caplog.clear()
        with checkpoint.Manager(tmp_path, stage=stage) as manager:
            for step in range(manager.restore(app, select="^step$") + 1, last + 1):
                app["step"] = step
                manager.save(step, app)
            manager.restore(app)
        (line,) = [each for each in caplog.messages if "nothing in the app" in each]
        assert line.startswith("optimizers.0 " + LINE.format(name))


class Agent:
    def __init__(self, *parts):
        self.parts = {"of": parts}

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state): ...


@pytest.mark.parametrize(
    "held",
    [
        lambda alpha: alpha,
        lambda alpha: {"list": [alpha.data]},
        lambda alpha: nn.ParameterList([alpha]),
        lambda alpha: checkpoint.PerRank(alpha.data),
        lambda alpha: Agent(alpha),
        lambda alpha: alpha.requires_grad_(False) is None,
    ],
    ids=["tensor", "its memory", "module", "per rank", "object", "frozen"],
)
def test_whatever_holds_it_counts(tmp_path, caplog, held):
    model, log_alpha, optimizer = make("keyed")
    app = {"model": model, "optimizer": optimizer, "alpha": held(log_alpha)}
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(app)
        manager.save(1, app)
    assert "nothing in the app" not in caplog.text


OPTIMIZERS = {
    "keyed": lambda model: shardopt.keyed("adamw", model.named_parameters(), lr=0.1),
    "keyed sgd": lambda model: shardopt.keyed("sgd", model.named_parameters(), lr=0.1, momentum=0.9),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "combined": lambda model: shardopt.optim.CombinedOptimizer([("all", OPTIMIZERS["keyed"](model))]),
}


@pytest.mark.parametrize("unfrozen", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layer_that_is_frozen_again_after_a_resume_is_told_of(tmp_path, caplog, kind, unfrozen):
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        return {"model": model, "optimizer": OPTIMIZERS[kind](model), "step": 0}

    app = make()
    with checkpoint.Manager(tmp_path, every=2) as manager:
        for step in (1, 2):
            if step == 2 and unfrozen:
                app["model"][0].requires_grad_(True)
            app["model"](torch.ones(1, 2)).sum().backward()
            app["optimizer"].step()
            app["step"] = step
            manager.save(step, app)
    app = make()
    checkpoint.Manager(tmp_path).restore(app)
    lines = [each for each in caplog.messages if "frozen now" in each]
    name = "one of shape (2, 2)" if kind == "torch" else "0.weight"
    said = f"optimizer has made steps of 2 parameters that are frozen now, such as {name}: "
    assert [line.startswith(said) for line in lines] == [True] * unfrozen
