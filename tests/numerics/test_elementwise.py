"""Elementwise algorithms on shards: bit-identical to torch over the same boxes as plain parameters, and to the whole.

Every CPU option set of torch's own database, every implementation that an algorithm has, and one optimizer over plain
parameters and DTensors of several placements at once, as each rank of four sees it.
"""

from functools import cache

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import shardopt
from shardopt.algorithms import Kind, spec_of
from shardopt.errors import AlgorithmError
from shardopt.sharding.view import leaves_of
from tests.cases import ELEMENTWISE_CASES
from tests.fake_rank import fake_rank, part_of, shard

RANKS, STEPS = 4, 8
SHAPES = {
    "even": ((8, 6), Shard(0)),
    "uneven": ((9, 5), Shard(0)),
    "empty": ((2, 3), Shard(0)),
    "columns": ((3, 10), Shard(1)),
    "whole": ((5, 3), Replicate()),
    "scalar": ((), Replicate()),
    "plain": ((7, 2), None),
}
ABSENT = {3: {"even", "plain"}, 5: SHAPES.keys() - {"uneven"}}  # step: parameters without a gradient


@cache
def values(dtype=torch.float32):
    """Parameters, then gradients of every step."""
    generator = torch.Generator().manual_seed(7)
    return [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, _) in SHAPES.items()}
        for _ in range(STEPS + 1)
    ]


def sharded_or_plain(mesh, full, name):
    placement = SHAPES[name][1]
    return full.clone() if placement is None else shard(full, mesh, placement)


def run(make, parameters, gradient_of, steps=range(STEPS)):
    """Steps an optimizer over parameters; a name in `ABSENT` has no gradient at that step."""
    for step in steps:
        for name, parameter in parameters.items():
            absent = name.split("@")[0] in ABSENT.get(step, ())
            parameter.grad = None if absent else gradient_of(step, name)
        make.step()


def torch_run(name, options, tensors, gradient_of):
    parameters = {key: torch.nn.Parameter(tensor) for key, tensor in tensors.items()}
    optimizer = getattr(torch.optim, name)(parameters.values(), **options)
    run(optimizer, parameters, gradient_of)
    return parameters, {key: dict(optimizer.state[parameter]) for key, parameter in parameters.items()}


def same(found, wanted):
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE_CASES)
def test_step_on_shards_is_torchs_step(name, options):
    start, *gradients = values()
    try:
        copies = {key: full.clone() for key, full in start.items()}
        whole, whole_state = torch_run(name, options, copies, lambda step, key: gradients[step][key].clone())
    except (ValueError, RuntimeError) as refusal:
        with pytest.raises(type(refusal)):
            shardopt.keyed(name, {"w": torch.nn.Parameter(torch.zeros(2))}, **options)
        return
    for rank in range(RANKS):
        with fake_rank(rank, RANKS) as mesh:
            ours = {key: torch.nn.Parameter(sharded_or_plain(mesh, full, key)) for key, full in start.items()}
            optimizer = shardopt.keyed(name, ours, **options)
            run(optimizer, ours, lambda step, key, mesh=mesh: sharded_or_plain(mesh, gradients[step][key], key))

            boxes, box_state = torch_run(
                name,
                options,
                {key: leaves_of(sharded_or_plain(mesh, full, key))[0] for key, full in start.items()},
                lambda step, key, mesh=mesh: leaves_of(sharded_or_plain(mesh, gradients[step][key], key))[0],
            )
            for key, parameter in ours.items():
                (leaf,) = leaves_of(parameter)
                assert same(leaf.detach(), boxes[key].detach()), (rank, key)
                state = optimizer.state[parameter]
                assert list(state) == list(box_state[key])
                for entry, value in state.items():
                    assert same(leaves_of(value)[0], box_state[key][entry]), (rank, key, entry)
                    if lies_like_parameter(name, entry, key):
                        assert (value.shape, value.placements) == (parameter.shape, parameter.placements)
                    else:
                        assert type(value) is torch.Tensor
                    compare(options, value, whole_state[key][entry])
                compare(options, parameter, whole[key].detach())


def lies_like_parameter(name, entry, key):
    kinds = {known.name: known.kind for known in spec_of(name).state}
    return kinds[entry] is Kind.PARAMETER and key != "plain"


def compare(options, ours, whole):
    """Against the run without shards: exact, but for fused kernels, whose vectors end where a shard ends."""
    pieces = part_of(whole, ours) if ours.shape == whole.shape else [whole]
    for leaf, wanted in zip(leaves_of(ours), pieces, strict=False):
        if options.get("fused"):
            atol = 1e-6 * whole.abs().max().item()
            torch.testing.assert_close(leaf.detach(), wanted, rtol=0, atol=atol)
        else:
            assert torch.equal(leaf.detach(), wanted)


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_what_is_not_elementwise_is_refused_on_shards_and_let_through_on_plain(name):
    shardopt.keyed(name, {"w": torch.nn.Parameter(torch.zeros(4, 4))})
    with fake_rank(0, 2) as mesh:
        sharded = {"w": torch.nn.Parameter(shard(torch.zeros(4, 4), mesh, Shard(0)))}
        with pytest.raises(AlgorithmError, match="w: found a sharded parameter under " + name) as caught:
            shardopt.keyed(name, sharded)
    assert spec_of(name).why_not in str(caught.value)
