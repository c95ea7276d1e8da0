"""A Manager on several ranks: what one of them finds damaged, none of them takes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from tests.harness import run_ranks

RANKS = 3


def app_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(torch.full((60, 5), float(step)), mesh, [Shard(0)], src_data_rank=None)
    weight = torch.nn.Parameter(rows)
    optimizer = shardopt.keyed("adamw", [("weight", weight)], lr=0.1)
    return {"weight": weight, "optimizer": optimizer, "step": step}


def save_three(root):
    with checkpoint.Manager(root) as manager:
        for step in (1, 2, 3):
            app = app_of(step)
            app["optimizer"].init_state()
            manager.save(step, app, metrics={"rank": dist.get_rank()})


def restore(root):
    app = app_of(0)
    with checkpoint.Manager(root, keep_last=1) as manager:
        step = manager.restore(app)
        state = app["optimizer"].state_dict()["state"]["weight"]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert app["weight"].full_tensor().unique().tolist() == [step] == [app["step"]]
        manager.save(3, app)
    return step


@pytest.mark.parametrize("writer", range(RANKS))
def test_damage_that_one_rank_meets_is_known_to_all(tmp_path, writer):
    run_ranks(RANKS, save_three, str(tmp_path))
    assert checkpoint.Manager(tmp_path).metrics(2) == {"rank": 0.0}
    (file,) = (tmp_path / "step-00000003").glob(f"*-r{writer:05d}.safetensors")
    data = bytearray(file.read_bytes())
    data[4096] ^= 1  # in the rows that this rank wrote, which on as many ranks it alone reads
    file.write_bytes(data)
    assert run_ranks(RANKS, restore, str(tmp_path)) == [2] * RANKS
    assert checkpoint.Manager(tmp_path).steps() == [2, 3]
    assert checkpoint.verify(checkpoint.Manager(tmp_path).path(3)).ok


def test_a_manifest_that_is_damaged(tmp_path):
    run_ranks(RANKS, save_three, str(tmp_path))
    (tmp_path / "step-00000003" / "manifest.json").write_bytes(b'{"format": "shardopt"')
    assert run_ranks(2, restore, str(tmp_path)) == [2] * 2
    assert checkpoint.Manager(tmp_path).steps() == [2, 3]
