"""What a rank knows of one session: reports that came, answers, signs of life, sections."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from shardopt.ranks.connections.halting import Halting
from shardopt.ranks.connections.runs import pack_runs, unpack_runs

_TOGETHER_BYTES = 1 << 20  # of reports in one message, or the one that is longer: who joins them has a copy


class Gathering:
    """The reports of one round: equal ones are counted, and each is passed on once with the ranks that have it."""

    def __init__(self) -> None:
        self.reported: set[int] = set()
        self._new: dict[bytes, list[int]] = {}

    def add(self, report: bytes, ranks: Iterable[int]) -> None:
        """Notes the report of some ranks; a second one of the same rank is dropped."""
        new = [rank for rank in ranks if rank not in self.reported]
        if new:
            self.reported.update(new)
            self._new.setdefault(report, []).extend(new)

    def take(self) -> list[tuple[bytes, list[int]]]:
        """Returns what has come since the last time: reports, each with its ranks, ascending."""
        new, self._new = self._new, {}
        return [(report, sorted(ranks)) for report, ranks in new.items()]


def pack_reports(reports: Iterable[tuple[bytes, Sequence[int]]]) -> Iterator[bytes]:
    """Encodes reports with their ranks, many together: their runs and lengths as JSON, a line feed, and all reports.

    A message for each would take rank 0 longer than what is in them, where every rank reports its own.
    """
    together: list[tuple[bytes, Sequence[int]]] = []
    nbytes = 0
    for report, ranks in reports:
        if together and nbytes + len(report) > _TOGETHER_BYTES:
            yield _packed(together)
            together, nbytes = [], 0
        together.append((report, ranks))
        nbytes += len(report)
    if together:
        yield _packed(together)


def _packed(reports: Sequence[tuple[bytes, Sequence[int]]]) -> bytes:
    table = [[pack_runs(ranks), len(report)] for report, ranks in reports]
    head = json.dumps(table, separators=(",", ":")).encode()
    return b"".join([head, b"\n", *(report for report, _ in reports)])


def unpack_reports(data: bytes, within: range) -> Iterator[tuple[bytes, list[int]]]:
    """Decodes what `pack_reports` encoded. Raises ValueError, TypeError, LookupError where it did not."""
    head, _, reports = data.partition(b"\n")
    at = 0
    for runs, nbytes in json.loads(head):
        if not 0 <= nbytes <= len(reports) - at:
            raise ValueError(f"a report of {nbytes} bytes")
        yield reports[at : at + nbytes], unpack_runs(runs, within)
        at += nbytes


class Session:
    """One session of a rank, guarded by the lock of its `Centre`.

    Attributes:
        answered: the last round whose answer has passed here.
        gatherings: by round, of rounds that are not answered; at ranks that lead others.
        own: this rank's reports by round, until they are answered.
        answers: by round, for the thread that waits here, or that is still to come.
        signs: how many signs of life came, by rank.
        sections: of the last answers, by round and number, as messages have them; where they are kept for others.
        served: the ranks below that have asked for sections of the last answer.
        wanted: the ranks that wait for a section, by round and number.
        got: sections for the thread that waits here.
        intervals: of all that show life here at present, in seconds.
        beaten: when the last beat was sent.
        halting: where all stop, in sessions for that.
        told: for which round this rank was asked where it is, and what it said.
    """

    def __init__(self) -> None:
        self.answered = 0
        self.gatherings: dict[int, Gathering] = {}
        self.own: dict[int, bytes] = {}
        self.answers: dict[int, bytes] = {}
        self.signs: dict[int, int] = {}
        self.sections: dict[tuple[int, int], bytes] = {}
        self.served: set[int] = set()
        self.wanted: dict[tuple[int, int], list[int]] = {}
        self.got: dict[tuple[int, int], bytes] = {}
        self.intervals: list[float] = []
        self.beaten = 0.0
        self.halting = Halting()
        self.told: tuple[int, str] = (0, "")

    def gathering(self, number: int) -> Gathering:
        """Returns that of a round, which has begun for somebody."""
        return self.gatherings.setdefault(number, Gathering())

    def sign(self, rank: int) -> None:
        """Notes that a rank shows life."""
        self.signs[rank] = self.signs.get(rank, 0) + 1

    def pass_answer(self, number: int) -> None:
        """Forgets what was only kept until the answer of a round came by."""
        if number > self.answered:
            self.answered = number
            self.served.clear()
        for kept in (self.gatherings, self.own):
            for each in [each for each in kept if each <= number]:
                del kept[each]
        # Those of the round before stay: this answer may be that a rank is lost, while others still fetch theirs.
        for key in [key for key in self.sections if key[0] < number - 1]:
            del self.sections[key]

    def missing(self, number: int, ranks: Sequence[int]) -> list[int]:
        """Returns those of some ranks whose report of a round has not come."""
        gathering = self.gatherings.get(number)
        return [rank for rank in ranks if gathering is None or rank not in gathering.reported]
