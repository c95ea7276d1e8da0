"""Layers in eval() while the rest of their model trains: a resumed run that has others is told so."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardopt import checkpoint
from shardopt.checkpoint.saving.planning.frozen import layers_in_eval
from tests.support.fake_rank import fake_rank

LINE = "layers are in {} that were in {} when this step was saved, such as {}: "
EVAL, TRAIN = ("train()", "eval()", "model.trunk"), ("eval()", "train()", "model.trunk")


class Frozen(nn.Sequential):
    """Keeps its normalization in eval()."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def new_app(kind=nn.Sequential, wrap=lambda model: model):
    trunk = kind(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout()))
    model = nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"nets": [], "model": wrap(model.train()), "optimizer": optimizer, "ema": new_average(), "step": 0}


def new_average():
    """Frozen: what is trained, and stepped by no optimizer of the app, has each first save search all objects."""
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)


def job(root, steps, before, after=lambda app: None, app=None, every=3, first=lambda app: None, **choices):
    """Runs some steps, each between two functions of the app; returns the app."""
    app = new_app() if app is None else app
    with checkpoint.Manager(root, every=every) as manager:
        manager.restore(app, **choices)
        first(app)
        for step in range(app["step"] + 1, app["step"] + 1 + steps):
            app["step"] = step
            before(app)
            app["model"](torch.randn(4, 2)).sum().backward()
            app["optimizer"].step()
            after(app)
            manager.save(step, app)
    return app


def told(caplog):
    return [each for each in caplog.messages if "layers are in" in each]


def freeze(app):
    app["model"].train()
    app["model"].trunk.eval()


def thaw(app):
    app["model"].train()


@pytest.mark.parametrize(("run", "forgets", "said"), [(freeze, thaw, EVAL), (thaw, freeze, TRAIN)])
@pytest.mark.parametrize("every", [1, 3])
def test_layers_in_another_mode_than_before_are_told_of_once(tmp_path, caplog, run, forgets, said, every):
    before = job(tmp_path, 6, run, every=every)
    assert not told(caplog)
    job(tmp_path, 1, forgets, every=every)
    assert not told(caplog)  # it may have been evaluated before that step
    resumed = job(tmp_path, 5, forgets, every=every, step=6)
    (line,) = told(caplog)
    assert LINE.format(*said) in line and f"call their {said[1]} again" in line
    caplog.clear()
    job(tmp_path, 3, run, every=every, step=6)
    job(tmp_path, 3, forgets, every=every, select="^step$", step=6)
    assert not told(caplog)
    thaw(resumed)  # a rewind in the process that has it otherwise
    job(tmp_path, 3, forgets, app=resumed, every=every, step=6)
    assert len(told(caplog)) == 1
    assert before["step"] == 6


def evaluate(app):
    for each in (app["model"], app["ema"]):
        each.eval()


def evaluate_and_train(app):
    evaluate(app)
    app["model"].train()


def evaluate_trunk(app):
    if app["step"] % 2:
        app["model"].trunk.eval()


RIGHT = {
    "evaluated": (freeze, evaluate),
    "evaluated at some": (freeze, lambda app: app["step"] % 4 or evaluate(app)),
    "evaluated and trained": (freeze, lambda app: app["step"] % 3 or evaluate_and_train(app)),
    "trained whole": (lambda app: app["step"] % 3 == 1 and freeze(app), lambda app: app["step"] % 6 or thaw(app)),
    "evaluated in part": (thaw, evaluate_trunk),
    "in part at saves": (thaw, lambda app: app["step"] % 3 or app["model"].trunk.eval()),
    "rarely in part": (thaw, lambda app: app["step"] % 4 or app["model"].trunk.eval()),
    "never trained again": (lambda app: None, evaluate),
    "in turn": (thaw, lambda app: app["model"].head.eval()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_programs_that_evaluate_are_told_of_nothing(tmp_path, caplog, name):
    for every, resumed in ((1, (4, 5, 6)), (3, (6, 3))):
        job(tmp_path / str(every), 6, *RIGHT[name], every=every)
        for step in resumed:
            job(tmp_path / str(every), 5, *RIGHT[name], every=every, first=evaluate, step=step)
    assert not told(caplog)


def test_a_save_notes_what_is_in_eval_at_two_calls(tmp_path):
    app = job(tmp_path, 6, freeze)
    assert checkpoint.load(tmp_path / "step-00000003", app).in_eval == {"model": ("trunk",), "ema": ()}
    job(tmp_path, 3, lambda app: app["step"] == 9 or freeze(app), app=app, first=thaw)
    assert checkpoint.load(tmp_path / "step-00000009", app).in_eval == {"model": ("trunk",), "ema": ()}
    job(tmp_path, 3, freeze, lambda app: app["step"] < 12 or evaluate_and_train(app), app=app)
    assert checkpoint.load(tmp_path / "step-00000012", app).in_eval is None


def test_modules_that_train_only_in_part_are_the_same_after_a_resume(tmp_path, caplog):
    for forgets in (False, True):
        job(tmp_path, 4, thaw, app=new_app(nn.Sequential if forgets else Frozen), every=2)
    (line,) = told(caplog)
    assert LINE.format("train()", "eval()", "model.trunk.1") in line
    job(tmp_path, 4, lambda app: app["model"].trunk[1].eval(), every=2, step=4)
    assert len(told(caplog)) == 1


def test_names_are_without_wrappers_and_other_names_say_nothing(tmp_path, caplog):
    wraps = [lambda model: model, lambda model: torch.compile(model, backend="eager")]
    for wrap, into in (wraps, wraps[::-1]):
        caplog.clear()
        root = tmp_path / str(wraps.index(wrap))
        job(root, 4, freeze, app=new_app(wrap=wrap), every=2)
        job(root, 2, freeze, app=new_app(wrap=into), every=2)
        assert not told(caplog)
        job(root, 2, thaw, app=new_app(wrap=into), every=2)
        (line,) = told(caplog)
        assert LINE.format(*EVAL) in line
    caplog.clear()
    app = new_app()
    app["model"] = nn.Sequential(OrderedDict(body=app["model"].trunk, head=app["model"].head))
    root, model = tmp_path / "0", app["model"]
    for before in (lambda app: model.train(), lambda app: model.train() and model.body.eval()):
        job(root, 3, before, app=app, rename={r"\btrunk\.": "body."}, step=6)
        assert not told(caplog)


def test_sharded_modules_have_the_names_of_plain_ones():
    with fake_rank(0, 2):
        app = new_app()
        fully_shard(app["model"].trunk)
        fully_shard(app["model"])
        freeze(app)
        assert layers_in_eval(app["model"]) == ("trunk",)


@pytest.mark.parametrize("broken", [False, True])
def test_a_module_that_cannot_be_looked_at_ends_no_training(tmp_path, broken):
    app = new_app()
    if broken:
        del app["ema"].training, app["ema"][1].training
    job(tmp_path, 4, freeze, app=app, every=2)
    noted = None if broken else {"model": ("trunk",), "ema": ()}
    assert checkpoint.load(tmp_path / "step-00000004", new_app()).in_eval == noted
