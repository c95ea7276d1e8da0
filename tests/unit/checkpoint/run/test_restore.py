"""`Manager.restore` in one process: the checkpoint it takes, those it passes over, and the messages."""

import errno
import io
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import fsspec
import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.run import manager as manager_module
from shardopt.checkpoint.run.listing import list_run
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.storage import LocalStorage, retry, storage_of
from shardopt.checkpoint.text import seconds_text
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, MismatchError, UnreadableError
from tests.harness import run_ranks
from tests.support.streams import flip, place_of


def app_of(value=0.0):
    return {"w": torch.full((5,), float(value)), "step": value}


def saved(root, *steps, **options):
    with checkpoint.Manager(root, **options) as manager:
        for step in steps:
            manager.save(step, app_of(step))
    return checkpoint.Manager(root, **options)


def restored(manager, **options):
    app = app_of()
    step = manager.restore(app, **options)
    assert app["step"] == step and app["w"].eq(step).all()
    return step


class BadDisk:
    """A disk that fails with an error wherever some paths are read."""

    def __init__(self, monkeypatch, number, *parts, times=10**9):
        self.number, self.parts, self.times = number, parts, times
        sound_read, sound_open = os.preadv, open

        def preadv(fd, *args):
            self.meet(os.readlink(f"/proc/self/fd/{fd}"))
            return sound_read(fd, *args)

        def opened(path, mode="r", *args, **options):
            if "r" in mode:
                self.meet(str(path))
            return sound_open(path, mode, *args, **options)

        monkeypatch.setattr("os.preadv", preadv)
        monkeypatch.setattr("builtins.open", opened)

    def meet(self, path):
        if all(part in path for part in self.parts) and self.times > 0:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))


def test_a_step_whose_link_leads_nowhere_is_told(tmp_path, caplog):
    root, archive, mirror = (tmp_path / name for name in ("run", "archive", "mirror"))
    saved(root, 1, 2, 3)
    shutil.copytree(root / "step-00000003", mirror / "step-00000003")
    for step in (1, 3):
        shutil.move(root / f"step-0000000{step}", archive / f"step-0000000{step}")
        (root / f"step-0000000{step}").symlink_to(archive / f"step-0000000{step}")
    assert restored(checkpoint.Manager(root)) == 3
    archive.rename(tmp_path / "unmounted")
    with checkpoint.Manager(root, destinations=[checkpoint.Mirror(mirror)]) as manager:
        assert restored(manager) == 3
    caplog.clear()
    manager = checkpoint.Manager(root, keep=2)
    assert restored(manager) == 2
    assert f"found a link to {archive}/step-00000003, where nothing is" in caplog.text and "mount what" in caplog.text
    assert manager.steps() == [2]
    assert [each.condition for each in list_run(root).checkpoints] == ["unreadable", "committed", "unreadable"]
    manager.save(3, app_of(3))  # in place of the link
    assert manager.steps() == [2, 3] and not (root / "step-00000003").is_symlink()
    assert sorted(path.name for path in (tmp_path / "unmounted").iterdir()) == ["step-00000001", "step-00000003"]


def test_links_that_lead_nowhere_take_no_place_of_a_checkpoint_where_some_are_removed_or_copied(tmp_path, caplog):
    root, mirror = tmp_path / "run", tmp_path / "mirror"
    saved(root, 1, 2, 3, 4)
    for step in (3, 4):
        shutil.rmtree(root / f"step-0000000{step}")
        (root / f"step-0000000{step}").symlink_to(tmp_path / "archive")
    keep = checkpoint.Retention(last=2, best=("loss", "min", 1))
    first = saved(tmp_path / "first", 4)  # of a job that resumes; the other is its second, which counts all steps
    assert restored(first) == 4
    with checkpoint.Manager(root, keep=keep, destinations=[checkpoint.Mirror(mirror)]) as manager:
        manager.save(5, app_of(5), metrics={"loss": 1.0})
        manager.wait()
    assert manager.steps() == [2, 5] and not caplog.messages
    assert checkpoint.Manager(mirror).steps() in ([2, 5], [5])  # a copy is left out once a newer one waits
    assert (root / "step-00000003").is_symlink() and (root / "step-00000004").is_symlink()  # for when it is back
    manager = checkpoint.Manager(root)
    manager.delete(4)
    assert not (root / "step-00000004").is_symlink() and manager.steps() == [2, 5]
    with pytest.raises(CheckpointNotFoundError):
        manager.delete(4)


