"""Plain values in DCP's parts and in the app's: options by parameter, and containers as the app has them."""

from collections import Counter

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.dcp.grouping import StoredOptions, in_parts, parts_of
from shardopt.checkpoint.loading.renaming import regroup_values
from shardopt.checkpoint.sources.grouping import path_of, regrouped
from shardopt.errors import MismatchError
from shardopt.state.flatten import flatten
from shardopt.state.paths import Index, join


def values_of(paths):
    return {join(path): (path, value) for path, value in paths.items()}


OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "given": {"lr": 0.1}, "untouched": False}


def test_groups_in_a_list_become_options_by_parameter():
    groups = [{"params": ["a", "b.0"], "lr": 0.1, "given": {"lr": 0.1}, "untouched": ["a"]}, {"params": [], "lr": 1.0}]
    values = values_of(dict(in_parts(("optim", "param_groups"), groups)))
    assert "optim.param_groups.0.given.lr" in values
    _, result = regrouped({}, values)
    assert {key: value for key, (_, value) in result.items()} == {
        "optim.param_groups.a": {"lr": 0.1, "given": {"lr": 0.1}, "untouched": True},
        "optim.param_groups.b.0": {"lr": 0.1, "given": {"lr": 0.1}, "untouched": False},
    }
    assert result["optim.param_groups.b.0"][0] == ("optim", "param_groups", "b.0")


@pytest.mark.parametrize("root", [(), ("optim",)], ids=["alone", "in an app"])
def test_flattened_state_is_cut_as_here(root):
    options = {(*root, f"param_groups.{name}.{option}"): 1 for name in ("0.w", "0.w.x") for option in ("lr", "eps")}
    tensors = {
        join((*root, key)): (*root, key) for key in ("state.0.w.step", "state.0.w.x.step", "state.0.w.inner.x.avg")
    }
    paths, result = regrouped(tensors, values_of(options))
    assert set(paths.values()) == {
        (*root, "state", "0.w", "step"),
        (*root, "state", "0.w.x", "step"),
        (*root, "state", "0.w", "inner", "x", "avg"),
    }
    first, second = (value for _, value in result.values())
    assert first == {"lr": 1, "eps": 1} and first is second  # stored once


def test_groups_by_position_and_others_stay():
    groups = [{"params": [0, 1], "lr": 0.1}]
    values = values_of({**dict(in_parts(("optim", "param_groups"), groups)), ("x", "param_groups"): 3})
    assert regrouped({}, values).values == values


def test_parts_are_those_that_dcp_takes():
    value = {"a": [1, 2], "b": [{"c": 1}, {}], "d": (1, {"e": 2}), "f": {}, 3: None}
    parts = {join(path): part for path, part in in_parts(("s",), value)}
    assert parts == {"s.a": [1, 2], "s.b.0.c": 1, "s.d": (1, {"e": 2}), "s.3": None}
    assert parts_of(("s", 3, Index(1), "x")) == ("s", "3", 1, "x")
    assert path_of(("s", "3", 1)) == ("s", "3", Index(1)) and type(path_of(("s", 1))[1]) is Index


def stored(**by_member):
    return StoredOptions({f"o.param_groups.{name}": (("o", "param_groups", name), v) for name, v in by_member.items()})


def test_options_are_read_by_the_groups_that_ask():
    options = stored(a=OPTIONS, b={**OPTIONS, "untouched": True}, c={**OPTIONS, "lr": 0.5})
    given = {"o.param_groups.0.params": ["a", "b"], "o.param_groups.1.params": ["c"], "o.param_groups.2.params": []}
    assert options.read("o.param_groups.0.lr", given) == (True, 0.1)
    assert options.read("o.param_groups.1.lr", given) == (True, 0.5)
    assert options.read("o.param_groups.0.untouched", given) == (True, ["b"])
    assert options.read("o.param_groups.0.given.lr", given) == (True, 0.1)
    for kept in ("0.params", "0.foreach", "0.algorithm", "0.given.eps", "2.lr"):
        assert options.has(f"o.param_groups.{kept}") and options.read(f"o.param_groups.{kept}", given) == (False, None)
    assert options.has("o.param_groups.a.fused") and not options.has("o.param_groups.a.newer")
    assert not options.has("o.state.0.lr") and not stored().has("o.param_groups.0.lr")
    with pytest.raises(MismatchError, match="newer"):
        options.read("o.param_groups.0.newer", given)
    with pytest.raises(MismatchError, match=r"0\.1 of a, 0\.5 of c"):
        options.read("o.param_groups.0.lr", {"o.param_groups.0.params": ["a", "c"]})
    with pytest.raises(MismatchError, match="no options"):
        options.read("o.param_groups.0.lr", {"o.param_groups.0.params": ["a", "z"]})


def test_a_name_that_begins_with_a_number_is_no_position():
    options = stored(**{"0.weight": OPTIONS})
    assert options.has("o.param_groups.0.weight.foreach") and not options.has("o.param_groups.0.weight.newer")


def test_parts_are_put_together_as_the_app_has_them(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    here = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    saved = dict(in_parts(("s",), here.state_dict())) | {("s", "milestones", "7"): 1, ("s", "last_epoch"): 4}
    values = regroup_values(flatten({"s": here}), values_of(saved), ())
    assert values.keys() == {"s"}
    assert values["s"][1]["milestones"] == Counter([2, 5, 7]) and type(values["s"][1]["milestones"]) is Counter
    assert values["s"][1]["last_epoch"] == 4
    # What is stored in parts by a dict of dicts loads into an object that has it as one value.
    checkpoint.save(tmp_path / "c", {"s": {**here.state_dict(), "last_epoch": 4, "milestones": {"2": 1, "5": 1}}})
    checkpoint.load(tmp_path / "c", {"s": here})
    assert here.last_epoch == 4 and here.milestones == Counter([2, 5])


def test_empty_containers_are_left_to_other_ranks_and_to_the_app():
    app = {"a": {}, "s": [{"x": 1, "empty": {}}]}
    values = values_of({("a", "b"): 1, ("s", Index(0), "x"): 2, ("t",): 3})
    result = regroup_values(flatten(app), values, ())
    assert {key: value for key, (_, value) in result.items()} == {"a.b": 1, "s": [{"x": 2, "empty": {}}], "t": 3}
