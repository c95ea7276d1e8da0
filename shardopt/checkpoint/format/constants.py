"""Constants of the format on disk: names, limits, dtypes; and the reading of untrusted JSON. No I/O, no torch.

A checkpoint is a directory:

    <save_id>-r00000.safetensors       one per rank that holds something; raw C order, little endian
    <save_id>-r00000-1.safetensors     the second box of tensors of which a rank writes two, and so on
    manifest.json                      written last: its existence is the commit

Boxes that have not changed may lie in data files of an earlier save, in a directory beside this one.
docs/format.md is the specification of the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from shardopt.errors import CorruptionError, Problem

FORMAT_NAME = "shardopt"
FORMAT_VERSION = 4
"""The version that is written, and the newest that is read."""

MANIFEST_NAME = "manifest.json"
RECORD_NAME = "prepared.json"
"""Of a host's share of a checkpoint that lies on several: the manifest, where it makes none of what is beside it."""
METRICS_NAME = "metrics.json"
DCP_METADATA_NAME = ".metadata"
"""Of a checkpoint of torch.distributed.checkpoint, written last."""
INDEX_SUFFIX = ".safetensors.index.json"
"""Of the index of a checkpoint of Hugging Face."""
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""Of files of torch.save."""
JOURNAL_NAME = ".conversion"
"""Of a conversion that is not committed yet."""
DATA_SUFFIX = ".safetensors"

SEGMENT_BYTES = 256 * 1024  # of a tensor's bytes in one file, under one checksum
ALIGNMENT_BYTES = 4096  # of the first tensor's bytes within the file
HEADER_LIMIT_BYTES = 100_000_000  # safetensors' own
MANIFEST_LIMIT_BYTES = 256 << 20
RECORD_LIMIT_BYTES = 1 << 20
"""Of the small files of a run: they have some hundred bytes each."""
MOST_DIMENSIONS = 64  # of a tensor
MOST_OFFSETS = 1 << 24  # of all boxes of all layouts of a manifest, and one more for each box: some 2 GB in memory

SEAL_BYTES = len(',"xxh3":"0123456789abcdef"}')

CHECKSUMS_PREFIX = "__xxh3__."
PER_RANK_PREFIX = "__per_rank__."
PATCH_PREFIX = "__rows__."


@dataclass(frozen=True, slots=True)
class Dtype:
    """A stored dtype. `safetensors` is None where that format has no name: then it is bytes, in one more dimension."""

    name: str  # torch's name, and the manifest's
    itemsize: int
    safetensors: str | None


_DTYPE_TABLE = (
    *(Dtype(f"float{8 * n}", n, f"F{8 * n}") for n in (8, 4, 2)),
    *(Dtype(f"int{8 * n}", n, f"I{8 * n}") for n in (8, 4, 2, 1)),
    *(Dtype(f"uint{8 * n}", n, f"U{8 * n}") for n in (8, 4, 2, 1)),
    Dtype("bfloat16", 2, "BF16"),
    Dtype("bool", 1, "BOOL"),
    Dtype("float8_e4m3fn", 1, "F8_E4M3"),
    Dtype("float8_e5m2", 1, "F8_E5M2"),
    Dtype("complex64", 8, "C64"),
    Dtype("complex128", 16, None),
    Dtype("complex32", 4, None),
    Dtype("float8_e4m3fnuz", 1, None),
    Dtype("float8_e5m2fnuz", 1, None),
    Dtype("float8_e8m0fnu", 1, None),
)
DTYPES: Mapping[str, Dtype] = {dtype.name: dtype for dtype in _DTYPE_TABLE}


FILE_NAME = re.compile(r"[0-9A-Za-z]{1,64}-r\d{5,9}(-[1-9]\d{0,8})?" + re.escape(DATA_SUFFIX), re.ASCII)
"""Matches the names that `file_name` returns. No other file that a manifest or listing names is opened or removed."""


DIRECTORY_NAME = re.compile(r"[0-9A-Za-z_=+,@~-][0-9A-Za-z_=+,@~. -]{0,254}", re.ASCII)
"""Matches the names of directories whose files other checkpoints may refer to: none leads elsewhere on any storage."""


def file_name(save_id: str, rank: int, slot: int) -> str:
    """Returns the name of a data file: the save, the rank that wrote it, and which of the rank's files it is."""
    return f"{save_id}-{file_stem(rank, slot)}{DATA_SUFFIX}"


