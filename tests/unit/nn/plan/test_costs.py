"""The cost model: rows of a step against draws, and bytes and seconds against sums written out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.nn.plan.costs import Candidate, Shape, TableSize, candidates, chunks, distinct_rows
from tests.unit.nn.plan.sets import job

TABLE = TableSize("t", 1000, 64, 2, 3.0, 0.0, 4, 4, is_pooled=False)


def cut(shape, ranks=4, **figures):
    """The only candidate of TABLE with a kept cut."""
    (made,) = candidates(TABLE._replace(kept=shape), job((10**9,) * ranks, batch=10, **figures))
    return made


@given(st.integers(1, 300), st.integers(1, 20))
def test_parts_are_those_of_torch_chunk(size, parts):
    sizes = [len(part) for part in torch.arange(size).chunk(parts)]
    assert chunks(size, parts).tolist() == sizes + [0] * (parts - len(sizes))


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.0, 1.5])
@pytest.mark.parametrize("rows", [1, 40, 3000])
def test_distinct_rows_are_the_mean_of_draws(rows, skew):
    share = np.arange(1, rows + 1.0) ** -skew
    draws = np.random.default_rng(0).choice(rows, (400, 500), p=share / share.sum())
    mean = np.mean([len(np.unique(each)) for each in draws])
    assert distinct_rows(rows, 500, skew) == pytest.approx(mean, rel=0.01)


def test_distinct_rows_of_a_huge_table_are_its_ids():
    assert distinct_rows(10**10, 1000, 0.0) == pytest.approx(1000, rel=1e-6)


def test_distinct_rows_are_the_same_where_functions_have_other_last_bits(monkeypatch):
    """As numpy's have on CPUs with AVX-512."""
    cases = [(rows, ids, skew) for rows in (40, 2_600, 10**6) for ids in (300.0, 20_000.0) for skew in (0.0, 0.8, 1.05)]
    here = [distinct_rows(*case) for case in cases]
    for module, name in ((np, "log1p"), (np, "expm1"), (np, "sqrt"), (math, "log1p"), (math, "expm1")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, function=function: np.nextafter(function(x), np.inf))
    assert [distinct_rows(*case) for case in cases] == here


def test_seconds_of_a_grid_are_those_of_the_text():
    """Rows of 2 parts, columns of 2, on 4 ranks: each piece by the formulas of the module, term by term."""
    made = cut(Shape(2, 2, (0, 1, 2, 3)), memory_bandwidth=1e9, exchange_bandwidth=1e6, travel_bytes=4)
    asked, touched = distinct_rows(1000, 30, 0), distinct_rows(1000, 120, 0)
    to_one = 0.5 * asked * (8 + 2 * 32 * 4)
    traffic = 0.5 * 4 * asked * (32 * (2 + 3 * 4) + 128) + 0.5 * touched * 2 * (32 * (2 + 4) + 4)
    shared = 2 * 0.5 * touched * 4
    held, own = 3 * to_one, 3 * to_one  # by 3 others, and of the 3 pieces that are elsewhere
    expected = (held + own + shared) / 1e6 + traffic / 1e9 + 2 * 20e-6
    assert made.everywhere + made.seconds == pytest.approx([expected] * 4)
    assert made.bytes.tolist() == [500 * (32 * 6 + 4)] * 4


def test_a_replica_sends_gradients_and_no_vectors():
    made = cut(Shape(1, 1, None, "replicated"), memory_bandwidth=1e9, exchange_bandwidth=1e6)
    asked, touched = distinct_rows(1000, 30, 0), distinct_rows(1000, 120, 0)
    traffic = asked * 64 * 2 + 4 * asked * (64 * 2 * 4 + 128) + touched * 2 * (64 * 6 + 4)
    expected = 2 * 3 * asked * (8 + 64 * 4) / 1e6 + traffic / 1e9 + 20e-6
    assert made.everywhere + made.seconds == pytest.approx([expected] * 4)
    assert made.bytes.tolist() == [1000 * (64 * 6 + 4)] * 4


