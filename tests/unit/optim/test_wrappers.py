"""Optimizers made of optimizers: names, state of their own, and what cannot be combined."""

import copy
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import shardopt
from shardopt import KeyedOptimizer, checkpoint
from shardopt.algorithms import spec_of
from shardopt.errors import AlgorithmError, MismatchError, StateError
from shardopt.optim import CombinedOptimizer, OptimizerWrapper
from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from tests.support.drawn import examples
from tests.support.optimizers import Counting, same, train


def weight(*shape, fill=1.0):
    return torch.nn.Parameter(torch.full(shape or (2,), fill))


def sgd(*names, **options):
    return shardopt.keyed("sgd", {name: weight() for name in names}, **{"lr": 0.1, "momentum": 0.9, **options})


def step(optimizer, first=0):
    train(optimizer, dict(optimizer.params), first=first)


# --- combining -------------------------------------------------------------------------------------------------------


def test_names_have_the_key_of_their_optimizer_before_them():
    dense, sparse = sgd("w"), sgd("table.w")
    optimizer = CombinedOptimizer([("dense", dense), sparse])
    assert optimizer.optimizers == [("dense", dense), ("", sparse)]
    assert optimizer.params == {"dense.w": dense.params["w"], "table.w": sparse.params["table.w"]}
    assert CombinedOptimizer.prepend_opt_key("w", "dense") == "dense.w"
    assert CombinedOptimizer.prepend_opt_key("w", "") == "w"
    step(optimizer)
    saved = optimizer.state_dict()
    assert saved["state"].keys() == {"dense.w", "table.w"}
    assert {group["params"][0]: group["params"] for group in saved["param_groups"]} == {
        "dense.w": ["dense.w"],
        "table.w": ["table.w"],
    }
    assert saved["state"]["dense.w"]["momentum_buffer"] is dense.state[dense.params["w"]]["momentum_buffer"]


def test_names_of_nested_optimizers_add_up():
    inner = CombinedOptimizer([("b", sgd("w")), ("c", OptimizerWrapper(sgd("w")))])
    optimizer = OptimizerWrapper(CombinedOptimizer([("a", OptimizerWrapper(inner)), sgd("w")]))
    step(optimizer)
    assert list(optimizer.params) == ["a.b.w", "a.c.w", "w"]
    assert list(optimizer.state_dict()["state"]) == ["a.b.w", "a.c.w", "w"]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"]["a.c.w"]["momentum_buffer"] = torch.zeros(3)
    saved["param_groups"] = [group for group in saved["param_groups"] if "a.b.w" not in group["params"]]
    with pytest.raises(MismatchError) as error:
        optimizer.load_state_dict(saved)
    assert [problem.key for problem in error.value.problems] == ["param_groups.a.b.w", "state.a.c.w.momentum_buffer"]


def test_what_overlaps_is_refused():
    with pytest.raises(StateError, match=r"w: found state of two optimizers; .* give the optimizers keys"):
        CombinedOptimizer([sgd("w"), sgd("w")])
    CombinedOptimizer([("a", sgd("w")), sgd("w")])
    with pytest.raises(StateError, match=r"a\.w: found state of two optimizers"):
        CombinedOptimizer([("a", sgd("w")), sgd("a.w")])
    tied = weight()
    with pytest.raises(StateError, match=r"b\.y: found a parameter of optimizers 0 and 1"):
        CombinedOptimizer(
            [("a", shardopt.keyed("sgd", {"x": tied})), ("b", shardopt.keyed("adam", {"y": tied, "z": weight()}))]
        )
    optimizer = sgd("w")
    with pytest.raises(StateError, match=r"b\.w: found a parameter of optimizers 0 and 1"):
        CombinedOptimizer([("a", optimizer), ("b", optimizer)])
    with pytest.raises(StateError, match="nothing to combine"):
        CombinedOptimizer([])


@pytest.mark.parametrize("combine", [OptimizerWrapper, lambda optimizer: CombinedOptimizer([sgd("v"), optimizer])])
def test_what_could_not_be_loaded_all_or_nothing_is_refused(combine):
    class OwnLoading(KeyedOptimizer):
        def load_state_dict(self, state_dict, strict=True, convert_dtype=False):
            return super().load_state_dict(state_dict, strict, convert_dtype)

    elsewhere = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    elsewhere.params = {"w": elsewhere.param_groups[0]["params"][0]}
    with pytest.raises(StateError, match=r"a keyed optimizer of another library; .* KeyedOptimizer of its params"):
        CombinedOptimizer([elsewhere])
    with pytest.raises(StateError, match=r"SGD: found an optimizer without names; .* shardopt\.keyed"):
        combine(torch.optim.SGD([weight()]))
    with pytest.raises(StateError, match=r"OwnLoading: found a load_state_dict of its own"):
        combine(OwnLoading({"w": weight()}, {}, []))


