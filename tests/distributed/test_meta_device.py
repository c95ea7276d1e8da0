"""A model that was built on the meta device is compared with a checkpoint, and filled by a restore."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks

RANKS_STAY = True


def sharded(device):
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def app_of(model):
    return {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters(), lr=0.1), "step": 0}


def whole(app):
    parameter = app["model"][0].weight
    state = app["optimizer"].state_dict()["state"]["0.weight"]
    return [parameter.full_tensor().tolist(), state["exp_avg"].full_tensor().tolist()]


def train(root):
    torch.manual_seed(0)
    app = app_of(sharded("cpu"))
    app["model"](torch.ones(2, 9)).sum().backward()
    app["optimizer"].step()
    app["step"] = 1
    checkpoint.Manager(root).save(1, app)
    return whole(app)


def restore(root):
    model = sharded("meta")
    report = checkpoint.compare(f"{root}/step-00000001", app_of(model), init_state=True)
    assert report.fits and report.bytes_wanted > 0
    other = app_of(model) | ({} if dist.get_rank() else {"more": 1})
    only_there = checkpoint.compare(f"{root}/step-00000001", other, init_state=True)
    assert [(each.key, "on rank 0" in each.found) for each in only_there.problems] == [("more", True)]
    with pytest.raises(MismatchError, match=r"call to_empty\(device=\.\.\.\) first"):
        checkpoint.Manager(root).restore(app_of(model))
    app = app_of(model.to_empty(device="cpu"))  # replaces the parameters
    assert checkpoint.Manager(root).restore(app) == 1
    return whole(app)


def test_a_model_from_the_meta_device_is_filled_by_a_restore(tmp_path):
    saved = run_ranks(2, train, str(tmp_path / "root"))
    assert run_ranks(3, restore, str(tmp_path / "root")) == [saved[0]] * 3
