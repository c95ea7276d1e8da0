"""A place for all ranks to stop at, of those that each passes and counts for itself."""

from __future__ import annotations

from shardopt.errors import RankError
from shardopt.ranks.channel import Channel, Silent
from shardopt.world import StoreError


class Halt:
    """A place for all ranks to stop at. See `Ranks.halt`.

    Args:
        channel: in a session of its own; None for this process alone.
    """

    def __init__(self, what: str, channel: Channel | None) -> None:
        self._what, self._channel = what, channel

    def at(self, place: int, wanted: bool) -> int | None:
        """Returns where all stop, which no rank has passed; None where nobody wants to: this place is passed then.

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
            return self._channel.halts_at(place, wanted)
        except (Silent, StoreError) as silent:
            raise RankError(f"{self._what}: {silent}") from silent
