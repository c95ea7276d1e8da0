"""Worlds that tests put in the place of the real one: with a clock that goes only where it is waited."""

import xxhash

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


class RepeatedNames(World):
    """Draws the same names each time it is restarted, in the order in which they are asked for; time stands still.

    Names decide in which order files are listed, and so removed; times decide how long a manifest is.
    """

    def __init__(self) -> None:
        self._drawn = 0

    def restart(self) -> None:
        self._drawn = 0

    def wall_clock(self) -> float:
        return 1e9

    def monotonic(self) -> float:
        return 0.0

    def random_name(self, nbytes: int) -> str:
        self._drawn += 1
        return xxhash.xxh3_128_hexdigest(str(self._drawn).encode())[: 2 * nbytes].ljust(2 * nbytes, "0")
