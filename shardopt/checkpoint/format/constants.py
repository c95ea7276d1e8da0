"""Constants of the format on disk: names, limits, dtypes; and parsing of untrusted JSON. No I/O, no torch.

A checkpoint is a directory:

    <save_id>-r00000.safetensors       one per rank that holds something; raw C order, little endian
    <save_id>-r00000-1.safetensors     the second box of tensors of which a rank writes two, and so on
    manifest.json                      written last: its existence is the commit

Boxes that have not changed, or only in some elements, may lie in data files of an earlier save, in a directory beside
this one.
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
FORMAT_VERSION = 5
"""The version that is written, and the newest version that can be read."""

MANIFEST_NAME = "manifest.json"
RECORD_NAME = "prepared.json"
"""The name of the record of a host's share of a checkpoint: its manifest, named so that the share is no checkpoint."""
METRICS_NAME = "metrics.json"
DCP_METADATA_NAME = ".metadata"
"""The name of the metadata of torch.distributed.checkpoint, written last."""
INDEX_SUFFIX = ".safetensors.index.json"
"""The suffix of the index of a Hugging Face checkpoint."""
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""The suffixes of torch.save's files."""
JOURNAL_NAME = ".conversion"
"""The name of the journal of a conversion that is not committed yet."""
DATA_SUFFIX = ".safetensors"

SEGMENT_BYTES = 256 * 1024  # of a tensor's bytes in one file, under one checksum
ALIGNMENT_BYTES = 4096  # of the first tensor's bytes within the file
HEADER_LIMIT_BYTES = 100_000_000  # safetensors' own
MANIFEST_LIMIT_BYTES = 256 << 20
RECORD_LIMIT_BYTES = 1 << 20
"""The size limit of a run's small files, which have some hundred bytes each."""
MOST_DIMENSIONS = 64  # of a tensor
MOST_OFFSETS = 1 << 24  # of all boxes of all layouts of a manifest, and one more for each box: some 2 GB in memory

SEAL_BYTES = len(',"xxh3":"0123456789abcdef"}')

CHECKSUMS_PREFIX = "__xxh3__."
PER_RANK_PREFIX = "__per_rank__."
PATCH_PREFIX = "__rows__."
DELTA_PREFIX = "__delta__."
DELTA_INDEX_PREFIX = "__delta_index__."


@dataclass(frozen=True, slots=True)
class Dtype:
    """A stored dtype; `safetensors` is None if that format lacks it, and bytes in one more dimension are stored."""

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
"""Matches the names that `file_name` returns. Other names in a manifest or listing are never opened or removed."""


DIRECTORY_NAME = re.compile(r"[0-9A-Za-z_=+,@~-][0-9A-Za-z_=+,@~. -]{0,254}", re.ASCII)
"""Matches directory names whose files other checkpoints may refer to; none can lead elsewhere on any storage."""


def file_name(save_id: str, rank: int, slot: int) -> str:
    """Returns the name of a data file, from the save, the rank that writes it, and the number of the rank's file."""
    return f"{save_id}-{file_stem(rank, slot)}{DATA_SUFFIX}"


def writer_of(name: str) -> int:
    """Returns the rank that wrote a data file, from its name."""
    return int(name.removesuffix(DATA_SUFFIX).split("-")[1][1:])


def save_id_in(name: str) -> str:
    """Returns the save that a data file is of, from its name."""
    return name.partition("-")[0]


def file_stem(rank: int, slot: int) -> str:
    """Returns the part of a data file's name that distinguishes it within a save, such as "r00003-1"."""
    return f"r{rank:05d}" + (f"-{slot}" if slot else "")


def patch_prefix(row: int) -> str:
    """Returns what stands before the key of a patch in a data file: some rows of a box, from this row on."""
    return f"{PATCH_PREFIX}{row}."


def segment_count(nbytes: int) -> int:
    """Returns the number of segments, and so of checksums, in this many bytes of a tensor."""
    return -(-nbytes // SEGMENT_BYTES)


def stored_shape(dtype: Dtype, shape: Sequence[int]) -> list[int]:
    """Returns the shape of a box in a data file."""
    return [*shape] if dtype.safetensors else [*shape, dtype.itemsize]


def read_sizes(wire: Collection[Any]) -> tuple[int, ...]:
    """Parses sizes from untrusted JSON. Raises ValueError for anything else."""
    return tuple(wire) if all_sizes(wire) else tuple(map(read_size, wire))


def read_size(wire: Any) -> int:
    """Parses a size from untrusted JSON. Raises ValueError for anything else."""
    if type(wire) is not int or not 0 <= wire < 2**63:
        raise ValueError(f"{str(wire)[:40]!r} where a size is wanted")
    return wire


def all_sizes(numbers: Collection[Any]) -> bool:
    """Whether all values are valid sizes; `read_size` in bulk."""
    return not numbers or (set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < 2**63)


def is_shape(sizes: Collection[int]) -> bool:
    """Whether a tensor of any dtype can have these sizes: strides multiply all of them, even if one is 0."""
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
    """Returns the members of a JSON object, for `load_json`. Raises ValueError if a name occurs twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member that stands twice")
    return members


def seal(text: bytes) -> bytes:
    """Closes a JSON object that lacks its closing brace with a member "xxh3", the hash of all bytes before it."""
    return text + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}'


def is_sealed(data: bytes) -> bool:
    """Whether the bytes end in a valid seal from `seal`."""
    return data[-SEAL_BYTES:] == seal(data[:-SEAL_BYTES])[-SEAL_BYTES:]


def pack_record(kind: str, **members: Any) -> bytes:
    """Returns the bytes of a sealed record that is stored beside checkpoints: one JSON object with format and hash."""
    return seal(json.dumps({"format": kind, **members})[:-1].encode())


def unpack_record(data: bytes, where: str) -> dict[str, Any]:
    """Parses the members of such a record from untrusted bytes. Raises CorruptionError."""
    if not is_sealed(data):
        raise damaged(where, "bytes that fail the seal at their end")
    return load_json(data, where, without_duplicates)


def damaged(where: str, fault: str) -> CorruptionError:
    """Returns the error for stored bytes that differ from what was written; `fault` describes them."""
    remedy = "restore from another checkpoint"
    return CorruptionError("a checkpoint is damaged", [Problem(where, fault, "what was written", remedy)])
