"""Reads a torch.save archive: its nested state, with each tensor replaced by its place in the file.

<name>/data.pkl      the nested state, as a pickle with references to storages
<name>/data/<key>    the bytes of each storage
<name>/byteorder     "little" or "big"; absent where an older torch wrote the archive, on whatever machine
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shardopt.checkpoint.format.constants import MANIFEST_LIMIT_BYTES, damaged
from shardopt.checkpoint.sources.pickled.plain_globals import PLAIN_GLOBALS
from shardopt.checkpoint.sources.pickled.tensor_globals import TENSOR_GLOBALS, TensorRecord, storage_in
from shardopt.checkpoint.sources.pickled.unpickle import unpickle
from shardopt.checkpoint.sources.pickled.zip_archive import Read, ZipMember, zip_members
from shardopt.errors import CorruptionError, FormatError, Problem

__all__ = ["KNOWN_GLOBALS", "TensorRecord", "read_archive"]

KNOWN_GLOBALS: Mapping[str, Callable[..., Any] | Any] = {**PLAIN_GLOBALS, **TENSOR_GLOBALS}
"""Stand-ins for the globals of plain values, tensors and parameters."""

_PICKLE = "/data.pkl"
_SMALL_BYTES = 16 << 10  # of an archive that is read in one request
_LITTLE_ENDIAN = b"little"
_LEGACY_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The pickled magic number at the start of files from before torch 1.6, after the protocol's byte."""


def read_archive(
    read: Read,
    begin: int,
    end: int,
    where: str,
    attributes: list[tuple[dict[Any, Any], Any]] | None = None,
) -> Any:
    """Reads the nested state of a torch.save archive, without its tensors' bytes.

    Args:
        read: gives bytes of the file, from one offset up to another.
        begin, end: offsets of the archive in the file.
        where: names it in errors.
        attributes: gets each dict that has some, and these.

    Returns:
        Dicts, lists, tuples and plain values as they were saved; an OrderedDict or defaultdict as a dict, a tensor or
        parameter as its `TensorRecord`, which lies within its storage, and an `Unknown` in the place of all else.

    Raises:
        CorruptionError: the bytes are no archive, fail the CRC32 of the pickle, or contradict themselves.
        FormatError: it is of another kind than is read here.
    """
    if end - begin <= _SMALL_BYTES:
        read = _read_at_once(read, begin, end)
    try:
        members = zip_members(read, begin, end, where)
    except CorruptionError:
        _refuse_legacy(read(begin, min(end, begin + 16)), where)
        raise
    pickles = [name for name in members if name.count("/") == 1 and name.endswith(_PICKLE)]
    if len(pickles) != 1:
        raise damaged(where, f"{len(pickles)} members named data.pkl in the place of one")
    root = pickles[0].removesuffix(_PICKLE)
    if f"{root}/constants.pkl" in members:
        raise _refused(where, "a program of TorchScript", "a torch.save archive", "save its state_dict with torch.save")
    order = members.get(f"{root}/byteorder")
    if order is not None and (order.crc32, order.nbytes) != (zlib.crc32(_LITTLE_ENDIAN), len(_LITTLE_ENDIAN)):
        _refuse_big_endian(_read_member(read, order, where), where)
    if members[pickles[0]].nbytes > MANIFEST_LIMIT_BYTES:
        raise damaged(where, f"a pickle of more than {MANIFEST_LIMIT_BYTES} bytes")
    pickle = _read_member(read, members[pickles[0]], where)
    return unpickle(pickle, where, KNOWN_GLOBALS, partial(storage_in, members, f"{root}/data/"), attributes)


def _read_at_once(read: Read, begin: int, end: int) -> Read:
    data = read(begin, end)
    return lambda first, last: data[first - begin : last - begin]


def _read_member(read: Read, member: ZipMember, where: str) -> bytes:
    data = read(member.begin, member.begin + member.nbytes)
    if len(data) != member.nbytes or member.crc32 not in (None, zlib.crc32(data)):
        raise damaged(where, f"bytes of {member.name!r} that fail their CRC32")
    return data


def _refuse_big_endian(order: bytes, where: str) -> None:
    if order == b"big":
        remedy = "load it with torch.load, and save it anew on a little-endian machine"
        raise _refused(where, "big-endian tensors", "little-endian ones", remedy)
    if order != _LITTLE_ENDIAN:
        raise damaged(where, "a byte order that is none")


def _refuse_legacy(first_bytes: bytes, where: str) -> None:
    if first_bytes[2:].startswith(_LEGACY_MAGIC):
        remedy = "load it with torch.load(..., weights_only=True), and save it again with torch.save"
        raise _refused(where, "the format of torch before 1.6", "a zip archive, as torch.save writes today", remedy)


def _refused(where: str, found: str, required: str, remedy: str) -> FormatError:
    return FormatError(
        "a torch.save file is of a kind that is not read here", [Problem(where, found, required, remedy)]
    )
