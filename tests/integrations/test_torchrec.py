"""torchrec's own DistributedModelParallel, saved under one plan and loaded under others."""

import importlib
import importlib.util
import itertools
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks, run_ranks_outcomes
from tests.integrations.rank_faults import KILL, TERMINATE, at_step, exit_code_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None,
    reason="torchrec and fbgemm_gpu are not installed (launch/test_integrations.sh)",
)

ELEMENTWISE = ("row-wise", "table-wise", "first-rank", "column-wise")
SAVED_AT, STEPS, DEADLINE = 4, 8, 120
# FBGEMM's name for the sum of squares, and torch's; torch's Adagrad also counts steps, for a decay of its rate alone.
FUSED = r"^tables\.state\.(.+\.(\w+)\.weight)\.\2\.momentum1$"
REPLICATED = r"^dense\.state\.(tables\..+\.(\w+)\.weight)\.sum$"
OPTIONS = r"param_groups\.tables\.|^dense\.state\.tables\..*\.step$"
TO_REPLICATED = {"rename": {FUSED: r"dense.state.\1.sum"}, "strict": checkpoint.Strictness(missing="ignore")}
TO_FUSED = {"rename": {REPLICATED: r"tables.state.\1.\2.momentum1"}, "strict": checkpoint.Strictness(missing="ignore")}


def example():
    warnings.simplefilter("ignore")  # of torchrec, about what it will remove
    return importlib.import_module("integrations.torchrec_tables")


def train(root, plan, steps, fault=None, fused=None, **options):
    """Trains as the example does; returns the loss by step."""
    rates = example()
    if fused == "row-wise":
        options["fused"] = importlib.import_module("torchrec.optim.rowwise_adagrad").RowWiseAdagrad
    if fault is not None:
        options["on_step"] = at_step(*fault)
    return rates.train(root, plan, steps, **options)


def leave(root, plan, steps, fault):
    return exit_code_of(lambda: train(root, plan, steps, fault))


def save_each(folder, plans, fused):
    """Per plan: trains, which saves at SAVED_AT; returns the losses after that."""
    found = {}
    for plan in plans:
        losses = train(f"{folder}/{plan}-{dist.get_world_size()}", plan, STEPS - 1, fused=fused)
        found[plan] = [losses[step] for step in range(SAVED_AT + 1, STEPS)]
    return found


class Plain(torch.nn.Module):
    """The example's model in plain torch, under the same names."""

    def __init__(self, rows, width):
        super().__init__()
        self.tables = torch.nn.Module()
        bags = {name: torch.nn.EmbeddingBag(count, width, mode="sum") for name, count in rows.items()}
        self.tables.embedding_bags = torch.nn.ModuleDict(bags)
        self.over = torch.nn.Linear(width * len(rows), 1)

    def forward(self, ids):
        of_tables = [bag(ids[name].values().view(-1, 2)) for name, bag in self.tables.embedding_bags.items()]
        return self.over(torch.cat(of_tables, dim=1))


def train_plain(begin, steps, saved):
    """Resumes from torchrec's checkpoint on one rank in plain torch, and saves; returns the losses by step."""
    rates = example()
    model = Plain(rates.ROWS, rates.WIDTH)
    tables = shardopt.keyed("adagrad", model.tables.named_parameters(prefix="tables"), lr=0.1)
    dense = shardopt.keyed("adam", model.over.named_parameters(prefix="over"), lr=0.01)
    data = shardopt.ResumableSampler(60, batch_size=rates.BATCH)
    app = {"model": model, "tables": tables, "dense": dense, "data": data, "step": 0}
    how = {"rename": {FUSED: r"tables.state.\1.sum"}, "skip": r"^tables\.param_groups\."}
    report = checkpoint.load(begin, app, init_state=True, strict=checkpoint.Strictness(missing="ignore"), **how)
    assert all(key.startswith("tables.param_groups.") or key.endswith(".step") for key in report.missing), report
    losses = {}
    for samples in itertools.chain.from_iterable(data.through(data) for _ in itertools.count()):
        ids, wanted = rates.batch_of(samples, torch.device("cpu"))
        loss = torch.nn.functional.mse_loss(model(ids), wanted)
        loss.backward()
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad()
        app["step"] += 1
        losses[app["step"]] = loss.item()
        if app["step"] == steps:
            checkpoint.save(saved, app)
            return losses


def load_each(folder, sources, plans, fused):
    """Resumes from each source under each plan; returns the losses, by source and plan, or what was refused."""
    found = {}
    for source in sources:
        for plan in plans:
            run = f"{folder}/on-{source}-{plan}-{dist.get_world_size()}"
            if dist.get_rank() == 0:
                shutil.copytree(f"{folder}/{source}", run)
            dist.barrier()
            try:
                losses = train(run, plan, STEPS - 1, fused=fused)
                found[source, plan] = [losses[step] for step in range(SAVED_AT + 1, STEPS)]
            except MismatchError as error:
                if fused == "row-wise":
                    assert all('Strictness(row_state="merge")' in problem.remedy for problem in error.problems)
                found[source, plan] = sorted({problem.key for problem in error.problems})
    return found


