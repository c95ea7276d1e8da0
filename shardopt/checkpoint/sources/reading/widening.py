"""Decides how many requests to a store are in flight: more, for as long as more bytes come in a second.

How many a network can use is latency times bandwidth, and others share it: neither is known before.
"""

from __future__ import annotations

from shardopt.world import world

_GAIN = 1.15  # half as many threads again bring less than that only if the network, or this machine, has no more
_READS = 2  # of each thread, before it is judged: a new thread begins with an empty network


class Widening:
    """Counts what the threads of one load have read. Thread-safe.

    Args:
        threads: at the beginning.
        most: as many as there may be.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._threads, self._most, self._lock = threads, most, world().lock()
        self._best, self._nbytes, self._reads, self._begin = 0.0, 0, 0, world().monotonic()

    def more_threads(self, nbytes: int) -> int:
        """Counts a read; returns how many threads are to be added now, most often none."""
        if self._threads >= self._most:
            return 0
        with self._lock:
            self._nbytes, self._reads = self._nbytes + nbytes, self._reads + 1
            if self._reads < _READS * self._threads:
                return 0
            now = world().monotonic()
            rate = self._nbytes / max(now - self._begin, 1e-9)
            more = min(max(self._threads // 2, 1), self._most - self._threads) if rate >= _GAIN * self._best else 0
            self._threads += more
            if not more:
                self._most = self._threads
            self._best, self._nbytes, self._reads, self._begin = rate, 0, 0, now
            return more
