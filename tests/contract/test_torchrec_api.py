"""The API that torchrec.optim documents, by its names, signatures and uses, in both spellings that import it.

A user of torchrec.optim moves over by changing the import (docs/moving/torchrec.md has the differences).
"""

import copy
import importlib
import inspect
import io
from enum import Enum

import pytest
import torch

import shardopt
import shardopt.optim

REQUIRED = inspect.Parameter.empty


def names(module):
    """The namespace that a star import of `shardopt.optim.<module>`, or for "" of `shardopt.optim`, would give."""
    there = importlib.import_module(f"shardopt.optim.{module}".rstrip("."))
    offered = getattr(there, "__all__", vars(there))  # some are imported when they are asked for
    return {name: getattr(there, name) for name in offered}


# Module of torchrec.optim → class → arguments of its constructor with their defaults, in order.
SIGNATURES = {
    "keyed": {
        "KeyedOptimizer": {"params": REQUIRED, "state": REQUIRED, "param_groups": REQUIRED},
        "KeyedOptimizerWrapper": {"params": REQUIRED, "optim_factory": REQUIRED},
        "OptimizerWrapper": {"optimizer": REQUIRED},
        "CombinedOptimizer": {"optims": REQUIRED},
    },
    "clipping": {
        "GradientClippingOptimizer": {
            "optimizer": REQUIRED,
            "clipping": "none",
            "max_gradient": 0.1,
            "norm_type": 2.0,
            "enable_global_grad_clip": False,
            "param_to_pgs": None,
        },
    },
    "warmup": {
        "WarmupOptimizer": {
            "optimizer": REQUIRED,
            "stages": REQUIRED,
            "lr": 0.1,
            "lr_param": "lr",
            "param_name": "__warmup",
        },
        "WarmupStage": {
            "policy": "linear",
            "max_iters": 1,
            "value": 1.0,
            "lr_scale": 1.0,
            "decay_iters": -1,
            "sgdr_period": 1,
            "start_interpolating_iters": None,
            "end_value": None,
        },
    },
    "fused": {"FusedOptimizer": {}, "EmptyFusedOptimizer": {}, "FusedOptimizerModule": {}},
    "rowwise_adagrad": {
        "RowWiseAdagrad": {
            "params": REQUIRED,
            "lr": 1e-2,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
        },
    },
}
# Class → method → arguments.
METHODS = {
    "KeyedOptimizer": {
        "state_dict": {},
        "load_state_dict": {"state_dict": REQUIRED},
        "post_load_state_dict": {},
        "add_param_group": {"param_group": REQUIRED},
        "init_state": {"sparse_grad_parameter_names": None},
        "save_param_groups": {"save": REQUIRED},
    },
    "KeyedOptimizerWrapper": {"step": {"closure": None}},
    "OptimizerWrapper": {"step": {"closure": None}},
    "CombinedOptimizer": {"step": {"closure": None}, "prepend_opt_key": {"name": REQUIRED, "opt_key": REQUIRED}},
    "GradientClippingOptimizer": {"step": {"closure": None}, "clip_grad_norm_": {}},
    "WarmupOptimizer": {"step": {"closure": None}, "post_load_state_dict": {}},
    "FusedOptimizer": {"step": {"closure": None}},
}
ENUMS = {
    "GradientClipping": {"NORM": "norm", "VALUE": "value", "NONE": "none"},
    "WarmupPolicy": {
        "NONE": "none",
        "LINEAR": "linear",
        "CONSTANT": "constant",
        "POLY": "poly",
        "STEP": "step",
        "INVSQRT": "inv_sqrt",
        "COSINE_ANNEALING_WARM_RESTARTS": "cosine_annealing_warm_restarts",
        "INTERPOLATE": "interpolate",
    },
}
MODULES = {name: module for module, classes in SIGNATURES.items() for name in classes}
MODULES |= {"GradientClipping": "clipping", "WarmupPolicy": "warmup"}


def assert_takes(function, documented):
    """The documented arguments come first, in order and with their defaults; what is added has a default."""
    taken = [a for a in inspect.signature(function).parameters.values() if a.name != "self"]
    defaults = {a.name: a.default.value if isinstance(a.default, Enum) else a.default for a in taken}
    assert list(defaults.items())[: len(documented)] == list(documented.items())
    assert REQUIRED not in list(defaults.values())[len(documented) :]
    assert {a.kind for a in taken[: len(documented)]} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize(("name", "module"), MODULES.items(), ids=MODULES)
