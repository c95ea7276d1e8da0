"""What a Manager does to checkpoints that are there: metrics that come later, removal; and how it opens its root."""

import json
import logging
import threading
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Rule
from shardopt.checkpoint.run import copying
from shardopt.cli import main
from shardopt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, OptionError, StateError


def app_of(step=0):
    return {"w": torch.full((2, 3), float(step)), "step": step}


@pytest.mark.parametrize("stage", [None, "now"])
@pytest.mark.parametrize("where", ["disk", "store"])
def test_metrics_that_come_after_the_save_decide_what_stays(tmp_path, stage, where):
    root = tmp_path if where == "disk" else f"memory://added-{stage}"
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 5.0}
    keep = checkpoint.Retention(last=1, best=("loss", "min", 1))
    with checkpoint.Manager(root, keep=keep, stage=stage) as manager:
        for step, loss in losses.items():
            manager.save(step, app_of(step), metrics={"grad": 0.5})
            manager.add_metrics(step, {"loss": 9.0})
            manager.add_metrics(step, {"loss": torch.tensor(loss)})
        manager.wait()
        assert manager.steps() == [2, 5]
        assert manager.latest_step == 5
        assert manager.metrics(2) == {"grad": 0.5, "loss": 1.0}
    again = checkpoint.Manager(root, keep=keep)
    assert again.restore(app_of()) == 5
    again.save(6, app_of(6))
    assert again.steps() == [2, 5, 6]  # by what is on the disk; 5 was restored
    again.add_metrics(2, {"loss": 8.0})
    again.add_metrics(6, {"loss": 7.0})
    again.save(7, app_of(7))
    assert again.steps() == [5, 7]
    records = [name for name in again._run.root.storage.names() if "metrics" in name]
    assert records == ["step-00000005.metrics.json"]


def test_metrics_of_what_is_not_there_are_refused_and_others_are_numbers(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, app_of(1))
    with pytest.raises(CheckpointNotFoundError, match="found steps 1; required step 2"):
        manager.add_metrics(2, {"loss": 1.0})
    with pytest.raises(StateError, match=r"metrics\.loss"):
        manager.add_metrics(1, {"loss": "low"})
    odd = {"caf\udce9": 1.0}  # as of the name of a file in Latin-1, by which nothing could read the checkpoint
    for call in (lambda: manager.add_metrics(1, odd), lambda: manager.save(2, app_of(2), metrics=odd)):
        with pytest.raises(StateError, match=r"metrics\.caf.udce9: found 1\.0 under 'caf.udce9'"):
            call()
    for nothing in (None, {}):  # as on all ranks but the last stage of a pipeline
        manager.add_metrics(1, nothing)
    with pytest.raises(CheckpointNotFoundError):
        manager.add_metrics(2, None)
    assert manager.metrics(1) == {}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000001"]


def test_metrics_of_an_earlier_save_of_the_step_do_not_count(tmp_path, caplog):
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, app_of(1))
    manager.add_metrics(1, {"loss": 1.0})
    manager.delete(1)
    assert list(tmp_path.iterdir()) == []
    save_id = manager.save(1, app_of(1)).save_id
    record = tmp_path / "step-00000001.metrics.json"
    record.write_text(json.dumps({"save_id": "of another", "metrics": {"loss": 1.0}}))
    assert manager.metrics(1) == {}
    record.write_text("{")
    assert manager.metrics(1) == {}
    assert "add them again" in caplog.text
    own = json.dumps({"save_id": save_id, "metrics": {"loss": 1.0}})
    record.write_text(" " * (1 << 20) + own)  # no such file is as large
    assert manager.metrics(1) == {}
    record.write_text(own)
    assert manager.metrics(1) == {"loss": 1.0}
    assert main(["ls", str(tmp_path)]) == 0


