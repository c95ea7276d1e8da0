"""A data file: a plain safetensors file whose last tensor holds the checksums of the others. No I/O, no torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Sequence
from math import prod
from sys import intern
from typing import Any, NamedTuple

from shardopt.checkpoint.format.constants import (
    ALIGNMENT_BYTES,
    CHECKSUMS_PREFIX,
    HEADER_LIMIT_BYTES,
    Dtype,
    all_sizes,
    damaged,
    load_json,
    segment_count,
    stored_shape,
)
from shardopt.errors import Problem, StateError
from shardopt.sharding.box import Box


class Entry(NamedTuple):
    """One tensor of a data file: `begin` and `end` are offsets in the file, `segment` numbers its first checksum."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    segment: int


def build_header(stem: str, members: Sequence[tuple[str, Dtype, Box]]) -> bytes:
    """Builds the header of a data file, with the checksum tensor last.

    Args:
        stem: of the file's name (`file_stem`), such as "r00003"; makes the checksum tensor's key unique.
        members: key, dtype and global box of each tensor, in the order of their bytes.

    Raises:
        StateError: the header would be larger than readers take.
    """
    texts: list[str] = []  # of the entries
    sharding: dict[str, Any] = {}
    forms: dict[tuple[str, Box], tuple[str, int, int, dict[str, Any]]] = {}  # which are few for thousands of tensors
    offset = segments = 0
    for key, dtype, box in members:
        if (form := forms.get((dtype.name, box))) is None:
            shape, nbytes = stored_shape(dtype, box.sizes), prod(box.sizes) * dtype.itemsize
            begin = _dump({"dtype": dtype.safetensors or "U8", "shape": shape})[:-1]
            saved = {"saved_offsets": [*box.offsets, *([0] * (len(shape) - len(box.sizes)))]}
            form = forms[dtype.name, box] = begin, nbytes, segment_count(nbytes), saved
        begin, nbytes, count, sharding[key] = form
        texts.append(f'{_dump(key)}:{begin},"data_offsets":[{offset},{offset + nbytes}]}}')
        offset += nbytes
        segments += count
    checksums, end = CHECKSUMS_PREFIX + stem, offset + 8 * segments
    texts.append(f'"{checksums}":{_dump({"dtype": "U8", "shape": [8 * segments], "data_offsets": [offset, end]})}')
    sharding[checksums] = {"saved_offsets": [0]}
    # The notes in __metadata__ are what torch's HuggingFaceStorageReader goes by.
    sharding_json = json.dumps(sharding, separators=(",", ":"))
    notes = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": sharding_json}
    text = f'{{"__metadata__":{_dump(notes)},{",".join(texts)}}}'.encode()
    padded = -(-(8 + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if padded > HEADER_LIMIT_BYTES:
        remedy = "have fewer tensors, shorter keys, or more ranks"
        problem = Problem(stem, f"a header of {padded} bytes", f"at most {HEADER_LIMIT_BYTES}", remedy)
        raise StateError("a data file would be unreadable", [problem])
    return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)


_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def header_length(first_bytes: bytes, file_bytes: int, where: str) -> int:
    """Returns the length in bytes of the whole header, from its first eight bytes.

    Raises:
        CorruptionError: the file cannot have a header of that length.
    """
    if len(first_bytes) < 8:
        raise damaged(where, "a file of less than 8 bytes")
    length = 8 + int(struct.unpack("<Q", first_bytes[:8])[0])
    if length > min(file_bytes, HEADER_LIMIT_BYTES):
        raise damaged(where, f"a header of {length} bytes in a file of {file_bytes}")
    return length


def parse_header(header: bytes, file_bytes: int, where: str, wanted: Collection[str] | None = None) -> dict[str, Entry]:
    """Parses a header into the entries of the file by key.

    A key that stands twice leaves a gap where its first entry was.

    Args:
        wanted: the keys of the entries to return, beside that of the checksums, which is the last; None for all.

    Raises:
        CorruptionError: entries are malformed, or do not follow one another without a gap up to the end of the file.
    """
    table = load_json(header[8:], where)
    table.pop("__metadata__", None)
    checksums = next(reversed(table), "")
    entries: dict[str, Entry] = {}
    numbers: list[Any] = []
    length = offset = len(header)
    segments = 0
    for key, info in table.items():
        try:
            dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
            fits = type(dtype) is str and begin + length == offset and begin <= end < 2**63
            numbers += begin, end, *shape
        except (KeyError, TypeError, ValueError):
            raise damaged(where, f"a malformed entry for {key!r}") from None
        if not fits:
            raise damaged(where, f"an entry for {key!r} that does not follow the one before it")
        offset = end + length
        if wanted is None or key in wanted or key == checksums:
            key = intern(key)  # one string for all files, of which a large job has thousands with the same keys
            entries[key] = tuple.__new__(Entry, (key, dtype, tuple(shape), begin + length, offset, segments))
        segments += segment_count(end - begin)
    if not all_sizes(numbers):
        raise damaged(where, "a shape or offset that is no size")
    last = entries.get(checksums)
    if last is None or not checksums.startswith(CHECKSUMS_PREFIX) or last.end - last.begin != 8 * last.segment:
        raise damaged(where, "no checksums for its tensors")
    if offset != file_bytes:
        raise damaged(where, f"{file_bytes} bytes, while its header describes {offset}")
    return entries
