"""Boxes of a data file with the deltas that later saves wrote: their bytes are those of the last of these saves."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

from shardopt.checkpoint.format.constants import DELTA_INDEX_PREFIX, DELTA_PREFIX, DTYPES, SEGMENT_BYTES, damaged
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.delta import Delta, DeltaIndex, decode_index, digest_of, index_bytes, word_bytes
from shardopt.checkpoint.sources.reading.checking import read_entries
from shardopt.checkpoint.sources.reading.open_file import DataFileReader, Form, OpenFile, SummedFile, form_of
from shardopt.checkpoint.storage import ReadInto, Span
from shardopt.errors import CorruptionError
from shardopt.sharding.box import whole
from shardopt.world import world

_FIRST_JOINED_BYTES = 256 << 10  # of small entries that are read at once, twice as many with each further read
_JOINED_BYTES = 8 << 20  # at most
_AHEAD_BYTES = 1 << 20  # of one file, that were read ahead and stay so between reads: of those who read box by box
_WINDOW_BYTES = 8 << 20  # of all deltas of a box, on average, that are read at once
_LEAST_WINDOW_SEGMENTS = 16
_MOST_WINDOWS = 8  # whose deltas are kept: several threads read at once, each in another


class ChangedBox(NamedTuple):
    """An entry that has changed, the bytes of its words, and the index of each delta.

    Its deltas are read in windows of so many segments, where there are many.
    """

    entry: Entry
    word: int
    indices: Sequence[DeltaIndex]
    window: int


class FileWithDeltas(SummedFile):
    """A data file whose boxes have the changes of deltas, each of which must belong on what is before it.

    A reader sees the entries of the file, with the bytes and checksums that they have after the last delta. Deltas are
    read when the bytes that they change are read, and forgotten when no thread reads.

    Args:
        base: the file.
        deltas: the files that have a delta for each box that is read, in order.
    """

    def __init__(self, base: DataFileReader, deltas: Sequence[DataFileReader]) -> None:
        super().__init__(base.storage, base.name)
        self.sums: bytearray = bytearray(base.sums)
        self._base, self._deltas = base, [DeltaFile(file) for file in deltas]
        self._boxes: dict[int, ChangedBox] = {}  # by offset in the file
        self._begins: list[int] = []
        self._lock, self._readers = world().lock(), 0

    def entry(self, key: str, form: Form) -> Entry:
        entry = self._base.entry(key, form)
        with self._lock:
            if entry.begin < entry.end and entry.begin not in self._boxes:
                self._add(entry, word_bytes(form.dtype))
        return entry

    @contextmanager
    def opened(self, once: bool = False) -> Iterator[ReadInto]:
        with self._lock:
            self._readers += 1
        try:
            with self._base.opened(once) as read:
                yield partial(self._read, read)
        finally:
            with self._lock:
                self._readers -= 1
                for each in self._deltas if not self._readers else ():
                    each.forget()

    def bytes_of_deltas(self, entry: Entry) -> list[int]:
        """Returns the bytes of each delta of a box that was asked for."""
        box = self._boxes[entry.begin]
        return [index_bytes(entry.end - entry.begin) + index.nbytes(box.word) for index in box.indices]

    def segment_error(self, entry: Entry, segment: int) -> CorruptionError:
        changes = ", ".join(file.where for file in self._deltas)
        what = f"segment {segment - entry.segment} of {entry.key!r} with bytes that fail their checksum"
        return damaged(self.where, f"{what} after the changes in {changes}")

    def _add(self, entry: Entry, word: int) -> None:
        """Adds a box; checks its deltas as far as that is possible without their words."""
        sums = self.checksums(entry)
        indices = []
        for file in self._deltas:
            index = file.index(entry, word)
            if index.before != digest_of(sums):
                raise damaged(file.where, f"a delta of {entry.key!r} that does not belong on what {self.where} has")
            sums = index.after
            indices.append(index)
        self.sums[8 * entry.segment : 8 * entry.segment + len(sums)] = sums
        segments, nbytes = len(sums) // 8, sum(index.nbytes(word) for index in indices)
        window = max(segments * _WINDOW_BYTES // max(nbytes, 1), _LEAST_WINDOW_SEGMENTS)
        self._boxes[entry.begin] = ChangedBox(entry, word, indices, min(window, segments))
        insort(self._begins, entry.begin)

    def _read(self, read: ReadInto, spans: Sequence[Span]) -> None:
        read(spans)
        for offset, memory in spans:
            for box, begin, end in self._windows(offset, offset + memory.nbytes):
                first = (begin - box.entry.begin) // SEGMENT_BYTES // box.window * box.window
                for file, index in zip(self._deltas, box.indices, strict=True):
                    with self._lock:
                        delta = file.delta(box, index, first)
                    part = memory[begin - offset : end - offset]
                    delta.apply(begin - box.entry.begin - first * SEGMENT_BYTES, part)

    def _windows(self, begin: int, end: int) -> Iterator[tuple[ChangedBox, int, int]]:
        """Yields the ranges between two offsets in the file that are within one window of one box each."""
        while begin < end:  # small boxes that follow one another are read as one span
            box = self._boxes[self._begins[bisect_right(self._begins, begin) - 1]]
            nbytes = box.window * SEGMENT_BYTES
            stop = min(end, box.entry.end, begin - (begin - box.entry.begin) % nbytes + nbytes)
            assert begin < stop, "bytes of no box that was asked for"
            yield box, begin, stop
            begin = stop


def open_with_deltas(base: OpenFile, deltas: Sequence[OpenFile]) -> FileWithDeltas:
    """Returns data files as one that has the changes; only checkpoints of our own format have deltas."""
    opened = [file for file in (base, *deltas) if isinstance(file, DataFileReader)]
    assert len(opened) == 1 + len(deltas)
    return FileWithDeltas(opened[0], opened[1:])


class DeltaFile:
    """The deltas in one data file. Not safe for threads.

    Attributes:
        where: the file's place, for errors.
    """

    def __init__(self, file: DataFileReader) -> None:
        self.where, self._file = file.where, file
        self._indices: dict[str, DeltaIndex] = {}
        self._read: dict[str, bytearray] = {}  # ahead, by key in the file
        self._read_bytes = 0
        self._in_order: list[Entry] = []
        self._joined_bytes = _FIRST_JOINED_BYTES
        self._deltas: dict[tuple[str, int], Delta] = {}  # by key of the box, and the first segment

    def index(self, entry: Entry, word: int) -> DeltaIndex:
        """Returns the index of a box's delta."""
        if entry.key not in self._indices:
            nbytes, key = entry.end - entry.begin, DELTA_INDEX_PREFIX + entry.key
            data = self._bytes_of(key, index_bytes(nbytes))
            self._indices[entry.key] = decode_index(data, nbytes, word, f"{self.where}: {key}")
        return self._indices[entry.key]

    def delta(self, box: ChangedBox, index: DeltaIndex, first: int) -> Delta:
        """Returns the delta of a window of a box, from a segment on."""
        entry, word, _, window = box
        delta = self._deltas.pop((entry.key, first), None)
        if delta is None:
            key, nbytes = DELTA_PREFIX + entry.key, entry.end - entry.begin - first * SEGMENT_BYTES
            if len(index.counts) > window:
                whole_entry = self._entry(key, index.nbytes(word))
                index, (words, skips) = index.part(first, first + window, word)
                body = bytearray(index.nbytes(word))
                cut = words[1] - words[0]
                spans = [(words[0], memoryview(body)[:cut]), (skips[0], memoryview(body)[cut:])]
                if key in self._read:  # ahead, with smaller ones
                    for at, memory in spans:
                        memory[:] = memoryview(self._read[key])[at : at + memory.nbytes]
                else:
                    self._fill(whole_entry, [Span(*each) for each in spans])
            else:
                body = self._bytes_of(key, index.nbytes(word))
            nbytes = min(nbytes, window * SEGMENT_BYTES)
            delta = Delta(index, body, nbytes, word, f"{self.where}: {key}")
            if len(self._deltas) == _MOST_WINDOWS:
                del self._deltas[next(iter(self._deltas))]
        self._deltas[entry.key, first] = delta  # the last one of those that are kept
        return delta

    def _fill(self, entry: Entry, spans: Sequence[Span]) -> None:
        """Reads ranges of an entry, by their offsets in it.

        Not verified by its own checksums: those of the box are compared after it was applied.
        """
        self._file.read_into([Span(entry.begin + at, memory) for at, memory in spans])

    def forget_box(self) -> None:
        """Forgets the deltas of boxes that were decoded; keeps what was read ahead of others."""
        self._deltas.clear()

    def forget(self) -> None:
        """Forgets what was read of deltas."""
        if self._read_bytes > _AHEAD_BYTES:
            self._read.clear()
            self._read_bytes = 0
        self._joined_bytes = _FIRST_JOINED_BYTES
        self.forget_box()

    def _entry(self, key: str, nbytes: int) -> Entry:
        return self._file.entry(key, form_of(DTYPES["uint8"], whole((nbytes,))))

    def _bytes_of(self, key: str, nbytes: int) -> bytearray:
        """Returns the bytes of an entry. Small ones that follow it are read with it: of many tensors all are wanted."""
        first = self._entry(key, nbytes)
        if key not in self._read:
            entries = [first, *self._following(first)]
            self._joined_bytes = min(2 * self._joined_bytes, _JOINED_BYTES)
            self._read |= zip((each.key for each in entries), read_entries(self._file, entries), strict=True)
            self._read_bytes += entries[-1].end - first.begin
        memory = self._read.pop(key)
        self._read_bytes -= len(memory)
        return memory

    def _following(self, first: Entry) -> Iterator[Entry]:
        """Yields the entries of its kind that follow an entry, and are to be read with it."""
        if len(self._in_order) != len(self._file.kept):
            self._in_order = sorted(self._file.kept, key=_begin)
        kind, end = first.key[: first.key.index(".") + 1], first.end
        for entry in islice(self._in_order, bisect_left(self._in_order, end, key=_begin), None):
            is_next = entry.begin == end and entry.key.startswith(kind) and entry.key not in self._read
            if not is_next or entry.end - first.begin > self._joined_bytes:
                return
            yield entry
            end = entry.end


def _begin(entry: Entry) -> int:
    return entry.begin
