"""How a rank leaves its peers: they get what was queued for them, and nothing destroys it on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.link import Broken, Ended, Link
from shardopt.world import SHUT_WR, world

LINGER_SECONDS = 0.002
"""Between two looks at peers that are waited for."""


def take_leave(links: Sequence[Link], seconds: float) -> list[Link]:
    """Sends what is queued, says that nothing more comes, and waits for the peers to end; so many seconds at most.

    Returns:
        Those that broke before their peers had all.
    """
    end, broken = world().monotonic() + seconds, []

    def goes_on(link: Link, act: Callable[[], object]) -> bool:
        try:
            act()
        except Broken:
            broken.append(link)
            return False
        except Ended:
            return False
        return True

    links = [link for link in links if not link.suspended]
    if seconds:
        for link in links:
            link.put_message(Message(Kind.BYE))
    while seconds:
        links = [link for link in links if goes_on(link, link.flush)]  # the others still get what is theirs
        left = end - world().monotonic()
        if left <= 0 or all(link.is_empty for link in links):
            break
        world().sleep(min(left, 0.01))
    for link in links:
        with suppress(OSError):
            link.socket.shutdown(SHUT_WR)
    # What comes at a socket that is closed, or is not read there, destroys what was sent and has not arrived. So all is
    # read until the peers close too, which they do once they have read to the end.
    while links := [link for link in links if goes_on(link, link.receive)]:
        if world().monotonic() >= end:
            break
        world().sleep(LINGER_SECONDS)
    return broken
