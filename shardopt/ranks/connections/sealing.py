"""Seals of frames: nobody but the peer can send one, drop one, or send one again, without being noticed.

seal   8 bytes: how many frames the sender has taken of its peer, which need not be kept any more
       16 bytes: keyed BLAKE2b over the number of this frame, those 8 bytes, and the SHA-256 of the frame

Each direction of each connection has a key of its own (`proof.py`). Numbers of frames go on where a peer comes back
over another connection.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable

from shardopt.ranks.connections.frames import BadFrame, Frame

_TAKEN = struct.Struct("!Q")
_NUMBERS = struct.Struct("!QQ")
_TAG_BYTES = 16


class Sealer:
    """Makes seals. `number` is of the next frame."""

    def __init__(self, key: bytes, number: int) -> None:
        self._key, self.number = key, number

    def seal(self, frame: Frame, taken: int) -> bytes:
        """Returns the seal of the next frame."""
        tag = _tag(self._key, self.number, taken, frame.digest())
        self.number += 1
        return _TAKEN.pack(taken) + tag


class Unsealer:
    """Looks at seals.

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
        """As `Opener`."""
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
