"""Making an optimizer: models in wrappers of torch's, names, options; what cannot be is refused by name."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt.errors import AlgorithmError, StateError
from shardopt.optim import CombinedOptimizer
from shardopt.optim.keyed import KeyedOptimizerWrapper
from tests.support.fake_rank import fake_rank

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


# --- names under DistributedDataParallel -----------------------------------------------------------------------------


def under_ddp(net):
    return DistributedDataParallel(net)


def compiled(net):
    return torch.compile(net, backend="eager")


def names_of(optimizer):
    return list(optimizer.params), [group["params"] for group in optimizer.state_dict()["param_groups"]]


WRAPPINGS = {
    "plain": lambda net: net,
    "ddp": under_ddp,
    "compiled": compiled,
    "ddp, compiled": lambda net: compiled(under_ddp(net)),
    "compiled, ddp": lambda net: under_ddp(compiled(net)),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_run_under_ddp_resumes_without_and_the_reverse(tmp_path, wrapping):
    with fake_rank(0, 1):
        torch.manual_seed(0)
        made = [
            shardopt.keyed("adamw", WRAPPINGS[kind](model()).named_parameters(), groups=[{"match": "^0", "lr": 0.5}])
            for kind in (wrapping, "plain", wrapping)
        ]
        one, plain, again = made
        assert (
            names_of(one)
            == names_of(plain)
            == (["0.weight", "0.bias", "1.weight", "1.bias"], [["0.bias", "0.weight"], ["1.bias", "1.weight"]])
        )
        for optimizer in made:
            optimizer.init_state()
        one.state[one.params["1.weight"]]["step"].fill_(3)
        plain.load_state_dict(one.state_dict())
        again.load_state_dict(plain.state_dict())
        assert again.state_dict()["state"]["1.weight"]["step"] == 3
        averages = shardopt.EMA(WRAPPINGS[wrapping](nn.BatchNorm1d(2)), use_buffers=True)
        names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked", "__averaging"}
        averages.update()
        assert averages.state_dict()["state"].keys() == names


def test_a_module_of_that_name_is_kept_where_not_all_names_have_it():
    def two(*names):
        return {name: nn.Parameter(torch.ones(2)) for name in names}

    kept = shardopt.keyed("sgd", two("module.a", "head.b"), groups=[{"match": "module", "lr": 0.5}])
    assert list(kept.params) == ["module.a", "head.b"]
    kept.add_param_group({"params": two("module.c")})
    assert "module.c" in kept.params
    dropped = shardopt.keyed("sgd", two("module.module.a", "module.b"), groups=[{"match": "^module", "lr": 0.5}])
    assert list(dropped.params) == ["module.a", "b"]
    for optimizer in (dropped, copy.deepcopy(dropped)):
        optimizer.add_param_group({"params": two("module.c", "d")})
        assert list(optimizer.params) == ["module.a", "b", "c", "d"]
    assert list(shardopt.keyed("sgd", two("module.module.a", "module.module.b")).params) == ["a", "b"]
    both = shardopt.keyed("sgd", two("module.a", "module.b"), groups=[{"match": "b", "algorithm": "adamw"}])
    assert sorted(both.params) == ["a", "b"]
    assert list(KeyedOptimizerWrapper(two("module.a"), torch.optim.SGD).params) == ["a"]
    with pytest.raises(StateError, match="a: found a parameter that the optimizer has already"):
        shardopt.keyed("sgd", two("module.a")).add_param_group({"params": two("module.a")})
    combined = shardopt.optim.CombinedOptimizer([shardopt.keyed("sgd", two("module.a")), ("k", kept)])
    combined.add_param_group({"params": two("module.e")})
    assert "e" in combined.params


# --- options ---------------------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "text": ("adamw", {"lr": "1e-3"}, "defaults.lr: found '1e-3' \\(a str\\); required a number"),
    "none": ("adamw", {"lr": None}, "defaults.lr: found None"),
    "a number for two": ("adamw", {"betas": 0.9}, "defaults.betas: found 0.9 .*required 2 numbers"),
    "one of two": ("adamw", {"betas": (0.9,)}, "defaults.betas: found \\(0.9,\\)"),
    "texts": ("adamw", {"betas": ("0.9", 0.99)}, "defaults.betas"),
    "a text for a flag": ("sgd", {"nesterov": "yes"}, "defaults.nesterov: found 'yes' .*required True or False"),
    "momentum": ("sgd", {"momentum": "0.9"}, "defaults.momentum"),
    "a list": ("sgd", {"weight_decay": [0.1]}, "defaults.weight_decay: found \\[0.1\\]"),
    "ours": ("muon", {"momentum": "0.9"}, "defaults.momentum"),
    "in a group": ("adamw", {"groups": [{"match": "w", "lr": "1e-3"}]}, "groups\\[0\\].lr"),
    "of another algorithm": ("adamw", {"groups": [{"match": "w", "algorithm": "sgd", "lr": "1"}]}, "groups\\[0\\].lr"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_are_no_numbers_are_refused_by_name(case):
    algorithm, options, message = BAD_OPTIONS[case]
    params = {"w": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(2, 2))}
    with pytest.raises(AlgorithmError, match=message):
        shardopt.keyed(algorithm, params, **options)
    if case not in ("ours", "of another algorithm"):
        with pytest.raises(AlgorithmError, match=message):
            shardopt.in_backward(params, algorithm, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": torch.tensor(0.1), "foreach": False},
        {"lr": np.float32(0.1), "weight_decay": np.float64(0.1)},
        {"betas": [0.9, 0.99], "eps": 1},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "lr": torch.tensor(0.1), "foreach": False},
        {"amsgrad": 1, "fused": None, "foreach": None, "weight_decay": False},
    ],
    ids=str,
)
def test_options_that_torch_takes_are_taken(options):
    optimizer = shardopt.keyed("adamw", {"w": nn.Parameter(torch.ones(2))}, **options)
    for name, value in options.items():
        assert optimizer.param_groups[0][name] == (tuple(value) if name == "betas" else value)


def test_options_that_are_pairs_for_one_algorithm_alone_are_taken():
    optimizer = shardopt.keyed("adafactor", {"w": nn.Parameter(torch.ones(2))}, eps=(1e-30, 1e-3))
    assert optimizer.param_groups[0]["eps"] == (1e-30, 1e-3)


def test_a_group_that_is_added_is_held_against_the_algorithms_options():
    optimizer = shardopt.optim.OptimizerWrapper(shardopt.keyed("adamw", {"w": nn.Parameter(torch.ones(2))}))

    def added(**options):
        optimizer.add_param_group({"params": {f"p{len(optimizer.params)}": nn.Parameter(torch.ones(2))}, **options})

    for options, message in (
        ({"wieght_decay": 0.1}, "param_group.wieght_decay: found an unknown option; required one of .*weight_decay"),
        ({"lr": "1e-3"}, "param_group.lr: found '1e-3'"),
        ({"initial_lr": 0.1}, "param_group.initial_lr: found an unknown option"),
    ):
        with pytest.raises(AlgorithmError, match=message):
            added(**options)
        assert len(optimizer.param_groups) == len(optimizer.params) == 1
    added(lr=0.5, weight_decay=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    added(initial_lr=0.1)  # which the other groups have by now


@pytest.mark.parametrize("groups", [{"match": "w", "lr": 0.1}, ["w"], "w", [("match", "w")]], ids=str)
def test_groups_that_are_no_list_of_dicts_are_refused(groups):
    with pytest.raises(StateError, match=r"groups: found .*required a list of dicts"):
        shardopt.keyed("adamw", {"w": nn.Parameter(torch.ones(2))}, groups=groups)


def test_averages_are_of_modules():
    for made in (model().parameters(), dict(model().named_parameters()), None):
        for kind in (shardopt.EMA, shardopt.SWA):
            with pytest.raises(StateError, match=r"model: found a .*required a module"):
                kind(made)
    with pytest.raises(StateError, match=r"decay: found '0\.9'"):
        shardopt.EMA(model(), "0.9")


@pytest.mark.parametrize("masters", [None, torch.float32])
def test_a_rank_may_load_alone_state_of_which_no_parameters_are_made(masters):
    with fake_rank(0, 2):
        net = fully_shard(model().to(torch.bfloat16), mesh=init_device_mesh("cpu", (2,)))
        plain = shardopt.keyed("adamw", {"own": nn.Parameter(torch.ones(1))})
        optimizer = CombinedOptimizer(
            [("plain", plain), ("net", shardopt.keyed("adamw", net.named_parameters(), master_dtype=masters))]
        )
        optimizer.init_state()
        with torch.no_grad():
            net(torch.ones(2, 5, dtype=torch.bfloat16))
        assert not isinstance(net[0].weight, DTensor)
        optimizer.load_state_dict(optimizer.state_dict())
        assert isinstance(net[0].weight, DTensor) == (masters is not None)  # where the next forward gathers again
