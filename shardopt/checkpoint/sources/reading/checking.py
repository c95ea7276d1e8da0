"""Reads stored bytes to verify them or return them. Needs no torch, so the shell verifies without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.sources.reading.open_file import DataFileReader, OpenFile
from shardopt.checkpoint.storage import Span, Storage
from shardopt.errors import CheckpointError, Problem
from shardopt.sharding.box import Box, cut_in_order

_THREADS = 4
_BATCH_BYTES = 2 << 20  # read by one thread at a time, and still in its cache when it is summed and copied
_FAR_BATCH_BYTES = 8 << 20  # where each request costs a round trip; see benchmarks/results/remote.md
_FAR_THREADS = 8


def threads_for(storage: Storage) -> int:
    """Returns the number of threads that should read from a storage at once."""
    return _FAR_THREADS if storage.is_remote else _THREADS


def batch_bytes(file: OpenFile) -> int:
    """Returns the number of bytes that one thread should read from a file at once."""
    return _FAR_BATCH_BYTES if file.storage.is_remote else _BATCH_BYTES


def read_entry(file: DataFileReader, entry: Entry) -> bytearray:
    """Returns all bytes of an entry of a data file, verified.

    Raises:
        CorruptionError: bytes that fail their checksum, in the last copy where there are several.
    """
    memory = bytearray(entry.end - entry.begin)
    while memory:
        copy = file.storage.copy_of(file.name)
        try:
            file.read_into([Span(entry.begin, memoryview(memory))])
            for number in file.failed_segments(entry.segment, memoryview(memory)):
                raise file.segment_error(entry, number)
            break
        except CheckpointError as error:
            if not file.storage.pass_over(file.name, copy, error):
                raise
    return memory


def damaged_segments(
    file: OpenFile, entry: Entry, progress: Callable[[int], object] = lambda nbytes: None, once: bool = False
) -> Iterator[Problem]:
    """Yields a problem for each place of a stored box that fails its checksum; reads the whole box.

    Args:
        progress: called with the bytes of each piece that was read.
        once: whether nobody needs the bytes again soon.
    """
    step = batch_bytes(file)
    with file.opened(once) as read:

        def chunks(begin: int, end: int) -> Iterator[memoryview]:
            buffer = memoryview(bytearray(min(step, end - begin)))
            for at in range(begin, end, step):
                chunk = buffer[: min(step, end - at)]
                read([Span(at, chunk)])
                progress(chunk.nbytes)
                yield chunk

        yield from file.check(entry, chunks)


def pieces_in_order(box: Box, itemsize: int) -> Iterator[Box]:
    """Yields boxes of at most 2 MiB that cover a box's elements in C order."""
    return cut_in_order(box, _BATCH_BYTES // itemsize)
