"""Options of torch's own optimizers that a schedule changes: a load tells what the code gives otherwise, only that."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from shardopt import checkpoint

SCHEDULES = {
    "lambda": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.5**step),
    "warm-up": lambda it: lr_scheduler.LambdaLR(it, lambda step: step / 4),
    "multiplicative": lambda it: lr_scheduler.MultiplicativeLR(it, lambda step: 0.5),
    "step": lambda it: lr_scheduler.StepLR(it, 2),
    "cosine": lambda it: lr_scheduler.CosineAnnealingLR(it, 10),
    "restarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 2),
    "one cycle": lambda it: lr_scheduler.OneCycleLR(it, 4 * it.param_groups[0]["lr"], total_steps=20),
    "cyclic": lambda it: lr_scheduler.CyclicLR(it, it.param_groups[0]["lr"], 0.5, step_size_up=3),
    "averaged": lambda it: SWALR(it, 0.05, 3),
    "sequential": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.LinearLR(it), lr_scheduler.CosineAnnealingLR(it, 10)], [2]
    ),
    "chained": lambda it: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(it), lr_scheduler.ExponentialLR(it, 0.9)]
    ),
    "plateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, factor=0.3, patience=0, min_lr=1e-3),
}


def app_of(kind, rate, adam):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    more = {"betas": (0.8, adam)} if adam else {"momentum": 0.7}
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=copy.deepcopy(rate), **more)
    return {"model": model, "optimizer": optimizer, "schedule": SCHEDULES[kind](optimizer)}


def stepped(app, steps=3):
    for _ in range(steps):
        app["model"](torch.ones(1, 3)).sum().backward()
        app["optimizer"].step()
        app["schedule"].step(*([1.0] if isinstance(app["schedule"], lr_scheduler.ReduceLROnPlateau) else []))
    return app


def lines(caplog):
    return [each for each in caplog.messages if "options of the checkpoint replace" in each]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_same_code_resumes_without_a_word_and_other_code_with_one(tmp_path, caplog, kind):
    checkpoint.save(tmp_path / "adam", stepped(app_of(kind, 0.1, adam=0.9)))
    checkpoint.load(tmp_path / "adam", app_of(kind, 0.1, adam=0.9), init_state=True)
    rate = 0.1 if kind == "plateau" else torch.tensor(0.1)
    checkpoint.save(tmp_path / "sgd", stepped(app_of(kind, rate, adam=0)))
    checkpoint.load(tmp_path / "sgd", app_of(kind, rate, adam=0), init_state=True)
    assert not caplog.messages
    checkpoint.load(tmp_path / "adam", app_of(kind, 0.2, adam=0.5), init_state=True)
    (line,) = lines(caplog)
    first = {"one cycle": 0.95, "cyclic": 0.9}.get(kind, 0.8)
    assert f"optimizer: betas: ({first}, 0.5) here, ({first}, 0.9) stored" in line
    if kind != "plateau":
        here, stored = (0.2 * 4 / 25, 0.1 * 4 / 25) if kind == "one cycle" else (0.2, 0.1)
        assert f"optimizer: lr: {here} here, {stored} stored" in line and "with initial_lr" in line


def test_a_rate_that_no_reduction_on_a_plateau_explains_is_told(tmp_path, caplog):
    checkpoint.save(tmp_path / "c", stepped(app_of("plateau", 0.1, adam=0)))  # two reductions
    for rate in (0.1, 0.03, 0.1 * 0.3**2):
        checkpoint.load(tmp_path / "c", app_of("plateau", rate, adam=0), init_state=True)
    assert not caplog.messages
    checkpoint.load(tmp_path / "c", app_of("plateau", 0.2, adam=0), init_state=True)
    assert "optimizer: lr: 0.2 here, 0.009" in lines(caplog)[0]
    caplog.clear()
    checkpoint.save(tmp_path / "least", stepped(app_of("plateau", 0.1, adam=0), steps=9))
    checkpoint.load(tmp_path / "least", app_of("plateau", 0.1, adam=0), init_state=True)
    assert not caplog.messages


def test_a_rate_under_a_schedule_is_changed_as_the_line_says(tmp_path, caplog):
    checkpoint.save(tmp_path / "c", stepped(app_of("warm-up", 0.1, adam=0)))
    app = app_of("warm-up", 0.4, adam=0)
    checkpoint.load(tmp_path / "c", app, init_state=True)
    assert (
        "set them in param_groups after loading, with initial_lr, and then make the schedule again" in lines(caplog)[0]
    )
    (group,) = app["optimizer"].param_groups
    group["lr"] = group["initial_lr"] = 0.4
    app["schedule"] = lr_scheduler.LambdaLR(app["optimizer"], lambda step: step / 4, last_epoch=2)
    assert group["lr"] == pytest.approx(0.3)
    assert stepped(app, 1)["schedule"].get_last_lr() == [0.4]
    caplog.clear()
    checkpoint.save(tmp_path / "c2", app)
    checkpoint.load(tmp_path / "c2", app_of("warm-up", 0.4, adam=0), init_state=True)
    assert not caplog.messages


@pytest.mark.parametrize("factors", [(0.3,), (0.3, 0.7)])
def test_what_plateaus_have_reduced_is_no_other_code(tmp_path, caplog, factors):
    def made():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
        options = {"patience": 0, "min_lr": 5e-4 if len(factors) == 1 else 0.0}
        schedules = [lr_scheduler.ReduceLROnPlateau(optimizer, factor=factor, **options) for factor in factors]
        return {"model": model, "optimizer": optimizer, "schedules": schedules}

    app = made()
    for _ in range(4):
        app["model"](torch.ones(1, 3)).sum().backward()
        app["optimizer"].step()
        for schedule in app["schedules"]:
            schedule.step(1.0)
    checkpoint.save(tmp_path / "saved", app)
    checkpoint.load(tmp_path / "saved", made(), init_state=True)
    assert not caplog.messages
