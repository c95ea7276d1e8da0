"""Connects with a rank that listens at several addresses; a valid proof identifies the right one.

They are tried one after the other, the next one as soon as one fails, or has not answered for a moment: behind a wrong
address may be nobody, a firewall that says nothing, this host itself, or a program of somebody else's.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.link import Ended, Link
from shardopt.ranks.connections.proof import NEW, Connecting, Forgotten, Meeting, Refused
from shardopt.world import READ, WRITE, Selector, world

CONNECT_SECONDS = (0.5, 5.0)
"""The shortest and the longest time for a host to accept a connection."""
_NEXT_SECONDS = 0.2  # after which the next address is tried beside one that has not answered
_CHALLENGE_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # between two looks whether there is still reason to wait

Place = tuple[str, int]


class NotMet(Exception):
    """The rank was at none of its addresses.

    Args:
        reasons: why, by address; those are missing that were not tried to the end.
        refused: whether no program listens at any of them, or one that says that it is, and does not wait for this one.
    """

    def __init__(self, reasons: Mapping[Place, str], refused: bool) -> None:
        super().__init__("; ".join(f"{text_of([place])}: {reason}" for place, reason in reasons.items()))
        self.reasons, self.refused = reasons, refused


@dataclass(frozen=True, slots=True)
class Met:
    """A connection at one of the addresses, on which both sides have proved themselves."""

    link: Link
    side: Connecting
    place: Place


def text_of(places: Sequence[Place]) -> str:
    """Formats addresses: "10.0.0.1:4100, [fd00::1]:4100"."""
    return ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in places)


def meet(
    places: Sequence[Place],
    meeting: Meeting,
    waits_on: Callable[[], bool],
    most_seconds: float,
    is_last: Callable[[], bool] = lambda: True,
    key: str = "",
    taken: int = NEW,
) -> Met:
    """Connects with a listening rank; both prove to each other who they are.

    Who listens may be of an older job, and stopped or cut off: its system takes the connection, and nobody answers. So
    whoever waits for an answer looks now and then whether a later session has begun.

    Args:
        waits_on: whether there is still reason to wait.
        most_seconds: for each of its addresses to take the connection.
        is_last: whether no later session has begun.
        key, taken: if this rank comes back, by what it proves that, and how many frames it has taken.

    Raises:
        NotMet: it is at none of these addresses.
        OSError: this rank has no descriptor.
    """
    with closing(world().selector()) as selector:
        trying = _Trying(selector, lambda: Connecting(meeting, key, taken), most_seconds, deque(places))
        try:
            while True:
                one = trying.look(waits_on)
                if one is not None:
                    break
                if not is_last():
                    raise NotMet(trying.reasons, False)
            trying.tries.pop(one.link.socket)
        finally:
            for other in trying.tries.values():
                other.link.close()
        try:
            _wait_for_welcome(one, selector, waits_on, is_last)
        except (Ended, Refused) as error:
            one.link.close()
            raise NotMet({one.place: str(error)}, False) from error
        except BaseException:
            one.link.close()
            raise
    one.link.rank = meeting.above
    return Met(one.link, one.side, one.place)


@dataclass(slots=True)
class _Try:
    """One address that is tried: its connection, and its deadline."""

    place: Place
    link: Link
    side: Connecting
    until: float
    is_connected: bool = False


@dataclass(slots=True)
class _Trying:
    selector: Selector
    side: Callable[[], Connecting]
    most_seconds: float
    waiting: deque[Place]
    tries: dict[object, _Try] = field(default_factory=dict)
    reasons: dict[Place, str] = field(default_factory=dict)
    refused: bool = True
    next_at: float = 0.0

    def look(self, waits_on: Callable[[], bool]) -> _Try | None:
        """Waits for an event; returns a connection on which both sides are proved, if any. Raises NotMet."""
        now = world().monotonic()
        while self.waiting and (now >= self.next_at or not self.tries):
            self._begin(self.waiting.popleft(), now)
        if not self.tries or not waits_on():
            raise NotMet(self.reasons, self.refused and not self.tries and not self.waiting)
        until = min(one.until for one in self.tries.values())
        until = min(until, self.next_at) if self.waiting else until
        for key, _ in self.selector.select(min(max(0.0, until - now), _LOOK_SECONDS)):
            one = self.tries[key.fileobj]
            try:
                if self._advance(one):
                    return one
            except (OSError, Ended, Refused) as error:
                self._fail(one, error)
        now = world().monotonic()
        for one in [one for one in self.tries.values() if one.until <= now]:
            what = "who is there says nothing" if one.is_connected else "timed out"
            self._fail(one, TimeoutError(errno.ETIMEDOUT, what))
        return None

    def _begin(self, place: Place, now: float) -> None:
        self.next_at = now + _NEXT_SECONDS
        try:
            socket = world().begin_connect(*place)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # this rank's own trouble: nobody else is to be named for it
            self._note(place, error)
            return
        one = _Try(place, Link(socket), self.side(), now + self.most_seconds)
        self.tries[socket] = one
        self.selector.register(socket, WRITE)

    def _advance(self, one: _Try) -> bool:
        if not one.is_connected:
            world().finish_connect(one.link.socket)
            one.is_connected, one.until = True, world().monotonic() + _CHALLENGE_SECONDS
            one.link.put_message(one.side.hello())
        one.link.flush()
        if one.link.is_empty:
            self.selector.modify(one.link.socket, READ)
        for challenge in one.link.receive():
            one.link.put_message(one.side.answer(challenge))
            return True
        return False

    def _fail(self, one: _Try, error: Exception) -> None:
        self.selector.unregister(one.link.socket)
        del self.tries[one.link.socket]
        one.link.close()
        self._note(one.place, error)

    def _note(self, place: Place, error: Exception) -> None:
        self.reasons[place] = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self.refused = self.refused and isinstance(error, ConnectionRefusedError | Forgotten)


def _wait_for_welcome(one: _Try, selector: Selector, waits_on: Callable[[], bool], is_last: Callable[[], bool]) -> None:
    """Waits for the listener's welcome: it notes this rank when it reads the proof, and accepts no second one.

    So this is waited for as long as the connection stands, however busy the other process is.
    """
    while True:
        one.link.flush()
        selector.modify(one.link.socket, READ if one.link.is_empty else WRITE)
        if not selector.select(_LOOK_SECONDS) and not is_last():
            raise Refused("a later session has begun")
        if not waits_on():
            raise Refused("no answer")
        messages: list[Message] = one.link.receive()
        if messages and messages[0].kind != Kind.WELCOME:
            raise Refused("no welcome")
        if messages:
            return
