"""A job that is told to stop: all ranks leave off after the same step, whichever of them got the signal.

Ranks ask once a step, each for itself, by one question to the job's store: no collective, no waiting. A word there
says how far the foremost rank has come, "past 7", and a rank makes it "past 8" before it goes on after its eighth
question. The rank that was told to stop makes it "stop 9" instead: a place that none has passed, since the word changes
in one step. Counted are questions, not the program's own steps, of which a program may leave some out.

Nobody answers for a rank that never comes to ask. So a process that is told, or hears of it, ends after a deadline,
whatever it is in. That is seen to by a thread, which has the signal from C: Python's own handlers wait for the main
thread to come back from whatever it is in.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import NoReturn

from shardopt.ranks import Notice, Ranks

_QUESTION = "whether to stop"


class Stop:
    """Listens for a signal from now on, until it is closed. To be made in the main thread.

    Args:
        signum: what tells this process to stop.
        exit_code: of a process that has stopped as it was told.
        deadline_seconds: from the signal, or from hearing of it, to the end of the process.
    """

    def __init__(self, signum: signal.Signals, exit_code: int, deadline_seconds: float) -> None:
        self.signum, self.exit_code, self.deadline_seconds = signum, exit_code, deadline_seconds
        self._told = threading.Event()
        self._notice: Notice | None = None
        self._asked = 0  # questions so far
        self._asked_for: int | None = None  # the step of the last one
        self._stops_at: int | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous = signal.signal(signum, self._note)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="shardopt-stop", daemon=True)
        self._thread.start()
        _listening.add(self)

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
                    os.write(self._writer, bytes([self.signum]))  # now the deadline runs here too
        return self._stops_at is not None and self._asked >= self._stops_at

    def _ask(self, ranks: Ranks) -> int | None:
        """At which question all stop; None: this rank is past this one, and may be told to stop at a later one."""
        if self._notice is None:
            self._notice = ranks.notice(_QUESTION, "past 0")
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
        _listening.discard(self)
        if self._told.is_set() or self._stops_at is not None:
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        signal.signal(self.signum, self._previous)
        os.close(self._writer)  # which ends the thread
        self._thread.join()

    def forget_in_child(self) -> None:
        """In a process that was forked: the signal is about that process alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(self.signum, signal.SIG_DFL)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._told.set()

    def _listen(self) -> None:
        """What the thread does."""
        while signum := os.read(self._reader, 1):
            if signum[0] == self.signum:
                self._told.set()
                threading.Event().wait(self.deadline_seconds)
                self._give_up()
        os.close(self._reader)

    def _give_up(self) -> None:
        text = f"told to stop by {self.signum.name}, and not done with it after {self.deadline_seconds:g} s"
        os.write(2, f"shardopt: {text}: what was not saved by now is lost\n".encode())
        sys.stdout.flush()
        os._exit(self.exit_code or 1)


_listening: weakref.WeakSet[Stop] = weakref.WeakSet()
_masks = threading.local()


def _before_fork() -> None:
    # A child that is told while it still has this process's handler would tell this process, by the pipe they share.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {stop.signum for stop in tuple(_listening)})


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    for stop in tuple(_listening):
        stop.forget_in_child()
    _listening.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
