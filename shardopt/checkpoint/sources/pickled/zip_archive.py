"""The directory of a zip archive with uncompressed members, anywhere in a file.

    local header, name, padding, bytes [, descriptor]     of each member
    central directory                                      name, size, CRC32 and place of each
    [zip64 end record, zip64 locator,] end record          at the very end

The directory alone says all but how long a member's local header is, by which its bytes begin. torch pads that such
that they begin at a multiple of 64. Where the next member begins just where it then has to, this is how it was done;
else the local header is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardopt.checkpoint.format.constants import HEADER_LIMIT_BYTES, damaged
from shardopt.errors import FormatError, Problem

Read = Callable[[int, int], bytes]
"""Returns the bytes of a file from one offset up to another."""

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END_64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_64 = struct.Struct("<4sIQI")

_ENCRYPTED, _HAS_DESCRIPTOR = 1 << 0, 1 << 3
_HARMLESS_FLAGS = _HAS_DESCRIPTOR | 1 << 11  # and the name is UTF-8
_STORED = 0
FULL_16, FULL_32 = 2**16 - 1, 2**32 - 1  # the number itself is in a zip64 record
ALIGNMENT_BYTES = 64
_DESCRIPTOR_BYTES, _DESCRIPTOR_BYTES_64 = 16, 24
_EXTRA_64 = 1
_MOST_EXTRA_BYTES = 32  # of a local header beside the padding: the padding's own header, and large numbers
_TAIL_BYTES = 4096  # enough for the whole directory of one tensor


class ZipMember(NamedTuple):
    """A member of an archive. `begin` is the offset of its first byte in the file.

    `crc32` is that of its bytes; None where the archive has none, as torch was told to leave them out.
    """

    name: str
    begin: int
    nbytes: int
    crc32: int | None


class _Entry(NamedTuple):
    """A member in the central directory; `header` is the offset of its local header in the archive."""

    name: str
    raw_name: bytes
    flags: int
    header: int
    nbytes: int
    crc32: int


def zip_members(read: Read, begin: int, end: int, where: str) -> dict[str, ZipMember]:
    """Lists the members of an archive by name, in the order of the central directory.

    Reads the end of the archive, the rest of its directory where that is longer than some KiB, and the local headers
    of those members alone whose place the directory leaves open.

    Args:
        read: gives bytes of the file.
        begin, end: offsets of the archive in the file.
        where: names it in errors.

    Raises:
        CorruptionError: the bytes are no archive, or one that contradicts itself.
        FormatError: members are compressed, encrypted, or on several disks.
    """
    try:
        nbytes = end - begin
        tail_begin = max(0, nbytes - _TAIL_BYTES)
        tail = read(begin + tail_begin, end)
        if len(tail) != nbytes - tail_begin:
            raise ValueError(f"{len(tail)} bytes in the place of {nbytes - tail_begin} at its end")
        count, directory_begin, directory_end = _read_end(tail, nbytes, where)
        if directory_end - directory_begin > HEADER_LIMIT_BYTES:
            raise ValueError(f"a directory of {directory_end - directory_begin} bytes")
        if directory_begin >= tail_begin:
            directory = tail[directory_begin - tail_begin : directory_end - tail_begin]
        else:
            directory = read(begin + directory_begin, begin + directory_end)
        entries = list(_read_directory(directory, where))
        if len(entries) != count or len({entry.name for entry in entries}) != count:
            raise ValueError(f"{len(entries)} members in the place of {count}, or some of one name")
        begins = _locate(entries, directory_begin, lambda at, to: read(begin + at, begin + to))
    except (ValueError, struct.error) as error:
        raise damaged(where, f"no sound zip archive ({error})") from error
    has_crc32 = any(entry.crc32 for entry in entries)  # where torch leaves them out they are all 0
    return {
        entry.name: ZipMember(entry.name, begin + data_begin, entry.nbytes, entry.crc32 if has_crc32 else None)
        for entry, data_begin in zip(entries, begins, strict=True)
    }


def _read_end(tail: bytes, nbytes: int, where: str) -> tuple[int, int, int]:
    """Returns the number of members, and where the central directory begins and ends within the archive."""
    at = len(tail) - END.size
    if at < 0:
        raise ValueError("too short for one")
    magic, disk, first_disk, here, count, size, offset, comment = END.unpack_from(tail, at)
    if magic != b"PK\x05\x06" or comment:
        raise ValueError("no end record in its last bytes")
    locator = at - LOCATOR_64.size
    if locator >= END_64.size and tail[locator : locator + 4] == b"PK\x06\x07":
        _, first_disk_64, end_64, disks = LOCATOR_64.unpack_from(tail, locator)
        at = locator - END_64.size
        if end_64 != nbytes - len(tail) + at or first_disk_64 or disks != 1:
            raise ValueError("a zip64 end record in another place")
        wide = END_64.unpack_from(tail, at)
        if wide[0] != b"PK\x06\x06" or wide[1] != END_64.size - 12:
            raise ValueError("a malformed zip64 end record")
        narrow = (disk, first_disk, here, count, size, offset)
        full = (FULL_16,) * 4 + (FULL_32,) * 2
        if any(few not in (most, many) for few, most, many in zip(narrow, full, wide[4:], strict=True)):
            raise ValueError("two end records that differ")
        disk, first_disk, here, count, size, offset = wide[4:]
    if disk or first_disk or here != count:
        raise _refused(where, "an archive on several disks")
    if offset + size != nbytes - len(tail) + at:
        raise ValueError("a directory that does not end where the end record begins")
    return count, offset, offset + size


def _read_directory(directory: bytes, where: str) -> Iterator[_Entry]:
    at = 0
    while at < len(directory):
        magic, _, _, flags, method, _, _, crc32, size, full_size, *lengths_and_more = CENTRAL.unpack_from(directory, at)
        name_length, extra_length, comment_length, disk, _, _, header = lengths_and_more
        name_end = at + CENTRAL.size + name_length
        extra_end = name_end + extra_length
        raw_name, extra = directory[at + CENTRAL.size : name_end], directory[name_end:extra_end]
        at = extra_end + comment_length
        if magic != b"PK\x01\x02" or at > len(directory):
            raise ValueError("a malformed entry of its directory")
        name = raw_name.decode()
        if flags & _ENCRYPTED or flags & ~_HARMLESS_FLAGS:
            raise _refused(where, f"the encrypted or otherwise special member {name[:100]!r}")
        if method != _STORED:
            raise _refused(where, f"the compressed member {name[:100]!r}")
        full_size, size, header = _widened(extra, full_size, size, header)
        if size != full_size or disk:
            raise ValueError(f"contradictions about the member {name[:100]!r}")
        yield _Entry(name, raw_name, flags, header, size, crc32)


def _widened(extra: bytes, *numbers: int) -> list[int]:
    """Returns the numbers of an entry, with those at their limit replaced by those of its zip64 field."""
    if FULL_32 not in numbers:
        return list(numbers)
    at = 0
    while at < len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _EXTRA_64:
            wide = iter(struct.unpack_from(f"<{numbers.count(FULL_32)}Q", extra[: at + 4 + length], at + 4))
            return [next(wide) if number == FULL_32 else number for number in numbers]
        at += 4 + length
    raise ValueError("a large number that stands nowhere")


def _locate(entries: list[_Entry], directory_begin: int, read: Read) -> list[int]:
    """Returns the offset of each member's bytes in the archive, after a check that no two members overlap."""
    order = sorted(range(len(entries)), key=lambda number: entries[number].header)
    ends = [entries[number].header for number in order[1:]] + [directory_begin]
    begins = [0] * len(entries)
    for number, limit in zip(order, ends, strict=True):
        entry = entries[number]
        data_begin = _padded_begin(entry, limit)
        if data_begin is None:
            data_begin = _read_local(entry, read)
        if data_begin + entry.nbytes > limit:
            raise ValueError(f"the member {entry.name[:100]!r} beyond its place")
        begins[number] = data_begin
    return begins


