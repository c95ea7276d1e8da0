"""The earlier save that a save refers to (`base=`): its manifest, and the checksums of its files.

In the first round of a save rank 0 opens it, and says what it has found. Where that is in remote storage the manifest
goes to the others as a section of the answer; what lies on a local disk each rank reads for itself, as it may have it
under another path.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import xxhash

from shardopt.checkpoint.format.constants import DIRECTORY_NAME, MANIFEST_NAME
from shardopt.checkpoint.format.manifest import DataFile, StoredEntry, StoredLayout
from shardopt.checkpoint.saving.planning.save_plan import WriteRequest
from shardopt.checkpoint.saving.writing.earlier import Earlier, Kept, OnDisk
from shardopt.checkpoint.saving.writing.row_prints import RowPrints
from shardopt.checkpoint.sources.own import OwnSource, manifest_bytes
from shardopt.checkpoint.sources.reading.open_file import DataFileReader, form_of
from shardopt.checkpoint.sources.reading.with_deltas import FileWithDeltas
from shardopt.checkpoint.storage import Storage, storage_of
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, OptionError, Problem
from shardopt.sharding.box import Box
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


class FoundBase(NamedTuple):
    """The base that rank 0 opened, for all ranks; `is_sent` if its manifest is sent to the others as a section."""

    url: str
    digest: str
    is_sent: bool


class Part(NamedTuple):
    """Rows of a box to write, `begin` to `end` in the tensor's rows.

    `unchanged_in` is the number of the base's box that has them; None where they have changed. `delta_slot` is that of
    the file with what has changed of them since; None where that is nothing. With a delta alone they are written
    whole as well.
    """

    begin: int
    end: int
    unchanged_in: int | None
    delta_slot: int | None = None


class Base:
    """The earlier save that a save refers to.

    Args:
        url: of a committed checkpoint.
        target: where the new one is to be.
        data: the bytes of its manifest, where another rank has read them; None to read them here.

    Attributes:
        kept: what this rank has in memory of the last save, which may have been this one; None for nothing.
        prints: of the rows of boxes at this save, if it was the last one; None to know of none.

    Raises:
        OptionError: it does not lie beside the new one.
        CheckpointNotFoundError, CorruptionError, FormatError: there is no manifest to be read.
    """

    def __init__(self, url: str, target: Storage, data: bytes | None = None) -> None:
        storage = storage_of(url)
        parent, target_parent = storage.parent(), target.parent()
        if parent is None or target_parent is None or parent[0].url != target_parent[0].url:
            where = target.url if target_parent is None else target_parent[0].url
            problem = Problem("base", storage.url, f"a checkpoint in {where}, beside the new one", "save beside it")
            raise OptionError("a save cannot refer to that", [problem], code="bad-base")
        self.directory = parent[1]
        if not DIRECTORY_NAME.fullmatch(self.directory):
            required = "a directory named by ASCII letters, digits and =+,@~._-"
            problem = Problem("base", repr(self.directory), required, "give the directory another name")
            raise OptionError("a save cannot refer to that", [problem], code="bad-base")
        self.kept: Kept | None = None
        self.prints: RowPrints | None = None
        self._lock = world().lock()
        # Of a link too only beside it, where the new one will look: what lies beside its target is written again.
        self.source = OwnSource(storage, data, parent[0].url if storage.is_link() else None)
        self.manifest = self.source.manifest
        self._files: dict[int, DataFileReader | None] = {}
        self._with_deltas: dict[tuple[int, ...], FileWithDeltas] = {}
        self._columns: dict[StoredLayout, Mapping[tuple[Any, ...], list[tuple[int, int, int]]]] = {}

    @property
    def digest(self) -> str:
        return self.source.digest

    def is_there(self) -> bool:
        """Whether the manifest that was read still exists."""
        try:
            data = self.source.storage.read(MANIFEST_NAME)
        except FileNotFoundError:
            return False
        return xxhash.xxh3_64_hexdigest(data) == self.digest

    def data_file(self, number: int) -> DataFile:
        """Returns one of the base's files as a checkpoint beside it refers to it."""
        file = self.manifest.files[number]
        return DataFile(file.name, file.nbytes, file.digest, file.directory or self.directory)

    def bytes_in(self, number: int) -> int:
        """Returns the tensor bytes in one of the base's files, which must have been opened."""
        file = self._files.get(number)
        entries = [] if file is None else [*file.entries.values()]
        return entries[-1].begin - entries[0].begin if entries else 0

    def layout_of(self, request: WriteRequest) -> StoredLayout | None:
        """Returns the base's layout of a tensor; None if it has none of this name and dtype."""
        tensor = self.manifest.tensors.get(request.key)
        if tensor is None or tensor.tied_to is not None or tensor.stored_as is not None:
            return None  # data files have it under another key
        if tensor.dtype.name != request.dtype.name or len(tensor.layout.shape) != len(request.box.sizes):
            return None
        return tensor.layout

    def bytes_used(self, request: WriteRequest, part: Part) -> tuple[int, Mapping[int, int]]:
        """Returns the number of the base's file that has an unchanged part, and the part's bytes in all its files."""
        layout = self.layout_of(request)
        assert layout is not None and part.unchanged_in is not None
        number, entry = layout.files[part.unchanged_in], layout.entry(part.unchanged_in)
        rows = part.end - part.begin
        used = {number: rows * prod(request.box.sizes[1:]) * request.dtype.itemsize}
        if entry.deltas:
            stored = self.stored(number, request, entry)
            assert stored is not None  # it was, or the part would not have been found
            of_deltas = (-(-nbytes * rows // entry.box.sizes[0]) for nbytes in stored.delta_bytes)
            used |= zip(entry.deltas, of_deltas, strict=True)
        return number, used

    def rows_like(self, layout: StoredLayout, box: Box) -> list[tuple[int, int, int]]:
        """Returns first row, end and number of the stored boxes with the same columns as a box."""
        if layout not in self._columns:
            columns: defaultdict[tuple[Any, ...], list[tuple[int, int, int]]] = defaultdict(list)
            for number, stored in enumerate(layout.boxes):
                columns[columns_of(stored)].append((*rows_of(stored), number))
            for rows in columns.values():
                rows.sort()
            self._columns[layout] = columns
        return self._columns[layout].get(columns_of(box), [])

    def stored(self, number: int, request: WriteRequest, entry: StoredEntry) -> Earlier | None:
        """Returns an entry of one of the base's files; None if it is not as it was written."""
        if self.kept is not None and entry.box == request.box and not entry.is_patch:
            kept = self.kept.of(self.manifest.save_id, request)
            if kept is not None:
                return kept
        try:
            with self._lock:
                # The bridge too, which followers need: a save may not refer to a file that is gone.
                opened = {each: self._file(each) for each in (number, *entry.delta_files)}
            files = {each: file for each, file in opened.items() if file is not None}
            if len(files) < len(opened):
                return None
            base, deltas = files[number], [files[each] for each in entry.deltas]
            key, form = entry.key(request.key), form_of(request.dtype, entry.box)
            if not deltas:
                return OnDisk(base, base.entry(key, form))
            numbers = (number, *entry.deltas)
            if numbers not in self._with_deltas:
                self._with_deltas[numbers] = FileWithDeltas(base, deltas)
            changed = self._with_deltas[numbers]
            stored = changed.entry(key, form)
            return OnDisk(changed, stored, changed.bytes_of_deltas(stored))
        except CheckpointError as error:
            _log.warning("what an earlier save has is written again: %s", error)
            return None

    def _file(self, number: int) -> DataFileReader | None:
        """Returns one of the base's files, open; None if it was damaged."""
        if number not in self._files:
            self._files[number] = None
            self._files[number] = self.source.open_file(number)
        return self._files[number]


def find_base(
    url: str, required: bool, target: Storage, ranks: int
) -> tuple[Base | None, FoundBase | None, list[bytes]]:
    """Opens the base on rank 0. Returns it, what all ranks get of it, and the section that they then need.

    Args:
        required: whether it is an error that there is no such save, or a damaged one; otherwise all is written.
        target: where the new checkpoint is to be.
        ranks: that save.
    """
    source = storage_of(url)
    is_sent = source.is_remote and ranks > 1
    try:
        data = manifest_bytes(source) if is_sent else None
        base = Base(url, target, data)
    except (CheckpointNotFoundError, CorruptionError) as error:
        if required:
            raise
        _log.warning("everything is written again: %s", error)
        return None, None, []
    return base, FoundBase(url, base.digest, is_sent), [] if data is None else [zlib.compress(data, 1)]


def open_found(found: FoundBase, section: bytes, target: Storage) -> Base | None:
    """Opens the base that rank 0 found, on another rank; None if this rank sees something else."""
    try:
        base = Base(found.url, target, zlib.decompress(section) if found.is_sent else None)
    except CheckpointError as error:
        _log.warning("all that this rank has is written again: %s", error)
        return None
    if base.digest != found.digest:
        _log.warning(
            "all that this rank has is written again: it sees another checkpoint at %s than rank 0 [bad-base]",
            found.url,
        )
        return None
    return base


def rows_of(box: Box) -> tuple[int, int]:
    """Returns the first row of a box and its end; a box without dimensions has one row."""
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def columns_of(box: Box) -> tuple[Any, ...]:
    """Returns a box's place in all dimensions except the first."""
    return box.offsets[1:], box.sizes[1:]
