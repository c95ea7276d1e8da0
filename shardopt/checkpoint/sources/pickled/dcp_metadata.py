"""Reads the `.metadata` file of torch's distributed checkpoints (DCP): a pickle of the places in `.distcp` files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from shardopt.checkpoint.format.constants import (
    MANIFEST_LIMIT_BYTES,
    MOST_DIMENSIONS,
    MOST_OFFSETS,
    Dtype,
    all_sizes,
    damaged,
    is_shape,
)
from shardopt.checkpoint.sources.pickled.stand_ins import Known, StandIn, Unknown
from shardopt.checkpoint.sources.pickled.tensor_globals import DTYPE_GLOBALS, TorchDtype
from shardopt.checkpoint.sources.pickled.unpickle import unpickle
from shardopt.errors import FormatError, Problem
from shardopt.runtime.gc_pause import gc_paused
from shardopt.sharding.box import Box


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """The place of one entry: `length` bytes of a file beside `.metadata`, from `offset` on."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """One non-empty box of a tensor, and the place of its archive."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor whose boxes all lie within `shape`; whether they cover it is not checked."""

    dtype: Dtype
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The contents of a distributed checkpoint by key (FQN), each in `tensors`, `values` or `unsupported`.

    `values` are archives of plain values. `paths` has the path of a key in the nested state, where torch noted it:
    texts are keys of dicts (str of them), and numbers are indices of lists. `unsupported` gives the reason by which an
    entry is not read.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpEntry]
    paths: Mapping[str, tuple[str | int, ...]]
    unsupported: Mapping[str, str]


def read_metadata(data: bytes, where: str) -> DcpMetadata:
    """Reads `.metadata` from untrusted bytes, without running anything in it.

    Raises:
        CorruptionError: it is torn, or contradicts itself.
        FormatError: it names a class that torch does not write there, or is of another version.
    """
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise damaged(where, f"{len(data)} bytes, more than the limit of {MANIFEST_LIMIT_BYTES}")
    with gc_paused():  # objects by the hundred thousand, none of them garbage
        root = unpickle(data, where, _KnownAlone(where))
        try:
            return _decode(root, where, min(MOST_OFFSETS, len(data)))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            fault = f"an entry that is missing or malformed ({type(error).__name__}: {str(error)[:200]})"
            raise damaged(where, fault) from error


class _Record(StandIn):
    """A dataclass of DCP, represented by its state."""

    __slots__ = ("state",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state: Any = None

    def build(self, state: Any) -> None:
        self.state = state


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    if type(sizes) not in (tuple, list):
        raise TypeError("a size that is none")
    return tuple(sizes)


def _layout(name: Any) -> str:
    if type(name) is not str:
        raise TypeError("a layout without a name")
    return name


def _memory_format(_number: Any) -> None:
    """Stands for a tensor's original memory format, which is ignored, as its archive has the order of its bytes."""


def _member(enum: Any, _name: Any) -> None:
    """Stands for `getattr`, by which some Python versions pickle enum members. Looks nothing up."""
    if not isinstance(enum, Known) or enum.name != _MEMORY_FORMAT:
        raise TypeError("an attribute of what has none")


def _path(*_parts: Any) -> Unknown:
    return Unknown("pathlib.PosixPath")


_CHECKPOINT = "torch.distributed.checkpoint"
_MEMORY_FORMAT = f"{_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING"
_STRIDED = "torch.strided"
_RECORDS = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    *("MetadataIndex", "StorageMeta"),
)
_OTHER_DTYPES = (
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
_KNOWN: Mapping[str, Any] = {
    **{f"{_CHECKPOINT}.metadata.{name}": partial(_Record, name) for name in _RECORDS},
    _MEMORY_FORMAT: _memory_format,
    f"{_CHECKPOINT}.filesystem._StorageInfo": partial(_Record, "_StorageInfo"),
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    "builtins.getattr": _member,
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,
    **DTYPE_GLOBALS,
    **{f"torch.{name}": Unknown(f"torch.{name}") for name in _OTHER_DTYPES},
}


class _KnownAlone(dict[str, Any]):
    """Stand-ins for the globals in `.metadata`; for any other global an error names it."""

    def __init__(self, where: str) -> None:
        super().__init__(_KNOWN)
        self.where = where

    def __missing__(self, name: str) -> Any:
        remedy = "load it with torch.distributed.checkpoint, if you trust it, and save it with torch's own planner"
        problem = Problem(self.where, f"the global {name[:200]!r}", "what torch writes there", remedy)
        raise FormatError("the metadata of a distributed checkpoint names something unknown", [problem])


def _is(record: Any, name: str) -> TypeGuard[_Record]:
    return type(record) is _Record and record.name == name


def _state(record: Any, name: str) -> dict[str, Any]:
    if not _is(record, name) or type(record.state) is not dict:
        raise TypeError(f"something else in the place of a {name}")
    return record.state


def _decode(root: Any, where: str, most_offsets: int) -> DcpMetadata:
    metadata = _state(root, "Metadata")
    version = metadata.get("version")
    if version is not None and not (type(version) is str and version.startswith("1.")):
        problem = Problem(where, f"version {_text(version)}", "1.0.0", "install a newer shardopt")
        raise FormatError("the distributed checkpoint needs a newer reader", [problem], code="newer-format")
    places = _decode_places(metadata["storage_data"])
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, DcpEntry] = {}
    unsupported: dict[str, str] = {}
    offsets = 0
    for key, entry in metadata["state_dict_metadata"].items():
        if type(key) is not str:
            raise TypeError("a key that is no text")
        if _is(entry, "BytesStorageMetadata"):
            place = places[key, None]
            if isinstance(place, str):
                unsupported[key] = place
            else:
                values[key] = place
            continue
        state = _state(entry, "TensorStorageMetadata")
        dtype = _decode_dtype(state["properties"])
        shape = _decode_shape(state["size"])
        if type(state["chunks"]) is not list:
            raise TypeError("chunks that are no list")
        offsets += len(state["chunks"]) * (1 + len(shape))
        if offsets > most_offsets:  # each takes more than a byte, where tensors do not share their chunks
            raise ValueError(f"more than {most_offsets} offsets of chunks")
        chunks = dtype if isinstance(dtype, str) else _decode_chunks(key, shape, state["chunks"], places)
        if isinstance(chunks, str):
            unsupported[key] = chunks
        elif not isinstance(dtype, str):
            if not is_shape(shape):
                raise ValueError(f"a shape that no memory has, of {key[:100]!r}")
            tensors[key] = DcpTensor(dtype, shape, chunks)
    keys = metadata["state_dict_metadata"]
    paths = _decode_paths(metadata.get("planner_data"))
    return DcpMetadata(tensors, values, {key: path for key, path in paths.items() if key in keys}, unsupported)


