"""Steps and swaps that end in the middle: what follows is as if they had not begun."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import shardopt
from shardopt import checkpoint
from shardopt.algorithms.lbfgs import history
from shardopt.errors import AlgorithmError, ShardoptError, StateError
from shardopt.optim import KeyedOptimizerWrapper
from tests.support.fake_rank import fake_rank, shard

LOCAL = str(Path(shardopt.__file__).parent / "optim" / "local")


@contextmanager
def failing_at(number, function=None):
    """A MemoryError at the n-th line of a step on local tensors, counted from 1; gives a list, empty until then.

    With a function, only its lines count.
    """
    lines, failed = 0, []

    def trace(frame, event, arg):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(LOCAL):
            return None
        if event == "line" and function in (None, frame.f_code.co_name):
            lines += 1
            if lines == number:
                failed.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                raise MemoryError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield failed
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # a line that ends `with torch.no_grad()` may be the one that failed


def trained(mesh, fail_at=None):
    """State names and weights after two steps of two groups; before them a first step that fails at a line."""
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(shard(torch.randn(4, 2), mesh, Shard(0))) for name in "ab"}
    optimizer = shardopt.keyed("adamw", weights, groups=[{"match": "a"}, {"match": "b"}], lr=0.1)
    for weight in weights.values():
        weight.grad = shard(torch.ones(4, 2), mesh, Shard(0))
    before, where = [each.to_local().clone() for each in weights.values()], None
    if fail_at is not None:
        try:
            with failing_at(fail_at) as failed:
                optimizer.step()
        except MemoryError:
            where = failed
        if any(not torch.equal(each.to_local(), old) for each, old in zip(weights.values(), before, strict=True)):
            return None  # it has stepped
    for _ in range(2):
        optimizer.step()
    state = optimizer.state_dict()["state"]
    moments = {name: [each["exp_avg"].to_local().tolist(), float(each["step"])] for name, each in state.items()}
    return moments, [each.to_local().tolist() for each in weights.values()], where


def test_after_a_first_step_that_failed_all_state_is_there():
    with fake_rank(0, 2) as mesh:
        *sound, _ = trained(mesh)
        for line in range(1, 1000, 5):
            found = trained(mesh, line)
            if found is None:
                break
            *actual, where = found
            assert actual == sound, where
        assert line > 100  # the line at which the kernel had run


def stepped_with_written_state(mesh, fail_at):
    """Weights and state after steps from momenta that were written before the first; and where a step failed."""
    weights = {name: torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0))) for name in "abc"}
    optimizer = shardopt.keyed("sgd", weights, lr=0.1, momentum=0.9)
    optimizer.init_state()
    for weight, entries in zip(weights.values(), optimizer.state_dict()["state"].values(), strict=True):
        weight.grad = shard(torch.ones(4, 2), mesh, Shard(0))
        entries["momentum_buffer"].to_local().fill_(0.5)
    try:
        with failing_at(fail_at, "hand_over") as failed:
            optimizer.step()
    except MemoryError:
        optimizer.step()
    state = optimizer.state_dict()["state"].values()
    tensors = [*weights.values(), *(entries["momentum_buffer"] for entries in state)]
    return [each.to_local().tolist() for each in tensors], failed


def test_state_written_before_the_first_step_outlives_an_interrupt_anywhere_in_its_handing_over():
    with fake_rank(0, 2) as mesh:
        sound, failed = stepped_with_written_state(mesh, 0)
        for line in range(1, 100):
            found, failed = stepped_with_written_state(mesh, line)
            if not failed:
                break
            assert found == sound, failed
        assert line > 20 and not failed


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("back", [False, True])
def test_an_interrupted_swap_is_undone_by_the_next(monkeypatch, back):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    own = [each.detach().clone() for each in model.parameters()]
    ema = shardopt.EMA(model, 0.5)
    with torch.no_grad():
        for each in ema.state_dict()["state"].values():
            for average in each.values():
                average.fill_(7)
    if back:
        ema.swap()
    copy_, copies = torch.Tensor.copy_, []

    def interrupted(self, other, *args):
        if len(copies) == 3:
            raise Interrupt
        copies.append(self)
        return copy_(self, other, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(Interrupt):
        ema.swap()
    monkeypatch.undo()
    assert ema.swapped
    with pytest.raises(StateError):
        ema.update()
    ema.swap()
    assert not ema.swapped and all(map(torch.equal, model.parameters(), own))


def test_an_interrupted_look_at_the_state_of_lbfgs_leaves_its_history(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = shardopt.keyed("lbfgs", {"w": weight}, lr=0.1, max_iter=2, history_size=9)

    def closure():
        optimizer.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        return loss

    def interrupted(tensor):
        raise Interrupt

    optimizer.step(closure), optimizer.step(closure)
    before = [optimizer._atoms()[0].state[weight][name].clone() for name in history.HISTORY]
    with monkeypatch.context() as patched, pytest.raises(Interrupt):
        patched.setattr(history, "local_tensors", interrupted)
        optimizer.state_dict()
    after = [optimizer.state_dict()["state"]["w"][name] for name in history.HISTORY]
    assert all(each.any() and len(each) < 9 == len(now) for each, now in zip(before, after, strict=True))
    assert all(torch.equal(now[: len(each)], each) for each, now in zip(before, after, strict=True))


def test_a_step_in_backward_is_refused_while_averages_are_in_the_model():
    weight = torch.nn.Parameter(torch.ones(2))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = shardopt.in_backward(model, "adamw", lr=0.1)
    ema = shardopt.EMA(model, 0.5)
    with pytest.raises(StateError, match="a step would train the averages"), ema.swap():
        weight.sum().backward()
    assert weight.tolist() == [1.0, 1.0] and not ema.swapped
    assert not optimizer.state_dict()["state"]


def test_a_step_in_backward_is_refused_before_the_part_without_averages_has_moved(monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = shardopt.in_backward(model, "sgd", lr=0.1)
    ema, before = shardopt.EMA(model[0], 0.5), [each.detach().clone() for each in model.parameters()]
    ema.swap()
    with pytest.raises(StateError, match="a step would train the averages"):
        model(torch.ones(1, 2)).sum().backward()
    assert all(map(torch.equal, model.parameters(), before))
    with pytest.raises(StateError, match="a step would train the averages"), optimizer.accumulate():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    ema.swap()
    looked = []
    monkeypatch.setattr("shardopt.optim.backward.refuse_swapped", lambda *_: looked.append(1))
    model(torch.ones(1, 2)).sum().backward()
    assert len(looked) == 1 and not any(map(torch.equal, model.parameters(), before))


class Stateless(torch.optim.Optimizer):
    """Has a form of state that only its steps can make."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            self.state[each].setdefault("seen", torch.zeros_like(each)).add_(each.grad)


