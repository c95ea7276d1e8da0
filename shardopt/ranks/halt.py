"""Finds one place at which all ranks stop, among places that each rank passes and counts by itself."""

from __future__ import annotations

from shardopt.errors import RankError
from shardopt.ranks.channel import Channel, CutOff, Silent
from shardopt.ranks.connections.heartbeat import Silence
from shardopt.ranks.failures import names_of
from shardopt.ranks.lost import Lost, lost_text
from shardopt.runtime.stores import StoreError


class Halt:
    """A place at which all ranks stop. See `Ranks.halt`.

    Args:
        channel: in a session of its own; None for this process alone.
    """

    def __init__(self, what: str, channel: Channel | None) -> None:
        self._what, self._channel = what, channel

    def at(self, place: int, wanted: bool) -> int | None:
        """Returns where all stop, a place that no rank has passed; None if nobody asks, and this place is passed.

        Local: nothing is sent, and nobody waited for, before one of the ranks wants to stop. Then it takes one exchange
        between the threads that serve the ranks' connections, whatever the programs are in.

        Args:
            place: the number of the place that this rank comes to: 1, 2 and so on, each once.
            wanted: whether this rank wants all to stop.

        Raises:
            RankError: ranks that have not ended do not answer.
        """
        if self._channel is None:
            return place if wanted else None
        try:
            return self._ask(self._channel, place, wanted)
        except CutOff as cut:
            ended = lost_text([Lost(self._channel.members[cut.above], ended=True)], 0.0)
            raise RankError(f"{self._what}: {ended}") from None
        except (Silent, StoreError) as silent:
            raise RankError(f"{self._what}: {silent}") from silent

    def _ask(self, channel: Channel, place: int, wanted: bool) -> int | None:
        node = channel.node

        def look(watch: Silence) -> None:
            if watch.silent({0: 0}):
                with node.changed:
                    silent = sorted(channel.members[rank] for rank in halting.waits_for)
                who = f"{names_of(silent)} did" if silent else "the others did"
                raise Silent(f"{who} not say for {channel.deadline_seconds:g} s how far they have come")

        with node.changed:
            # Under the lock, as all else: two threads that begin a session at once would have one each.
            halting = node.hub.session(channel.session).halting
            if not wanted and halting.passes(place):
                return halting.at
            if wanted:
                node.hub.halt(channel.session)
                node.wake()
        at = channel.wait(lambda: halting.at, look)
        node.wait_until_handed_over(channel.deadline_seconds)  # this process may end now, and others wait for this yet
        return at
