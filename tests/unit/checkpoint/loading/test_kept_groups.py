"""The group dicts of torch's own optimizers outlive a load, for those who share or hold them."""

import weakref
from collections import OrderedDict, deque
from contextlib import nullcontext

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.loading.hand_back import hand_back
from shardopt.errors import CheckpointError
from shardopt.state.state import RestoreTarget

SGD = torch.optim.SGD


class Outer(torch.optim.Optimizer):
    """Shares its groups with the optimizer in it, and hands them on after a load, as SAM does."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


class Around(torch.optim.Optimizer):
    """Has the groups of the optimizers in it, which load them, as timm's Lookahead."""

    def __init__(self, *inner):
        self.inner = inner
        self.state, self.defaults = {}, {}
        self.take()

    def take(self):
        first, *others = (each.param_groups for each in self.inner)
        self.param_groups = sum(others, first) if others else first

    def step(self):
        for each in self.inner:
            each.step()

    def state_dict(self):
        return {str(number): each.state_dict() for number, each in enumerate(self.inner)}

    def load_state_dict(self, state_dict):
        for number, each in enumerate(self.inner):
            each.load_state_dict(state_dict[str(number)])
        self.take()


class WithoutHooks(SGD):
    """Loads by itself, as bitsandbytes' do."""

    def load_state_dict(self, state_dict):
        groups = [
            {**new, "params": old["params"]}
            for old, new in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        self.__setstate__({"state": self.state, "param_groups": groups})


class InPlace(SGD):
    """Keeps the dicts by itself."""

    def load_state_dict(self, state_dict):
        for old, new in zip(self.param_groups, state_dict["param_groups"], strict=True):
            old |= {**new, "params": old["params"]}


class KeepsRates(SGD):
    """Its rates are those of the program. May refuse to load, or write into its dicts by itself."""

    does = "set"

    def __setstate__(self, state):
        if self.does == "refuse":
            raise ValueError("no")
        here, new = vars(self)["param_groups"], state["param_groups"]
        for mine, other in zip(here, new, strict=True):
            other["lr"] = mine["lr"]
            if self.does == "write":
                mine |= {**other, "momentum": other["momentum"] / 2}
        if self.does == "set":
            self.__dict__ = {**vars(self), **state}


class ByProperty(SGD):
    """Finds its groups anew each time; torch's load does not reach them."""

    @property
    def param_groups(self):
        return tuple(self.own)

    @param_groups.setter
    def param_groups(self, groups):
        self.own = groups

    def add_param_group(self, group):
        self.own.append({**self.defaults, **group, "params": list(group["params"])})


def load(optimizer):
    """Hands an optimizer the state that it has."""
    hand_back([RestoreTarget(("optimizer",), optimizer, optimizer, optimizer, optimizer.state_dict())], lenient=False)


def groups_of(layers):
    return [{"params": list(layer.parameters())} for layer in layers]


class Holder:
    """Has an optimizer, and is none; may load it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    @property
    def param_groups(self):
        return self.optimizer.param_groups


class Joining(Around):
    """Has those in it in a form that may not be looked into."""

    def __init__(self, hold, *inner):
        self.held = hold(inner)
        super().__init__(*inner)
        del self.inner

    def __getattr__(self, name):
        if name == "inner":
            return inner_of(self.held)
        raise AttributeError(name)


class LoadsBoth(Outer):
    """Loads its own groups, and then those of the optimizer in it."""

    def load_state_dict(self, state_dict):
        SGD.load_state_dict(self, state_dict)
        self.inner.load_state_dict(state_dict)


def inner_of(held):
    """Returns the optimizers in tuples, dicts and holders, in order."""
    if isinstance(held, torch.optim.Optimizer):
        return [held]
    values = held.values() if isinstance(held, dict) else held if isinstance(held, tuple) else [held.optimizer]
    return [each for value in values if not isinstance(value, str) for each in inner_of(value)]


@pytest.mark.parametrize("make", [SGD, Outer, WithoutHooks, InPlace, LoadsBoth])
def test_dicts_and_list_are_those_of_before(tmp_path, make):
    def app_of():
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        return {"model": layers, "optimizer": make(groups_of(layers), lr=0.1)}

    saved, app = app_of(), app_of()
    saved["optimizer"].param_groups[1] |= {"lr": 0.25, "initial_lr": 0.5}
    checkpoint.save(tmp_path / "c", saved)
    optimizer = app["optimizer"]
    groups, (body, head), params = optimizer.param_groups, optimizer.param_groups, optimizer.param_groups[1]["params"]
    checkpoint.load(tmp_path / "c", app)
    assert optimizer.param_groups is groups and groups[0] is body and groups[1] is head and head["params"] is params
    assert (body["lr"], head["lr"], head["initial_lr"]) == (0.1, 0.25, 0.5)
    assert not isinstance(optimizer, Outer) or optimizer.inner.param_groups is groups
    assert "__setstate__" not in vars(optimizer)


@pytest.mark.parametrize("does", ["set", "write", "refuse"])
def test_a_class_may_read_the_groups_that_it_had(does):
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer, wanted = KeepsRates(groups_of(layers), lr=0.1, momentum=0.5), does != "refuse"
    state, groups = optimizer.state_dict(), optimizer.param_groups
    (body, head), optimizer.does = groups, does
    for group in state["param_groups"]:
        group |= {"lr": 0.3, "momentum": 0.7}
    with nullcontext() if wanted else pytest.raises(CheckpointError, match="no"):
        hand_back([RestoreTarget(("optimizer",), optimizer, optimizer, optimizer, state)], lenient=False)
    assert optimizer.param_groups is groups and groups[0] is body and groups[1] is head
    momentum = {"set": 0.7, "write": 0.35, "refuse": 0.5}[does]
    assert [(group["lr"], group["momentum"]) for group in groups] == [(0.1, momentum)] * 2
    assert "__setstate__" not in vars(optimizer)


def test_the_log_names_no_option_that_a_class_has_kept(tmp_path, caplog):
    layer = torch.nn.Linear(2, 2)
    app = {"model": layer, "optimizer": KeepsRates(layer.parameters(), lr=0.1, momentum=0.5)}
    checkpoint.save(tmp_path / "c", app)
    app["optimizer"].param_groups[0] |= {"lr": 0.2, "momentum": 0.7}
    checkpoint.load(tmp_path / "c", app)
    assert app["optimizer"].param_groups[0]["lr"] == 0.2
    assert "momentum: 0.7 here, 0.5 stored" in caplog.text and "lr:" not in caplog.text


class Delegates(Outer):
    """Shares its groups and state with the inner one, which takes what is loaded."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.state = self.inner.state

    def __setstate__(self, state):
        self.inner.__setstate__(state)

    load_state_dict = torch.optim.Optimizer.load_state_dict


class UpdatesInner(Delegates):
    def __setstate__(self, state):
        for group, new in zip(self.inner.param_groups, state["param_groups"], strict=True):
            group.update(new)


class Adds(SGD):
    def __setstate__(self, state):
        for group, new in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(new)
        self.param_groups.append({**self.param_groups[0], "params": []})


class Merges(SGD):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        params = [each for group in self.param_groups for each in group["params"]]
        self.param_groups = [{**self.param_groups[0], "params": params}]


@pytest.mark.parametrize("make", [Delegates, UpdatesInner, Adds, Merges])
def test_steps_go_by_the_options_that_torchs_own_load_leaves(tmp_path, make):
    def made(lr):
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        return {"model": layers, "optimizer": make(groups_of(layers), lr=lr)}

    saved, by_torch, app = made(0.5), made(0.1), made(0.1)
    state = saved["optimizer"].state_dict()
    checkpoint.save(tmp_path / "c", saved)
    by_torch["optimizer"].load_state_dict(state)
    checkpoint.load(tmp_path / "c", app)
    stepping = [getattr(each["optimizer"], "inner", each["optimizer"]) for each in (by_torch, app)]
    rates = [[group["lr"] for group in each.param_groups] for each in stepping]
    assert rates[0] == rates[1] and {*rates[1]} == {0.5}


@pytest.mark.parametrize("make", [lambda inner: Around(inner), lambda inner: Around(Around(inner))])
@pytest.mark.parametrize("kind", [SGD, Outer, WithoutHooks])
def test_a_group_that_is_added_after_a_load_is_trained(make, kind):
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = make(kind(groups_of(layers[:1]), lr=0.1))
    groups = optimizer.param_groups
    load(optimizer)
    assert optimizer.param_groups is groups and optimizer.inner[0].param_groups is groups
    optimizer.add_param_group({"params": list(layers[1].parameters())})
    stepping = optimizer
    while hasattr(stepping, "inner"):
        stepping = stepping.inner[0] if isinstance(stepping, Around) else stepping.inner
    assert stepping.param_groups[1]["params"][0] is layers[1].weight


def test_optimizers_whose_groups_another_one_joins_share_them_after_a_load():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = (SGD(each.parameters(), lr=0.1) for each in layers)
    optimizer = Around(first, second)
    groups = list(optimizer.param_groups)
    load(optimizer)
    for group, own in zip(groups, (first, second), strict=True):
        assert own.param_groups[0] is group
    assert all(now is before for now, before in zip(optimizer.param_groups, groups, strict=True))


@pytest.mark.parametrize(
    "hold",
    [
        lambda inner: inner,
        lambda inner: tuple(zip(("body", "head"), inner, strict=True)),
        lambda inner: {"all": inner},
        lambda inner: tuple(map(Holder, inner)),
        lambda inner: (inner[0], Holder(inner[1])),
    ],
    ids=["found", "pairs", "in a dict", "holders", "one found"],
)
@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("kind", [SGD, WithoutHooks])
def test_whoever_steps_has_the_groups_of_the_optimizer_around_it(hold, is_within, kind):
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    inner = [kind(each.parameters(), lr=0.1) for each in layers]
    optimizer = Joining(hold, *inner)
    optimizer = Around(optimizer) if is_within else optimizer
    load(optimizer)
    for group, own in zip(optimizer.param_groups, inner, strict=True):
        assert own.param_groups[0] is group
    assert not any("__setstate__" in vars(each) for each in (optimizer, *inner))


def test_groups_that_an_optimizer_finds_anew_are_left_to_it(tmp_path):
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2))
    app = {"optimizer": ByProperty(groups_of(layers), lr=0.1), "model": layers}
    checkpoint.save(tmp_path / "c", app)
    (group,) = app["optimizer"].param_groups
    group["lr"] = 0.5
    checkpoint.load(tmp_path / "c", app)
    assert app["optimizer"].param_groups == (group,) and group["lr"] == 0.5


