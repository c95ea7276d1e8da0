"""Lays out the archives of torch.save, zips of uncompressed members, before any byte is written.

    local header, name, padding, bytes, descriptor         of each member; bytes begin at a multiple of 64
    central directory                                      name, size, CRC32 and place of each
    [zip64 end record, zip64 locator,] end record

The CRC32 of a member stands behind its bytes, in its descriptor and in the directory, so that nothing is held to
compute it. What all members take is known from their sizes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardopt.checkpoint.sources.pickled.zip_archive import (
    ALIGNMENT_BYTES,
    CENTRAL,
    END,
    END_64,
    FULL_16,
    FULL_32,
    LOCAL,
    LOCATOR_64,
)

_FLAGS = 1 << 3 | 1 << 11  # a descriptor follows the bytes; the name is UTF-8
_VERSION = 45  # the one that knows zip64
_PREFIX = "archive/"
_DOS_DATE = 1 << 5 | 1  # 1980-01-01: equal contents are equal bytes


class Member(NamedTuple):
    """One record: its bytes, or how many there will be."""

    name: str
    data: bytes | None
    nbytes: int


Take = Callable[[], Iterator[memoryview]]
"""Yields the bytes of the next record whose bytes were not given, in chunks."""


def torch_members(data_pkl: bytes, records: Sequence[tuple[str, bytes | int]]) -> list[Member]:
    """Returns the members of a torch.save archive, in torch's order.

    Args:
        records: name, and the bytes or how many, of each storage.
    """
    before = [
        ("data.pkl", data_pkl),
        (".format_version", b"1"),
        (".storage_alignment", b"64"),
        ("byteorder", b"little"),
    ]
    storages = [(f"data/{name}", data) for name, data in records]
    members = []
    for name, data in [*before, *storages, ("version", b"3\n")]:
        known, nbytes = (data, len(data)) if isinstance(data, bytes) else (None, data)
        members.append(Member(_PREFIX + name, known, nbytes))
    return members


class ZipArchive:
    """An archive of these members.

    `nbytes` is its size; `begins` has the offset of the first byte of each member's contents.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._headers: list[int] = []
        self.begins: list[int] = []
        at = 0
        for member in members:
            self._headers.append(at)
            at += len(_local_header(member, at))
            self.begins.append(at)
            at += member.nbytes + len(_descriptor(member, 0))
        self._directory_begin = at
        self.nbytes = at + len(self._directory([0] * len(members)))

    def body(self, take: Take) -> Iterator[memoryview]:
        """Yields all bytes of the archive; `take` yields those of members without bytes, in order."""
        sums = []
        for member, at in zip(self.members, self._headers, strict=True):
            yield memoryview(_local_header(member, at))
            crc = 0
            for chunk in take() if member.data is None else iter((memoryview(member.data),)):
                crc = zlib.crc32(chunk, crc)
                yield chunk
            sums.append(crc)
            yield memoryview(_descriptor(member, crc))
        yield memoryview(self._directory(sums))

    def _directory(self, sums: Sequence[int]) -> bytes:
        entries = zip(self.members, self._headers, sums, strict=True)
        directory = b"".join(_central_header(member, at, crc) for member, at, crc in entries)
        begin, size, count = self._directory_begin, len(directory), len(self.members)
        end = b""
        if begin >= FULL_32 or size >= FULL_32 or count >= FULL_16:
            rest = END_64.size - 12
            end = END_64.pack(b"PK\6\6", rest, _VERSION, _VERSION, 0, 0, count, count, size, begin)
            end += LOCATOR_64.pack(b"PK\6\7", 0, begin + size, 1)
        count, size_32, begin_32 = min(count, FULL_16), min(size, FULL_32), min(begin, FULL_32)
        return directory + end + END.pack(b"PK\5\6", 0, 0, count, count, size_32, begin_32, 0)


def _is_large(member: Member) -> bool:
    return member.nbytes >= FULL_32


def _local_header(member: Member, at: int) -> bytes:
    name = member.name.encode()
    # Zeros stand for what the descriptor has; a large member says here that its descriptor is of large numbers.
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if _is_large(member) else b""
    size = FULL_32 if _is_large(member) else 0
    begin = at + LOCAL.size + len(name) + len(extra) + 4
    padding = -begin % ALIGNMENT_BYTES
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return LOCAL.pack(b"PK\3\4", _VERSION, _FLAGS, 0, 0, _DOS_DATE, 0, size, size, len(name), len(extra)) + name + extra


def _descriptor(member: Member, crc: int) -> bytes:
    form = "<4sIQQ" if _is_large(member) else "<4sIII"
    return struct.pack(form, b"PK\7\x08", crc, member.nbytes, member.nbytes)


def _central_header(member: Member, at: int, crc: int) -> bytes:
    name, size = member.name.encode(), min(member.nbytes, FULL_32)
    large = [*([member.nbytes] * 2 if _is_large(member) else []), *([at] if at >= FULL_32 else [])]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    sizes = (0, 0, _DOS_DATE, crc, size, size, len(name), len(extra))
    return CENTRAL.pack(b"PK\1\2", _VERSION, _VERSION, _FLAGS, *sizes, 0, 0, 0, 0, min(at, FULL_32)) + name + extra