def test_a_group_goes_to_the_optimizer_whose_key_its_names_have():
    optimizer = CombinedOptimizer([("a", sgd("w")), ("a.b", sgd("v")), ("c", sgd("w"))])
    new = weight()
    optimizer.add_param_group({"params": {"c.new": new}, "lr": 0.5})
    assert optimizer.optimizers[2][1].params["new"] is new
    assert optimizer.params["c.new"] is new
    assert optimizer.param_groups[-1]["lr"] == 0.5
    before = optimizer.state_dict()
    for names in (["d.new"], ["a.b.new"], ["a.new", "c.newer"]):
        with pytest.raises(StateError, match=r"names that fit [02] of the optimizers, whose keys are \['a', 'a\.b', "):
            optimizer.add_param_group({"params": {name: weight() for name in names}})
    with pytest.raises(StateError, match="added twice"):
        optimizer.add_param_group({"params": {"a.again": new}})
    assert optimizer.state_dict() == before


def test_a_group_that_is_added_to_a_child_is_seen():
    child = sgd("w")
    optimizer = CombinedOptimizer([("a", child), sgd("v")])
    new = weight()
    child.add_param_group({"params": {"new": new}})
    assert optimizer.params["a.new"] is new
    step(optimizer)
    assert optimizer.state[new] is child.state[new]
    assert [group["params"] for group in optimizer.param_groups][1] == [new]


def test_a_tensor_that_reaches_two_children_later_is_found():
    first, second = sgd("w"), sgd("v")
    optimizer = CombinedOptimizer([first, second])
    second.add_param_group({"params": {"again": first.params["w"]}})
    with pytest.raises(StateError, match="again: found a parameter of optimizers 0 and 1"):
        optimizer.params  # noqa: B018  # looking is what finds it


def test_state_of_a_parameter_is_found_without_looking_at_other_children():
    class Closed(KeyedOptimizer):
        @property
        def state(self):
            if getattr(self, "closed", False):
                raise AssertionError("another child was looked at")
            return self.__dict__["state"]

        @state.setter
        def state(self, value):
            self.__dict__["state"] = value

    def closed(name):
        parameter = weight()
        return Closed({name: parameter}, {parameter: {"n": 1}}, [{"params": [parameter]}])

    children = [closed(f"w{i}") for i in range(50)]
    optimizer = CombinedOptimizer(children)
    for child in children[:-1]:
        child.closed = True
    assert optimizer.state[optimizer.params["w49"]] == {"n": 1}
    children[-1].closed = True
    with pytest.raises(AssertionError):
        optimizer.state[optimizer.params["w49"]]


def test_state_is_the_childrens_and_can_be_changed_through_it():
    optimizer = CombinedOptimizer([("a", sgd("w")), sgd("v")])
    step(optimizer)
    parameters = list(optimizer.params.values())
    assert list(optimizer.state) == parameters
    optimizer.state[parameters[0]] = {"momentum_buffer": torch.zeros(2)}
    child = optimizer.optimizers[0][1]
    assert not child.state[parameters[0]]["momentum_buffer"].any()
    del optimizer.state[parameters[0]]
    assert parameters[0] not in child.state
    assert list(optimizer.state) == parameters[1:]
    with pytest.raises(KeyError):
        optimizer.state[weight()]
    with pytest.raises(KeyError):
        optimizer.state["nobody"]


def test_what_is_the_childrens_own_cannot_be_replaced():
    optimizer = CombinedOptimizer([sgd("w")])
    for name in ("param_groups", "defaults"):
        with pytest.raises(StateError, match=f"{name}: found a new {name}"):
            setattr(optimizer, name, {})
    with pytest.raises(AttributeError):
        optimizer.param_groups.append({})


def test_a_wrapper_follows_what_is_replaced():
    inner = sgd("w")
    optimizer = OptimizerWrapper(inner)
    optimizer.param_groups = groups = [{**inner.param_groups[0], "lr": 0.25}]
    optimizer.defaults = {**inner.defaults, "lr": 3.0}
    assert inner.param_groups is groups
    assert optimizer.defaults["lr"] == inner.defaults["lr"] == 3.0
    optimizer.state = {inner.params["w"]: {"momentum_buffer": torch.ones(2)}}
    assert optimizer.state is inner.state and len(inner.state) == 1
    optimizer.state = {}
    assert len(inner.state) == 0


