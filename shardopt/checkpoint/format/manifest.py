"""The manifest: the contents of a checkpoint and their places, as sealed JSON. No I/O, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import isfinite, prod
from typing import Any, NamedTuple

from shardopt.checkpoint.format.constants import (
    DIRECTORY_NAME,
    DTYPES,
    FILE_NAME,
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_LIMIT_BYTES,
    MOST_DIMENSIONS,
    MOST_OFFSETS,
    SEAL_BYTES,
    Dtype,
    all_sizes,
    damaged,
    is_sealed,
    is_shape,
    load_json,
    patch_key,
    read_size,
    read_sizes,
    seal,
    without_duplicates,
)
from shardopt.checkpoint.format.earlier_versions import with_options_by_member
from shardopt.checkpoint.format.paths import decode_path, encode_path
from shardopt.checkpoint.format.shared_values import decode_each, encode_each, pack, unpack
from shardopt.errors import FormatError, Problem, StateError
from shardopt.gc_pause import gc_paused
from shardopt.sharding.box import Box, grid_boxes, grid_cuts, whole
from shardopt.state import Path, join
from shardopt.values import decode_value, encode_value

RenameRules = tuple[tuple[str, str], ...]
"""Rules of `rename`, each a regex and its replacement, in the order in which names have been through them."""

_BESIDE = "../"  # begins the names of files in other directories under the root of a run


class StoredEntry(NamedTuple):
    """What a data file has that a box is taken from: a box that contains it, under the tensor's key or as a patch."""

    box: Box
    is_patch: bool

    def key(self, key: str) -> str:
        """Returns the key in the file, of a tensor that data files have under `key`."""
        return patch_key(key, self.box.offsets[0]) if self.is_patch else key


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayout:
    """The boxes of a tensor and their files. `files[i]`, an index into the manifest's files, holds `boxes[i]`.

    `entries[i]` says as what it does; without `entries` each file has just the box.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    files: tuple[int, ...]
    entries: tuple[StoredEntry, ...] = ()

    def entry(self, number: int) -> StoredEntry:
        """Returns the entry that a box, by its number, is taken from."""
        return self.entries[number] if self.entries else StoredEntry(self.boxes[number], False)


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint: its path in the nested state, how its items are stored, and where its boxes lie.

    `tied_to` is the key under which the data files have it, where that is another: both keys were one memory.
    `stored_as` is the key under which they have it where its own has changed since (`earlier_versions`).
    """

    path: Path
    dtype: Dtype
    layout: StoredLayout
    tied_to: str | None = None
    stored_as: str | None = None


