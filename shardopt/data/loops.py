"""The samplers whose loops are under way, for a save in one that lacks its position; and where no loop can begin."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from shardopt.errors import OptionError, Problem
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


def refuse_past_end(sampler: Any) -> None:
    """Raises OptionError for a position that is set past the end of the epoch."""
    size, position, batch = sampler.size, sampler.position, sampler.batch_size
    batches = size // batch if sampler.drop_last else -(-size // batch)
    if 0 <= position <= max(size, batches * batch):  # programs may count the last batch as a full one
        return
    remedy = (
        f"set the epoch too: epochs, batches = divmod({position} // {batch}, {batches}); "
        f"data.epoch, data.position = data.epoch + epochs, batches * {batch}"
    )
    problem = Problem("position", f"{position}", f"0 to {size}, the samples of the epoch", remedy)
    where = f"{'past' if position > 0 else 'before'} the {size} samples of the epoch"
    raise OptionError(f"position {position} is {where}", [problem], code="data-position")


def samplers_in_loops() -> list[Any]:
    """Returns the samplers over whose batches this thread loops."""
    return [sampler for sampler, thread in list(_threads.items()) if thread is world().current_thread()]
