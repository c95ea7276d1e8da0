"""A signal handler that saves: it runs between any two lines of the main thread, also within a save or a step."""

import copy
import importlib
import signal

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import CheckpointError


class Interrupted:
    """An object whose state is asked for when a signal comes."""

    def __init__(self, interrupts=True):
        self.interrupts = interrupts

    def state_dict(self):
        if self.interrupts:
            signal.raise_signal(signal.SIGUSR1)
        return {"x": torch.zeros(2)}

    def load_state_dict(self, state):
        if self.interrupts:
            signal.raise_signal(signal.SIGUSR1)


@pytest.fixture
def handled():
    """Puts a handler in place; returns the errors that it has met, each of which it swallows as a careless one does."""
    errors = []
    before = signal.getsignal(signal.SIGUSR1)

    def handle(save):
        def on_signal(*_):
            try:
                save()
            except CheckpointError as error:
                errors.append(error)

        signal.signal(signal.SIGUSR1, on_signal)
        return errors

    yield handle
    signal.signal(signal.SIGUSR1, before)


def is_refused(errors, of):
    (error,) = errors
    (problem,) = error.problems
    assert of in problem.found
    assert "stop_on=" in problem.remedy
    assert "flag" in problem.remedy
    errors.clear()


@pytest.mark.parametrize("inner", ["save", "async_save", "manager", "manager in the background"])
@pytest.mark.parametrize("outer", ["save", "now", "lazy", "manager", "manager in the background", "load", "restore"])
def test_a_save_in_a_handler_is_refused_while_a_save_or_a_load_is_under_way(tmp_path, handled, outer, inner):
    plain = {"x": torch.ones(3)}
    within = {**plain, "o": Interrupted()}
    checkpoint.save(tmp_path / "before", {**plain, "o": Interrupted(interrupts=False)})
    stage = "now" if "background" in outer or "background" in inner else None
    with checkpoint.Manager(tmp_path / "run", keep=1, stage=stage) as manager:
        manager.save(1, {**plain, "o": Interrupted(interrupts=False)})
        manager.wait()
        saves = {
            "save": lambda: checkpoint.save(tmp_path / "inner", plain),
            "async_save": lambda: checkpoint.async_save(tmp_path / "inner", plain).result(),
        }
        errors = handled(saves.get(inner, lambda: manager.save(2, plain)))
        if outer == "save":
            checkpoint.save(tmp_path / "outer", within)
        elif outer in ("now", "lazy"):
            checkpoint.async_save(tmp_path / "outer", within, stage=outer).result(30)
        elif outer == "load":
            checkpoint.load(tmp_path / "before", within)
        elif outer == "restore":
            assert manager.restore(within) == 1
        else:
            manager.save(2, within)
            manager.wait()
        what = "a load" if outer in ("load", "restore") else "a save"
        assert {problem.found.split(" under")[0] for error in errors for problem in error.problems} == {what}
        del errors[1:]  # a load asks for state more than once
        is_refused(errors, what)
        assert not (tmp_path / "inner").exists()
        assert manager.steps() == ([2] if "manager" in outer else [1])
    if outer in ("save", "now", "lazy"):
        assert checkpoint.verify(tmp_path / "outer").ok


def test_what_waits_for_a_save_is_refused_while_it_is_being_staged(tmp_path, handled):
    with checkpoint.Manager(tmp_path, stage="now") as manager:
        for number, wait in enumerate((manager.wait, manager.close, lambda: manager.restore({"x": torch.ones(3)}))):
            errors = handled(wait)
            manager.save(number, {"x": torch.ones(3), "o": Interrupted()})
            is_refused(errors, "a save")
        manager.wait()
        assert manager.steps() == [0, 1, 2]


def test_a_handler_between_steps_saves_also_while_a_save_runs_in_the_background(tmp_path, handled):
    app = {"x": torch.ones(1 << 20)}
    with checkpoint.Manager(tmp_path, stage="now") as manager:
        errors = handled(lambda: manager.save(2, app))
        manager.save(1, app)
        signal.raise_signal(signal.SIGUSR1)
        manager.wait()
        assert errors == []
        assert manager.steps() == [1, 2]


