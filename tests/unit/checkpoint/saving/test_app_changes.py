"""A step that is saved again is not: what has changed since is told, and nothing if nothing has."""

import logging

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from tests.support.fake_rank import fake_rank

OPTIONS = checkpoint.SaveOptions(durable=False)


def app_of(kind="keyed"):
    model = torch.nn.Linear(2, 2)
    if kind == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
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
    "x": lambda app: app["x"].add_(1),
    "tensors of model (2, such as ": lambda app: app["model"].load_state_dict(torch.nn.Linear(2, 2).state_dict()),
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
        for change in CHANGES.values():
            change(app)
        manager.save(2, app, metrics={"loss": 1.0}, force=True)
        (line,) = caplog.messages
        assert "is not in it: x, tensors of model (2, such as weight). Save" in line


def test_shards_that_a_forward_has_gathered_are_not_told_of(tmp_path, caplog):
    with fake_rank(0, 1):
        app = app_of("sharded")
        manager = checkpoint.Manager(tmp_path, options=OPTIONS)
        manager.save(1, app, force=True)
        for _ in range(2):
            with torch.no_grad():
                app["model"](torch.ones(1, 2))
            manager.save(1, app, force=True)
        assert not [record for record in caplog.records if record.levelno > logging.INFO]
        train(app)
        manager.save(1, app, force=True)
        assert "tensors of model (2, such as 0)" in caplog.text
        manager.close()


def test_only_some_changes_are_named(tmp_path, caplog):
    app = {f"value {n}": 0 for n in range(20)}
    with checkpoint.Manager(tmp_path, options=OPTIONS) as manager:
        manager.save(1, app, force=True)
        app.update(dict.fromkeys(app, 1))
        manager.save(1, app, force=True)
    (line,) = caplog.messages
    assert "value 7, 12 more. Save" in line
