"""A schedule that is not saved is told of at the first save; one that is saved in any way, or none at all, is not."""

import logging

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import shardopt
from shardopt import checkpoint
from shardopt.optim import WarmupOptimizer, WarmupPolicy, WarmupStage


def keyed(model):
    return shardopt.keyed("adamw", model.named_parameters(), lr=1.0)


OPTIMIZERS = {"keyed": keyed, "torch's": lambda model: torch.optim.AdamW(model.parameters())}


class Trainer:
    """A trainer that keeps a schedule, and saves all of its state, or only the steps."""

    def __init__(self, schedule, in_full):
        self.schedules, self.in_full = [schedule], in_full

    def state_dict(self):
        (schedule,) = self.schedules
        return {"a": [schedule.state_dict()]} if self.in_full else {"steps": schedule.last_epoch}

    def load_state_dict(self, state):
        pass


class Hidden(Trainer):
    """One whose schedule is seen in its state alone."""

    def __init__(self, schedule):
        self.get = lambda: {"inner": {"schedule": schedule.state_dict()}}

    def state_dict(self):
        return self.get()


HOLDERS = {
    "itself": lambda schedule: {"schedule": schedule},
    "list": lambda schedule: {"schedules": [schedule]},
    "dict": lambda schedule: {"all": {"schedules": {"one": schedule}}},
    "its state": lambda schedule: {"schedule": schedule.state_dict()},
    "trainer": lambda schedule: {"trainer": Trainer(schedule, in_full=True)},
    "trainer that counts": lambda schedule: {"trainer": Trainer(schedule, in_full=False)},
    "in the state alone": lambda schedule: {"trainer": Hidden(schedule)},
}


def told(tmp_path, caplog, app):
    with caplog.at_level(logging.WARNING, logger="shardopt"), checkpoint.Manager(tmp_path) as manager:
        manager.save(1, app)
        manager.save(2, app)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("maker", OPTIMIZERS)
def test_a_schedule_that_is_not_saved_is_told_of_once(tmp_path, caplog, maker):
    model = torch.nn.Linear(3, 1)
    optimizer = OPTIMIZERS[maker](model)
    CosineAnnealingLR(optimizer, 10)
    (line,) = told(tmp_path, caplog, {"model": model, "optimizer": optimizer, "notes": ["none"]})
    assert "sets the rates of optimizer, and none is in the app" in line and "last_epoch=" in line


@pytest.mark.parametrize("maker", OPTIMIZERS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_schedule_that_is_saved_is_not_told_of(tmp_path, caplog, maker, holder):
    model = torch.nn.Linear(3, 1)
    optimizer = OPTIMIZERS[maker](model)
    schedule = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    assert told(tmp_path, caplog, {"model": model, "optimizer": optimizer, **HOLDERS[holder](schedule)}) == []


def test_rates_that_no_schedule_of_torchs_sets_are_not_told_of(tmp_path, caplog):
    model = torch.nn.Linear(3, 1)
    by_hand = torch.optim.SGD(model.parameters(), lr=1.0)
    by_hand.param_groups[0].update(lr=0.5, initial_lr=1.0)
    warm = WarmupOptimizer(keyed(model), [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4)])
    assert told(tmp_path, caplog, {"model": model, "by_hand": by_hand, "warm": warm}) == []