def test_a_step_that_is_removed_while_it_is_read_is_gone_and_not_damaged(tmp_path, monkeypatch, caplog):
    manager, names = saved(tmp_path, 1, 2, 3), LocalStorage.names

    def removed_before(self, number, keys=None, inner=OwnSource.open_file):
        if self.url.endswith("3"):
            shutil.rmtree(self.url, ignore_errors=True)
        return inner(self, number, keys)

    monkeypatch.setattr(OwnSource, "open_file", removed_before)
    assert restored(manager) == 2
    assert "step 3 is gone" in caplog.text and "damaged" not in caplog.text

    def removed_between(self):
        if self.url.endswith("2"):
            shutil.rmtree(self.url, ignore_errors=True)
        return names(self)

    monkeypatch.setattr(LocalStorage, "names", removed_between)
    assert [(each.id.step, each.condition) for each in list_run(tmp_path).checkpoints] == [(1, "committed")]


def test_a_run_all_of_whose_steps_are_links_that_lead_nowhere_does_not_begin_anew(tmp_path):
    (tmp_path / "step-00000001").symlink_to(tmp_path / "archive")
    with pytest.raises(UnreadableError, match=r"link to .*archive, where nothing is"):
        checkpoint.Manager(tmp_path).restore(app_of())


@pytest.mark.parametrize("part", ["manifest.json", ".safetensors"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN])
def test_what_a_disk_does_not_give_back_is_damaged(tmp_path, monkeypatch, caplog, number, part):
    manager = saved(tmp_path, 1, 2, 3)
    with monkeypatch.context() as patch:
        BadDisk(patch, number, "step-00000003", part)
        assert restored(manager) == 2
    messages = [record.getMessage() for record in caplog.records]
    assert os.strerror(number) in messages[0] and "trying again" in messages[0]
    assert (
        "step 3 is damaged, resuming from the previous checkpoint" in messages[1] and os.strerror(number) in messages[1]
    )
    manager.save(3, app_of(30))  # which is not in the way
    assert checkpoint.verify(manager.path(3)).ok


def test_a_disk_that_comes_back_costs_nothing(tmp_path, monkeypatch):
    manager = saved(tmp_path, 1, 2)
    BadDisk(monkeypatch, errno.EIO, "step-00000002", times=1)
    assert restored(manager) == 2


def test_a_disk_that_gives_nothing_back_is_an_error(tmp_path, monkeypatch):
    manager = saved(tmp_path, 1, 2)
    BadDisk(monkeypatch, errno.EIO, ".safetensors")
    with pytest.raises(UnreadableError, match="step-00000001"):
        manager.restore(app_of())


@pytest.mark.parametrize("older", ["damaged", "does not fit", "none"])
def test_what_is_raised_says_that_a_load_before_may_have_changed_the_app(tmp_path, older):
    saved(tmp_path, *([2] if older == "none" else [1, 2]))
    (data,) = tmp_path.glob("step-00000002/*.safetensors")
    flip(data, place_of(data, "w")[0])
    if older == "damaged":
        (tmp_path / "step-00000001" / "manifest.json").write_text("x")
    if older == "does not fit":
        shutil.rmtree(tmp_path / "step-00000001")
        checkpoint.save(tmp_path / "step-00000001", {"w": torch.ones(6), "step": 1})
    expected = MismatchError if older == "does not fit" else CorruptionError
    with pytest.raises(expected, match="the app may be loaded in part") as raised:
        checkpoint.Manager(tmp_path).restore(app_of())
    assert "nothing was changed" not in str(raised.value)
    assert ("this load changed nothing; the load of" in str(raised.value)) == (older != "none")


def test_of_several_loads_that_failed_the_one_that_may_have_changed_the_app_is_named(tmp_path):
    saved(tmp_path, 1, 2, 3)
    (data,) = tmp_path.glob("step-00000003/*.safetensors")
    flip(data, place_of(data, "w")[0])
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}" / "manifest.json").write_text("x")
    with pytest.raises(CorruptionError, match=r"the load of .*step-00000003 before it failed: the app may be loaded"):
        checkpoint.Manager(tmp_path).restore(app_of())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ETIMEDOUT, errno.ENOTCONN])
