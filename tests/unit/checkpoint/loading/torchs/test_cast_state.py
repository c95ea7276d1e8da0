"""A load that casts parameters casts the state with them that had their dtype, as torch's own load does."""

import copy

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import MismatchError


class Own(torch.optim.Optimizer):
    """One of a program's own, with a factor of another shape and counts in fp32."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"mean": torch.zeros_like(parameter), "rows": torch.zeros_like(parameter[..., :1])}
                state |= {"step": torch.zeros(()), "seen": torch.zeros(())}
            state["step"] += 1
            state["seen"] += 257  # which bf16 has not
            state["mean"].lerp_(parameter.grad, 0.1)
            state["rows"].lerp_(parameter.grad[..., :1], 0.1)
            parameter.sub_(state["mean"], alpha=0.1)


def sgd(**choices):
    return lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, **choices)


def app_of(make, dtype):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=dtype)
    return {"model": model, "optimizer": make(model.parameters())}


def train(app, steps):
    model = app["model"]
    for step in range(steps):
        app["optimizer"].zero_grad()
        model(torch.full((1, 3), 1.0 + step, dtype=model.weight.dtype)).square().sum().backward()
        app["optimizer"].step()


ALGORITHMS = {
    "sgd": sgd(),
    "foreach": sgd(foreach=True),
    "fused": sgd(fused=True),
    "nadam": torch.optim.NAdam,
    "own": Own,
}


@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_step_after_a_load_that_casts_is_that_after_torchs(tmp_path, make, dtypes):
    saved, app, torchs = app_of(make, dtypes[0]), app_of(make, dtypes[1]), app_of(make, dtypes[1])
    train(saved, 2)
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", app, init_state=True, strict=Strictness(dtype="cast"))
    for key, each in torchs.items():
        each.load_state_dict(copy.deepcopy(saved[key].state_dict()))
    train(app, 1), train(torchs, 1)
    assert all(map(torch.equal, app["model"].parameters(), torchs["model"].parameters()))
    for parameter in app["model"].parameters():
        state = app["optimizer"].state[parameter]
        assert {each.dtype for each in state.values() if each is not None and each.ndim} <= {dtypes[1]}
        if make is Own:
            assert state["seen"] == 257 * 3


def test_an_app_may_have_the_tensors_of_a_state_dict(tmp_path):
    """Which are others than the parameters, and share their memory."""
    saved, app = app_of(sgd(), torch.bfloat16), app_of(sgd(), torch.float32)
    train(saved, 2)
    checkpoint.save(tmp_path / "c", {**saved, "model": saved["model"].state_dict()})
    into = {**app, "model": app["model"].state_dict()}
    checkpoint.load(tmp_path / "c", into, init_state=True, strict=Strictness(dtype="cast"))
    assert app["optimizer"].state[app["model"].weight]["momentum_buffer"].dtype == torch.float32


def test_state_alone_that_does_not_fit_the_dtype_here_is_refused(tmp_path):
    saved, app = app_of(sgd(), torch.bfloat16), app_of(sgd(), torch.float32)
    train(saved, 1)
    checkpoint.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError, match="momentum_buffer"):
        checkpoint.load(tmp_path / "c", app, init_state=True, select=r"^optimizer\.")
    checkpoint.load(tmp_path / "c", app, init_state=True, select=r"^optimizer\.", strict=Strictness(dtype="cast"))
    assert app["optimizer"].state[app["model"].weight]["momentum_buffer"].dtype == torch.float32
