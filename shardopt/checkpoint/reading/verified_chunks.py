"""The bytes of a data file, from its beginning to its end, verified as they are read: what copies are made of."""

from __future__ import annotations

from collections.abc import Iterator

from shardopt.checkpoint.format.constants import SEGMENT_BYTES, segment_count
from shardopt.checkpoint.reading.data_file_reader import DataFileReader
from shardopt.checkpoint.storage import Span

_CHUNK_BYTES = 16 * SEGMENT_BYTES


class VerifiedChunks:
    """The bytes of a data file, none of which is handed on before its checksum is right. Iterable again."""

    def __init__(self, file: DataFileReader) -> None:
        self._file = file

    def __iter__(self) -> Iterator[memoryview]:
        file = self._file
        entries = list(file.entries.values())
        header = bytearray(entries[0].begin)  # entries follow one another, from the header to the file's end
        file.read_into([Span(0, memoryview(header))])
        file.refuse_other_header(header)  # it is read once more, and may have come otherwise
        yield memoryview(header)
        for entry in entries[:-1]:
            segment = entry.segment
            for begin in range(entry.begin, entry.end, _CHUNK_BYTES):
                chunk = memoryview(bytearray(min(_CHUNK_BYTES, entry.end - begin)))
                file.read_into([Span(begin, chunk)])
                for number in file.failed_segments(segment, chunk):
                    raise file.segment_error(entry, number)
                segment += segment_count(chunk.nbytes)
                yield chunk
        yield memoryview(file.sums)
