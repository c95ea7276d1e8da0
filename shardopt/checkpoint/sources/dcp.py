"""Checkpoints of torch.distributed.checkpoint (DCP) as a source. Runs none of their pickles.

.metadata          which tensor has which boxes, and where the archive of each is; and of each plain value
__0_0.distcp       archives of torch.save, one after the other: of rank 0, in its file 0
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from shardopt.checkpoint.format.constants import DCP_METADATA_NAME, MANIFEST_LIMIT_BYTES, damaged
from shardopt.checkpoint.format.manifest import DataFile, Manifest, StoredLayout, StoredTensor, StoredTensors
from shardopt.checkpoint.sources.archives import ArchivedTensors, PlainValues
from shardopt.checkpoint.sources.grouping import path_of, with_options_by_member
from shardopt.checkpoint.sources.leaves import HeldArrays, holds_tensors, is_array, leaves_of
from shardopt.checkpoint.sources.pickled.dcp_metadata import DcpChunk, DcpEntry, DcpMetadata, DcpTensor, read_metadata
from shardopt.checkpoint.sources.pickled.stand_ins import Unknown
from shardopt.checkpoint.sources.pickled.torch_archive import TensorRecord, read_archive
from shardopt.checkpoint.sources.reading.open_file import OpenFile
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.errors import FormatError, Problem
from shardopt.state.paths import PARAM_GROUPS, Path, join

_WRITER = re.compile(r"__(\d+)_\d+\.distcp", re.ASCII)
_READ_BYTES = 8 << 20  # at a time, of plain values that lie side by side


class _Chunks(ArchivedTensors):
    """Boxes in one `.distcp` file, at most one per tensor. Parses each box's archive when it is read."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        chunks: Mapping[str, tuple[DcpTensor, DcpChunk]],
        stamp: tuple[int, ...] | None,
    ) -> None:
        super().__init__(storage, name)
        self._chunks, self.stamp = chunks, stamp

    def find(self, key: str) -> TensorRecord:
        tensor, chunk = self._chunks[key]
        with self.reading():
            record = read_archive(self.read_bytes, chunk.offset, chunk.offset + chunk.length, f"{self.where}: {key}")
        if isinstance(record, Unknown):
            remedy = "leave it out with skip=..., or save tensor.resolve_conj().resolve_neg()"
            problem = Problem(f"{self.where}: {key}", f"an object of {record.name}", "a tensor", remedy)
            raise FormatError("a tensor is stored in a way that is not read", [problem])
        if not isinstance(record, TensorRecord):
            raise damaged(f"{self.where}: {key}", f"a {type(record).__name__} where a tensor was written")
        if (record.dtype, record.sizes) != (tensor.dtype, chunk.box.sizes):
            fault = f"{record.dtype.name} {list(record.sizes)} for a box of {tensor.dtype.name} {list(chunk.box.sizes)}"
            raise damaged(f"{self.where}: {key}", fault)
        return record


class _TensorsInValues(ArchivedTensors):
    """Tensors inside containers, such as tuples, that DCP stores as one value."""

    def find(self, key: str) -> TensorRecord:
        raise AssertionError(f"{key} was found when its value was read")

    def add(self, key: str, path: Path, record: TensorRecord, number: int) -> StoredTensor:
        """Adds a tensor; returns it as a stored tensor in the file of this number."""
        self._records[key] = record
        return StoredTensor(path, record.dtype, StoredLayout.in_one_box(record.sizes, number))


