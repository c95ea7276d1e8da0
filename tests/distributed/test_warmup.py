"""Warm-up on real ranks: its position and rates through a checkpoint onto another number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardopt
from shardopt import (
    GradientClipping,
    GradientClippingOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    checkpoint,
)
from shardopt.errors import MismatchError
from shardopt.optim import CombinedOptimizer
from tests.harness import run_ranks

RANKS_STAY = True

STAGES = [WarmupStage(max_iters=4, value=0.1), WarmupStage(WarmupPolicy.POLY, max_iters=12, value=2.0)]


def build(placement, stages):
    """A warm-up around clipping around two optimizers, one on shards; the second's group has twice the first's rate."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    table = torch.nn.Parameter(distribute_tensor(torch.randn(7, 5), mesh, [placement]))
    bias = torch.nn.Parameter(torch.randn(5))
    parts = [("table", shardopt.keyed("adam", {"w": table}, lr=0.1)), shardopt.keyed("sgd", {"b": bias}, lr=0.2)]
    clipped = GradientClippingOptimizer(CombinedOptimizer(parts), GradientClipping.NORM, max_gradient=0.5)
    optimizer = WarmupOptimizer(clipped, stages, lr=0.3)
    optimizer.init_state()
    return table, bias, optimizer


def train(table, bias, optimizer, first, last):
    rates = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        table.grad = distribute_tensor(torch.randn(7, 5, generator=generator), table.device_mesh, table.placements)
        bias.grad = torch.randn(5, generator=generator)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
    return rates


def whole(table, bias, optimizer):
    position = optimizer.state_dict()["state"]["__warmup"]["warmup"]
    return table.detach().full_tensor(), bias.detach(), position.tolist()


def save_at_six(path):
    table, bias, optimizer = build(Shard(0), STAGES)
    train(table, bias, optimizer, 0, 6)
    checkpoint.save(path, {"table": table, "bias": bias, "optimizer": optimizer})
    rates = train(table, bias, optimizer, 6, 14)
    return rates, whole(table, bias, optimizer)


def resume(path, placement):
    table, bias, optimizer = build(placement, STAGES)
    checkpoint.load(path, {"table": table, "bias": bias, "optimizer": optimizer})
    rates = train(table, bias, optimizer, 6, 14)
    return rates, whole(table, bias, optimizer)


@pytest.mark.parametrize(("ranks", "placement"), [(1, Shard(0)), (2, Shard(1)), (3, Replicate())])
def test_steps_resumed_on_other_ranks_are_the_uninterrupted_ones(ranks, placement, tmp_path):
    path = str(tmp_path / "saved")
    (uninterrupted, (table, bias, position)), *_ = run_ranks(2, save_at_six, path)
    for rates, (its_table, its_bias, its_position) in run_ranks(ranks, resume, path, placement):
        assert rates == uninterrupted
        assert its_position == position == [14, 2]
        # The norm of the gradients is a sum in another order.
        torch.testing.assert_close((its_table, its_bias), (table, bias), rtol=1e-6, atol=1e-7)


def refuse_on_one_rank(path):
    """Rank 1 was built with other stages; both raise the same, and nothing is changed."""
    table, bias, optimizer = build(Shard(0), STAGES if dist.get_rank() == 0 else STAGES[:1])
    before = whole(table, bias, optimizer), [group["lr"] for group in optimizer.param_groups]
    with pytest.raises(MismatchError) as raised:
        checkpoint.load(path, {"optimizer": optimizer})
    after = whole(table, bias, optimizer), [group["lr"] for group in optimizer.param_groups]
    assert str(before) == str(after)
    return str(raised.value)


def test_other_stages_on_one_rank_are_refused_on_all(tmp_path):
    path = str(tmp_path / "saved")
    run_ranks(2, save_at_six, path)
    one, other = run_ranks(2, refuse_on_one_rank, path)
    assert one == other
    assert "state.__warmup.stages" in one
