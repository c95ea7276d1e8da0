"""Sharded embedding tables on real ranks: the vectors, gradients and tables of torch's own modules in one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint as activation_checkpoint

import shardopt
from shardopt import WarmupOptimizer, WarmupPolicy, WarmupStage, checkpoint
from shardopt.errors import InputError, PartialLoadError, RankError
from shardopt.nn import ShardedEmbeddingBag, Table
from shardopt.optim import CombinedOptimizer
from shardopt.runtime.partial_loads import PartialLoad
from shardopt.sharding.view import local_tensors
from tests.harness import run_ranks
from tests.support.embeddings import (
    STEPS,
    TABLES,
    batch,
    in_one_process,
    loss_of,
    mesh,
    sharded,
    torchs,
    unchecked,
    whole,
)

RANKS_STAY = True

ALGORITHMS = {
    "sparseadam": (torch.optim.SparseAdam, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "rowwiseadagrad": (shardopt.optim.RowWiseAdagrad, {"lr": 0.1}),
}
RELATIVE = {torch.float32: 1e-6, torch.float64: 1e-13}


def of_dtype(dtype):
    return tuple(replace(table, dtype=dtype) for table in TABLES)


def alone(algorithm, dtype, ranks, rate=lambda step: 1.0):
    """Vectors by step, rank and table, gradients of weights as well; and the tables after all steps."""
    tables = of_dtype(dtype)
    modules = in_one_process(tables)
    make, options = ALGORITHMS[algorithm]
    optimizer = make(modules.parameters(), **options)
    seen = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = options["lr"] * rate(step)
        optimizer.zero_grad()
        total = torch.zeros(())
        given = {}
        for rank in range(ranks):
            for table in tables:
                given[rank, table.name] = batch(table, step, rank, ranks)
                vectors = torchs(table, modules[table.name].weight, *given[rank, table.name])
                seen.append(((step, rank, table.name), vectors.detach()))
                total = total + loss_of(vectors)
        total.backward()
        for (rank, name), own in given.items():
            if own[-1] is not None and own[-1].requires_grad:
                seen.append(((step, rank, f"{name}.weights"), own[-1].grad))
        with unchecked():
            optimizer.step()
    return dict(seen), {name: module.weight.detach() for name, module in modules.items()}


def train(algorithm, dtype, fused=False, rate=lambda step: 1.0):
    """The same on ranks: this rank's vectors and gradients of weights, and its tables made whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tables = of_dtype(dtype)
    module = sharded(tables)
    options = ALGORITHMS[algorithm][1]
    if fused:
        optimizer = module.fuse(algorithm, **options)
    else:
        optimizer = shardopt.keyed(algorithm, module.named_parameters(), **options)
    seen = {}
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = options["lr"] * rate(step)
        given = {table.name: batch(table, step, rank, ranks) for table in tables}
        actual = module(given)
        with unchecked():
            sum(loss_of(vectors) for vectors in actual.values()).backward()
        seen.update({(step, rank, name): vectors.detach() for name, vectors in actual.items()})
        for name, own in given.items():
            if own[-1] is not None and own[-1].requires_grad:
                seen[step, rank, f"{name}.weights"] = own[-1].grad
        for name, parameter in module.named_parameters():
            if fused:
                assert parameter.grad is None, name
            else:
                assert local_tensors(parameter.grad)[0].is_sparse, name
        with unchecked():
            optimizer.step()
        optimizer.zero_grad()
    return seen, {table.name: getattr(module, table.name).weight.detach().full_tensor() for table in tables}


def assert_near(actual, wanted, name, relative):
    """The largest difference, relative to the largest element."""
    assert actual.shape == wanted.shape, name
    assert actual.dtype == wanted.dtype, name
    if wanted.numel():
        assert (actual - wanted).abs().max() <= relative * wanted.abs().max(), name


def train_all(algorithms):
    return {(algorithm, dtype): train(algorithm, dtype) for algorithm in algorithms for dtype in RELATIVE}


