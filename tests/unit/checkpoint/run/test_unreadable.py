"""A disk that fails to return a file for a moment: nothing is removed or replaced for that."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardopt.checkpoint import Export, Manager, Mirror, Retention
from shardopt.checkpoint.run import keeper
from shardopt.checkpoint.run.listing import look_at
from shardopt.checkpoint.run.metrics import Noted
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.storage import LocalStorage, Storage, storage_of
from shardopt.checkpoint.storage.local import unreadable
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, CorruptionError, UnreadableError


def _unreadable_once(
    monkeypatch: pytest.MonkeyPatch, ends: str, times: float = 1, number: int = errno.EIO
) -> list[str]:
    """Has the first reads of a file fail as those of a broken disk do; returns what has failed."""
    failed: list[str] = []

    def failing(original: Callable[..., bytes]) -> Callable[..., bytes]:
        def read(self: LocalStorage, name: str, *args: Any, **kwargs: Any) -> bytes:
            url = f"{self.url}/{name}"
            if url.endswith(ends) and len(failed) < times:
                failed.append(url)
                error = OSError(number, os.strerror(number))
                raise unreadable(url, error) if number == errno.EIO else error
            return original(self, name, *args, **kwargs)

        return read

    for name in ("read", "read_record"):
        monkeypatch.setattr(LocalStorage, name, failing(getattr(LocalStorage, name)))
    return failed


def test_the_best_checkpoint_stays_if_the_disk_fails_to_return_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Retention(last=1, best=("loss", "min", 1))
    app = {"x": torch.zeros(4)}
    with Manager(tmp_path, keep=keep) as manager:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.6)):
            manager.save(step, app, metrics={"loss": loss})
    with Manager(tmp_path, keep=keep) as manager:
        manager.restore(app)
        failed = _unreadable_once(monkeypatch, "step-00000001/manifest.json")
        manager.save(4, app, metrics={"loss": 0.7})
        assert failed and 1 in manager.steps()
        manager.save(5, app, metrics={"loss": 0.8})
        assert 1 in manager.steps() and 2 not in manager.steps()


@pytest.mark.parametrize("file", ["root/step-00000001/manifest.json", "export/export.json"])
def test_the_best_export_stays_if_the_disk_fails_to_return_what_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """What could not be read used to be worth nothing, so that a worse one was exported in its place."""
    app = {"model": {"w": torch.zeros(4)}}
    with Manager(tmp_path / "root") as manager:
        for step, loss in ((1, 0.1), (2, 0.5)):
            manager.save(step, app, metrics={"loss": loss})

    def restore() -> None:
        with Manager(tmp_path / "root", export=Export(tmp_path / "export", best=("loss", "min"))) as manager:
            manager.restore(app)

    if file == "export/export.json":
        restore()
    with monkeypatch.context() as patched:
        _unreadable_once(patched, file)
        with pytest.raises(UnreadableError):
            restore()
    assert not (tmp_path / "export" / "step-00000002").exists()
    restore()
    assert (tmp_path / "export" / "step-00000001").is_dir()


@pytest.mark.parametrize("file", ["manifest.json", ".safetensors"])
@pytest.mark.parametrize("times", [1, math.inf])
def test_the_best_is_exported_once_it_can_be_read_and_stops_no_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, times: float
) -> None:
    """A worse one that was saved meanwhile was exported, and stayed."""
    app = {"model": {"w": torch.zeros(4)}}
    with Manager(tmp_path / "root") as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            manager.save(step, app, metrics={"loss": loss})
    export = tmp_path / "export/export.json"
    with Manager(tmp_path / "root", export=Export(tmp_path / "export", best=("loss", "min"))) as manager:
        exporter: Any = manager._after._exporter
        convert = exporter._convert

        def failing(candidate: Any, folder: str) -> None:
            if file == ".safetensors" and candidate.id.step == 2 and len(failed) < times:
                failed.append(candidate.url)
                raise unreadable(candidate.url, OSError(errno.EIO, os.strerror(errno.EIO)))
            convert(candidate, folder)

        failed = _unreadable_once(monkeypatch, f"step-00000002/{file}", times)
        monkeypatch.setattr(exporter, "_convert", failing)
        manager.restore(app)
        exporter.finish()
        assert failed and not export.exists()
        manager.save(4, app, metrics={"loss": 0.2})
        exporter.finish()
        if times == 1:
            assert json.loads(export.read_text())["name"] == "step-00000002"
        manager.save(5, app, metrics={"loss": 0.05})
    assert json.loads(export.read_text())["name"] == "step-00000005"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_one_whose_metrics_are_never_readable_stays_and_so_does_the_best_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Nothing at all was removed."""
    keep = Retention(last=1, best=("loss", "min", 1))
    app = {"x": torch.zeros(4)}
    with Manager(tmp_path) as manager:
        for step, loss in ((1, 0.5), (2, 0.3), (3, 0.6)):
            manager.save(step, app, metrics={"loss": loss})
        manager.add_metrics(1, {"accuracy": 0.9})
    _unreadable_once(monkeypatch, "step-00000001.metrics.json", math.inf, number)
    with Manager(tmp_path, keep=keep) as manager:
        manager.restore(app)
        for step in (4, 5, 6):
            manager.save(step, app, metrics={"loss": 0.9})
        assert manager.steps() == [1, 2, 3, 6]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "step-00000001 stays, as its metrics cannot be read" in line and "move it away" in line
    assert "step-00000001.metrics.json" in line


