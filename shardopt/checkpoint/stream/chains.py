"""Stored boxes as chains of deltas: what leads from the bytes that a follower has to those of the newest step.

    state    the digest of the checksums of a box: equal for equal bytes

A delta says which state it belongs on, and the checksums of that which it makes. So a follower needs no names of steps
to find its way: it goes back from the newest delta until it meets the state that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardopt.checkpoint.format.constants import SEGMENT_BYTES, segment_count
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.delta import DeltaIndex, digest_of, word_bytes
from shardopt.checkpoint.format.manifest import StoredEntry
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.open_file import DataFileReader, Form, OpenFile, ReadChunks
from shardopt.checkpoint.sources.reading.with_deltas import ChangedBox, DeltaFile, FileWithDeltas
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import ReadInto, Span
from shardopt.errors import CorruptionError, Problem

WINDOW_SEGMENTS = 64
"""Segments of a large box whose deltas are read and decoded at a time."""

KnownFiles = dict[tuple[str, str], DataFileReader]
"""Open data files by name and digest, kept from one step to the next: files do not change."""


class ProvedDeltaFile(DeltaFile):
    """The deltas in one data file, verified before they are used: no checksums of boxes are compared after them.

    Attributes:
        bytes_read: of it so far.
    """

    def __init__(self, file: DataFileReader) -> None:
        super().__init__(file)
        self.file, self.bytes_read = file, 0
        self._segments: dict[int, bytearray] = {}  # verified, which the next window may begin in; by number in the file

    def forget(self) -> None:
        super().forget()
        self._segments.clear()

    def _bytes_of(self, key: str, nbytes: int) -> bytearray:
        before = self._read_bytes
        memory = super()._bytes_of(key, nbytes)
        self.bytes_read += self._read_bytes + len(memory) - before
        return memory

    def _fill(self, entry: Entry, spans: Sequence[Span]) -> None:
        numbers = [
            range(entry.segment + offset // SEGMENT_BYTES, entry.segment + segment_count(offset + memory.nbytes))
            for offset, memory in spans
            if memory.nbytes
        ]
        if not numbers:
            return
        last = entry.segment + segment_count(entry.end - entry.begin)
        found = {number: each for number, each in self._segments.items() if entry.segment <= number < last}
        reads: dict[int, Span] = {}
        for number in (number for each in numbers for number in each):
            if number not in found and number not in reads:
                begin = entry.begin + (number - entry.segment) * SEGMENT_BYTES
                reads[number] = Span(begin, memoryview(bytearray(min(SEGMENT_BYTES, entry.end - begin))))
        self._file.read_into([*reads.values()])
        for number, (_, memory) in reads.items():
            for failed in self._file.failed_segments(number, memory):
                raise self._file.segment_error(entry, failed)
            self.bytes_read += memory.nbytes
        have = found | {number: bytearray(memory) for number, (_, memory) in reads.items()}
        for offset, memory in spans:
            for begin in range(offset - offset % SEGMENT_BYTES, offset + memory.nbytes, SEGMENT_BYTES):
                low, high = max(begin, offset), min(begin + SEGMENT_BYTES, offset + memory.nbytes)
                memory[low - offset : high - offset] = have[entry.segment + begin // SEGMENT_BYTES][
                    low - begin : high - begin
                ]
        # A window begins in the segments in which the one before it ends; the first one of skips may have words, too.
        kept = {each[-1] for each in numbers}
        kept |= {min((number for number in have if number > min(kept, default=last)), default=last)}
        self._segments = {number: have[number] for number in kept if number in have}


@dataclass(frozen=True, slots=True)
class Link:
    """A delta of a box, and the file that has it."""

    file: ProvedDeltaFile
    index: DeltaIndex


class Chain(OpenFile):
    """The boxes of a data file, with the deltas on them, and those that lead to it from what the save before had.

    It can be read as any other file, and then has the bytes after the last delta. Those that are read whole in an
    update go through `whole` instead, which looks at the deltas of these boxes alone.

    Args:
        base: the file.
        deltas: the files that have a delta of each box, in order.
        bridge: the file with the delta from what the save before had; None where there is none.
    """

    def __init__(self, base: DataFileReader, deltas: Sequence[ProvedDeltaFile], bridge: ProvedDeltaFile | None) -> None:
        super().__init__(base.storage, base.name)
        self._base, self._deltas, self._bridge = base, deltas, bridge
        self._asked_for: dict[str, Form] = {}
        self.whole = FileWithDeltas(base, [each.file for each in deltas]) if deltas else base
        """The file as all of it is read."""

    def entry(self, key: str, form: Form) -> Entry:
        self._asked_for[key] = form
        return self._base.entry(key, form)

    @contextmanager
    def opened(self, once: bool = False) -> Iterator[ReadInto]:
        with self._looked_at().opened(once) as read:
            yield read

    def is_intact(self, segment: int, memory: memoryview, *following: memoryview) -> bool:
        return self._looked_at().is_intact(segment, memory, *following)

    def failed_of(self, segment: int, memories: Sequence[memoryview]) -> list[int]:
        return self._looked_at().failed_of(segment, memories)

    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        return self._looked_at().check(entry, read)

    def unsummed_bytes(self, entry: Entry) -> int:
        return 0

    def checksums(self, entry: Entry) -> bytes:
        return self._looked_at().checksums(entry)

    def segment_error(self, entry: Entry, segment: int) -> CorruptionError:
        return self.whole.segment_error(entry, segment)

    def _looked_at(self) -> DataFileReader | FileWithDeltas:
        """Returns the file as all of it is read, which has looked at the deltas of what was asked for."""
        for key, form in [*self._asked_for.items()]:
            self.whole.entry(key, form)
            self._asked_for.pop(key, None)  # afterwards, as other threads read too
        return self.whole

    def sums_of(self, entry: Entry) -> bytes:
        """Returns the checksums of a box after the last delta."""
        if self._deltas:
            return self._deltas[-1].index(entry, word_bytes(entry.dtype)).after
        return self._base.checksums(entry)

    def state_of(self, entry: Entry) -> bytes:
        """Returns the state of a box after the last delta."""
        return digest_of(self.sums_of(entry))

    def since(self, entry: Entry, state: bytes) -> list[Link] | None:
        """Returns the deltas that lead from a state of a box to the last one, in order; None if none do.

        Raises:
            CorruptionError: an index is not what was written.
        """
        word, links = word_bytes(entry.dtype), list[Link]()
        needed = self.state_of(entry)
        for file in reversed(self._deltas):
            if needed == state:
                return links
            index = file.index(entry, word)
            if digest_of(index.after) != needed:
                return None  # the whole box is read, which says what is wrong
            links.insert(0, Link(file, index))
            needed = index.before
        if needed == state:
            return links
        if self._bridge is not None and needed == digest_of(self._base.checksums(entry)):
            index = self._bridge.index(entry, word)
            if index.before == state and digest_of(index.after) == needed:
                return [Link(self._bridge, index), *links]
        return None


def box_of(entry: Entry) -> ChangedBox:
    """Returns what `DeltaFile.delta` wants to know of a box."""
    return ChangedBox(entry, word_bytes(entry.dtype), (), WINDOW_SEGMENTS)


class ChainReader(CheckpointReader):
    """A reader whose requests are of chains.

    Args:
        source: an open checkpoint of our own format.
        known: open files, to which those are added that it opens.
    """

    def __init__(self, source: Source, known: KnownFiles) -> None:
        super().__init__(source)
        self._known = known
        self._chains: dict[tuple[int | None, ...], Chain] = {}
        self._of_deltas: dict[int, ProvedDeltaFile] = {}  # one for all chains, as it reads ahead for all
        self._keys = [(file.name, file.digest) for file in self.manifest.files]
        self._files |= {number: known[key] for number, key in enumerate(self._keys) if key in known}

    @property
    def delta_files(self) -> Collection[ProvedDeltaFile]:
        """The files with deltas that were looked into."""
        return self._of_deltas.values()

    def keep_files(self) -> None:
        """Keeps the open files for the next step, and no others."""
        opened = {self._keys[number]: file for number, file in self._files.items()}
        self._known.clear()
        self._known |= {key: file for key, file in opened.items() if isinstance(file, DataFileReader)}

    def _delta_files(self, entry: StoredEntry) -> tuple[int, ...]:
        return entry.delta_files

    def _file_of(self, number: int, entry: StoredEntry) -> OpenFile:
        numbers = number, entry.bridge, *entry.deltas
        if numbers not in self._chains:
            bridge = None if entry.bridge is None else self._deltas_in(entry.bridge)
            deltas = [self._deltas_in(each) for each in entry.deltas]
            self._chains[numbers] = Chain(self._opened(number), deltas, bridge)
        return self._chains[numbers]

    def _deltas_in(self, number: int) -> ProvedDeltaFile:
        if number not in self._of_deltas:
            self._of_deltas[number] = ProvedDeltaFile(self._opened(number))
        return self._of_deltas[number]

    def _opened(self, number: int) -> DataFileReader:
        file = self._files[number]
        assert isinstance(file, DataFileReader)
        return file