@pytest.mark.parametrize(
    ("ranks", "algorithms"),
    [
        (3, ["sparseadam", "rowwiseadagrad"]),
        (4, ["sparseadam"]),
        *(pytest.param(ranks, list(ALGORITHMS), marks=pytest.mark.exhaustive) for ranks in (1, 2, 3, 4)),
    ],
)
def test_trains_as_one_process_does(ranks, algorithms):
    """Vectors, gradients of weights, and tables after all steps."""
    results = run_ranks(ranks, train_all, algorithms)
    for algorithm, dtype in results[0]:
        wanted, tables = alone(algorithm, dtype, ranks)
        of_ranks = [result[algorithm, dtype] for result in results]
        assert {key for seen, _ in of_ranks for key in seen} == wanted.keys()
        for seen, actual in of_ranks:
            for key, value in seen.items():
                # Gradients of weights are inner products, in which terms cancel out.
                more = 10 if key[-1].endswith(".weights") else 1
                assert_near(value, wanted[key], (algorithm, *key), more * RELATIVE[dtype])
            for name, value in actual.items():
                assert_near(value, tables[name], (algorithm, name), RELATIVE[dtype])


def rising(step):
    """A schedule that a constant rate cannot be taken for."""
    return 1.0 + step


def fused_and_not(algorithm):
    seen, tables = train(algorithm, torch.float32, rate=rising)
    fused, own = train(algorithm, torch.float32, fused=True, rate=rising)
    constant = train(algorithm, torch.float32, fused=True)[1]
    assert any(not torch.equal(constant[name], own[name]) for name in own)
    differing = [name for name in tables if not torch.equal(tables[name], own[name])]
    return differing + [key for key in seen if not torch.equal(seen[key], fused[key])]


def all_fused_and_not():
    return {algorithm: fused_and_not(algorithm) for algorithm in ALGORITHMS}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_fused_into_backward_gives_the_same_bits(ranks):
    assert run_ranks(ranks, all_fused_and_not) == [{algorithm: [] for algorithm in ALGORITHMS}] * ranks


PAIR = (Table("left", 11, 4, mode="sum"), Table("right", 3, 2, mode="none"))
LOOKUPS = (
    {"left": (torch.tensor([1, 10, 1]), torch.tensor([0, 2])), "right": torch.tensor([[2, 2], [0, 1]])},
    {"left": (torch.tensor([1, 5]), torch.tensor([0, 2]))},
    {"right": torch.tensor([2])},
)


def several_lookups(fused):
    """Three lookups, in which tables and rows come again, and one backward for all of them."""
    module = sharded(PAIR)
    optimizer = (
        module.fuse("adagrad", lr=0.1) if fused else shardopt.keyed("adagrad", module.named_parameters(), lr=0.1)
    )
    for _ in range(2):
        actual = [module(lookup) for lookup in LOOKUPS]
        with unchecked():
            sum(loss_of(vectors) for own in actual for vectors in own.values()).backward()
            optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().full_tensor() for name, parameter in module.named_parameters()}


