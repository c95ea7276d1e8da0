"""What ranks compare of their plans: those that have the same of an object load the same of it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import StateError
from tests.harness import run_ranks

IGNORE = Strictness(missing="ignore", unexpected="ignore")


def app_of(model, steps=0):
    """Returns an app of SGD, which makes its momentum in the next step if a load has left it out."""
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1, momentum=0.9)
    ema = shardopt.EMA(model, 0.5)
    ema.attach(optimizer)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "ema": ema}


def sharded(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def load_otherwise_on_rank_0(path, key, options):
    checkpoint.save(path, app_of(sharded(0), steps=2))
    app = app_of(sharded(1))
    before = app["model"].weight.to_local().clone()
    with pytest.raises(StateError) as raised:
        checkpoint.load(path, app, init_state=True, **(options if dist.get_rank() == 0 else {}))
    assert torch.equal(app["model"].weight.to_local(), before)
    assert not app["optimizer"].state_dict()["state"]
    return raised.value.code, [problem.key for problem in raised.value.problems] == [key], str(raised.value)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("optimizer", {"select": r"^(model|ema)\."}),
        ("ema", {"select": "^(model|optimizer)"}),
        ("model", {"select": r"^(optimizer|ema|model\.bias)"}),
        ("optimizer", {"skip": r"^optimizer\.", "strict": IGNORE}),
    ],
)
def test_ranks_that_load_different_parts_of_sharded_objects_are_refused(tmp_path, key, options):
    for code, is_key, text in run_ranks(2, load_otherwise_on_rank_0, str(tmp_path / "c"), key, options):
        assert code == "ranks-differ"
        assert is_key, text
        assert "rank 1 would load other keys of it than rank 0" in text


def stage(seed):
    torch.manual_seed(seed)
    layers = {str(number): torch.nn.Linear(4, 4) for number in range(dist.get_world_size())}
    mine = str(dist.get_rank())
    return torch.nn.ModuleDict({mine: layers[mine]})


def load_stages(path):
    """Of another part of the model another rank may load what it wants."""
    saved = app_of(stage(0), steps=2)
    checkpoint.save(path, saved)
    app = app_of(stage(1))
    checkpoint.load(path, app, init_state=True, select="^model" if dist.get_rank() == 0 else None)
    parameter = next(saved["model"].parameters())
    assert torch.equal(next(app["model"].parameters()), parameter)
    return len(app["optimizer"].state_dict()["state"])


def test_stages_may_load_different_parts(tmp_path):
    assert run_ranks(2, load_stages, str(tmp_path / "c")) == [0, 2]
