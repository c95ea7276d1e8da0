"""Copies of checkpoints on a second root."""

import threading
import uuid

import pytest
import torch
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.checkpoint import mirror as mirror_module
from shardopt.checkpoint.mirror import Mirror
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import CheckpointError, CorruptionError
from tests.harness import Fault, run_ranks, run_ranks_outcomes


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
    with Mirror(local, remote) as mirror:
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
    with Mirror(local, remote) as mirror:
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
    mirror = Mirror(local, remote)
    mirror.upload(first)
    mirror._last.join()
    with pytest.raises(CorruptionError, match="checksum"):
        mirror.upload(second)
    mirror.close()
    assert [name for name, url in mirror.committed() if url.startswith("memory")] == [second]
    assert "checksum" in caplog.text
    assert storage_of(remote).child(first).names() == []


def test_one_that_waits_is_left_out_for_a_newer_one(roots, monkeypatch):
    local, remote = roots
    names = [save(local, step) for step in (1, 2, 3, 4)]
    may_go_on, sound = threading.Event(), mirror_module._upload_files

    def slow(*args):
        may_go_on.wait(30)
        return sound(*args)

    monkeypatch.setattr(mirror_module, "_upload_files", slow)
    with Mirror(local, remote) as mirror:
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
    with Mirror(local, remote) as mirror:
        mirror.upload(name)
        mirror.wait()
        assert "dead0-r00000.safetensors" not in there.names()
        before = mirror.report
        mirror.upload(name)
        mirror.wait()
        assert mirror.report is before


def test_a_checkpoint_that_is_gone_is_told(roots):
    mirror = Mirror(*roots)
    mirror.upload("step-00000001")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        mirror.close()
    mirror.close()  # told once


# On ranks: to a directory that fsspec reaches as if it were remote.


def mirrored(local, remote, steps):
    names = [save(local, step) for step in steps]
    with Mirror(local, remote, deadline_seconds=4) as mirror:
        for name in names:
            mirror.upload(name)
            mirror.wait()
        return mirror.report


def restored(local, remote):
    return restore(Mirror(local, remote))


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
    return Mirror(local if dist.get_rank() == 0 else local + "-other", remote).committed()


def test_a_local_copy_counts_only_where_every_rank_sees_it(tmp_path):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    with Mirror(local, remote) as mirror:
        mirror.upload(save(local, 1))
        mirror.wait()
        save(local, 2)
    assert run_ranks(2, seen_by_all, local, remote) == [[("step-00000001", f"{remote}/step-00000001")]] * 2


def flip_first(path):
    storage = storage_of(path)
    name = next(name for name in storage.names() if name.endswith(".safetensors"))
    data = bytearray(storage.read(name))
    data[len(data) // 2] ^= 1
    with open(f"{path}/{name}", "wb") as file:
        file.write(data)


def test_a_rank_that_dies_in_an_upload_leaves_no_copy(tmp_path):
    local, remote = str(tmp_path / "a"), str(tmp_path / "b")
    fault = Fault(1, "shardopt.checkpoint.mirror:_upload_files", at=2)
    outcomes = run_ranks_outcomes(3, mirrored, local, remote, [1, 2], faults=[fault])
    assert outcomes[1].signal is not None
    assert all("rank 1" in str(outcomes[rank].error) for rank in (0, 2))
    assert checkpoint.verify(f"{remote}/step-00000001").ok
    assert not storage_of(remote).child("step-00000002").exists("manifest.json")
    assert checkpoint.verify(f"{local}/step-00000002").ok
