"""Checkpoints in Hugging Face's layout: safetensors files, optionally with an index of which file has which tensor.

    model.safetensors                                       all of it; or
    model-00001-of-00002.safetensors, …                     and
    model.safetensors.index.json                            {"weight_map": {key: file}}

torch's own writer of this layout cuts tensors into boxes: then the notes in each file say where its boxes begin. Where
several ranks write, each has files of its own, with boxes of any tensors, and there is no index:

    shard-00001-model-00001-of-00001.safetensors, shard-00002-model-00001-of-00001.safetensors, …
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import xxhash

from shardopt.checkpoint.format.constants import (
    CHECKSUMS_PREFIX,
    DATA_SUFFIX,
    DTYPES,
    FILE_NAME,
    INDEX_SUFFIX,
    JOURNAL_NAME,
    MANIFEST_LIMIT_BYTES,
    Dtype,
    all_sizes,
    damaged,
    is_shape,
    load_json,
    read_sizes,
    without_duplicates,
)
from shardopt.checkpoint.format.data_file import Entry, header_length
from shardopt.checkpoint.format.manifest import DataFile, Manifest, StoredLayout, StoredTensor, StoredTensors
from shardopt.checkpoint.sources.reading.open_file import Form, OpenFile, ReadChunks
from shardopt.checkpoint.sources.source import Source, ambiguous
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.errors import CheckpointNotFoundError, FormatError, Problem
from shardopt.sharding.box import Box, whole

_NUMBERED = re.compile(r"(?P<rank>shard-\d{5}-)?(?P<stem>.+)-(?P<number>\d{5})-of-(?P<of>\d{5})\.safetensors", re.ASCII)
_NAMES = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors} | {
    "F8_E8M0": DTYPES["float8_e8m0fnu"],
    "F8_E4M3FNUZ": DTYPES["float8_e4m3fnuz"],
    "F8_E5M2FNUZ": DTYPES["float8_e5m2fnuz"],
}


class SafetensorsFile(OpenFile):
    """A safetensors file of another library, without checksums.

    Raises:
        CorruptionError: its header is not what the format asks for.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(storage, name)
        with self.reading():
            self.stamp = storage.stamp(name)
            self.nbytes = storage.size(name)
            length = self.header_bytes = header_length(storage.read(name, 0, 8), self.nbytes, self.where)
            header = storage.read(name, 0, length)
        self.digest = "".join([xxhash.xxh3_64_hexdigest(header), *self.samples([(length, self.nbytes)])])
        table = load_json(header[8:], self.where, without_duplicates)
        self.notes = table.pop("__metadata__", None) or {}
        self._entries = _parse(table, length, self.nbytes, self.where)

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def entry(self, key: str, form: Form) -> Entry:
        entry = self._entries[key]
        if entry.end - entry.begin != form.nbytes:
            raise damaged(self.where, f"{entry.end - entry.begin} bytes for {key!r}")
        return entry

    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        for _ in read(entry.begin, entry.end):
            yield from ()  # that they can be read is all that there is to know

    def boxes(self) -> dict[str, Box]:
        """Returns which box of its tensor each entry is, if the file's metadata says so."""
        text = self.notes.get("DCP_SHARDING_INFO") if isinstance(self.notes, dict) else None
        try:
            sharding = json.loads(text) if isinstance(text, str) else {}
            return {
                key: Box(read_sizes(sharding[key]["saved_offsets"]), entry.shape)
                for key, entry in self._entries.items()
                if key in sharding
            }
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise damaged(self.where, f"malformed notes on sharding ({type(error).__name__}: {error})") from None