class DcpSource(Source):
    """A checkpoint written by `torch.distributed.checkpoint.save`.

    Raises:
        CorruptionError, FormatError: see `read_metadata`; or files are missing, or too short.
    """

    format_name = "torch.distributed.checkpoint"
    keeps_empty_dicts = False

    def __init__(self, storage: Storage) -> None:
        self.storage, self.url = storage, storage.url
        where = f"{storage.url}/{DCP_METADATA_NAME}"
        with wrap_os_errors(f"read {where}"):
            nbytes = storage.size(DCP_METADATA_NAME)
            if nbytes > MANIFEST_LIMIT_BYTES:
                raise damaged(where, f"{nbytes} bytes, more than the limit of {MANIFEST_LIMIT_BYTES}")
            data = storage.read(DCP_METADATA_NAME, 0, nbytes)
        self.digest, self.unsummed_bytes = xxhash.xxh3_64_hexdigest(data), nbytes
        metadata = read_metadata(data, where)
        self._stamps: dict[str, tuple[int, ...] | None] = {}
        self._sizes = self._sizes_of_files(metadata)
        self._files: list[tuple[str, dict[str, tuple[DcpTensor, DcpChunk]]]] = []
        placed = self._place(metadata)
        self._within: list[_TensorsInValues | HeldArrays] = []
        values, unread = self._read_values(metadata, placed)
        tensors, grouped = with_options_by_member(placed, values)
        self.unread = dict(metadata.unsupported) | unread
        self.manifest = Manifest(
            save_id=self.digest,
            world_size=1 + max((int(found[1]) for found in map(_WRITER.fullmatch, self._sizes) if found), default=0),
            files=tuple(
                DataFile(name, self._sizes[name], "")
                for name in (*(name for name, _ in self._files), *(file.name for file in self._within))
            ),
            tensors=tensors,
            values=grouped,
        )

    def open_file(self, number: int, keys: Collection[str] | None = None) -> OpenFile:
        if number < len(self._files):
            name, chunks = self._files[number]
            return _Chunks(self.storage, name, chunks, self._stamps[name])
        return self._within[number - len(self._files)]

    def _sizes_of_files(self, metadata: DcpMetadata) -> dict[str, int]:
        """Returns the size of each file in bytes, and notes stamps; raises if a file is missing or too short."""
        ends: defaultdict[str, int] = defaultdict(int)
        places: list[DcpChunk | DcpEntry] = [chunk for each in metadata.tensors.values() for chunk in each.chunks]
        for place in [*places, *metadata.values.values()]:
            ends[place.file] = max(ends[place.file], place.offset + place.length)
        sizes = {}
        for name, end in sorted(ends.items()):
            where = f"{self.url}/{name}"
            with wrap_os_errors(f"read {where}"):
                try:
                    sizes[name] = self.storage.size(name)
                    self._stamps[name] = self.storage.stamp(name)
                except FileNotFoundError:
                    raise damaged(where, "no such file") from None
            if sizes[name] < end:
                raise damaged(where, f"{sizes[name]} bytes where {end} were written")
        return sizes

    def _place(self, metadata: DcpMetadata) -> StoredTensors:
        """Returns the tensors; splits each `.distcp` file into as many as it has boxes of one tensor."""
        numbers: dict[tuple[str, int], int] = {}
        layouts: dict[tuple[Any, ...], StoredLayout] = {}
        tensors = StoredTensors()
        for key, tensor in metadata.tensors.items():
            slots: defaultdict[str, int] = defaultdict(int)
            files = []
            for chunk in tensor.chunks:
                number = numbers.setdefault((chunk.file, slots[chunk.file]), len(numbers))
                slots[chunk.file] += 1
                if number == len(self._files):
                    self._files.append((chunk.file, {}))
                self._files[number][1][key] = tensor, chunk
                files.append(number)
            boxes = tuple(chunk.box for chunk in tensor.chunks)
            layout = (tensor.shape, boxes, tuple(files))
            stored = layouts.setdefault(layout, StoredLayout(*layout))
            tensors[key] = StoredTensor(_path_of(key, metadata), tensor.dtype, stored)
        return tensors

    def _read_values(
        self, metadata: DcpMetadata, tensors: StoredTensors
    ) -> tuple[dict[str, tuple[Path, Any]], dict[str, str]]:
        """Returns the plain values, and the reason for each value that is none; adds the tensors inside values."""
        values: dict[str, tuple[Path, Any]] = {}
        unread: dict[str, str] = {}
        plain_values = PlainValues()
        for key, entry, data in self._bytes_of_values(metadata.values):

            def read(begin: int, end: int, data: bytes = data, offset: int = entry.offset) -> bytes:
                return data[begin - offset : end - offset]

            where = f"{self.url}/{entry.file}: {key}"
            try:
                value = read_archive(read, entry.offset, entry.offset + entry.length, where)
            except FormatError as error:
                unread[key] = str(error.problems[0].found if error.problems else error)
                continue
            path = _path_of(key, metadata)
            for at, leaf in self._leaves_of(value, path, where):
                name = key if at == path else join((key, *at[len(path) :]))
                if at != path and (name in metadata.values or name in tensors):
                    raise damaged(where, f"two entries of the name {name!r}")
                if (isinstance(leaf, TensorRecord) or is_array(leaf)) and not _is_option(at):
                    tensors[name] = self._placed_within(name, at, leaf, entry.file)
                    continue
                plain, reason = plain_values.plain(leaf, read, where)
                if reason:
                    unread[name] = reason
                else:
                    values[name] = at, plain
        return values, unread

    def _leaves_of(self, value: Any, path: Path, where: str) -> Iterator[tuple[Path, Any]]:
        """Yields a value as it is, or its entries if it holds tensors, which have keys of their own in any app."""
        if isinstance(value, TensorRecord) or _is_option(path) or not holds_tensors(value):
            yield path, value
        else:
            yield from leaves_of(value, path, where)

    def _placed_within(self, key: str, path: Path, leaf: Any, file: str) -> StoredTensor:
        kind = _TensorsInValues if isinstance(leaf, TensorRecord) else HeldArrays
        at = next((i for i, each in enumerate(self._within) if type(each) is kind and each.name == file), None)
        if at is None:
            at = len(self._within)
            self._within.append(kind(self.storage, file))
        return self._within[at].add(key, path, leaf, len(self._files) + at)

    def _bytes_of_values(self, entries: Mapping[str, DcpEntry]) -> Iterator[tuple[str, DcpEntry, bytes]]:
        """Yields each value's archive; reads adjacent ones at once."""
        total = sum(entry.length for entry in entries.values())
        if total > MANIFEST_LIMIT_BYTES:
            raise damaged(f"{self.url}/{DCP_METADATA_NAME}", f"{total} bytes of plain values")
        group: list[tuple[str, DcpEntry]] = []
        for key, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[1].offset)):
            if group and (
                entry.file != group[0][1].file
                or entry.offset != group[-1][1].offset + group[-1][1].length
                or entry.offset + entry.length - group[0][1].offset > _READ_BYTES
            ):
                yield from self._read_group(group)
                group = []
            group.append((key, entry))
        if group:
            yield from self._read_group(group)

    def _read_group(self, group: Sequence[tuple[str, DcpEntry]]) -> Iterator[tuple[str, DcpEntry, bytes]]:
        first, last = group[0][1], group[-1][1]
        with wrap_os_errors(f"read {self.url}/{first.file}"):
            data = self.storage.read(first.file, first.offset, last.offset + last.length)
        for key, entry in group:
            begin = entry.offset - first.offset
            yield key, entry, data[begin : begin + entry.length]


def _is_option(path: Path) -> bool:
    """Whether it is an option of an optimizer's groups, whose tensors are plain values."""
    return any(isinstance(part, str) and part.split(".")[0] == PARAM_GROUPS for part in path)


def _path_of(key: str, metadata: DcpMetadata) -> Path:
    """Returns the path of a key in the nested state. DCP's dict keys are str, so ints are positions."""
    return path_of(metadata.paths.get(key) or (key,))
