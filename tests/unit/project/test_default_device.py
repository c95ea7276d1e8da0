"""Where torch's default device is not the CPU: what lies in the host's memory still does. "meta" stands for a GPU."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardopt
from shardopt import checkpoint
from shardopt.errors import StateError
from shardopt.nn import ShardedEmbedding, ShardedEmbeddingBag, Table
from shardopt.nn.table import _BLOCK_ROWS
from shardopt.optim.gradients.norms import JointNorm, norm_of_each
from shardopt.sharding.view import local_tensors
from shardopt.state.values import decode_value, encode_value
from tests.support.fake_rank import fake_rank


@pytest.fixture
def meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_values_with_tensors_come_back_on_the_cpu(meta):
    for tensor in (torch.arange(3, device="cpu"), torch.empty(0, 2, device="cpu"), torch.tensor(1.5, device="cpu")):
        actual = decode_value(json.loads(json.dumps(encode_value(tensor))))
        assert actual.device.type == "cpu" and torch.equal(actual, tensor)


def test_random_states_are_saved_and_loaded(meta, tmp_path):
    torch.manual_seed(3)
    app = {"random": shardopt.RandomState(on_resize="raise"), "own": checkpoint.PerRank(torch.arange(4, device="cpu"))}
    checkpoint.save(tmp_path / "c", app)
    expected = torch.rand(3, device="cpu")
    torch.manual_seed(4)
    checkpoint.load(tmp_path / "c", app)
    assert torch.equal(torch.rand(3, device="cpu"), expected)
    assert app["own"].value.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_are_the_same(shuffle):
    def samples():
        return list(shardopt.ResumableSampler(10, batch_size=4, drop_last=False, shuffle=shuffle, rank=1, ranks=2))

    expected = samples()
    with torch.device("meta"):
        assert samples() == expected


def test_norms_and_early_state(meta):
    weight = nn.Parameter(torch.tensor([3.0, 4.0], device="cpu"))
    weight.grad = torch.tensor([3.0, 4.0], device="cpu")
    assert JointNorm()([[weight.grad]], 2.0, torch.device("cpu")).item() == 5.0
    few = [weight.grad, weight.grad.double()]
    assert norm_of_each(few, 2.0, torch.device("cpu")).tolist() == [5.0, 5.0]
    shardopt.keyed("sgd", {"w": weight}, momentum=0.9, fused=True)
    optimizer = shardopt.keyed("sgd", {"w": weight}, momentum=0.9, lr=1.0)
    optimizer.init_state()
    assert optimizer.state[weight]["momentum_buffer"].device.type == "cpu"
    clipped = shardopt.GradientClippingOptimizer(optimizer, shardopt.GradientClipping.NORM, 1.0)
    assert clipped.clip_grad_norm_().item() == 5.0


ROWS = 2 * _BLOCK_ROWS + 5
TABLES = (Table("a", ROWS, 2, padding_idx=3), Table("b", 3, 4))


def drawn(ranks, make=lambda mesh: ShardedEmbedding(TABLES, mesh, device="cpu")):
    """The whole tables of as many ranks, one after the other."""
    parts = []
    for rank in range(ranks):
        with fake_rank(rank, ranks) as mesh:
            torch.manual_seed(5)
            module = make(mesh)
            parts.append([local_tensors(parameter)[0].detach() for parameter in module.parameters()])
            after = torch.rand(2, device="cpu")
    return [torch.cat(part) for part in zip(*parts, strict=True)], after


def same(one, other):
    return all(map(torch.equal, one[0], other[0])) and torch.equal(one[1], other[1])


def test_tables_do_not_depend_on_the_default_device_or_the_number_of_ranks():
    expected = drawn(1)
    assert expected[0][0].shape == (ROWS, 2) and expected[0][0].std() > 0.9
    with torch.device("meta"):
        for ranks in (1, 2, 3):
            assert same(drawn(ranks), expected)
    assert same(drawn(3), expected)


@pytest.mark.parametrize("cut", ["rows", "columns", "whole", "replicated"])
def test_what_is_known_of_tables_before_lookups_has_values_on_any_default_device(cut):
    tables = [replace(table, cut=cut) for table in TABLES]
    with fake_rank(0, 2) as mesh, torch.device("meta"):
        made = ShardedEmbedding(tables, mesh)
    assert made._directory._starts.tolist() and made._directory._first.tolist()


@pytest.mark.parametrize("module", [ShardedEmbedding, ShardedEmbeddingBag])
def test_a_module_that_is_made_on_meta_gets_its_rows_later(module):
    """The same numbers, in tables that have no values before."""

    def late(mesh):
        state = torch.get_rng_state()
        with torch.device("meta"):
            made = module(TABLES, mesh)
        assert all(local_tensors(parameter)[0].is_meta for parameter in made.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        made.reset_parameters()  # there is nothing to draw into
        assert torch.equal(torch.get_rng_state(), state)
        made.to_empty(device="cpu")
        parameters = list(made.parameters())
        made.reset_parameters()
        assert all(one is other for one, other in zip(parameters, made.parameters(), strict=True))
        assert all(isinstance(parameter.data, DTensor) and parameter.requires_grad for parameter in parameters)
        return made

    expected = drawn(1)
    for ranks in (1, 3):
        assert same(drawn(ranks, late), expected)
    assert same(drawn(2, lambda mesh: module(TABLES, mesh, device="meta").to_empty(device="cpu")), expected) is False


def test_rows_are_drawn_anew_as_their_tables_say():
    def fill(block):
        block.fill_(torch.rand((), device="cpu").item())

    with fake_rank(0, 2) as mesh:
        table = Table("t", 4, 2, init=fill, padding_idx=1, dtype=torch.float64)
        module = ShardedEmbedding(table, mesh)
        before = local_tensors(module.t.weight)[0].detach().clone()
        assert before[1].tolist() == [0, 0] and before[0, 0] == before[0, 1] != 0
        memory = local_tensors(module.t.weight)[0].data_ptr()
        module.reset_parameters()
        (local,) = local_tensors(module.t.weight)
        assert local.data_ptr() == memory and local.dtype is torch.float64
        assert local[1].tolist() == [0, 0] and local[0, 0] != before[0, 0]


def test_a_module_on_meta_looks_up_once_it_has_rows_and_can_be_fused():
    with fake_rank(0, 1) as mesh:
        with torch.device("meta"):
            module = ShardedEmbeddingBag(Table("t", 5, 2, mode="sum"), mesh)
        model = nn.Sequential(module)
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        module.reset_parameters()
        torch.manual_seed(1)
        other = ShardedEmbeddingBag(Table("t", 5, 2, mode="sum"), mesh)
        for each in (module, other):
            each.fuse("sgd", lr=1.0)
        ids = torch.tensor([[0, 3]])
        assert torch.equal(module(ids), other(ids))
        with torch.no_grad():
            assert torch.equal(module.t.weight.to_local(), other.t.weight.to_local())


def test_a_device_that_is_named_counts():
    with fake_rank(0, 1), torch.device("meta"):
        mesh = init_device_mesh("cpu", (1,))
        assert local_tensors(ShardedEmbedding(TABLES, mesh, device="cpu").a.weight)[0].device.type == "cpu"
    with fake_rank(0, 1) as mesh:
        assert local_tensors(ShardedEmbedding(TABLES, mesh, device="meta").a.weight)[0].is_meta
        with pytest.raises(StateError):
            ShardedEmbedding([], mesh)
