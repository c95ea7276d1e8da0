"""Loss scaling in one process: as torch's does it where torch's can, and an error where it cannot."""

import copy
import math
import warnings

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import shardopt
from shardopt import GradientClipping, GradientClippingOptimizer, GradScaler
from shardopt.errors import GradientError
from shardopt.optim import CombinedOptimizer
from shardopt.ranks import Ranks
from tests.support.fake_rank import fake_rank, shard, sharded_tensor

OPTIONS = {"device": "cpu", "init_scale": 8.0, "growth_interval": 2}


def model():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))


def train(scaler, build):
    """Eight steps, of which the third and the fourth have a gradient that overflows."""
    net = model()
    optimizer = build(net)
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        loss = net(torch.full((2, 4), 1.0 + step)).square().mean()
        scaler.scale(loss).backward()
        if step in (2, 3):
            net[0].weight.grad[0, 0] = math.inf if step == 2 else math.nan
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [param.detach().clone() for param in net.parameters()]


def keyed(net):
    return shardopt.keyed("adamw", net.named_parameters(), lr=0.1, fused=True)


def of_torch(net):
    return torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=1e-2)


def in_parts(net):
    return CombinedOptimizer([(str(i), shardopt.keyed("adamw", net[i].named_parameters(), lr=0.1)) for i in range(2)])


@pytest.mark.parametrize("build", [keyed, of_torch, in_parts])
def test_scaling_does_what_torch_does(build):
    scales, params = train(GradScaler(**OPTIONS), build)
    expected_scales, expected = train(torch.amp.GradScaler(**OPTIONS), of_torch)
    assert scales == expected_scales == [8.0, 16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 16.0]
    for param, own in zip(params, expected, strict=True):
        torch.testing.assert_close(param, own)


def test_torchs_scaler_takes_keyed_optimizers():
    scales, params = train(torch.amp.GradScaler(**OPTIONS), in_parts)
    expected_scales, expected = train(torch.amp.GradScaler(**OPTIONS), of_torch)
    assert scales == expected_scales
    for param, own in zip(params, expected, strict=True):
        torch.testing.assert_close(param, own)


def test_a_disabled_scaler_is_not_there():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = shardopt.keyed("sgd", {"w": weight}, lr=1.0), GradScaler("cpu", enabled=False)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert weight.tolist() == [0.0, 0.0]


def test_clipping_sees_unscaled_gradients():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = GradientClippingOptimizer(shardopt.keyed("sgd", {"w": weight}, lr=1.0), GradientClipping.NORM, 1.0)
    scaler = GradScaler(**OPTIONS)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    assert weight.grad.tolist() == [24.0, 32.0]
    scaler.step(optimizer)
    assert optimizer.total_norm.item() == 5.0
    torch.testing.assert_close(weight.detach(), torch.tensor([0.4, 0.2]))


def test_unscaling_twice_is_an_error_as_torchs():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = shardopt.keyed("sgd", {"w": weight}), GradScaler(**OPTIONS)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


SCALERS = {"ours": GradScaler, "torch's": torch.amp.GradScaler}


