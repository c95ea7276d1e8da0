"""Saves in the background of whose end the program has not heard: it is told at the next save, or when it ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Protocol


class TrackedSave(Protocol):
    """A save in the background."""

    url: str

    def hear(self) -> BaseException | None:
        """What it has failed with, if it has and this rank was not told."""

    def abandon_in_child(self) -> None:
        """In a process that was forked: nobody goes on with it here."""

    def complaint(self) -> str:
        """What to say of it where the program has ended."""


_tracked: list[TrackedSave] = []


def track(save: TrackedSave) -> None:
    """From now on the program has to hear of this save."""
    _tracked.append(save)


def untrack(save: TrackedSave) -> None:
    """The program has heard of it, or need not."""
    if save in _tracked:
        _tracked.remove(save)


def tracked_urls() -> list[str]:
    """Where saves of this process may still be writing."""
    return [save.url for save in tuple(_tracked)]


def take_failures() -> list[BaseException]:
    """What saves in the background have failed with of which this rank was not told; it is now. Local."""
    failures = [save.hear() for save in tuple(_tracked)]
    return [failure for failure in failures if failure is not None]


def raise_failures() -> None:
    """Raises the first of them, and leaves the others for the next time. Local: within a round, so that all raise."""
    for save in tuple(_tracked):
        failure = save.hear()
        if failure is not None:
            raise failure


def _complain_at_exit() -> None:
    """Ends the process with code 1 where a save was left to itself.

    An exception in an exit handler does not change the code, so that there is no other way than `os._exit`. It keeps
    handlers that were registered before from running: therefore this one is registered when the module is imported, and
    so runs after those of the program itself.
    """
    if _tracked:
        for save in _tracked:
            print(f"shardopt: {save.complaint()}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _abandon_in_child() -> None:
    # A forked child has none of the threads that save.
    for save in _tracked:
        save.abandon_in_child()
    _tracked.clear()


atexit.register(_complain_at_exit)
os.register_at_fork(after_in_child=_abandon_in_child)