def test_strings_in_state_are_kept_under_the_key_of_their_optimizer():
    optimizer = CombinedOptimizer([("a", sgd("w")), ("b", sgd("w")), sgd("v")])
    for _, child in optimizer.optimizers[:2]:
        child.state["count"] = {"n": 3, "t": torch.ones(1)}
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["a.count"] == saved["state"]["b.count"] == {"n": 3, "t": torch.ones(1)}
    assert optimizer.state["a.count"] is optimizer.optimizers[0][1].state["count"]
    optimizer.state["a.count"]["n"] = 4
    optimizer.load_state_dict(saved)
    assert optimizer.state["a.count"]["n"] == 3
    optimizer.optimizers[2][1].state["a.count"] = {"n": 0}
    with pytest.raises(StateError, match=r"a\.count: found state of two optimizers"):
        optimizer.state_dict()


def test_combined_optimizers_of_wrapped_combined_ones_have_all_their_state():
    optimizer = OptimizerWrapper(CombinedOptimizer([("a", OptimizerWrapper(sgd("w"))), OptimizerWrapper(sgd("v"))]))
    optimizer.init_state()
    assert {name: list(own) for name, own in optimizer.state_dict()["state"].items()} == {
        "a.w": ["momentum_buffer"],
        "v": ["momentum_buffer"],
    }
    assert len(optimizer.state) == 2


# --- state of a wrapper ----------------------------------------------------------------------------------------------


def test_state_of_a_wrapper_is_saved_and_resumed_over_and_under_a_combined_one():
    def build():
        return Counting(CombinedOptimizer([("a", Counting(sgd("w"))), Counting(sgd("v"), "__other")]), "__outer")

    optimizer = build()
    step(optimizer)
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    position = {"steps": 2, "sum": torch.tensor(3.0)}
    assert {name: saved["state"][name] for name in ("a.__count", "__other", "__outer")} == {
        "a.__count": position,
        "__other": position,
        "__outer": position,
    }
    resumed = build()
    resumed.init_state()
    total = resumed.position["sum"]
    resumed.load_state_dict(saved)
    assert (resumed.position["sum"], resumed.position["steps"]) == (3, 2)
    assert resumed.position["sum"] is total
    assert same(resumed.state_dict(), saved)


def test_missing_or_strange_state_of_a_wrapper_is_named():
    optimizer = CombinedOptimizer([("a", Counting(sgd("w")))])
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    plain = CombinedOptimizer([("a", sgd("w"))])
    plain.init_state()
    with pytest.raises(MismatchError, match=r"state\.a\.__count: found a value"):
        plain.load_state_dict(saved)
    del saved["state"]["a.__count"]["steps"]
    with pytest.raises(MismatchError, match=r"state\.a\.__count\.steps: found nothing"):
        optimizer.load_state_dict(saved)
    del saved["state"]["a.__count"]
    with pytest.raises(MismatchError, match=r"state\.a\.__count: found nothing; .* saved without Counting"):
        optimizer.load_state_dict(saved)
    assert optimizer.load_state_dict(saved, strict=False).missing_keys == ["state.a.__count"]
    assert optimizer.optimizers[0][1].position["steps"] == 1


def test_two_wrappers_cannot_keep_state_under_one_name():
    with pytest.raises(StateError, match="__count: found state of Counting and of what it wraps"):
        Counting(Counting(sgd("w"))).state_dict()
    with pytest.raises(StateError, match="__count: found state of two optimizers"):
        CombinedOptimizer([Counting(sgd("w")), Counting(sgd("v"))])


def test_gradients_of_the_closure_are_there_before_the_step():
    seen = []

    class Looking(OptimizerWrapper):
        def _before_step(self):
            seen.append(self.params["w"].grad.tolist())

    inner = sgd("w")
    inner.register_step_pre_hook(lambda *_: seen.append("step"))
    optimizer = Looking(inner)

    def closure():
        loss = 3 * optimizer.params["w"].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6
    assert seen == [[3.0, 3.0], "step"]


# --- state of any form -----------------------------------------------------------------------------------------------


class Window:
    """An object within state, with state of its own."""

    def __init__(self):
        self.values, self.at = torch.zeros(3), 0

    def state_dict(self):
        return {"values": self.values, "at": self.at}

    def load_state_dict(self, state):
        self.values.copy_(state["values"])
        self.at = state["at"]


