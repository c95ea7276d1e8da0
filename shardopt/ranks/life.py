"""Heartbeats: how ranks show life, and who shows none.

A rank that works or waits counts up a key of the store; one that has neither answered nor beaten for a deadline is
given up, and named. Clocks of different hosts are never compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]  # from a compiled module

DEADLINE_SECONDS = 300.0


class Heartbeat:
    """Counts up a key of the store from a thread of its own, so that long work and long waits show life."""

    def __init__(self, store: Store, key: str, interval_seconds: float) -> None:
        self._store, self._key = store, key
        self._interval_seconds = min(interval_seconds, 5.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardopt-heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            try:
                self._store.add(self._key, 1)
            except RuntimeError:  # the store is gone: whoever waits finds out, and says so
                return


class SignsOfLife:
    """Watches heartbeats by this process's clock alone."""

    def __init__(self, store: Store, deadline_seconds: float) -> None:
        self._store, self._deadline_seconds = store, deadline_seconds
        self._interval_seconds = min(deadline_seconds / 5, 1.0)
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last count, and for how many seconds it has stood

    def due(self) -> bool:
        return time.monotonic() - self._looked >= self._interval_seconds

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose count has not changed for the deadline."""
        now = time.monotonic()
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