def test_sums_of_bags_travel_where_they_are_fewer_than_rows():
    """10 samples of 30 ids, rows of 2 parts and columns of 2: 20 sums of each column, and 300 ids with 20 lengths."""
    table = TABLE._replace(pooling=30.0, is_pooled=True)
    figures = {"memory_bandwidth": 1e9, "exchange_bandwidth": 1e6, "travel_bytes": 4}
    (made,) = candidates(table._replace(kept=Shape(2, 2, (0, 1, 2, 3))), job((10**9,) * 4, batch=10, **figures))
    touched = distinct_rows(1000, 1200, 0)
    to_one = 0.5 * (8 * (300 + 20) + 2 * 20 * 32 * 4)
    traffic = 0.5 * 4 * (32 * (300 * (2 + 4) + 2 * 20 * 4) + 300 * 128) + 0.5 * touched * 2 * (32 * (2 + 4) + 4)
    shared = 2 * 0.5 * touched * 4
    expected = (2 * 3 * to_one + shared) / 1e6 + traffic / 1e9 + 2 * 20e-6
    assert made.everywhere + made.seconds == pytest.approx([expected] * 4)
    (many,) = candidates(table._replace(kept=Shape(64, 1)), job((10**9,) * 64, batch=10, **figures))
    (rows,) = candidates(table._replace(kept=Shape(64, 1), is_pooled=False), job((10**9,) * 64, batch=10, **figures))
    assert many.total == rows.total  # 640 sums would be more than 300 ids


def test_one_rank_exchanges_nothing():
    assert cut(Shape(1, 1), ranks=1, exchange_bandwidth=1.0).everywhere == 0.0
    assert cut(Shape(1, 1), ranks=1, exchange_bandwidth=1.0).seconds < 1.0


@given(st.integers(1, 50), st.integers(1, 130), st.integers(1, 9))
def test_totals_are_the_sums_of_pieces(rows, columns, ranks):
    for made in candidates(TABLE._replace(rows=rows, columns=columns), job((1,) * ranks)):
        assert made.total == pytest.approx(ranks * made.everywhere + made.seconds.sum())
        assert (made.count, made.most_bytes) == (len(made.seconds), made.bytes.max())
        assert made.most_seconds == pytest.approx(made.seconds.max())
        if made.shape.name != "replicated":
            assert made.bytes.sum() == rows * columns * 6 + rows * 4 * sum(chunks(columns, made.shape.columns) > 0)


def test_columns_are_cut_where_rows_are_too_few():
    shapes = {made.shape for made in candidates(TABLE._replace(rows=1), job((1,) * 4))}
    assert Shape(1, 2) in shapes and Shape(1, 4, None, "columns") in shapes
    assert not any(made.shape.columns == 4 for made in candidates(TABLE._replace(rows=1, columns=63), job((1,) * 4)))


@given(st.integers(1, 200), st.sampled_from([16, 48, 64, 200]), st.integers(2, 16))
def test_what_is_left_out_is_no_better(rows, columns, ranks):
    """Each grid with columns costs and holds at least as much as a candidate with as many pieces."""
    table, of = TABLE._replace(rows=rows, columns=columns), job((1,) * ranks)
    there: list[Candidate] = candidates(table, of)
    for power in range(1, 4):
        for down in (1, 2, 4):
            across = 1 << power
            full = chunks(rows, down).min() > 0 and chunks(columns, across).min() > 0
            if down * across > ranks or not full or columns // across < of.narrowest:
                continue
            (grid,) = candidates(table._replace(kept=Shape(down, across)), of)
            assert any(
                each.most_seconds + each.everywhere <= (grid.most_seconds + grid.everywhere) * (1 + 1e-9)
                and each.most_bytes <= grid.most_bytes
                and each.total <= grid.total * (1 + 1e-9)
                for each in there
                if each.count <= grid.count
            )
