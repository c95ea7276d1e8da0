"""`plan_tables`: its cuts, what it keeps, what it says, what it refuses."""

import random

import pytest
import torch

from shardopt.algorithms.registry import algorithms, spec_of
from shardopt.errors import AlgorithmError, InputError, OptionError
from shardopt.nn import Grid, Table, TablePlan, plan_tables
from shardopt.nn.plan.solution import DTYPE_BYTES, STATES
from shardopt.nn.plan.tables import _state
from shardopt.nn.table import cut_problems

TABLES = (Table("items", 10_000_000, 64), Table("users", 1_000_000, 32), Table("country", 200, 16, mode="sum"))
GB = 10**9


def plan(tables=TABLES, ranks=4, memory=16 * GB, **options) -> TablePlan:
    usual = {"batch": 1024, "pooling": {"items": 20, "users": 1, "country": 1}, "algorithm": "row_wise_adagrad"}
    return plan_tables(tables, ranks, memory, **usual | options)


def test_tables_come_back_with_another_cut_alone():
    planned = plan().tables
    assert [(table.name, table.num_embeddings, table.mode) for table in planned] == [
        (table.name, table.num_embeddings, table.mode) for table in TABLES
    ]
    assert {type(table.cut) for table in planned} <= {str, Grid}


@pytest.mark.parametrize("seed", range(6))
def test_a_module_takes_the_cuts_of_a_plan(seed):
    draw = random.Random(seed)
    ranks = draw.choice([3, 8, 16])
    sizes = [(int(10 ** draw.uniform(1, 7)), draw.choice([4, 16, 128])) for _ in range(20)]
    tables = [Table(f"t{number}", *size) for number, size in enumerate(sizes)]
    found = plan_tables(tables, ranks=ranks, memory_bytes=10**12, batch=512, pooling=10, algorithm="rowwiseadagrad")
    assert [problem for table in found.tables for problem in cut_problems(table, ranks)] == []


def test_a_large_table_is_cut_and_a_small_one_is_whole():
    items, *_, country = plan(ranks=3, memory=2 * GB).tables
    assert items.cut == "rows" or items.cut.rows * items.cut.columns > 1
    assert (country.cut.rows, country.cut.columns, len(country.cut.ranks)) == (1, 1, 1)


def test_what_does_not_fit_one_rank_is_cut():
    (table,) = plan([TABLES[0]], memory=GB, pooling=1e-6).tables
    assert table.cut == "rows" or table.cut.rows > 2


def test_a_rank_with_more_memory_holds_more():
    found = plan([Table(f"t{number}", 10**6, 64) for number in range(8)], ranks=2, memory=[2 * GB, GB // 2], pooling=1)
    assert found.bytes_per_rank[0] > found.bytes_per_rank[1] <= GB // 2


@pytest.mark.parametrize("cut", ["rows", "columns", "replicated", Grid(1, 2, (1, 3)), Grid(2, 1)], ids=str)
def test_a_kept_cut_stays(cut):
    kept = Table("items", 10_000_000, 64, cut=cut)
    found = plan([kept, *TABLES[1:]], keep={"items"})
    assert found.tables[0].cut == cut and found.why["items"].endswith("; kept")


def test_a_kept_whole_table_gets_a_rank():
    cut = plan([Table("items", 10_000_000, 64, cut="whole"), *TABLES[1:]], keep=["items"]).tables[0].cut
    assert (cut.rows, cut.columns, len(cut.ranks)) == (1, 1, 1)


def test_bytes_are_those_of_weights_and_state():
    size = 10_000_000 * 64 * 4
    for algorithm, factor in (("sgd", 1), ("adagrad", 2), (torch.optim.SparseAdam, 3)):
        assert sum(plan(TABLES[:1], algorithm=algorithm, pooling=1).bytes_per_rank) == factor * size
    (half,) = plan(
        [Table("t", 100, 8, dtype=torch.bfloat16)], ranks=1, pooling=1, algorithm="RowWiseAdam"
    ).bytes_per_rank
    assert half == 100 * (8 * 2 + 8 * 2 + 4)


def test_the_shell_knows_the_state_of_each_algorithm_that_takes_sparse_gradients():
    specs = {spec.name.lower() for spec in algorithms() if spec.takes_sparse and not spec.is_brought_in}
    assert STATES.keys() == specs | {"adam"}
    for name, (elements, rows) in STATES.items():
        for dtype, size in DTYPE_BYTES.items():
            assert _state(spec_of(name), getattr(torch, dtype)) == (elements * size, rows * max(4, size))


def test_it_prints_a_table():
    text = str(plan())
    assert [line.split("  ")[0] for line in text.splitlines()[:4]] == ["table", "items", "users", "country"]
    assert "% of the load" in text and text.splitlines()[5].split() == ["rank", "bytes", "step"]
    assert "most" in str(plan(ranks=32))


def test_memory_that_cannot_be_met_is_refused_with_numbers():
    with pytest.raises(
        InputError, match=r"required 2.7 GB for weights and state; the largest piece .* 650 MB of 'items'"
    ):
        plan(memory=GB // 10)


def test_all_wrong_arguments_are_listed_at_once():
    tables = [Table("a", 0, 4), Table("b", 5, 4, cut=Grid(2, 1, (0, 9))), Table("b", 5, 4, dtype=torch.int8)]
    with pytest.raises(OptionError) as caught:
        plan(tables, 0, -1, batch=0, pooling={"a": -1, "z": 1}, keep=["b", "c"], memory_bandwidth=0, skew="much")
    keys = [problem.key for problem in caught.value.problems]
    assert {"a", "b", "keep['c']", "batch", "memory_bandwidth", "ranks", "memory_bytes", "skew"} <= {*keys}
    assert {"pooling['a']", "pooling['b']", "pooling['z']"} <= {*keys} and len(keys) >= 12


def test_one_memory_for_each_rank_is_required():
    with pytest.raises(OptionError, match="bytes of 3 ranks; required one for each of 4 ranks"):
        plan(memory=[GB] * 3)


@pytest.mark.parametrize(("algorithm", "words"), [("sgdd", "did you mean 'sgd'"), ("Shampoo", "elements and rows")])
def test_other_algorithms_are_refused(algorithm, words):
    with pytest.raises(AlgorithmError, match=words):
        plan(algorithm=algorithm)