_Places = dict[tuple[str, tuple[int, ...] | None], DcpEntry | str]
"""Key and, for a tensor, offsets of a box → its place, or the reason why it cannot be read."""


def _decode_places(wire: Any) -> _Places:
    if type(wire) is not dict:
        raise TypeError("places that are no dict")
    places: _Places = {}
    for record, info in wire.items():
        index, place = _state(record, "MetadataIndex"), _state(info, "_StorageInfo")
        key, offsets = index["fqn"], index.get("offset")
        if type(key) is not str or (offsets is not None and (type(offsets) is not tuple or not all_sizes(offsets))):
            raise TypeError("an index that is none")
        if (key, offsets) in places:
            raise ValueError(f"a box of {key[:100]!r} that stands twice")
        descriptors = place.get("transform_descriptors")
        if descriptors:
            places[key, offsets] = _transformed(descriptors)
        else:
            begin, length = place["offset"], place["length"]
            if not all_sizes([begin, length]):
                raise ValueError(f"an offset or length that is none, of {key[:100]!r}")
            places[key, offsets] = DcpEntry(_plain_name(place["relative_path"]), begin, length)
    return places


def _transformed(descriptors: Any) -> str:
    names = descriptors if isinstance(descriptors, list | tuple) else [descriptors]
    return f"its bytes went through {', '.join(str(name)[:40] for name in names[:4] if type(name) is str)}"


def _plain_name(name: Any) -> str:
    """Returns the name of a file in the same directory. Raises ValueError for a name that leads elsewhere."""
    if type(name) is not str or not 0 < len(name) <= 255 or name in (".", "..") or {*name} & {"/", "\\", "\0"}:
        raise ValueError(f"{_text(name)} where the name of a file beside it is wanted")
    return name


def _text(value: Any) -> str:
    """Returns a value for a message: a text, or else only the type, as a value's own text may be unbounded."""
    return repr(value[:100]) if type(value) is str else type(value).__name__


def _decode_dtype(wire: Any) -> Dtype | str:
    """Returns the dtype of a tensor, or the reason why it cannot be read."""
    if not _is(wire, "TensorProperties") or type(wire.state) is not tuple:
        raise TypeError("something else in the place of properties")
    dtype, layout, *_ = wire.state
    if not isinstance(dtype, Unknown) or type(layout) is not str:
        raise TypeError("properties without a dtype or layout")
    if not isinstance(dtype, TorchDtype):
        return f"dtype {dtype.name}"
    return dtype.dtype if layout == _STRIDED else f"layout {layout[:40]}"


def _decode_shape(wire: Any) -> tuple[int, ...]:
    if type(wire) is not tuple or len(wire) > MOST_DIMENSIONS or not all_sizes(wire):
        raise ValueError("a shape that is none")
    return wire


def _decode_chunks(key: str, shape: tuple[int, ...], wire: list[Any], places: _Places) -> tuple[DcpChunk, ...] | str:
    chunks = []
    for record in wire:
        state = _state(record, "ChunkStorageMetadata")
        box = Box(_decode_shape(state["offsets"]), _decode_shape(state["sizes"]))
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise ValueError(f"a box of other dimensions, of {key[:100]!r}")
        if any(end > size for end, size in zip(box.ends, shape, strict=True)):
            raise ValueError(f"a box beyond the shape, of {key[:100]!r}")
        if not box.numel:
            continue  # of ranks without a share, which all have one offset
        place = places[key, box.offsets]
        if isinstance(place, str):
            return place
        chunks.append(DcpChunk(box, place.file, place.offset, place.length))
    return tuple(chunks)


def _decode_paths(wire: Any) -> dict[str, tuple[str | int, ...]]:
    if wire is None:
        return {}
    if type(wire) is not dict:
        raise TypeError("paths that are no dict")
    paths = {}
    for key, parts in wire.items():
        if type(parts) not in (tuple, list) or not all(type(part) in (str, int) for part in parts):
            raise TypeError("a path that is none")
        if ".".join(map(str, parts)) != key:
            raise ValueError(f"a path that is not that of {_text(key)}")
        paths[key] = tuple(parts)
    return paths
