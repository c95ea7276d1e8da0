"""Stored boxes as chains of deltas: what leads from the bytes that a follower has to those of the newest step.

    state    the digest of the checksums of a box: equal for equal bytes

A delta says which state it belongs on, and the checksums of that which it makes. So a follower needs no names of steps
to find its way: it goes back from the newest delta until it meets the state that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.delta import DeltaIndex, digest_of, word_bytes
from shardopt.checkpoint.format.manifest import StoredEntry
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.open_file import DataFileReader, Form, OpenFile, ReadChunks
from shardopt.checkpoint.sources.reading.with_deltas import ChangedBox, DeltaFile, FileWithDeltas
from shardopt.checkpoint.sources.source import Source
from shardopt.errors import Problem

KnownFiles = dict[tuple[str, str], DataFileReader]
"""Open data files by name and digest, kept from one step to the next: files do not change."""


@dataclass(frozen=True, slots=True)
class Link:
    """A delta of a box, and the file that has it."""

    file: DeltaFile
    index: DeltaIndex


class Chain(OpenFile):
    """The boxes of a data file, with the deltas on them, and those that lead to it from what the save before had.

    Reads go through `whole`; this object only says what is to be read.

    Args:
        base: the file.
        deltas: the files that have a delta of each box, in order.
        bridge: the file with the delta from what the save before had; None where there is none.
    """

    def __init__(self, base: DataFileReader, deltas: Sequence[DataFileReader], bridge: DataFileReader | None) -> None:
        super().__init__(base.storage, base.name)
        self._base, self._opened = base, deltas
        self._deltas = [DeltaFile(file) for file in deltas]
        self._bridge = None if bridge is None else DeltaFile(bridge)
        self._whole: DataFileReader | FileWithDeltas | None = None

    @property
    def whole(self) -> DataFileReader | FileWithDeltas:
        """The file as all of it is read."""
        if self._whole is None:
            self._whole = FileWithDeltas(self._base, self._opened) if self._opened else self._base
        return self._whole

    def entry(self, key: str, form: Form) -> Entry:
        return self._base.entry(key, form)

    def check(self, entry: Entry, read: ReadChunks) -> list[Problem]:  # type: ignore[override]  # as nothing is read
        raise AssertionError("a chain is read through `whole`")

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
    return ChangedBox(entry, word_bytes(entry.dtype), ())


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
        self._keys = [(file.name, file.digest) for file in self.manifest.files]
        self._files |= {number: known[key] for number, key in enumerate(self._keys) if key in known}

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
            base, *deltas = (self._opened(each) for each in (number, *entry.deltas))
            bridge = None if entry.bridge is None else self._opened(entry.bridge)
            self._chains[numbers] = Chain(base, deltas, bridge)
        return self._chains[numbers]

    def _opened(self, number: int) -> DataFileReader:
        file = self._files[number]
        assert isinstance(file, DataFileReader)
        return file
