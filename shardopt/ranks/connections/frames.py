"""Messages between ranks as frames on a socket: a length, a header of fixed size, and bytes.

A length is checked before what it promises is read: a peer that has not proved itself is given 4 KiB, any other 1 MiB;
longer messages are cut into several frames, which only a peer that has proved itself may send.

length   4 bytes, of all that follows up to the end of the data
kind     1 byte (`Kind`)
more     1 byte: 1 where the message continues in the next frame, else 0
session  8 bytes
round    8 bytes
data

Once both peers have proved themselves each frame ends with a seal, so that nobody but the peer can send one, drop one,
or send one again, without being noticed.

seal     8 bytes: how many frames the sender has taken of its peer, which need not be kept any more
         16 bytes: keyed BLAKE2b over the number of this frame, those 8 bytes, and the SHA-256 of the frame

Each direction of each connection has a key of its own (`proof.py`). Numbers of frames continue where a peer comes back
over another connection.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

MOST_FRAME_BYTES = 1 << 20
MOST_UNPROVEN_BYTES = 4 << 10
MOST_MESSAGE_BYTES = 1 << 30
MAIN = bytes(8)
"""The session of the program itself; other sessions have random names."""

_COPIED_BYTES = 64 << 10  # beside their header; of more, messages to several ranks have one copy
_HEADER = struct.Struct("!IBB8sQ")
_AFTER_LENGTH = _HEADER.size - 4
_TAKEN = struct.Struct("!Q")
_NUMBERS = struct.Struct("!QQ")
_TAG_BYTES = 16


class Kind(IntEnum):
    """The kinds of messages; `message_hub.py` says how each is handled."""

    HELLO = 1  # these four as two peers meet: `proof.py`
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    CONFIRM = 5  # of no meaning but its seal's: how much has come
    BYE = 6  # the last one: who sends it ends the connection, and is not to be looked for
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
    RECEIVERS = 20
    SECTION = 21
    HALT = 22  # these four: `session.py`
    FREEZE = 23
    PASSED = 24
    HALT_AT = 25


class Message(NamedTuple):
    """One message; `data` is opaque bytes."""

    kind: Kind
    session: bytes = MAIN
    round: int = 0
    data: bytes = b""


class BadFrame(Exception):
    """The received bytes are no frame, or a too large one, so the sender is none of the ranks."""


class Frame:
    """A frame as buffers to be sent in order. Several peers may get the same one.

    Attributes:
        buffers: bytes.
        nbytes: of all of them.
    """

    __slots__ = ("_digest", "buffers", "nbytes")

    def __init__(self, buffers: Sequence[bytes | memoryview]) -> None:
        self.buffers, self.nbytes = buffers, sum(map(len, buffers))
        self._digest = b""

    def __bytes__(self) -> bytes:
        return b"".join(self.buffers)

    def digest(self) -> bytes:
        """Returns the SHA-256 of the frame, computed once for all peers."""
        if not self._digest:
            hashed = hashlib.sha256()
            for buffer in self.buffers:
                hashed.update(buffer)
            self._digest = hashed.digest()
        return self._digest


class Sealer:
    """Makes seals for frames; `number` is the next frame's."""

    def __init__(self, key: bytes, number: int) -> None:
        self._key, self.number = key, number

    def seal(self, frame: Frame, taken: int) -> bytes:
        """Returns the seal of the next frame."""
        tag = _tag(self._key, self.number, taken, frame.digest())
        self.number += 1
        return _TAKEN.pack(taken) + tag


class Unsealer:
    """Checks seals of received frames.

    Args:
        number: of the frame that comes next.
        taken: how many have been taken already; those that come once more are dropped.
        confirm: gets how many frames the peer has taken.

    Attributes:
        unconfirmed_bytes: of the frames that came since the peer was last told how many have; whoever tells it sets 0.
    """

    nbytes = _TAKEN.size + _TAG_BYTES

    def __init__(self, key: bytes, number: int, taken: int, confirm: Callable[[int], None]) -> None:
        self._key, self._number, self.taken, self._confirm = key, number, taken, confirm
        self.unconfirmed_bytes = 0

    def open(self, frame: memoryview, seal: bytes) -> bool:
        """Returns whether a frame is new. Raises BadFrame if it is not from the peer."""
        (taken,) = _TAKEN.unpack_from(seal)
        tag = _tag(self._key, self._number, taken, hashlib.sha256(frame).digest())
        if not hmac.compare_digest(tag, seal[_TAKEN.size :]):
            raise BadFrame("a seal that is not the peer's")
        self._number += 1
        self.unconfirmed_bytes += len(frame)
        self._confirm(taken)
        if self._number <= self.taken:
            return False
        self.taken = self._number
        return True


