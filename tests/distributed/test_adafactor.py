"""Adafactor on real ranks: every placement against torch on whole tensors, resumed, counted and measured."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import shardopt
from shardopt import checkpoint
from shardopt.algorithms import communicating
from shardopt.errors import GradientError
from shardopt.sharding.view import is_held, local_tensors, view_of
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.cases import option_sets
from tests.support.fake_rank import shard
from tests.support.layouts import (
    HALF,
    SHAPES,
    give_gradient,
    meshes,
    place,
    table,
    trained,
    values,
    worst_difference,
)

RANKS_STAY = True

STEPS, HALF_WAY = 5, 2
ABSENT = {1: {"even", "table", "plain", "table_columns"}, 3: SHAPES.keys() - {"uneven"}}
TOLERANCE = 1e-5
OPTIONS = dict(option_sets("Adafactor"))
GROUPS = [{"match": "^(table|cube)", "weight_decay": 0.1}, {"match": "^(vector|grid)", "lr": 0.3, "d": 1.5}]


def gradients(step, dtype=torch.float32):
    return {
        name: None if name in ABSENT.get(step, ()) else gradient
        for name, gradient in values(step + 1, dtype=dtype).items()
    }


def sharded_parameters(dtype=torch.float32, names=SHAPES):
    every = values(0, dtype=dtype)
    square = meshes()
    return {name: trained(place(every[name], name, *square)) for name in names}, square


def train(optimizer, params, square, steps, dtype=torch.float32):
    for step in steps:
        for name, gradient in gradients(step, dtype).items():
            give_gradient(params[name], None if gradient is None else place(gradient, name, *square))
        optimizer.step()


def train_torchs(steps=STEPS, dtype=torch.float32, **options):
    params = {name: torch.nn.Parameter(full) for name, full in values(0, dtype=dtype).items()}
    optimizer = torch.optim.Adafactor(params.values(), **options)
    for step in range(steps):
        for name, gradient in gradients(step, dtype).items():
            params[name].grad = gradient
        optimizer.step()
    return {name: {"": p.detach(), **optimizer.state[p]} for name, p in params.items()}


def compare(optimizer, params, wanted):
    """The largest difference of each parameter, and of each piece of its state, from the whole run's."""
    worst = {}
    for name, parameter in params.items():
        state = optimizer.state_dict()["state"].get(name, {})  # none where this rank has no part of it
        assert ["", *state] == list(wanted[name]) or not (state or is_held(parameter))
        for entry, full in wanted[name].items():
            if entry and not state:
                continue
            actual = state[entry] if entry else parameter
            view = view_of(actual)
            assert (view.shape, view.dtype) == (tuple(full.shape), full.dtype), (name, entry)
            worst[name, entry] = worst_difference(full, actual)
    return worst


def train_sharded(options, dtype=torch.float32):
    params, square = sharded_parameters(dtype)
    optimizer = shardopt.keyed("adafactor", params, **options)
    train(optimizer, params, square, range(STEPS), dtype)
    return compare(optimizer, params, train_torchs(dtype=dtype, **options))


def worst(results):
    return max((value, key) for result in results for key, value in result.items())


