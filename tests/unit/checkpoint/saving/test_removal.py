"""Removals of several checkpoints: what cannot be removed keeps none of the others, and links lead to nothing."""

import os
import time

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.saving import removal
from shardopt.checkpoint.saving.removal import (
    remove_checkpoint,
    remove_checkpoints,
    remove_in_the_way,
    remove_leftovers,
)
from shardopt.checkpoint.sources import referred
from shardopt.checkpoint.storage import LocalStorage, storage_of
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.cli import main
from shardopt.errors import CheckpointError, NoSpaceError
from shardopt.world import using
from tests.support.worlds import FakeClock


def save(root, *steps, **options):
    with checkpoint.Manager(root, **options) as manager:
        for step in steps:
            manager.save(step, {"x": torch.ones(50_000), "y": torch.full((3,), float(step)), "step": step})


@pytest.fixture(autouse=True)
def resumed(tmp_path_factory):
    """Another Manager of this process has resumed a run: those of the tests are second ones, which count all steps."""
    with checkpoint.Manager(tmp_path_factory.mktemp("first")) as manager:
        manager.save(0, {"step": 0})
        manager.restore({"step": 0})
        yield


def left_in(root):
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def protected(monkeypatch):
    """Makes the files of one step belong to somebody else."""
    inner = os.unlink

    def unlink(path, **options):
        if "step-00000003/" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        inner(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)


def test_what_cannot_be_removed_is_named_and_the_others_go(tmp_path, protected, caplog):
    save(tmp_path, 1, 2, 3, 4, 5)
    save(tmp_path, 6, 7, keep=1)
    assert left_in(tmp_path) == ["step-00000003", "step-00000007"]
    assert checkpoint.verify(tmp_path / "step-00000003").ok
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]  # not at each save
    assert f"{tmp_path}/step-00000003 could not be removed" in line
    assert "move it away" in line and "[storage-failed]" in line


def test_prune_removes_the_others_and_fails(tmp_path, protected, capsys):
    save(tmp_path, 1, 2, 3, 4, 5)
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--yes"]) != 0
    assert "step-00000003: found [Errno 13]" in capsys.readouterr().err
    assert left_in(tmp_path) == ["step-00000003", "step-00000005"]


def test_a_data_file_that_stays_keeps_the_files_of_no_other(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)
    inner = LocalStorage.remove

    def remove(self, name):
        if self.url.endswith("1"):
            raise OSError(5, "Input/output error")
        inner(self, name)

    monkeypatch.setattr(LocalStorage, "remove", remove)
    storages = [storage_of(tmp_path / f"step-0000000{step}") for step in (1, 2)]
    assert list(remove_checkpoints(storages)) == storages[:1]
    assert left_in(tmp_path) == ["step-00000001", "step-00000003"]
    assert not (tmp_path / "step-00000001/manifest.json").exists()


def test_of_a_link_only_the_link_is_removed_and_none_that_leads_nowhere(tmp_path):
    """Its archive may be back later, and the rules may want the step."""
    root, archive = tmp_path / "run", tmp_path / "archive"
    save(root, 1, 2)
    (root / "step-00000001").rename(archive)
    (root / "step-00000001").symlink_to(tmp_path / "nowhere")
    save(root, 3, 4, keep=1)
    assert left_in(root) == ["step-00000001", "step-00000004"]
    (tmp_path / "nowhere").symlink_to(archive)
    save(root, 5, keep=1)
    assert left_in(root) == ["step-00000005"]
    assert checkpoint.verify(archive).ok


def test_a_link_stays_while_checkpoints_need_what_is_behind_it(tmp_path):
    root, archive = tmp_path / "run", tmp_path / "archive"
    save(root, 1, 2, incremental=True)
    (root / "step-00000001").rename(archive)
    (root / "step-00000001").symlink_to(archive)
    with pytest.raises(CheckpointError, match="other checkpoints need"):
        remove_checkpoint(storage_of(root / "step-00000001"))
    assert checkpoint.verify(root / "step-00000002").ok and checkpoint.verify(archive).ok
    remove_checkpoint(storage_of(root / "step-00000002"))
    remove_checkpoint(storage_of(root / "step-00000001"))
    assert left_in(root) == [] and checkpoint.verify(archive).ok


def test_nothing_is_removed_while_a_manifest_that_may_refer_to_it_cannot_be_read(tmp_path, monkeypatch, caplog):
    app = {"kept": torch.rand(20_000), "changed": torch.zeros(10)}
    size = LocalStorage.size

    def refused(self, name):
        if name == MANIFEST_NAME and self.url.endswith("2") and not refusals:
            refusals.append(name)
            raise PermissionError(13, "403 for a moment", name)
        return size(self, name)

    refusals: list[str] = []
    with checkpoint.Manager(tmp_path, keep=1, incremental=True) as manager:
        manager.save(1, app)
        app["changed"].add_(1)
        real = referred.references_of

        def look(storage):
            with monkeypatch.context() as within:
                within.setattr(LocalStorage, "size", refused)
                return real(storage)

        monkeypatch.setattr(referred, "references_of", look)
        manager.save(2, app)
    assert refusals and "403 for a moment" in caplog.text
    assert checkpoint.verify(tmp_path / "step-00000002").ok