def test_a_schedule_and_steps_go_on_after_a_load(tmp_path):
    def app_of():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    def train(app, steps):
        for _ in range(steps):
            app["model"](torch.ones(1, 2)).square().sum().backward()
            app["optimizer"].step()
            app["schedule"].step()

    whole, saved, resumed = app_of(), app_of(), app_of()
    train(whole, 4)
    train(saved, 2)
    checkpoint.save(tmp_path / "c", saved)
    (held,) = resumed["optimizer"].param_groups
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    resumed["model"].zero_grad()
    for parameter, other in zip(resumed["model"].parameters(), saved["model"].parameters(), strict=True):
        parameter.grad = other.grad.clone()  # which this loop adds up
    train(resumed, 2)
    assert torch.equal(resumed["model"].weight, whole["model"].weight) and held["lr"] == 0.2


@pytest.mark.parametrize(
    "hold", [Holder, lambda inner: Holder(Holder(inner)), lambda inner: {"parts": (Holder(inner),)}]
)
def test_an_optimizer_in_objects_has_its_dicts_again(hold):
    inner = SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer, (group,) = Joining(lambda each: hold(*each), inner), inner.param_groups
    load(optimizer)
    assert inner.param_groups[0] is group and optimizer.param_groups[0] is group
    assert "__setstate__" not in vars(inner)


@pytest.mark.parametrize("of", [deque, OrderedDict, type("Own", (list,), {})])
def test_a_proxy_of_a_container_is_not_looked_into(of):
    """It claims to be of that class, whose methods refuse it."""
    shared = of()
    holder = Holder(SGD([torch.ones(2, requires_grad=True)], lr=0.1))
    holder.shared = weakref.proxy(shared)
    load(holder)
    assert isinstance(holder.shared, of)