def test_what_says_nothing_of_the_bytes_is_no_damage(tmp_path, monkeypatch, number):
    manager = saved(tmp_path, 1, 2)
    BadDisk(monkeypatch, number, "step-00000002", ".safetensors")
    with pytest.raises(CheckpointError) as caught:
        manager.restore(app_of())
    assert not isinstance(caught.value, CorruptionError)


def test_a_store_that_is_down_is_no_damage(monkeypatch):
    monkeypatch.setattr(retry, "RETRY_POLICY", retry.RetryPolicy(2, 0.001, 0.001, 5.0))
    root = "memory://shardopt-down"
    manager = saved(root, 1, 2)
    fs = fsspec.filesystem("memory")

    def fail(*args, **options):
        raise ConnectionError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(type(fs), "cat_ranges", fail)
        with pytest.raises(CheckpointError, match="2 attempts") as caught:
            manager.restore(app_of())
        assert not isinstance(caught.value, CorruptionError)
    assert restored(manager) == 2


def test_one_that_another_process_removes_meanwhile_is_gone_around(tmp_path, monkeypatch):
    """A process of the job, not dead yet, commits a newer one and clears the one that is being restored."""
    manager = saved(tmp_path / "run", 5)
    saved(tmp_path / "other", 6)
    load = manager_module.load_with

    def meanwhile(url, *args, **options):
        if url.endswith("5"):
            shutil.move(tmp_path / "other" / "step-00000006", tmp_path / "run" / "step-00000006")
            shutil.rmtree(url)
        return load(url, *args, **options)

    monkeypatch.setattr(manager_module, "load_with", meanwhile)
    assert restored(manager) == 6


def test_nothing_to_restore_may_be_an_error(tmp_path):
    for root, contents in (
        (tmp_path, "no committed checkpoint"),
        (tmp_path / "unmounted", "nothing, not even the directory"),
    ):
        manager = checkpoint.Manager(root)
        assert manager.restore(app_of(7)) == 0
        with pytest.raises(CheckpointNotFoundError, match=f"found {contents}; required one; mount what is missing"):
            manager.restore(app_of(7), required=True)
    assert not (tmp_path / "unmounted").exists()
    assert restored(saved(tmp_path, 4), required=True) == 4


def test_a_run_whose_only_checkpoint_is_of_step_0_is_no_new_run(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    assert manager.restored_step is None
    assert (manager.restore(app_of(7)), manager.restored_step) == (0, None)
    manager.save(0, app_of(0))
    again, app = checkpoint.Manager(tmp_path), app_of(7)
    assert (again.restore(app), again.restored_step) == (0, 0)
    assert app["step"] == 0


def test_it_takes_what_load_takes(tmp_path):
    model = torch.nn.Linear(3, 3)
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, {"model": model, "optimizer": optimizer, "old": 3})
    new = torch.nn.Sequential(torch.nn.Linear(3, 3))
    app = {"model": new, "optimizer": shardopt.keyed("adamw", new.named_parameters()), "added": 5}
    rename = {r"^model\.": "model.0.", r"^optimizer\.state\.": "optimizer.state.0."}
    with pytest.raises(MismatchError):
        manager_of(tmp_path).restore(app, rename=rename)
    assert manager_of(tmp_path).restore(app, rename=rename, strict=False, transactional=True) == 1
    assert torch.equal(new[0].weight, model.weight) and app["added"] == 5
    state = app["optimizer"].state_dict()["state"]["0.weight"]
    assert torch.equal(state["exp_avg"], optimizer.state_dict()["state"]["weight"]["exp_avg"])
    done = []
    other = {"model": torch.nn.Linear(3, 3), "old": 0}
    options = {"select": "^model", "share_reads": "never", "progress": lambda *counts: done.append(counts)}
    assert manager_of(tmp_path).restore(other, **options, strict=False) == 1
    assert torch.equal(other["model"].weight, model.weight) and other["old"] == 0 and done


def manager_of(root):
    return checkpoint.Manager(root)


# Messages.

# In a process that is not pytest's, which configures logging; each configuration in a child of it.


