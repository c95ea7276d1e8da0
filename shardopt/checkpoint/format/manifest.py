"""The manifest: the contents of a checkpoint and where they are stored, as sealed JSON. No I/O, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from shardopt.checkpoint.format.constants import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_LIMIT_BYTES,
    MOST_DIMENSIONS,
    MOST_OFFSETS,
    SEAL_BYTES,
    Dtype,
    patch_prefix,
    seal,
)
from shardopt.checkpoint.format.values import Values, decode_each, encode_each, encode_path, pack
from shardopt.errors import Problem, StateError
from shardopt.sharding.box import Box, grid_cuts, whole
from shardopt.state.paths import Path
from shardopt.state.values import encode_value

if TYPE_CHECKING:  # it needs torch
    from shardopt.state.versions import Versions

RenameRules = tuple[tuple[str, str], ...]
"""The rules of `rename` that names were saved through, in order, each a regex and its replacement."""

BESIDE = "../"  # begins the names of files in other directories under the root of a run
_OPTIONAL = ("saved_at", "seconds", "written_by", "renamed", "module_versions", "frozen", "in_eval")  # what may be None
_HALF_KNOWN = b'{"any":'  # begins the form of an `OnAnyRank`, which is stored as a bool


class StoredEntry(NamedTuple):
    """The stored entry that a box is read from: a box that contains it, under the tensor's key or as a patch.

    `deltas` are the numbers of the files with what has changed in it since, in order. `bridge` is that of the file with
    the delta by which it comes from what the save before had, for readers that have that.
    """

    box: Box
    is_patch: bool
    deltas: tuple[int, ...] = ()
    bridge: int | None = None

    @property
    def delta_files(self) -> tuple[int, ...]:
        """The numbers of all files with deltas that concern it."""
        return self.deltas if self.bridge is None else (*self.deltas, self.bridge)

    def key(self, key: str) -> str:
        """Returns the key in the file of a tensor that data files store under `key`."""
        return patch_prefix(self.box.offsets[0]) + key if self.is_patch else key


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayout:
    """The boxes of a tensor and their files. `files[i]`, an index into the manifest's files, holds `boxes[i]`.

    `entries[i]` says as what it does; without `entries` each file has just the box.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    files: tuple[int, ...]
    entries: tuple[StoredEntry, ...] = ()

    @staticmethod
    def in_one_box(shape: Sequence[int], file: int) -> StoredLayout:
        """Returns the layout of a tensor that one file has as a whole."""
        box = whole(shape)
        return StoredLayout(box.sizes, (box,), (file,))

    @property
    def size(self) -> int:
        """The number of boxes, entries and deltas, which the format limits."""
        return len(self.boxes) + len(self.entries) + sum(len(entry.delta_files) for entry in self.entries)

    def entry(self, number: int) -> StoredEntry:
        """Returns the entry that a box, by its number, is read from."""
        return self.entries[number] if self.entries else StoredEntry(self.boxes[number], False)


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint: its path in the nested state, how its elements are stored, and where its boxes are.

    `tied_to` is the key under which the data files have it, where that is another: both keys were one memory.
    `stored_as` is the key under which they have it where its own has changed since (`earlier_versions`).
    """

    path: Path
    dtype: Dtype
    layout: StoredLayout
    tied_to: str | None = None
    stored_as: str | None = None


class StoredTensors(dict[str, StoredTensor]):
    """Tensors by key; immutable, as saves of one geometry share it together with its JSON."""

    @cached_property
    def min_reader_version(self) -> int:
        """The lowest version of the format that can express these tensors."""
        layouts = {id(tensor.layout): tensor.layout for tensor in self.values()}
        if any(entry.delta_files for layout in layouts.values() for entry in layout.entries):
            return 5
        return 2 if any(tensor.tied_to is not None for tensor in self.values()) else 1

    @cached_property
    def members(self) -> str:
        """The manifest's members "layouts", "tensors" and "tied", as JSON."""
        layouts: dict[int, int] = {}
        distinct: list[StoredLayout] = []
        tensors = {}
        tied = {}
        for key, (path, dtype, layout, tied_to, _) in self.items():
            if tied_to is not None:
                tied[key] = (tied_to, encode_path(key, path))
                continue
            number = layouts.setdefault(id(layout), len(layouts))
            if number == len(distinct):
                distinct.append(layout)
            tensors[key] = (dtype.name, number, encode_path(key, path))
        excess = limit_exceeded([(layout.size, len(layout.shape)) for layout in distinct])
        if excess:
            problem = Problem("manifest", excess, "layouts within the limit", "have fewer dimensions, ranks or layouts")
            raise StateError("the manifest would be unreadable", [problem])
        alike = {(id(layout.boxes), layout.shape): layout for layout in distinct}
        boxes = {key: encode_boxes(layout) for key, layout in alike.items()}
        wires = [_encode_layout(layout, boxes[id(layout.boxes), layout.shape]) for layout in distinct]
        members = f'"layouts":{_dump(wires)},"tensors":{_dump(tensors)}'
        return members + (f',"tied":{_dump(tied)}' if tied else "")


