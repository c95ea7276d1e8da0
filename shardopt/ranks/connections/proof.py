"""Proof between two peers that both know a session's key, which is never sent.

connects                                listens
HELLO  session, rank, nonce        →
                                   ←    CHALLENGE  nonce, proof
PROOF  proof                       →
                                   ←    WELCOME, or the connection is closed

A proof is an HMAC-SHA256 with the key over the role of who proves, the session, both ranks and both nonces: it is good
for one connection, one direction, one rank.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass

from shardopt.ranks.connections.frames import Kind, Message
from shardopt.world import world

_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Meeting:
    """What two peers prove to each other: that they are these ranks of this session.

    Args:
        session, key: hexadecimal digits, as they stand in the store.
        below, above: the rank that connects, and that which listens.
    """

    session: str
    key: str
    below: int
    above: int

    def proof(self, role: str, nonces: tuple[str, str]) -> str:
        """Returns what only a peer with the key can say."""
        said = json.dumps([role, self.session, self.below, self.above, *nonces]).encode()
        return hmac.new(bytes.fromhex(self.key), said, "sha256").hexdigest()


class Refused(Exception):
    """The peer could not prove itself."""


class Connecting:
    """The side that connects."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._nonce = meeting, world().random_name(_NONCE_BYTES)

    def hello(self) -> Message:
        """Returns what is sent first."""
        return _message(Kind.HELLO, session=self._meeting.session, rank=self._meeting.below, nonce=self._nonce)

    def answer(self, challenge: Message) -> Message:
        """Returns the proof of this side, where the other has given its own. Raises Refused."""
        nonce, proof = _fields(challenge, Kind.CHALLENGE, nonce=str, proof=str)
        nonces = (self._nonce, nonce)
        if not _equal(proof, self._meeting.proof("listens", nonces)):
            raise Refused("the listener does not know the session's key")
        return _message(Kind.PROOF, proof=self._meeting.proof("connects", nonces))


class Listening:
    """The side that listens: one for each connection that has not proved itself."""

    def __init__(self, session: str, key: str, rank: int) -> None:
        self._session, self._key, self._rank = session, key, rank
        self._meeting: Meeting | None = None
        self._nonces = ("", "")

    def take(self, message: Message) -> tuple[Message | None, int | None]:
        """Takes what the peer says; returns what it is told, and its rank once that is proved.

        Raises:
            Refused: it is none of this session.
        """
        if self._meeting is None:
            session, rank, nonce = _fields(message, Kind.HELLO, session=str, rank=int, nonce=str)
            if session != self._session:
                raise Refused("of another session")
            self._meeting = Meeting(session, self._key, rank, self._rank)
            self._nonces = (nonce, world().random_name(_NONCE_BYTES))
            proof = self._meeting.proof("listens", self._nonces)
            return _message(Kind.CHALLENGE, nonce=self._nonces[1], proof=proof), None
        (proof,) = _fields(message, Kind.PROOF, proof=str)
        if not _equal(proof, self._meeting.proof("connects", self._nonces)):
            raise Refused("it does not know the session's key")
        return None, self._meeting.below


def _equal(said: str, proof: str) -> bool:
    return hmac.compare_digest(said.encode(errors="replace"), proof.encode())  # JSON may have half of a character


def _message(kind: Kind, **fields: object) -> Message:
    return Message(kind, data=json.dumps(fields).encode())


def _fields(message: Message, kind: Kind, **types: type) -> list:  # type: ignore[type-arg]  # of these types
    """Returns the fields of a message of a kind. Raises Refused."""
    try:
        fields = json.loads(message.data) if message.kind == kind else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or any(type(fields.get(name)) is not wanted for name, wanted in types.items()):
        raise Refused(f"no {kind.name}")
    return [fields[name] for name in types]
