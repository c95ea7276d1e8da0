"""Which steps of a run are saved to its root: multiples of a number, or the first after every so much time."""

from __future__ import annotations

from datetime import timedelta

from shardopt.ranks import Halt, Ranks, SharedGroup
from shardopt.world import world

_QUESTION = "whether it is time to save"


class Due:
    """Says which steps are due. All ranks ask for the same steps, in the same order.

    By time it is rank 0's clock that counts. Until it has come nothing is sent, and nobody waits: then the step after
    the foremost that a rank has passed is due on all of them. Steps are counted here, as a program may leave some out.

    Args:
        every: a number of steps, or a time.
        group: of the ranks of the run.
    """

    def __init__(self, every: int | timedelta, group: SharedGroup) -> None:
        self._steps = None if isinstance(every, timedelta) else int(every)
        self._seconds = every.total_seconds() if isinstance(every, timedelta) else 0.0
        self._group = group
        self._halt: tuple[Ranks, Halt] | None = None  # of the ranks that ask; a new one for each time
        self._next = world().monotonic() + self._seconds
        self._asked, self._asked_for = 0, -1  # questions of this time, and the step of the last one
        self._is_at: int | None = None  # the question at which it is due; None until that is known
        self._were: set[int] = set()

    def at(self, step: int) -> bool:
        """Whether a step is due. By time collective at the first step, and at the first one after one that was due."""
        if self._steps is not None:
            return step % self._steps == 0
        if step != self._asked_for:
            self._ask(step)
        return step in self._were

    def was_at(self, step: int) -> bool:
        """Whether a step that was asked for is due. Local."""
        return step % self._steps == 0 if self._steps is not None else step in self._were

    def may_have_been_at(self, step: int) -> bool:
        """Whether a step that an earlier process has saved may have been due. Local."""
        return self._steps is None or step % self._steps == 0

    def _ask(self, step: int) -> None:
        ranks = self._group.ranks
        if self._is_at is not None and self._asked >= self._is_at:  # it is past: the next time begins
            self._halt, self._asked, self._is_at = None, 0, None
            self._next = world().monotonic() + self._seconds
        if self._is_at is None:
            if self._halt is None or self._halt[0] is not ranks:
                self._halt, self._asked = (ranks, ranks.halt(_QUESTION)), 0
            is_time = ranks.rank == 0 and world().monotonic() >= self._next
            self._is_at = self._halt[1].at(self._asked + 1, is_time)
        # Not before, as a question that was interrupted is asked again.
        self._asked_for, self._asked = step, self._asked + 1
        if self._asked == self._is_at:
            self._were.add(step)
