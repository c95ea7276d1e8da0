"""Row-wise state of torchrec's tables: from every cut to every other, to our tables and plain torch, and back.

Every resumed run is compared with one by hand, in plain torch: it begins with the same numbers, of which it makes the
mean over the parts of a row, and moves each part of the columns by its own.
"""

import importlib
import importlib.util
import itertools
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.nn import ShardedEmbeddingBag, Table
from shardopt.optim import RowWiseAdagrad
from tests.harness import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None,
    reason="torchrec and fbgemm_gpu are not installed (launch/test_integrations.sh)",
)

PLANS = ("row-wise", "table-wise", "first-rank", "column-wise", "data-parallel")
RANKS = dict.fromkeys(PLANS, 2) | {"grid": 4}
SAVED_AT, STEPS, DEADLINE = 4, 8, 300
# Where each library has the state of a table's rows, for `rename`; in plain torch it is under the name that ours has.
OF_TORCHREC = r"tables.state.tables.embedding_bags.\1.weight.\1.momentum1"
OF_REPLICATED = r"dense.state.tables.embedding_bags.\1.weight.sum"
OF_OURS = r"tables.state.\1.weight.sum"
OF_PLAIN = r"tables.state.tables.embedding_bags.\1.weight.sum"
STEP = re.compile(r"(^|\.)(step|lr|param_groups\..*|__.*)$")


def rename(old, new):
    """The rule that makes of one library's name of row state another's."""
    first, *others = map(re.escape, old.split(r"\1"))
    return {"^" + first + r"(\w+)" + r"\1".join(others) + "$": new}


def how_to_load(old, new):
    """The options of a load between libraries: of each table only its row state fits."""
    if old == new:
        return {"strict": Strictness(row_state="merge")}
    tables = r"^tables\.(param_groups\.|.*\.step$)|^dense\.(param_groups|state)\.tables\..*(?<!\.sum)$"
    return {"rename": rename(old, new), "skip": tables, "strict": Strictness(missing=STEP, row_state="merge")}


def example():
    import warnings

    warnings.simplefilter("ignore")  # of torchrec, about what it will remove
    return importlib.import_module("integrations.torchrec_tables")


def cut_as_grid(model, _, device):
    """Shards each table over two hosts of two ranks: a half of the columns on each, whose ranks share the rows."""
    rates, planning = example(), importlib.import_module("torchrec.distributed.sharding_plan")

    def of_table(parameter, hosts_ranks, ranks, device_type, sharder):
        cuts = planning.calculate_shard_sizes_and_offsets(
            parameter, ranks, hosts_ranks, "grid_shard", col_wise_shard_dim=rates.WIDTH // 2
        )
        placed = [(size, offset, rank) for rank, (size, offset) in enumerate(zip(*cuts, strict=True))]
        return planning._get_parameter_sharding(parameter, "grid_shard", placed, hosts_ranks, device_type, sharder)

    sharder = rates.EmbeddingBagCollectionSharder()
    plan = planning.construct_module_sharding_plan(
        model.tables, dict.fromkeys(rates.ROWS, of_table), sharder, 2, dist.get_world_size(), device_type=device.type
    )
    return rates.DistributedModelParallel(
        model, device=device, plan=rates.ShardingPlan({"tables": plan}), sharders=[sharder], init_data_parallel=True
    )


def train(root, plan, steps=STEPS - 1, **how):
    """Trains torchrec's tables by row-wise Adagrad as the example does; returns the losses after SAVED_AT."""
    rates = example()
    if plan == "grid":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        rates.sharded = cut_as_grid
    fused = importlib.import_module("torchrec.optim.rowwise_adagrad").RowWiseAdagrad
    losses = rates.train(root, plan, steps, fused=fused, replicated=RowWiseAdagrad, **how)
    return {step: loss for step, loss in losses.items() if step > SAVED_AT}


def save_each(folder, plans):
    for plan in plans:
        train(f"{folder}/{plan}", plan, SAVED_AT)


def load_each(folder, sources, plans):
    """Resumes from each source under each plan; returns the losses by source and plan."""
    found = {}
    for source, plan in itertools.product(sources, plans):
        names = [OF_REPLICATED if each == "data-parallel" else OF_TORCHREC for each in (source, plan)]
        begin = f"{folder}/{source}/step-{SAVED_AT:08d}"
        run = f"{folder}/on-{source}-{plan}"
        found[source, plan] = train(run, plan, begin=begin, **how_to_load(*names))
    return found


