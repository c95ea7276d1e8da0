"""Optimizers of others with parameters by name in `params`, as torchrec's fused ones: each rank has some or none."""

import pytest
import torch
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks

RANKS_STAY = True

TABLES = {"one": (3, 2), "two": (5, 2)}


class Fused(torch.optim.Optimizer):
    """Tables of this rank, and a sum for each; laid out as torchrec lays out the state of its fused optimizers."""

    def __init__(self, names, start):
        self.params = {name: torch.full(TABLES[name], start) for name in names}
        self.rows = {name: torch.full(TABLES[name][:1], 2 * start) for name in names}
        super().__init__([torch.zeros(1)], {"lr": 0.1})

    def state_dict(self):
        groups = [{"params": [*self.params], "lr": 0.1}] if self.params else []
        return {"state": {name: {"sum": rows} for name, rows in self.rows.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict):
        assert state_dict["state"].keys() == self.rows.keys()
        assert sorted(name for group in state_dict["param_groups"] for name in group["params"]) == sorted(self.params)


def save(path, placed):
    fused = Fused(placed[dist.get_rank()], 1.0)
    checkpoint.save(path, {"tables": fused.params, "fused": fused})
    with checkpoint.open(path) as reader:
        return sorted(reader.keys())


def load(path, placed):
    fused = Fused(placed[dist.get_rank()], 0.0)
    try:
        checkpoint.load(path, {"tables": fused.params, "fused": fused})
    except MismatchError as error:
        return sorted(problem.key for problem in error.problems)
    return {name: (fused.params[name].unique().item(), rows.unique().item()) for name, rows in fused.rows.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_without_tables_saves_and_loads_nothing_of_them(tmp_path, ranks):
    path = str(tmp_path / "c")
    (keys, *_) = run_ranks(2, save, path, [["two", "one"], []])
    options = ["fused.param_groups.one", "fused.param_groups.two"]
    assert keys == [*options, "fused.state.one.sum", "fused.state.two.sum", "tables.one", "tables.two"]
    placed = [["two"], ["one"], []] if ranks > 1 else [["one", "two"]]
    loaded = run_ranks(ranks, load, path, placed)
    assert loaded == [{name: (1.0, 2.0) for name in names} for names in placed[:ranks]]


def test_a_table_that_no_rank_has_a_place_for_is_refused(tmp_path):
    path = str(tmp_path / "c")
    run_ranks(2, save, path, [["one"], ["two"]])
    refused = ["fused.param_groups.two", "fused.state.two.sum", "tables.two"]
    assert run_ranks(2, load, path, [["one"], []]) == [refused, refused]