@pytest.mark.parametrize("kind", ["mirror", "tiers"])
def test_added_metrics_are_with_all_copies_and_go_with_them(tmp_path, kind):
    root, other = tmp_path / "root", tmp_path / "other"
    at = checkpoint.Mirror(other) if kind == "mirror" else checkpoint.Tier(str(other), every=1)
    keep = checkpoint.Retention(last=1, best=("loss", "min", 1))
    with checkpoint.Manager(root, keep=keep, destinations=[at], every=1 if kind == "mirror" else 2) as manager:
        for step in range(1, 7):
            manager.save(step, app_of(step))
            manager.add_metrics(step, {"loss": abs(step - 2.0)})
            manager.wait()  # or a later one comes before it is copied
        assert manager.metrics(2) == {"loss": 0.0}
        assert manager.steps() == [2, 6]
        if kind == "mirror":
            copies = checkpoint.Manager(other)
            assert copies.steps()[-1] == 6
            assert copies.metrics(6) == {"loss": 4.0}
        manager.delete(6)
        assert manager.latest_step == 2
        assert max(manager.where()) == (5 if kind == "tiers" else 2)
        assert manager.restore(app_of()) == (5 if kind == "tiers" else 2)
        manager.save(6, app_of(6))
        manager.wait()
        assert manager.metrics(6) == {}


def test_a_step_is_deleted_and_what_refers_to_it_stays(tmp_path):
    app = {"frozen": torch.ones(1000), "step": 0}
    with checkpoint.Manager(tmp_path, incremental=True) as manager:
        for step in (1, 2, 3):
            app["step"] = step
            manager.save(step, app)
        manager.delete(1)
        assert manager.steps() == [2, 3]
        assert checkpoint.verify(manager.path(3)).ok
        manager.delete(3)
        with pytest.raises(CheckpointNotFoundError, match="found steps 2; required step 3"):
            manager.delete(3)
        app["step"] = 3
        assert manager.save(3, app) is not None
        assert manager.restore(app) == 3
        manager.delete(2)
        manager.delete(3)
        assert manager.latest_step is None
        assert manager.restore(app) == 0


def test_a_restore_rearranges_and_skips(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, {"w": torch.arange(6.0).reshape(2, 3), "old": torch.ones(1), "step": 1})
    app = {"w": torch.zeros(3, 2), "step": 0}
    assert manager.restore(app, rearrange=[Rule("w", "w", "a b -> b a")], skip="^old$") == 1
    assert torch.equal(app["w"], torch.arange(6.0).reshape(2, 3).T)