def test_a_restore_that_fails_to_make_state_leaves_that_of_other_optimizers(tmp_path):
    early, late, head = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    first = shardopt.keyed("adamw", {"early": early, "late": late}, lr=0.1)
    second = KeyedOptimizerWrapper({"head": head}, Stateless)
    early.grad, head.grad = torch.ones(2), torch.ones(2)
    first.step(), second.step()
    manager = checkpoint.Manager(tmp_path / "run", every=1)
    manager.save(1, {"first": first, "second": second})
    late.grad = torch.ones(2)
    first.step()
    before = {name: each["exp_avg"].tolist() for name, each in first.state_dict()["state"].items()}
    second = KeyedOptimizerWrapper({"head": head}, Stateless)
    with pytest.raises(ShardoptError):
        manager.restore({"first": first, "second": second})
    assert {name: each["exp_avg"].tolist() for name, each in first.state_dict()["state"].items()} == before


@pytest.mark.parametrize("stepped", [True, False])
def test_state_whose_conversion_failed_is_converted_by_the_next_step(monkeypatch, stepped):
    with fake_rank(0, 2) as mesh:
        model = torch.nn.Module()
        model.w = weight = torch.nn.Parameter(shard(torch.ones(4, 2), mesh, Shard(0)))
        optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
        optimizer.init_state()
        weight.grad = shard(torch.ones(4, 2), mesh, Shard(0))
        if stepped:
            optimizer.step()
        model.double()
        weight.grad = shard(torch.ones(4, 2, dtype=torch.double), mesh, Shard(0))
        with monkeypatch.context() as failing:
            failing.setattr("shardopt.optim.local.state._like", raising)
            with pytest.raises(MemoryError):
                optimizer.step()
        assert optimizer.state_dict()["state"]["w"]["step"] == stepped
        optimizer.step()
        state = optimizer.state_dict()["state"]["w"]
        assert state["step"] == stepped + 1 and state["exp_avg"].dtype == torch.double
        assert len(optimizer.state) == 1


def raising(*_):
    raise MemoryError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["lerp_", "copy_"])
def test_a_switch_to_averages_that_was_interrupted_is_taken_back(monkeypatch, dtype, changed, method):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(dtype)
    groups = [{"match": "0.*"}, {"match": "1.*"}]
    optimizer = shardopt.keyed("ScheduleFreeSGD", model.named_parameters(), groups=groups, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2, dtype=dtype)).square().sum().backward()
        optimizer.step()
    training = [each.detach().clone() for each in model.parameters()]
    real, calls = getattr(torch.Tensor, method), []

    def interrupted(self, *args):
        calls.append(self)
        if len(calls) == 3 and not changed:
            raise Interrupt
        real(self, *args)
        if len(calls) == 3:
            raise Interrupt
        return self

    monkeypatch.setattr(torch.Tensor, method, interrupted)
    if dtype is torch.float32 and method == "copy_":  # nothing is copied
        optimizer.eval()
        assert not calls
        return
    with pytest.raises(Interrupt):
        optimizer.eval()
    monkeypatch.undo()
    assert not optimizer.evaluating
    for each, before in zip(model.parameters(), training, strict=True):
        torch.testing.assert_close(each.detach(), before)
    optimizer.eval()
    averages = [each.detach().clone() for each in model.parameters()]
    assert not any(map(torch.equal, averages, training))


def test_a_part_that_refuses_to_step_tells_of_those_that_have_stepped():
    weights = {"a": torch.nn.Parameter(torch.zeros(3)), "b": torch.nn.Parameter(torch.zeros(4, 6)[:, :2])}
    groups = [{"match": "b", "algorithm": "sgd", "lr": 0.1, "fused": True}]  # strided memory
    optimizer = shardopt.keyed("adamw", weights, groups=groups)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    with pytest.raises(AlgorithmError, match="no step was taken; 1 of 2 parts of this CombinedOptimizer had stepped"):
        optimizer.step()
    assert weights["a"].any()
