"""Incremental saves by several ranks: other numbers of ranks than the base had, stages, kills of real processes."""

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import ShardoptError
from tests.harness import each_operation, run_ranks, run_ranks_outcomes

RANKS_STAY = True

ROWS = 256  # of 1 KiB each: a segment
DEADLINE_SECONDS = 5.0


def whole(step):
    """What all ranks have: of which only one row of the table and the adapter change."""
    table = torch.arange(9 * ROWS * 256, dtype=torch.int32).reshape(-1, 256)
    table[ROWS * step] += 1
    return {"table": table, "wide": torch.arange(200_000.0).reshape(50, -1), "adapter": torch.full((9, 3), float(step))}


def state(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(tensor, *placements):
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    full = whole(step)
    return {
        "table": place(full["table"], Shard(0)),
        "columns": place(full["wide"], Shard(1)),
        "replicas": place(full["table"] + 1, Replicate()),
        "adapter": place(full["adapter"], Shard(0)),
        "plain": full["wide"],
        "step": step,
        "mine": checkpoint.PerRank(dist.get_rank(), "keep"),
    }


def save(root, step, base):
    report = checkpoint.save(f"{root}/{step}", state(step), base=base and f"{root}/{base}", durable=False)
    return report.bytes_unchanged, report.bytes_total


def save_and_load(root, steps):
    reports = [save(root, step, step - 1 or None) for step in steps]
    app, wanted = state(0), state(steps[-1])
    checkpoint.load(f"{root}/{steps[-1]}", app)
    for name, value in wanted.items():
        if isinstance(value, DTensor):
            assert torch.equal(app[name].to_local(), value.to_local()), name
        elif torch.is_tensor(value):
            assert torch.equal(app[name], value), name
    assert app["step"] == steps[-1]
    return reports


ON_TWO_THEN_THREE = {2: [1, 2], 3: [3]}


@pytest.mark.parametrize(
    "steps_on", [ON_TWO_THEN_THREE, pytest.param({4: [1], 1: [2], 3: [3, 4], 2: [5]}, marks=pytest.mark.exhaustive)]
)
def test_ranks_refer_to_what_others_wrote(tmp_path, steps_on):
    nbytes = sum(each.nbytes for each in (*whole(0).values(), whole(0)["wide"], whole(0)["table"]))
    for ranks, steps in steps_on.items():
        by_rank = run_ranks(ranks, save_and_load, str(tmp_path), steps)
        for i, step in enumerate(steps):
            unchanged, total = sum(of_rank[i][0] for of_rank in by_rank), by_rank[0][i][1]
            if i > 0:  # on as many ranks as before; of rows that others wrote only whole segments are referred to
                least = 0.8 if step == 2 else 0.7
                assert unchanged > least * nbytes and total < (1 - least) * nbytes
            elif step > 1:  # rows, as far as they lie in files of which much is in use
                assert unchanged > 0.2 * nbytes
            checkpoint.verify(tmp_path / str(step)).raise_if_damaged()


def save_stage(root, step, base):
    """Each rank has parameters of its own, and one that all have."""
    rank = dist.get_rank()
    model = {f"stage{rank}": torch.full((70_000,), float(rank)), f"head{rank}": torch.full((5,), float(step))}
    app = {"model": model, "shared": torch.ones(300), "step": step}
    report = checkpoint.save(f"{root}/{step}", app, base=base and f"{root}/{base}", durable=False)
    return report.bytes_unchanged


def test_ranks_that_have_different_things_refer_each_for_itself(tmp_path):
    for step in (1, 2, 3):
        unchanged = run_ranks(3, save_stage, str(tmp_path), step, step - 1 or None)
        assert step == 1 or all(each >= 4 * 70_000 for each in unchanged)
        with checkpoint.open(tmp_path / str(step)) as reader:
            for rank in range(3):
                assert reader.read(f"model.stage{rank}").eq(rank).all()
                assert reader.read(f"model.head{rank}").eq(step).all()
    manifest, _ = read_manifest(storage_of(tmp_path / "3"))
    assert {file.directory for file in manifest.referred_files} == {"1"}


def save_on(root, steps):
    manager = checkpoint.Manager(
        root, keep=1, options=checkpoint.SaveOptions(deadline_seconds=DEADLINE_SECONDS), incremental=True
    )
    app = small(0)
    manager.restore(app)
    for step in range(app["step"] + 1, steps + 1):
        manager.save(step, small(step))


def small(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {
        "frozen": torch.arange(600.0).reshape(60, 10),
        "adapter": torch.full((8,), float(step)),
        "drifting": drifted(step),
        "touched": touched(step),
    }
    placed = {key: distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for key, each in full.items()}
    return {**placed, "step": step}


def drifted(step):
    """A tensor of which each step changes a few elements everywhere: saves write deltas of it."""
    values = torch.arange(200_000, dtype=torch.int16)
    for each in range(1, step + 1):
        values[each::997] += 1
    return values


def touched(step):
    """A table of which each step touches some rows: the third save of a process knows them without the base."""
    table = torch.arange(4096 * 64, dtype=torch.int32).reshape(4096, 64)
    for each in range(1, step + 1):
        table[each::211] += 1
    return table


CALLS = ("os:open", "os:makedirs", "os:writev", "os:fsync", "os:link", "os:unlink", "os:rmdir", "os:listdir")


def sound_calls(root):
    run_ranks_outcomes(2, save_on, root, 2)
    return run_ranks_outcomes(2, save_on, root, 4, trace=CALLS)


def survive(root, fault):
    """Saves of which one is killed: all manifests are whole, and the run resumes."""
    run_ranks_outcomes(2, save_on, root, 2)
    outcomes = run_ranks_outcomes(2, save_on, root, 4, faults=[fault], deadline_seconds=DEADLINE_SECONDS + 25)
    assert outcomes[fault.rank].signal is not None
    assert all(isinstance(each.error, ShardoptError) for each in outcomes if each.rank != fault.rank and each.error)
    manager = checkpoint.Manager(root)
    steps = manager.steps()
    assert steps and steps[-1] >= 2
    for step in steps:
        checkpoint.verify(manager.path(step)).raise_if_damaged()
    assert all(each.ok for each in run_ranks_outcomes(2, save_on, root, 5))
    with checkpoint.open(manager.path(5)) as reader:
        assert torch.equal(reader.read("frozen"), torch.arange(600.0).reshape(60, 10))
        assert reader.read("adapter").eq(5).all()
        assert torch.equal(reader.read("drifting"), drifted(5))
        assert torch.equal(reader.read("touched"), touched(5))
        for key in ("drifting", "touched"):
            entries = reader.manifest.tensors[key].layout.entries
            assert entries and all(entry.deltas for entry in entries)
    return steps[-1]


def test_a_sample_of_kills_in_saves_and_retention(tmp_path):
    faults = each_operation(sound_calls(str(tmp_path / "sound")), "kill")
    survive(str(tmp_path / "killed"), random.Random(1).choice(faults))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_kill_in_saves_and_retention(tmp_path_factory):
    faults = each_operation(sound_calls(str(tmp_path_factory.mktemp("sound") / "root")), "kill")
    newest = Counter(survive(str(tmp_path_factory.mktemp("kill") / "root"), fault) for fault in faults)
    print(f"kills: {sum(newest.values())}, by the newest checkpoint that was left: {dict(newest)}")
    assert set(newest) == {2, 3, 4}
