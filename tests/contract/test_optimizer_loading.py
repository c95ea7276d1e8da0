"""Saving and loading of every kind of keyed optimizer: exact, in place, and all or nothing."""

import copy
import re

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError, StateError
from tests.support.optimizers import BUILDERS, parameters, same, snapshot, train

each_kind = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


@each_kind
def test_init_state_is_invisible_and_gives_a_destination(build):
    params, plain = parameters(), parameters()
    optimizer, trained = build(params), build(plain)
    before = copy.deepcopy(list(params.values()))
    optimizer.init_state([next(iter(params))])
    assert all(map(torch.equal, params.values(), before))
    assert all(parameter.grad is None for parameter in params.values())
    saved = optimizer.state_dict()["state"]
    assert all(saved[name]["step"] == 0 for name in params)
    train(optimizer, params, 3)
    train(trained, plain, 3)
    assert same(optimizer.state_dict(), trained.state_dict())
    assert all(map(torch.equal, params.values(), plain.values()))
    with pytest.raises(StateError, match="found nobody"):
        optimizer.init_state(["nobody"])


@each_kind
def test_loading_is_in_place_and_exact(build):
    params, plain = parameters(), parameters(1)
    optimizer, trained = build(params), build(plain)
    train(trained, plain, 3)
    optimizer.init_state()
    addresses = {
        (name, entry): value.data_ptr()
        for name, entries in optimizer.state_dict()["state"].items()
        for entry, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    saved = trained.state_dict()
    for group in trained.param_groups:
        group["lr"] = 0.125
    saved = trained.state_dict()
    assert optimizer.load_state_dict(saved) == ([], [])
    loaded = optimizer.state_dict()
    assert same(loaded, saved)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}
    for (name, entry), address in addresses.items():
        assert loaded["state"][name][entry].data_ptr() == address


@each_kind
def test_every_part_is_called_once_after_a_load_and_not_by_a_check(build):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params)
    nodes, called = [optimizer], []
    for node in nodes:
        nodes += node._children
    for node in nodes:
        loaded, names = node.post_load_state_dict, set(node.params.values())

        def note(loaded=loaded, node=node, names=names):
            called.append(node)
            assert all(optimizer.state[parameter]["step"] == 1 for parameter in names)
            loaded()

        node.post_load_state_dict = note
    optimizer.check_state_dict(saved)
    assert called == []
    optimizer.load_state_dict(saved)
    assert sorted(map(id, called)) == sorted(map(id, nodes))


def drop_parameter(saved):
    del saved["state"]["layer.b"]
    return r"state\.layer\.b: found nothing|found no state; required state of layer\.b"


def add_parameter(saved):
    saved["state"]["layer.new"] = {"step": torch.tensor(1.0)}
    return r"state\.layer\.new: found a value"


def rename_parameter(saved):
    saved["state"]["elsewhere"] = saved["state"].pop("head.w")
    return r"state\.elsewhere: found a value"


def drop_entry(saved):
    del saved["state"]["head.w"]["exp_avg_sq"]
    return r"state\.head\.w\.exp_avg_sq: found nothing"


def add_entry(saved):
    saved["state"]["head.w"]["max_exp_avg_sq"] = torch.zeros(3)
    return r"state\.head\.w\.max_exp_avg_sq: found a value"


def other_shape(saved):
    saved["state"]["head.w"]["exp_avg"] = torch.zeros(1)  # would broadcast
    return r"state\.head\.w\.exp_avg: found shape \(1,\); required \(3,\)"


def other_dtype(saved):
    saved["state"]["layer.w"]["exp_avg"] = torch.zeros(4, 2, dtype=torch.float64)
    return r"state\.layer\.w\.exp_avg: found dtype torch\.float64; required torch\.float32"


def other_kind(saved):
    saved["state"]["layer.w"]["step"] = "3"
    return r"state\.layer\.w\.step: found a plain value; required a tensor"


def no_values(saved):
    saved["state"]["layer.w"]["exp_avg"] = torch.zeros(4, 2, device="meta")
    return r"state\.layer\.w\.exp_avg: found a tensor on the meta device"


def no_state(saved):
    saved["state"] = {name: {} for name in saved["state"]}
    return "found no state; .* call init_state"


