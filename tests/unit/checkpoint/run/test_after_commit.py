"""What follows a commit: begun in the order of docs/architecture.md, and not entered where there is none of it."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.run import after_commit
from shardopt.checkpoint.run.after_commit import AfterCommit
from shardopt.checkpoint.run.export import Exporter
from shardopt.checkpoint.run.keeper import Keeper
from shardopt.checkpoint.run.mirror import MirrorCopier
from shardopt.checkpoint.run.tiers.tiers import Tiers
from shardopt.errors import StateError


def app_of(step):
    return {"model": {"w": torch.full((2, 3), float(step))}, "step": step}


def test_tasks_are_begun_in_one_order(tmp_path, monkeypatch):
    begun = []

    def note(task, owner):
        begin = owner.begin

        def noting(self, what, *args, **options):
            begun.append((task, int(getattr(what, "name", what).removeprefix("step-"))))
            return begin(self, what, *args, **options)

        monkeypatch.setattr(owner, "begin", noting)

    for task, owner in (("tiers", Tiers), ("mirror", MirrorCopier), ("export", Exporter), ("retention", Keeper)):
        note(task, owner)
    destinations = [checkpoint.Tier(str(tmp_path / "tier"), every=1), checkpoint.Mirror(tmp_path / "copies")]
    export = checkpoint.Export(tmp_path / "export", best=("loss", "min"))
    with checkpoint.Manager(tmp_path / "root", destinations=destinations, every=2, keep=1, export=export) as manager:
        for step in (1, 2, 3):
            manager.save(step, app_of(step), metrics={"loss": 1.0 / step}, force=step == 3)
            manager.wait()
    at_root = ["tiers", "mirror", "export", "retention"]
    assert begun == [("tiers", 1), *((task, 2) for task in at_root), *((task, 3) for task in at_root)]


def test_a_stop_keeps_the_order_with_a_promotion_that_is_under_way(tmp_path, monkeypatch):
    begun, let_go, at_root = [], threading.Event(), AfterCommit._committed_at_root

    def late(self, id, *args):
        begun.append(id.step)
        assert let_go.wait(20)
        at_root(self, id, *args)

    tier, mirror = checkpoint.Tier(tmp_path / "tier", every=1), checkpoint.Mirror(tmp_path / "copies")
    stop = SimpleNamespace(grace_seconds=60.0, leave=sys.exit)
    manager = checkpoint.Manager(tmp_path / "root", destinations=[tier, mirror])
    monkeypatch.setattr(AfterCommit, "_committed_at_root", late)
    manager.save(1, app_of(1))
    with pytest.raises(SystemExit):
        manager._steps.save_and_leave(2, app_of(2), None, stop)
    let_go.set()
    manager.close()
    copies = sorted(path.name for path in (tmp_path / "copies").glob("step-*"))
    assert begun == [1, 2] and copies in (["step-00000002"], ["step-00000001", "step-00000002"])  # 1 if it was in time


def test_what_is_known_of_checkpoints_does_not_grow_with_those_that_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(after_commit, "_MOST_KNOWN", 3)
    keep = checkpoint.Retention(last=1, best=("loss", "min", 1))
    with checkpoint.Manager(tmp_path, keep=keep) as manager:
        for step in range(1, 9):
            manager.save(step, app_of(step), metrics={"loss": abs(step - 3)})
            manager.add_metrics(step, {"accuracy": 0.5})
        after = manager._after
        assert manager.steps() == [3, 8] and [id.step for id in after._known] == [6, 7, 8]
        assert {id.step for id in after._keeper._noted} <= {3, 7, 8}  # what was there before the last removal
        manager.add_metrics(3, {"accuracy": 0.75})  # which is only on disk now
        assert manager.metrics(3) == {"loss": 0.0, "accuracy": 0.75}


@pytest.mark.parametrize("stage", [None, "now"])
def test_metrics_of_a_step_that_is_there_are_added_to_it(tmp_path, stage):
    keep = checkpoint.Retention(last=1, best=("loss", "min", 1))
    with checkpoint.Manager(tmp_path, every=2, keep=keep, stage=stage) as manager:
        for step in range(1, 7):
            manager.save(step, app_of(step))
            if step in (2, 6):
                manager.save(step, app_of(step), force=True, metrics={"loss": step})  # an evaluation after the save
    with checkpoint.Manager(tmp_path, every=2, keep=keep, stage=stage) as manager:
        assert manager.restore(app_of(0)) == 6
        manager.save(6, app_of(6), force=True, metrics={"loss": 1, "accuracy": 1})  # it has a loss
        manager.add_metrics(6, {"loss": 1})
        assert manager.save(6, app_of(6), force=True) is None  # which changes nothing
        with pytest.raises(StateError):
            manager.save(6, app_of(6), force=True, metrics={"loss": "low"})
        for step in (8, 10):
            manager.save(step, app_of(step), metrics={"loss": step})
    assert manager.steps() == [6, 10] and manager.metrics(6) == {"loss": 1.0, "accuracy": 1.0}


def test_metrics_of_a_step_that_a_tier_has_and_at_a_stop(tmp_path):
    tier, mirror = checkpoint.Tier(tmp_path / "tier", every=1), checkpoint.Mirror(tmp_path / "copies")
    stop = SimpleNamespace(grace_seconds=60.0, leave=sys.exit)
    with checkpoint.Manager(tmp_path / "root", destinations=[tier, mirror], every=2) as manager:
        manager.save(2, app_of(2))
        manager.save(2, app_of(2), metrics={"loss": 2})
        with pytest.raises(SystemExit):
            manager._steps.save_and_leave(2, app_of(2), {"accuracy": 0.5}, stop)
        assert manager.metrics(2) == {"loss": 2.0, "accuracy": 0.5}
    assert checkpoint.Manager(tmp_path / "copies").metrics(2) == manager.metrics(2)


def test_a_manager_with_none_of_them_enters_none_of_their_code(tmp_path):
    entered = set()

    def enter(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent.parts[-3:] == ("shardopt", "checkpoint", "run"):
            entered.add(path.name)

    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, app_of(1))
        sys.setprofile(enter)
        try:
            manager.save(2, app_of(2))
            assert manager.restore(app_of(0)) == 2
        finally:
            sys.setprofile(None)
    assert entered == {
        "manager.py",
        "steps.py",
        "after_commit.py",
        "context.py",
        "keeper.py",
        "root.py",
        "branches.py",
    }