class DataFile(NamedTuple):
    """One data file: its size, and the hash of its header and checksum tensor.

    `directory` is None for a file of the checkpoint's own; else the name of the directory beside it that has the file.
    """

    name: str
    nbytes: int
    digest: str
    directory: str | None = None

    @property
    def path(self) -> str:
        """The path of the file, relative to the checkpoint's own directory."""
        return self.name if self.directory is None else f"{BESIDE}{self.directory}/{self.name}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint: `values` are decoded, `per_rank` has the paths of values stored by each rank.

    `saved_at` is the time of the commit, in seconds since 1970 began (UTC); `metrics` are numbers by name that were
    measured beside; `seconds` is how long the save took. Each is None where an older version wrote the manifest.
    `renamed` are the rules of `rename` that the names have been through since the run began; None where that is not
    known. `written_by` names the library that wrote it and its version, "shardopt 0.1.0"; None where that is not known.
    `module_versions` are those of the classes of modules; None where there were none, or an older version wrote it.
    `frozen` are the parameters of optimizers that had no gradient, by the keys of their options, and `in_eval` the
    names of layers in `eval()`, by the key of their module; None where that is not known.
    """

    save_id: str
    world_size: int
    files: tuple[DataFile, ...]
    tensors: StoredTensors
    values: Mapping[str, tuple[Path, Any]] = field(default_factory=dict)
    per_rank: Mapping[str, Path] = field(default_factory=dict)
    saved_at: float | None = None
    metrics: Mapping[str, float] | None = None
    seconds: float | None = None
    renamed: RenameRules | None = None
    written_by: str | None = None
    module_versions: Versions | None = None
    frozen: tuple[str, ...] | None = None
    in_eval: Mapping[str, tuple[str, ...]] | None = None

    @property
    def own_files(self) -> tuple[DataFile, ...]:
        """The files in the checkpoint's own directory."""
        return tuple(file for file in self.files if file.directory is None)

    @property
    def referred_files(self) -> tuple[DataFile, ...]:
        """The files in directories beside it, which earlier saves wrote."""
        return tuple(file for file in self.files if file.directory is not None)


def encode_manifest(manifest: Manifest, wires: Values | None = None) -> bytes:
    """Encodes a manifest as sealed JSON.

    Args:
        wires: its values as typed JSON, in the place of `manifest.values`.

    Raises:
        StateError: it is too large for readers.
    """
    values = pack(encode_each(manifest.values) if wires is None else wires)
    needed = max(3 if "shared" in values else 1, manifest.tensors.min_reader_version)
    if any(file.directory is not None for file in manifest.files):
        needed = max(needed, 4)
    head = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "min_reader_version": needed,
        "save_id": manifest.save_id,
        "world_size": manifest.world_size,
        "files": [
            [file.name if file.directory is None else file.path, file.nbytes, file.digest] for file in manifest.files
        ],
        **values,
        "per_rank": {key: encode_path(key, path) for key, path in manifest.per_rank.items()},
    }
    optional = {name: getattr(manifest, name) for name in _OPTIONAL}
    head |= {name: value for name, value in optional.items() if value is not None}
    if manifest.metrics is not None:
        head["metrics"] = {name: encode_value(number, name) for name, number in manifest.metrics.items()}
    text = f"{_dump(head)[:-1]},{manifest.tensors.members}".encode()
    if wires is not None and _HALF_KNOWN in text:
        return encode_manifest(replace(manifest, values=decode_each(wires)))
    if len(text) + SEAL_BYTES > MANIFEST_LIMIT_BYTES:
        size, limit = f"{len(text)} bytes of plain values and layouts", f"at most {MANIFEST_LIMIT_BYTES}"
        problem = Problem("manifest", size, limit, "store large values as tensors or NumPy arrays")
        raise StateError("the manifest would be unreadable", [problem])
    return seal(text)


def _dump(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def encode_boxes(layout: StoredLayout) -> dict[str, Any]:
    """Returns the boxes of a layout in the form of docs/format.md: `shape`, and `cuts` or `boxes`."""
    cuts = grid_cuts(layout.shape, layout.boxes)
    if cuts is not None:
        return {"shape": layout.shape, "cuts": cuts}
    return {"shape": layout.shape, "boxes": [[box.offsets, box.sizes] for box in layout.boxes]}


def _encode_layout(layout: StoredLayout, boxes: Mapping[str, Any]) -> dict[str, Any]:
    wire = {**boxes, "files": layout.files}
    if layout.entries:
        wire["entries"] = [
            None if entry == StoredEntry(own, False) else _encode_entry(entry)
            for own, entry in zip(layout.boxes, layout.entries, strict=True)
        ]
    return wire


def _encode_entry(entry: StoredEntry) -> list[Any]:
    wire = [entry.box.offsets, entry.box.sizes, entry.is_patch]
    if entry.delta_files:
        wire.append(entry.deltas)
    return wire if entry.bridge is None else [*wire, entry.bridge]


def limit_exceeded(sizes: Sequence[tuple[int, int]]) -> str:
    """Returns a text naming the limit that layouts of so many boxes and dimensions exceed; "" if none."""
    dimensions = max((dimensions for _, dimensions in sizes), default=0)
    if dimensions > MOST_DIMENSIONS:
        return f"a layout of {dimensions} dimensions, more than the limit of {MOST_DIMENSIONS}"
    offsets = sum(boxes * (1 + dimensions) for boxes, dimensions in sizes)
    if offsets > MOST_OFFSETS:
        return f"layouts of {offsets} offsets of boxes, more than the limit of {MOST_OFFSETS}"
    return ""
