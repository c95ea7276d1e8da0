"""Connections whose peers have not proved who they are: few at a time, and for a short time."""

from __future__ import annotations

from shardopt.ranks.connections.frames import Message
from shardopt.ranks.connections.link import Link
from shardopt.ranks.connections.proof import Listening
from shardopt.world import world

_UNPROVEN_SECONDS = 10.0
_MOST_UNPROVEN = 512  # twice as many as can have a reason to come to one rank at once


class Strangers:
    """Those who have come to one rank, the first of them first. One thread alone uses it."""

    def __init__(self) -> None:
        self._of: dict[Link, tuple[Listening, float]] = {}  # with the time until which each may take

    def add(self, link: Link, side: Listening) -> None:
        """Takes a connection; `side` is what this rank says on it."""
        self._of[link] = side, world().monotonic() + _UNPROVEN_SECONDS

    def one_too_many(self) -> Link | None:
        """Returns the first of them, where there is no room for another one beside it."""
        return next(iter(self._of)) if len(self._of) >= _MOST_UNPROVEN else None

    def prove(self, link: Link, message: Message) -> int | None:
        """Takes what one of them says, and answers; returns its rank, once that is proved.

        Raises:
            Refused, Ended: it is none of this session; it is gone.
        """
        answer, rank = self._of[link][0].take(message)
        if answer is not None:
            link.put_message(answer)
            link.flush()
        return rank

    def forget(self, link: Link) -> None:
        """Drops one that is no stranger any more, or gone."""
        self._of.pop(link, None)

    def silent(self, now: float) -> list[Link]:
        """Returns those whose time has passed."""
        return [link for link, (_, until) in self._of.items() if until <= now]

    def due(self) -> float:
        """Returns when the time of the first of them has passed."""
        return min((until for _, until in self._of.values()), default=float("inf"))

    def links(self) -> list[Link]:
        """Returns all of them."""
        return [*self._of]