def test_added_metrics_replace_none_that_the_disk_fails_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Manager(tmp_path) as manager:
        manager.save(1, {"x": torch.zeros(4)})
        manager.add_metrics(1, {"accuracy": 0.9})
        failed = _unreadable_once(monkeypatch, "step-00000001.metrics.json")
        with pytest.raises(CheckpointError):
            manager.add_metrics(1, {"bleu": 30.0})
        assert failed and manager.metrics(1) == {"accuracy": 0.9}
        manager.add_metrics(1, {"bleu": 30.0})
        assert manager.metrics(1) == {"accuracy": 0.9, "bleu": 30.0}


def test_a_checkpoint_is_not_called_damaged_for_metrics_that_the_disk_fails_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Manager(tmp_path) as manager:
        manager.save(1, {"x": torch.zeros(4)})
        manager.add_metrics(1, {"accuracy": 0.9})
    _unreadable_once(monkeypatch, "step-00000001.metrics.json")
    url = tmp_path / "step-00000001"
    assert look_at(storage_of(url)).condition == "unreadable"
    assert look_at(storage_of(url)).condition == "committed"


def test_a_store_that_fails_is_asked_for_the_metrics_of_two_checkpoints(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request that it does not answer takes many attempts."""
    root, asked = "memory://metrics-of-two", []
    with Manager(root) as manager:
        for step in range(5):
            manager.save(step, {"x": torch.zeros(4)})

    def failing(checkpoint: Storage) -> Noted:
        asked.append(checkpoint.url)
        raise CheckpointError("it does not answer")

    monkeypatch.setattr(keeper, "noted_of", failing)
    with Manager(root, keep=Retention(last=1, best=("loss", "min", 1))) as manager:
        manager.restore({"x": torch.zeros(4)})
        manager.save(5, {"x": torch.zeros(4)}, metrics={"loss": 1.0})
        manager.wait()
        assert len(asked) == 2 and manager.steps() == [0, 1, 2, 3, 4, 5]
    assert "old checkpoints could not be removed" in caplog.text


def test_a_store_that_fails_to_return_metrics_that_were_added_ends_no_removal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is known of the checkpoints counts. All stay of which nobody knows what was added."""
    asked = []

    def failing(checkpoint: Storage, save_id: str) -> dict[str, float]:
        asked.append(checkpoint.url)
        raise CheckpointError("it does not answer")

    with Manager("memory://added-to-many", keep=Retention(last=1, best=("loss", "min", 12))) as manager:
        for step in range(13):  # as far as is known the last one is the worst
            manager.save(step, {"x": torch.zeros(4)})
            manager.wait()
            manager.add_metrics(step, {"loss": float(step)})
        monkeypatch.setattr(keeper, "added_to", failing)
        monkeypatch.setattr(keeper, "sizes_for", lambda storage: SimpleNamespace(threads=1))
        for step in (13, 14):
            manager.save(step, {"x": torch.zeros(4)})
            manager.wait()
        assert manager.steps() == [*range(13), 14] and len(asked) == 4
    assert caplog.text.count("stays, as its metrics cannot be read") == 2


@pytest.mark.parametrize("mirrored", [False, True])
def test_only_the_newest_has_to_be_within_reach_for_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mirrored: bool
) -> None:
    """Each start ended if any of the steps, however old, could not be looked at."""
    root, app = tmp_path / "run", {"x": torch.zeros(4)}
    destinations = [Mirror(str(tmp_path / "mirror"))] if mirrored else []

    def put_out_of_reach(step: int) -> None:
        directory = root / f"step-{step:08d}"
        shutil.rmtree(directory)
        directory.symlink_to(directory.name)

    with Manager(root, destinations=destinations) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, app)
    put_out_of_reach(1)
    with Manager(root, keep=1, destinations=destinations) as manager:
        assert manager.restore(app) == 4
        assert f"nobody knows whether {root}/step-00000001 is a checkpoint" in caplog.text
        manager.save(5, app)
        assert manager.steps() == [1, 2, 3, 4, 5]  # it may refer to files of any
    assert f"{root}/step-00000001 stays, as it cannot be looked at" in caplog.text
    if mirrored:  # which has another copy of the newest
        return
    with Manager(root) as manager:
        manager.save(7, app)
    put_out_of_reach(7)
    with Manager(root) as manager, pytest.raises(CheckpointError, match="step-00000007"):
        manager.restore(app)


def test_a_store_is_asked_for_several_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore and the first save after it took two round trips for each step that is kept."""
    with Manager("memory://many-at-once", every=1) as manager:
        for step in range(6):
            manager.save(step, {"x": torch.zeros(4)})
    met = threading.Barrier(6)
    is_there = RemoteStorage.exists

    def together(self: RemoteStorage, name: str) -> bool:
        met.wait(20)
        return is_there(self, name)

    root = Root(storage_of("memory://many-at-once"))
    ids = root.ids()
    monkeypatch.setattr(RemoteStorage, "exists", together)
    assert root.committed_or_unread(ids) == ids == root.committed_of(ids)[0]
    met.abort()  # what was found stays known
    assert root.committed_of(ids) == (ids, {})


def test_no_earlier_checkpoint_is_announced_where_there_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = {"x": torch.zeros(4)}
    with Manager(tmp_path) as manager:
        manager.save(1, app)
    (tmp_path / "step-00000001/manifest.json").write_text("{}")
    with Manager(tmp_path) as manager, pytest.raises(CorruptionError):
        manager.restore(app)
    assert "step 1 is damaged, and there is no other checkpoint" in caplog.text