def _parse(table: Mapping[str, Any], length: int, nbytes: int, where: str) -> dict[str, Entry]:
    """Returns the entries of a header in byte order; raises unless they cover the file."""
    entries: list[Entry] = []
    for key, info in table.items():
        try:
            name, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
            fits = type(name) is str and all_sizes([begin, end, *shape]) and is_shape(shape) and begin <= end
        except (LookupError, TypeError, ValueError):
            raise damaged(where, f"a malformed entry for {key!r}") from None
        dtype = _NAMES.get(name) if fits else None
        if not fits or (dtype is not None and prod(shape) * dtype.itemsize != end - begin):
            raise damaged(where, f"an entry for {key!r} whose bytes are not those of its dtype and shape")
        entries.append(Entry(key, name, shape, length + begin, length + end, 0))
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    offset = length
    for entry in entries:
        if entry.begin != offset:
            raise damaged(where, f"bytes of {entry.key!r} that do not follow those before it")
        offset = entry.end
    if offset != nbytes:
        raise damaged(where, f"{nbytes} bytes, while its header describes {offset}")
    return {entry.key: entry for entry in entries}


def safetensors_files(storage: Storage, names: Sequence[str]) -> dict[str, list[str] | None] | None:
    """Returns the safetensors files of a directory, each with its keys in the index (None: all in the file).

    None where there is nothing of the kind.

    Raises:
        CorruptionError: the index is malformed, or a file is missing that it names, or that a numbered set has.
        FormatError: there are several indices, or several sets of files without one, or one file beside such a set.
        CheckpointNotFoundError: a conversion of ours was not finished.
    """
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(DATA_SUFFIX) and not FILE_NAME.fullmatch(name)]
    if not indices and not files:
        return None
    if len(indices) > 1:
        raise ambiguous(storage, f"{len(indices)} indices ({', '.join(indices[:3])})")
    if indices:
        return _indexed(storage, indices[0], set(names))
    if JOURNAL_NAME in names:
        remedy = "give another path, or call convert again, which resumes it"
        problem = Problem(storage.url, "a conversion that was not finished", "a whole checkpoint", remedy)
        raise CheckpointNotFoundError("there is no checkpoint", [problem])
    numbered = [*map(_NUMBERED.fullmatch, files)]
    sets = {(found["rank"] is not None, found["stem"], found["of"]) for found in numbered if found}
    if len(sets) > 1 or (len(files) > 1 and not all(numbered)):
        raise ambiguous(storage, f"several sets of files ({', '.join(files[:4])})")
    for are_of_ranks, stem, of in sets:
        numbers = {int(found["number"]) for found in numbered if found}
        missing = next((i for i in range(1, min(int(of), len(numbers) + 1) + 1) if i not in numbers), None)
        if missing is not None:  # of ranks, one without a box has no file, so that its number may be missing
            name = f"{'shard-*-' * are_of_ranks}{stem}-{missing:05d}-of-{of}{DATA_SUFFIX}"
            raise damaged(f"{storage.url}/{name}", "no such file")
    return dict.fromkeys(files)


def _indexed(storage: Storage, index: str, names: set[str]) -> dict[str, list[str] | None]:
    """Returns the files of an index; the one file of all, if those of the index are gone."""
    files = _read_index(storage, index)
    missing, one = sorted(files.keys() - names), index.removesuffix(INDEX_SUFFIX) + DATA_SUFFIX
    if one in names and one not in files:  # transformers leaves the index when it saves one file over several
        if not missing:
            raise ambiguous(
                storage, f"{one}, and {len(files)} files in {index}", f"give the path of {one}, or remove it"
            )
        if len(missing) == len(files):
            return {one: None}
    if missing:
        raise damaged(f"{storage.url}/{missing[0]}", "no such file")
    return dict(files)


def _read_index(storage: Storage, name: str) -> dict[str, list[str]]:
    where = f"{storage.url}/{name}"
    if storage.size(name) > MANIFEST_LIMIT_BYTES:
        raise damaged(where, f"an index of more than {MANIFEST_LIMIT_BYTES} bytes")
    index = load_json(storage.read(name), where, without_duplicates).get("weight_map")
    if not isinstance(index, dict):
        raise damaged(where, "no member 'weight_map'")
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for key, file in index.items():
        if type(file) is not str or "/" in file or not file.endswith(DATA_SUFFIX):
            raise damaged(where, f"{str(file)[:80]!r} as the file of {key!r}")
        keys[file].append(key)
    return keys


