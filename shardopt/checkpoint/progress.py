"""Progress of a save, load, verification or resharding: a callback, or a bar on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardopt.world import world

Progress = Callable[[int, int], object]
"""Called with the bytes done and the total bytes on this rank; now and then, from any thread, one call at a time."""


class Counter:
    """Adds up the bytes that several threads have done.

    Args:
        total: the bytes there are.
        progress: called with the bytes done, never more than the total, and the total.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.nbytes, self._total, self._progress, self._lock = 0, total, progress, world().lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            if self._progress is not None:
                self._progress(min(self.nbytes, self._total), self._total)


@contextmanager
def progress_bar(doing: str) -> Iterator[Progress | None]:
    """Shows a bar on the terminal, for `progress=`.

    Gives None where stderr is no terminal, rich is not installed, or this is not rank 0.

    Args:
        doing: stands before the bar.

    with checkpoint.progress_bar("saving") as progress:
        checkpoint.save(url, app, progress=progress)
    """
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars
    except ImportError:
        yield None
        return
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(doing, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