def test_names_are_found_in_both_spellings(name, module):
    assert names(module)[name] is names("")[name]


@pytest.mark.parametrize(
    ("name", "documented"),
    [(name, documented) for classes in SIGNATURES.values() for name, documented in classes.items()],
)
def test_constructors_take_what_is_documented(name, documented):
    if documented:  # the abstract ones document none
        assert_takes(getattr(shardopt.optim, name), documented)


@pytest.mark.parametrize(
    ("name", "method", "documented"),
    [(name, method, documented) for name, methods in METHODS.items() for method, documented in methods.items()],
)
def test_methods_take_what_is_documented(name, method, documented):
    assert_takes(getattr(getattr(shardopt.optim, name), method), documented)


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_documented_members_and_values(name):
    assert {member.name: member.value for member in getattr(shardopt.optim, name)} == ENUMS[name]


def test_class_relations_are_the_documented_ones():
    for name in ("KeyedOptimizerWrapper", "OptimizerWrapper", "CombinedOptimizer", "FusedOptimizer"):
        assert issubclass(getattr(shardopt.optim, name), shardopt.KeyedOptimizer)
    assert issubclass(shardopt.KeyedOptimizer, torch.optim.Optimizer)
    assert issubclass(shardopt.WarmupOptimizer, shardopt.optim.OptimizerWrapper)
    assert issubclass(shardopt.GradientClippingOptimizer, shardopt.optim.OptimizerWrapper)
    assert issubclass(shardopt.optim.EmptyFusedOptimizer, shardopt.optim.FusedOptimizer)


# How its documentation and its examples use it.

SPELLINGS = [lambda module: names(module), lambda module: names("")]
in_both_spellings = pytest.mark.parametrize("spelling", SPELLINGS, ids=["by module", "from the package"])


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4, mode="sum"), torch.nn.Linear(4, 1))


