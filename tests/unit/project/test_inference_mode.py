"""Saves and loads in `torch.inference_mode`, where an evaluation saves the best: training continues afterwards."""

import pytest
import torch

import shardopt
from shardopt import checkpoint


def app_of(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1)).to(
        memory_format=torch.channels_last
    )
    return {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters(), lr=0.1), "step": 0}


def train(app, steps=1):
    for _ in range(steps):
        app["model"](torch.ones(1, 3, 5, 5)).square().mean().backward()
        app["optimizer"].step()
        app["optimizer"].zero_grad()
    return app


def assert_equal(one, other):
    for name, value in one["model"].state_dict().items():
        assert torch.equal(value, other["model"].state_dict()[name])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("stage", [None, "now", "lazy"])
def test_training_continues_after_saves(tmp_path, mode, stage):
    app, alone = train(app_of()), train(app_of())
    manager = checkpoint.Manager(tmp_path, stage=stage)
    with mode():
        manager.save(1, app)
    for step in (2, 4):
        train(app)
        manager.save(step, app)
        train(alone)
        with mode():
            manager.save(step + 1, app)
    manager.close()
    assert_equal(app, alone)
    restored = app_of(1)
    assert checkpoint.Manager(tmp_path).restore(restored) == 5
    assert_equal(restored, app)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_training_continues_after_restores(tmp_path, mode):
    app = train(app_of(), 2)
    checkpoint.save(tmp_path / "step-00000002", app)
    restored = app_of(1)
    with mode():
        assert checkpoint.Manager(tmp_path).restore(restored) == 2
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert_equal(train(restored, 2), train(app, 2))


def test_training_continues_after_state_is_loaded_and_made():
    app, other, made = train(app_of()), app_of(1), app_of()
    with torch.inference_mode():
        other["optimizer"].init_state()
        other["optimizer"].load_state_dict(app["optimizer"].state_dict())
        made["optimizer"].init_state()
    train(other)
    assert_equal(train(made), app)