@pytest.mark.parametrize(
    ("ranks", "desc"),
    [
        pytest.param(1, "default", marks=pytest.mark.exhaustive),
        pytest.param(2, "maximize", marks=pytest.mark.exhaustive),
        (3, "default"),
        pytest.param(4, "nonzero weight_decay", marks=pytest.mark.exhaustive),
    ],
)
def test_every_placement_is_torchs_step(ranks, desc):
    value, key = worst(run_ranks(ranks, train_sharded, OPTIONS[desc]))
    assert value <= TOLERANCE, key


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("desc", OPTIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_placement_and_option_is_torchs_step(ranks, desc, foreach, dtype):
    value, key = worst(run_ranks(ranks, train_sharded, OPTIONS[desc] | {"foreach": foreach}, dtype))
    assert value <= (TOLERANCE if dtype is torch.float32 else 1e-13), key


@pytest.mark.exhaustive
def test_bfloat16_is_torchs_but_for_rounding():
    """Two ranks round as one does; torch rounds its statistics too, which are kept in float32 here."""
    value, key = worst(run_ranks(2, train_sharded, {}, torch.bfloat16))
    assert value <= 0.03, key


def save_half(path):
    params, square = sharded_parameters("mixed")
    optimizer = shardopt.keyed("adafactor", params, groups=GROUPS)
    train(optimizer, params, square, range(HALF_WAY), "mixed")
    checkpoint.save(path / "half", {"model": params, "optimizer": optimizer})
    train(optimizer, params, square, range(HALF_WAY, STEPS), "mixed")
    checkpoint.save(path / "whole", {"model": params, "optimizer": optimizer})


def resume(path, to):
    """Parameters and groups in another order, in a fresh process, on any number of ranks."""
    params, square = sharded_parameters("mixed", reversed(SHAPES))
    for parameter in params.values():
        for local in local_tensors(parameter):
            local.detach().fill_(-1.0)
    optimizer = shardopt.keyed("adafactor", params, groups=GROUPS[::-1])
    optimizer.init_state()
    checkpoint.load(path / "half", {"model": params, "optimizer": optimizer})
    train(optimizer, params, square, range(HALF_WAY, STEPS), "mixed")
    checkpoint.save(path / to, {"model": params, "optimizer": optimizer})


def differences(one, other):
    """The largest difference between two checkpoints, for each tensor."""
    with checkpoint.open(one) as first, checkpoint.open(other) as second:
        assert first.keys() == second.keys()
        actual = {}
        for key in first.manifest.tensors:
            a, b = first.read(key), second.read(key)
            assert a.dtype == b.dtype
            actual[key] = ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-30)).item()
        return actual


def test_resume_is_exact_and_reshards(tmp_path):
    run_ranks(4, save_half, tmp_path)
    run_ranks(4, resume, tmp_path, "same")
    assert set(differences(tmp_path / "whole", tmp_path / "same").values()) == {0.0}
    for ranks in (1, 3):
        run_ranks(ranks, resume, tmp_path, f"on{ranks}")
        for key, difference in differences(tmp_path / "whole", tmp_path / f"on{ranks}").items():
            assert difference <= (
                0.02 if key.split(".")[-1 if key.startswith("model") else 2] in HALF else TOLERANCE
            ), key
    with checkpoint.open(tmp_path / "whole") as reader:
        for name, shape in SHAPES.items():
            entries = (
                {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
                if len(shape) > 1
                else {"variance": shape}
            )
            for entry, wanted in entries.items():
                info = reader.info(f"optimizer.state.{name}.{entry}")
                assert (info.shape, info.dtype) == (wanted, torch.bfloat16 if name in HALF else torch.float32)


def step_once(count_of_parameters):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = {
        str(i): torch.nn.Parameter(shard(torch.ones(6, 4), mesh, Shard(i % 2))) for i in range(count_of_parameters)
    }
    optimizer = shardopt.keyed("adafactor", params)
    for parameter in params.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_step_has_two_collectives_however_many_parameters():
    for outcome in run_ranks_outcomes(2, step_once, 20, trace=["torch.distributed:all_reduce"]):
        assert outcome.ok, outcome
        assert len(outcome.calls) == 2


def state_bytes():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = {
        "rows": torch.nn.Parameter(shard(torch.ones(64, 8), mesh, Shard(0))),
        "columns": torch.nn.Parameter(shard(torch.ones(8, 64), mesh, Shard(1))),
        "vector": torch.nn.Parameter(shard(torch.ones(256), mesh, Shard(0))),
    }
    optimizer = shardopt.keyed("adafactor", params)
    optimizer.init_state()
    return {
        (name, entry): sum(local.nbytes for local in local_tensors(value))
        for name, owned in optimizer.state_dict()["state"].items()
        for entry, value in owned.items()
    }


def test_what_lies_along_the_cut_dimension_is_held_once():
    (alone,), together = run_ranks(1, state_bytes), run_ranks(4, state_bytes)
    for result in together:
        for key in (("rows", "row_var"), ("columns", "col_var"), ("vector", "variance")):
            assert result[key] == alone[key] / 4
        for key in (("rows", "col_var"), ("columns", "row_var")):
            assert result[key] == alone[key]  # as every rank needs all of it


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))


