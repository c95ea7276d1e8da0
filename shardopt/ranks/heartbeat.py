"""Heartbeats: ranks show life in the store, and those that show none are named.

A rank counts up a key of the store for as long as it is in a call; one that has neither answered nor beaten for a
deadline is given up, and named. Clocks of different hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from shardopt.world import Store, Thread, world

DEADLINE_SECONDS = 300.0
_LONGEST_INTERVAL_SECONDS = 5.0


class Heartbeat:
    """Counts up a key of the store from a thread of its own, so that long work and long waits show life."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._changed = world().condition()
        self._intervals: list[float] = []  # of all that are in `beating`
        self._last = 0.0
        self._thread: Thread | None = None

    @contextmanager
    def beating(self, deadline_seconds: float) -> Iterator[None]:
        """Beats until the end of the block. Blocks may lie within one another, and overlap in several threads.

        Args:
            deadline_seconds: after which others take silence for death; beats are several times as frequent.
        """
        interval = min(deadline_seconds / 5, _LONGEST_INTERVAL_SECONDS)
        with self._changed:
            if self._thread is None:
                self._last = world().monotonic()
                thread = world().thread(self._run, "shardopt-heartbeat", daemon=True)
                with suppress(RuntimeError):  # no more threads: this rank has to be quick then
                    thread.start()
                    self._thread = thread
            elif interval < min(self._intervals):
                self._changed.notify()
            self._intervals.append(interval)
        try:
            yield
        finally:
            ended = None
            with self._changed:
                self._intervals.remove(interval)
                if not self._intervals:
                    ended, self._thread = self._thread, None
                    self._changed.notify()
            if ended is not None:
                ended.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._thread is world().current_thread():
                    left = self._last + min(self._intervals) - world().monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                else:
                    return
            try:
                self._store.add(self._key, 1)
            except RuntimeError:  # the store is gone: whoever waits finds out, and says so
                return
            self._last = world().monotonic()


class PeerHeartbeats:
    """Watches heartbeats by this process's clock alone."""

    def __init__(self, store: Store, deadline_seconds: float) -> None:
        self._store, self._deadline_seconds = store, deadline_seconds
        self._interval_seconds = min(deadline_seconds / 5, 1.0)
        self._looked = world().monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last count, and for how many seconds it has stood

    def due(self) -> bool:
        """Whether it is time to look again."""
        return world().monotonic() - self._looked >= self._interval_seconds

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Returns those of `ranks` whose count has not changed for the deadline."""
        now = world().monotonic()
        # A look that comes late may be late because this process, or the whole machine, was stopped for a while; the
        # others had no chance to be heard then.
        passed, self._looked = min(now - self._looked, 2 * self._interval_seconds), now
        silent = []
        for rank in ranks:
            count = self._store.add(f"beat/{rank}", 0)
            known, stood = self._seen.get(rank, (count, 0.0))
            stood = stood + passed if count == known else 0.0
            self._seen[rank] = (count, stood)
            if stood > self._deadline_seconds:
                silent.append(rank)
        return silent