def of_any_form(fill):
    parameter = weight()
    window = Window()
    window.values.fill_(fill)
    window.at = int(fill)
    state = {
        "nested": {"deeper": {"t": torch.full((2,), fill), "n": fill}},
        "history": [torch.full((2,), fill), {"t": torch.full((1,), fill)}],
        "pair": (torch.full((1,), fill), fill),
        "window": window,
        "plain": [fill, "text", None],
    }
    optimizer = KeyedOptimizer({"w": parameter}, {parameter: state}, [{"params": [parameter]}])
    optimizer.state["global"] = {"n": fill}
    return optimizer, state


def test_nested_state_lists_and_objects_are_loaded_in_place(tmp_path):
    saved_from, _ = of_any_form(2.0)
    for load in ("directly", "checkpoint"):
        optimizer, state = of_any_form(1.0)
        tensors = [
            state["nested"]["deeper"]["t"], *state["history"][:1], state["history"][1]["t"], state["pair"][0],
            state["window"].values,
        ]  # fmt: skip
        window, nested, history = state["window"], state["nested"], state["history"]
        if load == "directly":
            optimizer.load_state_dict(copy.deepcopy(saved_from.state_dict()))
        else:
            checkpoint.save(tmp_path, {"optimizer": saved_from})
            checkpoint.load(tmp_path, {"optimizer": optimizer})
        assert all(tensor.eq(2).all() for tensor in tensors)
        assert state["nested"]["deeper"]["t"] is tensors[0]
        assert state["history"][0] is tensors[1]
        assert state["pair"][0] is tensors[3]
        assert (state["window"], state["nested"], state["history"]) == (window, nested, history)
        assert (window.at, nested["deeper"]["n"], state["plain"], state["pair"][1]) == (
            2,
            2.0,
            [2.0, "text", None],
            2.0,
        )
        assert optimizer.state["global"] == {"n": 2.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w["nested"]["deeper"].pop("t"), r"state\.w\.nested\.deeper\.t: found nothing"),
        (lambda w: w["nested"].update(deeper=3), r"state\.w\.nested\.deeper: found a plain value; required a mapping"),
        (lambda w: w["history"].pop(), r"state\.w\.history: found 1 elements; required 2"),
        (lambda w: w["history"][1].update(t=torch.zeros(4)), r"state\.w\.history\.1\.t: found shape \(4,\)"),
        (lambda w: w["window"].pop("at"), r"state\.w\.window\.at: found nothing"),
        (lambda w: w["window"].update(values=torch.zeros(2)), r"state\.w\.window\.values: found shape \(2,\)"),
        (lambda w: w.update(window=None), r"state\.w\.window: found a plain value; required a mapping"),
    ],
)
def test_what_does_not_fit_deep_inside_is_refused_and_nothing_is_changed(change, message):
    optimizer, _ = of_any_form(1.0)
    saved = copy.deepcopy(of_any_form(2.0)[0].state_dict())
    change(saved["state"]["w"])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(MismatchError, match=message):
        optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert same(now, before)


def test_dtypes_of_state_are_kept_whatever_the_parameters_have():
    def build(steps, moments):
        parameter = torch.nn.Parameter(
            torch.ones(2, dtype=torch.bfloat16 if moments == torch.float32 else torch.float32)
        )
        optimizer = OptimizerWrapper(shardopt.keyed("adam", {"w": parameter}))
        optimizer.init_state()
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[parameter][name] = torch.full((2,), steps / 3, dtype=moments)
        return optimizer, parameter

    for moments in (torch.float32, torch.bfloat16):
        (one, _), (other, parameter) = build(2, moments), build(0, moments)
        other.load_state_dict(one.state_dict())
        loaded = other.state[parameter]
        assert loaded["exp_avg"].dtype == loaded["exp_avg_sq"].dtype == moments
        assert loaded["exp_avg"].equal(torch.full((2,), 2 / 3, dtype=moments))


def test_tied_parameters_load_their_own_state():
    tied = weight()
    optimizer = CombinedOptimizer(
        [("m", OptimizerWrapper(shardopt.keyed("adam", {"embed": tied, "head": tied, "b": weight()})))]
    )
    step(optimizer)
    assert list(optimizer.params) == ["m.embed", "m.head", "m.b"]
    saved = optimizer.state_dict()
    assert list(saved["state"]) == ["m.embed", "m.b"]
    assert saved["state"]["m.embed"]["step"] == 1
    optimizer.load_state_dict(copy.deepcopy(saved))
    optimizer.init_state(["m.head"])