@pytest.fixture
def refused(monkeypatch):
    """A list of ends of URLs of checkpoints whose manifests this process may not read."""
    ends, read = [], LocalStorage.read

    def limited(self, name, *args):
        if name == MANIFEST_NAME and self.url.endswith(tuple(ends)):
            raise PermissionError(13, "Permission denied", f"{self.url}/{name}")
        return read(self, name, *args)

    monkeypatch.setattr(LocalStorage, "read", limited)
    return ends


def with_manifests(root):
    return sorted(path.parent.name for path in root.glob("*/manifest.json"))


def test_checkpoints_stay_whole_while_a_manifest_beside_them_cannot_be_read(tmp_path, refused, caplog):
    """They used to lose their manifests, and to keep their data."""
    run = tmp_path / "run"
    save(tmp_path / "other", 7)
    run.mkdir()
    (tmp_path / "other/step-00000007").rename(run / "theirs")
    refused.append("theirs")
    save(run, 1, 2, 3, keep=1)
    assert with_manifests(run) == ["step-00000001", "step-00000002", "step-00000003", "theirs"]
    assert f"{run}/theirs/manifest.json: found Permission denied" in caplog.text
    assert "make it readable, or move this checkpoint away" in caplog.text
    refused.clear()
    save(run, 4, keep=1)
    assert left_in(run) == with_manifests(run) == ["step-00000004", "theirs"]
    refused.append("theirs")  # which has been read: only once this is found too late
    save(run, 5, 6, 7, keep=1)
    assert with_manifests(run) == ["step-00000005", "step-00000006", "step-00000007", "theirs"]


def test_checkpoints_stay_beside_one_that_can_be_neither_removed_nor_read(tmp_path, refused, protected, caplog):
    save(tmp_path, 3, 4, 5)
    refused.append("3")
    save(tmp_path, 6, keep=1)
    assert with_manifests(tmp_path) == [f"step-0000000{step}" for step in (3, 4, 5, 6)]


def test_one_that_is_in_the_way_loses_its_manifest_beside_one_that_cannot_be_read(tmp_path, refused):
    save(tmp_path, 1, 2)
    refused.append("1")
    with pytest.raises(CheckpointError, match="move this checkpoint away"):
        remove_in_the_way(storage_of(tmp_path / "step-00000002"))
    assert sorted(path.suffix for path in (tmp_path / "step-00000002").iterdir()) == [".safetensors"]


def test_one_that_somebody_deletes_stays_whole_beside_one_that_cannot_be_read(tmp_path, refused):
    """It lost its manifest, so that it was no checkpoint any more, and its data stayed."""
    save(tmp_path, 1, 2, 3)
    with checkpoint.Manager(tmp_path) as manager:
        for deleted in (3, 2):  # when 2 is, the manifest of 1 has been read before
            refused.append("1")
            with pytest.raises(CheckpointError, match="move this checkpoint away"):
                manager.delete(deleted)
            assert checkpoint.verify(manager.path(deleted)).ok
            refused.clear()
            manager.delete(deleted)
    assert left_in(tmp_path) == ["step-00000001"]


def test_what_cannot_be_removed_says_so_also_if_it_cannot_be_read(tmp_path, refused, protected):
    save(tmp_path, 3, 4)
    refused.append("3")
    with pytest.raises(PermissionError, match="Permission denied"):
        remove_checkpoint(storage_of(tmp_path / "step-00000003"))
    assert with_manifests(tmp_path) == ["step-00000003", "step-00000004"]


def test_checkpoints_that_cannot_be_removed_are_each_looked_at_once(tmp_path, monkeypatch):
    save(tmp_path, *range(1, 9), keep=None)
    listed, names = [], LocalStorage.names

    def counted(self):
        listed.append(self.url)
        return names(self)

    def refuse(self, name):
        raise OSError(30, "Read-only file system")

    storages = [storage_of(tmp_path / f"step-0000000{step}") for step in range(1, 8)]
    monkeypatch.setattr(LocalStorage, "remove_durably", refuse)
    monkeypatch.setattr(LocalStorage, "names", counted)
    assert len(remove_checkpoints(storages)) == 7
    assert len(listed) <= 3


