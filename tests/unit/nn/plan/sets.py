"""Sets of tables for tests of the planner, and an exact search for a plan below a cost."""

import random
from itertools import permutations

from shardopt.nn.plan.costs import Job, TableSize


def small_set(seed):
    """3 to 6 tables on 2 to 4 ranks, with memory from tight to ample."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    tables = [
        TableSize(
            f"t{number}",
            int(10 ** draw.uniform(0.5, 7)),
            draw.choice([8, 16, 32, 64, 128]),
            4,
            draw.choice([1, 2, 10, 50]),
            draw.choice([0.0, 1.0]),
            draw.choice([0, 4]),
            draw.choice([0, 4]),
        )
        for number in range(draw.randint(3, 6))
    ]
    needed = sum(table.bytes for table in tables) / ranks
    memory = tuple(int(needed * draw.choice([1.05, 1.2, 1.5, 10]) * draw.choice([1, 1, 1.2])) + 1 for _ in range(ranks))
    return tables, job(memory, batch=1024)


def large_set(seed, count, ranks):
    """Tables from hundreds to a hundred million rows, of which some are asked for a hundred times as often."""
    draw = random.Random(seed)
    tables = [
        TableSize(
            f"t{number}",
            int(10 ** draw.uniform(2, 8)),
            draw.choice([16, 32, 64, 128]),
            4,
            draw.choice([1, 1, 2, 5, 20, 80]),
            draw.choice([0.0, 0.0, 1.1]),
            0,
            4,
        )
        for number in range(count)
    ]
    return tables, job((80 * 10**9,) * ranks)


def job(memory, batch=4096, **figures):
    usual = {"travel_bytes": 4, "exchange_bandwidth": 25e9, "memory_bandwidth": 2e12, "piece_seconds": 20e-6}
    return Job(tuple(memory), batch, narrowest=16, **usual | figures)


def has_plan_below(limit, memory, tables):
    """Whether any choice of candidates, with any ranks for their pieces, costs less than `limit`: tries them all.

    Only what cannot come below any more is left out: its busiest rank has reached the limit, or the mean of all ranks
    will. So is what was tried already with ranks of other names.
    """
    ranks = len(memory)
    order = sorted(range(len(tables)), key=lambda table: -tables[table][0].total)
    least = [min(cut.total for cut in tables[table]) for table in order]
    tried = set()

    def rest(depth, everywhere, loads, free):
        if depth == len(order):
            return True
        if (ranks * everywhere + sum(loads) + sum(least[depth:])) / ranks >= limit:
            return False
        alike = depth, everywhere, tuple(sorted(zip(loads, free, strict=True)))
        if alike in tried:
            return False
        tried.add(alike)
        for cut in tables[order[depth]]:
            named = range(ranks) if cut.shape.name else cut.shape.ranks
            for chosen in [named] if named else permutations(range(ranks), cut.count):
                then, left = [*loads], [*free]
                for rank, seconds, held in zip(chosen, cut.seconds.tolist(), cut.bytes.tolist(), strict=True):
                    then[rank] += seconds
                    left[rank] -= held
                fits = min(left) >= 0 and max(then) + everywhere + cut.everywhere < limit
                if fits and rest(depth + 1, everywhere + cut.everywhere, tuple(then), tuple(left)):
                    return True
        return False

    return rest(0, 0.0, (0.0,) * ranks, tuple(memory))
