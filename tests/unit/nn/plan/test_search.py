"""The search: near the best plan there is, never over the memory, the same each time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.nn.plan.costs import candidates
from shardopt.nn.plan.search import lower_bound, search
from tests.unit.nn.plan.sets import has_plan_below, job, large_set, small_set


def near_the_best(seed):
    tables, of = small_set(seed)
    cuts = [candidates(table, of) for table in tables]
    board = search(of.memory, cuts)
    return not has_plan_below(float("inf") if board is None else board.cost / 1.05, of.memory, cuts)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 200), marks=pytest.mark.exhaustive)], ids=str)
def test_small_sets_are_within_5_percent_of_the_best_plan(seeds):
    assert [seed for seed in seeds if not near_the_best(seed)] == []


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 200), marks=pytest.mark.exhaustive)], ids=str)
def test_no_plan_is_below_the_bound(seeds):
    for seed in seeds:
        tables, of = small_set(seed)
        cuts = [candidates(table, of) for table in tables]
        assert not has_plan_below(lower_bound(cuts, of.ranks), (10**15,) * of.ranks, cuts), seed


SIZES = [(20, 8), (100, 16), (60, 48)]
LARGE = [(300, 64), (1000, 128), (1000, 1024), (50, 1024)]


@pytest.mark.parametrize(
    ("count", "ranks"), [*SIZES, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in LARGE)]
)
def test_large_sets_are_within_10_percent_of_a_bound(count, ranks):
    tables, of = large_set(count, count, ranks)
    cuts = [candidates(table, of) for table in tables]
    board = search(of.memory, cuts)
    assert board.cost <= 1.1 * lower_bound(cuts, ranks)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.9, 3), st.integers(1, 9))
def test_no_rank_holds_more_than_its_memory(seed, ample, ranks):
    """What ranks hold, added up from the pieces, and not taken from the search's own account."""
    tables, _ = large_set(seed, 6, ranks)
    needed = sum(table.bytes for table in tables) / ranks
    of = job(int(needed * ample * (1 + rank % 2)) for rank in range(ranks))
    board = search(of.memory, [candidates(table, of) for table in tables])
    held = [0] * ranks
    for cut, on in board.placed.values() if board else ():
        assert len({*on.tolist()}) == cut.count
        for rank, size in zip(on.tolist(), cut.bytes.tolist(), strict=True):
            held[rank] += size
    assert all(size <= memory for size, memory in zip(held, of.memory, strict=True))


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_what_rows_on_all_ranks_fit_is_planned(seed, ranks):
    tables, _ = large_set(seed, 6, ranks)
    most = sum(-(-table.rows // ranks) * (table.columns * 4 + 4) for table in tables)
    of = job((most,) * ranks)
    assert search(of.memory, [candidates(table, of) for table in tables]) is not None


def test_equal_tables_have_equal_plans():
    found = []
    for _ in range(2):
        tables, of = small_set(7)
        board = search(of.memory, [candidates(table, of) for table in tables])
        found.append({table: (cut.shape, on.tolist()) for table, (cut, on) in board.placed.items()})
    assert found[0] == found[1]
