"""A step is saved once: options and values that have changed since are named."""

import pytest
import torch

import shardopt
from shardopt import checkpoint

OPTIONS = checkpoint.SaveOptions(durable=False)


def app_of(kind="keyed"):
    model = torch.nn.Linear(2, 2)
    if kind == "keyed":
        optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    app = {"model": model, "optimizer": optimizer, "step": 1, "notes": {"best": float("nan")}, "x": torch.ones(2)}
    train(app)
    return app


def train(app):
    app["model"](torch.ones(1, 2)).sum().backward()
    app["optimizer"].step()
    app["optimizer"].zero_grad()


CHANGES = {
    "optimizer.param_groups.0.lr": lambda app: app["optimizer"].param_groups[0].update(lr=0.2),
    "notes.best": lambda app: app["notes"].update(best=1.0),
}


@pytest.mark.parametrize("stage", [None, "now"])
@pytest.mark.parametrize("kind", ["keyed", "torch's"])
def test_what_has_changed_since_a_step_was_saved_is_told(tmp_path, caplog, kind, stage):
    app = app_of(kind)
    with checkpoint.Manager(tmp_path, stage=stage, options=OPTIONS) as manager:
        report = manager.save(1, app, force=True)
        app["model"](torch.ones(1, 2)).sum().backward()  # nothing that is saved
        app["optimizer"].zero_grad()
        assert manager.save(1, app, force=True) is report and not caplog.messages
        for name, change in CHANGES.items():
            change(app)
            manager.save(1, app, force=True)
            (line,) = caplog.messages
            assert f"is not in it: {name}" in line and line.count(",") <= 4 and "[run-root]" in line
            caplog.clear()
            manager.save(1, app, force=True)
        app["step"] = 2
        manager.save(2, app, force=True)
        assert not caplog.messages
        assert manager.restore(app) == 2
        manager.save(2, app, force=True)
        assert not caplog.messages
        app["notes"]["best"] = 2.0
        manager.save(2, app, metrics={"loss": 1.0}, force=True)
        (line,) = caplog.messages
        assert "is not in it: notes.best, and tensors" in line


def test_only_some_changes_are_named(tmp_path, caplog):
    app = {f"value {n}": 0 for n in range(20)}
    with checkpoint.Manager(tmp_path, options=OPTIONS) as manager:
        manager.save(1, app, force=True)
        app.update(dict.fromkeys(app, 1))
        manager.save(1, app, force=True)
    (line,) = caplog.messages
    assert "value 7, 12 more, and" in line