def state_is_no_mapping(saved):
    saved["state"] = []
    return "state: found a"


def drop_section(saved):
    del saved["param_groups"]
    return "param_groups: found nothing"


def add_section(saved):
    saved["more"] = {}
    return "more: found a value"


def groups_are_torchs(saved):
    for group in saved["param_groups"]:
        group["params"] = [*range(len(group["params"]))]
    return "param_groups: found parameters by position, without names; required parameters by name"


def drop_group(saved):
    del saved["param_groups"][-1]
    return r"param_groups\.\S+: found nothing"


def member_of_two_groups(saved):
    saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0]))
    return r"param_groups\.\S+: found a parameter of two groups"


def other_members(saved):
    saved["param_groups"][0]["params"] = ["nobody"]
    return r"param_groups\.nobody: found a value"


def drop_option(saved):
    del saved["param_groups"][0]["betas"]
    return r"param_groups\.\S+\.betas: found nothing"


def add_option(saved):
    saved["param_groups"][0]["momentum"] = 0.9
    return r"param_groups\.\S+\.momentum: found a value"


def other_option_kind(saved):
    saved["param_groups"][0]["lr"] = torch.tensor([0.1, 0.2])
    return r"param_groups\.\S+\.lr: found a tensor; required a plain value"


MISMATCHES = [
    drop_parameter, add_parameter, rename_parameter, drop_entry, add_entry, other_shape, other_dtype, other_kind,
    no_values, no_state, state_is_no_mapping, drop_section, add_section, groups_are_torchs, drop_group,
    member_of_two_groups, other_members, drop_option, add_option, other_option_kind,
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "change"),
    [
        pytest.param(
            BUILDERS[kind], change, id=f"{kind}-{change.__name__}", marks=[pytest.mark.exhaustive][: (i + j) % 2]
        )
        for i, kind in enumerate(BUILDERS)
        for j, change in enumerate(MISMATCHES)
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(build, change):
    params, plain = parameters(), parameters(1)
    optimizer, trained = build(params), build(plain)
    train(optimizer, params, 2)
    train(trained, plain, 3)
    for group in trained.param_groups:
        group["lr"] = 0.5
    saved = copy.deepcopy(trained.state_dict())
    message = change(saved)
    before = snapshot(optimizer, params)
    with pytest.raises(MismatchError, match=message) as error:
        optimizer.load_state_dict(saved)
    assert all(problem.found and problem.required and problem.remedy for problem in error.value.problems)
    assert same(snapshot(optimizer, params), before)
    if change is not no_values:  # stands for values that are still to be read
        with pytest.raises(MismatchError, match=message):
            optimizer.check_state_dict(saved)
    assert same(snapshot(optimizer, params), before)


@each_kind
def test_every_problem_is_told_at_once(build):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    changes = [drop_entry, other_dtype, add_section, add_option]
    messages = [change(saved) for change in changes]
    with pytest.raises(MismatchError) as error:
        optimizer.load_state_dict(saved)
    assert len(error.value.problems) == len(changes)
    for message in messages:
        assert any(re.search(message, str(problem)) for problem in error.value.problems)


@each_kind
def test_state_into_an_optimizer_that_has_none_names_init_state(build):
    params, plain = parameters(), parameters()
    optimizer, trained = build(params), build(plain)
    train(trained, plain)
    with pytest.raises(MismatchError, match=r"none, as this optimizer has none yet; call init_state\(\)"):
        optimizer.load_state_dict(trained.state_dict())
    assert not any(isinstance(key, torch.Tensor) for key in optimizer.state)


@each_kind
def test_not_strict_loads_what_fits_and_tells_the_rest(build):
    params, plain = parameters(), parameters(1)
    optimizer, trained = build(params), build(plain)
    optimizer.init_state()
    train(trained, plain, 3)
    saved = copy.deepcopy(trained.state_dict())
    drop_parameter(saved)
    add_parameter(saved)
    add_section(saved)
    missing, unexpected = optimizer.load_state_dict(saved, strict=False)
    assert (missing, sorted(unexpected)) == (["state.layer.b"], ["more", "state.layer.new"])
    state = optimizer.state_dict()["state"]
    assert same(state["layer.w"], saved["state"]["layer.w"])
    assert state["layer.b"]["step"] == 0
    other_shape(saved)
    with pytest.raises(MismatchError):
        optimizer.load_state_dict(saved, strict=False)


@each_kind
def test_dtypes_are_converted_on_request_alone(build):
    params, plain = parameters(), parameters(1)
    optimizer, trained = build(params), build(plain)
    train(optimizer, params)
    train(trained, plain, 3)
    saved = copy.deepcopy(trained.state_dict())
    for name in params:
        saved["state"][name]["exp_avg"] = saved["state"][name]["exp_avg"].bfloat16()
    with pytest.raises(MismatchError, match="convert_dtype=True"):
        optimizer.load_state_dict(saved)
    optimizer.check_state_dict(saved, convert_dtype=True)
    optimizer.load_state_dict(saved, convert_dtype=True)
    for name, entries in optimizer.state_dict()["state"].items():
        if name in params:
            assert same(entries["exp_avg"], saved["state"][name]["exp_avg"].float())
    saved["state"]["head.w"]["exp_avg"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(MismatchError, match=r"dtype torch\.int64"):
        optimizer.load_state_dict(saved, convert_dtype=True)


@each_kind
def test_groups_are_saved_on_request(build):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params)
    with_groups = optimizer.state_dict()
    assert sorted(name for group in with_groups["param_groups"] for name in group["params"]) == sorted(params)
    assert len(with_groups["param_groups"]) == len(optimizer.param_groups)
    optimizer.save_param_groups(False)
    assert list(optimizer.state_dict()) == ["state"]
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(MismatchError, match="param_groups: found a value"):
        optimizer.load_state_dict(with_groups)


@each_kind
def test_steps_after_a_checkpoint_are_those_of_an_uninterrupted_run(build, tmp_path):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, 3)
    optimizer.param_groups[0]["lr"] = 0.0625
    checkpoint.save(tmp_path, {"model": dict(params), "optimizer": optimizer})
    resumed = parameters(1)
    other = build(resumed)
    other.init_state()
    checkpoint.load(tmp_path, {"model": dict(resumed), "optimizer": other})
    train(optimizer, params, 3, first=3)
    train(other, resumed, 3, first=3)
    assert same(snapshot(other, resumed), snapshot(optimizer, params))