def several_in_one_process(ranks):
    modules = in_one_process(PAIR)
    optimizer = torch.optim.Adagrad(modules.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        losses = [
            loss_of(torchs(table, modules[table.name].weight, *(own if isinstance(own, tuple) else (own,))))
            for lookup in LOOKUPS
            for table in PAIR
            if (own := lookup.get(table.name)) is not None
        ]
        (ranks * sum(losses)).backward()
        with unchecked():
            optimizer.step()
    return {f"{name}.weight": module.weight.detach() for name, module in modules.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_all_lookups_before_one_backward_make_one_update(fused):
    wanted = several_in_one_process(2)
    for actual in run_ranks(2, several_lookups, fused):
        for name, value in wanted.items():
            assert_near(actual[name], value, name, 1e-6)


def gradients_of_two_backwards():
    """Their sum stays until it is dropped; a table that nobody looks up has none, nor has a frozen one."""
    module = sharded((*PAIR, Table("unused", 4, 2), Table("frozen", 4, 2)))
    module.frozen.weight.requires_grad_(False)
    for lookup in LOOKUPS:
        frozen = (torch.tensor([1]), torch.tensor([0])) if dist.get_rank() == 0 else (torch.tensor([]).long(),) * 2
        actual = module({**lookup, "frozen": frozen})
        sum(loss_of(vectors) for vectors in actual.values()).backward()
    assert module.unused.weight.grad is None
    assert module.frozen.weight.grad is None
    return {name: local_tensors(parameter.grad)[0].to_dense() for name, parameter in module.left.named_parameters()}


def test_gradients_add_up_until_they_are_dropped():
    modules = in_one_process(PAIR)
    for lookup in LOOKUPS:
        if "left" in lookup:
            loss_of(torchs(PAIR[0], modules["left"].weight, *lookup["left"])).mul(3).backward()
    actual = torch.cat([own["weight"] for own in run_ranks(3, gradients_of_two_backwards)])
    assert_near(actual, modules["left"].weight.grad.to_dense(), "left", 1e-6)


def subsets():
    """Each rank passes another table: gradients come to all that anybody passed, by ranks that passed none too."""
    module = sharded((*PAIR, Table("unused", 4, 2)), mean_gradients=True)
    lookup = [{"left": torch.tensor([[3, 4]])}, {"right": torch.tensor([0])}, {"left": torch.zeros(0, 3).long()}]
    actual = module(lookup[dist.get_rank()])
    assert actual.keys() == lookup[dist.get_rank()].keys()
    sum(vectors.sum() for vectors in actual.values()).backward()
    assert module.unused.weight.grad is None
    return [local_tensors(table.weight.grad)[0].to_dense() for table in (module.left, module.right)]


def test_ranks_may_look_up_in_different_tables():
    left, right = (torch.cat(parts) for parts in zip(*run_ranks(3, subsets), strict=True))
    third = torch.tensor(1 / 3).item()
    assert left.tolist() == [[third if row in (3, 4) else 0.0] * 4 for row in range(11)]
    assert right.tolist() == [[third if row == 0 else 0.0] * 2 for row in range(3)]


L, B = torch.tensor([0, 4]), torch.tensor([0, 1])
GOOD = {"users": torch.tensor([[0, 9]]), "items": (L, B)}


class Broken(dict):
    """An error that nobody has thought of."""

    def items(self):
        raise RuntimeError("nothing can be read here")


REFUSED = {
    "id": (
        {**GOOD, "items": (torch.tensor([0, 5, 7]), B)},
        ["items: found id 5 (and 1 more)", "ids from 0 to 4", "docs/tables.md, More rows"],
    ),
    "negative": ({**GOOD, "users": torch.tensor([[-1, 2]])}, ["users: found id -1", "ids from 0 to 9"]),
    "name": ({**GOOD, "user": L}, ["user: found", "['items', 'users']"]),
    "offsets": ({**GOOD, "items": (L, torch.tensor([0, 3]))}, ["items: found offsets [0, 3]", "within 2 ids"]),
    "dtype": ({**GOOD, "users": torch.tensor([[0.0, 9.0]])}, ["users: found ids of torch.float32"]),
    "call": (L, ["there are users, items"]),
    "layout": ({**GOOD, "users": torch.tensor([[1]]).to_sparse()}, ["users: found a torch.sparse_coo Tensor"]),
    "mapping": (Broken(), ["nothing can be read here"]),
}


def refuse_all():
    """One rank is given what cannot be looked up; afterwards all are still in step."""
    module = ShardedEmbeddingBag([Table("users", 10, 4), Table("items", 5, 2, mode="sum")], mesh())
    reported = {}
    for case, (bad, _) in REFUSED.items():
        with pytest.raises(RankError if case == "mapping" else InputError) as raised:
            module(bad if dist.get_rank() == 1 else GOOD)
        reported[case] = str(raised.value)
        assert module(GOOD)["users"].shape == (1, 4)
    return reported


def test_what_one_rank_cannot_look_up_all_refuse():
    first, *others = run_ranks(3, refuse_all, deadline_seconds=30)
    assert others == [first] * 2
    for case, (_, words) in REFUSED.items():
        for word in ("on rank 1", *words):
            assert word in first[case], case


def exchanges():
    """How often ranks talk: in a lookup in five tables, and in its backward."""
    module = sharded()
    calls = []
    real = dist.all_to_all_single
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            dist, "all_to_all_single", lambda *args, **kwargs: (calls.append(args[0].numel()), real(*args, **kwargs))[1]
        )
        actual = module({table.name: batch(table, 0, dist.get_rank(), dist.get_world_size()) for table in TABLES})
        forward = len(calls)
        sum(loss_of(vectors) for vectors in actual.values()).backward()
        backward = len(calls) - forward
        arrived = []
        for bags in (20, 2):
            module({"means": torch.zeros(bags, 100).long() if dist.get_rank() == 0 else torch.zeros(0, 1).long()})
            arrived.append(calls[-1])
    return forward, backward, *arrived


def test_all_tables_travel_together_and_as_rows_or_sums():
    """Counts, ids, vectors; gradients. For many bags of one id, its row of three float32, once; for two, their sums."""
    assert run_ranks(2, exchanges) == [(3, 1, 3 * 4, 2 * 3 * 4), (3, 1, 0, 0)]


def recomputed():
    """One rank wants the sums of two bags, the other ten different rows, of which torch's pooling saves where they are.
    Returns the sum of the gradients of this rank's rows."""
    module = sharded((PAIR[0],))
    ids = torch.arange(10).view(2, 5) if dist.get_rank() == 0 else torch.arange(10).view(10, 1)
    scale = torch.ones((), requires_grad=True)
    activation_checkpoint(lambda x: x.exp() + module(ids).sum(), scale, use_reentrant=False).backward()
    return float(local_tensors(module.left.weight.grad)[0].to_dense().sum())


def test_all_ranks_repeat_a_lookup_under_activation_checkpointing():
    assert sum(run_ranks(2, recomputed, deadline_seconds=30)) == 2 * 10 * PAIR[0].embedding_dim


class Model(nn.Module):
    """Tables with an optimizer fused into backward, and a dense layer with another one."""

    def __init__(self):
        super().__init__()
        self.tables = sharded(TABLES)
        torch.manual_seed(1)
        self.dense = nn.Linear(8, 1)

    def optimizer(self):
        dense = shardopt.keyed("adamw", {"weight": self.dense.weight, "bias": self.dense.bias}, lr=0.01)
        return CombinedOptimizer([("tables", self.tables.fuse("rowwiseadagrad", lr=0.1)), ("dense", dense)])


def step_fused(model, optimizer=None, steps=3):
    optimizer = optimizer or model.optimizer()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        actual = model.tables({table.name: batch(table, step, rank, ranks) for table in TABLES})
        with unchecked():
            (sum(loss_of(own) for own in actual.values()) + model.dense(actual["sums"]).sum()).backward()
        for parameter in model.dense.parameters():
            dist.all_reduce(parameter.grad)
        with unchecked():
            optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model, optimizer):
    state = {
        f"optimizer.{name}.{entry}": value.clone()
        for name, own in optimizer.state_dict()["state"].items()
        for entry, value in own.items()
    }
    both = {**{name: value.clone() for name, value in model.named_parameters()}, **state}
    return {
        name: value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()
        for name, value in both.items()
    }


