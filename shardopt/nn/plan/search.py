"""The search for a plan: largest tables first onto the least loaded ranks, then those of the busiest rank again.

A target of seconds decides how finely a table is cut: the cut with the fewest total seconds that keeps all ranks within
the target. Targets rise from a bound that no plan beats. Then tables of the busiest rank, alone and with one or two
others, are taken out and placed again under a target below the cost so far, until nothing improves or the work is
spent. All is deterministic, so that each rank finds the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice, permutations
from typing import NamedTuple

import numpy as np

from shardopt.nn.plan.costs import Candidate, Ints

_TARGETS = (1.002, 1.02, 1.05, 1.1, 1.25, 1.5, float("inf"))  # of the bound
_TRIALS = 200  # of taking out and placing again, less if tables times ranks are many
_WORK = 100_000_000
_NEAR = 1.001  # the bound: no more is tried
_SLIGHTLY = 1e-9


class Placed(NamedTuple):
    """A cut of a table, and the rank of each piece."""

    cut: Candidate
    ranks: Ints


class Board:
    """The ranks with the pieces placed so far.

    Args:
        memory: bytes of each rank.
        tables: the candidates of each table, those with the fewest total seconds first.
        like: a plan of these tables.
    """

    def __init__(self, memory: Sequence[int], tables: Sequence[Sequence[Candidate]], like: Board | None = None) -> None:
        self._tables = tables
        self._everyone = np.arange(len(memory))
        # Tables that are not placed yet count with what they cost every rank in an earlier plan, or the least that they
        # can: otherwise those placed first take room that is not there.
        earlier = [min(cuts, key=lambda cut: cut.everywhere) for cuts in tables]
        if like is not None:
            earlier = [like.placed[table].cut for table in range(len(tables))]
        self._expected = [cut.everywhere for cut in earlier]
        self._everywhere = sum(self._expected)
        self._loads = np.zeros(len(memory))
        self.free = np.array(memory, dtype=np.int64)
        self.placed: dict[int, Placed] = {}

    @property
    def seconds(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Of each rank."""
        return self._loads + self._everywhere

    @property
    def cost(self) -> float:
        """The seconds of the busiest rank."""
        return float(self._loads.max()) + self._everywhere

    def put(self, table: int, placed: Placed, sign: int = 1) -> None:
        """Adds the pieces of a table; with sign -1 takes them away."""
        cut, ranks = placed
        self._everywhere += sign * (cut.everywhere - self._expected[table])
        self._loads[ranks] += sign * cut.seconds
        self.free[ranks] -= sign * cut.bytes
        if sign > 0:
            self.placed[table] = placed
        else:
            del self.placed[table]

    def place(self, table: int, target: float, memory_first: bool = False) -> bool:
        """Places a table by its first cut within the target; if none is, by that with the lowest cost.

        Args:
            table: its index.
            target: seconds of the busiest rank.
            memory_first: whether pieces go to the ranks with the most free memory, not to the least loaded ones.

        Returns:
            False where no cut fits the memory; nothing is placed then.
        """
        order = np.argsort(-self.free if memory_first else self._loads, kind="stable")
        free, least_free = self.free[order], int(self.free.min())
        highest, least = float(self._loads.max()), float(self._loads.min())
        best: tuple[float, Candidate, Ints] | None = None
        for cut in self._tables[table]:
            everywhere = self._everywhere + cut.everywhere - self._expected[table]
            at_least = least + cut.most_seconds + everywhere
            if at_least > target and best is not None and at_least >= best[0]:
                continue
            all_fit = cut.most_bytes <= least_free and not cut.is_fixed  # as most do, which saves a search
            ranks = order[: cut.count] if all_fit else self._ranks_for(cut, order, free)
            if ranks is None:
                continue
            # As if the largest piece were the most loaded rank's: the seconds of every piece take long to compute.
            cost = max(highest, float(self._loads[ranks].max()) + cut.most_seconds) + everywhere
            if best is None or cost < best[0] or cost <= target:
                best = cost, cut, ranks
            if cost <= target:
                break
        if best is None:
            return False
        _, cut, ranks = best
        self.put(table, Placed(cut, np.sort(ranks)))  # as a `Grid` has its ranks
        return True

    def _ranks_for(self, cut: Candidate, order: Ints, free: Ints) -> Ints | None:
        if cut.is_fixed:
            ranks = self._everyone if cut.shape.name else np.array(cut.shape.ranks)
            free = self.free[ranks]
            return ranks if free.min() >= cut.most_bytes or (free >= cut.bytes).all() else None
        fitting = order[free >= cut.most_bytes][: cut.count]
        return None if len(fitting) < cut.count else fitting