def train(network, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        network(torch.arange(6).view(3, 2)).square().sum().backward()
        optimizer.step()


@in_both_spellings
def test_a_keyed_optimizer_around_any_state(spelling):
    """Nested dicts and objects with `state_dict` among them; loaded in place and by name."""

    class Holder:
        def __init__(self, value):
            self.tensor = torch.tensor(value)

        def state_dict(self):
            return {"tensor": self.tensor}

        def load_state_dict(self, state_dict):
            self.tensor.copy_(state_dict["tensor"])

    one, two = torch.ones(2), torch.ones(2)
    state = {
        one: {"count": 1.0, "sum": torch.zeros(2), "nested": {"tensor": torch.zeros(2)}, "object": Holder([0.0, 0.0])},
        two: {"count": 2.0},
    }
    groups = [{"params": [one], "option": 3.0}, {"params": [two], "option": 4.0}]
    optimizer = spelling("keyed")["KeyedOptimizer"]({"one": one, "two": two}, state, groups)
    optimizer.save_param_groups(True)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["one"]["object"]["tensor"].tolist() == [0.0, 0.0]
    saved["state"]["one"]["count"] = 9.0
    saved["state"]["one"]["nested"]["tensor"].fill_(7.0)
    saved["state"]["one"]["object"]["tensor"].fill_(8.0)
    saved["param_groups"][1]["option"] = 5.0
    nested = state[one]["nested"]["tensor"]
    optimizer.load_state_dict(saved)
    assert (state[one]["count"], nested.tolist()) == (9.0, [7.0, 7.0])
    assert state[one]["object"].tensor.tolist() == [8.0, 8.0]
    assert [group["option"] for group in groups] == [3.0, 5.0]


@in_both_spellings
def test_the_saved_form_is_a_list_of_groups(spelling):
    one, two = torch.ones(2), torch.ones(2)
    state = {one: {"x": 1.0}, two: {"y": 2.0}}
    groups = [{"params": [one], "rate": 3.0, "other": 4.0}, {"params": [two], "rate": 5.0, "other": 6.0}]
    optimizer = spelling("keyed")["KeyedOptimizer"]({"one": one, "two": two}, state, groups)
    optimizer.save_param_groups(True)
    named = [{**group, "params": [name]} for name, group in zip(("one", "two"), groups, strict=True)]
    wanted = {"state": {"one": {"x": 1.0}, "two": {"y": 2.0}}, "param_groups": named}
    assert optimizer.state_dict() == wanted
    wanted["state"]["one"]["x"], named[0]["rate"], named[1]["other"] = 10.0, 8.0, 9.0
    optimizer.load_state_dict(wanted)
    assert optimizer.state_dict() == wanted
    with pytest.raises(ValueError, match=r"All state keys must be params\."):
        spelling("keyed")["KeyedOptimizer"]({"one": one}, {one: 1.0, "no parameter": 2.0}, [{"params": [one]}])


@in_both_spellings
def test_state_by_name_from_a_factory(spelling):
    network = model()
    optimizer = spelling("keyed")["KeyedOptimizerWrapper"](
        dict(network.named_parameters()), lambda params: torch.optim.Adagrad(params, lr=0.1)
    )
    optimizer.init_state({"0.weight"})
    train(network, optimizer)
    saved = optimizer.state_dict()
    assert list(saved) == ["state"]  # groups on request
    assert {name: sorted(entries) for name, entries in saved["state"].items()} == {
        name: ["step", "sum"] for name in ("0.weight", "1.weight", "1.bias")
    }


@in_both_spellings
def test_combined_optimizers_by_module(spelling):
    """The arrangement of torchrec's model-parallel models: tables under one optimizer, the rest under another."""
    keyed, network = spelling("keyed"), model()
    tables, dense = (
        keyed["KeyedOptimizerWrapper"](dict(network[i].named_parameters()), factory)
        for i, factory in enumerate((lambda params: torch.optim.SGD(params, lr=0.1), torch.optim.Adam))
    )
    optimizer = keyed["CombinedOptimizer"]([("tables", tables), dense])
    assert optimizer.optimizers == [("tables", tables), ("", dense)]
    assert list(optimizer.params) == ["tables.weight", "weight", "bias"]
    assert keyed["CombinedOptimizer"].prepend_opt_key("weight", "tables") == "tables.weight"
    assert keyed["CombinedOptimizer"].prepend_opt_key("weight", "") == "weight"
    train(network, optimizer)
    assert set(optimizer.state_dict()["state"]) == {"weight", "bias"}
    assert len(optimizer.param_groups) == 2


@in_both_spellings
def test_an_optimizer_wrapper_is_the_wrapped_one(spelling):
    keyed, parameter = spelling("keyed"), torch.ones(2)
    inner = keyed["KeyedOptimizer"](
        {"one": parameter}, {parameter: {"count": 1.0}}, [{"params": [parameter], "x": 2.0}]
    )
    wrapper = keyed["OptimizerWrapper"](inner)
    wrapper.save_param_groups(True)
    saved = wrapper.state_dict()
    saved["state"]["one"] = {"count": 999}
    saved["param_groups"][0]["x"] = 998
    wrapper.load_state_dict(saved)
    assert inner.state[parameter] == wrapper.state[parameter] == {"count": 999}
    assert inner.param_groups[0]["x"] == wrapper.param_groups[0]["x"] == 998


@in_both_spellings
def test_warm_up_around_a_keyed_optimizer(spelling):
    warmup, network = spelling("warmup"), model()
    optimizer = warmup["WarmupOptimizer"](
        spelling("keyed")["KeyedOptimizerWrapper"](
            dict(network.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.01)
        ),
        stages=[
            warmup["WarmupStage"](warmup["WarmupPolicy"].LINEAR, max_iters=100, value=1e-2, lr_scale=1),
            warmup["WarmupStage"](warmup["WarmupPolicy"].CONSTANT, max_iters=200),
        ],
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 * 1e-2]
    train(network, optimizer, 10)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (0.01 + 0.99 * 0.1))
    assert optimizer.state_dict()["state"]["__warmup"]["warmup"].tolist() == [10, 0]


