"""Open files: where boxes are in them, their bytes, and whether these are intact. Has our own data files, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from shardopt.checkpoint.format.constants import (
    MANIFEST_NAME,
    SEGMENT_BYTES,
    Dtype,
    damaged,
    segment_count,
    stored_shape,
)
from shardopt.checkpoint.format.data_file import Entry, header_length, parse_header
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.storage import ReadInto, Span, Storage, wrap_os_errors
from shardopt.errors import CorruptionError, Problem
from shardopt.sharding.box import Box

if TYPE_CHECKING:
    from torch import Tensor

HEAD_BYTES = 64 << 10  # that are read of a file at first: most headers, and small files as a whole
_SAMPLES, _SAMPLE_BYTES = 8, 4096

ReadChunks = Callable[[int, int], Iterator[memoryview]]
"""Reads a file between two offsets; yields the bytes in chunks of whole segments, which are soon overwritten."""


class ReadRequest(NamedTuple):
    """A box within a stored box in a file, and the memory to read it into.

    `wanted` is in coordinates of the stored box, whose sizes are `sizes`; `target` has just its shape.
    """

    file: OpenFile
    entry: Entry
    dtype: Dtype
    sizes: tuple[int, ...]
    wanted: Box
    target: Tensor


class Form(NamedTuple):
    """Dtype, shape and bytes of a box, as its data file's header must have them."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def form_of(dtype: Dtype, box: Box) -> Form:
    """Returns the form in which a box is stored."""
    return Form(dtype.safetensors or "U8", tuple(stored_shape(dtype, box.sizes)), box.numel * dtype.itemsize)


