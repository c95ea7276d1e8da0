"""Finds the checkpoint that a run resumes from, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from shardopt.checkpoint.loading.hand_back import earlier_told
from shardopt.checkpoint.reports import LoadReport
from shardopt.checkpoint.run.context import Candidate, Restored
from shardopt.checkpoint.text import plural, seconds_text
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, UnreadableError
from shardopt.world import utc_text, world

_log = logging.getLogger("shardopt.checkpoint")


def restore_newest(look: Callable[[], list[Candidate]], load: Callable[[str], LoadReport]) -> Restored | None:
    """Loads the first whole checkpoint of the candidates; returns None if there are none. Collective.

    Args:
        look: returns the candidates, the best first, the same on every rank. Called again after each that did not
            load, since another process of the job, which is not dead yet, may have removed that one for a newer one.
        load: loads from a URL.

    Raises:
        CorruptionError, CheckpointNotFoundError: there were some, and none is whole: the error of the last one.
        The errors of `load` that are not about damage. All say if a load before them may have changed the app.
    """
    failures: dict[str, CheckpointError] = {}
    tried_twice: set[str] = set()
    changed_by: list[str] = []
    while True:
        with earlier_told(changed_by):
            candidates = look()
            candidate = next((each for each in candidates if each.url not in failures), None)
            if candidate is None:
                for failure in reversed(failures.values()):
                    raise failure
                return None
        try:
            with earlier_told(changed_by, candidate.url):
                report = load(candidate.url)
        except (CorruptionError, CheckpointNotFoundError) as error:
            if isinstance(error, UnreadableError) and candidate.url not in tried_twice:
                tried_twice.add(candidate.url)  # a disk may come back, and what it has is newer than all else
                _log.warning("%s: trying again", error)
                continue
            failures[candidate.url] = error
            what = "damaged" if isinstance(error, CorruptionError) else "gone"
            step = candidate.id.step
            _log.warning("step %d is %s, resuming from the previous checkpoint: %s", step, what, error)
        else:
            return Restored(*candidate, report, frozenset(failures) & {each.url for each in candidates})


def warn_of_other_step(restored: Restored | None, app: Mapping[str, Any]) -> None:
    """Warns if the app was restored with another step than the checkpoint has, as after its directory was renamed."""
    counted = app.get("step") if restored is not None and "step" in restored.report.loaded else None
    if restored is not None and type(counted) is int and counted != restored.id.step:
        _log.warning(
            'app["step"] is %d, and the step that was restored %d: its directory was renamed, or it was saved so. '
            'Name it as before, or set app["step"] to what restore returns: %d [run-root]',
            *(counted, restored.id.step, restored.id.step),
        )


def summary_of(restored: Restored, select: str | None) -> str:
    """Returns a log line about a restore, of all keys or of those that `select` matches."""
    report = restored.report
    saved = f"saved by {plural(report.world_size, 'rank')}"
    if report.saved_at is not None:
        seconds = max(round(world().wall_clock() - report.saved_at), 1)  # clocks of hosts differ
        saved += f" on {utc_text(report.saved_at)}, {seconds_text(seconds)} ago"
    alone = "" if select is None else f"; of the app only what select={select!r} finds ({len(report.loaded)} keys)"
    return f"resumed step {restored.id.step} from {report.url}, {saved}{alone}"
