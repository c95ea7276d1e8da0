"""Copies of checkpoints on a second root."""

import errno
import threading
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.checkpoint.run import copying
from shardopt.checkpoint.run import mirror as mirror_module
from shardopt.checkpoint.run.mirror import MirrorCopier
from shardopt.checkpoint.saving import removal
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.storage import LocalStorage, storage_of
from shardopt.errors import CheckpointError, CheckpointExistsError, CorruptionError
from tests.harness import Fault, run_ranks, run_ranks_outcomes

RANKS_STAY = True


@pytest.fixture
def roots(tmp_path):
    return str(tmp_path / "local"), f"memory://shardopt-mirror/{uuid.uuid4().hex}"


def value(step):
    return torch.arange(300_000, dtype=torch.float32) + step


def save(root, step):
    name = f"step-{step:08d}"
    checkpoint.save(f"{root}/{name}", {"x": value(step), "step": step, "mine": checkpoint.PerRank(step)}, durable=False)
    return name


def restore(mirror):
    """As a Manager does: the newest that is whole, wherever it is."""
    for _, url in mirror.committed():
        app = {"x": torch.zeros(300_000), "step": 0, "mine": checkpoint.PerRank(0)}
        try:
            checkpoint.load(url, app)
        except CorruptionError:
            continue
        assert torch.equal(app["x"], value(app["step"]))
        return app["step"], url
    return 0, None


def test_copies_are_whole(roots):
    local, remote = roots
    with MirrorCopier(local, remote) as mirror:
        name = save(local, 1)
        (storage_of(local).child(name)).publish("metrics.json", b"{}")
        mirror.upload(name)
        mirror.wait()
        assert mirror.uploading() == frozenset()
        report = mirror.report
    here, there = storage_of(local).child(name), storage_of(remote).child(name)
    assert there.names() == here.names() and "metrics.json" in there.names()
    assert all(there.read(each) == here.read(each) for each in here.names())
    assert checkpoint.verify(there.url).ok
    assert report.bytes_written == report.bytes_total == sum(here.size(n) for n in here.names() if "-r0" in n)
    assert report.url == there.url


def test_the_newest_whole_one_is_found_in_either_root(roots):
    local, remote = roots
    with MirrorCopier(local, remote) as mirror:
        assert restore(mirror) == (0, None)
        for step in (1, 2):
            mirror.upload(save(local, step))
            mirror.wait()
        save(local, 3)
        assert [(name[-1], url.startswith("memory")) for name, url in mirror.committed()] == [
            ("3", False),
            ("2", False),
            ("2", True),
            ("1", False),
            ("1", True),
        ]
        assert restore(mirror) == (3, f"{local}/step-00000003")
        flip(f"{local}/step-00000003")
        assert restore(mirror) == (2, f"{local}/step-00000002")
        flip(f"{local}/step-00000002")
        assert restore(mirror) == (2, storage_of(remote).child("step-00000002").url)


def flip(path):
    storage = storage_of(path)
    (name,) = [name for name in storage.names() if name.endswith(".safetensors")]
    with open(f"{path}/{name}", "r+b") as file:
        file.seek(500_000)
        byte = file.read(1)[0]
        file.seek(500_000)
        file.write(bytes([byte ^ 1]))


def test_what_is_damaged_is_not_copied(roots, caplog):
    """And it is told at the next call, which is carried out all the same."""
    local, remote = roots
    first, second = save(local, 1), save(local, 2)
    flip(f"{local}/{first}")
    mirror = MirrorCopier(local, remote)
    mirror.upload(first)
    mirror.finish()
    with pytest.raises(CorruptionError, match="checksum"):
        mirror.upload(second)
    mirror.close()
    assert [name for name, url in mirror.committed() if url.startswith("memory")] == [second]
    assert "checksum" in caplog.text
    assert storage_of(remote).child(first).names() == []


def test_a_copy_that_failed_leaves_none_of_its_files_to_one_that_is_committed_meanwhile(roots, monkeypatch):
    """Another process of the job makes the same copy, and is done just when this one has found no manifest there."""
    local, _ = roots
    there = storage_of(local).child(save(local, 1))
    manifest, data = read_manifest(there)
    there.remove_durably("manifest.json")
    look = removal.referred_in

    def late(storage):
        there.publish("manifest.json", data)
        return look(storage)

    monkeypatch.setattr(removal, "referred_in", late)
    removal.discard(there, manifest.save_id)
    assert there.names() == []


