"""Stops a job after a signal to any of its ranks: all ranks stop after the same step.

Ranks ask once a step, each for itself, and as long as none of them got the signal nothing is sent and nobody waits. The
one that did has the others say how far they have come, by the threads that serve their connections, and all stop at the
next place, which none has passed (`ranks/connections/halting.py`). Questions are counted, not the program's own steps,
of which a program may leave some out.

Nobody answers for a rank that never comes to ask. So a process that gets the signal, or sees "stop", ends after a
deadline, whatever it is in: a thread ends it (`runtime/signals.py`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from typing import NoReturn
from weakref import WeakKeyDictionary, ref

from shardopt.checkpoint.run.options import Preemption
from shardopt.ranks import Halt, Ranks
from shardopt.runtime.signals import Listener
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")
_QUESTION = "whether to stop"
_MESSAGE_SECONDS = 1.0  # to write the message of a process that is late
_asked_last: WeakKeyDictionary[object, ref[Stop]] = WeakKeyDictionary()  # by the thread that asked; none is closed
_warned_of_turns = False


class Stop:
    """Listens for a signal from its construction, in the main thread, until it is closed.

    Args:
        preemption: the signals, by any of which this process is to stop, and how it ends. Its seconds count from the
            signal, or from the answer that all stop.
    """

    def __init__(self, preemption: Preemption) -> None:
        signals, self._exit_code = preemption.all_signals, preemption.exit_code
        self._first, self.grace_seconds = signals[0], preemption.seconds
        self._got: signal.Signals | None = None
        self._signaled = world().event()
        self._halt: tuple[Ranks, Halt] | None = None  # of the ranks that asked last: a program may make others
        self._asked = 0  # questions so far
        self._asking = False
        self._asked_for: int | None = None  # the step of the last one
        self._stops_at: int | None = None
        self._deadline_runs = world().lock()  # acquired for good once it does
        self._listeners: list[Listener] = []
        try:
            for each in signals:
                self._listeners.append(Listener(each, partial(self._note, each), partial(self._on_signal, each)))
        except BaseException:
            self.close()
            raise

    @property
    def exit_code(self) -> int:
        """The exit code of a process that was stopped."""
        return 128 + (self._got or self._first) if self._exit_code is None else self._exit_code

    def after(self, step: int, ranks: Ranks) -> bool:
        """Whether all ranks must stop after this step.

        Every rank asks for the same steps, in the same order; the first question is collective, the others are not.

        Raises:
            RankError: at the first question, a rank that did not ask; once all are to stop, one that does not answer.
        """
        if step != self._asked_for and not self._asking:  # a handler may ask in the middle of a question
            self._warn_of_turns()
            self._asking = True
            try:
                if self._stops_at is None:
                    if self._halt is None or self._halt[0] is not ranks:
                        self._halt = ranks, ranks.halt(_QUESTION)
                    # None while nobody wants to: this rank is past this question then.
                    self._stops_at = self._halt[1].at(self._asked + 1, self._signaled.is_set())
                    if self._stops_at is not None:
                        self._start_deadline()
            finally:
                self._asking = False
            # Not before: a question that was interrupted is asked again, or this rank would count fewer than others.
            self._asked_for, self._asked = step, self._asked + 1
        return self._stops_at is not None and self._asked >= self._stops_at

    def _warn_of_turns(self) -> None:
        """Warns once if this thread has asked another one since it asked this one.

        After a signal the one that is asked first saves and ends the process, and what only the other saves is lost.
        """
        global _warned_of_turns
        thread = world().current_thread()
        last = _asked_last.get(thread, lambda: None)()
        if self._asked and last is not None and last is not self and not _warned_of_turns:
            _warned_of_turns = True
            _log.warning(
                "two Managers with stop_on are used in turns: after a signal the first one that is asked saves and "
                "exits, and what only the other saves is lost; put both into one app and one Manager [run-root]"
            )
        _asked_last[thread] = ref(self)

    def leave(self) -> NoReturn:
        """Raises SystemExit with the exit code, so that the program cleans up as it ends."""
        raise SystemExit(self.exit_code)

    def close(self) -> None:
        """Stops listening and restores the signal's earlier handler; does nothing once the signal has come."""
        for thread in [each for each, last in _asked_last.items() if last() is self]:
            del _asked_last[thread]
        if not self._signaled.is_set() and self._stops_at is None:
            for listener in reversed(self._listeners):
                listener.close()

    def _note(self, signum: signal.Signals) -> None:
        """Notes the signal. Runs between any two instructions of the main thread, and so without a lock."""
        if self._got is None:
            self._got = signum
        self._signaled.set()

    def _on_signal(self, signum: signal.Signals) -> None:
        self._note(signum)
        self._start_deadline()

    def _start_deadline(self) -> None:
        """Starts the deadline, once."""
        if self._deadline_runs.acquire(blocking=False):
            world().timer(self.grace_seconds, self._give_up, "shardopt-stop").start()

    def _give_up(self) -> None:
        text = f"asked to stop by {(self._got or self._first).name}, but not done after {self.grace_seconds:g} s"
        # In a thread, as either may wait for a reader, or for a lock that the main thread holds.
        lost = f"{text}: what was not saved by now is lost"
        message = world().thread(partial(_write_message, lost), daemon=True)
        message.start()
        message.join(_MESSAGE_SECONDS)
        os._exit(self.exit_code or 1)


def _write_message(text: str) -> None:
    os.write(2, f"shardopt: {text}\n".encode())
    sys.stdout.flush()
