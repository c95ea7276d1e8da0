"""The fence between background copies of live state and code that changes it in place.

Whoever is to change state in place calls `wait_for_copies` first: a keyed optimizer before each step, too, as a save
holds back only the optimizers that are in its app.
"""

from __future__ import annotations

import os

from shardopt.world import world


class Event:
    """An event that happens once: read with `is_set` (or by its truth), awaited with `wait`."""

    def __init__(self) -> None:
        self._event = world().event()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has happened, at most `timeout` seconds; returns whether it has."""
        return self._event.wait(timeout)

    def __bool__(self) -> bool:
        return self.is_set()

    def set(self) -> None:
        """Marks the event as happened, and wakes waiting threads."""
        self._event.set()
        _awaited.discard(self)

    def set_in_child(self) -> None:
        """Sets the event in a forked child, where a thread that no longer exists may hold a lock."""
        self._event = world().event()
        self._event.set()


_awaited: set[Event] = set()
"""The ends of the running copies."""

os.register_at_fork(after_in_child=_awaited.clear)  # a forked child has none of the threads that copy


def copying_until(end: Event) -> None:
    """Makes `wait_for_copies` wait until `end` has happened."""
    _awaited.add(end)
    if end:  # it happened in between
        _awaited.discard(end)


def wait_for_copies() -> None:
    """Waits until no copy of this process is running. Local; returns at once if there is none."""
    for end in tuple(_awaited):
        end.wait()
