"""Files of torch.save as a source: one file, or numbered files with a model's tensors. Runs no pickle.

model.pt                                    a nested dict of tensors and plain values; or
pytorch_model-00001-of-00002.bin, …         dicts with different keys
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from shardopt.checkpoint.format.constants import TORCH_SUFFIXES, damaged
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.manifest import DataFile, Manifest, StoredLayout, StoredTensor, StoredTensors
from shardopt.checkpoint.sources.archives import ArchivedTensors, PlainValues
from shardopt.checkpoint.sources.grouping import with_options_by_member
from shardopt.checkpoint.sources.leaves import HeldArrays, is_array, leaves_of
from shardopt.checkpoint.sources.pickled.stand_ins import Unknown
from shardopt.checkpoint.sources.pickled.torch_archive import TensorRecord, read_archive
from shardopt.checkpoint.sources.pickled.zip_archive import zip_members
from shardopt.checkpoint.sources.reading.open_file import OpenFile
from shardopt.checkpoint.sources.source import Source, ambiguous
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.errors import FormatError, Problem
from shardopt.state.paths import PARAM_GROUPS, Path, join
from shardopt.state.values import canonical, encode_value
from shardopt.state.versions import VERSION, Version, merged, saved_form

_ZIP = b"PK\x03\x04"
_NUMBERED = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<of>\d{5})(?P<suffix>\.\w+)", re.ASCII)


class _TorchFile(ArchivedTensors):
    """One file of torch.save; `leaves` are its contents by path."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(storage, name)
        with self.reading():
            self.stamp = storage.stamp(name)
            self.nbytes = storage.size(name)
            attributes: list[tuple[dict[Any, Any], Any]] = []
            state = read_archive(self.read_bytes, 0, self.nbytes, self.where, attributes=attributes)
        if not isinstance(state, dict):
            kind = state.name if isinstance(state, Unknown) else type(state).__name__
            problem = Problem(self.where, f"a {kind}", "a dict by name", "save state_dict() and not the object itself")
            raise FormatError("a file of torch.save has no names in it", [problem])
        self.leaves = dict(leaves_of(state, (), self.where))
        noted = {id(node): versions for node, own in attributes if (versions := _versions_in(own)) is not None}
        self.module_versions = dict(_by_place(state, (), noted)) if noted else {}
        self._records = {join(path): leaf for path, leaf in self.leaves.items() if isinstance(leaf, TensorRecord)}
        self.arrays = HeldArrays(storage, name)
        unsummed = [leaf for leaf in self._records.values() if leaf.crc32 is None]
        ranges = sorted({(leaf.storage_begin, leaf.storage_begin + leaf.storage_nbytes) for leaf in unsummed})
        self._samples = dict(zip(ranges, self.samples(ranges), strict=True))
        is_summed = not unsummed
        if not self._records:  # else they tell, as an archive has either all checksums or none
            members = zip_members(self.read_bytes, 0, self.nbytes, self.where)
            is_summed = any(each.crc32 is not None for each in members.values())
        self.own_unsummed_bytes = 0 if is_summed else self.nbytes
        """Bytes without a checksum: of a storage once, which several tensors may share, and of plain values."""

    def unsummed_bytes(self, entry: Entry) -> int:
        return 0  # they are those of the file

    def sum_of(self, leaf: TensorRecord) -> int | str:
        """Returns the checksum of a tensor's storage; of one that has none, a hash of some places in it."""
        if leaf.crc32 is not None:
            return leaf.crc32
        return self._samples[leaf.storage_begin, leaf.storage_begin + leaf.storage_nbytes]

    def find(self, key: str) -> TensorRecord:
        raise AssertionError(f"{key} was found when the file was opened")


def torch_files(storage: Storage, names: Sequence[str]) -> list[str] | None:
    """Returns a directory's torch.save files; None if there are none.

    Raises:
        CorruptionError: files of a numbered set are missing.
        FormatError: there are several that do not belong together.
    """
    files = [name for name in names if name.endswith(TORCH_SUFFIXES) and is_torch_file(storage, name)]
    numbered = [_NUMBERED.fullmatch(name) for name in files]
    if len(files) <= 1 and not any(numbered):
        return files or None
    sets = {(found["stem"], found["of"], found["suffix"]) for found in numbered if found}
    if len(sets) != 1 or not all(numbered):
        raise ambiguous(storage, f"several files of torch.save ({', '.join(files[:4])})")
    ((stem, of, suffix),) = sets
    if len(files) == 1 != int(of):
        raise ambiguous(storage, f"{files[0]}, one of {int(of)} by its name", "give its path, if it is whole by itself")
    if len(files) != int(of):
        there = set(files)
        missing = next(
            name for i in range(1, len(files) + 2) if (name := f"{stem}-{i:05d}-of-{of}{suffix}") not in there
        )
        raise damaged(f"{storage.url}/{missing}", "no such file")
    return files


