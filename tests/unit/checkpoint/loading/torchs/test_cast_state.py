"""A load that casts parameters casts the state with them that had their dtype, as torch's own load does.

State of a class that is not torch's is never cast to fewer digits.
"""

import copy
from functools import partial

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.checkpoint.loading import init_state
from shardopt.checkpoint.loading.torchs.made_state import stored_dtypes
from shardopt.errors import LayoutError, MismatchError


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


class InFp32(Own):
    """Keeps its means in fp32 beside any parameter."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros(parameter.shape))
            mean.lerp_(parameter.grad.float(), 0.001)
            parameter.sub_(mean)


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
        loss = model(torch.full((1, 3), 1.0 + step, dtype=model.weight.dtype)).square().sum()
        loss.backward()
        is_lbfgs = isinstance(app["optimizer"], torch.optim.LBFGS)
        app["optimizer"].step(*([partial(float, loss.detach())] if is_lbfgs else []))


ALGORITHMS = {
    "sgd": sgd(),
    "foreach": sgd(foreach=True),
    "fused": sgd(fused=True),
    "nadam": torch.optim.NAdam,
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


UP, DOWN = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("make", "dtypes"), [(make, dtypes) for make in ALGORITHMS.values() for dtypes in (UP, DOWN)])
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
        assert {each.dtype for each in state.values() if isinstance(each, torch.Tensor) and each.ndim} <= {dtypes[1]}


def test_state_of_an_own_class_gets_more_digits_with_its_parameters(tmp_path):
    saved, app = (app_of(Own, dtype) for dtype in UP)
    train(saved, 2)
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", app, init_state=True, strict=Strictness(dtype="cast"))
    train(app, 1)
    for state in app["optimizer"].state.values():
        assert {each.dtype for each in state.values()} == {torch.float32} and state["seen"] == 257 * 3


@pytest.mark.parametrize("steps", [0, 1])
def test_state_that_an_own_class_keeps_in_fp32_stays_so_where_parameters_get_fewer_digits(tmp_path, steps):
    saved, app = (app_of(InFp32, dtype) for dtype in DOWN)
    train(saved, 2), train(app, steps)
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", app, init_state=True, strict=Strictness(dtype="cast"))
    own, other = (each["optimizer"].state[each["model"].weight]["mean"] for each in (saved, app))
    assert other.dtype == torch.float32 and torch.equal(own, other)


def test_a_number_beside_torchs_state_never_loses_digits(tmp_path):
    saved, app = (app_of(sgd(), dtype) for dtype in DOWN)
    train(saved, 1)
    saved["optimizer"].state[saved["model"].weight]["seen"] = torch.tensor(257.0)
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", app, init_state=True, strict=Strictness(dtype="cast"))
    assert app["optimizer"].state[app["model"].weight]["seen"].item() == 257


def test_an_app_may_have_the_tensors_of_a_state_dict(tmp_path):
    """Which are others than the parameters, and share their memory; also where that has no elements on a rank."""
    saved, app = app_of(sgd(), torch.bfloat16), app_of(sgd(), torch.float32)
    for each in (saved, app):
        each["model"].register_parameter("none", torch.nn.Parameter(each["model"].weight.new_empty(0, 3)))
        each["optimizer"].add_param_group({"params": [each["model"].none]})
    saved["model"].none.grad = torch.zeros_like(saved["model"].none)
    saved["optimizer"].step()
    train(saved, 2)
    checkpoint.save(tmp_path / "c", {**saved, "model": saved["model"].state_dict()})
    into = {**app, "model": app["model"].state_dict()}
    checkpoint.load(tmp_path / "c", into, init_state=True, strict=Strictness(dtype="cast"))
    for parameter in (app["model"].weight, app["model"].none):
        assert app["optimizer"].state[parameter]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "lazy"])
def test_a_tensor_without_plain_memory_is_refused_by_its_key(tmp_path, kind):
    saved, app = app_of(sgd(), torch.bfloat16), app_of(sgd(), torch.float32)
    train(saved, 1)
    checkpoint.save(tmp_path / "c", {**saved, "z": torch.ones(3, 3, dtype=torch.bfloat16)})
    make = {"sparse": torch.Tensor.to_sparse, "mkldnn": torch.Tensor.to_mkldnn}
    tensor = make[kind](torch.ones(3, 3)) if kind in make else torch.nn.UninitializedBuffer()
    for select in (None, "^(model|optimizer)"):
        with pytest.raises(LayoutError, match=r"- z: "):
            strict = Strictness(dtype="cast")
            checkpoint.load(tmp_path / "c", {**app, "z": tensor}, init_state=True, strict=strict, select=select)


def test_stored_dtypes_are_looked_for_once_and_only_for_places(tmp_path, monkeypatch):
    """Not for each of a thousand optimizers; nor where torch's first step makes all."""
    seen = []
    monkeypatch.setattr(init_state, "stored_dtypes", lambda *args: seen.append(args) or stored_dtypes(*args))
    for make, count in ((sgd(), 1), (torch.optim.AdamW, 0)):
        saved, app = ({str(i): app_of(make, dtype) for i in range(3)} for dtype in UP)
        for each in saved.values():
            train(each, 1)
        checkpoint.save(tmp_path / str(count), saved)
        seen.clear()
        checkpoint.load(tmp_path / str(count), app, init_state=True, strict=Strictness(dtype="cast"))
        assert len(seen) == count


def test_state_alone_that_does_not_fit_the_dtype_here_is_refused(tmp_path):
    saved, app = app_of(sgd(), torch.bfloat16), app_of(sgd(), torch.float32)
    train(saved, 1)
    checkpoint.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError, match="momentum_buffer"):
        checkpoint.load(tmp_path / "c", app, init_state=True, select=r"^optimizer\.")
    checkpoint.load(tmp_path / "c", app, init_state=True, select=r"^optimizer\.", strict=Strictness(dtype="cast"))
    assert app["optimizer"].state[app["model"].weight]["momentum_buffer"].dtype == torch.float32