def test_old_checkpoints_on_a_store_stay_whole_while_it_denies_a_manifest_beside_them(tmp_path, monkeypatch):
    """Once that was readable, each of them lost its manifest, and kept its data."""
    root, denied, asked = f"memory://shardopt-removal/{tmp_path.name}", [], []

    def answering(name):
        answer = getattr(RemoteStorage, name)

        def ask(self, file, *args):
            if file == MANIFEST_NAME and self.url.endswith("theirs"):
                asked.append(name)
                if denied:
                    raise CheckpointError("cannot read theirs/manifest.json: 403")
            return answer(self, file, *args)

        return ask

    checkpoint.save(f"{root}/theirs", {"y": torch.ones(3)})
    for name in ("read", "read_rest", "size"):
        monkeypatch.setattr(RemoteStorage, name, answering(name))

    def whole():
        steps = [f"{root}/step-0000000{step}" for step in range(1, 8)]
        return [url[-1] for url in steps if storage_of(url).exists(MANIFEST_NAME)]

    save(root, 1, 2, keep=1)
    denied.append(True)
    save(root, 3, 4, 5, keep=1)
    assert whole() == ["3", "4", "5"]  # 2 is found too late
    denied.clear()
    save(root, 6, keep=1)
    assert whole() == ["6"]
    asked.clear()
    save(root, 7, keep=1)
    assert set(asked) == {"read_rest"}  # one request at each look


LEFT = "0123456789ab-r00001.safetensors"


def test_what_killed_saves_of_a_step_have_left_goes_before_it_is_saved_again(tmp_path, monkeypatch):
    """It used to stay until the commit: a job killed in each save of one step filled the disk."""
    seen, inner = [], LocalStorage.write

    def write(self, name, buffers):
        seen.append(self.names())
        return inner(self, name, buffers)

    monkeypatch.setattr(LocalStorage, "write", write)
    young = "aaaaaaaaaaaa-r00001.safetensors"  # whose process may not be dead yet
    for step in ("step-00000002", "step-00000009"):
        (tmp_path / step).mkdir()
        for name in (LEFT, young, young.replace("r00001", "r00000"), "notes.txt"):
            (tmp_path / step / name).write_bytes(b"x")
            os.utime(tmp_path / step / name, (0, time.time() + 390 if name == young else 0))
    with using(FakeClock(time.time() + 400)):
        save(tmp_path, 2)
    assert seen == [["aaaaaaaaaaaa-r00000.safetensors", young, "notes.txt"]]
    assert len(left_in(tmp_path / "step-00000009")) == 4  # which may be a save of another job


def test_leftovers_stay_while_checkpoints_need_them_or_this_process_writes_them(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, incremental=True)
    (base,) = (tmp_path / "step-00000001").glob("*.safetensors")
    (tmp_path / "step-00000001" / MANIFEST_NAME).unlink()
    marker = "0123456789ab-r00000-999999999.safetensors"
    for name in (LEFT, marker):
        (base.parent / name).write_bytes(b"")
    monkeypatch.setattr("shardopt.checkpoint.run.keeper.tracked_urls", lambda: [str(base.parent)])
    with checkpoint.Manager(tmp_path) as manager, using(FakeClock(time.time() + 400)):
        manager._steps.branches()
        manager._steps._after.prepare(CheckpointId(1, 0), in_turn=True)
        assert left_in(base.parent) == sorted([base.name, LEFT, marker])
        monkeypatch.undo()
        manager._steps._after.prepare(CheckpointId(1, 0), in_turn=True)
    assert left_in(base.parent) == sorted([base.name, marker])  # a marker is looked for by ranks that save
    assert checkpoint.verify(tmp_path / "step-00000002").ok


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_save_that_was_taken_for_dead_and_commits_is_kept_or_loses_its_manifest(tmp_path, monkeypatch, moment):
    save(tmp_path, 1)
    step = tmp_path / "step-00000001"
    data = (step / MANIFEST_NAME).read_bytes()
    (step / MANIFEST_NAME).unlink()
    module, name = {"before": (referred, "referred_in"), "after": (removal, "_remove_each")}[moment]
    inner = getattr(module, name)

    def slow(*arguments):
        (step / MANIFEST_NAME).write_bytes(data)
        return inner(*arguments)

    monkeypatch.setattr(module, name, slow)
    remove_leftovers(storage_of(step), 0.0)
    assert (step / MANIFEST_NAME).exists() == (moment == "before") == bool(list(step.glob("*.safetensors")))


def test_the_error_of_a_full_disk_names_what_broken_off_saves_have_left(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, incremental=True)
    (tmp_path / "step-00000001" / MANIFEST_NAME).unlink()  # a base, which step 2 needs
    for step in range(5, 10):
        (tmp_path / f"step-0000000{step}").mkdir()
        (tmp_path / f"step-0000000{step}" / LEFT).write_bytes(b"x" * 500)

    inner = LocalStorage.write

    def full(self, name, buffers):
        inner(self, name, buffers)  # of this save, which removes it
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStorage, "write", full)
    with pytest.raises(NoSpaceError) as refused:
        save(tmp_path, 9)
    left = "2,500 bytes that broken-off saves have left in step-00000005, step-00000006, step-00000007 and 2 more of "
    assert f"{left}{tmp_path}, if no job saves there" in str(refused.value)