def nested():
    """Two weights in two optimizers of their own, combined, and wrapped; each layer by name."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    made = {}

    def factory(tensors):
        made["torch's"] = torch.optim.SGD(tensors, lr=1.0)
        return made["torch's"]

    made["first"] = shardopt.optim.KeyedOptimizerWrapper({"w": weights[0]}, factory)
    made["second"] = shardopt.keyed("sgd", {"w": weights[1]}, lr=1.0)
    made["clipped"] = GradientClippingOptimizer(made["first"], GradientClipping.NONE)
    made["both"] = CombinedOptimizer([("a", made["clipped"]), ("b", made["second"])])
    made["outer"] = shardopt.optim.OptimizerWrapper(made["both"])
    return weights, made


def scaled(kind, factors=(1.0, 1.0)):
    weights, made = nested()
    scaler = SCALERS[kind](**OPTIONS)
    scaler.scale(sum((weight * factor).sum() for weight, factor in zip(weights, factors, strict=True))).backward()
    return scaler, weights, made


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("unscaled", ["torch's", "first", "clipped", "both", "outer"])
@pytest.mark.parametrize("stepped", ["first", "clipped", "both", "outer"])
def test_what_wraps_shares_what_was_unscaled_with_what_it_wraps(kind, unscaled, stepped):
    scaler, weights, made = scaled(kind)
    scaler.unscale_(made[unscaled])
    assert weights[0].grad.tolist() == [1.0, 1.0]
    scaler.step(made[stepped])
    parts = ("both", "outer")
    assert weights[0].tolist() == [0.0, 0.0]
    assert weights[1].tolist() == ([0.0, 0.0] if stepped in parts else [1.0, 1.0])
    assert weights[1].grad.tolist() == ([1.0, 1.0] if stepped in parts or unscaled in parts else [8.0, 8.0])
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        scaler.step(made["outer"])
    if stepped in ("first", "clipped"):  # the other half is for whoever has it
        scaler.step(made["second"])
        assert weights[1].tolist() == [0.0, 0.0]
    scaler.update()
    assert scaler.get_scale() == 8.0
    scaler.scale(weights[0].sum()).backward()
    scaler.step(made["first"])


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize(
    "parts", [("first", "second"), ("clipped", "second"), ("torch's", "second"), ("second", "first")]
)
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_combined_optimizer_of_which_parts_were_unscaled_steps_whole_or_not_at_all(kind, parts, bad):
    scaler, weights, made = scaled(kind, [math.inf if number == bad else 1.0 for number in range(2)])
    for part in parts:
        scaler.unscale_(made[part])
    scaler.step(made["outer"])
    assert [weight.tolist() for weight in weights] == [[0.0, 0.0] if bad is None else [1.0, 1.0]] * 2
    scaler.update()
    assert scaler.get_scale() == (8.0 if bad is None else 4.0)


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize(("first", "second"), [("first", "outer"), ("outer", "first"), ("torch's", "clipped")])
def test_gradients_that_were_unscaled_through_two_optimizers_are_not_stepped_with(kind, first, second):
    scaler, weights, made = scaled(kind)
    scaler.unscale_(made[first])
    if kind == "ours" and (first, second) == ("first", "outer"):
        scaler.unscale_(made[second])  # what is left
        assert weights[0].grad.tolist() == weights[1].grad.tolist() == [1.0, 1.0]
    elif kind == "ours":
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(made[second])
    else:
        scaler.unscale_(made[second])
        for stepped in ("first", "outer"):
            with pytest.raises(GradientError, match="divided by the scale twice"):
                scaler.step(made[stepped])
        assert weights[0].tolist() == [1.0, 1.0]


def test_unscaling_what_is_left_is_one_all_reduce_and_none_if_nothing_is(monkeypatch):
    counted = []
    scaler, weights, made = scaled("ours")
    monkeypatch.setattr(Ranks, "all_reduce_sum", lambda ranks, tensor: counted.append(1) or tensor)
    scaler.unscale_(made["first"])
    scaler.step(made["outer"])
    assert len(counted) == 2
    scaler.update()
    scaler.scale(weights[0].sum() + weights[1].sum()).backward()
    scaler.step(made["outer"])
    assert len(counted) == 3


def test_sparse_gradients_are_unscaled_and_looked_through():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer, scaler = shardopt.keyed("sgd", embedding.named_parameters(), lr=1.0), GradScaler(**OPTIONS)
    before = embedding.weight.detach().clone()
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(optimizer)
    expected = before - torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0])[:, None]
    torch.testing.assert_close(embedding.weight.detach(), expected)
    scaler.update()
    scaler.scale(embedding(torch.tensor([0, 2])).sum() * math.inf).backward()
    optimizer.zero_grad()
    scaler.scale(embedding(torch.tensor([0, 2])).sum() * math.inf).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(embedding.weight.detach(), expected)


def test_fp16_gradients_are_refused_by_name():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = shardopt.keyed("sgd", {"layer.w": weight}), GradScaler(**OPTIONS)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(GradientError) as caught:
        scaler.step(optimizer)
    assert caught.value.problems[0].key == "layer.w.grad"
    with pytest.raises(GradientError) as caught:
        GradScalerWithScale().step(torch.optim.SGD([weight]))
    assert caught.value.problems[0].key == "parameter 0.grad"


def GradScalerWithScale():
    scaler = GradScaler(**OPTIONS)
    scaler.scale(torch.ones(()))
    return scaler


def test_the_constructor_is_torchs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be no CUDA, which is torch's default here too
        assert GradScaler().is_enabled() == torch.cuda.is_available()
    scaler = GradScaler("cpu", 4.0, 3.0, 0.25, 7, True)
    theirs = torch.amp.GradScaler("cpu", 4.0, 3.0, 0.25, 7, True)
    assert scaler.state_dict() == theirs.state_dict()
    other = copy.deepcopy(scaler)
    other.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert (other.get_scale(), scaler.get_scale()) == (2.0, 4.0)


def with_gradient(tensor):
    param = torch.nn.Parameter(tensor)
    param.grad = torch.ones_like(tensor)
    return param


def a_table(rank):
    table = sharded_tensor(torch.ones(4, 2), [(2, 0), (2, 1)], rank)
    for local in table.local_shards():
        local.tensor.grad = torch.ones_like(local.tensor)
    return table


def test_torchs_scaler_on_mixed_parameters_is_refused_by_an_error_that_names_ours():
    with fake_rank(0, 2) as mesh:
        rows = with_gradient(shard(torch.ones(4, 2), mesh, Shard(0)))
        copies = with_gradient(shard(torch.ones(4, 2), mesh, Replicate()))
        plain = with_gradient(torch.ones(3))
        scaler = torch.amp.GradScaler(**OPTIONS)
        scaler.scale(torch.ones(()))
        for mixed in ({"rows": rows, "plain": plain}, {"table": a_table(0)}, {"table": a_table(0), "plain": plain}):
            optimizer = GradientClippingOptimizer(shardopt.keyed("sgd", mixed, lr=1.0))
            with pytest.raises(GradientError, match=r"use shardopt\.GradScaler"):
                scaler.step(optimizer)
        # Where unscale_ is called by itself it is torch that refuses, and that says what it cannot do.
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            scaler.unscale_(shardopt.keyed("sgd", {"rows": rows, "plain": plain}))
        for alike in ({"rows": rows, "copies": copies}, {"plain": plain}):
            assert not shardopt.keyed("sgd", alike)._step_supports_amp_scaling
        rows.grad = None  # what has no gradient is not unscaled
        assert not shardopt.keyed("sgd", {"rows": rows, "plain": plain})._step_supports_amp_scaling
