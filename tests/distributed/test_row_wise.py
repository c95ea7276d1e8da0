"""Row-wise and sparse training on real ranks: tables cut along their columns, resumed on other ranks, counted."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardopt
from shardopt import checkpoint
from shardopt.algorithms import Kind, spec_of
from shardopt.errors import GradientError
from shardopt.optim import RowWiseAdagrad, RowWiseAdam
from shardopt.sharding.view import assemble, is_held, local_tensors, view_of
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.fake_rank import shard
from tests.support.placement import give_gradient, pieces_of
from tests.support.tables import COLUMNS, ROWS, gradient, place, start

RANKS_STAY = True

STEPS = 9
EVERY = {**ROWS, **COLUMNS}
TOLERANCE = 1e-6
CASES = {
    "RowWiseAdagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "RowWiseAdam": {"lr": 0.1, "betas": (0.7, 0.9), "maximize": True},
    "SparseAdam": {"lr": 0.1, "betas": (0.7, 0.9)},
    "SGD": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
}
DENSE = {
    "RowWiseAdagrad": {"lr": 0.1, "weight_decay": 0.1},
    "RowWiseAdam": {"lr": 0.1, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.1},
}
OURS = {"RowWiseAdagrad": RowWiseAdagrad, "RowWiseAdam": RowWiseAdam}


def one_process(algorithm, options, sparse, names):
    params = {name: torch.nn.Parameter(start(name)) for name in names}
    optimizer = (OURS.get(algorithm) or getattr(torch.optim, algorithm))(params.values(), **options)
    for step in range(STEPS):
        for name, parameter in params.items():
            parameter.grad = gradient(name, step, sparse)
        optimizer.step()
    return {name: {"": p.detach(), **optimizer.state[p]} for name, p in params.items()}


def meshes():
    ranks = dist.get_world_size()
    rows = 2 if ranks % 2 == 0 else 1
    return init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (rows, ranks // rows))


def train(optimizer, params, steps, sparse=True):
    for step in steps:
        for name, parameter in params.items():
            give_gradient(parameter, gradient(name, step, sparse))
        optimizer.step()


def every_case(options_of, sparse, wanted_of):
    """The largest relative difference from one process, of each algorithm, table and entry, on this rank.

    Odd ranks give their tables in the reverse order.

    Args:
        wanted_of: by algorithm what one process comes to.
    """
    square = meshes()
    names = list(COLUMNS)[:: -1 if dist.get_rank() % 2 else 1]
    worst = {}
    for algorithm, options in options_of.items():
        params = {name: place(start(name), name, *square) for name in names}
        optimizer = shardopt.keyed(algorithm, params, **options)
        with torch.sparse.check_sparse_tensor_invariants():  # or torch's own Adagrad warns that it does not
            train(optimizer, params, range(STEPS), sparse)
        wanted = wanted_of[algorithm]
        kinds = {entry.name: entry.kind for entry in spec_of(algorithm).state}
        for name, parameter in params.items():
            state = optimizer.state_dict()["state"].get(name, {})
            if not is_held(parameter):  # its state is on other ranks
                assert not state
                absent = [entry for entry, want in wanted[name].items() if entry and isinstance(want, torch.Tensor)]
                worst |= {(algorithm, name, entry): 0.0 for entry in absent}
            for entry, value in {"": parameter, **state}.items():
                want = wanted[name][entry]
                if not isinstance(want, torch.Tensor):
                    assert value == want
                    continue
                assert view_of(value).shape == tuple(want.shape), (algorithm, name, entry)
                if kinds.get(entry) is Kind.TABLE_ROWS:
                    assert (view_of(value).dtype, want.shape[1:].numel()) == (torch.float32, 1)
                scale = want.abs().max().item()
                differences = [(a - b).abs().max().item() / scale for a, b in pieces_of(want, value) if a.numel()]
                worst[algorithm, name, entry] = max(differences, default=0.0)
    return worst


@pytest.mark.parametrize(
    ("ranks", "sparse"),
    [
        pytest.param(ranks, sparse, marks=() if ranks in usual else pytest.mark.exhaustive, id=f"{ranks}-{how}")
        for sparse, how, usual in ((True, "sparse", (4,)), (False, "dense", (3,)))
        for ranks in (1, 2, 3, 4)
    ],
)
def test_tables_cut_along_columns_are_moved_as_on_one_process(ranks, sparse):
    cases = CASES if sparse else DENSE
    with torch.sparse.check_sparse_tensor_invariants():
        wanted_of = {name: one_process(name, options, sparse, COLUMNS) for name, options in cases.items()}
    for result in run_ranks(ranks, every_case, cases, sparse, wanted_of):
        assert len(result) == len(COLUMNS) * (14 if sparse else 12), "of each algorithm, the parameter and its tensors"
        value, key = max((value, key) for key, value in result.items())
        assert value <= TOLERANCE, key


def different_rows():
    """Rank 0 has gradients of rows 1 and 3, rank 1 of row 3 alone, rank 2 none at all."""
    mesh = init_device_mesh("cpu", (3,))
    full = torch.arange(24.0).view(4, 6)
    mine = {0: [1, 3], 1: [3], 2: []}[dist.get_rank()]
    results = []
    for algorithm in ("rowwiseadagrad", "rowwiseadam"):
        weight = torch.nn.Parameter(shard(full, mesh, Shard(1)))
        whole = torch.nn.Parameter(full.clone())
        optimizer = shardopt.keyed(algorithm, {"w": weight}, lr=0.1)
        alone = shardopt.keyed(algorithm, {"w": whole}, lr=0.1)
        for _ in range(3):
            if mine:
                sparse = torch.sparse_coo_tensor([mine], torch.ones(len(mine), 2), (4, 2), check_invariants=True)
                weight.grad = type(weight.data)(sparse, weight._spec, requires_grad=False)
            values = torch.tensor([[1.0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
            whole.grad = torch.sparse_coo_tensor([[1, 3]], values, (4, 6), check_invariants=True)
            optimizer.step()
            alone.step()
        (local,) = local_tensors(weight)
        column = 2 * dist.get_rank()
        results.append(torch.allclose(local, whole[:, column : column + 2], rtol=1e-6, atol=0))
        for name, value in optimizer.state[weight].items():
            if name != "exp_avg":
                results.append(torch.allclose(local_tensors(value)[0], alone.state[whole][name], rtol=1e-6))
    return results


def test_a_row_that_any_rank_has_a_gradient_of_is_moved_on_all():
    for result in run_ranks(3, different_rows):
        assert all(result), result


def one_bad_gradient():
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(shard(torch.ones(4, 6), mesh, Shard(1)))
    optimizer = shardopt.keyed("rowwiseadagrad", {"w": weight}, weight_decay=0.1)
    give_gradient(weight, torch.ones(4, 6).to_sparse(1) if dist.get_rank() else torch.ones(4, 6))
    with pytest.raises(GradientError) as raised:
        optimizer.step()
    assert (local_tensors(weight)[0] == 1).all() and not optimizer.state_dict()["state"]
    return str(raised.value)


def test_a_gradient_that_one_rank_refuses_is_refused_by_all_that_share_its_rows():
    other, own = run_ranks(2, one_bad_gradient, deadline_seconds=20)
    assert "w.grad: found a sparse gradient" in own and "w: found a gradient" in other and "another rank" in other


def step_tables(count):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = {
        f"{placement.dim}.{i}": torch.nn.Parameter(shard(torch.ones(6, 4), mesh, placement))
        for placement in (Shard(0), Shard(1))
        for i in range(count)
    }
    optimizer = shardopt.keyed("rowwiseadagrad", {name: p for name, p in params.items() if name.startswith("0")})
    other = shardopt.keyed("rowwiseadam", {name: p for name, p in params.items() if name.startswith("1")})
    for parameter in params.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dist.barrier()
    other.step()


def test_a_step_has_two_collectives_where_columns_are_cut_and_none_where_rows_are():
    for outcome in run_ranks_outcomes(2, step_tables, 10, trace=["torch.distributed:all_reduce"]):
        assert outcome.ok, outcome
        assert len(outcome.calls) == 2


def exchanged(rows_of_ranks):
    """How many numbers a step exchanges for a table of 500 rows, cut by columns, and the table after it."""
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(shard(torch.ones(500, 6), mesh, Shard(1)))
    optimizer = shardopt.keyed("rowwiseadagrad", {"w": weight}, lr=0.5)
    rows = rows_of_ranks[dist.get_rank()]
    whole = torch.arange(500.0 * 3).view(500, 3) + dist.get_rank()
    local = torch.sparse_coo_tensor(torch.tensor([rows]), whole[rows], (500, 3), check_invariants=False)
    weight.grad = assemble(weight, [local])
    counts, reduce = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        counts.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        optimizer.step()
    finally:
        dist.all_reduce = reduce
    return counts, weight.detach().full_tensor()


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [(([3, 70, 499], [3, 70, 499]), 3), (([3, 70], [3, 71]), 1000), (([1, 4], [2, 3]), 1000), (([5], []), 1000)],
)
def test_numbers_of_touched_rows_alone_are_exchanged_where_all_ranks_have_the_same(rows, numbers):
    of_ranks = run_ranks(2, exchanged, rows)
    whole = torch.nn.Parameter(torch.ones(500, 6))
    alone = shardopt.keyed("rowwiseadagrad", {"w": whole}, lr=0.5)
    dense = torch.zeros(500, 6)
    for rank, own in enumerate(rows):
        dense[own, 3 * rank : 3 * rank + 3] = (torch.arange(500.0 * 3).view(500, 3) + rank)[own]
    whole.grad = dense.to_sparse(1)
    alone.step()
    for counts, table in of_ranks:
        assert counts[1:] == [numbers] and counts[0] <= 34
        assert torch.allclose(table, whole.detach(), rtol=1e-6)


def save_tables(path):
    square = meshes()
    params = {name: place(start(name), name, *square) for name in EVERY}
    optimizer = shardopt.keyed("rowwiseadam", params, groups=[{"match": "e", "algorithm": "rowwiseadagrad"}])
    train(optimizer, params, range(STEPS))
    checkpoint.save(path, {"model": params, "optimizer": optimizer})
    return {
        name: sum(local_tensor.nbytes for local_tensor in local_tensors(value))
        for name, own in optimizer.state_dict()["state"].items()
        for entry, value in own.items()
        if entry in ("sum", "exp_avg_sq")
    }


def load_tables(path, again, turned):
    """Loads into fresh tables, and saves; where `turned`, those of two dimensions lie the other way."""
    row, across = meshes()
    params = {name: place(torch.full_like(start(name), -1.0), name, row, across) for name in EVERY}
    if turned:
        for name, shape in EVERY.items():
            if len(shape) == 2 and not name.startswith("table"):
                where = Shard(0) if name in COLUMNS else Replicate() if name == "copies" else Shard(1)
                params[name] = torch.nn.Parameter(shard(torch.full(shape, -1.0), row, where))
    optimizer = shardopt.keyed("rowwiseadam", params, groups=[{"match": "e", "algorithm": "rowwiseadagrad"}])
    optimizer.init_state()
    checkpoint.load(path, {"model": params, "optimizer": optimizer})
    checkpoint.save(again, {"model": params, "optimizer": optimizer})


def test_moments_are_four_bytes_a_row_and_load_on_any_ranks_and_into_any_cut(tmp_path):
    held = run_ranks(4, save_tables, tmp_path / "four")
    for name in ("even", "uneven", "short", "vector", "cube", "table", "hybrid"):
        copies = 2 if name == "hybrid" else 1
        assert sum(of_rank.get(name, 0) for of_rank in held) == 4 * EVERY[name][0] * copies, name
    for ranks, turned in ((1, False), (2, True), (3, True)):
        again = tmp_path / f"{ranks}{turned}"
        run_ranks(ranks, load_tables, tmp_path / "four", again, turned)
        with checkpoint.open(tmp_path / "four") as one, checkpoint.open(again) as other:
            assert one.keys() == other.keys()
            for key in one.manifest.tensors:
                assert torch.equal(one.read(key), other.read(key)), key
            for name, shape in EVERY.items():
                entry = "sum" if "e" in name else "exp_avg_sq"
                assert other.info(f"optimizer.state.{name}.{entry}").shape == (shape[0], *[1] * (len(shape) - 1))
