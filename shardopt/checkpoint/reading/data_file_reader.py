"""A data file of our own that is open for reading: header and checksums are verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import xxhash

from shardopt.checkpoint.format.constants import SEGMENT_BYTES, damaged, segment_count
from shardopt.checkpoint.format.data_file import Entry, header_length, parse_header
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.reading.open_file import Form, OpenFile, ReadChunks
from shardopt.checkpoint.storage import Storage
from shardopt.errors import Problem


class DataFileReader(OpenFile):
    """A data file whose header and checksums have been read and verified."""

    def __init__(self, storage: Storage, file: DataFile) -> None:
        super().__init__(storage, file.name)
        self.file = file
        with self.reading():
            nbytes = storage.size(file.name)
            if nbytes != file.nbytes:
                raise damaged(self.where, f"{nbytes} bytes where {file.nbytes} were written")
            length = header_length(storage.read(file.name, 0, 8), file.nbytes, self.where)
            header = storage.read(file.name, 0, length)
            self._entries = parse_header(header, file.nbytes, self.where)
            last = next(reversed(self._entries.values()))
            self.sums = storage.read(file.name, last.begin, last.end)
        digest = xxhash.xxh3_64(header)
        digest.update(self.sums)
        if digest.hexdigest() != file.digest:
            raise damaged(self.where, "a header or checksums that are not what was written")

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def entry(self, key: str, form: Form) -> Entry:
        entry = self._entries.get(key)
        if entry is None or entry.shape != form.shape or entry.dtype != form.dtype:
            stored = f"{entry.dtype} {entry.shape}" if entry else "nothing"
            raise damaged(self.where, f"{stored} under {key!r} where the manifest has {form.dtype} {form.shape}")
        if entry.end - entry.begin != form.nbytes:
            raise damaged(self.where, f"{entry.end - entry.begin} bytes for {key!r}")
        return entry

    def is_intact(self, segment: int, memory: memoryview, *following: memoryview) -> bool:
        if following:
            running = xxhash.xxh3_64(memory)
            for each in following:
                running.update(each)
            digest = running.digest()
        else:
            digest = xxhash.xxh3_64_digest(memory)
        return digest == self.sums[8 * segment : 8 * segment + 8]

    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        segment = entry.segment
        for chunk in read(entry.begin, entry.end):
            for failed in self.failed_segments(segment, chunk):
                yield from self.segment_error(entry, failed).problems
            segment += segment_count(chunk.nbytes)

    def failed_segments(self, segment: int, memory: memoryview) -> Iterator[int]:
        """Yields the numbers of the segments that fail their checksums, of those that `memory` has from `segment` on.

        Args:
            memory: whole segments, one after the other; the last one may be the end of an entry.
        """
        for i, begin in enumerate(range(0, memory.nbytes, SEGMENT_BYTES), segment):
            if not self.is_intact(i, memory[begin : begin + SEGMENT_BYTES]):
                yield i

    def checksums(self, entry: Entry) -> bytes:
        return self.sums[8 * entry.segment : 8 * (entry.segment + segment_count(entry.end - entry.begin))]
