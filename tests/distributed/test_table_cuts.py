"""Tables under every cut on real ranks: what one process computes, and all replicas the same bits."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardopt
from shardopt import checkpoint
from shardopt.errors import GradientError, StateError
from shardopt.nn import Grid, ShardedEmbeddingBag, Table
from shardopt.sharding.view import assemble, local_tensors, view_of
from tests.harness import run_ranks
from tests.support.embeddings import STEPS, batch, in_one_process, loss_of, sharded, torchs, unchecked, whole
from tests.support.placement import at

RANKS_STAY = True

TABLES = (
    Table("sums", 41, 8, mode="sum"),
    Table("means", 7, 3),
    Table("short", 2, 5, mode="sum"),
    Table("none", 12, 4, mode="none"),
    Table("padded", 9, 6, padding_idx=4),
)
FP64 = tuple(replace(table, dtype=torch.float64) for table in TABLES)
NAMED = ("rows", "columns", "whole", "replicated")
OPTIONS = {
    "sgd": {"lr": 0.01},
    "adagrad": {"lr": 0.1},
    "sparseadam": {"lr": 0.01},
    "rowwiseadagrad": {"lr": 0.1},
    "rowwiseadam": {"lr": 0.01},
}


def grids(ranks):
    """Grids over some of the ranks and over all."""
    return {
        1: [Grid()],
        2: [Grid(1, 2), Grid(2, 1, (0, 1)), Grid(1, 1, (1,))],
        3: [Grid(1, 2, (0, 2)), Grid(2, 1, (1, 2))],
        4: [Grid(2, 2), Grid(1, 2, (1, 3)), Grid(3, 1, (0, 2, 3))],
    }[ranks]


def cuts_of(ranks):
    """Each cut for all tables; then tables that are cut each in another way."""
    every = [*NAMED, *grids(ranks)]
    same = [(cut,) * len(TABLES) for cut in every]
    mixed = [tuple(every[(at + shift) % len(every)] for at in range(len(TABLES))) for shift in range(len(every))]
    return [*same, *mixed]


def with_cuts(cuts):
    return tuple(replace(table, cut=cut) for table, cut in zip(FP64, cuts, strict=True))


@cache
def one_process(algorithm, ranks):
    """The tables after all steps, with the batches of all ranks, and the optimizer's state by key."""
    modules = in_one_process(FP64)
    optimizer = shardopt.keyed(algorithm, modules.named_parameters(), **OPTIONS[algorithm])
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for rank in range(ranks):
            for table in FP64:
                total = total + loss_of(torchs(table, modules[table.name].weight, *batch(table, step, rank, ranks)))
        total.backward()
        with unchecked():
            optimizer.step()
    return {name: whole.detach() for name, whole in modules.named_parameters()}, tensors_of(optimizer)