def test_the_position_of_a_warm_up_stands_in_its_state():
    weight = torch.ones(2, requires_grad=True)

    class Stepper(shardopt.KeyedOptimizer):
        def step(self, closure):
            pass

    def made():
        inner = Stepper({"weight": weight}, {weight: {"x": torch.ones(2)}}, [{"params": [weight]}])
        return shardopt.WarmupOptimizer(inner, [shardopt.WarmupStage(max_iters=100, value=0.01)])

    one, other = made(), made()
    for _ in range(10):
        one.step()
    assert [*one.state] == [weight, "__warmup"] and len(one.state) == 2
    assert one.state["__warmup"]["warmup"].tolist() == [10, 0]
    other.load_state_dict(one.state_dict())
    # All of what is saved can be compared: numbers and tensors.
    torch.testing.assert_close(other.state_dict()["state"], one.state_dict()["state"])
    combined = shardopt.optim.CombinedOptimizer([("a", one)])
    assert combined.state["a.__warmup"] is one.state["__warmup"] and combined.state[weight] is one.state[weight]

    one.state = {weight: {"x": torch.zeros(2)}}
    assert one.state[weight]["x"].tolist() == [0, 0] and one.state["__warmup"]["warmup"].tolist() == [10, 0]
    one.state = {**one.state, "__warmup": {"warmup": torch.tensor([5, 0])}}
    assert one.state["__warmup"]["warmup"].tolist() == [5, 0] and [*one.state_dict()["state"]] == ["weight", "__warmup"]
    del one.state["__warmup"]
    one.step()
    assert one.state["__warmup"]["warmup"].tolist() == [1, 0]
    one.state.clear()
    assert [*one.state] == ["__warmup"] and one.state["__warmup"]["warmup"].tolist() == [0, 0]


def test_stages_that_were_saved_as_lines_are_known():
    parameter = torch.ones(2)

    def made(value):
        inner = shardopt.KeyedOptimizer({"w": parameter}, {}, [{"params": [parameter], "lr": 0.1}])
        return shardopt.WarmupOptimizer(inner, [shardopt.WarmupStage(max_iters=100, value=value)])

    position = torch.tensor([7, 0])
    entries = {"warmup": position, "stages": ["linear max_iters=100 lr_scale=1.0 value=0.01"]}
    optimizer = made(0.01)
    optimizer.load_state_dict({"state": {"__warmup": entries}})
    assert optimizer.state["__warmup"]["warmup"].tolist() == [7, 0]
    with pytest.raises(
        shardopt.errors.MismatchError, match=r"through \['linear max_iters=100 lr_scale=1.0 value=0.01'\]"
    ):
        made(0.02).load_state_dict({"state": {"__warmup": entries}})


@in_both_spellings
@pytest.mark.parametrize("how", ["NORM", "VALUE"])
def test_clipping_to_zero(spelling, how):
    weight = torch.ones(2, requires_grad=True)
    clipping = spelling("clipping")
    inner = spelling("keyed")["KeyedOptimizerWrapper"]({"w": weight}, lambda params: torch.optim.SGD(params, lr=1.0))
    kind = clipping["GradientClipping"][how]
    optimizer = clipping["GradientClippingOptimizer"](inner, kind, max_gradient=0.0, track_grad_norm=True)
    assert optimizer.last_total_grad_norm is None
    optimizer.step()  # without a gradient
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert weight.grad.tolist() == [0.0, 0.0] and weight.tolist() == [1.0, 1.0]
    torch.testing.assert_close(optimizer.last_total_grad_norm, torch.tensor(5.0))
    torch.testing.assert_close(optimizer.compute_total_grad_norm()[0], torch.tensor(0.0))
    assert optimizer.total_norm.dtype == torch.float64


@in_both_spellings
@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_clipping_around_a_keyed_optimizer(spelling, norm_type):
    clipping, network = spelling("clipping"), model()
    inner = spelling("keyed")["KeyedOptimizerWrapper"](
        dict(network.named_parameters()), lambda params: torch.optim.SGD(params, lr=1.0)
    )
    optimizer = clipping["GradientClippingOptimizer"](
        optimizer=inner, max_gradient=1e-3, clipping=clipping["GradientClipping"].NORM, norm_type=norm_type
    )
    before = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    train(network, optimizer)
    moved = before - torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert torch.linalg.vector_norm(moved, float(norm_type)).item() == pytest.approx(1e-3, rel=1e-3)