def _tag(key: bytes, number: int, taken: int, digest: bytes) -> bytes:
    return hashlib.blake2b(_NUMBERS.pack(number, taken) + digest, digest_size=_TAG_BYTES, key=key).digest()


def require_sendable(messages: Iterable[bytes]) -> None:
    """Raises ValueError if a message is too long to be sent."""
    longest = max(map(len, messages))
    if longest > MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {longest} bytes; {MOST_MESSAGE_BYTES} are the most")


def encode(message: Message) -> list[Frame]:
    """Encodes a message as frames to be sent in order."""
    kind, session, number, data = message
    require_sendable([data])
    if len(data) <= _COPIED_BYTES:
        return [Frame([_HEADER.pack(_AFTER_LENGTH + len(data), kind, 0, session, number) + data])]
    frames: list[Frame] = []
    view = memoryview(data)
    for begin in range(0, len(data), MOST_FRAME_BYTES):
        part = view[begin : begin + MOST_FRAME_BYTES]
        more = begin + len(part) < len(data)
        frames.append(Frame([_HEADER.pack(_AFTER_LENGTH + len(part), kind, more, session, number), part]))
    return frames


class Decoder:
    """Decodes messages from one peer's bytes, in chunks of any size.

    Attributes:
        most_bytes: the longest data of a frame that is taken.
        trusts: whether a message may have several frames. From a stranger they would be kept, without an end.
        error: by which the bytes after the last messages are none; raised by the next `feed`.
    """

    def __init__(self) -> None:
        self.most_bytes, self.trusts = MOST_UNPROVEN_BYTES, False
        self.error: BadFrame | None = None
        self._unsealer: Unsealer | None = None
        self._buffer = bytearray()
        self._head: tuple[int, bytes, int] | None = None  # of a message that continues
        self._parts: list[bytes] = []
        self._nbytes = 0

    def trust(self, unsealer: Unsealer | None = None) -> None:
        """Accepts messages that only a proven peer may send.

        Args:
            unsealer: looks at the seals of the frames that come from now on; None where they have none.
        """
        self.most_bytes, self.trusts, self._unsealer = MOST_FRAME_BYTES, True, unsealer

    def begin_again(self, unread: bytes = b"") -> None:
        """Continues with another connection, from which some bytes were read; keeps the frames so far."""
        self._buffer[:] = unread
        self.error = None

    @property
    def unread(self) -> bytes:
        """The bytes after the last complete frame."""
        return bytes(self._buffer)

    @property
    def session_under_way(self) -> bytes | None:
        """The session of a partly received message."""
        return None if self._head is None else self._head[1]

    def feed(self, data: bytes) -> list[Message]:
        """Takes received bytes; returns the messages that are complete.

        Raises:
            BadFrame: it is not what a rank sends.
        """
        self._buffer += data
        messages: list[Message] = []
        try:
            if self.error is None:
                self._decode(messages)
        except BadFrame as error:
            self.error = error
        if self.error is not None and not messages:
            raise self.error
        return messages  # though what follows is bad: they were confirmed, and do not come again

    def _decode(self, messages: list[Message]) -> None:
        at, unsealer = 0, self._unsealer
        sealed = 0 if unsealer is None else unsealer.nbytes
        try:
            while len(self._buffer) - at >= _HEADER.size:
                length, kind, more, session, number = _HEADER.unpack_from(self._buffer, at)
                if not _AFTER_LENGTH <= length <= _AFTER_LENGTH + self.most_bytes or more > self.trusts:
                    raise BadFrame(f"a frame of {length} bytes")
                end = at + 4 + length
                if len(self._buffer) < end + sealed:
                    return
                if unsealer is None or self._is_new(unsealer, at, end):
                    part = bytes(self._buffer[at + _HEADER.size : end])
                    self._append((kind, session, number), part, bool(more), messages)
                at = end + sealed
                if kind == Kind.WELCOME and not self.trusts:
                    return  # the rest has seals, for which `trust` is called first
        finally:
            del self._buffer[:at]

    def _is_new(self, unsealer: Unsealer, at: int, end: int) -> bool:
        with memoryview(self._buffer) as view, view[at:end] as frame:
            return unsealer.open(frame, bytes(view[end : end + unsealer.nbytes]))

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
