"""Algorithms for tables with dense and sparse gradients: where rows are cut, bit for bit what one process computes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardopt
from shardopt.algorithms import Kind, spec_of
from shardopt.optim import RowWiseAdagrad, RowWiseAdam
from shardopt.sharding.view import is_held
from tests.support.fake_rank import KeptRank
from tests.support.placement import give_gradient, pieces_of
from tests.support.tables import ROWS, gradient, place, start

STEPS = 10
CASES = {
    "RowWiseAdagrad": ("RowWiseAdagrad", {"lr": 0.1}),
    "RowWiseAdagrad decaying": ("RowWiseAdagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "RowWiseAdam": ("RowWiseAdam", {"lr": 0.1, "betas": (0.7, 0.9)}),
    "RowWiseAdam upward": ("RowWiseAdam", {"lr": 0.05, "maximize": True}),
    "SparseAdam": ("SparseAdam", {"lr": 0.1, "betas": (0.7, 0.9)}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD upward": ("SGD", {"lr": 0.1, "maximize": True}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
}
DECAYING = {
    "RowWiseAdagrad with decay": ("RowWiseAdagrad", {"lr": 0.1, "weight_decay": 0.1}),
    "RowWiseAdam with decay": ("RowWiseAdam", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
}
OURS = {"RowWiseAdagrad": RowWiseAdagrad, "RowWiseAdam": RowWiseAdam}


@pytest.fixture(autouse=True)
def checking():
    """Otherwise torch warns, in its own Adagrad, that it does not check sparse tensors."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def one_process(algorithm, options, sparse, names=ROWS):
    """Parameters and state by name, of plain tensors under the class itself."""
    params = {name: torch.nn.Parameter(start(name)) for name in names}
    optimizer = (OURS.get(algorithm) or getattr(torch.optim, algorithm))(params.values(), **options)
    for step in range(STEPS):
        for name, parameter in params.items():
            parameter.grad = gradient(name, step, sparse)
        optimizer.step()
    return {name: {"": p.detach(), **optimizer.state[p]} for name, p in params.items()}


def sharded(algorithm, options, sparse, early=None):
    """The same on this rank, of sharded tensors under `keyed`."""
    ranks = torch.distributed.get_world_size()
    square = init_device_mesh("cpu", (2, ranks // 2) if ranks % 2 == 0 else (1, ranks))
    row = init_device_mesh("cpu", (ranks,))
    params = {name: place(start(name), name, row, square) for name in ROWS}
    optimizer = shardopt.keyed(algorithm, params, **options)
    for step in range(STEPS):
        if step == early:
            optimizer.init_state()
        for name, parameter in params.items():
            give_gradient(parameter, gradient(name, step, sparse))
        optimizer.step()
    return {name: {"": p, **optimizer.state[p]} for name, p in params.items()}


def check(actual, wanted, algorithm):
    kinds = {entry.name: entry.kind for entry in spec_of(algorithm).state}
    for name in ROWS:
        entries = [key for key, value in wanted[name].items() if value is not None]
        assert list(actual[name]) == (entries if is_held(actual[name][""]) else [""]), name
        for entry, value in actual[name].items():
            want = wanted[name][entry]
            if not isinstance(want, torch.Tensor):
                assert (type(value), value) == (type(want), want), (name, entry)
                continue
            parts = pieces_of(want, value)
            assert all(map(torch.equal, *zip(*parts, strict=True))) if parts else True, (name, entry)
            if kinds.get(entry) is Kind.TABLE_ROWS:
                assert want.shape == (ROWS[name][0], *[1] * (len(ROWS[name]) - 1))


def cases():
    """Usually each case is seen on three ranks, and the first of each algorithm on all numbers of ranks."""
    met = set()
    for case, (algorithm, options) in {**CASES, **DECAYING}.items():
        for sparse in (True, False):
            if case in DECAYING if sparse else not spec_of(algorithm).takes_dense:
                continue
            for ranks in (1, 2, 3, 4):
                usual = ranks == 3 or (sparse and algorithm not in met)
                how = "sparse" if sparse else "dense"
                if not sparse and algorithm in ("SGD", "Adagrad"):
                    options = {**options, "foreach": False}  # the fused one may round in another way
                yield pytest.param(
                    algorithm,
                    options,
                    sparse,
                    ranks,
                    id=f"{case}-{how}-{ranks}".replace(" ", "_"),
                    marks=() if usual else pytest.mark.exhaustive,
                )
        met.add(algorithm)


@pytest.fixture(scope="module")
def kept():
    """A rank for the cases, which follow one another."""
    rank = KeptRank()
    yield rank
    rank.close()


@pytest.mark.parametrize(("algorithm", "options", "sparse", "ranks"), list(cases()))
def test_rows_on_ranks_are_moved_as_on_one_process(algorithm, options, sparse, ranks, request, kept):
    wanted = one_process(algorithm, options, sparse)
    every = request.config.getoption("--exhaustive")
    for rank in kept.first(range(ranks) if every else {0, ranks - 1}, ranks):
        kept.at(rank, ranks)
        check(sharded(algorithm, options, sparse, early=None if rank else 0), wanted, algorithm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"maximize": True, "eps": 0.1}, {"lr": torch.tensor(0.3), "betas": (0.0, 0.5)}], ids=str
)
@pytest.mark.parametrize("sparse_dims", [1, 2])
def test_sparse_adam_has_the_bits_of_torchs(sparse_dims, options, dtype):
    """Of rows, which it moves by itself, and of single elements, which it leaves to torch's."""
    runs = []
    for make in (
        lambda p: torch.optim.SparseAdam([p], **options),
        lambda p: shardopt.keyed("sparseadam", {"w": p}, **options),
    ):
        parameter = torch.nn.Parameter(start("cube").to(dtype))
        optimizer = make(parameter)
        for step in range(STEPS):
            whole = gradient("cube", step, True).to(dtype)
            parameter.grad = whole if sparse_dims == 1 else whole.to_dense().to_sparse(2)
            optimizer.step()
        runs.append((parameter, *optimizer.state[parameter].values()))
    for torchs, ours in zip(*runs, strict=True):
        assert torchs == ours if isinstance(torchs, int) else torch.equal(torchs, ours)
