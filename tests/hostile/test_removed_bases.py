"""Saves that refer to others beside removals of these, interleaved at every operation, and killed at any.

Whatever happens, every manifest that is there is that of a whole checkpoint.
"""

import itertools
import shutil
from pathlib import Path

import fsspec
import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.run.manager import Manager
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import CheckpointError
from shardopt.world import world
from tests.harness.schedules import orders
from tests.hostile.test_two_jobs import LOCAL, METHODS, REMOTE, SYSTEM, names_that_repeat, order_noted  # noqa: F401  # the second last is a fixture

DECIDING = ["names", "publish_new", "remove"]  # calls that tell of others, or of which others tell
REQUESTS = ["shardopt.checkpoint.storage.retry:Requests.once"]


def app(step):
    drifting = torch.zeros(60_000, dtype=torch.int16)  # of which a save on a disk writes deltas
    for each in range(1, step + 1):
        drifting[each::9973] += 1
    half = torch.full((9,), float(step // 2))
    return {"frozen": torch.arange(20.0), "half": half, "drifting": drifting, "step": torch.tensor(step)}


class Root:
    """The root of a run, made anew for each order; on disk or in fsspec's memory."""

    def __init__(self, path, remote):
        self.path, self.remote, self.numbers = path, remote, itertools.count()
        self.calls = [(REMOTE if remote else LOCAL) + name for name in METHODS]
        self.operations = REQUESTS if remote else SYSTEM

    def renew(self, steps):
        """A root with steps, each of which refers to the one before."""
        world().restart()
        number = next(self.numbers)
        if self.remote:
            memory = fsspec.filesystem("memory")
            memory.store.clear()
            memory.pseudo_dirs[:] = [""]  # else each root of an order that is over would be listed beside the next
            self.url = f"memory://removed-bases/{number}"
        else:
            shutil.rmtree(self.path / str(number - 1), ignore_errors=True)
            self.url = str(self.path / str(number))
        for step in steps:
            self.save(step, step - 1 if step > steps[0] else None)()

    def at(self, step):
        return f"{self.url}/step-{step:08d}"

    def save(self, step, base):
        base_url = None if base is None else self.at(base)
        return lambda: checkpoint.save(self.at(step), app(step), base=base_url, durable=False)

    def remove(self, *steps):
        return lambda: [remove_checkpoint(storage_of(self.at(step), durable=False)) for step in steps]

    def check(self):
        """Verifies every checkpoint; returns their steps."""
        steps = []
        for step in range(1, 9):
            if storage_of(self.at(step)).exists("manifest.json"):
                checkpoint.verify(self.at(step)).raise_if_damaged()
                with checkpoint.open(self.at(step)) as reader:
                    assert all(torch.equal(reader.read(key), value) for key, value in app(step).items())
                steps.append(step)
        return steps


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path):
    return Root(tmp_path, request.param == "memory")


def check_orders(root, tasks, operations, preemptions, kills=0):
    saved = lost = 0
    for run in orders(tasks, operations, preemptions=preemptions, kills=kills):
        with order_noted(run):
            steps = root.check()
            first = run.ended[0]
            assert first.error is None or first.killed or isinstance(first.error, CheckpointError)
            assert (3 in steps) == (first.error is None) or first.killed
            saved, lost = saved + (3 in steps), lost + (3 not in steps)
    assert saved and lost  # both are among the orders


def base_is_removed(root):
    def tasks():
        root.renew([1, 2])
        return [root.save(3, 2), root.remove(1, 2)]

    return tasks


def bases_are_removed_by_two(root):
    def tasks():
        root.renew([1, 2])
        return [root.save(3, 2), root.remove(1), root.remove(2)]

    return tasks


def test_a_save_beside_the_removal_of_its_base(tmp_path):
    root = Root(tmp_path, remote=False)
    # Two: the removal may have looked before the commit, and continue to remove after it.
    check_orders(root, base_is_removed(root), [LOCAL + name for name in DECIDING], preemptions=2)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_save_beside_the_removal_of_its_base_by_all_calls(root):
    check_orders(root, base_is_removed(root), root.calls, preemptions=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_save_beside_two_removals(root):
    prefix = REMOTE if root.remote else LOCAL
    check_orders(root, bases_are_removed_by_two(root), [prefix + name for name in DECIDING], preemptions=2)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_save_beside_the_removal_of_its_base_at_every_call_of_the_system(root):
    check_orders(root, base_is_removed(root), root.operations, preemptions=1)


def save_on(root):
    """A job that is started again: resumes from step 2, keeps one, and saves twice."""
    with Manager(root.url, keep=1, incremental=True) as manager:
        state = app(0)
        step = manager.restore(state)
        for each in range(step + 1, step + 3):
            manager.save(each, app(each))


def check_kills(root, operations):
    """And whoever resumes then ends as if there had been none, but for what the restored one is kept for."""

    def tasks():
        root.renew([1, 2])
        return [lambda: save_on(root)]

    counts = []
    for run in orders(tasks, operations, preemptions=0, kills=1):
        with order_noted(run):
            steps = root.check()
            assert steps
            counts.append(steps[-1])
            save_on(root)
            assert steps[-1] + 2 in root.check()
            held = [path.parent.name for path in Path(root.url).glob("*/*.safetensors")]
            assert root.remote or set(held) <= {"step-00000001", *(f"step-{i:08d}" for i in range(2, 8))}
    assert {2, 3, 4} == set(counts)


def test_a_kill_at_any_call_of_saves_and_retention_leaves_what_is_whole(tmp_path):
    root = Root(tmp_path, remote=False)
    changing = ["write", "publish_new", "remove", "remove_durably"]  # a kill before a listing is one before the next
    check_kills(root, [LOCAL + name for name in changing])


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_kill_at_any_operation_of_saves_and_retention_leaves_what_is_whole(root):
    check_kills(root, root.operations)