# --- several algorithms by pattern -----------------------------------------------------------------------------------


def test_groups_may_have_algorithms_of_their_own():
    params = {"embed.w": weight(3, 2), "layer.w": weight(2, 2), "layer.b": weight(2), "head.w": weight(2, 2)}
    optimizer = shardopt.keyed(
        "adamw",
        params,
        lr=0.25,
        weight_decay=0.0,
        groups=[
            {"match": "embed", "algorithm": torch.optim.SGD, "lr": 0.5},
            {"match": r"layer\.w", "algorithm": "muon", "lr": 0.125},
            {"match": "b$", "algorithm": "ADAMW", "betas": (0.5, 0.5)},
            {"match": "head", "algorithm": "muon"},
        ],
    )
    assert isinstance(optimizer, CombinedOptimizer)
    assert optimizer.params == params
    sgd, muon, adamw = (child._local.optimizer for _, child in optimizer.optimizers)
    assert (type(sgd), type(muon), type(adamw)) == (torch.optim.SGD, spec_of("muon").optimizer, torch.optim.AdamW)
    assert [group["lr"] for group in muon.param_groups] == [0.125, muon.defaults["lr"]]
    assert (adamw.param_groups[0]["lr"], adamw.param_groups[0]["betas"]) == (0.25, (0.5, 0.5))
    assert muon.param_groups[0]["weight_decay"] == muon.defaults["weight_decay"] != 0
    step(optimizer)
    saved = optimizer.state_dict()
    assert saved["state"].keys() == params.keys() - {"embed.w"}
    assert sorted(group["params"] for group in saved["param_groups"]) == [[], *sorted([name] for name in params)]
    optimizer.load_state_dict(copy.deepcopy(saved))


def test_one_algorithm_by_several_names_is_one_optimizer():
    optimizer = shardopt.keyed(
        "adam", {"w": weight(), "b": weight()}, lr=0.5, groups=[{"match": "b", "algorithm": torch.optim.Adam}]
    )
    assert isinstance(optimizer, shardopt.optim.KeyedOptimizerWrapper)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    only = shardopt.keyed("adam", {"w": weight(2, 2)}, groups=[{"match": "w", "algorithm": "muon"}])
    (_, muon), (_, rest) = only.optimizers
    assert type(muon._local.optimizer) is spec_of("muon").optimizer
    assert not rest.params  # of another rank, or another job that resumes


def test_options_are_those_of_the_groups_own_algorithm():
    def build(**group):
        return shardopt.keyed("adam", {"w": weight(), "b": weight()}, groups=[{"match": "b", **group}])

    build(algorithm="sgd", momentum=0.9)
    shardopt.keyed("sgd", {"w": weight()}, momentum=0.9, groups=[{"match": "w", "nesterov": True}])
    with pytest.raises(AlgorithmError, match=r"groups\[0\]\.momentum: found an unknown option"):
        build(momentum=0.9)
    with pytest.raises(AlgorithmError, match=r"groups\[0\]\.betas: found an unknown option"):
        build(algorithm="sgd", betas=(0.9, 0.9))
    with pytest.raises(AlgorithmError, match="nobody"):
        build(algorithm="nobody")


# --- torch's getters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize(
    "wrap", [lambda o: o, OptimizerWrapper, lambda o: CombinedOptimizer([o]), lambda o: CombinedOptimizer([("m", o)])]
)
def test_torchs_getters_and_setters_take_the_view_whatever_is_saved(groups, wrap):
    model, twin = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = wrap(shardopt.keyed("adamw", model.named_parameters(), foreach=None))
    optimizer.save_param_groups(groups)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.5)
    saved = get_optimizer_state_dict(twin, plain)
    for call in (
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: get_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, saved),
    ):
        with pytest.raises(StateError, match=r"as_torch\(\)"):
            call()
    assert not optimizer.state_dict()["state"]
    set_optimizer_state_dict(model, optimizer.as_torch(), saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]
    for name, parameter in twin.named_parameters():
        assert same(dict(optimizer.state[model.get_parameter(name)]), dict(plain.state[parameter]))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    view = get_optimizer_state_dict(model, optimizer.as_torch(), options=options)
    assert same(view, get_optimizer_state_dict(twin, plain, options=options))
    assert ("param_groups" in optimizer.state_dict()) == groups


