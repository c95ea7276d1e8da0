"""Reads of what nobody needs again soon leave the page cache as it was."""

import ctypes
import mmap
import os

import numpy as np
import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.storage import local
from tests.support.disk import flush

KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))
pytestmark = pytest.mark.skipif(KERNEL < (6, 5), reason="the kernel does not say what is in its page cache")


def cached(path):
    """The share of a file's pages that are in the page cache. Reads nothing, as a read would bring some there."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        resident = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        assert ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (address, len(pages), resident.ctypes.data))) == 0
        return (resident & 1).mean()


def drop(path):
    fd = os.open(path, os.O_RDONLY)
    flush(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint whose data file is not in the page cache, and that file."""
    url = str(tmp_path / "saved")
    checkpoint.save(url, {f"w{i}": torch.randn(5_000_001) for i in range(5)})
    [path] = (tmp_path / "saved").glob("*.safetensors")
    drop(path)
    if cached(path) > 0.01:  # a last page that is not whole stays
        pytest.skip("the file system keeps files in memory")
    return url, path


def test_bytes_are_written_soon_after_they_were_hashed(tmp_path, monkeypatch):
    """A file that nobody waits for on a disk: its bytes are still in the core's cache when the kernel copies them."""
    state, sizes, writev = {f"w{i}": torch.randn(3 << 18) for i in range(4)}, [], os.writev
    monkeypatch.setattr(os, "writev", lambda fd, memories: sizes.append(writev(fd, memories)) or sizes[-1])
    checkpoint.save(tmp_path / "saved", state, durable=False)
    assert max(sizes) < 4 << 20 and sum(sizes) > 12 << 20


def test_a_check_of_a_cold_checkpoint_leaves_it_cold(saved):
    url, path = saved
    assert checkpoint.verify(url).ok
    assert cached(path) < 0.1  # header and checksums


def test_a_check_of_a_warm_checkpoint_leaves_it_warm(saved):
    url, path = saved
    path.read_bytes()
    assert checkpoint.verify(url).ok
    assert cached(path) == 1


def test_a_load_leaves_it_warm(saved):
    url, path = saved
    checkpoint.load(url, {f"w{i}": torch.zeros(5_000_001) for i in range(5)}, transactional=True)
    assert cached(path) > 0.95


def test_a_copy_leaves_what_it_has_read_cold(saved, tmp_path):
    path = saved[1]
    copier = checkpoint.MirrorCopier(str(tmp_path), str(tmp_path / "mirror"))
    copier.upload("saved")
    copier.close()
    assert checkpoint.verify(str(tmp_path / "mirror" / "saved")).ok
    assert cached(path) < 0.1


def test_where_nothing_is_known_of_the_cache_nothing_is_dropped(saved, monkeypatch):
    monkeypatch.setattr(local, "_CACHESTAT", 99_999)  # as an older kernel
    url, path = saved
    assert checkpoint.verify(url).ok
    assert cached(path) > 0.95
