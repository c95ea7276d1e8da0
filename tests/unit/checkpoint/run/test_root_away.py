"""Runs with tiers whose root cannot be reached for a while."""

import errno
import logging
import os
import threading

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.run.tiers import promotions
from shardopt.checkpoint.storage import LocalStorage, storage_of
from shardopt.checkpoint.storage.retry import Requests, exhausted
from shardopt.errors import CheckpointError, NoSpaceError
from tests.harness.programs import run_program


@pytest.fixture
def away(monkeypatch):
    """An event; while it is set no request to a store is answered."""
    event, repeat = threading.Event(), Requests.repeat

    def repeat_or_fail(self, doing, function, **unused):
        if event.is_set():
            raise exhausted(doing, "8 attempts within 23.4 s")
        return repeat(self, doing, function)

    monkeypatch.setattr(Requests, "repeat", repeat_or_fail)
    monkeypatch.setattr(promotions, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(promotions, "_PAUSE_SECONDS", 0.1)
    return event


def steps_in(path):
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(path) if name.startswith("step-"))


def test_saves_to_a_tier_go_on_while_the_root_is_away_and_its_newest_step_arrives_later(tmp_path, away, caplog):
    """Copies waited for the root, and so did what was due for it, on the tier: until the next save raised."""
    caplog.set_level(logging.INFO)
    root, tier = "memory://away-for-a-while", tmp_path / "tier"
    destinations = [checkpoint.Tier(str(tier), every=1, keep_last=2)]
    with checkpoint.Manager(root, every=3, destinations=destinations) as manager:
        for step in range(1, 4):
            manager.save(step, {"x": torch.full((4,), float(step))})
        manager.wait()
        away.set()
        for step in range(4, 21):
            manager.save(step, {"x": torch.full((4,), float(step))})
            manager._tiers._turns.finish()  # copies on hosts, which wait for nothing
        # The two that have their copies, one that is being tried, one that waits, and what the next save removes.
        assert len(steps_in(tier)) <= 5 and {18, 19, 20} <= set(steps_in(tier))
        away.clear()
        manager.wait()
    arrived = [int(name[-2:]) for name in storage_of(root).names() if name.startswith("step-")]
    assert arrived[0] == 3 and arrived[-1] == 18 and "step 6 does not come to memory:///away-for-a-while" in caplog.text
    app = {"x": torch.zeros(4)}
    with checkpoint.Manager(root, every=2) as manager:
        assert manager.restore(app) == 18 and app["x"].eq(18).all()


def test_a_program_ends_with_an_error_if_its_root_never_answers(tmp_path, away):
    destinations = [checkpoint.Tier(str(tmp_path / "tier"), every=1)]
    with (
        pytest.raises(CheckpointError, match="8 attempts within"),
        checkpoint.Manager("memory://away-for-ever", every=2, destinations=destinations) as manager,
    ):
        manager.save(1, {"x": torch.zeros(4)})
        away.set()
        for step in (2, 3, 4, 5):
            manager.save(step, {"x": torch.zeros(4)})
    assert steps_in(tmp_path / "tier")[-1] == 5


def test_a_restore_that_finds_the_root_away_makes_no_later_save_fail(tmp_path, away, caplog):
    """It waited for the step that was due for the root, gave that up, and the next save raised it."""
    destinations = [checkpoint.Tier(str(tmp_path / "tier"), every=1)]
    app = {"x": torch.zeros(4)}
    with checkpoint.Manager("memory://away-in-a-restore", every=2, destinations=destinations) as manager:
        manager.save(1, app)
        manager.wait()
        away.set()
        manager.save(2, app)
        with pytest.raises(CheckpointError, match="8 attempts within"):
            manager.restore(app)
        manager.save(3, app)
        away.clear()
        manager.wait()
        assert manager.steps() == [2]


def test_what_waits_for_the_root_is_given_up_by_a_rewind(tmp_path, away, monkeypatch):
    """The root may be listed, and refuse what is written there."""
    root = str(tmp_path / "root")
    write = LocalStorage.write

    def write_or_fail(self, name, buffers):
        if away.is_set() and self.url.startswith(root):
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{self.url}/{name}")
        return write(self, name, buffers)

    monkeypatch.setattr(LocalStorage, "write", write_or_fail)
    app = {"x": torch.zeros(4)}
    with checkpoint.Manager(root, every=2, destinations=[checkpoint.Tier(str(tmp_path / "tier"), every=1)]) as manager:
        for step in (1, 2, 3):
            manager.save(step, app)
        manager.wait()
        away.set()
        manager.save(4, app)
        manager._tiers._turns.finish()
        assert manager.restore(app, step=2) == 2
        assert not manager._tiers.promoting()
        away.clear()
        manager.save(4, app)
        manager.wait()
        assert manager.steps() == [2, 4] and not os.path.exists(f"{root}/step-00000004/manifest.json")


def test_a_root_that_is_full_fails_the_next_save(tmp_path, monkeypatch):
    """It is not away: what is due for it would not come for as long as nobody makes room."""
    write, root, is_full = LocalStorage.write, str(tmp_path / "root"), threading.Event()

    def write_or_fail(self, name, buffers):
        if is_full.is_set() and self.url.startswith(root):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{self.url}/{name}")
        return write(self, name, buffers)

    monkeypatch.setattr(LocalStorage, "write", write_or_fail)
    destinations = [checkpoint.Tier(str(tmp_path / "tier"), every=1)]
    with checkpoint.Manager(root, every=2, destinations=destinations) as manager:
        manager.save(1, {"x": torch.zeros(4)})
        is_full.set()
        manager.save(2, {"x": torch.zeros(4)})
        with pytest.raises(NoSpaceError, match="step-00000002"):
            manager.wait()
        is_full.clear()
        manager.save(4, {"x": torch.zeros(4)})
    assert 4 in steps_in(root)


_PROGRAM = """
import sys, torch
from shardopt import checkpoint
from shardopt.checkpoint.storage import LocalStorage

root, tier = sys.argv[1:]
write = LocalStorage.write

def refuse(self, name, buffers):
    if self.url.startswith(root):
        raise OSError(5, "Input/output error", name)
    return write(self, name, buffers)

LocalStorage.write = refuse
manager = checkpoint.Manager(root, every=2, destinations=[checkpoint.Tier(tier, every=1)])
for step in (1, 2, 3):
    manager.save(step, {"x": torch.zeros(4)})
"""


def test_a_program_that_waits_for_nothing_fails_if_its_root_has_not_got_all(tmp_path):
    done = run_program(_PROGRAM, str(tmp_path / "root"), str(tmp_path / "tier"))
    assert done.returncode == 1 and "bringing step-00000002 to" in done.stderr