def test_a_run_resumes_after_a_kill_on_one_rank_and_on_three_under_other_plans(tmp_path):
    whole, killed = str(tmp_path / "whole"), tmp_path / "killed"
    expected = run_ranks(2, train, whole, "row-wise", 12, deadline_seconds=DEADLINE)[0]
    outcomes = run_ranks_outcomes(2, train, str(killed), "row-wise", 12, fault=(1, 10, KILL), deadline_seconds=DEADLINE)
    assert not any(outcome.ok for outcome in outcomes)
    for ranks, plan, exact in ((2, "row-wise", True), (1, "first-rank", False), (3, "table-wise", False)):
        run = tmp_path / f"{ranks}"
        shutil.copytree(killed, run)
        losses = run_ranks(ranks, train, str(run), plan, 12, deadline_seconds=DEADLINE)[0]
        assert [*losses] == [9, 10, 11, 12]
        for step, loss in losses.items():
            assert loss == expected[step] if exact else loss == pytest.approx(expected[step], rel=1e-5)
        with checkpoint.open(f"{run}/step-00000012") as got, checkpoint.open(f"{whole}/step-00000012") as wanted:
            assert set(got.keys()) == set(wanted.keys())
            for key in sorted(wanted.keys()):
                one, other = got.read(key), wanted.read(key)
                if not isinstance(other, torch.Tensor):  # options, and the position in the data
                    assert one == other, key
                elif exact:
                    assert torch.equal(one, other), key
                else:
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=key)


def test_sigterm_saves_and_leaves(tmp_path):
    root = str(tmp_path / "run")
    assert run_ranks(2, leave, root, "table-wise", 50, (1, 6, TERMINATE), deadline_seconds=DEADLINE) == [143, 143]
    losses = run_ranks(1, train, root, "row-wise", 10, deadline_seconds=DEADLINE)[0]
    assert min(losses) in (7, 8, 9) and max(losses) == 10


@pytest.mark.exhaustive
def test_elementwise_state_goes_between_all_plans(tmp_path):
    losses = {}
    for ranks in (1, 2, 3):
        plans = ELEMENTWISE[:-1] if ranks == 3 else ELEMENTWISE
        found = run_ranks(ranks, save_each, str(tmp_path), plans, None, deadline_seconds=DEADLINE)[0]
        losses |= {f"{plan}-{ranks}": after for plan, after in found.items()}
    for ranks in (1, 2, 3):
        for (source, plan), got in run_ranks(
            ranks, load_each, str(tmp_path), [*losses], ELEMENTWISE[:3], None, deadline_seconds=300
        )[0].items():
            assert got == pytest.approx(losses[source], rel=1e-5), (source, plan, ranks)


def test_row_wise_state_of_columns_is_kept_and_refused_elsewhere_by_name(tmp_path):
    """A row's state of a part of the columns is another number than the whole row's: a strict load keeps them apart."""
    plans = ("column-wise", "row-wise", "first-rank")
    losses = run_ranks(2, save_each, str(tmp_path), plans, "row-wise", deadline_seconds=DEADLINE)[0]
    sources = [f"{plan}-2" for plan in plans]
    found = run_ranks(2, load_each, str(tmp_path), sources, plans, "row-wise", deadline_seconds=DEADLINE)[0]
    refused = [f"tables.state.tables.embedding_bags.{name}.weight.{name}.momentum1" for name in ("item", "user")]
    for (source, plan), got in found.items():
        before = source.removesuffix("-2")
        if (before == "column-wise") == (plan == "column-wise"):
            assert got == pytest.approx(losses[before], rel=1e-5), (source, plan)
        else:
            assert got == refused, (source, plan)


@pytest.mark.parametrize("plan", ["row-wise", "table-wise"])
def test_fused_tables_resume_as_data_parallel_ones_and_back(tmp_path, plan):
    """Elementwise: FBGEMM's sum of squares is torch's, which counts its steps besides, for a decay alone."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected = run_ranks(2, train, first, plan, 12, deadline_seconds=DEADLINE)[0]
    options = {"deadline_seconds": DEADLINE, "skip": OPTIONS}
    losses = run_ranks(2, train, second, "data-parallel", 8, begin=f"{first}/step-00000004", **TO_REPLICATED, **options)
    assert [*losses[0]] == [5, 6, 7, 8]
    back = run_ranks(
        2, train, str(tmp_path / "third"), plan, 12, begin=f"{second}/step-00000008", **TO_FUSED, **options
    )
    for step, loss in (losses[0] | back[0]).items():
        assert loss == pytest.approx(expected[step], rel=1e-5), step


def test_saved_in_torchrec_resumed_in_plain_torch_and_back(tmp_path):
    run, plain, back = (str(tmp_path / name) for name in ("run", "plain", "back"))
    expected = run_ranks(2, train, run, "row-wise", 12, deadline_seconds=DEADLINE)[0]
    (losses,) = run_ranks(1, train_plain, f"{run}/step-00000004", 8, plain, deadline_seconds=DEADLINE)
    how = {
        "rename": {REPLICATED.replace("dense", "tables"): r"tables.state.\1.\2.momentum1"},
        "skip": r"^tables\.(param_groups\.|state\..*\.step$)",
        "strict": checkpoint.Strictness(missing="ignore"),
    }
    losses |= run_ranks(3, train, back, "table-wise", 12, begin=plain, **how, deadline_seconds=DEADLINE)[0]
    assert losses == pytest.approx({step: expected[step] for step in range(5, 13)}, rel=1e-5)


def test_a_job_without_the_tables_of_a_rank_refuses_other_tables(tmp_path):
    """What no rank has a place for is refused, though one rank alone could not tell."""
    run_ranks(2, train, str(tmp_path / "run"), "first-rank", SAVED_AT, deadline_seconds=DEADLINE)
    found = run_ranks(2, load_each, str(tmp_path), ["run"], ["data-parallel"], None, deadline_seconds=DEADLINE)
    for problems in (found[0]["run", "data-parallel"],):
        assert "tables.*" in problems
