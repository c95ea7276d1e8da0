"""Worlds that tests put in the place of the real one: with a clock that goes only where it is waited."""

from shardopt.world import World


class FakeClock(World):
    """Time passes in `sleep`, and where a test moves `now`; nobody waits in real time.

    Attributes:
        now: seconds, of both clocks.
        pauses: the seconds of every sleep.
    """

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wall_clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def jitter(self, low: float, high: float) -> float:
        return high
