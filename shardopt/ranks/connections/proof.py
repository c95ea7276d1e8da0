"""Mutual proof of two peers that both know a session's key, which is never sent.

connects                                   listens
HELLO  session, rank, nonce, taken     →
                                       ←   CHALLENGE  nonce, taken, proof
PROOF  proof                           →
                                       ←   WELCOME, or the connection is closed

A proof is an HMAC-SHA256 with the key over the role of who proves, the session, both ranks, both nonces and both
counts: it is good for one connection, one direction, one rank.

Who comes back after its connection broke says how many frames it had taken, and proves itself by a key that only these
two processes have, of their first meeting: no other process is taken for it. Who comes for the first time says -1, and
so says who is not waited for any more, with a proof by the session's key.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.link import Link
from shardopt.world import world

NEW = -1
"""The number of frames taken that a peer reports when it comes for the first time."""

_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Meeting:
    """The claim that two peers prove to each other: they are these ranks of this session.

    Args:
        session, key: hexadecimal digits; `key` is the session's, or of who comes back.
        below, above: the rank that connects, and that which listens.
    """

    session: str
    key: str = field(repr=False)
    below: int
    above: int

    def proof(self, role: str, nonces: tuple[str, str], taken: tuple[int, int]) -> str:
        """Returns a text that only a peer with the key can make."""
        said = json.dumps([role, self.session, self.below, self.above, *nonces, *taken]).encode()
        return hmac.new(bytes.fromhex(self.key), said, "sha256").hexdigest()


class Refused(Exception):
    """The peer could not prove itself."""


class Forgotten(Refused):
    """The peer is the right one, but no longer waits for this rank."""


class Side:
    """The keys and counts that both sides know after the proof.

    Attributes:
        key: by which the one that connects comes back; "" before both have proved themselves.
        from_below, from_above: the keys of the frames of each direction.
        taken: how many frames those below and above have said they had taken.
    """

    def __init__(self) -> None:
        self.key, self.from_below, self.from_above = "", b"", b""
        self.taken = (NEW, NEW)
        self._nonces = ("", "")

    def _proved(self, meeting: Meeting) -> None:
        self.key, below, above = (
            meeting.proof(role, self._nonces, self.taken) for role in ("comes back", "seals below", "seals above")
        )
        self.from_below, self.from_above = bytes.fromhex(below), bytes.fromhex(above)


class Connecting(Side):
    """The connecting side.

    Args:
        key: by which it comes back; "" if it comes for the first time.
        taken: how many frames were taken here, if it comes back.
    """

    def __init__(self, meeting: Meeting, key: str = "", taken: int = NEW) -> None:
        super().__init__()
        self._session, self._meeting = meeting, replace(meeting, key=key) if key else meeting
        self.taken, self._nonces = (taken, NEW), (world().random_name(_NONCE_BYTES), "")

    def hello(self) -> Message:
        """Returns the first message."""
        return _message(
            Kind.HELLO,
            session=self._meeting.session,
            rank=self._meeting.below,
            nonce=self._nonces[0],
            taken=self.taken[0],
        )

    def answer(self, challenge: Message) -> Message:
        """Returns this side's proof, if the other side's is valid. Raises Refused."""
        nonce, taken, proof = _fields(challenge, Kind.CHALLENGE, nonce=str, taken=int, proof=str)
        self._nonces, self.taken = (self._nonces[0], nonce), (self.taken[0], taken)
        is_forgotten = self.taken[0] != NEW and taken == NEW
        meeting = self._session if is_forgotten else self._meeting
        if not _equal(proof, meeting.proof("listens", self._nonces, self.taken)):
            raise Refused("the listener does not know the session's key")
        if is_forgotten:
            raise Forgotten("the listener does not wait for this rank any more")
        self._proved(self._meeting)
        return _message(Kind.PROOF, proof=self._meeting.proof("connects", self._nonces, self.taken))


class Listening(Side):
    """The listening side; one for each unproven connection.

    Args:
        known: gives who may come back as a rank; None for nobody.

    Attributes:
        rank: of the peer, as it says.
        returns: whether it comes back.
    """

    def __init__(
        self, session: str, key: str, rank: int, known: Callable[[int], Link | None] = lambda rank: None
    ) -> None:
        super().__init__()
        self._session, self._session_key, self._above, self._known = session, key, rank, known
        self._meeting: Meeting | None = None
        self.rank, self.returns = NEW, False

    def take(self, message: Message) -> tuple[Message | None, int | None]:
        """Takes the peer's message; returns the reply and, once it is proved, the peer's rank.

        Raises:
            Refused: it is none of this session.
        """
        if self._meeting is None:
            return self._challenge(message), None
        (proof,) = _fields(message, Kind.PROOF, proof=str)
        if self.returns and self.taken[1] == NEW:
            raise Refused("nobody is waited for under this number")
        if not _equal(proof, self._meeting.proof("connects", self._nonces, self.taken)):
            raise Refused("it does not know the session's key")
        self._proved(self._meeting)
        return None, self.rank

    def _challenge(self, message: Message) -> Message:
        session, self.rank, nonce, taken = _fields(message, Kind.HELLO, session=str, rank=int, nonce=str, taken=int)
        if session != self._session:
            raise Refused("of another session")
        key, self.returns = self._session_key, taken != NEW
        if self.returns:
            known, self.taken = self._known(self.rank), (taken, NEW)
            if known is not None and known.key:
                key, self.taken = known.key, (taken, known.taken)
        self._meeting = Meeting(session, key, self.rank, self._above)
        self._nonces = (nonce, world().random_name(_NONCE_BYTES))
        proof = self._meeting.proof("listens", self._nonces, self.taken)
        return _message(Kind.CHALLENGE, nonce=self._nonces[1], taken=self.taken[1], proof=proof)


def _equal(said: str, proof: str) -> bool:
    return hmac.compare_digest(said.encode(errors="replace"), proof.encode())  # JSON may have half of a character


def _message(kind: Kind, **fields: object) -> Message:
    return Message(kind, data=json.dumps(fields).encode())


def _fields(message: Message, kind: Kind, **types: type) -> list[Any]:
    """Returns the fields of a message of this kind. Raises Refused."""
    try:
        fields = json.loads(message.data) if message.kind == kind else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or any(type(fields.get(name)) is not wanted for name, wanted in types.items()):
        raise Refused(f"no {kind.name}")
    return [fields[name] for name in types]