@in_both_spellings
def test_a_step_without_a_default_for_its_closure_is_wrapped(spelling):
    keyed, weight, reported = spelling("keyed"), torch.ones(2, requires_grad=True), []

    class Stepper(keyed["KeyedOptimizer"]):
        def step(self, closure):
            reported.append(closure)

    inner = Stepper({"weight": weight}, {}, [{"params": [weight]}])
    clipping = spelling("clipping")
    optimizer = clipping["GradientClippingOptimizer"](
        keyed["CombinedOptimizer"]([keyed["OptimizerWrapper"](inner)]), clipping["GradientClipping"].NORM
    )
    optimizer.zero_grad()
    weight.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step(lambda: 5.0) == 5.0
    optimizer.step()
    assert reported == [None, None]
    torch.testing.assert_close(weight.grad, torch.tensor([0.06, 0.08]))


@in_both_spellings
def test_fused_contracts(spelling):
    fused = spelling("fused")

    class Table(fused["FusedOptimizerModule"], torch.nn.Module):
        @property
        def fused_optimizer(self):
            return fused["EmptyFusedOptimizer"]()

    optimizer = Table().fused_optimizer
    assert isinstance(optimizer, fused["FusedOptimizer"])
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    with pytest.raises(TypeError, match="abstract"):
        fused["FusedOptimizer"]({}, {}, [])


def test_pickling_as_torchrecs_users_do():
    network = model()
    optimizer = shardopt.optim.KeyedOptimizerWrapper(dict(network.named_parameters()), torch.optim.Adam)
    train(network, optimizer)
    stream = io.BytesIO()
    torch.save(optimizer, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert str(loaded.state_dict()) == str(optimizer.state_dict())


# How its own tests load state: what `state_dict` gave, changed here and there, with groups as a list.


@in_both_spellings
def test_combined_state_is_loaded_as_a_list_of_groups(spelling):
    keyed, one, two = spelling("keyed"), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    first = keyed["KeyedOptimizer"]({"param_1": one}, {one: {"x": 1.0}}, [{"params": [one], "rate": 2.0}])
    second = keyed["KeyedOptimizer"]({"param_2": two}, {two: {"y": -1.0}}, [{"params": [two], "rate": -2.0}])
    for children in ([("ko1", first), ("", second)], [first, second]):
        first.state[one]["x"], second.state[two]["y"] = 1.0, -1.0
        first.param_groups[0]["rate"], second.param_groups[0]["rate"] = 2.0, -2.0
        optimizer = keyed["CombinedOptimizer"](children)
        optimizer.save_param_groups(True)
        name = "ko1.param_1" if isinstance(children[0], tuple) else "param_1"
        wanted = {
            "state": {name: {"x": 1.0}, "param_2": {"y": -1.0}},
            "param_groups": [{"params": [name], "rate": 2.0}, {"params": ["param_2"], "rate": -2.0}],
        }
        assert optimizer.state_dict() == wanted
        wanted["state"][name]["x"], wanted["state"]["param_2"]["y"] = 998, 997
        wanted["param_groups"][0]["rate"], wanted["param_groups"][1]["rate"] = 999, 996
        optimizer.load_state_dict(wanted)
        assert optimizer.state_dict() == wanted
        assert (first.state[one], second.state[two]) == ({"x": 998}, {"y": 997})
        assert (first.param_groups[0]["rate"], second.param_groups[0]["rate"]) == (999, 996)
        for incomplete in ({**wanted, "state": {}}, {"state": wanted["state"]}, {**wanted, "param_groups": []}):
            with pytest.raises(ValueError, match=r"found nothing|found no"):
                optimizer.load_state_dict(incomplete)
        assert optimizer.state_dict() == wanted


@in_both_spellings
def test_groups_are_loaded_by_their_names_and_not_by_their_places(spelling):
    params = {name: torch.ones(2) for name in "abc"}
    a, b, c = params.values()
    groups = [{"params": [a, b], "rate": 1.0}, {"params": [c], "rate": 2.0}]
    optimizer = spelling("keyed")["KeyedOptimizer"](params, {}, groups)
    optimizer.save_param_groups(True)
    saved = {
        "state": {},
        "param_groups": [
            {"params": ["c"], "rate": 6.0},
            {"params": ["b"], "rate": 5.0},
            {"params": ["a"], "rate": 5.0},
        ],
    }
    optimizer.load_state_dict(saved)
    assert [group["rate"] for group in groups] == [5.0, 6.0]
    saved["param_groups"][2]["rate"] = 7.0  # which the group of a and b cannot have beside b's
    with pytest.raises(ValueError, match="rate"):
        optimizer.load_state_dict(saved)
    assert [group["rate"] for group in groups] == [5.0, 6.0]


@in_both_spellings
def test_warm_up_is_loaded_into_another(spelling):
    warmup, keyed = spelling("warmup"), spelling("keyed")

    def made():
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        inner = keyed["KeyedOptimizerWrapper"]({"param_1": weight}, lambda params: torch.optim.SGD(params, lr=0.01))
        stages = [
            warmup["WarmupStage"](warmup["WarmupPolicy"].LINEAR, max_iters=100, value=1e-2, lr_scale=1),
            warmup["WarmupStage"](warmup["WarmupPolicy"].CONSTANT, max_iters=200),
        ]
        optimizer = warmup["WarmupOptimizer"](inner, stages, lr=10.0)
        optimizer.save_param_groups(True)
        return optimizer, weight

    (one, weight), (other, _) = made(), made()
    for _ in range(10):
        one.zero_grad()
        weight.square().sum().backward()
        one.step()
    other.step()
    assert one.param_groups[0]["lr"] != other.param_groups[0]["lr"]
    saved = one.state_dict()
    assert isinstance(saved["param_groups"], list) and saved["state"]["__warmup"]["warmup"].tolist() == [10, 0]
    other.load_state_dict(copy.deepcopy(saved))
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert other.state_dict()["state"]["__warmup"]["warmup"].tolist() == [10, 0]
    one.step(), other.step()
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]