def save(path):
    model, optimizer = step_fused(Model())
    checkpoint.save(path, {"model": model, "optimizer": optimizer})
    saved = everything(model, optimizer)
    return saved, everything(*step_fused(model, optimizer))


def load(path):
    model, optimizer = step_fused(Model(), steps=1)  # from other values
    checkpoint.load(path, {"model": model, "optimizer": optimizer})
    loaded = everything(model, optimizer)
    return loaded, everything(*step_fused(model, optimizer))


def test_what_four_ranks_saved_three_and_one_load_bit_for_bit(tmp_path):
    """And train on: on as many ranks with the same bits, too."""
    saved, trained = run_ranks(4, save, str(tmp_path / "saved"))[0]
    names = {f"{part}{name}" for name in ("tables.sums.weight", "tables.none.weight") for part in ("", "optimizer.")}
    assert {f"{name}.sum" if "optimizer" in name else name for name in names} <= saved.keys()
    for ranks in (4, 3, 1):
        for loaded, after in run_ranks(ranks, load, str(tmp_path / "saved")):
            assert loaded.keys() == saved.keys()
            assert [name for name in saved if not torch.equal(loaded[name], saved[name])] == []
            if ranks == 4:
                assert [name for name in trained if not torch.equal(after[name], trained[name])] == []


def torn():
    model, optimizer = step_fused(Model(), steps=1)
    before = everything(model, optimizer)
    PartialLoad(optimizer, "a load").begin()
    vectors = model.tables({"sums": torch.tensor([[1, 40]])})["sums"]
    with pytest.raises(PartialLoadError, match="a load did not end well"):
        vectors.sum().backward()
    after = everything(model, optimizer)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    PartialLoad(optimizer, "").end(mends=True)
    with unchecked():
        model.tables({"sums": torch.tensor([[1, 2]])})["sums"].sum().backward()
    after = everything(model, optimizer)
    changed = (before["tables.sums.weight"] != after["tables.sums.weight"]).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2]  # and nothing of the backward that was refused
    return True


