"""State of which other ranks hold a part: its keys, what ranks know of groups in part, and older forms."""

import copy
import pickle

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import shardopt
from shardopt import checkpoint
from shardopt.algorithms import algorithms, spec_of
from shardopt.checkpoint.format import manifest
from shardopt.optim.keyed import KeyedOptimizerWrapper
from shardopt.sharding.view import is_held, is_on_all_ranks
from shardopt.state.flatten import flatten
from shardopt.state.values import OnAnyRank, canonical, decode_value, encode_value, united
from tests.support.fake_rank import fake_rank, shard, sharded_tensor

FULL = torch.arange(12.0).view(6, 2)


def elsewhere(shape=(6, 2)):
    """A DTensor on another rank than this one, which is 0 of 2."""
    mesh = DeviceMesh("cpu", [1])
    local = {"run_check": False, "shape": shape, "stride": (2, 1)}
    return torch.nn.Parameter(DTensor.from_local(torch.empty(0), mesh, [Replicate()], **local))


def test_what_a_rank_has_a_part_of():
    with fake_rank(1, 2) as mesh:
        half = DeviceMesh("cpu", [0])
        one_row = shard(FULL[:1], mesh, Shard(0))
        lookup = LocalShardsWrapper([torch.ones(2, 2)], [(0, 0)]), LocalShardsWrapper([], [])
        wrapped = [
            DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=(2, 2), stride=(2, 1)) for own in lookup
        ]
        tables = [sharded_tensor(FULL, rows, 1) for rows in ([(3, 0), (3, 1)], [(6, 0)], [(6, 0), (0, 1)])]
        outside = DTensor.from_local(torch.empty(0), half, [Replicate()], run_check=False, shape=(6, 2), stride=(2, 1))
        held = [FULL, FULL[:0], shard(FULL, mesh, Shard(0)), one_row, outside, *wrapped, *tables]
        assert [is_held(own) for own in held] == [True, True, True, True, False, True, False, True, False, False]
        assert one_row.to_local().numel() == 0
        everywhere = [True, True, True, True, False, False, False, True, False, False]
        assert [is_on_all_ranks(own) for own in held] == everywhere


@pytest.mark.parametrize("name", [spec.name for spec in algorithms()])
def test_every_algorithm_steps_where_it_has_nothing(name):
    with fake_rank(0, 2):
        params = {"outside": elsewhere(), "table": sharded_tensor(FULL, [(6, 1)], 0, requires_grad=True)}
        cls = spec_of(name).optimizer
        several = name != "LBFGS"
        for made in (
            shardopt.keyed(name, params, groups=[{"match": "table", "lr": 0.5}] if several else None),
            KeyedOptimizerWrapper(params, lambda tensors: cls(tensors)),
        ):
            if several:
                made.add_param_group({"params": {"later": elsewhere()}})
            made.init_state()
            if several:  # it asks the other ranks
                made.step()
            made.zero_grad()
            saved = made.state_dict()
            assert [key for key in saved["state"] if not key.startswith("__global__")] == []
            assert all(type(key) is str for key in made.state)
            assert [key for key in made.held_state_names() if not key.startswith("__global__")] == []
            names = {name for group in made.param_groups for name in map(made._names.get, group["params"])}
            assert names == {*params, "later"} if several else {*params}
            saved["state"] |= {name: {"step": 3} for name in params}
            assert made.load_state_dict(saved) == ([], [])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_holds_nothing_either(copied):
    with fake_rank(0, 2):
        optimizer = shardopt.keyed("adagrad", {"outside": elsewhere(), "here": torch.nn.Parameter(FULL.clone())})
        other = copied(optimizer)
        other.params["here"].grad = torch.ones_like(FULL)
        for _ in range(2):
            other.step()
        assert list(other.state_dict()["state"]) == ["here"]
        assert other.held_state_names() == {"here"} and other.state[other.params["outside"]] == {}


def test_keys_do_not_depend_on_what_a_rank_holds():
    with fake_rank(0, 2):
        optimizer = shardopt.keyed("adamw", {"w": elsewhere()})
        optimizer.init_state()
        assert list(flatten({"optimizer": optimizer}).leaves) == ["optimizer.param_groups.w"]
    optimizer = shardopt.keyed("adamw", {"w": torch.nn.Parameter(FULL.clone())})
    assert list(flatten({"optimizer": optimizer}).leaves) == ["optimizer.param_groups.w"]
    optimizer.init_state()
    assert "optimizer.param_groups.w" in flatten({"optimizer": optimizer}).leaves


class Whole:
    """As the state of an optimizer without tensors was stored before: one value, with groups by their least names."""

    def __init__(self, state):
        self.state = state | {"param_groups": {group["params"][0]: group for group in state["param_groups"]}}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise AssertionError("it is only saved")


@pytest.mark.parametrize(
    ("stored_as", "choices"),
    [
        ("optimizer", {}),
        ("optimizer", {"select": r"optimizer\.param_groups"}),
        ("old", {"rename": {"^old": "optimizer"}}),
    ],
)
def test_an_optimizer_that_was_stored_as_one_value_is_loaded(tmp_path, monkeypatch, stored_as, choices):
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 1)

    def made(lr):
        return shardopt.keyed("sgd", {"w": torch.nn.Parameter(FULL.clone())}, lr=lr)

    checkpoint.save(tmp_path / "c", {stored_as: Whole(made(0.25).state_dict()), "nested": {"step": 3}})
    with checkpoint.open(tmp_path / "c") as reader:
        assert f"{stored_as}.param_groups.w" in reader.keys()  # noqa: SIM118  # a method of the reader's
    app = {"optimizer": made(0.5), "nested": {"step": 0}}
    checkpoint.load(tmp_path / "c", app, **choices)
    assert app["optimizer"].param_groups[0]["lr"] == 0.25


def test_what_some_ranks_know_comes_together():
    def options(untouched, lr=0.1):
        return encode_value({"lr": lr, "untouched": OnAnyRank(untouched), "t": (1, [2])})

    ranks = [options(False), options(True), options(False)]
    assert len(set(map(canonical, ranks))) == 1 and len(set(map(str, ranks))) == 2
    turned = encode_value({"t": (1, [2]), "untouched": OnAnyRank(False), "lr": 0.1})
    assert decode_value(united([*ranks, turned])) == {"lr": 0.1, "untouched": True, "t": (1, [2])}
    assert decode_value(united([ranks[0], turned])) == {"lr": 0.1, "untouched": False, "t": (1, [2])}
    assert canonical(options(True, lr=0.2)) != canonical(options(True))
    assert decode_value(encode_value(OnAnyRank(True))) is True
