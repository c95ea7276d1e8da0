"""Side channels: the job's ranks for a thread in the background."""

from __future__ import annotations

from shardopt.ranks.heartbeat import DEADLINE_SECONDS
from shardopt.ranks.ranks import Ranks


class SideRanks:
    """Ranks that agree beside those of the program, made at first use, and anew in another process group.

    Args:
        what: what they are for, as for `Ranks.agree`.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._made: tuple[Ranks, Ranks] | None = None  # those of the program, and those beside them

    def of(self, ranks: Ranks, deadline_seconds: float = DEADLINE_SECONDS) -> Ranks:
        """Returns the side channel of `ranks`. Collective where it is not made yet, and local afterwards."""
        if self._made is None or self._made[0] is not ranks:
            self._made = ranks, ranks.side_channel(f"preparing for {self._what}", deadline_seconds)
        return self._made[1]

    def are_beside(self, ranks: Ranks) -> bool:
        """Whether it is made, and for `ranks`. Local."""
        return self._made is not None and self._made[0] is ranks

    def forget(self) -> None:
        """Drops them, with their connection."""
        self._made = None
