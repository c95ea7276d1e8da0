"""A path that is no checkpoint, a protocol that is not there, a full disk: what it is, and what to do."""

import errno
import logging
import os
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardopt import checkpoint
from shardopt.checkpoint.run.listing import look_at
from shardopt.checkpoint.run.metrics import noted_of
from shardopt.checkpoint.saving.removal import committed_id
from shardopt.checkpoint.storage import LocalStorage, direct, storage_of
from shardopt.cli import main
from shardopt.errors import CheckpointError, CheckpointNotFoundError, FormatError, NoSpaceError
from tests.harness import Fault
from tests.harness.faults import watched


def refused(path):
    errors = []
    for call in (lambda: checkpoint.load(path, {"x": torch.ones(1)}), lambda: checkpoint.open(path)):
        with pytest.raises(CheckpointNotFoundError) as caught:
            call()
        errors.append(caught.value)
    (problem,) = errors[0].problems
    assert errors[1].problems == (problem,)
    return f"{problem.found} / {problem.remedy}"


@pytest.fixture
def run(tmp_path):
    with checkpoint.Manager(tmp_path / "run") as manager:
        for step in (9, 100, 20):
            manager.save(step, {"x": torch.ones(1)})
    (tmp_path / "run" / "step-00000300").mkdir()
    return tmp_path / "run"


def test_the_root_of_a_run(run, capsys):
    said = refused(run)
    assert "a directory of checkpoints: step-00000100 and 2 more" in said
    assert f"give one of them, such as {run}/step-00000100, or use Manager(...).restore(app)" in said
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "a run of 3 checkpoints" in shown[0]
    assert [line.split()[0] for line in shown if line.endswith("newest")] == ["100"]
    url = "memory://wrong-paths/run"
    checkpoint.save(f"{url}/last", {"x": torch.ones(1)})
    assert "a directory of checkpoints: last /" in refused(url)


def test_a_file_of_a_checkpoint(run):
    for file in (run / "step-00000009").iterdir():
        assert refused(file) == f"a file of a checkpoint / give the directory that it is in: {run}/step-00000009"
    url = "memory://wrong-paths/file"
    checkpoint.save(url, {"x": torch.ones(1)})
    assert refused(f"{url}/manifest.json").startswith("a file of a checkpoint / give the directory")


def test_files_and_directories_of_others(tmp_path):
    model = torch.nn.Linear(1, 1)
    torch.save(model.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"old.bin.*1\.6"):
        checkpoint.open(tmp_path / "old.bin")
    (tmp_path / "notes").write_text("mine")
    assert refused(tmp_path / "notes").startswith("a file / give the directory of a checkpoint")

    with pytest.warns(UserWarning, match="single process"):
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / ".metadata").unlink()
    assert refused(tmp_path / "dcp").startswith("files of torch.distributed.checkpoint without their .metadata")

    (tmp_path / "other").mkdir()
    assert refused(tmp_path / "other") == "nothing / give another path"
    (tmp_path / "other" / "readme.md").write_text("")
    assert refused(tmp_path / "other").startswith("1 files and directories, none of a checkpoint, such as readme.md")
    (tmp_path / "other" / "model.pt").write_text("no file of torch")
    assert refused(tmp_path / "other").startswith("2 files and directories, none of a checkpoint")
    assert refused(tmp_path / "nowhere") == "nothing / give another path"


def test_the_remains_of_a_save(tmp_path):
    (tmp_path / "0123456789ab-r00000.safetensors").touch()
    assert refused(tmp_path).startswith("1 files of a save that was not finished")


def test_what_cannot_be_looked_at_may_be_a_checkpoint(tmp_path):
    for call in (lambda: checkpoint.load(tmp_path, {"x": torch.ones(1)}), lambda: checkpoint.open(tmp_path)):
        with watched([Fault(0, "os:listdir", action="EIO", times=9)], []):
            with pytest.raises(CheckpointError, match="Input/output error") as caught:
                call()
            assert not isinstance(caught.value, CheckpointNotFoundError)


@pytest.mark.parametrize("call", ["save", "load", "open", "verify"])
def test_an_unknown_protocol(call):
    arguments = [{"x": 1}] if call in ("save", "load") else []
    with pytest.raises(CheckpointError, match=r"s4://bucket/x: found the protocol 's4'.*did you mean s3") as caught:
        getattr(checkpoint, call)("s4://bucket/x", *arguments)
    assert "fsspec.available_protocols()" in str(caught.value)


