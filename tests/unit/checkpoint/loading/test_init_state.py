"""Keyed optimizers get the state and options of a checkpoint, also where those of the code have no such state."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Manager
from shardopt.errors import MismatchError
from shardopt.optim import CombinedOptimizer
from tests.harness import run_ranks

CHANGES = {
    "momentum": ("sgd", {"momentum": 0.5}, {"momentum": 0.0}),
    "nesterov": ("sgd", {"momentum": 0.5, "nesterov": True}, {}),
    "amsgrad": ("adamw", {"amsgrad": True}, {"amsgrad": False}),
    "centered": ("rmsprop", {"momentum": 0.5, "centered": True}, {}),
}


def app_of(algorithm, options, is_sharded=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    first, second = ([*part.named_parameters(prefix=name)] for name, part in model.named_children())
    optimizer = CombinedOptimizer(
        [shardopt.keyed(algorithm, first, lr=0.1, **options), shardopt.keyed(algorithm, second, lr=0.1, **options)]
    )
    return {"model": model, "optimizer": optimizer}


def stepped(app, steps):
    for step in steps:
        app["optimizer"].zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        (app["model"](x) - x.sum(1, keepdim=True)).square().mean().backward()
        app["optimizer"].step()
    return app


def weights(app):
    return [getattr(each, "full_tensor", lambda each=each: each)() for each in app["model"].parameters()]


def _resumes(root, change, is_sharded):
    algorithm, before, after = CHANGES[change]
    saved = stepped(app_of(algorithm, before, is_sharded), range(2))
    with Manager(f"{root}/run") as manager:
        manager.save(2, saved)
    wanted = weights(stepped(saved, range(2, 4)))
    app = app_of(algorithm, after, is_sharded)
    with Manager(f"{root}/run") as manager:
        assert manager.restore(app) == 2
    assert all(map(torch.equal, weights(stepped(app, range(2, 4))), wanted))


@pytest.mark.parametrize("change", CHANGES)
def test_the_checkpoint_says_which_state_there_is(tmp_path, change):
    _resumes(str(tmp_path), change, is_sharded=False)


def test_so_it_does_on_shards(tmp_path):
    run_ranks(2, _resumes, str(tmp_path), "momentum", is_sharded=True)


def test_options_that_are_kept_leave_the_state_unused(tmp_path):
    checkpoint.save(tmp_path / "c", stepped(app_of("sgd", {"momentum": 0.5}), range(2)))
    for name in ("c", "d"):
        app = app_of("sgd", {})
        app["optimizer"].keep_options("momentum")
        checkpoint.load(tmp_path / name, app, init_state=True)
        plain = app_of("sgd", {})
        plain["model"].load_state_dict(app["model"].state_dict())
        checkpoint.save(tmp_path / "d", app) if name == "c" else None
        assert all(map(torch.equal, weights(stepped(app, range(2))), weights(stepped(plain, range(2)))))


def test_a_refused_load_leaves_none_of_it(tmp_path):
    checkpoint.save(tmp_path / "c", stepped(app_of("sgd", {"momentum": 0.5}), range(2)))
    app = {**app_of("sgd", {}), "other": torch.zeros(1)}
    with pytest.raises(MismatchError, match="other: found nothing"):
        checkpoint.load(tmp_path / "c", app, init_state=True)
    assert not app["optimizer"].state_dict()["state"]


def test_state_of_another_algorithm_is_none_of_it(tmp_path):
    checkpoint.save(tmp_path / "c", stepped(app_of("adamw", {}), range(2)))
    app = app_of("sgd", {"momentum": 0.5})
    checkpoint.load(tmp_path / "c", app, init_state=True, strict=False)
    assert not app["optimizer"].state_dict()["state"]


def test_an_interrupt_behind_the_last_round_takes_no_loaded_state_away(tmp_path, monkeypatch):
    def made():
        model = torch.nn.Linear(2, 1)
        return {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters(), lr=0.1)}

    def interrupted():
        raise KeyboardInterrupt

    app, into = made(), made()
    for _ in range(2):
        app["model"](torch.ones(2)).sum().backward()
        app["optimizer"].step()
    checkpoint.save(tmp_path / "c", app)
    monkeypatch.setattr("shardopt.checkpoint.loading.load.drop_failed_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(tmp_path / "c", into, init_state=True)
    assert [state["step"] for state in into["optimizer"].state_dict()["state"].values()] == [2, 2]