class StoredTensors(dict[str, StoredTensor]):
    """Tensors by key. Not changed once it is made: saves of one geometry share it, and with it its JSON."""

    @cached_property
    def min_reader_version(self) -> int:
        """The least version of the format that can express these tensors."""
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
        excess = _limit_exceeded([(len(layout.boxes) + len(layout.entries), len(layout.shape)) for layout in distinct])
        if excess:
            problem = Problem("manifest", excess, "layouts within the limit", "have fewer dimensions, ranks or layouts")
            raise StateError("the manifest would be unreadable", [problem])
        members = f'"layouts":{_dump([_encode_layout(layout) for layout in distinct])},"tensors":{_dump(tensors)}'
        return members + (f',"tied":{_dump(tied)}' if tied else "")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file: its whole size, and the hash of its header and its checksum tensor.

    `directory` is None for a file of the checkpoint's own; else the name of the directory beside it that has the file.
    """

    name: str
    nbytes: int
    digest: str
    directory: str | None = None

    @property
    def path(self) -> str:
        """The path of the file, from the checkpoint's own directory."""
        return self.name if self.directory is None else f"{_BESIDE}{self.directory}/{self.name}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint. `values` are decoded; `per_rank` gives the paths of the values that each
    rank has for itself.

    `saved_at` is the time of the commit, in seconds since 1970 began (UTC); `metrics` are numbers by name that were
    measured beside; `seconds` is how long the save took. Each is None where an older version wrote the manifest.
    `renamed` are the rules of `rename` that the names have been through since the run began; None where that is not
    known.
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

    @property
    def own_files(self) -> tuple[DataFile, ...]:
        """The files that lie in the checkpoint's own directory."""
        return tuple(file for file in self.files if file.directory is None)

    @property
    def referred_files(self) -> tuple[DataFile, ...]:
        """The files that lie in directories beside it, which earlier saves wrote."""
        return tuple(file for file in self.files if file.directory is not None)

    @property
    def min_reader_version(self) -> int:
        """The least version of the format that a reader of its files and tensors must know."""
        return 4 if self.referred_files else self.tensors.min_reader_version


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest as sealed JSON. Raises StateError where it is too large for readers."""
    values = pack(encode_each(manifest.values))
    head = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "min_reader_version": max(manifest.min_reader_version, 3 if "shared" in values else 1),
        "save_id": manifest.save_id,
        "world_size": manifest.world_size,
        "files": [[file.path, file.nbytes, file.digest] for file in manifest.files],
        **values,
        "per_rank": {key: encode_path(key, path) for key, path in manifest.per_rank.items()},
    }
    if manifest.saved_at is not None:
        head["saved_at"] = manifest.saved_at
    if manifest.seconds is not None:
        head["seconds"] = manifest.seconds
    if manifest.renamed is not None:
        head["renamed"] = manifest.renamed
    if manifest.metrics is not None:
        head["metrics"] = {name: encode_value(number, name) for name, number in manifest.metrics.items()}
    text = f"{_dump(head)[:-1]},{manifest.tensors.members}".encode()
    if len(text) + SEAL_BYTES > MANIFEST_LIMIT_BYTES:
        size, limit = f"{len(text)} bytes of plain values and layouts", f"at most {MANIFEST_LIMIT_BYTES}"
        problem = Problem("manifest", size, limit, "store large values as tensors or NumPy arrays")
        raise StateError("the manifest would be unreadable", [problem])
    return seal(text)


def _dump(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Decodes a manifest from untrusted bytes.

    Raises:
        CorruptionError: it is torn, fails its seal, or contradicts itself.
        FormatError: it is none of shardopt, or needs a newer reader.
    """
    with gc_paused():  # objects by the hundred thousand, none of them garbage
        return _decode(data, where)


def references_in(data: bytes, where: str) -> frozenset[tuple[str, str]]:
    """Returns directory and name of each file of other directories that a manifest names; reads nothing else of it.

    Raises:
        CorruptionError: the bytes are no manifest.
    """
    if not is_sealed(data):
        raise damaged(where, "bytes that fail the seal at their end (torn or changed)")
    if b'"' + _BESIDE.encode() not in data:
        return frozenset()
    try:
        paths = [str(name) for name, *_ in load_json(data, where)["files"]]
    except (LookupError, TypeError, ValueError) as error:
        raise damaged(where, f"no list of files ({error})") from None
    beside = (path.removeprefix(_BESIDE).partition("/") for path in paths if path.startswith(_BESIDE))
    return frozenset((directory, name) for directory, _, name in beside)


