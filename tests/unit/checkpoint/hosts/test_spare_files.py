"""Files of removed checkpoints on a host are written over by the next save, and are no checkpoint meanwhile."""

import os
import signal

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import RECORD_NAME, file_name
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.hosts.directory import HostDirectory
from shardopt.checkpoint.hosts.share import Share
from shardopt.checkpoint.hosts.spare import remove_spares
from shardopt.checkpoint.sources.reading.open_file import DataFileReader
from shardopt.checkpoint.sources.reading.verified_chunks import VerifiedChunks
from shardopt.checkpoint.storage import LocalStorage
from shardopt.errors import CheckpointNotFoundError, CorruptionError

OLD, NEW = file_name("aaaa", 3, 1), file_name("bbbb", 3, 1)


@pytest.fixture
def shares(tmp_path):
    """A share that has a file, and one that is to get a file of the same rank."""
    directory = HostDirectory(str(tmp_path / "run"))
    old, new = Share(directory, "step-1", True), Share(directory, "step-2", True)
    old.begin()
    old.write(OLD, [memoryview(b"old" * 5000)])
    old.publish(RECORD_NAME, b"a record")
    new.begin()
    return old, new


def inode(share, name):
    return os.stat(f"{share.url}/{name}").st_ino


@pytest.mark.parametrize("nbytes", [0, 100, 15_000, 40_000])
def test_it_is_written_over_and_has_its_own_length(shares, nbytes):
    old, new = shares
    number = inode(old, OLD)
    old.clear()
    assert not os.path.exists(old.url)
    assert new.write(NEW, [memoryview(b"n" * nbytes)]) == nbytes
    assert new.read(NEW) == b"n" * nbytes and inode(new, NEW) == number
    assert new.names() == [NEW]


def test_one_is_kept_of_each_rank_and_all_can_be_given_back(shares):
    old, new = shares
    root = os.path.dirname(new.url)
    new.write(NEW, [memoryview(b"new")])
    new.write(file_name("bbbb", 4, 0), [memoryview(b"of another")])
    old.clear()
    new.clear()
    assert len(os.listdir(root)) == 3 and ".host" in os.listdir(root)
    remove_spares(root)
    assert os.listdir(root) == [".host"]


def test_one_that_is_taken_meanwhile_keeps_none_of_the_others(shares, monkeypatch):
    old, _ = shares
    root = os.path.dirname(old.url)
    old.write(file_name("aaaa", 4, 0), [memoryview(b"of another")])
    old.clear()
    listed = os.listdir(root)
    monkeypatch.setattr(os, "listdir", lambda path: [".spare-r00002.safetensors", *listed])
    remove_spares(root)
    assert not [name for name in listed if os.path.exists(f"{root}/{name}") and name.startswith(".spare-")]


def _linked(spare, other):
    os.link(spare, other)


def _link(spare, other):
    os.replace(spare, other)
    os.symlink(other, spare)


def _open_to_others(spare, other):
    os.link(spare, other)
    os.unlink(spare)
    other.write_bytes(b"old" * 5000)
    os.replace(other, spare)
    os.chmod(spare, 0o666)
    other.write_bytes(b"old" * 5000)


def _pipe(spare, other):
    os.replace(spare, other)
    os.mkfifo(spare, 0o600)


@pytest.mark.parametrize("make", [_linked, _link, _open_to_others, _pipe], ids=lambda make: make.__name__.strip("_"))
def test_what_may_be_somebody_elses_is_not_written_over(shares, tmp_path, make):
    old, new = shares
    old.clear()
    (spare,) = (tmp_path / "run").glob(".spare-*")
    make(spare, tmp_path / "other")
    new.write(NEW, [memoryview(b"new")])
    assert new.read(NEW) == b"new" and new.names() == [NEW]
    assert (tmp_path / "other").read_bytes() == b"old" * 5000
    status = os.stat(f"{new.url}/{NEW}", follow_symlinks=False)
    assert status.st_nlink == 1 and status.st_mode & 0o777 == 0o600