def test_backward_refuses_while_a_load_is_not_whole():
    assert run_ranks(2, torn) == [True] * 2


def rates():
    """How far a row goes with each backward, by rates of a schedule, of a warm-up, and of a group that is changed."""
    tables = sharded(PAIR)
    optimizer = tables.fuse("sgd", lr=1.0, groups=[{"match": "right", "lr": 0.5}])
    warm = WarmupOptimizer(optimizer, [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.25)], lr=1.0)
    schedule = LambdaLR(warm, lambda step: 1.0 if step < 6 else 0.125)

    def move():
        before = [tables.left.weight.detach().full_tensor(), tables.right.weight.detach().full_tensor()]
        actual = tables({"left": torch.tensor([[dist.get_rank()]]), "right": torch.tensor([2])})
        (actual["left"].sum() + actual["right"].sum() / dist.get_world_size()).backward()
        after = [tables.left.weight.detach().full_tensor(), tables.right.weight.detach().full_tensor()]
        weights = [p.detach().clone() for p in tables.parameters()]
        warm.step()
        assert all(
            torch.equal(p.detach().to_local(), w.to_local()) for p, w in zip(tables.parameters(), weights, strict=True)
        )
        schedule.step()
        return tuple(float((b - a).max()) for b, a in zip(before, after, strict=True))

    return [move() for _ in range(7)]


def test_rates_hold_from_the_next_backward():
    full = [0.25, 0.4375, 0.625, 0.8125, 1.0, 1.0, 0.125]
    for actual in run_ranks(2, rates):
        assert actual == [pytest.approx((rate, rate / 2), rel=1e-6) for rate in full]


class Hybrid(nn.Module):
    """Tables beside a dense part that `fully_shard` takes."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        torch.manual_seed(1)
        self.dense = nn.Linear(4, 3)

    def forward(self, ids):
        return self.dense(self.tables(ids)).square().mean()


def hybrid(fused):
    """`fully_shard` averages gradients over ranks, and so do the tables."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Hybrid(sharded((PAIR[0],), mean_gradients=True))
    fully_shard(model, mesh=mesh(), ignored_params=set(model.tables.parameters()))
    dense = {name: parameter for name, parameter in model.named_parameters() if name.startswith("dense.")}
    rest = {name: parameter for name, parameter in model.named_parameters() if name not in dense}
    if fused:
        table = CombinedOptimizer([("tables", model.tables.fuse("rowwiseadagrad", lr=0.1))])
    else:
        table = shardopt.keyed("rowwiseadagrad", rest, lr=0.1)
    optimizer = CombinedOptimizer([table, shardopt.keyed("adamw", dense, lr=0.1)])
    assert sorted(optimizer.params) == sorted(name for name, _ in model.named_parameters())
    optimizer.init_state()
    for ids in BATCHES:
        model(ids.chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {
        name: value.full_tensor()
        for name, own in optimizer.state_dict()["state"].items()
        for value in [own["sum" if "tables" in name else "exp_avg"]]
    }
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}, state


BATCHES = torch.randint(11, (5, 6, 3), generator=torch.Generator().manual_seed(0))


def test_tables_beside_a_fully_sharded_model_train_as_one_process_does():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Embedding.from_pretrained(whole(PAIR[0]), freeze=False)

        def forward(self, ids):
            return torchs(PAIR[0], self.left.weight, ids.flatten(), torch.arange(len(ids)) * ids.shape[1])

    model = Hybrid(Alone())
    optimizer = shardopt.keyed(
        "adamw",
        model.named_parameters(),
        lr=0.1,
        groups=[{"match": "tables", "algorithm": "rowwiseadagrad", "lr": 0.1}],
    )
    for ids in BATCHES:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    for fused in (False, True):
        for actual, state in run_ranks(2, hybrid, fused):
            for name, parameter in model.named_parameters():
                assert_near(actual[name], parameter.detach(), name, 1e-5)
            assert state.keys() == actual.keys()
            assert state["tables.left.weight"].shape == (11, 1)
            assert state["tables.left.weight"].dtype == torch.float32
