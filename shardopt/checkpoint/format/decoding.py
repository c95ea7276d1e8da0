"""Decodes manifests from untrusted bytes, and refuses inconsistent ones. No I/O, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.format.constants import (
    DIRECTORY_NAME,
    DTYPES,
    FILE_NAME,
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_LIMIT_BYTES,
    all_sizes,
    damaged,
    is_sealed,
    is_shape,
    load_json,
    read_size,
    read_sizes,
    without_duplicates,
)
from shardopt.checkpoint.format.earlier_versions import with_options_by_member
from shardopt.checkpoint.format.manifest import (
    BESIDE,
    DataFile,
    Manifest,
    RenameRules,
    StoredEntry,
    StoredLayout,
    StoredTensor,
    StoredTensors,
    limit_exceeded,
)
from shardopt.checkpoint.format.values import decode_each, decode_path, unpack
from shardopt.errors import FormatError, Problem
from shardopt.runtime.gc_pause import gc_paused
from shardopt.sharding.box import Box, grid_boxes, whole
from shardopt.state.paths import Path, join
from shardopt.state.values import decode_value
from shardopt.version import WRITER

if TYPE_CHECKING:  # it needs torch
    from shardopt.state.versions import Versions


@gc_paused()  # objects by the hundred thousand, none of them garbage
def decode_manifest(data: bytes, where: str) -> Manifest:
    """Decodes a manifest from untrusted bytes.

    Raises:
        CorruptionError: it is torn, fails its seal, or contradicts itself.
        FormatError: it is none of shardopt, or needs a newer reader.
    """
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise damaged(where, f"{len(data)} bytes, more than the limit of {MANIFEST_LIMIT_BYTES}")
    if not is_sealed(data):
        raise damaged(where, "bytes that fail the seal at their end (torn or changed)")
    body = load_json(data, where, without_duplicates)
    needed = body.get("min_reader_version")
    if body.get("format") != FORMAT_NAME or not isinstance(needed, int):
        raise FormatError(f"{where} is not a manifest of {FORMAT_NAME}")
    if needed > FORMAT_VERSION:
        by = f", written by {str(body['written_by'])[:80]}" if "written_by" in body else ""
        reads = f"at most {FORMAT_VERSION}, which {WRITER} reads"
        problem = Problem(where, f"version {needed}{by}", reads, "install a newer shardopt")
        raise FormatError("the checkpoint needs a newer reader", [problem], code="newer-format")
    try:
        files = tuple(_decode_file(*file) for file in body["files"])
        sizes = [(_size_of(each), len(each["shape"])) for each in body["layouts"]]
        excess = limit_exceeded(sizes)
        if excess:
            raise damaged(where, excess)
        grids: _Grids = {}
        layouts = [_decode_layout(layout, len(files), grids) for layout in body["layouts"]]
        if len({file.path for file in files}) < len(files) or type(body["save_id"]) is not str:
            raise ValueError("a file that stands twice, or a save_id that is no string")
        tensors = _decode_tensors(body["tensors"], layouts)
        if "tied" in body:
            _add_tied(tensors, body["tied"])
        values = decode_each(unpack(body))
        if body.get("version", 1) < 3:
            values, new_keys = with_options_by_member(values, tensors)
            tensors = _under(new_keys, tensors)
        per_rank = {key: decode_path(key, path) for key, path in body["per_rank"].items()}
        if not (tensors.keys().isdisjoint({*values, *per_rank}) and values.keys().isdisjoint(per_rank)):
            raise ValueError("a key that is of two kinds")
        return Manifest(
            save_id=body["save_id"],
            world_size=read_size(body["world_size"]),
            files=files,
            tensors=tensors,
            values=values,
            per_rank=per_rank,
            **{name: decode(body[name]) for name, decode in _OPTIONAL.items() if name in body},
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(where, f"a field that is missing or malformed ({type(error).__name__}: {error})") from error


def references_in(data: bytes, where: str) -> frozenset[tuple[str, str]]:
    """Returns directory and name of each file in other directories that a manifest names; decodes nothing else.

    Raises:
        CorruptionError: the bytes are no manifest.
    """
    if not is_sealed(data):
        raise damaged(where, "bytes that fail the seal at their end (torn or changed)")
    if b'"' + BESIDE.encode() not in data:
        return frozenset()
    try:
        paths = [str(name) for name, *_ in load_json(data, where)["files"]]
    except (LookupError, TypeError, ValueError) as error:
        raise damaged(where, f"no list of files ({error})") from None
    beside = (path.removeprefix(BESIDE).partition("/") for path in paths if path.startswith(BESIDE))
    return frozenset((directory, name) for directory, _, name in beside)


def _decode_renamed(wire: Sequence[Any]) -> RenameRules:
    rules = tuple((pattern, into) for pattern, into in wire)
    if not all(type(text) is str for rule in rules for text in rule):
        raise ValueError("a rule of rename that is no regex and its replacement")
    return rules


def _decode_frozen(wire: Any) -> tuple[str, ...]:
    if type(wire) is not list or not all(type(key) is str for key in wire):
        raise ValueError("frozen parameters that are no list of keys")
    return tuple(wire)


def _decode_in_eval(wire: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    if not all(type(layers) is list and all(type(name) is str for name in layers) for layers in wire.values()):
        raise ValueError("layers in eval() that are no list of names")
    return {key: tuple(layers) for key, layers in wire.items()}


def _decode_writer(wire: Any) -> str:
    if type(wire) is not str:
        raise ValueError("a writer that is no text")
    return wire


def _decode_versions(wire: Mapping[str, Any]) -> Versions:
    each = [version for by_name in wire.values() for version in by_name.values()]
    if not all(version is None or type(version) is int for version in each):
        raise ValueError("a version of a module that is no number")
    return wire


def _size_of(layout: Mapping[str, Any]) -> int:
    """Returns `StoredLayout.size` of a layout that is not decoded yet."""
    entries = [entry for entry in layout.get("entries", ()) if entry is not None and len(entry) > 3]
    deltas = sum(len(entry[3]) + len(entry) - 4 for entry in entries)
    return len(layout["files"]) + len(layout.get("entries", ())) + deltas


_Grids = dict[tuple[tuple[int, ...], ...], tuple[Box, ...]]
"""The boxes of grids by their cuts: layouts over many files are few grids that differ in which file has which cell."""


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
    entries = _decode_entries(wire["entries"], shape, boxes, file_count) if "entries" in wire else ()
    of_files = {(file, entry.box) for file, entry in zip(files, entries, strict=False) if not entry.is_patch}
    if len({file for file, _ in of_files}) < len(of_files):
        raise ValueError("two boxes of a tensor in one file")
    with_deltas = {(file, entry.box) for entry in entries for file in entry.delta_files}
    if len({file for file, _ in with_deltas}) < len(with_deltas):
        raise ValueError("deltas of two boxes of a tensor in one file")
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


def _decode_entries(
    wire: Sequence[Any], shape: tuple[int, ...], boxes: Sequence[Box], file_count: int
) -> tuple[StoredEntry, ...]:
    entries = []
    for box, entry in zip(boxes, wire, strict=True):
        if entry is None:
            entries.append(StoredEntry(box, False))
            continue
        offsets, sizes, is_patch, *more = entry
        deltas = read_sizes(more[0]) if more else ()
        bridge = read_size(more[1]) if len(more) > 1 else None
        stored = Box(read_sizes(offsets), read_sizes(sizes))
        numbers = deltas if bridge is None else (*deltas, bridge)
        if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= file_count:
            raise ValueError("deltas in files that are not there, or twice in one")
        if numbers and (is_patch or 0 in stored.sizes):
            raise ValueError("deltas of a patch, or of an empty box")
        fits = len(stored.offsets) == len(stored.sizes) == len(shape) and stored.contains(box)
        if type(is_patch) is not bool or not shape or not fits or not whole(shape).contains(stored):
            raise ValueError("an entry of a file that a box cannot be taken from")
        entries.append(StoredEntry(stored, is_patch, deltas, bridge))
    return tuple(entries)


def _decode_tensors(wire: Mapping[str, Any], layouts: Sequence[StoredLayout]) -> StoredTensors:
    tensors = StoredTensors()
    for key, (dtype, layout, path) in wire.items():  # the body of a loop over all that a large model has
        decoded = tuple(key.split(".")) if path is None else decode_path(key, path)
        tensors[key] = tuple.__new__(StoredTensor, (decoded, DTYPES[dtype], layouts[layout], None, None))  # fast
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
    """Returns the tensors with some keys replaced."""
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


_OPTIONAL: Mapping[str, Callable[[Any], Any]] = {
    "saved_at": _decode_time,
    "metrics": lambda wire: {name: float(decode_value(number)) for name, number in wire.items()},
    "seconds": _decode_time,
    "renamed": _decode_renamed,
    "written_by": _decode_writer,
    "module_versions": _decode_versions,
    "frozen": _decode_frozen,
    "in_eval": _decode_in_eval,
}
"""The members of a manifest that some versions did not write."""


def _decode_file(name: Any, nbytes: Any, digest: Any) -> DataFile:
    if type(name) is not str or type(digest) is not str:
        raise ValueError("a file name or digest that is none")
    directory = None
    if name.startswith(BESIDE):
        directory, _, name = name.removeprefix(BESIDE).partition("/")
        if not DIRECTORY_NAME.fullmatch(directory):
            raise ValueError("a file that is referred to elsewhere than in a directory beside this one")
    if not FILE_NAME.fullmatch(name):
        raise ValueError("a file name that is none")
    return DataFile(name, read_size(nbytes), digest, directory)