def is_torch_file(storage: Storage, name: str) -> bool:
    """Whether a file begins as torch.save's do; files of old versions also need one of torch's suffixes."""
    begin = storage.read(name, 0, len(_ZIP))
    return begin == _ZIP or (begin[:1] == b"\x80" and name.endswith(TORCH_SUFFIXES))


class TorchSource(Source):
    """The state in files of torch.save.

    Args:
        files: names; the same key must not be in two of them.
        url: where it is one file that was asked for, its own.

    Raises:
        CorruptionError, FormatError: see `read_archive`; or a key is twice there.
    """

    format_name = "torch.save"

    def __init__(self, storage: Storage, files: Sequence[str], url: str | None = None) -> None:
        self.storage, self.url = storage, storage.url if url is None else url
        with wrap_os_errors(f"read {self.url}"):
            self._files = [_TorchFile(storage, name) for name in sorted(files)]
        self.unsummed_bytes = sum(file.own_unsummed_bytes for file in self._files)
        tensors = StoredTensors()
        values: dict[str, tuple[Path, Any]] = {}
        unread: dict[str, str] = {}
        plain_values = PlainValues()
        digest = xxhash.xxh3_64()
        for number, file in enumerate(self._files):
            stored_at: dict[tuple[Any, ...], str] = {}
            for path, leaf in file.leaves.items():
                key = join(path)
                if key in tensors or key in values or key in unread:
                    raise damaged(f"{file.where}: {key}", "two entries of this name")
                if isinstance(leaf, TensorRecord):
                    tied_to = stored_at.setdefault((leaf.begin, leaf.sizes, leaf.strides, leaf.dtype), key)
                    is_first = tied_to not in tensors
                    layout = StoredLayout.in_one_box(leaf.sizes, number) if is_first else tensors[tied_to].layout
                    tensors[key] = StoredTensor(path, leaf.dtype, layout, tied_to if tied_to != key else None)
                    view = leaf.sizes, leaf.strides, leaf.begin - leaf.storage_begin  # of the storage with this CRC32
                    digest.update(f"{key}\0{file.sum_of(leaf)}\0{leaf.dtype.name}\0{view}\0".encode())
                    continue
                if is_array(leaf) and PARAM_GROUPS not in path:
                    tensors[key] = file.arrays.add(key, path, leaf, len(self._files) + number)
                    digest.update(f"{key}\0{file.arrays.digest_of(key)}\0{leaf.dtype.str}\0{leaf.shape}\0".encode())
                    continue
                plain, reason = plain_values.plain(leaf, file.read_bytes, f"{file.where}: {key}")
                if reason:
                    unread[key] = reason
                else:
                    values[key] = path, plain
                    digest.update(f"{key}\0{canonical(encode_value(plain))}\0".encode())
        self.unread, self.digest = unread, digest.hexdigest()
        arrays = [file.arrays for file in self._files]
        self._arrays = arrays if any(each.holds_any for each in arrays) else []
        tensors, grouped = with_options_by_member(tensors, values)
        self.manifest = Manifest(
            save_id=self.digest,
            world_size=1,
            files=(
                *(DataFile(file.name, file.nbytes, "") for file in self._files),
                *(DataFile(each.name, each.nbytes, "") for each in self._arrays),
            ),
            tensors=tensors,
            values=grouped,
            module_versions=merged(file.module_versions for file in self._files) or None,
        )

    def open_file(self, number: int, keys: Collection[str] | None = None) -> OpenFile:
        return [*self._files, *self._arrays][number]


def _versions_in(attributes: Any) -> dict[str, Version] | None:
    """Returns the versions that torch has noted in the attributes of a module's state, by name of a module."""
    notes = attributes.get("_metadata") if isinstance(attributes, dict) else None
    if not isinstance(notes, dict):
        return None
    found = {name: note.get(VERSION) for name, note in notes.items() if isinstance(note, dict)}
    return saved_form(found) if all(type(name) is str for name in found) else None


def _by_place(
    node: dict[Any, Any], path: Path, noted: Mapping[int, dict[str, Version]]
) -> Iterator[tuple[str, dict[str, Version]]]:
    if id(node) in noted:
        yield join(path), noted[id(node)]
    for part, child in node.items():
        if isinstance(child, dict):
            yield from _by_place(child, (*path, part), noted)
