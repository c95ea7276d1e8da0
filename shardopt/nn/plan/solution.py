"""A plan without torch: checks its arguments, searches, and says what was found."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.errors import InputError, OptionError, Problem
from shardopt.nn.plan.costs import Candidate, Job, Shape, TableSize, candidates
from shardopt.nn.plan.search import Placed, lower_bound, search

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
STATES: Mapping[str, tuple[int, int]] = {
    "sgd": (0, 0),
    "adagrad": (1, 0),
    "adam": (2, 0),
    "sparseadam": (2, 0),
    "rowwiseadagrad": (0, 1),
    "rowwiseadam": (1, 1),
}
"""Algorithm → elements of state for each element, in the table's dtype, and for each row, in at least float32."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The cut of each table, with the ranks of its pieces.

    Args:
        shapes: of the tables, in their order, with ranks; the name of a cut only where it says those ranks.
        bytes_per_rank: of tables and state.
        seconds_per_rank: of a step.
        bound: seconds that the busiest rank of no plan of the cuts tried stays below.
        why: table → a line.
    """

    shapes: tuple[Shape, ...]
    bytes_per_rank: tuple[int, ...]
    seconds_per_rank: tuple[float, ...]
    bound: float
    why: dict[str, str]

    def lines(self) -> list[tuple[str, ...]]:
        """Returns a table of the tables, and one of the ranks: all of them if they are few."""
        rows = [("table", "cut"), *self.why.items(), ("",), ("rank", "bytes", "step")]
        held, seconds = self.bytes_per_rank, self.seconds_per_rank
        names = [str(rank) for rank in range(len(held))]
        if len(held) > 16:
            names, held = ["least", "mean", "most"], (min(held), sum(held) // len(held), max(held))
            seconds = min(seconds), sum(seconds) / len(seconds), max(seconds)
        each = zip(names, map(size, held), map(duration, seconds), strict=True)
        return [*rows, *each]


def solve(tables: Sequence[TableSize], job: Job) -> Solution:
    """Plans tables.

    Raises:
        InputError: no plan was found that fits the memory.
    """
    cuts = [candidates(table, job) for table in tables]
    board = search(job.memory, cuts)
    if board is None:
        raise _too_large(tables, cuts, job)
    placed = [board.placed[number] for number in range(len(tables))]
    return Solution(
        tuple(_shape(each, job.ranks) for each in placed),
        tuple(m - f for m, f in zip(job.memory, board.free.tolist(), strict=True)),
        tuple(board.seconds.tolist()),
        lower_bound(cuts, job.ranks),
        {
            table.name: _why(table, each, all_, float(board.seconds.sum()))
            for table, each, all_ in zip(tables, placed, cuts, strict=True)
        },
    )


def _shape(placed: Placed, ranks: int) -> Shape:
    shape = placed.cut.shape
    return shape if shape.name else Shape(shape.rows, shape.columns, tuple(placed.ranks.tolist()))


def _why(table: TableSize, placed: Placed, cuts: Sequence[Candidate], total: float) -> str:
    cut = placed.cut
    shape = cut.shape
    share = f"{100 * cut.total / total:.0f}% of the load" if total else "no load"
    each = f"{size(cut.most_bytes)}{' each' if cut.count > 1 else ''}, {share}"
    held_by = _ranks(placed.ranks.tolist())
    if shape.name == "replicated":
        text = f"replicated: {each}"
    elif cut.count == 1:
        return f"whole on {held_by}: {each}{'; kept' if table.kept else ''}"
    elif shape.name:
        text = f"{shape.name} over all ranks: {each}"
    else:
        grid = f"{shape.rows} x {shape.columns} pieces"
        parts = f"{cut.count} parts of {'rows' if shape.columns == 1 else 'columns'}"
        text = f"{parts if 1 in shape[:2] else grid} on {held_by}: {each}"
    if table.kept:
        return f"{text}; kept"
    whole = next((each for each in cuts if each.count == 1 and each.shape.name is None), None)
    return f"{text}; whole {size(table.bytes)}, {duration(whole.most_seconds)}" if whole else text


def _ranks(ranks: Sequence[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 8 else f"{len(ranks)} ranks"


def _too_large(tables: Sequence[TableSize], cuts: Sequence[Sequence[Candidate]], job: Job) -> InputError:
    pieces = [min(cut.most_bytes for cut in each) for each in cuts]
    largest = max(range(len(tables)), key=lambda number: (pieces[number], -number))
    needed, given = sum(table.bytes for table in tables), sum(job.memory)
    problems = [
        Problem(
            "memory_bytes",
            f"{size(given)} on {job.ranks} ranks, at most {size(max(job.memory))} on one",
            f"{size(needed)} for weights and state; the largest piece that cannot be cut is {size(pieces[largest])} "
            f"of {tables[largest].name!r}",
            "give more ranks or memory, a dtype of fewer bytes, or less optimizer state, such as rowwiseadagrad's",
        )
    ]
    return InputError("no plan was found that fits the memory of the ranks", problems)


def size(count: float) -> str:
    """Returns a number of bytes as a text, in units of 1000."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def duration(seconds: float) -> str:
    """Returns seconds as a text, such as "1.2 ms"."""
    return _scaled(seconds * 1e6, 1000, ("us", "ms", "s"))


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / step, power + 1
    exact = (power == 0 and value == int(value)) or value >= 99.5
    return f"{value:.{0 if exact else 1}f} {units[power]}"


