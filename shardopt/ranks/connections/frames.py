"""Messages between ranks as frames on a socket: a length, a header of fixed size, and bytes.

A length is checked before what it promises is read: a peer that has not proved itself is given 4 KiB, any other 1 MiB;
longer messages are cut into several frames, which only a peer that has proved itself may send.

length   4 bytes, of all that follows
kind     1 byte (`Kind`)
more     1 byte: 1 where the message goes on in the next frame, else 0
session  8 bytes
round    8 bytes
data
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MOST_FRAME_BYTES = 1 << 20
MOST_UNPROVEN_BYTES = 4 << 10
MOST_MESSAGE_BYTES = 1 << 30
MAIN = bytes(8)
"""The session of the program itself; others have random names."""

_COPIED_BYTES = 64 << 10  # beside their header; of more, messages to several ranks have one copy
_HEADER = struct.Struct("!IBB8sQ")
_AFTER_LENGTH = _HEADER.size - 4


class Kind(IntEnum):
    """What a message is; see `centre.py` for what is done with it."""

    HELLO = 1  # these four as two peers meet: `proof.py`
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    BEAT = 10
    REPORT = 11
    REPORTS = 12
    ANSWER = 13
    ASK = 14
    MISSING = 15
    ENDED = 16
    CUT_OFF = 17
    WHERE = 18
    HERE = 19
    PULL = 20
    SECTION = 21
    HALT = 22  # these four: `halting.py`
    FREEZE = 23
    PASSED = 24
    HALT_AT = 25


class Message(NamedTuple):
    """One message; `data` is nothing but bytes."""

    kind: Kind
    session: bytes = MAIN
    round: int = 0
    data: bytes = b""


class BadFrame(Exception):
    """What came is no frame, or too large: whoever sent it is not one of us."""


def encode(message: Message) -> list[bytes | memoryview]:
    """Encodes a message as buffers to be sent one after the other."""
    kind, session, number, data = message
    if len(data) > MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; {MOST_MESSAGE_BYTES} are the most")
    if len(data) <= _COPIED_BYTES:
        return [_HEADER.pack(_AFTER_LENGTH + len(data), kind, 0, session, number) + data]
    buffers: list[bytes | memoryview] = []
    view = memoryview(data)
    for begin in range(0, len(data), MOST_FRAME_BYTES):
        part = view[begin : begin + MOST_FRAME_BYTES]
        more = begin + len(part) < len(data)
        buffers += [_HEADER.pack(_AFTER_LENGTH + len(part), kind, more, session, number), part]
    return buffers


class Decoder:
    """Makes messages of the bytes of one peer, however they are cut.

    Attributes:
        most_bytes: the longest data of a frame that is taken.
        trusts: whether a message may have several frames. From a stranger they would be kept, without an end.
    """

    def __init__(self) -> None:
        self.most_bytes, self.trusts = MOST_UNPROVEN_BYTES, False
        self._buffer = bytearray()
        self._head: tuple[int, bytes, int] | None = None  # of a message that goes on
        self._parts: list[bytes] = []
        self._nbytes = 0

    def trust(self) -> None:
        """Takes what only a peer sends that has proved itself."""
        self.most_bytes, self.trusts = MOST_FRAME_BYTES, True

    @property
    def session_under_way(self) -> bytes | None:
        """The session of a message of which a part has come."""
        return None if self._head is None else self._head[1]

    def feed(self, data: bytes) -> list[Message]:
        """Takes what was received; returns the messages that are complete.

        Raises:
            BadFrame: it is not what a rank sends.
        """
        self._buffer += data
        messages: list[Message] = []
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            length, kind, more, session, number = _HEADER.unpack_from(self._buffer, at)
            if not _AFTER_LENGTH <= length <= _AFTER_LENGTH + self.most_bytes or more > self.trusts:
                raise BadFrame(f"a frame of {length} bytes")
            if len(self._buffer) - at < 4 + length:
                break
            self._append(
                (kind, session, number), bytes(self._buffer[at + _HEADER.size : at + 4 + length]), bool(more), messages
            )
            at += 4 + length
        del self._buffer[:at]
        return messages

    def _append(self, head: tuple[int, bytes, int], part: bytes, more: bool, messages: list[Message]) -> None:
        if self._head not in (None, head):
            raise BadFrame("a message within another")
        self._nbytes += len(part)
        if self._nbytes > MOST_MESSAGE_BYTES:
            raise BadFrame("a message without an end")
        self._parts.append(part)
        self._head = head
        if more:
            return
        try:
            kind = Kind(head[0])
        except ValueError as error:
            raise BadFrame(str(error)) from None
        messages.append(Message(kind, head[1], head[2], b"".join(self._parts)))
        self._head, self._parts, self._nbytes = None, [], 0
