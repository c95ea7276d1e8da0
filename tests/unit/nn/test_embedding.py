"""Sharded embedding modules on one rank: nn.EmbeddingBag's and nn.Embedding's own results, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardopt
from shardopt.errors import AlgorithmError, GradientError, InputError, LayoutError, StateError
from shardopt.nn import Grid, ShardedEmbedding, ShardedEmbeddingBag, Table
from shardopt.optim import FusedOptimizerModule
from shardopt.sharding.view import local_tensors, view_of
from tests.support.atomics import RefusesAtomics
from tests.support.drawn import examples
from tests.support.fake_rank import fake_rank
from tests.support.placement import at

ROWS, WIDTH = 9, 3


@st.composite
def lookups(draw):
    """Options of nn.EmbeddingBag and what it is called with; with bags that have no ids, and ids that come again."""
    mode = draw(st.sampled_from(["sum", "mean"]))
    ends = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, 4), min_size=0, max_size=5))
    ids = draw(st.lists(st.integers(0, ROWS - 1), min_size=sum(lengths), max_size=sum(lengths)))
    offsets = [sum(lengths[:bag]) for bag in range(len(lengths) + ends)]
    options = {"mode": mode, "include_last_offset": ends, "padding_idx": draw(st.sampled_from([None, 0, ROWS - 1]))}
    weighted = draw(st.sampled_from([None, "fixed", "trained"])) if mode == "sum" else None
    kind = draw(st.sampled_from([torch.int64, torch.int32]))
    return options, torch.tensor(ids, dtype=kind), torch.tensor(offsets, dtype=kind), weighted


@settings(max_examples=examples(60))
@given(lookups(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_is_an_embedding_bag(lookup, dtype):
    options, ids, offsets, weighted = lookup
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(ROWS, WIDTH, dtype=dtype, sparse=True, **options)
    trained = weighted == "trained"
    weights = [torch.rand(len(ids), dtype=dtype, requires_grad=trained) if weighted else None for _ in range(2)]
    if weighted:
        weights[1].data.copy_(weights[0])
    with fake_rank(0, 1) as mesh:
        table = Table("only", ROWS, WIDTH, options["mode"], dtype, padding_idx=options["padding_idx"])
        ours = ShardedEmbeddingBag(table, mesh, include_last_offset=options["include_last_offset"])
        ours.only.weight.data.to_local().copy_(theirs.weight.data)
        wanted, actual = theirs(ids, offsets, weights[0]), ours(ids, offsets, weights[1])
        assert torch.equal(actual, wanted)
        for vectors in (wanted, actual):
            (vectors.sin() * torch.arange(1, 1 + WIDTH)).sum().backward()
        gradient = local_tensors(ours.only.weight.grad)[0]
    assert gradient.is_sparse
    close = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(gradient.to_dense(), theirs.weight.grad.to_dense(), **close)
    touched = sorted({number for number in ids.tolist() if number != options["padding_idx"]})
    assert gradient.coalesce().indices()[0].tolist() == touched
    if trained:
        torch.testing.assert_close(weights[1].grad, weights[0].grad, **close)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 0, 3)])
def test_is_an_embedding(shape):
    theirs = nn.Embedding(ROWS, WIDTH, sparse=True)
    ids = torch.randint(ROWS, shape)
    with fake_rank(0, 1) as mesh:
        ours = ShardedEmbedding(Table("only", ROWS, WIDTH), mesh)
        ours.only.weight.data.to_local().copy_(theirs.weight.data)
        assert torch.equal(ours(ids), theirs(ids))
        ours(ids).sin().sum().backward()
        theirs(ids).sin().sum().backward()
        actual = local_tensors(ours.only.weight.grad)[0].to_dense()
    torch.testing.assert_close(actual, theirs.weight.grad.to_dense())


def test_bags_of_one_length_need_no_offsets_and_tables_may_be_left_out():
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbeddingBag([Table("a", 5, 2), Table("b", 7, 4, mode="none", padding_idx=1)], mesh)
        rows = {name: local_tensors(parameter.detach())[0] for name, parameter in module.named_parameters()}
        ids = torch.tensor([[0, 4], [2, 2]])
        actual = module({"a": ids})
        assert actual.keys() == {"a"}
        assert torch.equal(actual["a"], functional.embedding_bag(ids, rows["a.weight"], mode="mean"))
        actual = module({"b": torch.tensor([[3, 1]]), "a": (ids, None)})
        assert list(actual) == ["b", "a"]
        assert torch.equal(actual["b"], torch.stack([rows["b.weight"][3], torch.zeros(4)]).unsqueeze(0))
        assert not rows["b.weight"][1].any()
        with torch.no_grad():
            assert not module({"a": ids})["a"].requires_grad


@pytest.mark.parametrize("length", [1, 5])
def test_tables_may_be_given_in_any_order(length):
    """As different rows, and as the sums of bags."""
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbeddingBag([Table(name, ROWS, WIDTH, mode="sum") for name in "abc"], mesh)
        rows = {name: local_tensors(module.get_submodule(name).weight.detach())[0] for name in "abc"}
        ids = {name: torch.randint(ROWS, (2, length)) for name in "cab"}
        actual = module(ids)
        assert list(actual) == [*"cab"]
        sum(vectors.sum() for vectors in actual.values()).backward()
        for name, own in ids.items():
            assert torch.equal(actual[name], functional.embedding_bag(own, rows[name], mode="sum")), name
            gradient = local_tensors(module.get_submodule(name).weight.grad)[0].to_dense()
            assert torch.equal(gradient[:, 0], own.flatten().bincount(minlength=ROWS).float()), name


@pytest.mark.parametrize("length", [1, 5])
def test_vectors_may_be_changed_in_place(length):
    """As those of nn.EmbeddingBag: a model may go on with `relu_`, however long its bags are."""
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbeddingBag([Table("a", ROWS, 1, "sum", init=nn.init.ones_), Table("b", ROWS, 2)], mesh)
        ids = torch.arange(5).view(-1, length)
        actual = module({"a": ids.clone(), "b": ids.clone()})
        actual["a"].mul_(2).sum().backward()
        assert local_tensors(module.a.weight.grad)[0].to_dense()[ids[0], 0].tolist() == [2.0] * length


def test_a_lookup_of_sums_keeps_for_backward_its_rows_and_lengths_alone():
    """And not the buffer in which they arrived."""
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbeddingBag(Table("only", ROWS, WIDTH, "sum"), mesh)
        (served,) = module(torch.zeros(2, 50, dtype=torch.int64)).grad_fn.route.served
        kept = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in (*served.rows, *served.lengths)}
    assert sum(storage.nbytes() for storage in kept.values()) == 8 * (2 * 50 + 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_rows_are_the_same_on_any_number_of_ranks(ranks):
    """Blocks of 16384 rows are drawn at a time; the second table has fewer rows than there are ranks."""
    tables = [Table("long", 20_000, 2, padding_idx=17_000), Table("short", 2, 3, init=nn.init.uniform_)]
    parts = {"long": [], "short": []}
    for rank in range(ranks):
        with fake_rank(rank, ranks) as mesh:
            torch.manual_seed(4)
            module = ShardedEmbedding(tables, mesh)
            after = torch.rand(())
            for name, own in parts.items():
                weight = getattr(module, name).weight
                own += [piece.tensor for piece in view_of(weight).pieces]
    whole = {name: torch.cat(own) for name, own in parts.items()}
    with fake_rank(0, 1) as mesh:
        torch.manual_seed(4)
        module = ShardedEmbedding(tables, mesh)
        assert torch.equal(after, torch.rand(()))
        for name, rows in whole.items():
            assert torch.equal(local_tensors(getattr(module, name).weight)[0], rows)
    assert not whole["long"][17_000].any()
    assert len(whole["long"].unique(dim=0)) == 20_000
    assert 0 <= whole["short"].min() < whole["short"].max() < 1


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([], "at least one"),
        ([Table("a", 5, 2), Table("a", 6, 2)], "comes twice"),
        ([Table("a.b", 5, 2)], "identifier"),
        *(([Table(name, 5, 2)], "cannot be used") for name in ("forward", "tables", "training", "include_last_offset")),
        ([Table("a", 0, 2)], "0 rows"),
        ([Table("a", 5, 2, mode="max")], "mode 'max'"),
        ([Table("a", 5, 2, padding_idx=-1)], "padding_idx -1"),
        ([Table("a", 5, 2, cut="diagonal")], "cut 'diagonal'"),
        ([Table("a", 5, 2, cut=Grid(0, 2))], "0 x 2 pieces"),
        ([Table("a", 5, 2, cut=Grid(1, 2))], r"1 x 2 pieces on ranks \[0, 1\]; required .* ranks, of 0 to 0"),
        ([Table("a", 5, 2, cut=Grid(1, 1, (0, 0)))], r"on ranks \[0, 0\]"),
        ([Table("a", 5, 2, cut=Grid(1, 1, (-1,)))], r"on ranks \[-1\]"),
    ],
)
def test_tables_that_cannot_be_made(tables, words):
    with fake_rank(0, 1) as mesh, pytest.raises(StateError, match=words):
        ShardedEmbeddingBag(tables, mesh)


def test_ranks_of_a_grid_are_ascending():
    with fake_rank(0, 4) as mesh, pytest.raises(StateError, match=r"ranks \[3, 1\]"):
        ShardedEmbedding(Table("a", 5, 2, cut=Grid(2, 1, (3, 1))), mesh)


@pytest.mark.parametrize("cut", ["columns", "whole", "replicated"])
def test_rows_are_the_same_under_each_cut(cut):
    tables = [Table("long", 20_000, 6, padding_idx=17_000), Table("other", 3, 2)]
    with fake_rank(0, 1) as mesh:
        torch.manual_seed(4)
        wanted = [local_tensors(each)[0].detach() for each in ShardedEmbedding(tables, mesh).parameters()]
        after = torch.rand(())
    found = [torch.full_like(each, torch.nan) for each in wanted]
    for rank in range(4):
        with fake_rank(rank, 4) as mesh:
            torch.manual_seed(4)
            module = ShardedEmbedding([replace(table, cut=cut) for table in tables], mesh)
            assert torch.equal(after, torch.rand(()))
            for whole, weight in zip(found, module.parameters(), strict=True):
                for piece in view_of(weight).pieces:
                    whole[at(piece.box)] = piece.tensor.detach()
    assert all(map(torch.equal, found, wanted))


def test_whole_tables_are_on_the_ranks_with_the_fewest_bytes_of_them():
    sizes = (100, 60, 30, 20, 50)
    with fake_rank(0, 2) as mesh:
        module = ShardedEmbedding([Table(f"t{size}", size, 2, cut="whole") for size in sizes], mesh)
        here = [module.get_submodule(f"t{size}").piece is not None for size in sizes]
    assert here == [True, False, False, False, True]


def test_meshes_that_tables_cannot_lie_on():
    with fake_rank(0, 8, (2, 2, 2)) as mesh, pytest.raises(LayoutError, match=r"shape \(2, 2, 2\)"):
        ShardedEmbeddingBag(Table("a", 5, 2), mesh)


@pytest.mark.parametrize(("offsets", "ends"), [([0, 2], True), ([0], True), ([], False)])
def test_ids_behind_the_last_bag_are_refused_before_torch_leaves_their_gradients_unset(offsets, ends):
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbeddingBag(Table("only", ROWS, WIDTH, "sum"), mesh, include_last_offset=ends)
        with pytest.raises(InputError, match="none behind the last bag"):
            module(torch.arange(5), torch.tensor(offsets, dtype=torch.int64))
        bags = [*offsets, 5] if ends else [0]  # the remedy
        module(torch.arange(5), torch.tensor(bags)).sum().backward()
        assert torch.equal(local_tensors(module.only.weight.grad)[0].to_dense()[:5], torch.ones(5, WIDTH))


L = torch.tensor([1, 2, 3])
B = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (({"sum": (L, B, torch.ones(2))},), r"sum: found weights \(2,\)"),
        (({"sum": (L, B, torch.ones(3).double())},), "float64"),
        (({"mean": (L, B, torch.ones(3))},), "mean: found weights with mode 'mean'"),
        (({"none": (L, B)},), "none: found offsets or weights"),
        (({"sum": L},), r"sum: found ids \(3,\) and offsets None"),
        (({"sum": (L.view(1, 3), B)},), "sum: found ids"),
        (({"sum": (L.float(), B)},), "ids of torch.float32"),
        (({"sum": (L, B.float())},), "offsets of torch.float32"),
        (({"sum": (L, torch.tensor([1, 2]))},), r"offsets \[1, 2\]"),
        (({"sum": (L, torch.tensor([0, 2, 1]))},), r"offsets \[0, 2, 1\]"),
        (({"sum": (L, torch.tensor([0, 2**63 - 1, -2, 3]))},), r"offsets \[0, \d+, -2, 3\]"),  # of rising differences
        (({"sum": (L, B), "mean": (L - 2, B)},), r"mean: found id -1"),
        (({"other": L},), "other: found ids for an unknown table"),
        ((L, B), "there are sum, mean, none"),
        (({"sum": L}, B), "beside a mapping"),
        (({"sum": ()},), r"a tuple of \[\]"),
        (({"none": [1, 2]},), r"none: found a list of \['int', 'int'\]"),
        (({"none": 3},), "none: found a int"),
        (({"sum": (L, B, None, None)},), "sum: found a tuple"),
    ],
)
def test_calls_that_are_refused(call, words):
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbeddingBag(
            [Table("sum", 9, 2, "sum"), Table("mean", 9, 2), Table("none", 9, 2, "none")], mesh
        )
        with pytest.raises(InputError, match=words):
            module(*call)


def test_everything_that_is_wrong_is_told_at_once():
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbeddingBag([Table("a", 3, 2), Table("b", 3, 2)], mesh)
        with pytest.raises(InputError) as raised:
            module({"a": torch.tensor([[0, 3]]), "b": torch.tensor([[4, 5]])})
    assert [problem.key for problem in raised.value.problems] == ["a", "b"]


def test_a_module_has_a_fused_optimizer_once_it_is_fused():
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbedding([Table("a", 5, 2), Table("b", 5, 2)], mesh)
        assert isinstance(module, FusedOptimizerModule)
        assert not module.fused_optimizer.params
        with pytest.raises(AlgorithmError, match=r"(?s)Adam cannot update single rows.*RowWiseAdagrad"):
            module.fuse("adam", lr=0.1)
        with pytest.raises(AlgorithmError, match="AdamW cannot update"):
            module.fuse("sgd", groups=[{"match": "b", "algorithm": "adamw"}])
        optimizer = module.fuse("sgd", lr=0.5, groups=[{"match": "b", "algorithm": "rowwiseadagrad", "lr": 1.0}])
        assert module.fused_optimizer is optimizer
        assert sorted(optimizer.params) == ["a.weight", "b.weight"]
        with pytest.raises(StateError, match="fused optimizer already"):
            module.fuse("sgd", lr=0.5)
        before = copy.deepcopy({name: local_tensors(p.detach())[0] for name, p in module.named_parameters()})

        def closure():
            loss = module({"a": torch.tensor([1, 1]), "b": torch.tensor([3])})
            (loss["a"].sum() + 5 * loss["b"].sum()).backward()
            return 7.0

        assert optimizer.step(closure) == 7.0
        optimizer.step()
        optimizer.zero_grad()
        after = {name: local_tensors(p.detach())[0] for name, p in module.named_parameters()}
        moved = {name: before[name] - after[name] for name in before}
    assert moved["a.weight"][1].tolist() == pytest.approx([1.0, 1.0])  # both of the two
    assert moved["b.weight"][3].tolist() == pytest.approx([1.0, 1.0])  # the rate, whatever the gradient
    assert moved["a.weight"].count_nonzero() + moved["b.weight"].count_nonzero() == 4


def test_what_needs_gradients_after_backward_refuses_fused_tables():
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbedding(Table("a", 5, 2), mesh)
        optimizer = module.fuse("sgd", lr=0.5)
        with pytest.raises(StateError, match="cannot be clipped"):
            shardopt.GradientClippingOptimizer(optimizer, shardopt.GradientClipping.NORM, 1.0)
        scaler = shardopt.GradScaler("cpu")
        scaler.scale(module(torch.tensor([1])).sum()).backward()
        with pytest.raises(GradientError, match="scaled loss"):
            scaler.step(optimizer)


def test_rows_of_a_backward_that_failed_are_forgotten():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("in the middle")

    with fake_rank(0, 1) as mesh:
        module = ShardedEmbedding(Table("a", 5, 2), mesh)
        early = Fails.apply(torch.ones(2, requires_grad=True))
        with pytest.raises(RuntimeError, match="in the middle"):
            (module(torch.tensor([1])) * early).sum().backward()
        assert module.a.weight.grad is None
        module(torch.tensor([3])).sum().backward()
        assert local_tensors(module.a.weight.grad)[0].coalesce().indices().tolist() == [[3]]


def test_rows_of_backwards_within_one_another_add_up():
    """Reentrant activation checkpointing runs a backward of its own within another, which came to rows before."""
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbedding(Table("a", 5, 2), mesh)
        scale = torch.ones(2, requires_grad=True)
        inner = checkpoint(lambda x: x * module(torch.tensor([1])), scale, use_reentrant=True)
        (inner.sum() + module(torch.tensor([3])).sum()).backward()
        assert local_tensors(module.a.weight.grad)[0].to_dense().sum(1).tolist() == [0, 2, 0, 2, 0]


def test_gradients_of_several_lookups_are_added_in_their_order():
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbedding(Table("a", 5, 2), mesh)
        # In fp32 0.1 is lost beside 1e8: the last lookup is the first in backward.
        lookups = [module(torch.tensor([3, 1])) for _ in range(3)]
        with RefusesAtomics():
            sum(each.sum() * scale for each, scale in zip(lookups, (0.1, -1e8, 1e8), strict=True)).backward()
        gradient = local_tensors(module.a.weight.grad)[0].coalesce()
    assert gradient.indices().tolist() == [[1, 3]]
    assert gradient.values().unique().tolist() == [pytest.approx(0.1)]


@pytest.mark.parametrize("accumulates", [False, True])
def test_tables_of_a_module_that_is_updated_in_backward_are_updated(accumulates):
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbedding(Table("a", 5, 2), mesh)
        before = local_tensors(module.a.weight.detach())[0].clone()
        optimizer = shardopt.in_backward(module, "sgd", lr=1.0)
        if accumulates:
            with optimizer.accumulate():
                module(torch.tensor([1])).sum().backward()
            assert torch.equal(local_tensors(module.a.weight)[0], before)
        module(torch.tensor([1, 3])).sum().backward()
        assert module.a.weight.grad is None
        moved = before - local_tensors(module.a.weight.detach())[0]
    assert moved.tolist() == [pytest.approx([row] * 2) for row in (0, 1 + accumulates, 0, 1, 0)]


def test_fused_tables_are_no_part_of_what_another_optimizer_updates_in_backward():
    with fake_rank(0, 1) as mesh:
        model = nn.ModuleDict({"tables": ShardedEmbedding(Table("a", 5, 2), mesh), "over": nn.Linear(2, 1)})
        model.tables.fuse("sgd", lr=1.0)
        with pytest.raises(StateError, match=r"tables\.a\.weight: found an optimizer that its module has fused in"):
            shardopt.in_backward(model, "sgd", lr=1.0)
        shardopt.in_backward(model.over, "sgd", lr=1.0)


def test_a_module_made_without_memory_finds_its_rows_once_it_has_some():
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbedding([Table("a", 5, 2), Table("b", 3, 1)], mesh, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            local_tensors(module.b.weight)[0].copy_(torch.arange(3.0)[:, None])
        assert module({"b": torch.tensor([2, 0])})["b"].tolist() == [[2], [0]]


def test_gradients_of_tables_are_clipped_as_others():
    with fake_rank(0, 1) as mesh:
        module = ShardedEmbedding(Table("a", 5, 2), mesh)
        inner = shardopt.keyed("sgd", module.named_parameters(), lr=1.0)
        optimizer = shardopt.GradientClippingOptimizer(inner, shardopt.GradientClipping.VALUE, 0.25)
        before = local_tensors(module.a.weight.detach())[0].clone()
        module(torch.tensor([3, 3, 0])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = before - local_tensors(module.a.weight.detach())[0]
        assert module.a.weight.grad is None
    assert moved.tolist() == [pytest.approx([0.25 if row in (0, 3) else 0.0] * 2) for row in range(5)]
