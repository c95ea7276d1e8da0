"""Where ranks that count their steps stop together: nobody asks anybody, until one of them wants to.

Each rank notes here which place it has passed. One that wants all to stop says so to rank 0, which has every rank
freeze: from then on nobody passes another place, and the threads of all ranks say, without the program, how far it has
come. The place after the foremost is where all stop, and those behind go on up to it.

message    from          to            what
HALT       any           rank 0        all are to stop
FREEZE     rank 0        all           wait at the next place, and say which was the last
PASSED     any           rank 0        that one; leaders send the foremost of their block
HALT_AT    rank 0        all           where to stop
"""

from __future__ import annotations

from collections.abc import Iterable


class Halting:
    """What a rank knows of this in one session, guarded by the lock of its `Centre`.

    Attributes:
        passed: the last place that this rank has passed.
        wanted: whether this rank or one below has asked for it.
        frozen: whether nobody may pass any place before it is known where to stop.
        at: where all stop; None until it is known.
        foremost: of this rank, and of those below that have answered.
        waits_for: the ranks below that have not.
    """

    def __init__(self) -> None:
        self.passed = self.foremost = 0
        self.wanted = self.frozen = False
        self.at: int | None = None
        self.waits_for: set[int] = set()

    def passes(self, place: int) -> bool:
        """Whether this rank may pass a place now; notes it then."""
        if self.frozen:
            return self.at is not None and place < self.at
        self.passed = place
        return True

    def freeze(self, below: Iterable[int]) -> None:
        """Has this rank wait where it is, and waits for the answers of those below."""
        self.frozen, self.foremost, self.waits_for = True, self.passed, set(below)

    def answer(self, rank: int, passed: int) -> None:
        """Notes how far a rank below, with all below it, has come."""
        self.foremost = max(self.foremost, passed)
        self.waits_for.discard(rank)