def stepped(monkeypatch, make):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make(parameter)
    module = importlib.import_module("torch.optim.adam")
    real = module.adam

    def interrupted(*args, **options):
        signal.raise_signal(signal.SIGUSR1)
        return real(*args, **options)

    monkeypatch.setattr(module, "adam", interrupted)
    parameter.sum().backward()
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda parameter: shardopt.keyed("adamw", [("x", parameter)]),
        lambda parameter: torch.optim.AdamW([parameter]),
        lambda parameter: shardopt.optim.CombinedOptimizer([shardopt.keyed("adamw", [("x", parameter)])]),
    ],
    ids=["keyed", "torch's", "combined"],
)
def test_a_save_in_a_handler_is_refused_in_the_midst_of_a_step(tmp_path, handled, monkeypatch, make):
    optimizer = stepped(monkeypatch, make)
    with checkpoint.Manager(tmp_path) as manager:
        errors = handled(lambda: manager.save(1, {"optimizer": optimizer}))
        optimizer.step()
        is_refused(errors, "the step of an optimizer")
        manager.save(1, {"optimizer": optimizer})
        assert manager.steps() == [1]


def test_hooks_and_closures_of_a_step_may_save(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = shardopt.keyed("adamw", [("x", parameter)])
    with checkpoint.Manager(tmp_path) as manager:

        def save(number):
            manager.save(number, {"x": parameter, "optimizer": optimizer})

        def closure():
            loss = parameter.sum()
            loss.backward()
            save(2)
            return loss

        handles = [
            optimizer.register_step_pre_hook(lambda *_: save(1)),
            optimizer.register_step_post_hook(lambda *_: save(3)),
        ]
        optimizer.step(closure)
        for each in handles:
            each.remove()
        assert manager.steps() == [1, 2, 3]


def test_a_save_in_a_handler_is_refused_in_a_backward_that_steps(tmp_path, handled):
    model = torch.nn.Linear(3, 1)
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1)
    app = {"model": model, "optimizer": optimizer}
    model.weight.register_hook(lambda gradient: signal.raise_signal(signal.SIGUSR1))
    with checkpoint.Manager(tmp_path) as manager:
        errors = handled(lambda: manager.save(1, app))
        model(torch.ones(1, 3)).sum().backward()
        assert errors == []
        assert manager.steps() == [1]
        monkey = type("InBackward", (), {"updates_in_backward": True})()
        errors = handled(lambda: manager.save(2, {**app, "other": monkey}))
        model(torch.ones(1, 3)).sum().backward()
        is_refused(errors, "a backward")


def test_a_save_in_a_handler_is_refused_in_the_midst_of_averages(tmp_path, handled, monkeypatch):
    model = torch.nn.Linear(3, 1)
    ema = shardopt.EMA(model, 0.9)
    ema.update()
    real = type(ema)._step_size
    monkeypatch.setattr(type(ema), "_step_size", lambda self, n: signal.raise_signal(signal.SIGUSR1) or real(self, n))
    with checkpoint.Manager(tmp_path) as manager:
        errors = handled(lambda: manager.save(1, {"model": model, "ema": ema}))
        ema.update()
        is_refused(errors, "a change of averages")


def test_a_save_in_a_handler_is_refused_in_the_midst_of_schedule_free_averages(tmp_path, handled, monkeypatch):
    model = torch.nn.Linear(3, 1)
    optimizer = shardopt.keyed("ScheduleFreeSGD", model.named_parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    real = torch.Tensor.lerp_
    monkeypatch.setattr(torch.Tensor, "lerp_", lambda *args: signal.raise_signal(signal.SIGUSR1) or real(*args))
    errors = handled(lambda: checkpoint.save(tmp_path / "inner", {"model": model, "optimizer": optimizer}))
    optimizer.eval()
    del errors[1:]
    is_refused(errors, "a change of averages")
    assert not (tmp_path / "inner").exists()


def test_a_save_in_a_handler_is_refused_in_the_midst_of_an_optimizers_load(tmp_path, handled):
    optimizer = shardopt.keyed("adamw", torch.nn.Linear(3, 1).named_parameters(), lr=0.1)
    optimizer.init_state()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"]["weight"]["exp_avg"] = Interrupting(torch.ones(1, 3))
    errors = handled(lambda: checkpoint.save(tmp_path / "inner", {"optimizer": optimizer}))
    optimizer.load_state_dict(state)
    is_refused(errors, "a load")
    assert not (tmp_path / "inner").exists()


class Interrupting(torch.Tensor):
    """A signal comes while it is copied."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            signal.raise_signal(signal.SIGUSR1)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_an_error_of_the_handler_ends_the_save_and_leaves_the_root_usable(tmp_path, handled):
    """A handler that does not swallow the refusal raises in the save that it has interrupted."""
    app = {"x": torch.ones(3)}
    with checkpoint.Manager(tmp_path, stage="now") as manager:
        signal.signal(signal.SIGUSR1, lambda *_: manager.save(2, app))
        with pytest.raises(CheckpointError, match="in the middle of a save"):
            manager.save(1, {**app, "o": Interrupted()})
            manager.wait()
        manager.save(3, app)
        manager.wait()
        assert manager.steps() == [3]
