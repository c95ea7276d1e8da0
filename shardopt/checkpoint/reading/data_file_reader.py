"""A data file that is open for reading: its entries, and their bytes; header and checksums are verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import xxhash

from shardopt.checkpoint.format.constants import SEGMENT_BYTES, Dtype, damaged, segment_count, stored_shape
from shardopt.checkpoint.format.data_file import Entry, header_length, parse_header
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.storage import ReadInto, Span, Storage, wrap_os_errors
from shardopt.errors import CorruptionError
from shardopt.sharding.box import Box


class Form(NamedTuple):
    """Dtype, shape and bytes of a box as the header of its data file has to have them."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def form_of(dtype: Dtype, box: Box) -> Form:
    """Returns the form in which a box is stored."""
    return Form(dtype.safetensors or "U8", tuple(stored_shape(dtype, box.sizes)), box.numel * dtype.itemsize)


class OpenFile:
    """A data file whose header and checksums have been read and verified."""

    def __init__(self, storage: Storage, file: DataFile) -> None:
        self.storage, self.file = storage, file
        self.where = f"{storage.url}/{file.name}"
        with self.reading():
            nbytes = storage.size(file.name)
            if nbytes != file.nbytes:
                raise damaged(self.where, f"{nbytes} bytes where {file.nbytes} were written")
            length = header_length(storage.read(file.name, 0, 8), file.nbytes, self.where)
            header = storage.read(file.name, 0, length)
            self.entries = parse_header(header, file.nbytes, self.where)
            last = next(reversed(self.entries.values()))
            self.sums = storage.read(file.name, last.begin, last.end)
        digest = xxhash.xxh3_64(header)
        digest.update(self.sums)
        if digest.hexdigest() != file.digest:
            raise damaged(self.where, "a header or checksums that are not what was written")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Names this file in what goes wrong while it is read."""
        with wrap_os_errors(f"read {self.where}"):
            try:
                yield
            except FileNotFoundError:
                raise damaged(self.where, "no such file") from None

    @contextmanager
    def opened(self) -> Iterator[ReadInto]:
        """Yields a function that fills spans from this file, for as long as this is open."""
        with ExitStack() as stack:
            with self.reading():
                read = stack.enter_context(self.storage.opened(self.file.name))

            def read_named(spans: Sequence[Span]) -> None:
                with self.reading():  # and nothing else: the caller's own work may fail in other ways
                    read(spans)

            yield read_named

    def read_into(self, spans: Sequence[Span]) -> None:
        """Fills spans of memory, each from its offset in the file. Nothing is verified."""
        with self.opened() as read:
            read(spans)

    def is_intact(self, segment: int, memory: memoryview, *following: memoryview) -> bool:
        """Whether a segment's bytes, which lie in one piece of memory or several, have the checksum that was written.

        Args:
            segment: number in the file.
        """
        if following:
            running = xxhash.xxh3_64(memory)
            for each in following:
                running.update(each)
            digest = running.digest()
        else:
            digest = xxhash.xxh3_64_digest(memory)
        return digest == self.sums[8 * segment : 8 * segment + 8]

    def failed_segments(self, segment: int, memory: memoryview) -> Iterator[int]:
        """Yields the numbers of the segments that fail their checksums, of those that `memory` has from `segment` on.

        Args:
            memory: whole segments, one after the other; the last one may be the end of an entry.
        """
        for i, begin in enumerate(range(0, memory.nbytes, SEGMENT_BYTES), segment):
            if not self.is_intact(i, memory[begin : begin + SEGMENT_BYTES]):
                yield i

    def checksums(self, entry: Entry) -> bytes:
        """Returns the checksums of all segments of an entry, one after the other, 8 bytes each."""
        return self.sums[8 * entry.segment : 8 * (entry.segment + segment_count(entry.end - entry.begin))]

    def entry(self, key: str, form: Form) -> Entry:
        """Returns the entry of a box. Raises CorruptionError where the header has it in another form, or not at all."""
        entry = self.entries.get(key)
        if entry is None or entry.shape != form.shape or entry.dtype != form.dtype:
            stored = f"{entry.dtype} {entry.shape}" if entry else "nothing"
            raise damaged(self.where, f"{stored} under {key!r} where the manifest has {form.dtype} {form.shape}")
        if entry.end - entry.begin != form.nbytes:
            raise damaged(self.where, f"{entry.end - entry.begin} bytes for {key!r}")
        return entry

    def segment_error(self, entry: Entry, segment: int) -> CorruptionError:
        """Returns the error of a segment that fails its checksum, by its number in the file."""
        number = segment - entry.segment
        return damaged(self.where, f"segment {number} of {entry.key!r} with bytes that fail their checksum")