def writer_of(name: str) -> int:
    """Returns the rank that wrote a data file, by its name."""
    return int(name.removesuffix(DATA_SUFFIX).split("-")[1][1:])


def file_stem(rank: int, slot: int) -> str:
    """Returns the section of a data file's name that tells it from the other files of a save, such as "r00003-1"."""
    return f"r{rank:05d}" + (f"-{slot}" if slot else "")


def patch_key(key: str, row: int) -> str:
    """Returns the key under which a data file has some rows of a box, from this row of the tensor on."""
    return f"{PATCH_PREFIX}{row}.{key}"


def segment_count(nbytes: int) -> int:
    """Returns the number of segments, and so of checksums, that so many bytes of a tensor have."""
    return -(-nbytes // SEGMENT_BYTES)


def stored_shape(dtype: Dtype, shape: Sequence[int]) -> list[int]:
    """Returns the shape that a box has in a data file."""
    return [*shape] if dtype.safetensors else [*shape, dtype.itemsize]


def read_sizes(wire: Collection[Any]) -> tuple[int, ...]:
    """Returns sizes from untrusted JSON. Raises ValueError for anything else."""
    return tuple(wire) if all_sizes(wire) else tuple(map(read_size, wire))


def read_size(wire: Any) -> int:
    """Returns a size from untrusted JSON. Raises ValueError for anything else."""
    if type(wire) is not int or not 0 <= wire < 2**63:
        raise ValueError(f"{str(wire)[:40]!r} where a size is wanted")
    return wire


def all_sizes(numbers: Collection[Any]) -> bool:
    """Whether all numbers are sizes; as `read_size`, in bulk."""
    return not numbers or (set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < 2**63)


def is_shape(sizes: Collection[int]) -> bool:
    """Whether a tensor of any dtype can have these sizes: strides are made of all of them, even where one is 0."""
    return len(sizes) <= MOST_DIMENSIONS and prod(max(size, 1) for size in sizes) < 2**58  # of at most 16 bytes each


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def load_json(data: bytes, where: str, members: Callable[[list[tuple[str, Any]]], Any] = dict) -> dict[str, Any]:
    """Parses a JSON object from untrusted bytes; `members` makes each object from its pairs.

    Raises:
        CorruptionError: the bytes are no JSON object.
    """
    try:
        text = data.decode()  # json would take UTF-16 and worse
        # json is much faster without a hook.
        loaded = json.loads(text) if members is dict else json.loads(text, object_pairs_hook=members)
        if _SURROGATE.search(text):  # json takes half of a pair, which nothing can print or store
            json.dumps(loaded, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"no valid JSON ({error})") from None
    if not isinstance(loaded, dict):
        raise damaged(where, "JSON that is not an object")
    return loaded


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the members of a JSON object, for `load_json`. Raises ValueError if one stands twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member that stands twice")
    return members


def seal(text: bytes) -> bytes:
    """Closes a JSON object that lacks its closing brace by a member "xxh3", the hash of all bytes before it."""
    return text + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}'


def is_sealed(data: bytes) -> bool:
    """Whether the bytes end in a valid seal, as `seal` writes it."""
    return data[-SEAL_BYTES:] == seal(data[:-SEAL_BYTES])[-SEAL_BYTES:]


def pack_record(kind: str, **members: Any) -> bytes:
    """Returns the bytes of a sealed record beside checkpoints: one JSON object with its format and a hash."""
    return seal(json.dumps({"format": kind, **members})[:-1].encode())


def unpack_record(data: bytes, where: str) -> dict[str, Any]:
    """Returns the members of such a record from untrusted bytes. Raises CorruptionError."""
    if not is_sealed(data):
        raise damaged(where, "bytes that fail the seal at their end")
    return load_json(data, where, without_duplicates)


def damaged(where: str, fault: str) -> CorruptionError:
    """Returns the error for stored bytes that are not what was written: `fault` says what is there instead."""
    remedy = "restore from another checkpoint"
    return CorruptionError("a checkpoint is damaged", [Problem(where, fault, "what was written", remedy)])
