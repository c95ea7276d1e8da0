"""Connections of unproven peers: only few at a time in the whole process, and only for a short time."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from shardopt.ranks.connections.frames import Message
from shardopt.ranks.connections.link import Link
from shardopt.ranks.connections.proof import Listening
from shardopt.world import SHUT_RDWR, world

_UNPROVEN_SECONDS = 10.0
_MOST_UNPROVEN = 512  # twice as many as can have a reason to come to one rank at once
_SHARE_OF_DESCRIPTORS = 8  # at most so large a part of what the process may have open: the rest is the training's


_in_process: dict[Link, None] = {}  # of all listeners of this process, guarded by `_lock`
_lock = world().lock()


class UnauthenticatedPeers:
    """The unproven peers of one thread's listeners, oldest first. Only that thread uses it.

    How many there are in the whole process is bounded, far below how many descriptors it may have open: one more cuts
    off the first of all, and whoever has that one sees its end.
    """

    def __init__(self) -> None:
        self._of: dict[Link, tuple[Listening, float]] = {}  # with the time until which each may take

    def accept(self, listener: Any, side: Listening) -> Link | None:
        """Accepts a connection, if one waits and a descriptor is free; `side` is this rank's side of the proof."""
        try:
            link = Link(world().accept(listener))
        except BlockingIOError:
            return None
        except OSError:
            self.make_room()
            world().sleep(0.05)  # no descriptor is free: the peer waits in the queue until one is
            return None
        self._of[link] = side, world().monotonic() + _UNPROVEN_SECONDS
        most = min(_MOST_UNPROVEN, max(1, world().most_descriptors() // _SHARE_OF_DESCRIPTORS))
        with _lock:
            _in_process[link] = None
        while len(_in_process) > most:
            self.make_room()
        return link

    def make_room(self) -> None:
        """Cuts off the process's oldest one, for example when no descriptor is left for another."""
        with _lock:
            first = next(iter(_in_process), None)
            if first is not None:
                del _in_process[first]
                with suppress(OSError):  # it has gone by itself
                    first.socket.shutdown(SHUT_RDWR)

    def prove(self, link: Link, message: Message) -> Listening | None:
        """Takes a peer's message, and answers; returns its side of the proof once that is complete.

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
        """Drops a peer that has proved itself, or is about to be closed, so that no other is cut off for it."""
        if self._of.pop(link, None) is not None:
            with _lock:
                _in_process.pop(link, None)

    def silent(self, now: float) -> list[Link]:
        """Returns the peers whose time is over."""
        return [link for link, (_, until) in self._of.items() if until <= now]

    def due(self) -> float:
        """Returns when the time of the oldest one is over."""
        return min((until for _, until in self._of.values()), default=float("inf"))

    def links(self) -> list[Link]:
        """Returns all connections."""
        return [*self._of]

    def __contains__(self, link: Link) -> bool:
        return link in self._of


def _forget_all() -> None:
    """Forgets all in a forked child: the connections are the parent's, and so may be the lock."""
    global _in_process, _lock
    _in_process, _lock = {}, world().lock()


os.register_at_fork(after_in_child=_forget_all)
