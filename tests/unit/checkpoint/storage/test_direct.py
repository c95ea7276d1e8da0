"""Writes past the page cache: the same file to the byte, whatever the sizes, faults and file systems."""

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from shardopt import checkpoint
from shardopt.checkpoint.storage import FLUSH, LocalStorage, direct, local
from shardopt.world import World
from tests.harness import Fault
from tests.harness.faults import watched
from tests.support.source import ROOT

PAGE = 4096
BLOCK = 4 * PAGE


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    """Blocks of four pages, on whatever file system the tests run."""
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(direct, "_LEAST_RESERVED_BYTES", 2 * BLOCK)
    monkeypatch.setattr(direct, "_MOST_RESERVED_BYTES", 4 * BLOCK)
    monkeypatch.setattr(direct, "_types", {os.stat(tmp_path).st_dev: "ext4"})
    monkeypatch.setattr(local, "_DIRECT_BYTES", 1)
    monkeypatch.setattr(local, "_BATCH_BYTES", 2 * PAGE)


def cut(data, seed, most=3 * PAGE):
    """The data in buffers of random sizes, empty ones and FLUSH among them."""
    draw, at, buffers = random.Random(seed), 0, []
    while at < len(data):
        size = draw.choice([0, 1, draw.randrange(most), PAGE])
        buffers.append(memoryview(data)[at : at + size])
        at += size
        if draw.random() < 0.1:
            buffers.append(FLUSH)
    return buffers