class ByHand:
    """The example's model, its tables in parts of their columns, each of which has its own row-wise Adagrad."""

    def __init__(self, begin, parts, old):
        rates = example()
        self.over = torch.nn.Linear(rates.WIDTH * len(rates.ROWS), 1)
        self.dense = shardopt.keyed("adam", self.over.named_parameters(prefix="over"), lr=0.01)
        self.data = shardopt.ResumableSampler(60, batch_size=rates.BATCH)
        app = {"model": {"over": self.over}, "dense": self.dense, "data": self.data}
        checkpoint.load(begin, app, init_state=True, strict=Strictness(unexpected="ignore"))
        self.tables = {}
        with checkpoint.open(begin) as reader:
            for name, rows in rates.ROWS.items():
                weight = reader.read(f"model.tables.embedding_bags.{name}.weight")
                numbers = reader.read(old.replace(r"\1", name)).view(-1, rows, 1)
                if len(numbers) != parts:
                    numbers = numbers.mean(dim=0).expand(parts, rows, 1)
                self.tables[name] = [
                    (columns.clone().requires_grad_(), sums.clone())
                    for columns, sums in zip(weight.chunk(parts, dim=1), numbers, strict=True)
                ]

    def loss(self, samples):
        ids, wanted = example().batch_of(samples, torch.device("cpu"))
        of_tables = [
            torch.nn.functional.embedding_bag(ids[name].values().view(-1, 2), columns, mode="sum")
            for name, parts in self.tables.items()
            for columns, _ in parts
        ]
        return torch.nn.functional.mse_loss(self.over(torch.cat(of_tables, dim=1)), wanted)

    @torch.no_grad()
    def step(self):
        for columns, sums in itertools.chain.from_iterable(self.tables.values()):
            sums += columns.grad.square().mean(dim=1, keepdim=True)
            columns -= 0.1 * columns.grad / (sums.sqrt() + 1e-8)
            columns.grad = None
        self.dense.step()
        self.dense.zero_grad()


def train_by_hand(begin, parts, old, steps=STEPS - 1):
    """Resumes by hand from anybody's checkpoint; returns the losses by step."""
    run, losses = ByHand(begin, parts, old), {}
    while SAVED_AT + len(losses) < steps:
        for samples in run.data.through(run.data):
            loss = run.loss(samples)
            loss.backward()
            run.step()
            losses[SAVED_AT + 1 + len(losses)] = loss.item()
            if SAVED_AT + len(losses) == steps:
                break
    return losses


def expect_each(folder, sources, parts, old):
    begin = f"/step-{SAVED_AT:08d}"
    return {
        (source, n): train_by_hand(folder + f"/{source}{begin}", n, old[source]) for source in sources for n in parts
    }


class Rates(torch.nn.Module):
    """The example's model with our tables or plain ones, under the names that torchrec's have."""

    def __init__(self, tables):
        super().__init__()
        self.tables = torch.nn.Module()
        self.tables.embedding_bags = tables
        self.over = torch.nn.Linear(example().WIDTH * len(example().ROWS), 1)

    def forward(self, ids):
        bags, by_table = self.tables.embedding_bags, {name: ids[name].values().view(-1, 2) for name in example().ROWS}
        if isinstance(bags, ShardedEmbeddingBag):
            of_tables = bags({name: (each, None) for name, each in by_table.items()})
        else:
            of_tables = {name: bags[name](each) for name, each in by_table.items()}
        return self.over(torch.cat([of_tables[name] for name in by_table], dim=1))


