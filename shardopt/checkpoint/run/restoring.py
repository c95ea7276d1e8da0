"""Restores the newest checkpoint of a run that is whole, the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from shardopt.checkpoint.reports import LoadReport
from shardopt.checkpoint.run.context import Candidate
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, UnreadableError
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


class Restored(NamedTuple):
    """The checkpoint that a run was restored from.

    Args:
        candidate: the checkpoint.
        report: of its load.
        damaged: the URLs of those that came before it and are damaged.
    """

    candidate: Candidate
    report: LoadReport
    damaged: frozenset[str]


def restore_newest(look: Callable[[], list[Candidate]], load: Callable[[str], LoadReport]) -> Restored | None:
    """Loads the first of the candidates that is whole; None where there are none. Collective.

    Args:
        look: returns the candidates, the best first, the same on every rank. Called again after each that did not
            load, since another process of the job, which is not dead yet, may have removed that one for a newer one.
        load: loads from a URL.

    Raises:
        CorruptionError, CheckpointNotFoundError: there were some, and none is whole: the error of the last one.
        The errors of `load` that are not about damage.
    """
    failures: dict[str, CheckpointError] = {}
    tried_twice: set[str] = set()
    while True:
        candidates = look()
        candidate = next((each for each in candidates if each.url not in failures), None)
        if candidate is None:
            for failure in reversed(failures.values()):
                raise failure
            return None
        try:
            report = load(candidate.url)
        except (CorruptionError, CheckpointNotFoundError) as error:
            if isinstance(error, UnreadableError) and candidate.url not in tried_twice:
                tried_twice.add(candidate.url)  # a disk may come back, and what it has is newer than all else
                _log.warning("%s: trying once more", error)
                continue
            failures[candidate.url] = error
            what = "damaged" if isinstance(error, CorruptionError) else "gone"
            step = candidate.id.step
            _log.warning("the checkpoint of step %d is %s, taking the one before it: %s", step, what, error)
        else:
            return Restored(candidate, report, frozenset(failures) & {each.url for each in candidates})


def summary_of(restored: Restored, select: str | None) -> str:
    """Returns a line for the log about a restore, of all keys or of those that `select` finds."""
    step, report = restored.candidate.id.step, restored.report
    ranks = "1 rank" if report.world_size == 1 else f"{report.world_size} ranks"
    ago = "" if report.saved_at is None else f", {_duration(world().wall_clock() - report.saved_at)} ago"
    alone = "" if select is None else f"; of the app only what select={select!r} finds ({len(report.loaded)} keys)"
    return f"restored step {step} from {report.url}, saved by {ranks}{ago}{alone}"


def _duration(seconds: float) -> str:
    """ "5 s", "3 min", "2 h 5 min", "4 days"; clocks of hosts differ, so it may be less than nothing."""
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours / 24:.0f} days"