@pytest.mark.parametrize("is_done", ["before it is looked for", "after that"])
def test_a_copy_that_another_process_has_made_meanwhile_stays_whole_or_goes(roots, monkeypatch, is_done):
    local, _ = roots
    name = save(local, 1)
    here, there = storage_of(local).child(name), storage_of(local).child("copy")
    manifest, data = read_manifest(here)
    there.make()
    for file in manifest.own_files:
        there.publish(file.name, here.read(file.name))
    files = set(there.names())
    look = copying.referred_in

    def late(storage):
        there.publish("manifest.json", data)
        return look(storage)

    if is_done == "after that":
        monkeypatch.setattr(copying, "referred_in", late)
    else:
        there.publish("manifest.json", data)
    copying.prepare_copy(here, there, manifest, [""])
    assert set(there.names()) == (set() if is_done == "after that" else {*files, "manifest.json"})


def test_one_that_waits_is_left_out_for_a_newer_one(roots, monkeypatch):
    local, remote = roots
    names = [save(local, step) for step in (1, 2, 3, 4)]
    may_go_on, sound = threading.Event(), copying.upload_files

    def slow(*args):
        may_go_on.wait(30)
        return sound(*args)

    monkeypatch.setattr(copying, "upload_files", slow)
    with MirrorCopier(local, remote) as mirror:
        mirror.upload(names[0])
        while not storage_of(remote).exists(f"{names[0]}/none") and not mirror.uploading():
            pass
        for name in names[1:]:
            mirror.upload(name)
        waiting = mirror.uploading()
        may_go_on.set()
        mirror.wait()
        copied = [name for name, url in mirror.committed() if url.startswith("memory")]
    assert set(names[1:]) <= waiting
    assert names[3] in copied and names[1] not in copied and names[2] not in copied


def test_remains_of_a_dead_upload_are_cleared_and_a_copy_is_made_once(roots):
    local, remote = roots
    name = save(local, 1)
    there = storage_of(remote).child(name)
    there.publish("dead0-r00000.safetensors", b"remains")
    with MirrorCopier(local, remote) as mirror:
        mirror.upload(name)
        mirror.wait()
        assert "dead0-r00000.safetensors" not in there.names()
        before = mirror.report
        mirror.upload(name)
        mirror.wait()
        assert mirror.report is before


def removed_while_it_is_copied(local, remote, removed, at):
    """Returns what closing raises after a checkpoint has lost files at a call of the copy, and the copies' steps."""
    manager, inner = checkpoint.Manager(local, destinations=[checkpoint.Mirror(remote)]), getattr(copying, at)
    rank = manager._run.ranks.rank

    def removes(*args):
        if rank == 0 and manager._run.mirror.uploading() == {"step-00000002"}:
            for path in Path(local, "step-00000002").glob(removed):
                path.unlink()
        return inner(*args)

    manager.save(1, {"x": value(1)})
    manager.wait()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(copying, at, removes)
        manager.save(2, {"x": value(2)})
        manager._run.mirror.finish()
    try:
        manager.save(3, {"x": value(3)})
        raised = None
    except CorruptionError as error:
        raised = error.problems[0].found
    manager.wait()
    manager.close()
    return raised, checkpoint.Manager(remote).steps(), sorted(path.name for path in Path(remote).iterdir())


@pytest.mark.parametrize("at", ["is_copied", "upload_files"])
def test_a_checkpoint_that_is_removed_while_it_is_copied_is_left_out(roots, at, caplog):
    told = removed_while_it_is_copied(*two_local_roots(roots), "*", at)
    assert told == (None, [1, 3], ["step-00000001", "step-00000003"])
    assert "step-00000002 is not copied: it was removed" in caplog.text


def test_ranks_agree_on_what_was_removed_while_it_was_copied(roots):
    for told in run_ranks(2, removed_while_it_is_copied, *two_local_roots(roots), "*", "upload_files"):
        assert told == (None, [1, 3], ["step-00000001", "step-00000003"])