# --- fused -----------------------------------------------------------------------------------------------------------


def test_the_fused_contracts_are_abstract():
    with pytest.raises(TypeError, match="abstract"):
        FusedOptimizer({}, {}, [])
    with pytest.raises(TypeError, match="abstract"):
        FusedOptimizerModule()

    class Table(FusedOptimizerModule):
        @property
        def fused_optimizer(self):
            return EmptyFusedOptimizer()

    optimizer = Table().fused_optimizer
    assert isinstance(optimizer, FusedOptimizer)
    optimizer.zero_grad()
    assert (optimizer.step(), optimizer.step(lambda: 3)) == (None, 3)


def test_an_empty_fused_optimizer_takes_part_in_a_combined_one():
    optimizer = CombinedOptimizer([("fused", EmptyFusedOptimizer()), ("dense", OptimizerWrapper(sgd("w")))])
    optimizer.init_state()
    step(optimizer)
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert list(saved["state"]) == ["dense.w"]
    optimizer.load_state_dict(saved)
    assert EmptyFusedOptimizer().state_dict() == {"state": {}}


# --- any nesting -----------------------------------------------------------------------------------------------------


@st.composite
def trees(draw, depth=4):
    """Nested tuples: ("adam",), ("wrap", tree), ("count", tree) or ("combine", [(key or None, tree), ...])."""
    kind = draw(st.sampled_from(["leaf", "wrap", "count", "combine", "combine"] if depth else ["leaf"]))
    if kind == "leaf":
        return (draw(st.sampled_from(["adam", "sgd", "adagrad", "rprop"])),)
    if kind != "combine":
        return kind, draw(trees(depth=depth - 1))
    keys = draw(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=3))
    return kind, [(key, draw(trees(depth=depth - 1))) for key in keys]


OF_LEAVES = {
    "adam": {"lr": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "rprop": {"lr": 0.01},
}


def built(tree, numbers=None):
    """The optimizer that a tree tells of; every parameter and every wrapper with state has a name of its own."""
    numbers = iter(range(10_000)) if numbers is None else numbers
    kind, *parts = tree
    number = next(numbers)
    if kind in OF_LEAVES:
        params = {f"{number}.w": weight(2, 2), f"{number}.b": weight(3, fill=0.5)}
        return shardopt.keyed(kind, params, groups=[{"match": "b", "lr": 0.03}], **OF_LEAVES[kind])
    if kind == "combine":
        children = [(f"{key}{i}" if key else "", built(part, numbers)) for i, (key, part) in enumerate(parts[0])]
        return CombinedOptimizer([child if child[0] else child[1] for child in children])
    inner = built(parts[0], numbers)
    return OptimizerWrapper(inner) if kind == "wrap" else Counting(inner, f"__count{number}")


def alike(one, other):
    assert same(one.state_dict(), other.state_dict())
    assert list(one.params) == list(other.params)
    assert all(map(torch.equal, one.params.values(), other.params.values()))


@settings(max_examples=examples(60))
@given(tree=trees(), steps=st.integers(0, 2))
def test_loading_what_was_saved_is_the_identity_for_any_nesting(tree, steps):
    optimizer, untouched = built(tree), built(tree)
    optimizer.init_state()
    untouched.init_state()
    for i in range(steps):
        step(optimizer, i)
        step(untouched, i)
    alike(optimizer, untouched)
    saved = copy.deepcopy(optimizer.state_dict())
    assert optimizer.load_state_dict(saved) == ([], [])
    alike(optimizer, untouched)
    step(optimizer, steps)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    optimizer.load_state_dict(saved)
    assert same(optimizer.state_dict(), saved)
    assert len(optimizer.state) == len(optimizer.params) == len(saved["state"]) - str(tree).count("count")


@settings(max_examples=examples(40))
@given(tree=trees(), steps=st.integers(1, 2))
def test_steps_after_a_checkpoint_of_any_nesting_are_those_of_an_uninterrupted_run(tree, steps):
    optimizer, resumed = built(tree), built(tree)
    for i in range(steps):
        step(optimizer, i)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    for parameter in resumed.params.values():
        parameter.data.fill_(7)
    resumed.init_state()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, {"model": dict(optimizer.params), "optimizer": optimizer})
        checkpoint.load(folder, {"model": dict(resumed.params), "optimizer": resumed})
    for i in range(steps, steps + 2):
        step(optimizer, i)
        step(resumed, i)
    alike(optimizer, resumed)