@in_both_spellings
def test_wrapped_and_combined_and_warmed_up_in_one(spelling):
    keyed, warmup = spelling("keyed"), spelling("warmup")

    def made():
        network = model()
        tables, dense = (
            keyed["KeyedOptimizerWrapper"](dict(network[i].named_parameters()), factory)
            for i, factory in enumerate((lambda params: torch.optim.SGD(params, 0.1, 0.9), torch.optim.Adam))
        )
        combined = keyed["CombinedOptimizer"]([("tables", keyed["OptimizerWrapper"](tables)), ("dense", dense)])
        stages = [warmup["WarmupStage"](warmup["WarmupPolicy"].LINEAR, max_iters=4, value=0.5)]
        optimizer = warmup["WarmupOptimizer"](combined, stages)
        optimizer.save_param_groups(True)
        return network, optimizer

    (network, optimizer), (other_network, other) = made(), made()
    train(network, optimizer, 3)
    other.init_state()
    other_network.load_state_dict(network.state_dict())
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]][:2] == [
        ["tables.weight"],
        ["dense.bias", "dense.weight"],
    ]
    other.load_state_dict(copy.deepcopy(saved))
    train(network, optimizer, 3), train(other_network, other, 3)
    assert str(other.state_dict()) == str(optimizer.state_dict())
    assert all(torch.equal(*pair) for pair in zip(network.parameters(), other_network.parameters(), strict=True))


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_of_a_torch_optimizer_with_names(wrapped):
    """Positions in its groups and its state, and names beside them."""
    network, ours = model(), model()
    named = list(network.named_parameters())
    if wrapped:
        named = [(f"module.{name}", parameter) for name, parameter in named]
    groups = [{"params": named[:1], "lr": 0.2}, {"params": named[1:], "lr": 0.3}]
    theirs = torch.optim.Adam(groups, lr=0.1)
    train(network, theirs, 3)
    optimizer = shardopt.keyed("adam", ours.named_parameters(), groups=[{"match": r"^0\."}], lr=0.1)
    optimizer.init_state()
    ours.load_state_dict(network.state_dict())
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3]
    train(network, theirs, 2), train(ours, optimizer, 2)
    for parameter, other in zip(network.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(theirs.state[parameter]["exp_avg"], optimizer.state[other]["exp_avg"])
    mistaken = theirs.state_dict()
    mistaken["param_groups"][0]["param_names"] = ["nothing"]
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match="nothing"):
        optimizer.load_state_dict(mistaken)
    assert str(optimizer.state_dict()) == before
