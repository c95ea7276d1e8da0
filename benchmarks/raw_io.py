"""Raw reads and writes of the same bytes as a checkpoint: what a machine can do at best, by one fixed program.

Each peer is one way; `best` is the fastest of them. Peers write one file a rank.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.peers import calling
from shardopt.checkpoint.format.constants import SEGMENT_BYTES

REQUEST_MIB = (1, 8, 64)
PREFIX = "raw "
DIRECT = f"{PREFIX}direct"
SUMMED = "read with checksums"
_DIRECT_BYTES = 8 << 20
_PAGE_BYTES = mmap.PAGESIZE


def best(times: Mapping[str, float]) -> float | None:
    """Returns the time of the fastest raw peer; None if there is none."""
    return min((seconds for name, seconds in times.items() if name.startswith(PREFIX)), default=None)


def readers(paths: Sequence[str], begin: int, memories: Sequence[memoryview]) -> dict[str, Callable[[int], Any]]:
    """Peers that read files into memory: those that a checkpoint has, so that both find the same pages in the cache.

    Args:
        paths: read one after the other, as if they were one file.
        begin: of the bytes to read, in that file.
        memories: for the bytes.

    Returns:
        The raw peers; and as `SUMMED` one that hashes each segment right after the request that read it, and compares
        nothing: what a verified load can have at best.
    """
    peers = {f"{PREFIX}{mib} MiB": calling(partial(_read, paths, begin, memories, mib << 20)) for mib in REQUEST_MIB}
    return peers | {SUMMED: calling(partial(_read, paths, begin, memories, 2 * SEGMENT_BYTES, summed=True))}


def writers(path: str, memories: Sequence[memoryview], durable: bool) -> dict[str, Callable[[int], Any]]:
    """Peers that write a new file of this rank; durable ones also past the page cache, where the file system can.

    Args:
        memories: bytes; for direct writes, as many from memory that is aligned for them.
    """
    peers = {f"{PREFIX}{mib} MiB": calling(partial(write, path, memories, mib << 20, durable)) for mib in REQUEST_MIB}
    total = sum(memory.nbytes for memory in memories) // _PAGE_BYTES * _PAGE_BYTES
    if durable and total and hasattr(os, "O_DIRECT"):
        aligned = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # advice that this system may not know
            aligned.madvise(mmap.MADV_HUGEPAGE)  # of large pages the disk takes more at once
        for begin in range(0, total, _PAGE_BYTES):
            aligned[begin] = 1  # so that the memory is there
        with suppress(OSError):
            _write_directly(path, aligned)
            peers[DIRECT] = calling(partial(_write_directly, path, aligned))
    return peers


def safetensors_writer(path: str, state: Mapping[str, Tensor]) -> dict[str, Callable[[int], Any]]:
    """A peer that writes tensors by safetensors itself, durably."""

    def save(_: int) -> None:
        save_file(dict(state), path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    return {f"{PREFIX}safetensors": save}


def safetensors_reader(path: str, state: Mapping[str, Tensor]) -> dict[str, Callable[[int], Any]]:
    """A peer that reads tensors by safetensors itself, and copies them to where they belong."""

    def load(_: int) -> None:
        loaded = load_file(path)
        for key, tensor in state.items():
            tensor.copy_(loaded[key])

    return {f"{PREFIX}safetensors": load}


def write(path: str, memories: Sequence[memoryview], request_bytes: int, durable: bool) -> None:
    """Writes a new file through the page cache."""
    with _new_file(path, 0) as fd:
        for memory in memories:
            while memory.nbytes:
                memory = memory[os.write(fd, memory[:request_bytes]) :]
        if durable:
            os.fsync(fd)


def _write_directly(path: str, aligned: mmap.mmap) -> None:
    """Writes a new file past the page cache, space reserved first."""
    with _new_file(path, os.O_DIRECT) as fd, memoryview(aligned) as memory:
        os.posix_fallocate(fd, 0, len(aligned))
        at = 0
        while at < len(aligned):
            at += os.pwrite(fd, memory[at : at + _DIRECT_BYTES], at)
        os.fsync(fd)


def _read(
    paths: Sequence[str], begin: int, memories: Sequence[memoryview], request_bytes: int, summed: bool = False
) -> None:
    with ExitStack() as stack:
        left = [stack.enter_context(open(path, "rb", buffering=0)) for path in paths]
        while begin >= os.fstat(left[0].fileno()).st_size:
            begin -= os.fstat(left.pop(0).fileno()).st_size
        left[0].seek(begin)
        for memory in memories:
            while memory.nbytes:
                got = left[0].readinto(memory[:request_bytes])
                if summed:
                    for at in reversed(range(0, got, SEGMENT_BYTES)):  # the last one is in the core's cache
                        xxhash.xxh3_64_digest(memory[at : min(at + SEGMENT_BYTES, got)])
                memory = memory[got:]
                if not got:
                    left.pop(0)


@contextmanager
def _new_file(path: str, flags: int) -> Iterator[int]:
    with suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    try:
        yield fd
    finally:
        os.close(fd)
