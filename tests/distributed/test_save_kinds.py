"""Saves by ranks of several kinds: stages that have tensors and plain values of their own, and some in common."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.saving.save import _plans
from shardopt.errors import StateError
from shardopt.ranks import ranks_of
from tests.harness import run_ranks

RANKS_STAY = True


def app_of(stage, shared):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]
    full = torch.arange(12.0).reshape(6, 2) + 100 * stage
    app = {
        f"layers.{stage}": {
            "weight": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
            "norm": distribute_tensor(full[0], mesh, [Replicate()], src_data_rank=None),
            "step": torch.tensor(7.0),
            "lr": 0.1 * (stage + 1),
        },
        "epoch": 3,
    }
    return {**app, "shared": torch.arange(5)} if shared else app


def refused(save):
    try:
        save()
    except StateError as error:
        return [problem.key for problem in error.problems]
    return None


def save_in_stages(folder, shared):
    rank = dist.get_rank()
    app = app_of(rank // 2, shared)
    channel = ranks_of().channel
    rounds = []
    for number in range(3):
        before = channel._round
        report = checkpoint.save(f"{folder}/{number}", app)
        rounds.append(channel._round - before)
    plan = next(reversed(_plans.values())).plan
    known = sorted(plan.geometry.members)

    app["epoch"] = rank // 2  # in a plan that is kept, what stages have of plain values is merged at the commit
    values = refused(lambda: checkpoint.save(f"{folder}/values", app))
    app["epoch"] = 3
    drifted = []
    for kept in (True, False):
        if not kept:
            app["another"] = 1
            app["more"] = torch.ones(2)
        if shared and rank == 3:
            app["shared"][1] = 9
        for name in (f"layers.{rank // 2}",):
            if rank == 1:
                app[name]["step"].fill_(8)
        drifted.append(refused(lambda kept=kept: checkpoint.save(f"{folder}/drifted{kept}", app)))
        if shared:
            app["shared"][1] = 1
        app[f"layers.{rank // 2}"]["step"].fill_(7)
    ranks_of().agree("look", lambda: None)  # rank 0 has removed what failed
    left = [name for name in os.listdir(folder) if not name.isdigit()]
    return rounds, known, report.tensors, values, drifted, left


def check(tmp_path, shared):
    results = run_ranks(4, save_in_stages, str(tmp_path), shared)
    everything = [f"layers.{stage}.{name}" for stage in (0, 1) for name in ("norm", "step", "weight")]
    everything += ["shared"] * shared
    for rank, (rounds, known, tensors, values, drifted, left) in enumerate(results):
        assert rounds == [3, 2, 2]
        own = everything if rank == 0 else [key for key in everything if f".{rank // 2}." in key or key == "shared"]
        assert known == own
        assert tensors == len(everything)
        assert values == ["epoch"]
        assert drifted == [["layers.0.step", *["shared"] * shared]] * 2
        assert left == []
    for number in range(3):
        assert checkpoint.verify(tmp_path / str(number)).ok
        with checkpoint.open(tmp_path / str(number)) as reader:
            assert sorted(reader.keys()) == sorted([*everything, "epoch", "layers.0.lr", "layers.1.lr"])
            for stage in (0, 1):
                weight = torch.arange(12.0).reshape(6, 2) + 100 * stage
                assert torch.equal(reader.read(f"layers.{stage}.weight"), weight)


def test_stages_that_share_no_tensor_plan_for_themselves(tmp_path):
    check(tmp_path, shared=False)


def test_stages_that_share_a_tensor(tmp_path):
    check(tmp_path, shared=True)


def save_with_values_of_one(folder):
    """Ranks have the same tensors, and rank 1 a value that the other has not; the rounds of two saves."""
    rank, channel, rounds = dist.get_rank(), ranks_of().channel, []
    app = {"w": torch.ones(4), "epoch": 3, **({"loss": 0.5} if rank else {})}
    for number in range(2):
        before = channel._round
        checkpoint.save(f"{folder}/{number}", app)
        rounds.append(channel._round - before)
    error = refused(lambda: checkpoint.save(f"{folder}/refused", {"w": torch.ones(4), "epoch": rank}))
    ranks_of().agree("look", lambda: None)  # rank 0 has removed what failed
    return rounds, error, os.path.exists(f"{folder}/refused")


def test_values_that_only_some_ranks_have_cost_no_round(tmp_path):
    assert run_ranks(2, save_with_values_of_one, str(tmp_path)) == [([2, 2], ["epoch"], False)] * 2
    for number in range(2):
        with checkpoint.open(tmp_path / str(number)) as reader:
            assert (reader.read("epoch"), reader.read("loss")) == (3, 0.5)
