"""Reads stored bytes to verify them or return them. Needs no torch, so the shell verifies without it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.sources.reading.open_file import DataFileReader, OpenFile
from shardopt.checkpoint.storage import LocalStorage, Span, Storage
from shardopt.errors import CheckpointError, Problem
from shardopt.sharding.box import Box, cut_in_order

# More threads than cores push one another's bytes out of the core's cache.
_THREADS = min(4, max(2, os.cpu_count() or 4))


class ReadSizes(NamedTuple):
    """How many bytes to read from a storage at a time, and in how many threads.

    Args:
        batch: through scratch, before they are verified and copied; of boxes that are read in place, together.
        run: of one box straight into memory, by one thread.
        call: of a run of whole segments in one call, before they are verified. Other runs, at the ends of boxes, are
            read in one call.
        threads: that should read at once.
        most_threads: that may, if they bring more bytes a second.
    """

    batch: int
    run: int
    call: int
    threads: int = _THREADS
    most_threads: int = _THREADS


_SIZES = ReadSizes(2 << 20, 2 << 20, 2 << 20)
_DISK_SIZES = ReadSizes(2 << 20, 8 << 20, 512 << 10)  # what a call has read is in the core's cache when it is summed
# Each request costs a round trip; see benchmarks/results/remote.md.
_FAR_SIZES = ReadSizes(8 << 20, 8 << 20, 8 << 20, threads=8, most_threads=24)


def sizes_for(storage: Storage) -> ReadSizes:
    """Returns how to read from a storage."""
    if storage.is_remote:
        return _FAR_SIZES
    return _DISK_SIZES if isinstance(storage, LocalStorage) else _SIZES  # others may ask other hosts


def read_entries(file: DataFileReader, entries: Sequence[Entry]) -> list[bytearray]:
    """Returns all bytes of entries of a data file, verified. Those that follow one another take one read.

    Raises:
        CorruptionError: bytes that fail their checksum, in the last copy where there are several.
    """
    memories = [bytearray(entry.end - entry.begin) for entry in entries]
    while any(memories):
        copy = file.storage.copy_of(file.name)
        try:
            file.read_into([Span(entry.begin, memoryview(each)) for entry, each in zip(entries, memories, strict=True)])
            for entry, memory in zip(entries, memories, strict=True):
                for number in file.failed_segments(entry.segment, memoryview(memory)):
                    raise file.segment_error(entry, number)
            break
        except CheckpointError as error:
            if not file.storage.pass_over(file.name, copy, error):
                raise
    return memories


def damaged_segments(
    file: OpenFile, entry: Entry, progress: Callable[[int], object] = lambda nbytes: None, once: bool = False
) -> Iterator[Problem]:
    """Yields a problem for each place of a stored box that fails its checksum; reads the whole box.

    Args:
        progress: called with the bytes of each piece that was read.
        once: whether nobody needs the bytes again soon.
    """
    step = sizes_for(file.storage).batch
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
    return cut_in_order(box, _SIZES.batch // itemsize)
