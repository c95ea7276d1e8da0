"""Yields the bytes of a data file from beginning to end, verified as they are read; copies are made of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.sources.reading.open_file import DataFileReader
from shardopt.checkpoint.storage import Span

_CHUNK_BYTES = 8 << 20  # of 4 MiB the pages are found again for each, which takes half as long again
_VERIFIED_BYTES = 1 << 20  # at a time where nobody wants them: still in the cache when they are summed


class VerifiedChunks:
    """The bytes of a data file; yields each byte only after its checksum was verified. Can be iterated again."""

    def __init__(self, file: DataFileReader) -> None:
        self._file, self.nbytes = file, file.file.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        return _chunks(self._file, _CHUNK_BYTES, _new_memory)


def verify(file: DataFileReader) -> None:
    """Reads and verifies a data file from beginning to end.

    Raises:
        CorruptionError: at the first bytes that are not what was written.
    """
    memory = _new_memory(_VERIFIED_BYTES)
    for _ in _chunks(file, _VERIFIED_BYTES, lambda nbytes: memory[:nbytes]):
        pass


def _new_memory(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data  # a bytearray would be cleared first, which takes as long as a copy


def _chunks(file: DataFileReader, most: int, memory_for: Callable[[int], memoryview]) -> Iterator[memoryview]:
    """Yields header, chunks of at most `most` bytes in memory from `memory_for`, and checksums."""
    entries = list(file.entries.values())
    header = bytearray(entries[0].begin)  # entries follow one another, from the header to the file's end
    # Opened again for each read: who has failed may keep this where it is, and a descriptor with it.
    file.read_into([Span(0, memoryview(header))])
    file.refuse_other_header(header)  # it is read once more, and may have come otherwise
    yield memoryview(header)
    for parts in _together(_parts(entries[:-1], most), most):
        chunk = memory_for(parts[-1].end - parts[0].begin)
        file.read_into([Span(parts[0].begin, chunk)], once=True)
        for part in parts:
            memory = chunk[part.begin - parts[0].begin : part.end - parts[0].begin]
            for number in file.failed_segments(part.segment, memory):
                raise file.segment_error(part.entry, number)
        yield chunk
    yield memoryview(file.sums)


class _Part(NamedTuple):
    """Whole segments of an entry: offsets in the file, and the first one's number."""

    entry: Entry
    begin: int
    end: int
    segment: int


def _parts(entries: Iterable[Entry], most: int) -> Iterator[_Part]:
    for entry in entries:
        for begin in range(entry.begin, entry.end, most):
            segment = entry.segment + (begin - entry.begin) // SEGMENT_BYTES
            yield _Part(entry, begin, min(begin + most, entry.end), segment)


def _together(parts: Iterable[_Part], most: int) -> Iterator[list[_Part]]:
    """Yields adjacent parts, as many at a time as have at most this many bytes."""
    taken: list[_Part] = []
    for part in parts:
        if taken and part.end - taken[0].begin > most:
            yield taken
            taken = []
        taken.append(part)
    if taken:
        yield taken
