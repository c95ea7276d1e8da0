"""Side channels: the job's ranks for a thread in the background."""

from __future__ import annotations

import weakref

from shardopt.ranks.connections.heartbeat import DEADLINE_SECONDS
from shardopt.ranks.ranks import Ranks


class SideRanks:
    """Ranks that agree beside those of the program, made at first use of each process group.

    Args:
        what: what they are for, as for `Ranks.agree`.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # Those of the program → those beside them. Not of the last alone: where ranks are in several groups, those that
        # are in one of them only would not make theirs anew.
        self._made: weakref.WeakKeyDictionary[Ranks, Ranks] = weakref.WeakKeyDictionary()

    def of(self, ranks: Ranks, deadline_seconds: float = DEADLINE_SECONDS) -> Ranks:
        """Returns the side channel of `ranks`. Collective where it is not made yet, and local afterwards."""
        if ranks not in self._made:
            self._made[ranks] = ranks.side_channel(f"preparing for {self._what}", deadline_seconds)
        return self._made[ranks]

    def are_beside(self, ranks: Ranks) -> bool:
        """Whether it is made, and for `ranks`. Local."""
        return ranks in self._made

    def forget(self) -> None:
        """Drops them, with their connection."""
        self._made.clear()
