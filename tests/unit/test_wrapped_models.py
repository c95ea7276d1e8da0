"""Models in wrappers of torch's that optimizers cannot train as they are: refused by name, with what to use."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import shardopt
from shardopt.errors import StateError
from shardopt.optim.keyed import KeyedOptimizerWrapper
from tests.fake_rank import fake_rank

REFUSED = r"FullyShardedDataParallel \(FSDP1\) is not supported(.|\n)*fully_shard"


def model():
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def fsdp1(net, original, **options):
    options.setdefault("sharding_strategy", ShardingStrategy.FULL_SHARD)
    return FullyShardedDataParallel(net, use_orig_params=original, device_id=torch.device("cpu"), **options)


MAKERS = {
    "keyed": lambda net: shardopt.keyed("adamw", net.named_parameters()),
    "a mapping": lambda net: shardopt.keyed("adamw", dict(net.named_parameters())),
    "a factory": lambda net: KeyedOptimizerWrapper(dict(net.named_parameters()), torch.optim.SGD),
    "torchrec's": lambda net: shardopt.KeyedOptimizer(
        dict(net.named_parameters()), {}, [{"params": list(net.parameters())}]
    ),
    "in backward": lambda net: shardopt.in_backward(dict(net.named_parameters()), "sgd"),
    "a group": lambda net: shardopt.keyed("sgd", {"own": nn.Parameter(torch.ones(1))}).add_param_group(
        {"params": dict(net.named_parameters())}
    ),
    "EMA": shardopt.EMA,
    "SWA": shardopt.SWA,
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("original", [True, False])
def test_fsdp1_is_refused_with_the_way_to_fully_shard(maker, original):
    with fake_rank(0, 2):
        net = fsdp1(model(), original)
        for _ in range(2):
            with pytest.raises(StateError, match=REFUSED):
                MAKERS[maker](net)
            net(torch.ones(2, 5)).sum().backward()


@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.filterwarnings("ignore:.*NO_SHARD")
def test_fsdp1_is_refused_whatever_it_shards_and_as_a_part(strategy):
    with fake_rank(0, 2):
        net = nn.Sequential(nn.Linear(2, 5), fsdp1(nn.Linear(5, 7), True, sharding_strategy=strategy))
        for maker in ("keyed", "EMA"):
            with pytest.raises(StateError, match=r"1\.(_fsdp_wrapped_module\.)?weight: found a flat piece"):
                MAKERS[maker](net)
        shardopt.keyed("adamw", net[0].named_parameters())


@pytest.mark.parametrize("algorithm", ["adamw", "rowwiseadam"])
def test_a_model_that_is_wrapped_after_its_optimizer_was_made_is_refused_in_a_step(algorithm):
    with fake_rank(0, 2):
        net = model()
        optimizer = shardopt.keyed(algorithm, net.named_parameters())
        clipped = shardopt.GradientClippingOptimizer(optimizer, shardopt.GradientClipping.NORM)
        wrapped = fsdp1(net, True)
        wrapped(torch.ones(2, 5)).sum().backward()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        for step in (optimizer.step, clipped.step):
            with pytest.raises(StateError, match=REFUSED):
                step()
        assert all(map(torch.equal, before, net.parameters()))
