"""Side channels: the job's ranks for a thread in the background."""

from __future__ import annotations

import weakref

from shardopt.ranks.channel import Channel
from shardopt.ranks.ranks import Ranks


class SideRanks:
    """Ranks that agree beside those of the program, made at first use of each process group.

    Args:
        what: what they are for, as for `Ranks.agree`.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # By the rounds of the program's. Not of the last alone: where ranks are in several groups, those that are in
        # one of them only would not make theirs again.
        self._made: weakref.WeakKeyDictionary[Channel, Ranks] = weakref.WeakKeyDictionary()

    def of(self, ranks: Ranks) -> Ranks:
        """Returns the side channel of `ranks`, with their deadline. Collective where it is not made yet; then local."""
        if ranks.channel is None:
            return ranks
        if ranks.channel not in self._made:
            self._made[ranks.channel] = ranks.side_channel(f"preparing for {self._what}")
        return self._made[ranks.channel].with_deadline(ranks.deadline_seconds)

    def are_beside(self, ranks: Ranks) -> bool:
        """Whether it is made, and for `ranks`. Local."""
        return ranks.channel is None or ranks.channel in self._made

    def forget(self) -> None:
        """Drops them, with their connection."""
        self._made.clear()
