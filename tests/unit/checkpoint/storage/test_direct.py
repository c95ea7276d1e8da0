"""Writes past the page cache: the same file to the byte, whatever the sizes, faults and file systems."""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import threading
import time
from contextlib import ExitStack

import pytest

from shardopt import checkpoint
from shardopt.checkpoint.storage import FLUSH, LocalStorage, direct, local, mounts
from shardopt.world import World
from tests.harness import Fault
from tests.harness.faults import watched
from tests.harness.programs import run_program

PAGE = 4096
BLOCK = 4 * PAGE


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    """Blocks of four pages, on whatever file system the tests run."""
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(direct, "_IN_PLACE_BYTES", PAGE)
    monkeypatch.setattr(direct, "_LEAST_RESERVED_BYTES", 2 * BLOCK)
    monkeypatch.setattr(direct, "_MOST_RESERVED_BYTES", 4 * BLOCK)
    monkeypatch.setattr(direct, "_types", {os.stat(tmp_path).st_dev: "ext4"})
    monkeypatch.setattr(direct, "direct_alignment", lambda fd: mounts.Alignment(512, 512))
    monkeypatch.setattr(local, "_DIRECT_BYTES", 1)
    monkeypatch.setattr(local, "_BATCH_BYTES", 2 * PAGE)
    monkeypatch.setattr(local, "_HOT_BYTES", PAGE)


