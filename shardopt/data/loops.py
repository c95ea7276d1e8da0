"""The samplers whose loops are under way, for a save within one that does not save its position."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from shardopt.world import Thread, world

_threads: WeakKeyDictionary[Any, Thread] = WeakKeyDictionary()
_ended: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # at which epoch and position the last loop did
_told: WeakSet[Any] = WeakSet()
_log = logging.getLogger("shardopt")


def note_loop(sampler: Any) -> None:
    """Notes that this thread begins a loop over the batches of a sampler; tells once of one before it that was left."""
    here = sampler.epoch, sampler.position
    if sampler.position and len(sampler) and _ended.get(sampler) == here and sampler not in _told:
        _told.add(sampler)
        _log.info(
            "this loop goes on in epoch %d at sample %d, where the loop before it was left: a `break` ends no epoch. "
            "If each loop is one, a resume trains more batches than the run without a break; end the epoch before the "
            "save of its last batch, as docs/recipes/everyday.md#epochs-of-fewer-batches shows [data-position]",
            *here,
        )
    _threads[sampler] = world().current_thread()


def forget_loop(sampler: Any) -> None:
    """Forgets a loop that has ended, but for where it did."""
    _threads.pop(sampler, None)
    _ended[sampler] = sampler.epoch, sampler.position


def samplers_in_loops() -> list[Any]:
    """Returns the samplers over whose batches this thread loops."""
    return [sampler for sampler, thread in list(_threads.items()) if thread is world().current_thread()]
