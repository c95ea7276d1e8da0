"""What is asked for and replied over a connection for files, once both ends have proved themselves (`proof.py`).

request   4 bytes: the length of what follows, at most 64 KiB; JSON: [directory, name, [[offset, bytes], ...]]
reply     1 byte: 0 where there is such a file; 8 bytes: the length of what follows; the ranges one after the other.
          Otherwise 1, and why there is none.

A connection carries one request at a time, and any number of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import NamedTuple

from shardopt.world import Socket

LENGTH = struct.Struct("!I")
REPLY = struct.Struct("!BQ")
FOUND, REFUSED = 0, 1
MOST_REQUEST_BYTES = 64 << 10
MOST_RANGES = 512
MOST_REASON_BYTES = 4 << 10
SILENT_SECONDS = 20.0
"""For which a peer may send or take nothing in the middle of something before it is given up."""


class Request(NamedTuple):
    """Ranges of bytes of a file; `ranges` are offsets and lengths."""

    directory: str
    name: str
    ranges: Sequence[tuple[int, int]]


class NoRequest(Exception):
    """What came is no request: whoever sent it is not one of us."""


def encode(request: Request) -> bytes:
    """Encodes a request, of at most `MOST_RANGES` ranges."""
    data = json.dumps(request).encode()
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Request:
    """Decodes what follows the length. Raises NoRequest."""
    try:
        directory, name, ranges = json.loads(data)
        ranges = [(begin, nbytes) for begin, nbytes in ranges]
    except (ValueError, TypeError, RecursionError) as error:
        raise NoRequest(str(error)) from None
    sizes = [size for each in ranges for size in each]
    if type(directory) is not str or type(name) is not str or len(ranges) > MOST_RANGES:
        raise NoRequest("no names, or too many ranges")
    if any(type(size) is not int or not 0 <= size < 1 << 62 for size in sizes):
        raise NoRequest("a range that is none")
    return Request(directory, name, ranges)


def receive_into(socket: Socket, memory: memoryview) -> None:
    """Fills memory from a socket. Raises ConnectionError if it ends before, TimeoutError if nothing comes."""
    while memory.nbytes:
        got = socket.recv_into(memory)
        if not got:
            raise ConnectionResetError("the connection has ended")
        memory = memory[got:]


def receive(socket: Socket, nbytes: int) -> bytes:
    """Receives so many bytes, as `receive_into`."""
    data = bytearray(nbytes)
    receive_into(socket, memoryview(data))
    return bytes(data)
