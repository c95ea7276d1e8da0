"""One rank's knowledge of a session: reports, answers, signs of life, sections, and where all ranks stop.

Where ranks that count their steps stop together: nobody asks anybody, until one of them wants to.

Each rank notes here which place it has passed. One that wants all to stop says so to rank 0, which has every rank
freeze: from then on nobody passes another place, and the threads of all ranks say, without the program, how far it has
come. The place after the foremost is where all stop, and those behind continue up to it.

message    from          to            what
HALT       any           rank 0        all are to stop
FREEZE     rank 0        all           wait at the next place, and say which was the last
PASSED     any           rank 0        that one; leaders send the foremost of their block
HALT_AT    rank 0        all           where to stop
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

_TOGETHER_BYTES = 1 << 20  # of reports in one message, or the one that is longer: who joins them has a copy


class Gathering:
    """The reports of one round, each two lines of JSON.

    They go to rank 0 by columns, as JSON: of a block's first lines, and of its second ones, which of the distinct lines
    each rank has, and these. Blocks whose columns are equal are decoded once.
    """

    def __init__(self) -> None:
        self.reported: set[int] = set()
        self._new: dict[bytes, list[int]] = {}
        self._packed: dict[bytes, list[int]] = {}

    def add(self, report: bytes, rank: int) -> None:
        """Notes the report of a rank; drops a second one."""
        if rank not in self.reported:
            self.reported.add(rank)
            self._new.setdefault(report, []).append(rank)

    def add_packed(self, columns: bytes, ranks: Sequence[int]) -> None:
        """Notes reports that another rank took from its gathering."""
        self.reported.update(ranks)
        self._packed.setdefault(columns, []).extend(ranks)

    def take(self) -> dict[bytes, list[int]]:
        """Returns the reports since the last call by columns, as JSON, with their ranks."""
        together: dict[int, bytes] = {}
        nbytes = 0
        for report, ranks in self._new.items():
            nbytes += len(report)
            if together and nbytes > _TOGETHER_BYTES:
                self.add_packed(*_by_columns(together))
                together, nbytes = {}, len(report)
            together.update(dict.fromkeys(ranks, report))
        if together:
            self.add_packed(*_by_columns(together))
        taken, self._new, self._packed = self._packed, {}, {}
        return taken


def _by_columns(reports: dict[int, bytes]) -> tuple[bytes, list[int]]:
    ranks, columns = sorted(reports), []
    for lines in zip(*(reports[rank].partition(b"\n")[::2] for rank in ranks), strict=True):
        numbers = {line: number for number, line in enumerate(dict.fromkeys(lines))}
        which = [0] if len(numbers) == 1 else [numbers[line] for line in lines]
        columns.append(b"[%b,[%b]]" % (json.dumps(which, separators=(",", ":")).encode(), b",".join(numbers)))
    return b"[%b]" % b",".join(columns), ranks


class Halting:
    """One rank's knowledge of a halt in one session, guarded by the lock of its `MessageHub`.

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
        """Whether this rank may pass a place now; if so, notes it."""
        if self.frozen:
            return self.at is not None and place < self.at
        self.passed = place
        return True

    def freeze(self, below: Iterable[int]) -> None:
        """Makes this rank wait where it is, and waits for the answers of ranks below."""
        self.frozen, self.foremost, self.waits_for = True, self.passed, set(below)

    def answer(self, rank: int, passed: int) -> None:
        """Notes how far a rank below, with all ranks below it, has come."""
        self.foremost = max(self.foremost, passed)
        self.waits_for.discard(rank)


class Session:
    """One session of a rank, guarded by the lock of its `MessageHub`.

    Attributes:
        answered: the last round whose answer has passed here.
        gatherings: by round, of rounds that are not answered; at ranks that lead others.
        own: this rank's reports by round, until they are answered.
        answers: by round, for the thread that waits here, or that is still to come.
        signs: how many signs of life came, by rank.
        section: the last one that came for this rank, with its round: before the answer.
        receivers: the ranks that get the section which comes next; none where it is this one alone.
        intervals: of all that show life here at present, in seconds.
        beaten: when the last beat was sent.
        halting: where all stop, in sessions for that.
        told: for which round this rank was asked where it is, and what it said.
    """

    def __init__(self) -> None:
        self.answered = 0
        self.gatherings: defaultdict[int, Gathering] = defaultdict(Gathering)
        self.own: dict[int, bytes] = {}
        self.answers: dict[int, bytes] = {}
        self.signs: dict[int, int] = {}
        self.section: tuple[int, bytes] = (0, b"")
        self.receivers: list[int] = []
        self.intervals: list[float] = []
        self.beaten = 0.0
        self.halting = Halting()
        self.told: tuple[int, str] = (0, "")

    def sign(self, rank: int) -> None:
        """Notes a rank's sign of life."""
        self.signs[rank] = self.signs.get(rank, 0) + 1

    def pass_answer(self, number: int) -> None:
        """Drops what was kept only until the answer of a round passed."""
        self.answered = max(self.answered, number)
        for kept in (self.gatherings, self.own):
            for each in [each for each in kept if each <= number]:
                del kept[each]
        if self.section[0] < number:
            self.section = (0, b"")

    def missing(self, number: int, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks, of these, whose report of a round has not come."""
        reported = self.gatherings[number].reported
        return [rank for rank in ranks if rank not in reported]
