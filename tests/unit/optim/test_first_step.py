"""A first step in which no parameter has a gradient: most likely the optimizer was made before the sharding."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import shardopt
from shardopt.algorithms import algorithms
from tests.support.fake_rank import fake_rank, shard, sharded_tensor

TOLD = "has a gradient in its first step"


def told(caplog):
    actual = [record for record in caplog.records if TOLD in record.getMessage()]
    caplog.clear()
    return [(record.name, record.levelno) for record in actual]


ONCE = [("shardopt", logging.WARNING)]


@pytest.mark.parametrize("name", [spec.name for spec in algorithms() if not spec.needs_closure])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_without_any_gradient_is_told_once(caplog, name, wrapped):
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = shardopt.keyed(name, {"layer.w": weight})
    if wrapped:
        optimizer = shardopt.optim.OptimizerWrapper(optimizer)
    optimizer.step()
    assert "layer.w" in caplog.text and "fully_shard" in caplog.text
    assert told(caplog) == ONCE
    optimizer.step()
    copy.deepcopy(optimizer).step()
    assert told(caplog) == []


def test_what_has_a_gradient_anywhere_is_not_told_of(caplog):
    with fake_rank(0, 2) as mesh:
        full = torch.ones(4, 2)
        placed = nn.Parameter(shard(full, mesh, Shard(0)))
        table = sharded_tensor(full, [(3, 0), (1, 1)], 0, requires_grad=True)
        elsewhere = sharded_tensor(full, [(4, 1)], 0, requires_grad=True)
        frozen = nn.Parameter(full.clone(), requires_grad=False)
        (local,) = (shard_.tensor for shard_ in table.local_shards())
        local.grad = torch.ones_like(local)
        placed.grad = torch.ones_like(placed.detach())
        for params in (
            {"a": nn.Parameter(full), "table": table},
            {"a": nn.Parameter(full), "placed": placed},
            {"elsewhere": elsewhere, "frozen": frozen},  # of which there need be none
        ):
            shardopt.keyed("adamw", params).step()
            assert told(caplog) == []
        shardopt.keyed("adamw", {"elsewhere": elsewhere, "frozen": frozen, "a": nn.Parameter(full)}).step()
        assert told(caplog) == ONCE


def test_gradients_of_a_closure_count(caplog):
    for name in ("lbfgs", "sgd"):
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = shardopt.keyed(name, {"w": weight})

        def closure(optimizer=optimizer, weight=weight):
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert told(caplog) == []


def test_an_optimizer_that_was_made_before_fully_shard(caplog):
    with fake_rank(0, 2) as mesh:
        net = nn.Linear(4, 4)
        optimizer = shardopt.keyed("adamw", net.named_parameters())
        in_backward = shardopt.in_backward(nn.Linear(2, 2), "adamw")
        fully_shard(net, mesh=mesh)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert told(caplog) == ONCE
        in_backward.step()
        in_backward.step()
        assert told(caplog) == ONCE


def test_updates_in_backward_count(caplog):
    for accumulate in (False, True):
        net = nn.Linear(2, 2)
        optimizer = shardopt.in_backward(net, "sgd", lr=0.1)
        if accumulate:
            with optimizer.accumulate():
                net(torch.ones(2)).sum().backward()
        else:
            net(torch.ones(2)).sum().backward()
        optimizer.step()
    optimizer.stop()
    optimizer.step()
    assert told(caplog) == []
