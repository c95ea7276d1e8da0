"""How a rank leaves its peers: they get what was queued for them, and nothing destroys it on the way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from shardopt.ranks.connections.link import Ended, Link
from shardopt.world import SHUT_WR, world

LINGER_SECONDS = 0.002
"""Between two looks at peers that are waited for."""


def take_leave(links: Sequence[Link], seconds: float) -> None:
    """Sends what is queued, says that nothing more comes, and waits for the peers to end; so many seconds at most."""
    end = world().monotonic() + seconds
    while seconds:
        for link in links:
            with suppress(Ended):  # the others still get what is theirs
                link.flush()
        left = end - world().monotonic()
        if left <= 0 or all(link.is_empty for link in links):
            break
        world().sleep(min(left, 0.01))
    for link in links:
        with suppress(OSError):
            link.socket.shutdown(SHUT_WR)
    # What comes at a socket that is closed, or is not read there, destroys what was sent and has not arrived. So all is
    # read until the peers close too, which they do once they have read to the end.
    while unread := [link for link in links if _is_open_beyond(link)]:
        if world().monotonic() >= end:
            break
        world().sleep(LINGER_SECONDS)
        links = unread


def _is_open_beyond(link: Link) -> bool:
    """Reads what has come from a peer, and drops it; returns whether more may come."""
    try:
        link.receive()
    except Ended:
        return False
    return True