def tensors_of(optimizer):
    return {
        f"{name}.{key}": value
        for name, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def made_whole(tensors):
    """Tensors from the pieces of all ranks; replicas have to have the same bits. Collective."""
    own = {}
    for key, tensor in tensors.items():
        view = view_of(tensor)
        own[key] = view.shape, view.dtype, [(at(piece.box), piece.tensor.detach().clone()) for piece in view.pieces]
    gathered = [own]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
    found = {}
    for key, (shape, dtype, pieces) in (item for rank in gathered for item in rank.items()):
        into = found.setdefault(key, torch.full(shape, torch.nan, dtype=dtype))
        for where, values in pieces:
            assert into[where].isnan().all() or torch.equal(into[where], values), f"replicas of {key} differ"
            into[where] = values
    return found


def mesh_of(groups):
    ranks = dist.get_world_size() // groups
    return init_device_mesh("cpu", (ranks,) if groups == 1 else (groups, ranks))


def train(cuts, algorithm, fused, groups=1):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tables = with_cuts(cuts)
    module = sharded(tables, mesh_of(groups))
    if fused:
        optimizer = module.fuse(algorithm, **OPTIONS[algorithm])
    else:
        optimizer = shardopt.keyed(algorithm, module.named_parameters(), **OPTIONS[algorithm])
    for step in range(STEPS):
        vectors = module({table.name: batch(table, step, rank, ranks) for table in tables})
        with unchecked():
            sum(loss_of(each) for each in vectors.values()).backward()
            optimizer.step()
        optimizer.zero_grad()
    return made_whole(dict(module.named_parameters())), made_whole(tensors_of(optimizer))


def train_all(cuts, algorithms, groups=1):
    return {
        (how, algorithm, fused): train(how, algorithm, fused, groups)
        for how in cuts
        for algorithm in algorithms
        for fused in (False, True)
    }


def assert_near(actual, wanted, what):
    assert actual.shape == wanted.shape, what
    if wanted.numel():
        assert (actual - wanted).abs().max() <= 1e-12 * max(wanted.abs().max(), 1), what


def compare(results, ranks):
    for (cuts, algorithm, fused), (tables, state) in results.items():
        wanted, own = one_process(algorithm, ranks)
        assert state.keys() == own.keys()
        for name in wanted:
            assert_near(tables[name], wanted[name], (cuts, algorithm, fused, name))
        for key in own:
            assert_near(state[key], own[key], (cuts, algorithm, fused, key))


def few(ranks):
    """Every cut of every table once, in turn with the algorithms."""
    return [
        (how, [algorithm]) for how, algorithm in zip(cuts_of(ranks)[len(grids(ranks)) + 4 :], OPTIONS, strict=False)
    ]


def all_of(ranks):
    return [(how, list(OPTIONS)) for how in cuts_of(ranks)]


def train_each(cases, groups=1):
    return [train_all([how], algorithms, groups) for how, algorithms in cases]


@pytest.mark.parametrize(
    ("ranks", "groups", "cases"),
    [
        (4, 1, few),
        (4, 2, few),
        *(pytest.param(ranks, 1, all_of, marks=pytest.mark.exhaustive) for ranks in (1, 2, 3, 4)),
        *(pytest.param(4, groups, all_of, marks=pytest.mark.exhaustive) for groups in (2, 4)),
    ],
)
def test_each_cut_trains_as_one_process_does(ranks, groups, cases):
    """Two groups are replicas of one another, and cut tables over the ranks that each has."""
    for of_rank in run_ranks(ranks, train_each, cases(ranks // groups), groups, deadline_seconds=300):
        for results in of_rank:
            compare(results, ranks)


def drawn(cuts):
    found = []
    for how in cuts:
        torch.manual_seed(7)
        module = ShardedEmbeddingBag(with_cuts(how), mesh_of(1))
        found.append((made_whole(dict(module.named_parameters())), torch.rand(())))
    return found


def test_first_values_are_the_same_under_each_cut():
    for of_rank in run_ranks(3, drawn, cuts_of(3)):
        (first, after), *others = of_rank
        for tensors, rest in others:
            assert torch.equal(rest, after) and all(torch.equal(tensors[name], first[name]) for name in first)


DIFFERENT = (
    (Table("users", 20, 8), Table("users", 20, 8, cut="columns")),
    (Table("users", 20, 8), Table("users", 21, 8)),
    (Table("users", 20, 8, cut=Grid(1, 1, (0,))), Table("users", 20, 8, cut=Grid(1, 1, (1,)))),
    ((Table("users", 20, 8),), (Table("users", 21, 8), Table("items", 5, 4))),
    (Table("users", 20, 8, dtype=torch.float64), Table("users", 20, 8, dtype=torch.float32)),
)


def refuse_different():
    reported = []
    for tables in DIFFERENT:
        module = ShardedEmbeddingBag(tables[dist.get_rank()], mesh_of(1))
        with pytest.raises(StateError) as raised:
            module({"users": torch.tensor([[1, 2]])})
        reported.append(str(raised.value))
    return reported


def test_ranks_with_different_tables_refuse_a_lookup():
    """Without it some would wait for one another, and some get other rows."""
    first, second = run_ranks(2, refuse_different, deadline_seconds=30)
    assert first == second
    for words in first:
        assert "tables on rank 1: found users: 2" in words and "required as on rank 0: users: 20 x 8" in words
    assert "found items: 5 x 4" in first[3]
    assert "found users: 20 x 8, cut 'rows', mode 'mean', padding_idx None, of torch.float32" in first[4]


def refuse_replicas_drawn_apart():
    """Looks up replicas under each mesh that has some, drawn with seeds of the ranks; and again once they are equal."""
    found = []
    for groups, cut in ((1, "replicated"), (2, "rows"), (2, "whole"), (2, "replicated")):
        torch.manual_seed(dist.get_rank())
        module = ShardedEmbeddingBag([Table("own", 20, 8, cut=cut), Table("other", 20, 8)], mesh_of(groups))
        ids = {"own": torch.tensor([[1, 2]])}
        with pytest.raises(StateError, match=r"replicas of tables differ \[replicas-differ\]") as raised:
            module(ids)
        found.append(str(raised.value).count("found other rows on rank 1 than on rank 0"))
        torch.manual_seed(0)
        module.reset_parameters()
        module(ids)
    return found


def test_replicas_that_ranks_drew_apart_refuse_a_lookup():
    assert run_ranks(2, refuse_replicas_drawn_apart, deadline_seconds=30) == [[1, 2, 2, 2]] * 2


def fused_columns():
    """What a fused step by columns exchanges; and what happens where one rank's options refuse the gradient."""
    module = ShardedEmbeddingBag(Table("users", 20, 8, mode="sum", cut="columns"), mesh_of(1))
    optimizer = module.fuse("rowwiseadagrad", lr=0.1)
    counts, reduce = [], dist.all_reduce

    def counted(*args, **kwargs):
        counts.append(1)
        return reduce(*args, **kwargs)

    def step():
        with unchecked():
            module(torch.tensor([[1, 2 + dist.get_rank()]])).sum().backward()

    dist.all_reduce = counted
    try:
        step()
    finally:
        dist.all_reduce = reduce
    before = module.users.weight.to_local().clone()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(GradientError) as raised:
        step()
    return len(counts), str(raised.value), torch.equal(module.users.weight.to_local(), before)


def test_a_fused_step_by_columns_has_one_collective_and_refuses_on_all_ranks():
    """The ranks know that their gradients have the same rows, and send squares with who refuses."""
    first, second = run_ranks(2, fused_columns, deadline_seconds=30)
    assert (first[0], second[0]) == (1, 1) and first[2] and second[2]
    assert "weight_decay=0.5" in second[1] and "another rank refuses" in first[1]


def step_dense():
    """Muon on a table that is whole on rank 1, with a gradient that is dense."""
    module = sharded((Table("whole", 6, 4, cut=Grid(1, 1, (1,))),), mesh_of(1))
    weight = module.whole.weight
    optimizer = shardopt.keyed("muon", module.named_parameters(), lr=0.1)
    weight.grad = assemble(weight, [torch.ones_like(local) for local in local_tensors(weight)])
    optimizer.step()
    return made_whole({"whole": weight})["whole"]


def test_algorithms_on_matrices_step_a_table_that_is_whole_on_one_rank():
    """Its mesh has no process group to be found."""
    alone = torch.nn.Parameter(whole(Table("whole", 6, 4)))
    alone.grad = torch.ones_like(alone)
    torch.optim.Muon([alone], lr=0.1).step()
    for found in run_ranks(2, step_dense):
        assert torch.equal(found, alone)


def islands(cuts):
    """Two islands of two ranks, which meet every three steps; returns the tables of this rank's island."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "island"))
    module = sharded(with_cuts(cuts), mesh["island"])
    options = {"process_group": mesh["island"], **OPTIONS["rowwiseadagrad"]}
    inner = shardopt.keyed("rowwiseadagrad", module.named_parameters(), **options)
    optimizer = shardopt.SemiSync(inner, every=3, process_group=mesh["across"])
    for step in range(6):
        vectors = module({table.name: batch(table, step % STEPS, dist.get_rank(), 4) for table in module.tables})
        with unchecked():
            sum(loss_of(each) for each in vectors.values()).backward()
            optimizer.step()
        optimizer.zero_grad()
    return made_whole(dict(module.named_parameters()))


@pytest.fixture(scope="module")
def islands_by_rows():
    return run_ranks(4, islands, ("rows",) * 5)[0]


@pytest.mark.parametrize("cuts", [("columns",) * 5, (Grid(1, 2), "rows", "replicated", "columns", "columns")])
def test_islands_with_replicas_of_tables_meet_under_each_cut(islands_by_rows, cuts):
    """`made_whole` finds the same bits on both islands, as a meeting is the last step."""
    wanted = islands_by_rows
    for found in run_ranks(4, islands, cuts):
        for name in wanted:
            assert_near(found[name], wanted[name], name)


def save_under(cuts, algorithm, url, steps=3):
    """Trains some steps under a cut, saves, and goes on; returns the tables and the state after the rest."""
    module = sharded(with_cuts(cuts), mesh_of(1))
    optimizer = module.fuse(algorithm, **OPTIONS[algorithm])
    for step in range(STEPS):
        if step == steps:
            checkpoint.save(url, {"tables": module, "optimizer": optimizer})
        one_step(module, step)
    return made_whole(dict(module.named_parameters())), made_whole(tensors_of(optimizer))


def one_step(module, step, batches=4):
    """A step with the batches of four ranks, whatever the number of ranks: each has every so many of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss = torch.zeros(())
    for number in range(batches):
        mine = number % ranks == rank
        given = {t.name: batch(t, step, number, batches) if mine else nothing(t) for t in module.tables}
        loss = loss + sum(loss_of(each) for each in module(given).values())
    with unchecked():
        loss.backward()


def nothing(table):
    empty = torch.zeros(0, dtype=torch.int64)
    return (empty,) if table.mode == "none" else (empty, empty)


def resume_under(cuts, algorithm, url, steps=3):
    module = ShardedEmbeddingBag(with_cuts(cuts), mesh_of(1))
    optimizer = module.fuse(algorithm, **OPTIONS[algorithm])
    before = [local.data_ptr() for each in module.parameters() for local in local_tensors(each)]
    checkpoint.load(url, {"tables": module, "optimizer": optimizer}, init_state=True)
    assert before == [local.data_ptr() for each in module.parameters() for local in local_tensors(each)]
    for step in range(steps, STEPS):
        one_step(module, step)
    return made_whole(dict(module.named_parameters())), made_whole(tensors_of(optimizer))


def save_each(cuts, algorithms, folder):
    return {
        (at, algorithm): save_under(how, algorithm, f"{folder}/{algorithm}-{at}")
        for at, how in enumerate(cuts)
        for algorithm in algorithms
    }


def resume_each(cuts, algorithms, folder, sources):
    return {
        (source, how, algorithm): resume_under(how, algorithm, f"{folder}/{algorithm}-{source}")
        for source in sources
        for how in cuts
        for algorithm in algorithms
    }


@pytest.mark.parametrize(
    ("ranks", "algorithms"),
    [
        ((4, 3), ["rowwiseadagrad"]),
        *(
            pytest.param((first, then), list(OPTIONS), marks=pytest.mark.exhaustive)
            for first, then in ((4, 4), (4, 3), (2, 4), (3, 1), (1, 2))
        ),
    ],
)
@pytest.mark.timeout(1800)
def test_a_checkpoint_of_each_cut_resumes_under_each_other(tmp_path, ranks, algorithms):
    first, then = ranks
    whole = len(algorithms) > 1
    sources = cuts_of(first) if whole else [cuts_of(first)[-1]]
    targets = cuts_of(then) if whole else [each for each in cuts_of(then) if each[0] != each[1]]
    saved = run_ranks(first, save_each, sources, algorithms, str(tmp_path), deadline_seconds=900)[0]
    urls = str(tmp_path), range(len(sources))
    resumed = run_ranks(then, resume_each, targets, algorithms, *urls, deadline_seconds=900)[0]
    for (source, how, algorithm), found in resumed.items():
        for tensors, wanted in zip(found, saved[source, algorithm], strict=True):
            assert tensors.keys() == wanted.keys()
            for key in wanted:
                assert_near(tensors[key], wanted[key], (source, how, algorithm, key))


CHAIN = ("rows", "columns", Grid(2, 1), "whole", "replicated", "columns")
LARGE = Table("large", 20_000, 8, mode="sum", dtype=torch.float64)  # of many segments, so that saves write rows of it
LINKS = 500


def chained(cuts):
    return [replace(table, cut=cut) for table, cut in zip((*FP64, LARGE), cuts, strict=True)]


def save_chain(root, at):
    """Steps of which each is saved on top of the one before it; returns what there was at some of them."""
    module = ShardedEmbeddingBag(chained(CHAIN), mesh_of(1))
    optimizer = module.fuse("rowwiseadam", **OPTIONS["rowwiseadam"])
    found, nbytes = {}, []
    with checkpoint.Manager(root, incremental=True) as manager:
        for step in range(1, at[-1] + 1):
            one_step(module, step % STEPS)
            nbytes.append(manager.save(step, {"tables": module, "optimizer": optimizer}).bytes_total)
            if step in at:
                found[step] = made_whole(dict(module.named_parameters())), made_whole(tensors_of(optimizer))
    return found, nbytes


def load_links(cuts, root, at):
    found = {}
    for step in at:
        module = ShardedEmbeddingBag(chained(cuts), mesh_of(1))
        optimizer = module.fuse("rowwiseadam", **OPTIONS["rowwiseadam"])
        checkpoint.load(
            checkpoint.Manager(root).path(step), {"tables": module, "optimizer": optimizer}, init_state=True
        )
        found[step] = made_whole(dict(module.named_parameters())), made_whole(tensors_of(optimizer))
    return found


@pytest.mark.parametrize("links", [12, pytest.param(LINKS, marks=pytest.mark.exhaustive)])
@pytest.mark.timeout(1800)
def test_each_link_of_a_chain_of_saves_is_restored_under_other_cuts(tmp_path, links):
    at = sorted({1, 2, links // 2, links - 1, links})
    saved, nbytes = run_ranks(4, save_chain, str(tmp_path), at, deadline_seconds=900)[0]
    assert sorted(nbytes)[links // 2] < 0.1 * nbytes[0]  # now and then a save makes long chains whole
    for cuts in [(cut,) * len(CHAIN) for cut in NAMED][: 4 if links > 12 else 1]:
        for step, found in run_ranks(3, load_links, cuts, str(tmp_path), at, deadline_seconds=900)[0].items():
            for tensors, wanted in zip(found, saved[step], strict=True):
                assert tensors.keys() == wanted.keys()
                assert [key for key in wanted if not torch.equal(tensors[key], wanted[key])] == [], (cuts, step)