def train_other(begin, old, library, saved=None, steps=STEPS - 1):
    """Resumes with our tables ("ours"), or in plain torch ("plain"); returns the losses by step, and may save."""
    rates, ranks = example(), dist.get_world_size()
    if library == "ours":
        tables = [Table(name, rows, rates.WIDTH, mode="sum") for name, rows in rates.ROWS.items()]
        model = Rates(ShardedEmbeddingBag(tables, init_device_mesh("cpu", (ranks,)), mean_gradients=True))
        of_tables = model.tables.embedding_bags.fuse(RowWiseAdagrad, lr=0.1)
    else:
        bags = {name: torch.nn.EmbeddingBag(rows, rates.WIDTH, mode="sum") for name, rows in rates.ROWS.items()}
        model = Rates(torch.nn.ModuleDict(bags))
        of_tables = shardopt.keyed(RowWiseAdagrad, model.tables.named_parameters(prefix="tables"), lr=0.1)
    dense = shardopt.keyed("adam", model.over.named_parameters(prefix="over"), lr=0.01)
    data = shardopt.ResumableSampler(60, batch_size=rates.BATCH)
    app = {"model": model, "tables": of_tables, "dense": dense, "data": data, "step": 0}
    how = how_to_load(old, OF_OURS if library == "ours" else OF_PLAIN)
    report = checkpoint.load(begin, app, init_state=True, **how)
    losses = {}
    for samples in itertools.chain.from_iterable(data.through(data) for _ in itertools.count()):
        ids, wanted = rates.batch_of(samples, torch.device("cpu"))
        loss = torch.nn.functional.mse_loss(model(ids), wanted)
        loss.backward()
        for parameter in model.over.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        for optimizer in (of_tables, dense):
            optimizer.step()
            optimizer.zero_grad()
        app["step"] += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses[app["step"]] = mean.item() / ranks
        if app["step"] == steps:
            if saved is not None:
                checkpoint.save(saved, app)
            return losses, report.merged


def close(losses):
    return pytest.approx(losses, rel=1e-5)


def test_row_wise_state_goes_between_all_cuts_of_torchrec(tmp_path):
    folder, cuts = str(tmp_path), [*RANKS]
    old = {plan: OF_REPLICATED if plan == "data-parallel" else OF_TORCHREC for plan in cuts}
    run_ranks(2, save_each, folder, PLANS, deadline_seconds=DEADLINE)
    run_ranks(4, save_each, folder, ["grid"], deadline_seconds=DEADLINE)
    (expected,) = run_ranks(1, expect_each, folder, cuts, (1, 2), old, deadline_seconds=DEADLINE)
    found = run_ranks(2, load_each, folder, cuts, PLANS, deadline_seconds=DEADLINE)[0]
    found |= run_ranks(4, load_each, folder, cuts, ["grid"], deadline_seconds=DEADLINE)[0]
    assert len(found) == len(cuts) ** 2
    for (source, plan), losses in found.items():
        parts = 2 if plan in ("column-wise", "grid") else 1
        assert losses == close(expected[source, parts]), (source, plan)


@pytest.mark.parametrize("library", ["ours", "plain"])
@pytest.mark.parametrize("plan", ["column-wise", "row-wise", "grid"])
def test_row_wise_state_goes_from_torchrec_to_others_and_back(tmp_path, library, plan):
    folder, saved = str(tmp_path), str(tmp_path / "saved")
    begin = f"{folder}/{plan}/step-{SAVED_AT:08d}"
    run_ranks(RANKS[plan], save_each, folder, [plan], deadline_seconds=DEADLINE)
    (expected,) = run_ranks(1, train_by_hand, begin, 1, OF_TORCHREC, deadline_seconds=DEADLINE)
    ranks, own = (3, OF_OURS) if library == "ours" else (1, OF_PLAIN)
    losses, merged = run_ranks(ranks, train_other, begin, OF_TORCHREC, library, deadline_seconds=DEADLINE)[0]
    assert losses == close(expected)
    assert len(merged) == (0 if plan == "row-wise" else 2)
    run_ranks(ranks, train_other, begin, OF_TORCHREC, library, saved, SAVED_AT + 1, deadline_seconds=DEADLINE)
    parts = 1 if plan == "row-wise" else 2
    (expected,) = run_ranks(1, train_by_hand, saved, parts, own, STEPS - 2, deadline_seconds=DEADLINE)
    back = run_ranks(
        RANKS[plan],
        train,
        str(tmp_path / "back"),
        plan,
        begin=saved,
        **how_to_load(own, OF_TORCHREC),
        deadline_seconds=DEADLINE,
    )[0]
    assert [back[step] for step in range(SAVED_AT + 2, STEPS)] == close([*expected.values()])
