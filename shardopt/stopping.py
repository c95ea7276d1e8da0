"""A job that is told to stop: all ranks leave off after the same step, whichever of them got the signal.

Ranks ask once a step, each for itself, by one question to the job's store: no collective, no waiting. A word there
says how far the foremost rank has come, "past 7", and a rank makes it "past 8" before it goes on after its eighth
question. The rank that was told to stop makes it "stop 9" instead: a place that none has passed, since the word changes
in one step. Counted are questions, not the program's own steps, of which a program may leave some out.

Nobody answers for a rank that never comes to ask. So a process that is told, or hears of it, ends after a deadline,
whatever it is in. That is seen to by a thread (`signals.py`).
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import NoReturn

from shardopt.ranks import Ranks, SharedCell
from shardopt.signals import Listener
from shardopt.world import world

_QUESTION = "whether to stop"
_WORDS_SECONDS = 1.0  # for what a process that is late has to say


class Stop:
    """Listens for a signal from now on, until it is closed. To be made in the main thread.

    Args:
        signum: what tells this process to stop.
        exit_code: of a process that has stopped as it was told.
        deadline_seconds: from the signal, or from hearing of it, to the end of the process.
    """

    def __init__(self, signum: signal.Signals, exit_code: int, deadline_seconds: float) -> None:
        self.signum, self.exit_code, self.deadline_seconds = signum, exit_code, deadline_seconds
        self._told = world().event()
        self._notice: SharedCell | None = None
        self._asked = 0  # questions so far
        self._asked_for: int | None = None  # the step of the last one
        self._stops_at: int | None = None
        self._counting = world().lock()  # taken for good once the deadline runs
        self._listener = Listener(signum, self._told.set, self._hear)

    def after(self, step: int, ranks: Ranks) -> bool:
        """Whether all ranks are to stop after this step.

        Every rank asks for the same steps, in the same order; the first question is collective, the others are not.

        Raises:
            RankError: the store is lost; at the first question, also a rank that did not ask.
        """
        if step != self._asked_for:
            self._asked_for = step
            self._asked += 1
            if self._stops_at is None:
                self._stops_at = self._ask(ranks)
                if self._stops_at is not None:
                    self._count_down()
        return self._stops_at is not None and self._asked >= self._stops_at

    def _ask(self, ranks: Ranks) -> int | None:
        """At which question all stop; None: this rank is past this one, and may be told to stop at a later one."""
        if self._notice is None:
            self._notice = ranks.shared_cell(_QUESTION, "past 0")
        told = self._told.is_set()
        past = self._asked - 1
        while True:
            wanted = f"stop {past + 1}" if told else f"past {past + 1}"
            word, _, count = self._notice.replace(f"past {past}", wanted).partition(" ")
            if word == "stop":
                return int(count)
            if not told:
                return None
            past = int(count)

    def leave(self) -> NoReturn:
        """Ends the process as it was told, through all that it has to clear up."""
        raise SystemExit(self.exit_code)

    def close(self) -> None:
        """Listens no longer; what the signal did before, it does again. Not where it has come: then until the end."""
        if not self._told.is_set() and self._stops_at is None:
            self._listener.close()

    def _hear(self) -> None:
        self._told.set()
        self._count_down()

    def _count_down(self) -> None:
        """From now on the deadline runs."""
        if self._counting.acquire(blocking=False):
            world().timer(self.deadline_seconds, self._give_up, "shardopt-stop").start()

    def _give_up(self) -> None:
        text = f"told to stop by {self.signum.name}, and not done with it after {self.deadline_seconds:g} s"
        # In a thread, as either may wait for a reader, or for a lock that the main thread holds.
        words = world().thread(partial(_say, f"shardopt: {text}: what was not saved by now is lost\n"), daemon=True)
        words.start()
        words.join(_WORDS_SECONDS)
        os._exit(self.exit_code or 1)


def _say(text: str) -> None:
    os.write(2, f"shardopt: {text}\n".encode())
    sys.stdout.flush()
