"""Ranks for tests: real processes under a deadline, with faults given as data.

    def work(scale):                       # at module level: the ranks import it by name
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones) * scale

    assert run_ranks(4, work, 2.0) == [8.0] * 4

In a file that says `RANKS_STAY = True` they stay for the next call. `run_ranks_outcomes` is for tests in which ranks
fail or die on purpose.
"""

from tests.harness.faults import Fault, each_operation
from tests.harness.outcome import Outcome, RankException
from tests.harness.ranks import RanksFailed, run_ranks, run_ranks_outcomes

__all__ = [
    "Fault",
    "Outcome",
    "RankException",
    "RanksFailed",
    "each_operation",
    "run_ranks",
    "run_ranks_outcomes",
]
