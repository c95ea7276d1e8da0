"""Nested optimizers saved by some ranks and loaded by others, onto other placements."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks
from tests.support.optimizers import nested, parameters, same

RANKS_STAY = True

PLACEMENTS = {"rows": Shard(0), "columns": Shard(-1), "replicated": Replicate()}


def on_ranks(style):
    """The nested optimizer of the contract tests, with its parameters laid out on all ranks; head.w stays plain."""
    whole = parameters()
    if style != "plain":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name in ("layer.w", "layer.b"):
            whole[name] = torch.nn.Parameter(distribute_tensor(whole[name].detach(), mesh, [PLACEMENTS[style]]))
    return nested(whole), whole


def train(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in params.values():
            gradient = torch.rand(parameter.shape, generator=generator) - 0.5
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def whole(tree):
    if isinstance(tree, dict):
        return {name: whole(value) for name, value in tree.items()}
    return tree.detach().full_tensor() if isinstance(tree, DTensor) else copy.deepcopy(tree)


def save(path, style):
    optimizer, params = on_ranks(style)
    train(optimizer, params, 3)
    checkpoint.save(path, {"model": params, "optimizer": optimizer})


def load_and_continue(path, style):
    optimizer, params = on_ranks(style)
    with torch.no_grad():
        for parameter in params.values():
            parameter.zero_()
    optimizer.init_state()
    checkpoint.load(path, {"model": params, "optimizer": optimizer})
    train(optimizer, params, 2, first=3)
    return whole(dict(params)), whole(optimizer.state_dict())


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, "rows"), (3, "columns")), ((4, "columns"), (1, "plain")), ((1, "plain"), (2, "replicated"))],
    ids=str,
)
def test_nested_optimizers_resume_with_other_ranks_and_placements(tmp_path, saved, loaded):
    optimizer, params = on_ranks("plain")
    train(optimizer, params, 5)
    wanted = whole(dict(params)), whole(optimizer.state_dict())
    path = str(tmp_path / "checkpoint")
    run_ranks(saved[0], save, path, saved[1])
    for result in run_ranks(loaded[0], load_and_continue, path, loaded[1]):
        assert same(result, wanted)


def load_with_one_rank_that_differs(path, odd):
    optimizer, params = on_ranks("rows")
    optimizer.init_state()
    if dist.get_rank() == odd:
        optimizer.param_groups[0]["momentum"] = 0.5
    before = copy.deepcopy((list(params.values()), optimizer.state_dict()))
    with pytest.raises(MismatchError) as error:
        checkpoint.load(path, {"model": params, "optimizer": optimizer})
    after = list(params.values()), optimizer.state_dict()
    assert same(whole(dict(enumerate(after[0]))), whole(dict(enumerate(before[0]))))
    assert same(whole(after[1]), whole(before[1]))
    return str(error.value)


def test_a_mismatch_on_one_rank_is_the_same_error_on_all(tmp_path):
    path = str(tmp_path / "checkpoint")
    run_ranks(2, save, path, "rows")
    first, second = run_ranks(2, load_with_one_rank_that_differs, path, 1)
    assert first == second
    assert "optimizer.param_groups.layer.w.momentum" in first
