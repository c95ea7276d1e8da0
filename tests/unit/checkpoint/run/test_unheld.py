"""An optimizer in a run's app whose parameters the app lacks is told of, once; whatever may hold them counts."""

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