def test_saves_of_a_manager_take_options(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    options = checkpoint.SaveOptions(durable=False, check_replicas="none", select="^w$")
    with checkpoint.Manager(tmp_path, options=options) as manager:
        manager.save(1, app_of(1))
    with checkpoint.open(manager.path(1)) as reader:
        assert [*reader.keys()] == ["w"]
    assert synced == []


class Guarded(MemoryFileSystem):
    """A store that takes a password."""

    protocol = "guarded"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    cachable = False

    def __init__(self, password=None, **options):
        super().__init__(**options)
        if password != "secret":
            raise PermissionError("no password")


def test_storage_options_reach_all_that_is_opened_below_and_are_told_nowhere(tmp_path, caplog):
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    caplog.set_level(logging.DEBUG)
    options = {"password": "secret"}
    app = app_of(1)
    with pytest.raises((PermissionError, CheckpointError)):
        checkpoint.save("guarded://no/c", app)
    for stage in (None, "now"):
        root = f"guarded://run-{stage}"
        mirror = checkpoint.Mirror(root, storage_options=options)
        assert "secret" not in repr(mirror)
        with checkpoint.Manager(tmp_path / str(stage), destinations=[mirror], stage=stage) as manager:
            manager.save(1, app)
        with checkpoint.Manager(root, stage=stage, storage_options=options, incremental=True) as manager:
            assert manager.restore(app) == 1
            manager.save(2, app)
            manager.wait()
            assert checkpoint.verify(manager.path(2)).ok
            assert "secret" not in repr(vars(manager))
    checkpoint.save("guarded://one/c", app, storage_options=options)
    checkpoint.load("guarded://one/c", app, storage_options=options)
    checkpoint.async_save("guarded://one/d", app, storage_options=options).result(30)
    assert "secret" not in caplog.text
    with pytest.raises(OptionError, match="storage_options: found a list") as caught:
        checkpoint.save("guarded://one/e", app, storage_options=["secret"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("again", [False, True])
def test_what_the_root_has_counts_for_a_mirror_that_lacks_it(tmp_path, caplog, again):
    options = {"every": 5, "destinations": [checkpoint.Mirror(tmp_path / "copies")]}
    lost, nan = tmp_path / "copies/step-00000005.metrics.json", float("nan")
    with checkpoint.Manager(tmp_path / "run", **options) as manager:
        manager.save(5, {"x": 5}, metrics={"epoch": nan})
        manager.wait()
        manager.add_metrics(5, {"loss": 1.0})
        lost.unlink()  # as if it could not be written
        if not again:
            manager.save(5, {"x": 5}, metrics={"loss": 2.0, "epoch": nan}, force=True)
    if again:
        with checkpoint.Manager(tmp_path / "run", **options) as manager:
            manager.restore({"x": 0})
            manager.wait()
            lost.unlink(missing_ok=True)
            manager.save(5, {"x": 5}, metrics={"loss": 2.0, "epoch": nan, "other": 0.0}, force=True)
    assert "keeps the metrics that it has: loss=1. add_metrics" in caplog.text
    assert json.loads(lost.read_text())["metrics"] == {"loss": 1.0, **({"other": 0.0} if again else {})}
    run, copies = (checkpoint.Manager(tmp_path / name).metrics(5) for name in ("run", "copies"))
    assert repr(run) == repr(copies) and run["loss"] == 1.0


def test_metrics_of_a_step_that_is_not_kept_are_refused(tmp_path):
    with checkpoint.Manager(
        tmp_path / "root", keep=1, destinations=[checkpoint.Mirror(tmp_path / "copies")]
    ) as manager:
        for step in (1, 2):
            manager.save(step, app_of(step))
            manager.wait()
        with pytest.raises(CheckpointNotFoundError, match="found steps 2; required step 1"):
            manager.add_metrics(1, {"loss": 1.0})
    for root in ("root", "copies"):
        assert not [each.name for each in (tmp_path / root).iterdir() if "1" in each.name]


def test_metrics_of_a_copy_that_waits_go_with_it(tmp_path, monkeypatch):
    """Of one that is left out for a newer one they used to stay in the mirror."""
    begun, may_go_on, upload = threading.Event(), threading.Event(), copying.upload_files
    monkeypatch.setattr(copying, "upload_files", lambda *args: begun.set() or (may_go_on.wait(30) and upload(*args)))
    with checkpoint.Manager(tmp_path / "root", destinations=[checkpoint.Mirror(tmp_path / "copies")]) as manager:
        for step in (1, 2, 3):
            manager.save(step, app_of(step))
            manager.add_metrics(step, {"loss": 1.0 / step})
            assert begun.wait(30)  # the first: one that waits is left out once a newer one waits behind it
        may_go_on.set()
        manager.wait()
    names = sorted(each.name for each in (tmp_path / "copies").iterdir() if each.name.startswith("step-"))
    copied = ["step-00000001", "step-00000003"]
    assert names == sorted([*copied, *(f"{name}.metrics.json" for name in copied)])
    assert len(list((tmp_path / "root").glob("*.metrics.json"))) == 3


def test_metrics_added_while_a_copy_is_missing_come_to_the_mirror_with_it(tmp_path, monkeypatch):
    root, copies = tmp_path / "root", tmp_path / "copies"
    fault = OSError(5, "the store is away")
    with monkeypatch.context() as patch, checkpoint.Manager(root, destinations=[checkpoint.Mirror(copies)]) as manager:
        patch.setattr(copying, "upload_files", lambda *args: (_ for _ in ()).throw(fault))
        manager.save(1, app_of(1))
        with pytest.raises(OSError, match="the store is away"):
            manager.wait()
        manager.add_metrics(1, {"loss": 0.5})
    with checkpoint.Manager(root, destinations=[checkpoint.Mirror(copies)]) as manager:
        manager.restore(app_of())
    assert checkpoint.Manager(copies).metrics(1) == {"loss": 0.5}


@pytest.mark.parametrize("stage", [None, "now"])
def test_of_a_manager_that_is_not_restored_a_taken_step_is_to_be_deleted(tmp_path, stage):
    with checkpoint.Manager(tmp_path, stage=stage) as killed:
        killed.save(3, app_of(3))
        killed.save(6, app_of(6))
    manager = checkpoint.Manager(tmp_path, stage=stage)
    with pytest.raises(CheckpointExistsError, match=r"first delete\(step\) each of its steps\(\) above"):
        manager.save(6, app_of(6))
        manager.wait()
    manager.delete(6)  # the remedy, followed
    manager.save(6, app_of(6))
    manager.close()
