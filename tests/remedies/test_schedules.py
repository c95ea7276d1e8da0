"""What the errors of schedules advise, followed to the letter: the rates continue as they would have."""

import pytest
import torch
from torch.optim import lr_scheduler

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import MismatchError
from tests.remedies.following import refused, stepped

REMEDY = (
    "give the groups as they were saved, in the same order; or leave the schedule out of the app, load with Strictness("
    'unexpected="ignore") while it is attached, and then make it again with last_epoch= the steps that it had made, '
    'less one, and set "lr" of each group to what was loaded, as StepLR changes it when it is made'
)
MADE = {
    "step": lambda it, **at: lr_scheduler.StepLR(it, 3, **at),
    "multi step": lambda it, **at: lr_scheduler.MultiStepLR(it, [3, 5], **at),
    "exponential": lambda it, **at: lr_scheduler.ExponentialLR(it, 0.5, **at),
    "linear": lambda it, **at: lr_scheduler.LinearLR(it, **at),
    "lambda": lambda it, **at: lr_scheduler.LambdaLR(it, lambda step: 0.5**step, **at),
    "cosine": lambda it, **at: lr_scheduler.CosineAnnealingLR(it, 10, **at),
    "restarts": lambda it, **at: lr_scheduler.CosineAnnealingWarmRestarts(it, 3, **at),
    "polynomial": lambda it, **at: lr_scheduler.PolynomialLR(it, 10, **at),
    "one cycle": lambda it, **at: lr_scheduler.OneCycleLR(it, [0.4] * len(it.param_groups), total_steps=20, **at),
}
RATES = {"bias": 0.25, "weight": 0.5}


def made(kind, order):
    model = torch.nn.Linear(3, 2)
    groups = [{"match": name, "lr": RATES[name]} for name in order]
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1, groups=groups)
    return {"model": model, "optimizer": optimizer, "schedule": MADE[kind](optimizer)}


def rates(app):
    return {name: group["lr"] for group in app["optimizer"].state_dict()["param_groups"] for name in group["params"]}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", [each for each in MADE if each != "one cycle"])
def test_a_schedule_of_other_groups_gets_them_back_or_is_made_anew(tmp_path, kind, steps):
    saved = stepped(made(kind, ("bias", "weight")), steps)
    checkpoint.save(tmp_path / "c", saved)
    refused(REMEDY, checkpoint.load, tmp_path / "c", made(kind, ("weight", "bias")), init_state=True)
    again = made(kind, ("bias", "weight"))
    checkpoint.load(tmp_path / "c", again, init_state=True)
    anew = made(kind, ("weight", "bias"))
    without = {name: anew[name] for name in ("model", "optimizer")}
    checkpoint.load(tmp_path / "c", without, init_state=True, strict=Strictness(unexpected="ignore"))
    loaded = [group["lr"] for group in anew["optimizer"].param_groups]
    anew["schedule"] = MADE[kind](anew["optimizer"], last_epoch=steps - 1)
    for group, rate in zip(anew["optimizer"].param_groups, loaded, strict=True):
        group["lr"] = rate
    for _ in range(4):
        assert rates(again) == rates(saved) and rates(anew) == pytest.approx(rates(saved))
        for app in (saved, again, anew):
            stepped(app, 1)


def test_one_cycle_with_groups_of_another_number_is_made_anew(tmp_path):
    """Its limits stand in the options of groups, by name."""
    saved = stepped(made("one cycle", ("bias", "weight")), 3)
    checkpoint.save(tmp_path / "c", saved)
    anew = made("one cycle", ("bias",))
    with pytest.raises(MismatchError, match=r"schedule.base_lrs|param_groups"):
        checkpoint.load(tmp_path / "c", anew, init_state=True)
    anew = made("one cycle", ("weight", "bias"))
    without = {name: anew[name] for name in ("model", "optimizer")}
    checkpoint.load(tmp_path / "c", without, init_state=True, strict=Strictness(unexpected="ignore"))
    anew["schedule"] = MADE["one cycle"](anew["optimizer"], last_epoch=2)
    for _ in range(4):
        assert rates(anew) == pytest.approx(rates(saved))
        stepped(saved, 1), stepped(anew, 1)
