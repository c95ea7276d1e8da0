"""Warns of saves that take longer than a job has for one when it is told to stop."""

from __future__ import annotations

import logging

_SHARE = 0.5  # of the time to stop: the rest is for what comes before the save, a step and a save under way

_log = logging.getLogger("shardopt.checkpoint")


class SlowSaves:
    """Compares saves of a run with the seconds that it has to stop in, and warns once.

    Args:
        stop_seconds: from the signal to the end of a process; None where nothing is to be said.
    """

    def __init__(self, stop_seconds: float | None) -> None:
        self._stop_seconds = stop_seconds

    def look_at(self, url: str, seconds: float | None) -> None:
        """Warns if a save took too long; `seconds` are None where that is not known."""
        if self._stop_seconds is None or seconds is None or seconds <= _SHARE * self._stop_seconds:
            return
        _log.warning(
            "saving %s took %.3g s, and a job that is told to stop has %g s (seconds of Preemption) for a step and a "
            "save; give it more, and have the launcher grant more than that before it kills",
            *(url, seconds, self._stop_seconds),
        )
        self._stop_seconds = None