def _padded_begin(entry: _Entry, limit: int) -> int | None:
    """Returns the offset of a member's bytes, if it was padded as torch does and ends at `limit`."""
    data_begin = limit - entry.nbytes
    if entry.flags & _HAS_DESCRIPTOR:
        data_begin -= _DESCRIPTOR_BYTES_64 if max(entry.nbytes, entry.header) >= FULL_32 else _DESCRIPTOR_BYTES
    padding = data_begin - (entry.header + LOCAL.size + len(entry.raw_name))
    return (
        data_begin if data_begin % ALIGNMENT_BYTES == 0 and 0 <= padding < _MOST_EXTRA_BYTES + ALIGNMENT_BYTES else None
    )


def _read_local(entry: _Entry, read: Read) -> int:
    """Returns the offset of a member's bytes, from its local header."""
    names_begin = entry.header + LOCAL.size
    raw = read(entry.header, names_begin + len(entry.raw_name))
    magic, _, flags, method, _, _, crc32, size, full_size, name_length, extra_length = LOCAL.unpack_from(raw)
    fits = magic == b"PK\x03\x04" and flags == entry.flags and method == _STORED and raw[LOCAL.size :] == entry.raw_name
    if not flags & _HAS_DESCRIPTOR:  # which has the numbers, after the bytes
        sizes = {size, full_size} - {FULL_32}
        fits = fits and crc32 == entry.crc32 and sizes <= {entry.nbytes}
    if not fits or name_length != len(entry.raw_name):
        raise ValueError(f"a local header of {entry.name[:100]!r} that differs")
    return names_begin + int(name_length) + int(extra_length)


def _refused(where: str, found: str) -> FormatError:
    remedy = "save it again with torch.save"
    problem = Problem(where, found, "one file of members that are stored as they are", remedy)
    return FormatError("a zip archive is of a kind that is not read here", [problem])