def test_a_root_whose_disk_goes_away_while_it_is_copied_is_an_error(roots, monkeypatch):
    local, remote = two_local_roots(roots)
    inner = copying.upload_files

    def goes_away(*args):
        Path(local).rename(f"{local}.away")
        Path(local).mkdir()
        return inner(*args)

    monkeypatch.setattr(copying, "upload_files", goes_away)
    manager = checkpoint.Manager(local, destinations=[checkpoint.Mirror(remote)])
    manager.save(1, {"x": value(1)})
    with pytest.raises(CheckpointError, match="no such file"):
        manager.close()


def test_a_checkpoint_that_loses_files_alone_is_damaged(roots):
    assert removed_while_it_is_copied(*two_local_roots(roots), "*-r*", "upload_files")[:2] == ("no such file", [1])


# On ranks: to a directory that fsspec reaches as if it were remote.


def mirrored(local, remote, steps):
    names = [save(local, step) for step in steps]
    with MirrorCopier(local, remote, deadline_seconds=4) as mirror:
        for name in names:
            mirror.upload(name)
            mirror.wait()
        return mirror.report


def restored(local, remote):
    return restore(MirrorCopier(local, remote))


def test_each_rank_uploads_what_it_wrote(tmp_path):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    reports = run_ranks(3, mirrored, local, remote, [1, 2])
    assert all(report.bytes_written > 0 for report in reports)
    assert sum(report.bytes_written for report in reports) == reports[0].bytes_total
    assert checkpoint.verify(f"{remote}/step-00000002").ok
    assert run_ranks(3, restored, local, remote) == [(2, f"{local}/step-00000002")] * 3
    flip_first(f"{local}/step-00000002")
    assert run_ranks(3, restored, local, remote) == [(2, f"{remote}/step-00000002")] * 3


def seen_by_all(local, remote):
    """Of disks that each rank has for itself, here."""
    return MirrorCopier(local if dist.get_rank() == 0 else local + "-other", remote).committed()


def test_a_local_copy_counts_only_where_every_rank_sees_it(tmp_path):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    with MirrorCopier(local, remote) as mirror:
        mirror.upload(save(local, 1))
        mirror.wait()
        save(local, 2)
    save(local + "-other", 1)
    found = [("step-00000001", f"{remote}/step-00000001")]
    for own, seen in zip((local, local + "-other"), run_ranks(2, seen_by_all, local, remote), strict=True):
        assert seen == [("step-00000001", f"{own}/step-00000001"), *found]


