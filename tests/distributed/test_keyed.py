"""Keyed optimizers on real ranks: what autograd and `fully_shard` hand them, and gradients that must be moved."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardopt
from tests.harness import run_ranks

RANKS_STAY = True

STEPS = 8
GROUPS = [{"match": "bias", "weight_decay": 0.0}]


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def train(net, algorithm, ranks=1, rank=0, **options):
    """Eight steps on a global batch of twelve; mean loss, so that averaged gradients are those of one process."""
    optimizer = shardopt.keyed(algorithm, net.named_parameters(), groups=GROUPS, lr=0.05, **options)
    optimizer.init_state()
    for step in range(STEPS):
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(batch.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return {
        **{name: whole(parameter) for name, parameter in net.named_parameters()},
        **{f"{name}.{entry}": whole(value) for name, own in state.items() for entry, value in own.items()},
    }


def train_fully_sharded(algorithm, options):
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train(net, algorithm, dist.get_world_size(), dist.get_rank(), **options)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("adamw", {"fused": True}), ("sgd", {"momentum": 0.9, "dampening": 0.5, "foreach": True}), ("radam", {})],
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_fully_sharded_model_trains_as_one_process_does(algorithm, options, ranks):
    alone = train(model(), algorithm, **options)
    for result in run_ranks(ranks, train_fully_sharded, algorithm, options):
        assert result.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(
                result[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def step_with_a_gradient_placed(placement):
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))
    optimizer = shardopt.keyed("sgd", {"w": weight}, lr=1.0)
    weight.grad = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [placement])
    optimizer.step()
    return whole(weight)


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_a_gradient_with_another_placement_is_moved_not_misread(placement):
    for result in run_ranks(2, step_with_a_gradient_placed, placement):
        assert torch.equal(result, 1 - torch.arange(6.0).view(3, 2))


def train_groups_in_order(algorithms, turned):
    """Groups by layer, which rank 1 gives in the opposite order, if `turned`."""
    torch.manual_seed(5)
    sizes = (8, 16, 16, 16, 8)
    net = torch.nn.Sequential(*(torch.nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = [*net.named_parameters()]
    groups = [
        {"params": weights[2 * place :][:2], "lr": 0.01 * (place + 1), "algorithm": algorithm}
        for place, algorithm in enumerate(algorithms)
    ]
    optimizer = shardopt.keyed(algorithms[0], groups[::-1] if turned and dist.get_rank() == 1 else groups)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return {name: whole(parameter) for name, parameter in weights}


def train_in_both_orders(pairs):
    return [[train_groups_in_order(algorithms, turned) for turned in (False, True)] for algorithms in pairs]


def test_ranks_may_give_groups_in_different_orders():
    pairs = [("soap", "soap"), ("shampoo", "shampoo"), ("lamb", "lars"), ("muon", "lamb")]
    first, second = run_ranks(2, train_in_both_orders, pairs)
    for algorithms, (wanted, turned), (_, others) in zip(pairs, first, second, strict=True):
        for name, value in wanted.items():
            assert torch.equal(turned[name], value) and torch.equal(others[name], value), (algorithms, name)
