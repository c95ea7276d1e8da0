"""The samplers whose loops are under way, for a save within one that does not save its position."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from shardopt.world import Thread, world

_threads: WeakKeyDictionary[Any, Thread] = WeakKeyDictionary()


def note_loop(sampler: Any) -> None:
    """Notes that this thread begins a loop over the batches of a sampler."""
    _threads[sampler] = world().current_thread()


def forget_loop(sampler: Any) -> None:
    """Forgets a loop that has ended."""
    _threads.pop(sampler, None)


def samplers_in_loops() -> list[Any]:
    """Returns the samplers over whose batches this thread loops."""
    return [sampler for sampler, thread in list(_threads.items()) if thread is world().current_thread()]