def train_model(fully_sharded):
    """Steps on a global batch of twelve; mean loss, so that averaged gradients are those of one process."""
    net, ranks, rank = model(), 1, 0
    if fully_sharded:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = shardopt.keyed("adafactor", net.named_parameters(), lr=0.05, weight_decay=0.01)
    for step in range(STEPS):
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(batch.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
    return {name: p.full_tensor().detach() if fully_sharded else p.detach() for name, p in net.named_parameters()}


def test_a_fully_sharded_model_trains_as_one_process_does():
    alone = train_model(False)
    for result in run_ranks(4, train_model, True):
        for name, value in alone.items():
            torch.testing.assert_close(result[name], value, rtol=2e-5, atol=2e-6)


def step_where_a_gradient_is_on_one_rank_only():
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(shard(torch.ones(4, 3), mesh, Shard(0)))
    optimizer = shardopt.keyed("adafactor", {"w": weight})
    if dist.get_rank() == 0:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(GradientError, match="found one on 1 of its ranks, none on 1"):
        optimizer.step()
    assert not optimizer.state[weight] and (local_tensors(weight)[0] == 1).all()


def test_a_gradient_on_some_ranks_only_is_told_by_all():
    run_ranks(2, step_where_a_gradient_is_on_one_rank_only)


def step_with_a_gradient_that_one_rank_refuses(late):
    """`late`: as on an accelerator, where to look at what ranks have told each other would be to wait for it."""
    mesh = init_device_mesh("cpu", (2,))
    params = {name: torch.nn.Parameter(shard(torch.ones(4, 6), mesh, Shard(0))) for name in ("a", "b")}
    optimizer = shardopt.keyed("adafactor", params)
    reported = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if late:
            monkeypatch.setattr(communicating, "is_on_host", lambda numbers: False)
        for step in range(4):
            for parameter in params.values():
                parameter.grad = shard(torch.ones(4, 6), mesh, Shard(0))
            if step == 1 and dist.get_rank() == 1:
                params["a"].grad = torch.ones(4, 6)  # no DTensor, as the parameter is one
            before = {name: local_tensors(parameter)[0].clone() for name, parameter in params.items()}
            try:
                optimizer.step()
                reported.append("")
            except GradientError as error:
                reported.append(str(error))
                assert [problem.key for problem in error.problems] == ["a.grad"]
                if not late or step == 3:
                    assert all(torch.equal(local_tensors(params[name])[0], before[name]) for name in params)
    return reported


def test_a_gradient_that_one_rank_refuses_is_told_by_all():
    other, own = run_ranks(2, step_with_a_gradient_that_one_rank_refuses, False)
    assert [bool(each) for each in other] == [bool(each) for each in own] == [False, True, False, False]
    assert "found one that a rank refuses" in other[1] and "found Tensor of shape" in own[1]
    other, own = run_ranks(2, step_with_a_gradient_that_one_rank_refuses, True)
    assert [bool(each) for each in other] == [False, False, False, True]
    assert "found Tensor of shape" in own[1]
    assert "found one that a rank refuses" in other[3] and other[3] == own[3]


def step_a_table_with_gradients_on_one_rank_only():
    full, gradient = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(3))
    weight = trained(table(full, 1))
    optimizer = shardopt.keyed("adafactor", {"w": weight})
    if dist.get_rank() == 0:
        give_gradient(weight, table(gradient, 1))
    else:
        table(gradient, 1)  # is collective
    optimizer.step()
    shown = torch.nn.Parameter(full.clone())
    shown.grad = gradient.clone()
    shown.grad[3:] = 0  # rank 0 has the first three rows
    torchs = torch.optim.Adafactor([shown])
    torchs.step()
    return compare(optimizer, {"w": weight}, {"w": {"": shown.detach(), **torchs.state[shown]}})


def test_where_some_shards_of_a_table_have_a_gradient_the_others_have_zeros():
    value, key = worst(run_ranks(3, step_a_table_with_gradients_on_one_rank_only))
    assert value <= TOLERANCE, key