def flip_first(path):
    storage = storage_of(path)
    name = next(name for name in storage.names() if name.endswith(".safetensors"))
    data = bytearray(storage.read(name))
    data[len(data) // 2] ^= 1
    with open(f"{path}/{name}", "wb") as file:
        file.write(data)


def test_a_rank_that_dies_in_an_upload_leaves_no_copy(tmp_path):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    fault = Fault(1, "shardopt.checkpoint.run.copying:upload_files", at=2)
    outcomes = run_ranks_outcomes(3, mirrored, local, remote, [1, 2], faults=[fault])
    assert outcomes[1].signal is not None
    assert all("rank 1" in str(outcomes[rank].error) for rank in (0, 2))
    assert checkpoint.verify(f"{remote}/step-00000001").ok
    assert not storage_of(remote).child("step-00000002").exists("manifest.json")
    assert checkpoint.verify(f"{local}/step-00000002").ok


def run_with_mirror(local, remote, last):
    """Saves steps 1 to `last` through a Manager with a second root."""
    with checkpoint.Manager(
        local,
        destinations=[checkpoint.Mirror(remote)],
        keep=checkpoint.Retention(last=2, best=("loss", "min", 1)),
        stage="now",
    ) as manager:
        for step in range(1, last + 1):
            manager.save(step, {"x": value(step), "step": step}, metrics={"loss": abs(step - 2)})
            manager._steps.background.wait()
            manager._run.mirror.wait()
    return manager.steps()


def steps_at(root):
    return checkpoint.Manager(root).steps()


def restored_by_manager(local, remote):
    app = {"x": torch.zeros(300_000), "step": 0}
    with checkpoint.Manager(local, destinations=[checkpoint.Mirror(remote)]) as manager:
        step = manager.restore(app)
    assert not step or torch.equal(app["x"], value(step))
    return step


def test_a_manager_copies_what_it_saves_and_keeps_the_same_on_both_roots(roots):
    assert run_ranks(2, run_with_mirror, *two_local_roots(roots), 6) == [[2, 5, 6]] * 2
    assert steps_at(roots[0]) == steps_at(two_local_roots(roots)[1]) == [2, 5, 6]


def two_local_roots(roots):
    """Two local roots, as other processes see nothing of this one's memory://."""
    return roots[0], roots[0] + "-copies"


def test_a_manager_restores_from_whichever_is_whole(roots):
    local, remote = two_local_roots(roots)
    run_ranks(2, run_with_mirror, local, remote, 4)
    assert run_ranks(3, restored_by_manager, local, remote) == [4] * 3
    for name in storage_of(local).child("step-00000004").names():
        if name.endswith(".safetensors"):  # the newest is damaged here, and whole there
            storage_of(local).child("step-00000004").remove(name)
    assert run_ranks(3, restored_by_manager, local, remote) == [4] * 3
    storage_of(remote).child("step-00000004").remove("manifest.json")  # and now not there either
    assert run_ranks(2, restored_by_manager, local, remote) == [3] * 2
    assert run_ranks(2, restored_by_manager, local + "-lost", remote) == [3] * 2  # all of the local disk is gone


def fail_to_copy(local, remote):
    """Returns the steps of saves that raised after a copy had failed; the one after that goes well."""
    manager = checkpoint.Manager(local, destinations=[checkpoint.Mirror(remote)])
    copy = mirror_module.copy_over_ranks
    mirror_module.copy_over_ranks = lambda *args: (_ for _ in ()).throw(CheckpointError("the store is full"))
    try:
        manager.save(1, {"x": value(1)})
        manager._run.mirror.finish()
    finally:
        mirror_module.copy_over_ranks = copy
    raised = []
    for step in (2, 3, 4):
        try:
            manager.save(step, {"x": value(step)})
            manager._run.mirror.finish()
        except CheckpointError as error:
            raised.append((step, "the store is full" in str(error)))
    manager.close()
    return raised, checkpoint.Manager(remote).steps()


def test_a_copy_that_failed_is_raised_by_the_manager_on_all_ranks_and_training_may_continue(roots):
    for raised, there in run_ranks(2, fail_to_copy, *two_local_roots(roots)):
        assert raised == [(3, True)] or raised == [(2, True)]
        assert 4 in there


# What a second root may hold already, and what may stand beside a checkpoint.


def uploaded(local, remote, *names):
    with MirrorCopier(local, remote) as mirror:
        for name in names:
            mirror.upload(name)
            mirror.wait()


def test_the_newest_is_the_one_with_the_greatest_number(roots):
    local, _ = roots
    save(local, 99_999_999)
    save(local, 100_000_000)
    mirror = MirrorCopier(*roots)
    assert [name for name, _ in mirror.committed()] == ["step-100000000", "step-99999999"]
    manager = checkpoint.Manager(local, destinations=[checkpoint.Mirror(local + "-copies")])
    app = {"x": torch.zeros(300_000), "step": 0, "mine": checkpoint.PerRank(0)}
    assert manager.restore(app) == app["step"] == 100_000_000
    manager.close()


class FullDisk:
    """A disk that takes so many data files, and no more."""

    def __init__(self, monkeypatch, root, files):
        self.root, self.left, self.sound = root, files, LocalStorage.write
        monkeypatch.setattr(LocalStorage, "write", lambda storage, name, buffers: self.write(storage, name, buffers))

    def write(self, storage, name, buffers):
        if self.root not in storage.url:
            return self.sound(storage, name, buffers)
        self.left -= 1
        if self.left < 0:
            self.sound(storage, name, [next(iter(buffers))])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.sound(storage, name, buffers)


@pytest.mark.parametrize("killed", [False, True])
def test_a_copy_that_did_not_fit_is_made_when_there_is_room(tmp_path, monkeypatch, killed):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    name = save(local, 1)
    disk = FullDisk(monkeypatch, remote, 0)
    if killed:  # and had no time to clear up
        monkeypatch.setattr(copying, "discard", lambda *unused: None)
    for _ in range(2):
        mirror = MirrorCopier(local, remote)
        mirror.upload(name)
        with pytest.raises(CheckpointError, match="No space left"):
            mirror.close()
        assert bool(storage_of(remote).child(name).names()) == killed
    disk.left = 9
    uploaded(local, remote, name)
    assert checkpoint.verify(f"{remote}/{name}").ok


@pytest.mark.parametrize("to", ["a directory", "a store"])
def test_what_stands_beside_is_copied_piece_by_piece(tmp_path, roots, monkeypatch, to):
    local, remote = roots
    remote = str(tmp_path / "b") if to == "a directory" else remote
    name = save(local, 1)
    beside = tmp_path / "local" / name
    large = bytes(range(256)) * 80_000  # 20 MB
    (beside / "tokens.bin").write_bytes(large)
    (beside / "empty.txt").write_bytes(b"")
    (beside / "tensorboard").mkdir()
    (beside / "tensorboard" / "events").write_text("mine")
    largest, read = 0, LocalStorage.read

    def measured(self, *args):
        nonlocal largest
        data = read(self, *args)
        largest = max(largest, len(data))
        return data

    monkeypatch.setattr(LocalStorage, "read", measured)
    uploaded(local, remote, name)
    monkeypatch.undo()
    there = storage_of(remote).child(name)
    assert there.read("tokens.bin") == large and there.read("empty.txt") == b""
    assert "tensorboard" not in there.names()
    assert checkpoint.verify(there.url).ok
    assert largest <= 4 << 20


def test_a_copy_of_another_checkpoint_is_refused_by_name_and_left(roots):
    local, remote = roots
    name = save(local, 1)
    other = save(local + "-other", 1)
    uploaded(local + "-other", remote, other)
    before = {each: storage_of(remote).child(name).read(each) for each in storage_of(remote).child(name).names()}
    mirror = MirrorCopier(local, remote)
    mirror.upload(name)
    with pytest.raises(CheckpointExistsError, match=r"step-00000001: found another checkpoint, of save \w+, where"):
        mirror.close()
    assert {each: storage_of(remote).child(name).read(each) for each in before} == before


def test_a_copy_whose_manifest_is_damaged_is_made_anew(tmp_path, caplog):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    name = save(local, 1)
    uploaded(local, remote, name)
    (tmp_path / "b" / name / "manifest.json").write_text("{}")
    uploaded(local, remote, name)
    assert checkpoint.verify(f"{remote}/{name}").ok
    assert "it is copied again" in caplog.text


@pytest.mark.parametrize("restores", [False, True])
def test_after_a_restart_it_catches_up(tmp_path, restores):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    with checkpoint.Manager(local) as manager:  # as if it had ended before it copied
        for step in (1, 2):
            manager.save(step, {"x": value(step)})
    manager = checkpoint.Manager(local, destinations=[checkpoint.Mirror(remote)], every=10)
    if restores:
        assert manager.restore({"x": value(0)}) == 2
    else:
        manager.save(3, {"x": value(3)}, force=True)
    manager.close()
    assert checkpoint.Manager(remote).steps() in ([[2]] if restores else [[2, 3], [3]])


def test_a_damaged_newest_is_not_what_it_catches_up_with(tmp_path):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    with checkpoint.Manager(local) as manager:
        for step in (1, 2):
            manager.save(step, {"x": value(step)})
    flip(f"{local}/step-00000002")
    with checkpoint.Manager(local, destinations=[checkpoint.Mirror(remote)]) as manager:
        assert manager.restore({"x": value(0)}) == 1
        manager._run.mirror.wait()
        assert checkpoint.Manager(remote).steps() == [1]
        manager.save(2, {"x": value(2)})
    assert checkpoint.verify(f"{remote}/step-00000002").ok


def test_a_step_that_is_damaged_in_both_roots_is_saved_again_in_both(tmp_path):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    with checkpoint.Manager(local, destinations=[checkpoint.Mirror(remote)]) as manager:
        for step in (1, 2):
            manager.save(step, {"x": value(step)})
            manager._run.mirror.wait()
    flip(f"{local}/step-00000002")
    flip(f"{remote}/step-00000002")
    with checkpoint.Manager(local, destinations=[checkpoint.Mirror(remote)]) as manager:
        assert manager.restore({"x": value(0)}) == 1
        manager.save(2, {"x": value(7)})
    for root in (local, remote):
        assert checkpoint.verify(f"{root}/step-00000002").ok
        with checkpoint.open(f"{root}/step-00000002") as reader:
            assert torch.equal(reader.read("x"), value(7))