def test_half_of_it_has_no_name_that_is_read_and_is_gone_after_a_failure(shares):
    old, new = shares
    old.clear()

    def half():
        yield memoryview(b"n" * (16 << 20))  # written by now, as the next one is asked for
        assert not new.files() and new.names() != []
        raise OSError(5, "no more")

    with pytest.raises(OSError, match="no more"):
        new.write(NEW, half())
    assert new.names() == []


def test_who_is_killed_meanwhile_leaves_what_the_next_save_clears_away(shares):
    old, new = shares
    old.clear()
    child = os.fork()
    if child == 0:

        def half():
            yield memoryview(b"n" * (16 << 20))
            os.kill(os.getpid(), signal.SIGKILL)

        new.write(NEW, half())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(new.names()) == 1 and not new.files() and new.record() is None
    new.begin()
    assert new.names() == []
    new.write(NEW, [memoryview(b"new")])
    assert new.read(NEW) == b"new"


def test_who_has_it_open_gets_bytes_that_fail_their_checksums(tmp_path):
    url = f"hosts://{tmp_path}/run/step-"
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1 << 18, generator=generator)
    checkpoint.save(url + "1", {"x": value})
    directory = HostDirectory(str(tmp_path / "run"))
    share = Share(directory, "step-1", True)
    (file,) = decode_manifest(share.record(), share.url).files
    fd = directory.open_file("step-1", file.name)  # as it is served to another host
    number = os.fstat(fd).st_ino
    served = DataFile(str(fd), file.nbytes, file.digest)
    storage = LocalStorage("/proc/self/fd")
    before = DataFileReader(storage, served)
    assert sum(chunk.nbytes for chunk in VerifiedChunks(before)) == file.nbytes
    share.clear()
    assert sum(chunk.nbytes for chunk in VerifiedChunks(before)) == file.nbytes  # only kept as yet
    value[7] += 1
    checkpoint.save(url + "2", {"x": value})
    assert os.fstat(fd).st_ino == number and os.fstat(fd).st_nlink == 1
    with pytest.raises(CorruptionError):
        DataFileReader(storage, served)
    with pytest.raises(CorruptionError):
        list(VerifiedChunks(before))
    os.close(fd)
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.load(url + "1", {"x": torch.zeros_like(value)})
    app = {"x": torch.zeros_like(value)}
    checkpoint.load(url + "2", app)
    assert torch.equal(app["x"], value)


def test_a_run_resumes_in_the_same_pages_and_gives_them_back(tmp_path):
    tier = checkpoint.Tier(str(tmp_path / "memory"), every=1, keep_last=2)
    seen, app = set(), {"x": torch.arange(5000.0)}
    with checkpoint.Manager(str(tmp_path / "root"), every=100, destinations=[tier]) as manager:
        manager.restore(app)
        for step in range(1, 12):
            app["x"] += 1
            manager.save(step, app)
            manager.wait()
            seen |= {path.stat().st_ino for path in (tmp_path / "memory").rglob("*.safetensors")}
    assert len(seen) <= 4
    assert not list((tmp_path / "memory").glob(".spare-*"))
    found = {"x": torch.zeros(5000)}
    with checkpoint.Manager(str(tmp_path / "root"), every=100, destinations=[tier]) as manager:
        assert manager.restore(found) == 11
    assert torch.equal(found["x"], app["x"])


@pytest.mark.parametrize("at", [20, 4000])
def test_a_header_that_comes_otherwise_the_second_time_is_not_copied(tmp_path, at):
    """A copy reads it once more; where it is written over meanwhile, or is damaged on its way, the copy would be."""
    checkpoint.save(f"hosts://{tmp_path}/run/step-1", {"x": torch.arange(1000.0)})
    share = Share(HostDirectory(str(tmp_path / "run")), "step-1", True)
    (file,) = decode_manifest(share.record(), share.url).files
    chunks = VerifiedChunks(DataFileReader(share, file))
    with open(f"{share.url}/{file.name}", "r+b") as damaged:
        damaged.seek(at)
        damaged.write(b"~")
    with pytest.raises(CorruptionError, match="not what was written"):
        next(iter(chunks))