@each_kind
def test_a_checkpoint_that_does_not_fit_changes_nothing(build, tmp_path):
    params, resumed = parameters(), parameters(1)
    optimizer, other = build(params), build(resumed)
    train(optimizer, params, 3)
    app = {"optimizer": optimizer.state_dict()}
    del app["optimizer"]["state"]["head.w"]["exp_avg_sq"]
    checkpoint.save(tmp_path, app)
    other.init_state()
    before = snapshot(other, resumed)
    with pytest.raises(MismatchError, match=r"optimizer\.state\.head\.w\.exp_avg_sq"):
        checkpoint.load(tmp_path, {"optimizer": other})
    assert same(snapshot(other, resumed), before)
    train(other, resumed)


@pytest.mark.parametrize(
    ("algorithm", "numbers"),
    [("asgd", {"step": 5, "eta": 0.05, "mu": 0.5}), ("adam", {"step": 7}), ("adamw", {"step": 7.0})],
)
def test_numbers_in_state_as_torch_had_them_before_1_12(algorithm, numbers):
    optimizer = shardopt.keyed(algorithm, {"w": torch.nn.Parameter(torch.ones(3))}, lr=0.1)
    optimizer.init_state()
    old = copy.deepcopy(optimizer.state_dict())
    old["state"]["w"].update(numbers)
    optimizer.check_state_dict(old)
    optimizer.load_state_dict(old)
    state = optimizer.state_dict()["state"]["w"]
    assert {name: state[name].item() for name in numbers} == pytest.approx(numbers)
    assert all(state[name].dtype == torch.float32 for name in numbers)
    optimizer.as_torch().load_state_dict({**optimizer.as_torch().state_dict(), "state": {0: old["state"]["w"]}})
    assert optimizer.state_dict()["state"]["w"]["step"].item() == numbers["step"]
    with pytest.raises(MismatchError, match="found a plain value; required a tensor"):
        optimizer.load_state_dict({**old, "state": {"w": {**old["state"]["w"], "step": "5"}}})