def stderr_under(root, configurations):
    """Returns the lines that go to stderr, by configuration of logging."""
    assert not logging.root.handlers
    for number, configured in enumerate(configurations):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(f"{root}/{number}.txt", os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # for as long as the child lives
            exec(configured)
            for _ in range(2):
                checkpoint.Manager(root).restore(app_of())
            checkpoint.Manager(root + "/a/none").restore(app_of())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    return {each: Path(f"{root}/{number}.txt").read_text().splitlines() for number, each in enumerate(configurations)}


CONFIGURATIONS = {
    "": 3,
    "logging.basicConfig(level=logging.INFO)": 3 + 2,  # and the figures of two loads
    "logging.basicConfig()": 0,
    "logging.getLogger('shardopt').addHandler(logging.NullHandler())": 0,
    "logging.getLogger('shardopt').setLevel(logging.WARNING)": 0,
    "logging.getLogger().setLevel(logging.ERROR)": 0,
    "logging.getLogger('shardopt').setLevel(logging.INFO)": 3,
    "logging.disable(logging.INFO)": 0,
    "logging.getLogger('shardopt').disabled = True": 0,
    "logging.lastResort = None": 0,
    "logging.getLogger('other').addHandler(logging.StreamHandler())": 3,
}


def test_a_program_sees_what_was_restored_unless_it_has_configured_logging_otherwise(tmp_path):
    saved(tmp_path, 3)
    (messages,) = run_ranks(1, stderr_under, str(tmp_path), list(CONFIGURATIONS), backend=None)
    assert {configured: len(lines) for configured, lines in messages.items()} == CONFIGURATIONS
    assert all(sum("resumed step 3" in line for line in lines) == (2 if lines else 0) for lines in messages.values())
    first, second, none = messages[""]
    assert first.startswith(f"shardopt: resumed step 3 from {tmp_path}/step-00000003, saved by 1 rank on ")
    assert first.endswith(" ago") and second.startswith(first.rsplit(",", 1)[0])
    assert none == f"shardopt: starting fresh: {tmp_path}/a/none does not exist"


def test_a_checkpoint_of_another_step_than_its_directorys_is_told(tmp_path, caplog):
    app = app_of(4.0) | {"step": 4}
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(4, app)
    os.rename(tmp_path / "step-00000004", tmp_path / "step-00000400")
    assert checkpoint.Manager(tmp_path).restore(app, select="w") == 400  # without the step
    assert not caplog.messages
    assert checkpoint.Manager(tmp_path).restore(app) == 400 and app["step"] == 4
    (line,) = caplog.messages
    assert line.startswith('app["step"] is 4, and the step that was restored 400: its directory was renamed')


class NoWriter(io.StringIO):
    """A stderr that cannot be written."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


def restore_without_stderr(root):
    """Restores where nothing configures logging, and stderr fails."""
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
    errors = [OSError(errno.ENOSPC, "full"), UnicodeEncodeError("ascii", "x", 0, 1, "no such letter"), ValueError()]
    steps = []
    for sys.stderr in map(NoWriter, errors):
        steps.append(checkpoint.Manager(root).restore(app_of()))
    sys.stderr = sys.__stderr__
    return steps


def test_a_notice_that_cannot_be_written_fails_no_restore(tmp_path):
    saved(tmp_path, 3)
    assert run_ranks(1, restore_without_stderr, str(tmp_path), backend=None) == [[3, 3, 3]]


@pytest.mark.parametrize("root", ["disk", "memory://shardopt-cut-off"])
def test_newer_steps_without_a_manifest_are_told(tmp_path, monkeypatch, caplog, root):
    """As of a copy of the root that was cut off; not those below what is resumed, and not empty directories."""
    monkeypatch.chdir(tmp_path)
    manager = saved(root, 1, 2, 3, 4)
    for step in (1, 4):
        storage_of(manager.path(step)).remove("manifest.json")
    Path("disk/step-00000005").mkdir(parents=True)
    with caplog.at_level(logging.INFO, "shardopt"):
        assert restored(checkpoint.Manager(root)) == 3
        assert restored(checkpoint.Manager(root), step=2) == 2  # which asks for no newer one
    told = [(record.levelname, record.getMessage().partition(" in ")[0]) for record in caplog.records]
    assert [each for each in told if "passed over" in each[1]] == [("INFO", "passed over step 4")]


def test_a_mirror_with_higher_steps_of_before_a_backup_is_warned_of(tmp_path, caplog):
    root, to_mirror = tmp_path / "root", {"destinations": [checkpoint.Mirror(str(tmp_path / "mirror"))]}

    def resumed(step=None, **options):
        with checkpoint.Manager(root, **options) as manager:
            return restored(manager, step=step)

    saved(root, 1, 4, **to_mirror).close()
    shutil.rmtree(root / "step-00000004")  # a backup of step 1 comes back
    assert resumed(**to_mirror) == 4 and "was saved later" not in caplog.text
    saved(root, 2).close()
    assert resumed(**to_mirror) == 4
    (line,) = [record.getMessage() for record in caplog.records if "was saved later" in record.getMessage()]
    assert f"step 4 was restored from {tmp_path}/mirror/step-00000004" in line and "restore(app, step=2)" in line
    assert resumed(step=2, **to_mirror) == 2  # the remedy, followed
    assert resumed(**to_mirror) == 2 and caplog.text.count("was saved later") == 1


@pytest.mark.parametrize("name", ["step-30", "step-00000030"])
def test_a_fresh_start_beside_checkpoints_of_dcp_says_so(tmp_path, caplog, name):
    checkpoint.save(tmp_path / "own", {"w": torch.ones(2)})
    checkpoint.convert(tmp_path / "own", tmp_path / "run" / name, to="dcp")
    (tmp_path / "run" / "tensorboard").mkdir()
    with caplog.at_level(logging.INFO, "shardopt"), checkpoint.Manager(tmp_path / "run") as manager:
        assert manager.restore({"w": torch.zeros(2)}) == 0
    line = caplog.text
    assert f"starting fresh: no checkpoint in {tmp_path}/run; {name} is one of torch.distributed.checkpoint" in line


def test_where_logging_is_configured_it_is_a_line_of_the_log(tmp_path, caplog, capsys):
    with caplog.at_level(logging.INFO, "shardopt"):
        assert restored(saved(tmp_path, 3)) == 3
    assert sum("resumed step 3" in record.getMessage() for record in caplog.records) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 ms"),
        (0.003, "3 ms"),
        (0.16, "0.16 s"),
        (5.0, "5 s"),
        (99, "99 s"),
        (100, "2 min"),
        (3599, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (9e5, "10 days"),
    ],
)
def test_lengths_of_time(seconds, words):
    assert seconds_text(seconds) == words


@pytest.mark.parametrize("stage", [None, "lazy"])
def test_saves_that_are_too_slow_for_a_stop_are_warned_of(tmp_path, monkeypatch, caplog, stage):
    def warnings():
        return [each.getMessage() for each in caplog.records if "asked to stop" in each.getMessage()]

    write = LocalStorage.write

    def write_slowly(*args):
        time.sleep(0.3)
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", write_slowly)
        saved(tmp_path, 1, 2, stage=stage)
    assert not warnings()  # nobody wants to stop it
    ample = {"stop_on": checkpoint.Preemption(signal.SIGUSR2, seconds=500.0), "stage": stage}
    with checkpoint.Manager(tmp_path, **ample) as manager:
        restored(manager)
        manager.save(3, app_of(3))
    assert not warnings()
    short = ample | {"stop_on": checkpoint.Preemption(signal.SIGUSR2, seconds=0.5)}
    with checkpoint.Manager(tmp_path, **short) as manager:
        assert restored(manager, step=2) == 2
        (warning,) = warnings()  # of a save by an earlier process of the job, at the start of this one
        assert "step-00000002 took 0." in warning and "0.5 s (seconds of Preemption)" in warning
        monkeypatch.setattr(LocalStorage, "write", write_slowly)
        manager.save(3, app_of(3))
    assert len(warnings()) == 1  # once
    caplog.clear()
    with checkpoint.Manager(tmp_path / "other", **short) as manager:
        manager.save(1, app_of(1))
    assert "step-00000001 took 0." in warnings()[0]


def test_nothing_is_said_of_a_save_whose_seconds_were_not_noted(tmp_path, caplog):
    for name in ("v4", "base_of_v4"):
        shutil.copytree(Path(__file__).parents[3] / "golden" / name, tmp_path / name)
    (tmp_path / "v4").rename(tmp_path / "step-00000001")
    with checkpoint.Manager(tmp_path, stop_on=checkpoint.Preemption(signal.SIGUSR2, seconds=0.001)) as manager:
        assert manager.restore({"step": 0}, strict=False) == 1
    assert not [each for each in caplog.records if "asked to stop" in each.getMessage()]
