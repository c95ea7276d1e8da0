"""State of torchao's optimizers, whose tensors in 8 bits are stored in parts, is loaded into such tensors alone."""

import pytest
import torch

from shardopt import checkpoint
from shardopt.errors import MismatchError


class Parts(torch.optim.Optimizer):
    """Keeps a dict of tensors, as which the parts of a wrapper are stored."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter] or {"step": torch.tensor(0.0), "exp_avg": {"codes": torch.zeros(4)}}
            state["step"] += 1
            state["exp_avg"]["codes"] += 1
            self.state[parameter] = state


OfTorchao = type("OfTorchao", (type("AdamW8bit", (Parts,), {"__module__": "torchao.optim.adam"}),), {})


def app_of(kind, steps):
    model = torch.nn.Linear(2, 2)
    optimizer = kind(model.parameters())
    for _ in range(steps):
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_parts_are_not_given_to_parameters_without_state(tmp_path):
    checkpoint.save(tmp_path / "a", app_of(OfTorchao, 3))
    app = app_of(OfTorchao, 0)
    with pytest.raises(MismatchError, match=r"(?s)optimizer\.state\.bias\.exp_avg: found parts .*step with rate 0"):
        checkpoint.load(tmp_path / "a", app, init_state=True)
    assert not app["optimizer"].state
    checkpoint.load(tmp_path / "a", app, select=r"^model\.", init_state=True)
    app = app_of(OfTorchao, 1)
    checkpoint.load(tmp_path / "a", app, init_state=True)
    assert app["optimizer"].state[app["model"].bias]["exp_avg"]["codes"].eq(3).all()


def test_dicts_in_the_state_of_a_programs_own_optimizer_are_made(tmp_path):
    checkpoint.save(tmp_path / "a", app_of(Parts, 3))
    app = app_of(Parts, 0)
    checkpoint.load(tmp_path / "a", app, init_state=True)
    assert app["optimizer"].state[app["model"].bias]["exp_avg"]["codes"].eq(3).all()
