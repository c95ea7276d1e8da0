"""Sparse gradients of shards: absent ones, what is refused, scaled and zeroed. The numbers are in tests/numerics."""

import pytest
import torch
from torch.distributed.tensor import Shard

import shardopt
from shardopt import GradScaler
from shardopt.algorithms.dense_gradients import no_gradient
from shardopt.errors import AlgorithmError, GradientError
from shardopt.sharding.gradients import local_gradients
from shardopt.sharding.view import assemble, local_tensors
from tests.support.fake_rank import fake_rank, shard, sharded_tensor

FULL = torch.arange(12.0).view(6, 2)
ALGORITHMS = ["sparseadam", "adagrad", "sgd", "rowwiseadagrad", "rowwiseadam"]


@pytest.fixture(autouse=True)
def checking():
    """Otherwise torch warns, in its own Adagrad, that it does not check sparse tensors."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def sparse(rows, shape, value=1.0):
    return torch.sparse_coo_tensor(torch.tensor(rows)[None], torch.full((len(rows), shape[1]), value), shape)


def of_rows(mesh, *rows):
    """A DTensor parameter, with a gradient of these rows of this rank."""
    parameter = torch.nn.Parameter(shard(FULL, mesh, Shard(0)))
    parameter.grad = assemble(parameter, [sparse(list(rows), local_tensors(parameter)[0].shape)])
    return parameter


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shards_without_a_gradient_stay_as_they_are_and_count_the_step(algorithm):
    with fake_rank(0, 2):
        table = sharded_tensor(FULL, [(2, 0), (3, 0), (1, 1)], 0, requires_grad=True)
        first, second = local_tensors(table)
        whole = torch.nn.Parameter(FULL[:5].clone())
        optimizer, alone = (shardopt.keyed(algorithm, {"table": each}, lr=0.1) for each in (table, whole))
        for rows in ([1], [0, 1], [1, 1]):
            first.grad = sparse(rows, (2, 2))
            whole.grad = sparse(rows, (5, 2))
            optimizer.step()
            alone.step()
        assert torch.equal(torch.cat([first, second]), whole)
        assert second.grad is None
        if algorithm != "sgd":
            assert optimizer.state[table]["step"] == 3
        assert not torch.equal(first, FULL[:2]) and torch.equal(second, FULL[2:5])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_without_a_shard_counts_nothing(algorithm):
    """It cannot see whether the others had a gradient."""
    with fake_rank(1, 2):
        table = sharded_tensor(FULL, [(6, 0)], 1, requires_grad=True)
        optimizer = shardopt.keyed(algorithm, {"table": table}, lr=0.1)
        optimizer.init_state()
        optimizer.step()
        optimizer.step()
        assert len(optimizer.state) == 0 and optimizer.state_dict()["state"] == {}


def test_no_gradient_takes_no_memory_where_it_is_sparse():
    local = torch.ones(1000, 3, 2, requires_grad=True)
    absent = no_gradient(local, sparse=True)
    assert absent.is_sparse and absent._nnz() == 0 and absent.shape == local.shape
    local.grad = absent  # torch takes it
    assert torch.equal(no_gradient(local, sparse=False), torch.zeros_like(local))


@pytest.mark.parametrize(
    ("algorithm", "option"), [("sgd", "momentum"), ("sgd", "weight_decay"), ("adagrad", "weight_decay")]
)
def test_what_would_change_other_rows_is_refused_on_shards_before_anything_has_changed(algorithm, option):
    with fake_rank(0, 2) as mesh:
        dense, table = torch.nn.Parameter(shard(FULL, mesh, Shard(0))), of_rows(mesh, 1)
        dense.grad = shard(torch.ones(6, 2), mesh, Shard(0))
        optimizer = shardopt.keyed(algorithm, {"dense": dense, "table": table}, lr=0.1, **{option: 0.9})
        with pytest.raises(
            GradientError, match=rf"table\.grad: found a sparse gradient in a group with {option}"
        ) as raised:
            optimizer.step()
        assert ("RowWiseAdagrad" in str(raised.value)) == (option == "momentum")  # which takes no decay either
        assert torch.equal(local_tensors(dense)[0], FULL[:3])
        assert all(float(state["step"]) == 0 for state in optimizer.state_dict()["state"].values())
        assert local_tensors(dense)[0].grad is None and table.grad is not None
        optimizer.param_groups[0][option] = 0.0
        optimizer.step()
        assert not torch.equal(local_tensors(table)[0], FULL[:3])


@pytest.mark.parametrize(
    ("algorithm", "options", "error"),
    [("adam", {}, RuntimeError), ("sgd", {"fused": True}, AlgorithmError)],
)
def test_what_torch_refuses_it_refuses_of_shards(algorithm, options, error):
    with fake_rank(0, 2) as mesh:
        optimizer = shardopt.keyed(algorithm, {"table": of_rows(mesh, 1)}, **options)
        with pytest.raises(error, match="sparse"):
            optimizer.step()


def test_sparse_adam_refuses_dense_gradients_as_torchs_does():
    with fake_rank(0, 2) as mesh:
        table = of_rows(mesh, 1)
        table.grad = shard(FULL, mesh, Shard(0))
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            shardopt.keyed("sparseadam", {"table": table}).step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_zeroed(set_to_none):
    with fake_rank(0, 2) as mesh:
        rows = of_rows(mesh, 1, 2)
        table = sharded_tensor(FULL, [(2, 0), (4, 1)], 0, requires_grad=True)
        local_tensors(table)[0].grad = sparse([1], (2, 2))
        optimizer = shardopt.keyed("sparseadam", {"rows": rows, "table": table})
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        for parameter in (rows, table):
            (gradient,) = local_gradients(parameter)
            assert gradient is None if set_to_none else gradient.is_sparse and not gradient.to_dense().any()


def test_scaled_gradients_are_unscaled_once_for_each_row():
    """Row 1 comes twice: its infinity is one of the sum, which alone is finite in each part."""
    with fake_rank(0, 1) as mesh:
        parameters = {"rows": of_rows(mesh, 1, 1, 4), "table": sharded_tensor(FULL, [(6, 0)], 0, requires_grad=True)}
        (local,) = local_tensors(parameters["table"])
        local.grad = sparse([1, 1, 4], (6, 2))
        optimizer = shardopt.keyed("sgd", parameters, lr=1.0)
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=100)
        scaler.step(optimizer)
        scaler.update()
        expected = FULL - torch.tensor([0, 0.5, 0, 0, 0.25, 0])[:, None]
        assert all(torch.equal(local_tensors(parameter)[0], expected) for parameter in parameters.values())
        large = torch.finfo(torch.float32).max
        local.grad = sparse([1, 1], (6, 2), large)
        scaler.step(optimizer)
        assert all(torch.equal(local_tensors(parameter)[0], expected) for parameter in parameters.values())
