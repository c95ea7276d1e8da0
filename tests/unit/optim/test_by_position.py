"""Keyed optimizers in torch's getters and setters of optimizer state: by position, and refused without that."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import shardopt
from shardopt.errors import MismatchError, StateError
from tests.support.optimizers import BUILDERS, adam, give_gradients, parameters, same, snapshot, train

SHAPES = [StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)]
OPTIONS = [*SHAPES, StateDictOptions(cpu_offload=True), StateDictOptions(cpu_offload=True, full_state_dict=True)]


class Model(torch.nn.Module):
    """Has parameters under the names that the optimizers of `tests.support.optimizers` know them by."""

    def __init__(self, params):
        super().__init__()
        for name, parameter in params.items():
            module, _, own = name.partition(".")
            if not hasattr(self, module):
                self.add_module(module, torch.nn.Module())
            setattr(getattr(self, module), own, parameter)


CHEAP = ("own", "keyed wrapper", "nested", "everything")  # the others are made of the same


@pytest.fixture(params=[pytest.param(name, marks=[] if name in CHEAP else pytest.mark.exhaustive) for name in BUILDERS])
def build(request):
    return BUILDERS[request.param]


def made(build, steps=0, seed=0):
    params = parameters(seed)
    optimizer = build(params)
    train(optimizer, params, steps)
    optimizer.zero_grad()
    return Model(params), optimizer, params


def train_on(optimizer, params, first):
    train(optimizer, params, 2, first=first)
    return snapshot(optimizer, params)


@pytest.mark.parametrize("options", SHAPES, ids=["nested", "flattened"])
@pytest.mark.parametrize("steps", [0, 3])
def test_what_a_getter_gives_resumes_in_another_optimizer(build, options, steps):
    model, optimizer, params = made(build, steps)
    state_dict = copy.deepcopy(get_optimizer_state_dict(model, optimizer.as_torch(), options=options))
    other_params = copy.deepcopy(params)
    other = build(other_params)
    set_optimizer_state_dict(Model(other_params), other.as_torch(), state_dict, options=options)
    assert same(train_on(other, other_params, steps), train_on(optimizer, params, steps))


def test_a_getter_changes_nothing_of_an_optimizer_that_stepped(build):
    model, optimizer, params = made(build, 2)
    before = snapshot(optimizer, params)
    for options in OPTIONS:
        get_state_dict(model, optimizer.as_torch(), options=options)
    assert same(snapshot(optimizer, params), before)


def test_a_getter_is_no_step_of_an_optimizer_that_has_no_state(build):
    model, optimizer, params = made(build)
    plain_params = parameters()
    plain = build(plain_params)
    get_optimizer_state_dict(model, optimizer.as_torch())
    assert same(list(params.values()), list(plain_params.values()))
    assert all(parameter.grad is None for parameter in params.values())
    assert same(train_on(optimizer, params, 0), train_on(plain, plain_params, 0))


def test_names_numbers_and_groups_are_those_of_torchs_optimizer():
    params = parameters()
    groups = [{"match": r"\.b", "weight_decay": 0.0}]
    optimizer = shardopt.keyed("adamw", params, lr=0.1, groups=groups, fused=False, foreach=False)
    torchs_params = parameters()
    rest = [tensor for name, tensor in torchs_params.items() if not name.endswith(".b")]
    decayed = [{"params": [torchs_params["layer.b"]], "weight_decay": 0.0}, {"params": rest}]
    torchs = torch.optim.AdamW(decayed, lr=0.1, foreach=False, fused=False)
    for step in range(2):
        for each, own in ((optimizer, params), (torchs, torchs_params)):
            give_gradients(own, step)
            each.step()
    assert same(optimizer.as_torch().state_dict(), torchs.state_dict())
    ours = get_optimizer_state_dict(Model(params), optimizer.as_torch())
    assert same(ours, get_optimizer_state_dict(Model(torchs_params), torchs))
    torchs.load_state_dict(optimizer.as_torch().state_dict())
    optimizer.as_torch().load_state_dict(torchs.state_dict())


@pytest.mark.parametrize("steps", [0, 2])
def test_without_the_view_torchs_functions_are_refused_before_anything_changed(build, steps):
    model, optimizer, params = made(build, steps)
    give_gradients(params, 9)
    gradients = [parameter.grad for parameter in params.values()]
    before = snapshot(optimizer, params)
    state_dict = {"state": {}, "param_groups": []}
    for call in (
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: get_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, state_dict),
    ):
        with pytest.raises(StateError, match=r"as_torch\(\)"):
            call()
    assert same(snapshot(optimizer, params), before)
    assert [parameter.grad for parameter in params.values()] == gradients


def test_frozen_parameters_keep_their_positions_and_have_no_state():
    params = parameters()
    params["layer.w"].requires_grad_(False)
    optimizer, model = adam(params), Model(params)
    options = StateDictOptions(ignore_frozen_params=True)
    state_dict = get_optimizer_state_dict(model, optimizer.as_torch(), options=options)
    assert state_dict["state"].keys() == {"layer.b", "head.w"}
    assert state_dict["param_groups"][0]["params"] == ["layer.w", "layer.b", "head.w"]
    set_optimizer_state_dict(model, optimizer.as_torch(), copy.deepcopy(state_dict), options=options)


def test_state_that_is_given_replaces_what_is_there():
    model, optimizer, _ = made(adam, 2)
    state_dict = copy.deepcopy(get_optimizer_state_dict(model, optimizer.as_torch()))
    del state_dict["state"]["layer.b"]
    with pytest.raises(RuntimeError, match=r"layer\.b"):
        set_optimizer_state_dict(model, optimizer.as_torch(), copy.deepcopy(state_dict))
    set_optimizer_state_dict(
        model, optimizer.as_torch(), copy.deepcopy(state_dict), options=StateDictOptions(strict=False)
    )
    assert optimizer.state_dict()["state"].keys() == {"layer.w", "head.w"}
    _, fresh, _ = made(adam)
    fresh.as_torch().load_state_dict(optimizer.as_torch().state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


def damaged(state_dict, how):
    if how == "a shape":
        state_dict["state"][2]["exp_avg"] = torch.zeros(7)
    elif how == "an entry":
        del state_dict["state"][1]["step"]
    elif how == "an option":
        state_dict["param_groups"][0]["mu"] = 0.5
    elif how == "a group":
        state_dict["param_groups"].append({**state_dict["param_groups"][0], "params": []})
    elif how == "a parameter":
        state_dict["param_groups"][0]["params"].append(3)
    elif how == "a stranger":
        state_dict["state"][7] = state_dict["state"][2]
    return state_dict


@pytest.mark.parametrize("how", ["a shape", "an entry", "an option", "a group", "a parameter", "a stranger"])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_does_not_fit_is_refused_and_nothing_changed(how, steps):
    _, source, _ = made(adam, 3)
    _, optimizer, params = made(adam, steps, seed=1)
    before = snapshot(optimizer, params)
    with pytest.raises(MismatchError):
        optimizer.as_torch().load_state_dict(damaged(copy.deepcopy(source.as_torch().state_dict()), how))
    assert same(snapshot(optimizer, params), before)


def test_state_that_was_never_stepped_stays_so_through_a_getter_and_a_setter():
    """Dampening tells: a momentum buffer of zeros that counts as stepped trains otherwise."""

    def build(params):
        return shardopt.keyed("sgd", params, lr=0.1, momentum=0.9, dampening=0.5)

    model, optimizer, params = made(build)
    set_optimizer_state_dict(model, optimizer.as_torch(), get_optimizer_state_dict(model, optimizer.as_torch()))
    plain_params = parameters()
    assert same(train_on(optimizer, params, 0)[0], train_on(build(plain_params), plain_params, 0)[0])


@pytest.mark.parametrize("algorithm", ["sgd", "lbfgs", "muon", "adafactor", "rprop"])
def test_other_algorithms(algorithm):
    def build(params):
        return shardopt.keyed(algorithm, {name: tensor for name, tensor in params.items() if tensor.ndim == 2}, lr=0.1)

    def loss():
        optimizer.zero_grad()
        value = params["layer.w"].square().sum()
        value.backward()
        return value

    params = parameters()
    optimizer, model = build(params), Model(params)
    optimizer.step(loss)
    for options in SHAPES:
        state_dict = copy.deepcopy(get_optimizer_state_dict(model, optimizer.as_torch(), options=options))
        other_params = copy.deepcopy(params)
        other = build(other_params)
        set_optimizer_state_dict(Model(other_params), other.as_torch(), state_dict, options=options)
        assert same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_the_view_is_an_optimizer_over_the_same_groups_state_and_steps():
    params = parameters()
    optimizer = adam(params)
    calls = []
    view = optimizer.as_torch()
    assert isinstance(view, torch.optim.Optimizer)
    optimizer.register_step_pre_hook(lambda *_: calls.append("keyed"))
    view.register_step_post_hook(lambda *_: calls.append("view"))
    schedule = torch.optim.lr_scheduler.StepLR(view, 1, gamma=0.5)
    give_gradients(params, 0)
    view.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert calls == ["keyed", "view"]
    assert optimizer.state_dict()["state"]["head.w"]["step"] == 1
    view.zero_grad()
    assert all(parameter.grad is None for parameter in params.values())
    assert view.state[params["head.w"]]["step"] == 1
    view.add_param_group({"params": {"new": torch.nn.Parameter(torch.zeros(2))}})
    assert "new" in optimizer.params
    for name in ("state", "param_groups", "defaults"):
        with pytest.raises(StateError):
            setattr(view, name, {})
    twin = copy.deepcopy(view)
    assert same(twin.state_dict(), view.state_dict())


def test_a_model_and_its_optimizer_go_through_get_and_set_state_dict(build):
    model, optimizer, params = made(build, 2)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer.as_torch()))
    other_params = parameters(7)
    other = build(other_params)
    set_state_dict(
        Model(other_params), other.as_torch(), model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert same(train_on(other, other_params, 2), train_on(optimizer, params, 2))


def test_several_optimizers_of_one_model():
    params = parameters()
    model = Model(params)
    head = shardopt.keyed("sgd", {"head.w": params["head.w"]}, lr=0.1, momentum=0.9)
    layer = adam({name: tensor for name, tensor in params.items() if name != "head.w"})
    for each in (head, layer):
        give_gradients(params, 0)
        each.step()
        model.zero_grad()
    both = copy.deepcopy(get_optimizer_state_dict(model, [head.as_torch(), layer.as_torch()]))
    wanted = copy.deepcopy([head.state_dict(), layer.state_dict()])
    for each in (head, layer):
        give_gradients(params, 1)
        each.step()
        model.zero_grad()
    set_optimizer_state_dict(model, [head.as_torch(), layer.as_torch()], both)
    assert same([head.state_dict(), layer.state_dict()], wanted)
