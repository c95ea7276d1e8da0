"""Signs of life: a rank in a call sends them in its session; a rank that sends none is named.

A rank that has neither answered nor shown life for a deadline is given up, and named. Clocks of different hosts are
never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from shardopt.world import world

T = TypeVar("T")

DEADLINE_SECONDS = 300.0
_LONGEST_INTERVAL_SECONDS = 5.0
_LONGEST_LOOK_SECONDS = 1.0
_LONG_WAIT_SECONDS = 20.0
_LONG_WAIT_SHARE = 1 / 3  # of the deadline: one rank may well evaluate for less, and the error does not come then
_LONGEST_WAIT_SECONDS = 1200.0  # of a deadline of hours, or of none


def beat_interval(seconds: float) -> float:
    """Returns the interval in seconds at which a rank sends signs of life, for a deadline in seconds."""
    return min(seconds / 5, _LONGEST_INTERVAL_SECONDS)


class Silence:
    """Watches counters of signs of life, only by this process's clock."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._interval_seconds = min(deadline_seconds / 5, _LONGEST_LOOK_SECONDS)
        self._has_told = False
        self._looked = world().monotonic()
        self._seen: dict[object, tuple[int, float]] = {}  # its last count, and for how many seconds it has stood

    def left(self) -> float:
        """Returns the seconds until the next look is due; 0 or less if it is due now."""
        return self._looked + self._interval_seconds - world().monotonic()

    def due(self) -> bool:
        """Whether the next look is due."""
        return self.left() <= 0

    def silent(self, counts: Mapping[T, int]) -> list[T]:
        """Takes a look; returns the keys whose counters have not changed within the deadline."""
        now = world().monotonic()
        # A look that comes late may be late because this process, or the whole machine, was stopped for a while; the
        # others had no chance to be heard then.
        passed, self._looked = min(now - self._looked, 2 * self._interval_seconds), now
        silent = []
        for each, count in counts.items():
            known, stood = self._seen.get(each, (count, 0.0))
            stood = stood + passed if count == known else 0.0
            self._seen[each] = (count, stood)
            if stood > self._deadline_seconds:
                silent.append(each)
        return silent

    def long_silent(self) -> list[Any]:
        """Returns, once, the keys whose counters have not changed for a while, as of the last look."""
        wait = max(_LONG_WAIT_SECONDS, min(_LONG_WAIT_SHARE * self._deadline_seconds, _LONGEST_WAIT_SECONDS))
        long = [each for each, (_, stood) in self._seen.items() if stood > wait]
        if not long or self._has_told:
            return []
        self._has_told = True
        return long