@pytest.fixture(params=["copied", "in place"])
def random_bytes(request):
    """Gives random bytes whose memory begins at a page, or at no multiple of what a disk needs.

    A file from these bytes alone has them at the same places within pages as memory does.
    """

    def make(nbytes):
        place = 0 if request.param == "in place" else 4
        memory = mmap.mmap(-1, place + max(nbytes, 1))
        memory.seek(place)
        memory.write(os.urandom(nbytes))
        return memoryview(memory)[place : place + nbytes]

    return make


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
    """Notes of each os.pwritev: its offset, its bytes, and whether it went past the page cache."""
    noted, pwritev = [], os.pwritev

    def noting(fd, memories, offset):
        noted.append((offset, sum(map(len, memories)), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return pwritev(fd, memories, offset)

    monkeypatch.setattr(os, "pwritev", noting)
    return noted


def address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


SIZES = [1, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + PAGE, 7 * BLOCK + 123]


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_file_has_the_same_bytes(tmp_path, nbytes, random_bytes):
    data = random_bytes(nbytes)
    storage = LocalStorage(str(tmp_path))
    for seed in range(6):
        assert storage.write(f"{seed}", cut(data, seed)) == nbytes
        assert storage.read(f"{seed}") == data
        assert os.stat(tmp_path / f"{seed}").st_blocks * 512 <= nbytes + 2 * PAGE  # nothing stays reserved


@pytest.mark.parametrize("seed", range(4))
def test_blocks_wait_for_slow_writes(tmp_path, monkeypatch, seed, random_bytes):
    """A block is filled again only after its write, whichever ends first."""
    draw, pwritev, data = random.Random(seed), os.pwritev, random_bytes(12 * BLOCK + 5)

    def slow(fd, memories, offset):
        time.sleep(draw.choice([0, 0.001, 0.01, 0.03]))
        return pwritev(fd, memories, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    LocalStorage(str(tmp_path)).write("a", cut(data, seed))
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("failing", [{1}, {2}, {1, 2}])
def test_without_threads_it_goes_through_the_page_cache(tmp_path, monkeypatch, failing):
    """Where a limit of processes lets a thread not start, no block stays behind in a queue."""
    start, started, pwritev = threading.Thread.start, [], os.pwritev

    def limited(thread):
        if thread.name.startswith("shardopt-direct"):
            started.append(thread)
            if len(started) in failing:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(os, "pwritev", lambda *args: time.sleep(0.003) or pwritev(*args))
    data, before = os.urandom(12 * BLOCK + 5), threading.active_count()
    with watched([], ["os:writev"]) as watch:
        LocalStorage(str(tmp_path)).write("a", cut(data, 0))
    assert (tmp_path / "a").read_bytes() == data and started and "os:writev" in watch.calls
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize("operation", ["mmap:mmap", "os:dup"])
def test_without_memory_or_descriptors_it_goes_through_the_page_cache(tmp_path, monkeypatch, operation):
    def lacking(*_, **__):
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    monkeypatch.setattr(direct.mmap if operation == "mmap:mmap" else direct.os, operation.split(":")[1], lacking)
    LocalStorage(str(tmp_path)).write("a", [memoryview(bytes(6 * BLOCK))])
    assert (tmp_path / "a").stat().st_size == 6 * BLOCK


def test_a_failed_file_ends_before_the_first_block_that_is_not_there(tmp_path):
    with watched([Fault(0, "os:pwritev", action="ENOSPC", times=99)], []), pytest.raises(OSError):
        LocalStorage(str(tmp_path)).write("a", cut(os.urandom(9 * BLOCK), 0))
    assert (tmp_path / "a").stat().st_size == 0


def test_the_last_bytes_are_written_after_all_others(tmp_path, monkeypatch):
    """A file that is a number of whole blocks too: who finds its end finds the rest."""
    noted = noted_writes(monkeypatch)
    LocalStorage(str(tmp_path)).write("a", [memoryview(bytes(5 * BLOCK))])
    assert noted[-1] == (4 * BLOCK, BLOCK, True)


@pytest.mark.parametrize("before", [1, PAGE, 3 * PAGE + 5])
def test_a_file_that_begins_with_small_buffers(tmp_path, monkeypatch, before, random_bytes):
    """Its first bytes go through the page cache; from the next page on, what follows does not."""
    monkeypatch.setattr(local, "_DIRECT_BYTES", BLOCK)
    noted = noted_writes(monkeypatch)
    data = random_bytes(before + 3 * BLOCK + 77)
    buffers = [memoryview(data)[:before], FLUSH, memoryview(data)[before:]]
    LocalStorage(str(tmp_path)).write("a", buffers)
    assert (tmp_path / "a").read_bytes() == data
    first_page = -(-before // PAGE) * PAGE
    for offset, size, past in noted:
        assert past == (offset >= first_page and offset % PAGE == size % PAGE == 0) or not size


def test_memory_may_be_used_again_once_the_next_is_asked_for(tmp_path, monkeypatch, random_bytes):
    """Also where writes are slow, and the disk takes the first bytes from where they are."""
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: time.sleep(0.003) or pwritev(*args))
    memory = random_bytes(2 * PAGE + 7)

    def reused():
        yield memoryview(bytes(PAGE))
        for i in range(40):
            memory[:] = bytes([i]) * len(memory)
            yield memory
            yield FLUSH

    LocalStorage(str(tmp_path)).write("a", reused())
    assert (tmp_path / "a").read_bytes() == bytes(PAGE) + b"".join(bytes([i]) * len(memory) for i in range(40))


def test_large_tensors_are_not_copied_where_their_memory_is_aligned(tmp_path, monkeypatch, random_bytes, request):
    """A part of a page before and after them is, with what is before and after them in the file."""
    in_place, pwritev = [], os.pwritev
    data = random_bytes(5 * BLOCK + 300)
    begin = address(data)

    def noting(fd, memories, offset):
        for memory in memories:
            at = address(memory) - begin
            in_place.extend([(offset, at, len(memory))] if 0 <= at < len(data) else [])
            offset += len(memory)
        return pwritev(fd, memories, offset - sum(map(len, memories)))

    monkeypatch.setattr(os, "pwritev", noting)
    monkeypatch.setattr(local, "_BATCH_BYTES", 64 << 20)
    LocalStorage(str(tmp_path)).write("a", [data[:100], data[100:-150], data[-150:]])
    assert (tmp_path / "a").read_bytes() == data
    assert all(offset == at for offset, at, _ in in_place)
    assert sum(nbytes for *_, nbytes in in_place) == (0 if "[copied]" in request.node.name else 5 * BLOCK - PAGE)


def test_memory_that_the_disk_cannot_take_goes_through_the_page_cache(tmp_path, random_bytes):
    data = random_bytes(6 * BLOCK + 3)
    with watched([Fault(0, "os:pwritev", at=2, action="EFAULT")], []):
        LocalStorage(str(tmp_path)).write("a", cut(data, 1))
    assert (tmp_path / "a").read_bytes() == data
    assert [*direct._types.values()] == ["ext4"]  # which is not the file system's fault


@pytest.mark.parametrize("alignment", [None, mounts.Alignment(PAGE, 4 * PAGE)])
def test_a_file_system_that_would_write_through_its_cache(tmp_path, monkeypatch, alignment):
    monkeypatch.setattr(direct, "direct_alignment", lambda fd: alignment)
    with watched([], ["os:pwritev", "os:writev"]) as watch:
        LocalStorage(str(tmp_path)).write("a", [memoryview(bytes(4 * BLOCK))])
    assert set(watch.calls) == {"os:writev"}


def test_what_direct_writes_need_is_asked_of_the_kernel(tmp_path, monkeypatch):
    with open(tmp_path / "a", "wb") as file:
        for needed in mounts.direct_alignment(file.fileno()) or ():
            assert needed.bit_count() == 1 and needed <= PAGE
        monkeypatch.setattr(mounts, "_statx", lambda *_: -1)  # an older kernel
        assert mounts.direct_alignment(file.fileno()) == (PAGE, PAGE)
    about = {mounts._MASK: mounts._STATX_DIOALIGN, mounts._MEMORY_ALIGNMENT: 4, mounts._OFFSET_ALIGNMENT: 512}

    def answers(*args):
        for place, number in about.items():
            args[-1][place] = number
        return 0

    monkeypatch.setattr(mounts, "_statx", answers)
    assert mounts.direct_alignment(0) == (4, 512)
    about[mounts._OFFSET_ALIGNMENT] = 0  # as ext4 with data=journal
    assert mounts.direct_alignment(0) is None


def test_whole_pages_go_past_the_page_cache(tmp_path, monkeypatch, random_bytes):
    noted = noted_writes(monkeypatch)
    buffers = cut(random_bytes(3 * BLOCK + 2 * PAGE + 9), 0)
    LocalStorage(str(tmp_path)).write("a", [buffer for buffer in buffers if buffer is not FLUSH])
    noted.sort()
    assert noted == [
        *((i * BLOCK, BLOCK, True) for i in range(3)),
        (3 * BLOCK, 2 * PAGE, True),
        (3 * BLOCK + 2 * PAGE, 9, False),
    ]


def test_a_larger_file_is_written_over(tmp_path, random_bytes):
    data = random_bytes(2 * BLOCK + 5)
    (tmp_path / "a").write_bytes(random_bytes(5 * BLOCK))
    fd = os.open(tmp_path / "a", os.O_WRONLY)
    LocalStorage(str(tmp_path)).write_to(fd, cut(data, 1))
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("number", ["EINVAL", "EOPNOTSUPP"])
def test_a_file_system_that_refuses_in_the_middle(tmp_path, at, number, random_bytes):
    """The same file goes on through the page cache, and later files begin there."""
    data = random_bytes(6 * BLOCK + PAGE + 3)
    storage = LocalStorage(str(tmp_path))
    with watched([Fault(0, "os:pwritev", at=at, action=number)], []):
        storage.write("a", cut(data, at))
    assert storage.read("a") == data
    with watched([], ["os:pwritev", "os:writev"]) as watch:
        storage.write("b", cut(data, at))
    assert storage.read("b") == data
    assert "os:pwritev" not in watch.calls


@pytest.mark.parametrize("at", range(1, 9))
def test_short_writes_are_continued(tmp_path, at, random_bytes):
    data = random_bytes(6 * BLOCK + PAGE + 3)
    storage = LocalStorage(str(tmp_path))
    with watched([Fault(0, "os:pwritev", at=at, action="short")], []):
        storage.write("a", cut(data, at))
    assert storage.read("a") == data
    assert [*direct._types.values()] == ["ext4"]  # later files begin past the page cache again


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("number", ["ENOSPC", "EIO", "EDQUOT"])
def test_an_error_is_raised_when_nobody_writes_any_more(tmp_path, at, number, random_bytes):
    data = random_bytes(6 * BLOCK + PAGE + 3)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with watched([Fault(0, "os:pwritev", at=at, action=number)], []), pytest.raises(OSError) as caught:
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


def test_a_disk_on_which_space_cannot_be_reserved(tmp_path, random_bytes):
    """It may be full by what is reserved, and not by what is written."""
    data = random_bytes(5 * BLOCK)
    with watched([Fault(0, "os:posix_fallocate", action="ENOSPC", times=9)], []):
        LocalStorage(str(tmp_path)).write("a", cut(data, 0))
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("kind", ["not durable", "another file system", "a small file"])
def test_what_goes_through_the_page_cache(tmp_path, monkeypatch, kind):
    if kind == "another file system":
        monkeypatch.setattr(direct, "_types", {os.stat(tmp_path).st_dev: "fuse"})
    if kind == "a small file":
        monkeypatch.setattr(local, "_DIRECT_BYTES", 8 << 20)
    with watched([], ["os:pwritev", "os:writev"]) as watch:
        LocalStorage(str(tmp_path), durable=kind != "not durable").write("a", [memoryview(bytes(4 * BLOCK))])
    assert set(watch.calls) == {"os:writev"}


def test_file_systems_are_known_by_their_mounts(monkeypatch):
    monkeypatch.setattr(direct, "_types", {})
    kinds = {}
    with open("/proc/mounts") as mounted:
        for line in mounted:
            _, path, kind, *_ = line.split()
            kinds[path] = kind
    with open("/proc/self/mounts") as file:
        assert direct.direct_writer(file.fileno(), 0) is None
    assert mounts.file_system_type(os.stat("/proc").st_dev) == kinds["/proc"] == "proc"
    assert mounts.file_system_type(os.makedev(4000, 4000)) is None


ENDS_EARLY = """
import os, sys, time
import torch
from shardopt import checkpoint
from shardopt.checkpoint.storage import direct, local

direct.BLOCK_BYTES = local._DIRECT_BYTES = local._BATCH_BYTES = local._HOT_BYTES = 1 << 14
direct._types[os.stat(sys.argv[1]).st_dev] = "ext4"
pwritev = os.pwritev
os.pwritev = lambda *args: time.sleep(0.01) or pwritev(*args)
checkpoint.async_save(sys.argv[1] + "/a", {"x": torch.arange(200_000)})
"""


def test_a_program_that_ends_meanwhile_starts_no_threads_and_still_commits(tmp_path):
    done = run_program(ENDS_EARLY, str(tmp_path))
    assert "which was committed all the same" in done.stderr, done.stderr
    assert checkpoint.verify(str(tmp_path / "a")).ok


def test_blocks_have_large_pages_and_are_not_for_forked_children(tmp_path, monkeypatch):
    """Otherwise a page that the disk reads may be copied for one of the two processes: see open(2), O_DIRECT."""
    advised = []

    class Noting(mmap.mmap):
        def madvise(self, advice):
            advised.append((len(self), advice))
            super().madvise(advice)

    monkeypatch.setattr(mmap, "mmap", Noting)
    LocalStorage(str(tmp_path)).write("a", [memoryview(bytes(3 * BLOCK))])
    assert advised == [(3 * BLOCK, mmap.MADV_DONTFORK), (3 * BLOCK, mmap.MADV_HUGEPAGE)]


def test_after_a_second_interrupt_no_other_file_gets_the_bytes(tmp_path, monkeypatch):
    """The first ends the save, the second the wait for what the threads still write."""
    pwritev, begun = os.pwritev, threading.Event()

    def late(fd, memories, offset):
        begun.set()
        time.sleep(0.3)
        return pwritev(fd, memories, offset)

    def interrupted(*_):
        raise KeyboardInterrupt

    def buffers():
        yield memoryview(bytes(2 * BLOCK))
        begun.wait()
        monkeypatch.setattr(World, "wait_for_all", interrupted)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwritev", late)
    with pytest.raises(KeyboardInterrupt):
        LocalStorage(str(tmp_path)).write("a", buffers())
    with ExitStack() as stack:  # one of these files has the number of the closed one
        others = [stack.enter_context(open(tmp_path / f"other{i}", "wb")) for i in range(4)]
        for thread in threading.enumerate():
            if thread.name.startswith("shardopt-direct"):
                thread.join()
        assert all(os.fstat(other.fileno()).st_size == 0 for other in others)
    assert os.stat(tmp_path / "a").st_size >= BLOCK
