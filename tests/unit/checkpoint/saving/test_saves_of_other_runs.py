"""Several Managers in one process, as of a sweep or a notebook, and saves in the background that others meet."""

import logging
import signal
import threading

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.run.stopping import Stop
from shardopt.checkpoint.saving.writing import pending
from shardopt.errors import CheckpointError, CheckpointNotFoundError, StateError
from shardopt.runtime import signals

OPTIONS = checkpoint.SaveOptions(durable=False)


def app_of():
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": shardopt.keyed("sgd", model.named_parameters(), lr=0.1, momentum=0.9)}


def train(app):
    app["model"](torch.ones(1, 2)).sum().backward()
    app["optimizer"].step()


def failed(tmp_path, app):
    """A save in the background of a run whose root cannot be made."""
    manager = checkpoint.Manager(tmp_path / "broken", stage="now", options=OPTIONS)
    (tmp_path / "broken").touch()
    save = manager.save(1, app, force=True)
    assert save.done.wait(30) and save.failure is not None
    return manager


@pytest.mark.parametrize("stage", [None, "now"])
def test_a_failure_is_left_to_the_run_that_has_it(tmp_path, stage):
    ours, others = app_of(), app_of()
    train(ours)
    manager = failed(tmp_path, ours)
    with checkpoint.Manager(tmp_path / "other", stage=stage, options=OPTIONS) as other:
        other.save(1, others, force=True)
        train(others)
    checkpoint.save(tmp_path / "bare", others, durable=False)
    checkpoint.save(tmp_path / "model", {"model": others["model"]}, durable=False)
    with pytest.raises(CheckpointError, match="broken"):
        manager.close()
    train(ours)
    assert not pending._tracked


@pytest.mark.parametrize("part", ["both", "model", "new optimizer"])
def test_a_failure_is_raised_by_the_next_save_of_the_same_parameters(tmp_path, part):
    ours = app_of()
    manager = failed(tmp_path, ours)
    app = {"model": ours["model"]} if part == "model" else ours
    if part == "new optimizer":
        optimizer = torch.optim.SGD(ours.pop("model").parameters(), lr=0.1)
        app = {"optimizer": optimizer}
    with pytest.raises(CheckpointError, match="broken"):
        checkpoint.save(tmp_path / "next", app, durable=False)
    checkpoint.save(tmp_path / "next", app, durable=False)
    manager.close()


def test_a_failure_of_a_save_without_optimizers_is_raised_by_any_save_and_by_its_own_run(tmp_path):
    manager = failed(tmp_path, {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match="broken"):
        checkpoint.save(tmp_path / "next", app_of(), durable=False)
    checkpoint.save(tmp_path / "next", app_of(), durable=False)
    with pytest.raises(CheckpointError, match="broken"):
        manager.close()


def test_a_failure_of_a_model_alone_is_raised_in_its_run_once(tmp_path):
    model, others = torch.nn.Linear(2, 2), app_of()
    manager = failed(tmp_path, {"model": model})
    checkpoint.save(tmp_path / "other", others, durable=False)
    with pytest.raises(CheckpointError, match="broken"):
        checkpoint.save(tmp_path / "next", {"model": model, "x": torch.ones(2)}, durable=False)
    manager.close()
    assert not pending._tracked


@pytest.mark.parametrize("kind", ["model", "nested", "list"])
def test_a_failure_to_describe_what_is_saved_is_left_to_its_run(tmp_path, kind):
    """Of such a save nothing was held but optimizers directly in the app."""
    ours, others = app_of(), app_of()
    model, optimizer = ours["model"], ours["optimizer"]
    app = {"model": {"model": model}, "nested": {"all": ours}, "list": {"all": [optimizer, {"model": model}]}}[kind]
    manager = checkpoint.Manager(tmp_path / "unstored", stage="now", options=OPTIONS)
    assert manager.save(1, {**app, "x": object()}).done.wait(30)
    checkpoint.save(tmp_path / "other", others, durable=False)
    with pytest.raises(StateError, match="cannot be stored"):
        checkpoint.save(tmp_path / "next", ours, durable=False)
    manager.close()
    assert not pending._tracked


def test_a_failure_with_lazy_parameters_is_left_to_its_run(tmp_path):
    model = torch.nn.LazyLinear(2)
    manager = failed(tmp_path, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "x": torch.ones(2)})
    checkpoint.save(tmp_path / "other", app_of(), durable=False)
    with pytest.raises(CheckpointError, match="broken"):
        manager.close()


@pytest.fixture
def no_deadline(monkeypatch):
    """Nothing ends this process, which continues after the signal."""
    monkeypatch.setattr(Stop, "_start_deadline", lambda self: None)
    yield
    for listener in tuple(signals._open):
        listener.close()


def test_a_stop_of_another_run_only_logs_a_failure(tmp_path, caplog, no_deadline):
    manager = failed(tmp_path, app_of())
    with checkpoint.Manager(tmp_path / "other", stop_on=signal.SIGUSR1, options=OPTIONS) as other:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(SystemExit):
            other.save(1, app_of())
    assert other.steps() == [1] and caplog.text.count("failed before the stop was requested") == 1
    with pytest.raises(CheckpointError, match="broken"):
        manager.close()
    assert not pending._tracked


class Interrupting(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("saved step"):
            raise KeyboardInterrupt


def test_a_step_whose_save_was_interrupted_after_its_commit_is_saved(tmp_path, caplog):
    handler, app = Interrupting(), app_of()
    with checkpoint.Manager(tmp_path, options=OPTIONS, keep=1) as manager:
        with caplog.at_level(logging.INFO, logger="shardopt"):
            logging.getLogger("shardopt").addHandler(handler)
            try:
                with pytest.raises(KeyboardInterrupt):
                    manager.save(1, app, force=True)
            finally:
                logging.getLogger("shardopt").removeHandler(handler)
        assert manager.save(1, app, force=True).url == manager.path(1)
        manager.save(2, app, force=True)
    assert manager.steps() == [2]


def test_a_second_manager_of_the_run_waits_for_what_the_first_one_saves(tmp_path):
    """It used to resume the step before, as where the cell of a notebook is run again."""
    gate = threading.Event()
    options = checkpoint.SaveOptions(durable=False, progress=lambda *_: gate.wait(30))
    app, first = app_of() | {"step": 1}, checkpoint.Manager(tmp_path, stage="now", options=options)
    save = first.save(1, app, force=True)
    for read in (checkpoint.open, lambda url: checkpoint.load(url, app)):
        with pytest.raises(CheckpointNotFoundError, match=r"a save of this process that is under way.*wait for it"):
            read(first.path(1))
    checkpoint.Manager(tmp_path / "other", options=OPTIONS).restore(app)  # waits for nothing
    threading.Timer(0.2, gate.set).start()
    assert not save.done and checkpoint.Manager(f"{tmp_path}/", options=OPTIONS).restore(app) == 1
    checkpoint.load(save.result().url, app)
    first.close()