def noted_writes(monkeypatch):
    """Notes of each os.pwrite: its offset, its bytes, and whether it went past the page cache."""
    noted, pwrite = [], os.pwrite

    def noting(fd, memory, offset):
        noted.append((offset, len(memory), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return pwrite(fd, memory, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    return noted


SIZES = [1, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + PAGE, 7 * BLOCK + 123]


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_file_has_the_same_bytes(tmp_path, nbytes):
    data = os.urandom(nbytes)
    storage = LocalStorage(str(tmp_path))
    for seed in range(6):
        assert storage.write(f"{seed}", cut(data, seed)) == nbytes
        assert storage.read(f"{seed}") == data
        assert os.stat(tmp_path / f"{seed}").st_blocks * 512 <= nbytes + 2 * PAGE  # nothing stays reserved


@pytest.mark.parametrize("seed", range(4))
def test_blocks_wait_for_slow_writes(tmp_path, monkeypatch, seed):
    """A block is filled again only after its write, whichever ends first."""
    draw, pwrite, data = random.Random(seed), os.pwrite, os.urandom(12 * BLOCK + 5)

    def slow(fd, memory, offset):
        time.sleep(draw.choice([0, 0.001, 0.01, 0.03]))
        return pwrite(fd, memory, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    LocalStorage(str(tmp_path)).write("a", cut(data, seed))
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("failing", [{1}, {2}, {1, 2}])
def test_without_threads_it_goes_through_the_page_cache(tmp_path, monkeypatch, failing):
    """Where a limit of processes lets a thread not start, no block stays behind in a queue."""
    start, started, pwrite = threading.Thread.start, [], os.pwrite

    def limited(thread):
        if thread.name.startswith("shardopt-direct"):
            started.append(thread)
            if len(started) in failing:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(os, "pwrite", lambda *args: time.sleep(0.003) or pwrite(*args))
    data, before = os.urandom(12 * BLOCK + 5), threading.active_count()
    with watched([], ["os:writev"]) as watch:
        LocalStorage(str(tmp_path)).write("a", cut(data, 0))
    assert (tmp_path / "a").read_bytes() == data and started and "os:writev" in watch.calls
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize("operation", ["mmap:mmap", "os:dup"])
def test_without_memory_or_descriptors_it_goes_through_the_page_cache(tmp_path, monkeypatch, operation):
    def lacking(*_):
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    monkeypatch.setattr(direct.mmap if operation == "mmap:mmap" else direct.os, operation.split(":")[1], lacking)
    LocalStorage(str(tmp_path)).write("a", [memoryview(bytes(6 * BLOCK))])
    assert (tmp_path / "a").stat().st_size == 6 * BLOCK


def test_a_failed_file_ends_before_the_first_block_that_is_not_there(tmp_path):
    with watched([Fault(0, "os:pwrite", action="ENOSPC", times=99)], []), pytest.raises(OSError):
        LocalStorage(str(tmp_path)).write("a", cut(os.urandom(9 * BLOCK), 0))
    assert (tmp_path / "a").stat().st_size == 0


def test_the_last_bytes_are_written_after_all_others(tmp_path, monkeypatch):
    """A file that is a number of whole blocks too: who finds its end finds the rest."""
    noted = noted_writes(monkeypatch)
    LocalStorage(str(tmp_path)).write("a", [memoryview(bytes(5 * BLOCK))])
    assert noted[-1] == (4 * BLOCK, BLOCK, True)


@pytest.mark.parametrize("before", [1, PAGE, 3 * PAGE + 5])
def test_a_file_that_begins_with_small_buffers(tmp_path, monkeypatch, before):
    """Its first bytes go through the page cache; from the next page on, what follows does not."""
    monkeypatch.setattr(local, "_DIRECT_BYTES", BLOCK)
    noted = noted_writes(monkeypatch)
    data = os.urandom(before + 3 * BLOCK + 77)
    buffers = [memoryview(data)[:before], FLUSH, memoryview(data)[before:]]
    LocalStorage(str(tmp_path)).write("a", buffers)
    assert (tmp_path / "a").read_bytes() == data
    first_page = -(-before // PAGE) * PAGE
    for offset, size, past in noted:
        assert past == (offset >= first_page and offset % PAGE == size % PAGE == 0) or not size


def test_memory_may_be_used_again_once_the_next_is_asked_for(tmp_path):
    memory = bytearray(PAGE + 7)

    def reused():
        for i in range(40):
            memory[:] = bytes([i]) * len(memory)
            yield memoryview(memory)
            yield FLUSH

    LocalStorage(str(tmp_path)).write("a", reused())
    assert (tmp_path / "a").read_bytes() == b"".join(bytes([i]) * len(memory) for i in range(40))


def test_whole_pages_go_past_the_page_cache(tmp_path, monkeypatch):
    noted = noted_writes(monkeypatch)
    LocalStorage(str(tmp_path)).write("a", cut(os.urandom(3 * BLOCK + 2 * PAGE + 9), 0))
    noted.sort()
    assert noted == [
        *((i * BLOCK, BLOCK, True) for i in range(3)),
        (3 * BLOCK, 2 * PAGE, True),
        (3 * BLOCK + 2 * PAGE, 9, False),
    ]


def test_a_larger_file_is_written_over(tmp_path):
    data = os.urandom(2 * BLOCK + 5)
    (tmp_path / "a").write_bytes(os.urandom(5 * BLOCK))
    fd = os.open(tmp_path / "a", os.O_WRONLY)
    LocalStorage(str(tmp_path)).write_to(fd, cut(data, 1))
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("number", ["EINVAL", "EOPNOTSUPP"])
def test_a_file_system_that_refuses_in_the_middle(tmp_path, at, number):
    """The same file goes on through the page cache, and later files begin there."""
    data = os.urandom(6 * BLOCK + PAGE + 3)
    storage = LocalStorage(str(tmp_path))
    with watched([Fault(0, "os:pwrite", at=at, action=number)], []):
        storage.write("a", cut(data, at))
    assert storage.read("a") == data
    with watched([], ["os:pwrite", "os:writev"]) as watch:
        storage.write("b", cut(data, at))
    assert storage.read("b") == data
    assert "os:pwrite" not in watch.calls


@pytest.mark.parametrize("at", range(1, 9))
def test_short_writes_are_continued(tmp_path, at):
    data = os.urandom(6 * BLOCK + PAGE + 3)
    storage = LocalStorage(str(tmp_path))
    with watched([Fault(0, "os:pwrite", at=at, action="short")], []):
        storage.write("a", cut(data, at))
    assert storage.read("a") == data
    assert [*direct._types.values()] == ["ext4"]  # later files begin past the page cache again


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("number", ["ENOSPC", "EIO", "EDQUOT"])
def test_an_error_is_raised_when_nobody_writes_any_more(tmp_path, at, number):
    data = os.urandom(6 * BLOCK + PAGE + 3)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with watched([Fault(0, "os:pwrite", at=at, action=number)], []), pytest.raises(OSError) as caught:
        LocalStorage(str(tmp_path)).write("a", cut(data, at))
    assert caught.value.errno == getattr(errno, number)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert os.stat(tmp_path / "a").st_size <= len(data)  # what is left is no larger than it would be


def test_an_interrupt_leaves_no_write_under_way(tmp_path):
    def interrupted():
        yield memoryview(os.urandom(5 * BLOCK))
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        LocalStorage(str(tmp_path)).write("a", interrupted())
    assert threading.active_count() == before


def test_a_disk_on_which_space_cannot_be_reserved(tmp_path):
    """It may be full by what is reserved, and not by what is written."""
    data = os.urandom(5 * BLOCK)
    with watched([Fault(0, "os:posix_fallocate", action="ENOSPC", times=9)], []):
        LocalStorage(str(tmp_path)).write("a", cut(data, 0))
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("kind", ["not durable", "another file system", "a small file"])
def test_what_goes_through_the_page_cache(tmp_path, monkeypatch, kind):
    if kind == "another file system":
        monkeypatch.setattr(direct, "_types", {os.stat(tmp_path).st_dev: "fuse"})
    if kind == "a small file":
        monkeypatch.setattr(local, "_DIRECT_BYTES", 8 << 20)
    with watched([], ["os:pwrite", "os:writev"]) as watch:
        LocalStorage(str(tmp_path), durable=kind != "not durable").write("a", [memoryview(bytes(4 * BLOCK))])
    assert set(watch.calls) == {"os:writev"}


def test_file_systems_are_known_by_their_mounts(monkeypatch):
    monkeypatch.setattr(direct, "_types", {})
    kinds = {}
    with open("/proc/mounts") as mounts:
        for line in mounts:
            _, path, kind, *_ = line.split()
            kinds[path] = kind
    with open("/proc/self/mounts") as file:
        assert direct.direct_writer(file.fileno(), 0) is None
    assert direct._type_of(os.stat("/proc").st_dev) == kinds["/proc"] == "proc"
    assert direct._type_of(os.makedev(4000, 4000)) is None


ENDS_EARLY = """
import os, sys, time
import torch
from shardopt import checkpoint
from shardopt.checkpoint.storage import direct, local

direct.BLOCK_BYTES = local._DIRECT_BYTES = local._BATCH_BYTES = 1 << 14
direct._types[os.stat(sys.argv[1]).st_dev] = "ext4"
pwrite = os.pwrite
os.pwrite = lambda *args: time.sleep(0.01) or pwrite(*args)
checkpoint.async_save(sys.argv[1] + "/a", {"x": torch.arange(200_000)})
"""


def test_a_program_that_ends_meanwhile_starts_no_threads_and_still_commits(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY, tmp_path], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert "which was committed all the same" in done.stderr, done.stderr
    assert checkpoint.verify(str(tmp_path / "a")).ok


def test_forks_beside_writes_share_the_blocks(tmp_path, monkeypatch):
    """Otherwise a page that the disk reads may be copied for one of the two processes: see open(2), O_DIRECT."""
    asked = []
    monkeypatch.setattr(direct.mmap, "mmap", lambda *args, of=direct.mmap.mmap: asked.append(args[2]) or of(*args))
    LocalStorage(str(tmp_path)).write("a", [memoryview(bytes(3 * BLOCK))])
    assert asked and all(flags & direct.mmap.MAP_SHARED for flags in asked)


def test_after_a_second_interrupt_no_other_file_gets_the_bytes(tmp_path, monkeypatch):
    """The first ends the save, the second the wait for what the threads still write."""
    pwrite, begun = os.pwrite, threading.Event()

    def late(fd, memory, offset):
        begun.set()
        time.sleep(0.3)
        return pwrite(fd, memory, offset)

    def interrupted(*_):
        raise KeyboardInterrupt

    def buffers():
        yield memoryview(bytes(2 * BLOCK))
        begun.wait()
        monkeypatch.setattr(World, "wait_for_all", interrupted)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", late)
    with pytest.raises(KeyboardInterrupt):
        LocalStorage(str(tmp_path)).write("a", buffers())
    with ExitStack() as stack:  # one of these files has the number of the closed one
        others = [stack.enter_context(open(tmp_path / f"other{i}", "wb")) for i in range(4)]
        for thread in threading.enumerate():
            if thread.name.startswith("shardopt-direct"):
                thread.join()
        assert all(os.fstat(other.fileno()).st_size == 0 for other in others)
    assert os.stat(tmp_path / "a").st_size >= BLOCK