def lower_bound(tables: Sequence[Sequence[Candidate]], ranks: int) -> float:
    """Returns seconds that the busiest rank of no plan stays below.

    A plan whose largest piece takes x seconds has no cut with a larger one. One rank has that piece, and what tables
    cost every rank; and the busiest one has no less than the mean. The larger of both, for the best x, is the bound.
    """
    everywhere, total = [np.inf] * len(tables), [np.inf] * len(tables)  # of each table the least with pieces up to x
    cuts = [(cut.most_seconds, table, cut.everywhere, cut.total) for table, cuts in enumerate(tables) for cut in cuts]
    on_all = mean = 0.0
    without, bound = len(tables), np.inf
    for most, table, here, seconds in sorted(cuts):
        if everywhere[table] == np.inf:
            without, everywhere[table], total[table] = without - 1, here, seconds
            on_all, mean = on_all + here, mean + seconds / ranks
        if here < everywhere[table]:
            on_all, everywhere[table] = on_all + here - everywhere[table], here
        if seconds < total[table]:
            mean, total[table] = mean + (seconds - total[table]) / ranks, seconds
        if not without:
            bound = min(bound, max(most + on_all, mean))
    return float(bound) * (1 - _SLIGHTLY)  # sums are rounded


def search(memory: Sequence[int], tables: Sequence[Sequence[Candidate]]) -> Board | None:
    """Returns the best plan found; None if none was found that fits the memory."""
    bound = lower_bound(tables, len(memory))
    order = sorted(range(len(tables)), key=lambda table: (-tables[table][0].total, table))
    best: Board | None = None
    for target in _TARGETS:
        board = _greedy(memory, tables, order, bound * target, best)
        if board is not None and (best is None or board.cost < best.cost):
            best = board
        if best is not None and best.cost <= bound * target:
            break  # a target that is no lower gives no better plan
    if best is None:
        best = _by_memory(memory, tables)
    if best is not None:
        _improve(best, bound)
    return best


def _greedy(
    memory: Sequence[int],
    tables: Sequence[Sequence[Candidate]],
    order: Sequence[int],
    target: float,
    like: Board | None = None,
    memory_first: bool = False,
) -> Board | None:
    board = Board(memory, tables, like)
    return board if all(board.place(table, target, memory_first) for table in order) else None


def _by_memory(memory: Sequence[int], tables: Sequence[Sequence[Candidate]]) -> Board | None:
    """Returns a plan that fits tight memory: the largest first, as few pieces as fit, or as small ones as there are."""
    order = sorted(range(len(tables)), key=lambda table: (-tables[table][0].bytes.sum(), table))
    smallest = [sorted(cuts, key=lambda cut: (cut.most_bytes, cut.total)) for cuts in tables]
    boards = (_greedy(memory, each, order, float("inf"), memory_first=True) for each in (tables, smallest))
    return next((board for board in boards if board is not None), None)


def _improve(board: Board, bound: float) -> None:
    """Takes tables of the busiest rank out and places them again, while that lowers the cost."""
    trials = min(_TRIALS, _WORK // (len(board.free) * len(board.placed)))
    while board.cost > bound * _NEAR and trials > 0:
        for tables in islice(_on_busiest(board), trials):
            trials -= 1
            if _again(board, tables):
                break
        else:
            return


def _on_busiest(board: Board) -> Iterator[tuple[int, ...]]:
    """Yields sets of tables to place again: of the busiest rank each alone, with another, and with two others."""
    busiest = int(board.seconds.argmax())
    here = [table for table, (_, ranks) in board.placed.items() if (ranks == busiest).any()]
    others = [table for table in board.placed if table not in here]
    yield from ((table,) for table in here)
    yield from ((a, b) for a in here for b in others)
    yield from combinations(here, 2)
    yield from combinations(board.placed, 3)


def _again(board: Board, tables: tuple[int, ...]) -> bool:
    """Places these tables again; returns whether the cost is lower. Otherwise nothing has changed."""
    target = board.cost * (1 - _SLIGHTLY)
    before = {table: board.placed[table] for table in tables}
    for order in permutations(tables):
        for table in tables:
            board.put(table, board.placed[table], -1)
        done = all(board.place(table, target) for table in order)
        if done and board.cost < target:
            return True
        for table in tables:
            if table in board.placed:
                board.put(table, board.placed[table], -1)
        for table in tables:
            board.put(table, before[table])
    return False
