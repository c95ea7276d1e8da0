"""Connections whose peers have not proved who they are: few at a time in a whole process, and for a short time."""

from __future__ import annotations

import os
from contextlib import suppress

from shardopt.ranks.connections.frames import Message
from shardopt.ranks.connections.link import Link
from shardopt.ranks.connections.proof import Listening
from shardopt.world import SHUT_RDWR, world

_UNPROVEN_SECONDS = 10.0
_MOST_UNPROVEN = 512  # twice as many as can have a reason to come to one rank at once
_SHARE_OF_DESCRIPTORS = 8  # at most so large a part of what the process may have open: the rest is the training's


class Unproven:
    """All strangers of this process, the first of them first. Any thread uses it."""

    def __init__(self) -> None:
        self._lock = world().lock()
        self._links: dict[Link, None] = {}

    def add(self, link: Link) -> None:
        """Takes one more; where that is one too many, the first is cut off, and whoever has it sees its end."""
        most = min(_MOST_UNPROVEN, max(1, world().most_descriptors() // _SHARE_OF_DESCRIPTORS))
        with self._lock:
            self._links[link] = None
            while len(self._links) > most:
                self._cut_first()

    def cut_first(self) -> None:
        """Cuts off the first of them."""
        with self._lock:
            self._cut_first()

    def _cut_first(self) -> None:
        first = next(iter(self._links), None)
        if first is not None:
            del self._links[first]
            with suppress(OSError):  # it has gone by itself
                first.socket.shutdown(SHUT_RDWR)

    def remove(self, link: Link) -> None:
        """Drops one, before its socket is closed: nobody else's is cut off in its place."""
        with self._lock:
            self._links.pop(link, None)


_unproven = Unproven()


def _forget_all() -> None:
    """In a child that was forked: they are the parent's, and so may be the lock."""
    global _unproven
    _unproven = Unproven()


os.register_at_fork(after_in_child=_forget_all)


class Strangers:
    """Those who have come to the listeners of one thread, the first of them first. It alone uses this.

    How many there are in the whole process is bounded, far below how many descriptors it may have open.
    """

    def __init__(self) -> None:
        self._of: dict[Link, tuple[Listening, float]] = {}  # with the time until which each may take

    def add(self, link: Link, side: Listening) -> None:
        """Takes a connection; `side` is what this rank says on it. The first one in the process may be cut off."""
        self._of[link] = side, world().monotonic() + _UNPROVEN_SECONDS
        _unproven.add(link)

    def make_room(self) -> None:
        """Cuts off the first in this process, as there is no descriptor for another one."""
        _unproven.cut_first()

    def prove(self, link: Link, message: Message) -> Listening | None:
        """Takes what one of them says, and answers; returns what is known of it, once that is proved.

        Raises:
            Refused, Ended: it is none of this session; it is gone.
        """
        side, _ = self._of[link]
        answer, rank = side.take(message)
        if answer is not None:
            link.put_message(answer)
            link.flush()
        return None if rank is None else side

    def forget(self, link: Link) -> None:
        """Drops one that is no stranger any more, or before it is closed."""
        if self._of.pop(link, None) is not None:
            _unproven.remove(link)

    def silent(self, now: float) -> list[Link]:
        """Returns those whose time has passed."""
        return [link for link, (_, until) in self._of.items() if until <= now]

    def due(self) -> float:
        """Returns when the time of the first of them has passed."""
        return min((until for _, until in self._of.values()), default=float("inf"))

    def links(self) -> list[Link]:
        """Returns all of them."""
        return [*self._of]

    def __contains__(self, link: Link) -> bool:
        return link in self._of