class OpenFile(ABC):
    """A file with boxes of tensors, at most one per tensor.

    Args:
        storage: the directory that it is in.
        name: of the file.
    """

    checks_first = False
    """Whether checksums cover more than a segment, and so are compared before any byte is used."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self.name = storage, name
        self.where = f"{storage.url}/{name}"
        self.checked: set[int] = set()
        """The numbers (`summed_with`) of byte ranges that were found intact."""
        self.stamp: tuple[int, ...] | None = None
        """Of the storage (`Storage.stamp`), as the file was found; compared after reads, where no checksum does it."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All entries of the file by key, if the file itself lists them."""
        return {}

    @abstractmethod
    def entry(self, key: str, form: Form) -> Entry:
        """Returns the entry of a box. Raises CorruptionError if the file lacks it, or has it in another form."""

    def requests(
        self, targets: Iterable[tuple[str, Tensor]], form: Form, dtype: Dtype, sizes: tuple[int, ...], wanted: Box
    ) -> Iterable[ReadRequest]:
        """Yields the reads that fill targets with a box within stored ones of these keys; see `ReadRequest`."""
        make, of, entry = tuple.__new__, ReadRequest, self.entry  # as fast as it gets, for tens of thousands
        return [make(of, (self, entry(key, form), dtype, sizes, wanted, target)) for key, target in targets]

    def is_intact(self, segment: int, memory: memoryview, *following: memoryview) -> bool:
        """Whether a segment's bytes, in one piece of memory or several, have the stored checksum.

        Args:
            segment: number in the file.
        """
        return True

    def failed_segments(self, segment: int, memory: memoryview) -> list[int]:
        """Returns the numbers of failed segments among those in `memory`, from `segment` on.

        Args:
            memory: whole segments, one after the other; the last one may be the end of an entry.
        """
        begins = range(0, memory.nbytes, SEGMENT_BYTES)
        return self.failed_of(segment, [memory[begin : begin + SEGMENT_BYTES] for begin in begins])

    def failed_of(self, segment: int, memories: Sequence[memoryview]) -> list[int]:
        """Returns the numbers of failed segments, from `segment` on, each of which has one of these memories."""
        return [number for number, memory in enumerate(memories, segment) if not self.is_intact(number, memory)]

    def summed_with(self, entry: Entry) -> int | None:
        """Returns a number for the byte range that shares one checksum with an entry, if there is one."""
        return None

    @abstractmethod
    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        """Reads a whole entry, and yields a problem for each place that differs from what was written."""

    def unsummed_bytes(self, entry: Entry) -> int:
        """Returns how many bytes of an entry no checksum covers, so that `check` cannot find damage of them."""
        return entry.end - entry.begin

    def checksums(self, entry: Entry) -> bytes:
        """Returns the checksums of all segments of an entry, concatenated; empty if it has none."""
        return b""

    def segment_error(self, entry: Entry, segment: int) -> CorruptionError:
        """Returns the error for a segment that fails its checksum, by its number in the file."""
        number = segment - entry.segment
        return damaged(self.where, f"segment {number} of {entry.key!r} with bytes that fail their checksum")

    def samples(self, ranges: Sequence[tuple[int, int]]) -> list[str]:
        """Returns a hash of some places in each byte range without a checksum, by which ranks compare their files.

        Empty of remote storage, from which rank 0 reads for all what is compared.
        """
        if self.storage.is_remote or not ranges:
            return [""] * len(ranges)
        hashes = []
        with self.reading(), self.storage.opened(self.name) as read:
            for begin, end in ranges:
                step = max(_SAMPLE_BYTES, -(-(end - begin) // _SAMPLES))
                sizes = {at: min(_SAMPLE_BYTES, end - at) for at in range(begin, end, step)}
                places = [Span(at, memoryview(bytearray(nbytes))) for at, nbytes in sizes.items()]
                read(places)
                hashes.append(xxhash.xxh3_64_hexdigest(b"".join(place.memory for place in places)))
        return hashes

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Adds the name of this file to errors while it is read."""
        with wrap_os_errors(f"read {self.where}"):
            try:
                yield
            except FileNotFoundError:
                raise self.missing() from None

    def missing(self) -> CorruptionError:
        """Returns the error for this file where it is not there."""
        return damaged(self.where, "no such file")

    @contextmanager
    def opened(self, once: bool = False) -> Iterator[ReadInto]:
        """Yields a function that fills spans from this file while the context is open.

        Args:
            once: whether nobody needs the bytes again soon (`Storage.opened_once`).
        """
        with ExitStack() as stack:
            with self.reading():
                storage = self.storage
                read = stack.enter_context(storage.opened_once(self.name) if once else storage.opened(self.name))

            def read_named(spans: Sequence[Span]) -> None:
                try:
                    read(spans)
                except Exception:  # a context around each call would take longer than the call
                    with self.reading():
                        raise

            yield read_named
            if self.stamp is not None:
                with self.reading():
                    self._refuse_change(storage.stamp(self.name))

    def _refuse_change(self, stamp: tuple[int, ...] | None) -> None:
        if stamp != self.stamp:
            found, remedy = "a file that changed while it was read", "load again, once nobody writes there"
            problem = Problem(self.where, found, "the file that was opened", remedy)
            raise CorruptionError("a checkpoint was replaced while it was read", [problem])

    def read_into(self, spans: Sequence[Span], once: bool = False) -> None:
        """Fills spans of memory, each from its offset in the file. Verifies nothing."""
        with self.opened(once) as read:
            read(spans)


class ComputedFile(OpenFile):
    """A file that is stored nowhere: its bytes are computed as they are read, and no checksum is of them."""

    def entry(self, key: str, form: Form) -> Entry:
        return Entry(key, form.dtype, form.shape, 0, form.nbytes, 0)

    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        return iter(())

    def unsummed_bytes(self, entry: Entry) -> int:
        return 0

    @contextmanager
    def opened(self, once: bool = False) -> Iterator[ReadInto]:
        yield self.fill

    @abstractmethod
    def fill(self, spans: Sequence[Span]) -> None:
        """Computes the bytes of spans."""


class SummedFile(OpenFile):
    """A file with a checksum for each segment."""

    sums: bytes | bytearray
    """The checksums of all segments, by their numbers in the file."""

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

    def failed_of(self, segment: int, memories: Sequence[memoryview]) -> list[int]:
        # The last one first: it was just read, and is in the core's cache.
        digests = [*map(xxhash.xxh3_64_digest, reversed(memories))]
        digests.reverse()
        stored = self.sums[8 * segment : 8 * (segment + len(digests))]
        if b"".join(digests) == stored:
            return []
        return [segment + i for i, digest in enumerate(digests) if digest != stored[8 * i : 8 * i + 8]]

    def unsummed_bytes(self, entry: Entry) -> int:
        return 0

    def checksums(self, entry: Entry) -> bytes:
        return bytes(self.sums[8 * entry.segment : 8 * (entry.segment + segment_count(entry.end - entry.begin))])


class DataFileReader(SummedFile):
    """A data file with verified header and checksums, which take two reads, or one for a small file.

    Args:
        wanted: the keys of which entries are kept; None for all. The others are read again when they are asked for:
            a job has as many files as ranks, with thousands of keys each.
        head_bytes: as many as its header may have; of a longer one the rest takes another read.
        checkpoint: which is read; where it is removed meanwhile, the error for a missing file says so.
    """

    def __init__(
        self,
        storage: Storage,
        file: DataFile,
        wanted: Collection[str] | None = None,
        head_bytes: int = HEAD_BYTES,
        checkpoint: Storage | None = None,
    ) -> None:
        super().__init__(storage, file.name)
        self.file, self._checkpoint = file, checkpoint
        self.header_bytes = 0
        self._wanted = wanted
        self._kept = self._read(head_bytes)
        self._all: Mapping[str, Entry] | None = self._kept if wanted is None else None

    def _read(self, head_bytes: int) -> dict[str, Entry]:
        file = self.file
        with self.reading():
            try:
                if file.nbytes <= head_bytes:
                    head = self.storage.read_rest(file.name, 0, file.nbytes)
                    self._refuse_length(len(head), file.nbytes)
                else:
                    head = self.storage.read(file.name, 0, head_bytes)
                    self._refuse_length(len(head), head_bytes)
                length = header_length(head[:8], file.nbytes, self.where)
                header = head[:length]
                if length > len(head):
                    header += self.storage.read(file.name, len(head), length)
                    self._refuse_length(len(header), length)
                entries = parse_header(header, file.nbytes, self.where, self._wanted)
            except (CorruptionError, IsADirectoryError):
                self._refuse_size()  # which tells more
                raise
            last = next(reversed(entries.values()))
            if file.nbytes <= head_bytes:
                self.sums = head[last.begin :]
            else:
                self.sums = self.storage.read_rest(file.name, last.begin, file.nbytes)
                self._refuse_length(len(self.sums), last.end - last.begin)
        self.refuse_other_header(header)
        self.header_bytes = length
        if self._wanted is not None:
            entries.popitem()  # that of the checksums
        return entries

    def missing(self) -> CorruptionError:
        if self._checkpoint is None or self._checkpoint.exists(MANIFEST_NAME):
            return super().missing()
        problem = Problem(self.where, "nothing any more", "what was written", "take another checkpoint")
        return CorruptionError("a checkpoint was removed while it was read", [problem], code="no-checkpoint")

    def refuse_other_header(self, header: bytes | bytearray) -> None:
        """Raises CorruptionError if a header, with the checksums of this file, is not what was written."""
        digest = xxhash.xxh3_64(header)
        digest.update(self.sums)
        if digest.hexdigest() != self.file.digest:
            raise damaged(self.where, "a header or checksums that are not what was written")

    def _refuse_length(self, nbytes: int, expected: int) -> None:
        if nbytes != expected:
            self._refuse_size()
            raise damaged(self.where, f"{nbytes} bytes where {expected} are to be read")

    def _refuse_size(self) -> None:
        nbytes = self.storage.size(self.file.name)
        if nbytes != self.file.nbytes:
            raise damaged(self.where, f"{nbytes} bytes where {self.file.nbytes} were written")

    @property
    def entries(self) -> Mapping[str, Entry]:
        if self._all is None:
            self._wanted = None
            self._all = self._kept = self._read(max(self.header_bytes, HEAD_BYTES))
        return self._all

    @property
    def kept(self) -> Collection[Entry]:
        """The entries that are kept: all, or those that were wanted when the file was opened."""
        return self._kept.values()

    def entry(self, key: str, form: Form) -> Entry:
        entry = self._kept.get(key) or self.entries.get(key)
        if entry is None or entry[1:3] != form[:2]:
            stored = f"{entry.dtype} {entry.shape}" if entry else "nothing"
            raise damaged(self.where, f"{stored} under {key!r} where the manifest has {form.dtype} {form.shape}")
        if entry.end - entry.begin != form.nbytes:
            raise damaged(self.where, f"{entry.end - entry.begin} bytes for {key!r}")
        return entry
