"""How far a save, load, verification or resharding has come: for a program, or as a bar on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardopt.world import world

Progress = Callable[[int, int], object]
"""Gets the bytes that are done and the bytes there are, on this rank; now and then, from any thread, one at a time."""


class Counter:
    """Adds up bytes that are done by several threads.

    Args:
        total: the bytes there are.
        progress: is told; never of more than there are.
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
    """A bar on the terminal, for `progress=`; None where stderr is none, rich is not installed, or another rank has it.

    with checkpoint.progress_bar("saving") as progress:
        checkpoint.save(url, app, progress=progress)
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars
    except ImportError:
        yield None
        return
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield None
        return
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(doing, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