def test_a_package_that_is_not_there(monkeypatch):
    for package in ("obstore", "s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for protocol in ("s3", "gs"):  # that another test may have brought in
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with pytest.raises(CheckpointError, match=r"no package for 's3' .*pip install 'shardopt\[s3\]'"):
        checkpoint.open("s3://bucket/x")
    with pytest.raises(CheckpointError, match=r"no package for 'gs'.*pip install 'shardopt\[gcs\]'"):
        checkpoint.save("gs://bucket/x", {"x": 1})


def test_what_is_no_path_stays_pythons_own_error():
    with pytest.raises(TypeError):
        checkpoint.open(3)


@pytest.mark.parametrize(
    ("operation", "at", "written"),
    [("os:writev", 1, 0), ("os:writev", 2, 16 << 20), ("os:pwritev", 1, 0), ("os:pwritev", 3, 16 << 20)],
)
@pytest.mark.parametrize("kind", ["ENOSPC", "EDQUOT"])
def test_a_full_disk(tmp_path, monkeypatch, kind, operation, at, written):
    """Writes have 16 MiB and the rest; or past the page cache twice 8 MiB at one time, and the rest."""
    monkeypatch.setitem(direct._types, os.stat(tmp_path).st_dev, "ext4" if operation == "os:pwritev" else "other")
    monkeypatch.setattr(direct, "_WRITERS", 1)  # so that the first call is of the first block
    app = {"x": torch.zeros(5 << 20), "mine": checkpoint.PerRank("mine")}
    nbytes = checkpoint.save(tmp_path / "whole", app).bytes_written
    with watched([Fault(0, operation, at=at, action=kind)], []), pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "c", app)
    (problem,) = caught.value.problems
    assert problem.required == f"{nbytes:,} bytes for the data files of this rank"
    first = int(problem.found.split("and ")[1].split(" ")[0].replace(",", ""))
    assert written <= first < max(nbytes if written else 1, 1)
    assert ("quota" in problem.found) == (kind == "EDQUOT")
    assert not list(tmp_path.glob("c/*"))
    free = int(problem.found.split(" ")[0].replace(",", ""))
    assert free > 0


def test_a_full_disk_at_the_commit(tmp_path):
    with watched([Fault(0, "os:link", action="ENOSPC")], []), pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "c", {"x": torch.zeros(3)})
    (problem,) = caught.value.problems
    assert problem.required.endswith("bytes for the manifest")
    assert not list(tmp_path.glob("c/*"))


def test_a_root_below_a_file(tmp_path):
    (tmp_path / "f").write_text("a file")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.Manager(tmp_path / "f" / "run").save(1, {"x": torch.zeros(3)})
    (problem,) = caught.value.problems
    assert problem.key.startswith(f"{tmp_path}/f/run") and problem.found == "Not a directory"
    assert "move the file away" in problem.remedy and caught.value.code == "storage-failed"


@pytest.mark.parametrize(("kind", "says"), [("EACCES", "chmod"), ("EPERM", "chmod"), ("EROFS", "mount it for writing")])
def test_a_root_that_cannot_be_written(tmp_path, monkeypatch, kind, says):
    def makedirs(path, **options):
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)), path)

    monkeypatch.setattr(os, "makedirs", makedirs)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.Manager(tmp_path / "run").save(1, {"x": torch.zeros(3)})
    (problem,) = caught.value.problems
    assert problem.key.startswith(f"{tmp_path}/run") and says in problem.remedy


def test_a_disk_without_inodes(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "free_files", lambda self: 1)
    with watched([Fault(0, "os:link", action="ENOSPC")], []), pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "c", {"x": torch.zeros(3)})
    (problem,) = caught.value.problems
    assert problem.found.startswith("1 inode and ") and problem.required.endswith(", and an inode for each file")


@pytest.mark.parametrize("operation", ["os:mkdir", "os:open"])
def test_a_directory_that_takes_the_last_inode_or_gets_none(tmp_path, operation):
    """That there is no inode for a directory was another error; and each failed save left one without a file."""
    with watched([Fault(0, operation, action="ENOSPC")], []), pytest.raises(NoSpaceError) as caught:
        checkpoint.save(tmp_path / "c", {"x": torch.zeros(3)})
    assert "make room" in caught.value.problems[0].remedy
    assert not (tmp_path / "c").exists()
    (tmp_path / "c").mkdir()
    with watched([Fault(0, "os:open", action="ENOSPC")], []), pytest.raises(NoSpaceError):
        checkpoint.save(tmp_path / "c", {"x": torch.zeros(3)})
    assert (tmp_path / "c").is_dir()  # which this save has not made


def test_other_errors_of_the_system_stay_as_they_are(tmp_path):
    with (
        watched([Fault(0, "os:writev", action="EIO")], []),
        pytest.raises(CheckpointError, match="Input/output") as caught,
    ):
        checkpoint.save(tmp_path / "c", {"x": torch.zeros(3)})
    assert caught.value.__cause__.errno == errno.EIO


