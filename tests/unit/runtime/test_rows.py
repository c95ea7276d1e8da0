"""Sorts of ids and writes of rows: equal to torch's own, on one thread and on more than NumPy is used for."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardopt.runtime import rows
from shardopt.runtime.rows import different_ids, sort_ids, write_rows


@pytest.fixture(params=["numpy", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Either way, regardless of how many threads torch has here, and of sizes."""
    monkeypatch.setattr(rows, "_FEW_THREADS", 1024 if request.param == "numpy" else 0)
    monkeypatch.setattr(rows, "_FEW_IDS", 1)
    monkeypatch.setattr(rows, "_FEW_BYTES", 1)
    yield request.param


BIG = 1 << 62
IDS = {
    "none": [],
    "one": [5],
    "equal": [3, 3, 3],
    "mixed": [7, 0, 7, 3, 0, 12, 7],
    "negative": [4, -1, 4, -7, 0],
    "past what fits beside a place": [BIG, 3, -BIG, BIG, -(2 * BIG), 3],
}


@pytest.mark.parametrize("name", IDS)
def test_equal_ids_stay_in_their_order(name: str) -> None:
    ids = torch.tensor(IDS[name], dtype=torch.int64)
    before = ids.clone()
    for found, wanted in zip(sort_ids(ids), ids.sort(stable=True), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(ids, before)


@pytest.mark.parametrize("name", IDS)
def test_different_ids_and_where_each_is(name: str) -> None:
    ids = torch.tensor(IDS[name], dtype=torch.int64)
    for found, wanted in zip(different_ids(ids), torch.unique(ids, return_inverse=True), strict=True):
        assert torch.equal(found, wanted)


def test_many_ids_of_a_skewed_kind_are_sorted_as_torch_does() -> None:
    ids = (torch.rand(50_000, generator=torch.Generator().manual_seed(0)) ** 8 * 1e6).long()
    for found, wanted in zip(sort_ids(ids), ids.sort(stable=True), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (4, 5), (0,)], ids=str)
def test_rows_are_written_as_torch_writes_them(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    table = torch.randn(9, *shape).to(dtype)
    index, values = torch.tensor([7, 0, 3]), torch.randn(3, *shape).to(dtype)
    wanted = table.clone().index_copy_(0, index, values)
    memory = table.data_ptr()
    write_rows(table, index, values)
    assert torch.equal(table, wanted) and table.data_ptr() == memory


def test_rows_that_are_apart_in_memory_are_written() -> None:
    memory = torch.zeros(6, 8)
    write_rows(memory[:, 2:5], torch.tensor([4, 1]), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    wanted = torch.zeros(6, 8)
    wanted[[4, 1], 2:5] = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert torch.equal(memory, wanted)


def test_none_of_the_rows_may_be_written() -> None:
    table = torch.ones(3, 2)
    write_rows(table, torch.empty(0, dtype=torch.int64), torch.empty(0, 2))
    assert torch.equal(table, torch.ones(3, 2))


def test_an_index_past_the_end_is_refused() -> None:
    with pytest.raises(IndexError):
        write_rows(torch.zeros(3, 2), torch.tensor([3]), torch.ones(1, 2))


def test_backward_refuses_a_table_whose_rows_were_written_since() -> None:
    table = torch.ones(3, 2, requires_grad=True)
    squares = table.square().sum()
    with torch.no_grad():
        write_rows(table, torch.tensor([1]), torch.full((1, 2), 5.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()  # type: ignore[no-untyped-call]  # torch's


def test_parameters_are_written_in_place() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    with torch.no_grad():
        write_rows(weight, torch.tensor([2]), torch.ones(1, 2))
    assert weight[2].tolist() == [1.0, 1.0] and weight.sum().item() == 2.0


def test_compiled_code_writes_rows() -> None:
    def step(table: Tensor, index: Tensor, values: Tensor) -> Tensor:
        write_rows(table, index, values)
        return table * 2

    table, index, values = torch.zeros(4, 2), torch.tensor([3]), torch.ones(1, 2)
    torch.compile(step, backend="eager", fullgraph=True)(table, index, values)
    assert table[3].tolist() == [1.0, 1.0]