def travel_bytes(dtypes: Sequence[str]) -> int:
    """Returns the bytes of an element of the narrowest dtype that holds these."""
    widest = max((DTYPE_BYTES[each] for each in dtypes), default=4)
    return max(widest, 4) if {"bfloat16", "float16"} <= set(dtypes) else widest


def checked_job(
    ranks: Any,
    memory_bytes: Any,
    batch: Any,
    travel: int,
    exchange_bandwidth: Any,
    memory_bandwidth: Any,
    piece_seconds: Any,
    narrowest: Any,
    problems: list[Problem],
) -> Job | None:
    """Returns the job of these arguments; None after adding what is wrong to `problems`."""
    found = list(_wrong_numbers(batch=batch, exchange_bandwidth=exchange_bandwidth, memory_bandwidth=memory_bandwidth))
    if not _is_number(piece_seconds) or piece_seconds < 0:
        found.append(Problem("piece_seconds", repr(piece_seconds), "at least 0, in seconds", "give a time"))
    for name, value in (("ranks", ranks), ("narrowest", narrowest)):
        if not _is_count(value, 1):
            found.append(Problem(name, repr(value), "an int of at least 1", "give how many there are"))
    each = list(memory_bytes) if isinstance(memory_bytes, Sequence) else None
    if not all(_is_count(value, 0) for value in (each if each is not None else [memory_bytes])):
        found.append(Problem("memory_bytes", repr(memory_bytes), "bytes of a rank, or of each, as ints", "give those"))
    elif each is not None and _is_count(ranks, 1) and len(each) != ranks:
        required = f"one for each of {ranks} ranks"
        found.append(Problem("memory_bytes", f"bytes of {len(each)} ranks", required, "give as many, or one for all"))
    problems += found
    if found:
        return None
    memory = tuple(map(int, each)) if each is not None else (int(memory_bytes),) * int(ranks)
    numbers = float(exchange_bandwidth), float(memory_bandwidth), float(piece_seconds)
    return Job(memory, float(batch), travel, *numbers, int(narrowest))


def by_table(name: str, given: Any, tables: Sequence[str], least: float, problems: list[Problem]) -> dict[str, float]:
    """Returns a number for each table, from one for all or a mapping by name; adds what is wrong to `problems`.

    Args:
        name: of the argument.
        given: its value.
        tables: their names.
        least: the number must not be less; 0 itself only where that is negative.
        problems: to which faults are added.
    """
    values = dict(given) if isinstance(given, Mapping) else dict.fromkeys(tables, given)
    for key in [key for key in tables if key not in values]:
        problems.append(Problem(f"{name}[{key!r}]", "nothing", "a number for each table", "add the table, or give one"))
    for key, value in values.items():
        if key not in tables:
            problems.append(
                Problem(f"{name}[{key!r}]", "an unknown table", f"one of {sorted(tables)}", "mend the name")
            )
        elif not _is_number(value) or value < least or (value == least == 0 and name == "pooling"):
            where = f"{name}[{key!r}]" if isinstance(given, Mapping) else name
            problem = Problem(
                where, repr(value), "a number " + ("above 0" if name == "pooling" else "of at least 0"), "give one"
            )
            problems += [problem] if problem not in problems else []
    return values


def refuse(problems: Sequence[Problem]) -> None:
    """Raises OptionError if there are problems."""
    if problems:
        raise OptionError("tables cannot be planned", problems)


def _wrong_numbers(**values: Any) -> Iterator[Problem]:
    units = {"batch": "samples of a rank", "exchange_bandwidth": "bytes/s", "memory_bandwidth": "bytes/s"}
    for name, value in values.items():
        if not _is_number(value) or value <= 0:
            yield Problem(name, repr(value), f"{units[name]}, above 0", "give a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any, least: int) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False