class HuggingFaceSource(Source):
    """The tensors of safetensors files, which have no plain values.

    Args:
        files: as `safetensors_files` gives them.
        url: where it is one file that was asked for, its own.

    Raises:
        CorruptionError: a file is damaged, or has not what the index says, or two have the same tensor.
        CheckpointNotFoundError: the files are data files of a save of ours that was not finished.
        FormatError: a dtype that is not known.
    """

    format_name = "Hugging Face"

    def __init__(self, storage: Storage, files: Mapping[str, Sequence[str] | None], url: str | None = None) -> None:
        self.storage, self.url = storage, storage.url if url is None else url
        with wrap_os_errors(f"read {storage.url}"):
            self._files = [SafetensorsFile(storage, name) for name in sorted(files)]
        for file in self._files:
            if any(key.startswith(CHECKSUMS_PREFIX) for key in file.entries):
                remedy = "give another path: a save that was not finished is none"
                problem = Problem(file.where, "a data file without its manifest", "a whole checkpoint", remedy)
                raise CheckpointNotFoundError("there is no checkpoint", [problem])
        contents = "\0".join(f"{file.name}\0{file.nbytes}\0{file.digest}" for file in self._files)
        self.digest = xxhash.xxh3_64_hexdigest(contents.encode())
        self.unsummed_bytes = sum(file.header_bytes for file in self._files)
        self.manifest = Manifest(
            save_id=self.digest,
            world_size=1,
            files=tuple(DataFile(file.name, file.nbytes, file.digest) for file in self._files),
            tensors=self._tensors(files),
        )

    def open_file(self, number: int, keys: Collection[str] | None = None) -> SafetensorsFile:
        return self._files[number]

    def _tensors(self, files: Mapping[str, Sequence[str] | None]) -> StoredTensors:
        stored: defaultdict[str, list[tuple[int, Entry, Box | None]]] = defaultdict(list)
        for number, file in enumerate(self._files):
            boxes = file.boxes()
            listed = files[file.name]
            for key in file.entries if listed is None else listed:
                if key not in file.entries:
                    raise damaged(file.where, f"nothing under {key!r}, which the index has there")
                stored[key].append((number, file.entries[key], boxes.get(key)))
        return StoredTensors((key, self._tensor(key, entries)) for key, entries in stored.items())

    def _tensor(self, key: str, entries: Sequence[tuple[int, Entry, Box | None]]) -> StoredTensor:
        dtypes = {entry.dtype for _, entry, _ in entries}
        dtype = _dtype(f"{self.url}: {key}", dtypes)
        boxes = tuple(whole(entry.shape) if box is None else box for _, entry, box in entries)
        if len(boxes) > 1 and any(box is None for _, _, box in entries):
            raise damaged(f"{self.url}: {key}", f"{len(entries)} tensors of this name in different files")
        if len({len(box.sizes) for box in boxes} | {len(box.offsets) for box in boxes}) > 1:
            raise damaged(f"{self.url}: {key}", "boxes of different numbers of dimensions")
        shape = tuple(map(max, zip(*(box.ends for box in boxes), strict=True)))
        if not is_shape(shape):
            raise damaged(f"{self.url}: {key}", f"the shape {list(shape)}")
        return StoredTensor((key,), dtype, StoredLayout(shape, boxes, tuple(number for number, _, _ in entries)))


def _dtype(where: str, names: set[str]) -> Dtype:
    if len(names) != 1:
        raise damaged(where, f"boxes of different dtypes: {', '.join(sorted(names))}")
    name = names.pop()
    if name not in _NAMES:
        problem = Problem(where, f"the dtype {name}", f"one of {', '.join(sorted(_NAMES))}", "convert it before")
        raise FormatError("a dtype is not known", [problem])
    return _NAMES[name]
