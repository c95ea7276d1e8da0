"""Tensors on meshes that were made one by one, such as a tensor parallel group in each of several replicas."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardopt
from shardopt import GradientClippingOptimizer, checkpoint
from shardopt.errors import ShardoptError, StateError
from tests.harness import run_ranks
from tests.support.fake_rank import shard

RANKS_STAY = True

VALUE = torch.arange(24.0).view(6, 4)


def own_mesh(sizes):
    """The mesh of this rank of those that cut the job into runs of so many ranks, each known to its own ranks alone."""
    begin = 0
    for size in sizes:
        ranks = [*range(begin, begin + size)]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = DeviceMesh.from_group(group, "cpu", mesh=ranks)
        begin += size
    return mine


def app_on(mesh, factor=1.0, dim=0):
    weight = torch.nn.Parameter(shard(VALUE * factor, mesh, Shard(dim)))
    optimizer = GradientClippingOptimizer(shardopt.keyed("adamw", {"weight": weight}, lr=0.5), "norm", 1.0)
    return {"model": {"weight": weight}, "optimizer": optimizer}


def step(app):
    weight = app["model"]["weight"]
    weight.grad = shard(VALUE, weight.device_mesh, *weight.placements)
    app["optimizer"].step()
    return app["optimizer"].total_norm.item()


def save_and_load(path, sizes):
    mesh = own_mesh(sizes)
    for number in range(2):
        app = app_on(mesh)
        norm = step(app)
        assert norm == pytest.approx(VALUE.norm().item())
        checkpoint.save(f"{path}/{number}", app)
        step(app)
        for dim in (0, 1):
            other = app_on(mesh, 0.0, dim)
            checkpoint.load(f"{path}/{number}", other, init_state=True)
            step(other)
            assert torch.equal(other["model"]["weight"].full_tensor(), app["model"]["weight"].full_tensor())
    drifted = app_on(mesh, 1.0 + (dist.get_rank() == dist.get_world_size() - 1))
    with pytest.raises(StateError, match=r"model\.weight: found other bytes of"):
        checkpoint.save(f"{path}/drifted", drifted)


def test_replicas_on_meshes_of_their_own(tmp_path):
    run_ranks(4, save_and_load, str(tmp_path), (2, 2))


def save_overlapping(path):
    with pytest.raises(ShardoptError) as caught:
        checkpoint.save(path, {"weight": shard(VALUE, own_mesh((3, 1)), Shard(0))})
    return str(caught.value)


def test_replicas_that_are_cut_otherwise_are_refused(tmp_path):
    said = run_ranks(4, save_overlapping, str(tmp_path / "c"))
    assert len(set(said)) == 1
    print(said[0])
    assert "weight: found boxes" in said[0]