def _decode(data: bytes, where: str) -> Manifest:
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise damaged(where, f"{len(data)} bytes, more than the limit of {MANIFEST_LIMIT_BYTES}")
    if not is_sealed(data):
        raise damaged(where, "bytes that fail the seal at their end (torn or changed)")
    body = load_json(data, where, without_duplicates)
    needed = body.get("min_reader_version")
    if body.get("format") != FORMAT_NAME or not isinstance(needed, int):
        raise FormatError(f"{where} is not a manifest of {FORMAT_NAME}")
    if needed > FORMAT_VERSION:
        problem = Problem(where, f"version {needed}", f"at most {FORMAT_VERSION}", "install a newer shardopt")
        raise FormatError("the checkpoint needs a newer reader", [problem])
    try:
        files = tuple(_decode_file(*file) for file in body["files"])
        sizes = [(len(each["files"]) + len(each.get("entries", ())), len(each["shape"])) for each in body["layouts"]]
        _check_limits(sizes, where)
        grids: _Grids = {}
        layouts = [_decode_layout(layout, len(files), grids) for layout in body["layouts"]]
        if len({file.path for file in files}) < len(files) or type(body["save_id"]) is not str:
            raise ValueError("a file that stands twice, or a save_id that is no string")
        tensors = _decode_tensors(body["tensors"], layouts)
        _add_tied(tensors, body.get("tied", {}))
        values = decode_each(unpack(body))
        if body.get("version", 1) < 3:
            values, new_keys = with_options_by_member(values, tensors)
            tensors = _under(new_keys, tensors)
        per_rank = {key: decode_path(key, path) for key, path in body["per_rank"].items()}
        if len({*tensors, *values, *per_rank}) < len(tensors) + len(values) + len(per_rank):
            raise ValueError("a key that is of two kinds")
        return Manifest(
            save_id=body["save_id"],
            world_size=read_size(body["world_size"]),
            files=files,
            tensors=tensors,
            values=values,
            per_rank=per_rank,
            saved_at=_decode_time(body["saved_at"]) if "saved_at" in body else None,
            metrics=_decode_metrics(body["metrics"]) if "metrics" in body else None,
            seconds=_decode_time(body["seconds"]) if "seconds" in body else None,
            renamed=_decode_renamed(body["renamed"]) if "renamed" in body else None,
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(where, f"a field that is missing or malformed ({type(error).__name__}: {error})") from error


def _decode_renamed(wire: Sequence[Any]) -> RenameRules:
    rules = tuple((pattern, into) for pattern, into in wire)
    if not all(type(text) is str for rule in rules for text in rule):
        raise ValueError("a rule of rename that is no regex and its replacement")
    return rules


def _encode_layout(layout: StoredLayout) -> dict[str, Any]:
    cuts = grid_cuts(layout.shape, layout.boxes)
    wire: dict[str, Any] = {"shape": layout.shape}
    if cuts is not None and layout.boxes == grid_boxes(cuts):
        wire["cuts"] = cuts
    else:
        wire["boxes"] = [[box.offsets, box.sizes] for box in layout.boxes]
    wire["files"] = layout.files
    if layout.entries:
        wire["entries"] = [
            None if not is_patch and box == own else [box.offsets, box.sizes, is_patch]
            for own, (box, is_patch) in zip(layout.boxes, layout.entries, strict=True)
        ]
    return wire


_Grids = dict[tuple[tuple[int, ...], ...], tuple[Box, ...]]
"""The boxes of grids by their cuts: layouts of many files are few grids, that differ in which file has which cell."""


def _decode_layout(wire: Mapping[str, Any], file_count: int, grids: _Grids) -> StoredLayout:
    shape, files = read_sizes(wire["shape"]), read_sizes(wire["files"])
    if "entries" not in wire and len(set(files)) < len(files):
        raise ValueError("two boxes of a tensor in one file")
    if "cuts" in wire:
        boxes = _decode_grid(wire["cuts"], len(shape), len(files), grids)
    else:
        boxes = tuple(Box(read_sizes(offsets), read_sizes(sizes)) for offsets, sizes in wire["boxes"])
        if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
            raise ValueError("a box that is not within its tensor")
    if len(boxes) != len(files) or max(files, default=-1) >= file_count:
        raise ValueError("boxes in files that are not there")
    if not is_shape(shape):  # nothing may overflow that is computed from here on
        raise ValueError(f"the shape {list(shape)}")
    entries = _decode_entries(wire["entries"], shape, boxes) if "entries" in wire else ()
    of_files = {(file, entry.box) for file, entry in zip(files, entries, strict=False) if not entry.is_patch}
    if len({file for file, _ in of_files}) < len(of_files):
        raise ValueError("two boxes of a tensor in one file")
    return StoredLayout(shape, boxes, files, entries)


def _decode_grid(wire: Sequence[Any], dimensions: int, cells: int, grids: _Grids) -> tuple[Box, ...]:
    cuts = tuple(map(read_sizes, wire))
    if len(cuts) != dimensions or prod(len(points) - 1 for points in cuts) != cells:
        raise ValueError("a grid whose cells are not as many as its files")
    if cuts not in grids:
        if any(point >= following for points in cuts for point, following in pairwise(points)):
            raise ValueError("a grid with cells of nothing")
        grids[cuts] = grid_boxes(cuts)
    return grids[cuts]


def _decode_entries(wire: Sequence[Any], shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[StoredEntry, ...]:
    entries = []
    for box, entry in zip(boxes, wire, strict=True):
        if entry is None:
            entries.append(StoredEntry(box, False))
            continue
        offsets, sizes, is_patch = entry
        stored = Box(read_sizes(offsets), read_sizes(sizes))
        fits = len(stored.offsets) == len(stored.sizes) == len(shape) and stored.contains(box)
        if type(is_patch) is not bool or not shape or not fits or not whole(shape).contains(stored):
            raise ValueError("an entry of a file that a box cannot be taken from")
        entries.append(StoredEntry(stored, is_patch))
    return tuple(entries)


def _check_limits(sizes: Sequence[tuple[int, int]], where: str) -> None:
    """Raises CorruptionError where layouts of so many boxes and dimensions would exhaust memory."""
    excess = _limit_exceeded(sizes)
    if excess:
        raise damaged(where, excess)


def _limit_exceeded(sizes: Sequence[tuple[int, int]]) -> str:
    """Returns a text that names the limit that layouts of so many boxes and dimensions exceed; "" if none."""
    dimensions = max((dimensions for _, dimensions in sizes), default=0)
    if dimensions > MOST_DIMENSIONS:
        return f"a layout of {dimensions} dimensions, more than the limit of {MOST_DIMENSIONS}"
    offsets = sum(boxes * (1 + dimensions) for boxes, dimensions in sizes)
    if offsets > MOST_OFFSETS:
        return f"layouts of {offsets} offsets of boxes, more than the limit of {MOST_OFFSETS}"
    return ""


def _decode_tensors(wire: Mapping[str, Any], layouts: Sequence[StoredLayout]) -> StoredTensors:
    tensors = StoredTensors()
    for key, (dtype, layout, path) in wire.items():  # the body of a loop over all that a large model has
        decoded = tuple(key.split(".")) if path is None else decode_path(key, path)
        tensors[key] = StoredTensor(decoded, DTYPES[dtype], layouts[layout])
    if not all_sizes([layout for _, layout, _ in wire.values()]):
        raise ValueError("a number of a layout that is none")
    return tensors


def _add_tied(tensors: StoredTensors, wire: Mapping[str, Any]) -> None:
    tied = {}
    for key, (tied_to, path) in wire.items():
        _, dtype, layout, *_ = tensors[tied_to]
        tied[key] = StoredTensor(decode_path(key, path), dtype, layout, tied_to)
    if not tied.keys().isdisjoint(tensors):
        raise ValueError("a tied key that is stored too")
    tensors.update(tied)


def _under(new_keys: Mapping[str, Path], tensors: StoredTensors) -> StoredTensors:
    """Returns the tensors with other keys for some of them."""
    if not new_keys:
        return tensors
    return StoredTensors(
        (join(new_keys[key]), tensor._replace(path=new_keys[key], stored_as=key)) if key in new_keys else (key, tensor)
        for key, tensor in tensors.items()
    )


def _decode_time(wire: Any) -> float:
    if type(wire) not in (int, float) or not isfinite(wire):
        raise ValueError(f"the time {str(wire)[:40]!r}")
    return float(wire)


def _decode_metrics(wire: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(decode_value(number)) for name, number in wire.items()}


def _decode_file(name: Any, nbytes: Any, digest: Any) -> DataFile:
    if type(name) is not str or type(digest) is not str:
        raise ValueError("a file name or digest that is none")
    directory = None
    if name.startswith(_BESIDE):
        directory, _, name = name.removeprefix(_BESIDE).partition("/")
        if not DIRECTORY_NAME.fullmatch(directory):
            raise ValueError("a file that is referred to elsewhere than in a directory beside this one")
    if not FILE_NAME.fullmatch(name):
        raise ValueError("a file name that is none")
    return DataFile(name, read_size(nbytes), digest, directory)