@pytest.mark.parametrize("kind", ["step", "own", "torch's", "on a store", "mirror"])
def test_a_run_is_not_kept_in_a_checkpoint(tmp_path, run, kind):
    app = {"x": torch.ones(1)}
    path, parent = f"{run}/step-00000100", f"give Manager {run}, of which this is a step"
    if kind == "own":
        path, parent = f"{tmp_path}/last", "give Manager another directory"
        checkpoint.save(path, app)
    elif kind == "torch's":
        path, parent = f"{tmp_path}/dcp", "give Manager another directory"
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(app, checkpoint_id=path)
    elif kind == "on a store":
        path, parent = "memory:///no-root/last", "give Manager another directory"
        checkpoint.save(path, app)
    before = sorted(tmp_path.rglob("*"))
    manager = (
        checkpoint.Manager(path)
        if kind != "mirror"
        else checkpoint.Manager(tmp_path / "other", destinations=[checkpoint.Mirror(path)])
    )
    for call in (lambda: manager.restore(app), lambda: manager.save(1, app)):
        with pytest.raises(CheckpointError, match="a run cannot be kept in a checkpoint") as caught:
            call()
        (problem,) = caught.value.problems
        assert problem.key == path
        assert problem.remedy.startswith(parent)
    assert sorted(tmp_path.rglob("*")) == before
    if kind in ("step", "mirror"):  # the remedy
        assert checkpoint.Manager(run).restore(app) == 100


def test_other_files_in_a_root_do_not_make_it_a_checkpoint(tmp_path):
    for name in ("manifest.json", "model.safetensors", "config.json"):
        (tmp_path / name).write_text("{}")
    app = {"x": torch.ones(1)}
    with checkpoint.Manager(tmp_path) as manager:
        assert manager.restore(app) == 0
        manager.save(1, app)
        assert manager.restore(app) == 1


def test_a_run_that_is_one_level_up_or_down_is_named(run, caplog):
    (run / "empty").mkdir()
    for root in (run.parent, run / "empty", run.parent / "Runs"):
        caplog.clear()
        assert checkpoint.Manager(root).restore({"x": torch.ones(1)}) == 0
        (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert line.startswith(f"no checkpoint is in {root}, and a run is in {run}: if that is meant, give Manager")
    caplog.clear()
    checkpoint.Manager(run.parent / "run2").restore({"x": torch.ones(1)})
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("inner", ["run/best", "."])
def test_a_run_within_that_of_another_manager_is_not_taken_for_a_wrong_path(run, caplog, inner):
    with checkpoint.Manager(run), checkpoint.Manager(run.parent / inner) as other:
        assert other.restore({"x": torch.ones(1)}) == 0
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    assert checkpoint.Manager(run.parent / inner).restore({"x": torch.ones(1)}) == 0
    assert "if that is meant, give Manager that path" in caplog.text


@pytest.mark.parametrize("short", ["step-9", "step-0009", "step_9", "9"])
def test_a_step_whose_number_is_short_is_named(run, short):
    assert refused(run / short) == f"nothing / give {run}/step-00000009, which is there"
    assert refused(run / "step-300").startswith("nothing / give another path: ")


def test_a_step_that_is_no_longer_there_is_told_with_those_that_are(run):
    lost = "retention may have removed this one, or it was not saved"
    for gone in ("step-00000010", "step-00000300"):  # the second one is an empty directory
        assert refused(run / gone) == f"nothing / give another path: the run there has steps 9, 20, 100; {lost}"
    url = "memory://wrong-paths/steps"
    checkpoint.save(f"{url}/step-00000000", {"x": torch.ones(1)})
    assert refused(f"{url}/step-00000010") == f"nothing / give another path: the run there has step 0; {lost}"
    for step in (*range(5), "5-b2", 6):
        if step:
            checkpoint.save(f"{url}/step-0000000{step}", {"x": torch.ones(1)})
    assert ": the run there has steps …, 1, 2, 3, 4, 5-b2, 6; " in refused(f"{url}/step-00000010")
    assert refused(f"{url}/last") == refused(run / "last") == "nothing / give another path"


def test_what_only_asks_whether_a_step_is_there_looks_for_no_others(run, monkeypatch):
    looked = []
    monkeypatch.setattr(LocalStorage, "names", lambda self: looked.append(self.url) or [])
    gone = storage_of(run / "step-00000300")
    assert look_at(gone).condition == "unfinished"
    assert (committed_id(gone), noted_of(gone).save_id) == (None, None)
    assert not looked


def test_a_root_that_cannot_be_written_is_told_of_at_the_restore(run, caplog, monkeypatch):
    """At INFO, as it may be meant: a job that evaluates only restores."""
    app = {"x": torch.ones(1)}
    caplog.set_level(logging.INFO, "shardopt")
    checkpoint.Manager(run).restore(app)
    assert "cannot be written" not in caplog.text
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for root, there in ((run, run), (run.parent / "a" / "b", run.parent)):
        caplog.clear()
        checkpoint.Manager(root).restore(app)
        (record,) = [each for each in caplog.records if "cannot be written" in each.getMessage()]
        assert record.getMessage() == f"{there} cannot be written to: a save to {root} would fail [storage-failed]"
        assert record.levelname == "INFO"


def test_a_limit_on_the_size_of_a_file(tmp_path):
    with watched([Fault(0, "os:writev", action="EFBIG")], []), pytest.raises(NoSpaceError) as caught:
        checkpoint.save(tmp_path / "c", {"x": torch.zeros(3)})
    (problem,) = caught.value.problems
    assert "no more allowed in one file" in problem.found and "raise the limit on the size of a file" in problem.remedy
