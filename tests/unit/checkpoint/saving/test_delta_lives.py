"""Runs whose saves write changed elements: any changes, bases and removals; and what they keep on the disk."""

import random
import shutil

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.storage import storage_of
from tests.unit.checkpoint.saving.test_deltas import change, deltas_of, filled, is_as_saved, same, save


class Life:
    """A run whose state changes by chance; after each save it is as it was saved, wherever it is read from."""

    def __init__(self, root, seed):
        self.root, self.pick, self.steps, self.number = root, random.Random(seed), [], 0
        self.app = {
            "rows": filled(torch.int32, (700, 200), seed),
            "large": filled(torch.bfloat16, (3 * SEGMENT_BYTES // 2 + 77,), seed),
            "odd": filled(torch.complex128, (31, 401), seed),
            "eight": filled(torch.float8_e5m2fnuz, (SEGMENT_BYTES, 1), seed),
            "empty": torch.zeros(0, 4),
            "scalar": torch.zeros((), dtype=torch.float64),
        }
        self.saved = {}
        self.kinds = set()

    def act(self):
        for name, tensor in self.app.items():
            if tensor.numel():
                self.change(
                    name, tensor, self.pick.choice(["few", "few", "few", "some", "many", "rows", "none", "form"])
                )

    def change(self, name, tensor, how):
        rate = {"few": 1e-4, "some": 0.02, "many": 0.6}.get(how)
        if rate is not None:
            change(tensor, rate, self.pick, self.pick.randrange(1, 256))
        elif how == "rows" and tensor.dim():
            begin = self.pick.randrange(tensor.shape[0])
            change(tensor[begin : begin + self.pick.randrange(1, 200)], 0.9, self.pick)
        elif how == "form" and self.pick.random() < 0.3:
            other = {"rows": (torch.int32, (self.pick.choice([500, 700]), 200)), "odd": (torch.float32, (99, 401))}
            if name in other:
                self.app[name] = filled(*other[name], self.pick.randrange(9))

    def save(self):
        self.number += 1
        base = self.pick.choice([*self.steps[-2:], *self.steps[-1:] * 3, None]) if self.steps else None
        save(self.root, self.number, self.app, base=base)
        self.steps.append(self.number)
        self.saved[self.number] = {name: each.clone() for name, each in self.app.items()}
        for key in self.app:
            self.kinds |= set(deltas_of(self.root, self.number, key))

    def remove(self):
        if len(self.steps) > 2 and self.pick.random() < 0.5:
            step = self.steps.pop(self.pick.randrange(len(self.steps) - 1))
            remove_checkpoint(storage_of(f"{self.root}/{step}"))

    def check(self):
        step = self.pick.choice([self.steps[-1], *self.steps])
        path, app = f"{self.root}/{step}", self.saved[step]
        assert is_as_saved(path, app)
        with checkpoint.open(path) as reader:
            for key in ("rows", "odd", "eight"):
                box = [sorted(self.pick.choices(range(size + 1), k=2)) for size in app[key].shape]
                part = reader.read(key, checkpoint.Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)))
                assert same(part, app[key][tuple(slice(a, b) for a, b in box)])
        if self.pick.random() < 0.3:
            whole = f"{self.root}/whole"
            checkpoint.reshard(path, whole, world_size=self.pick.choice([1, 2, 3]))
            assert is_as_saved(whole, app)
            shutil.rmtree(whole)


def live(root, seed, saves):
    life = Life(root, seed)
    for _ in range(saves):
        life.act()
        life.save()
        life.remove()
        life.check()
    for step in life.steps:
        assert is_as_saved(f"{root}/{step}", life.saved[step])
    return life.kinds


def test_a_short_life(tmp_path):
    assert len(live(tmp_path, 1, 14)) > 2


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(12))
def test_long_lives(tmp_path, seed):
    assert len(live(tmp_path, seed, 60)) > 2


def test_a_manager_keeps_what_its_chains_need(tmp_path):
    pick = random.Random(3)
    app = {"x": filled(torch.int16, (300_000,)), "y": filled(torch.int32, (300_000,), 1)}
    longest = 0
    with checkpoint.Manager(tmp_path, keep=2, incremental=True) as manager:
        for step in range(1, 16):
            for tensor in app.values():
                change(tensor, pick.choice([1e-4, 1e-3, 0.02]), pick, pick.randrange(1, 256))
            manager.save(step, app)
            longest = max(longest, *deltas_of(tmp_path, f"step-{step:08d}", "x"))
            assert all(checkpoint.verify(manager.path(each)).ok for each in manager.steps())
        assert is_as_saved(manager.path(15), app)
    assert longest > 2
    with checkpoint.Manager(tmp_path.with_name(f"{tmp_path.name}-first")) as first:
        first.save(15, {"step": 15})
        first.restore({"step": 0})  # so that the other is a second Manager of a job that resumes, and counts all steps
        with checkpoint.Manager(tmp_path, keep=1, incremental=True) as manager:
            manager.save(16, {"other": torch.zeros(3)})
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000016"]


def test_files_with_deltas_are_kept_only_while_much_of_them_is_used(tmp_path):
    """Of a tensor that changes little beside one that changes much, each save has both deltas in one file."""
    app = {"little": torch.zeros(1 << 20, dtype=torch.int16), "much": torch.zeros(1 << 20, dtype=torch.int16)}
    state_bytes = sum(each.nbytes for each in app.values())
    held, lengths = [], []
    with checkpoint.Manager(tmp_path, keep=1, incremental=True) as manager:
        for step in range(1, 15):
            change(app["little"], 1e-5, random.Random(step))
            change(app["much"], 0.15, random.Random(step))
            manager.save(step, app)
            held.append(sum(file.stat().st_size for file in tmp_path.glob("*/*.safetensors")))
            lengths += deltas_of(tmp_path, f"step-{step:08d}", "little")
        assert is_as_saved(manager.path(14), app)
    assert max(lengths) > 4  # and yet
    assert max(held) < 2.5 * state_bytes
