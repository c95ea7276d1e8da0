"""App to flat state and back: keys and paths, whose memory is whose, and what is refused."""

import copy
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from enum import IntEnum, StrEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from shardopt import checkpoint
from shardopt.errors import StateError
from shardopt.state.flatten import flatten
from shardopt.state.paths import Index, is_below, join, nest
from shardopt.state.state import PerRank, Stateful

Pair = namedtuple("Pair", "left right")


class Holder:
    """An object that gives `state`, by reference, and remembers what it was handed."""

    def __init__(self, state, log=None):
        self.state, self.loaded, self.log = state, None, log

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded = state
        if self.log is not None:
            self.log.append(self)


def paths(flat):
    return {key: leaf.path for key, leaf in flat.leaves.items()}


def roundtrip(path, saved, into):
    checkpoint.save(path, saved)
    return checkpoint.load(path, into)


# Keys and paths.


def test_keys_are_the_parts_joined_by_dots():
    t = torch.zeros(2)
    app = {
        "model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        "lists": [t, {"deep": t}],
        "mixed": (t, 3, Pair(t, "x")),
        "by number": {0: t, 1: {"a.b": t}},
        "plain": {"list": [1, 2], "tuple": (1,), "empty": {}, "count": Counter("ab"), "none": None},
        "array": np.zeros(2),
        "of rank": PerRank({"t": t}),
        "": t,
    }
    assert paths(flatten(app)) == {
        "model.0.weight": ("model", "0.weight"),
        "model.0.bias": ("model", "0.bias"),
        "model.1.weight": ("model", "1.weight"),
        "model.1.bias": ("model", "1.bias"),
        "model.1.running_mean": ("model", "1.running_mean"),
        "model.1.running_var": ("model", "1.running_var"),
        "model.1.num_batches_tracked": ("model", "1.num_batches_tracked"),
        "lists.0": ("lists", 0),
        "lists.1.deep": ("lists", 1, "deep"),
        "mixed.0": ("mixed", 0),
        "mixed.1": ("mixed", 1),
        "mixed.2.0": ("mixed", 2, 0),
        "mixed.2.1": ("mixed", 2, 1),
        "by number.0": ("by number", 0),
        "by number.1.a.b": ("by number", 1, "a.b"),
        "plain.list": ("plain", "list"),
        "plain.tuple": ("plain", "tuple"),
        "plain.empty": ("plain", "empty"),
        "plain.count": ("plain", "count"),
        "plain.none": ("plain", "none"),
        "array": ("array",),
        "of rank": ("of rank",),
        "": ("",),
    }
    kinds = {key: [type(part) for part in path] for key, path in paths(flatten(app)).items()}
    assert kinds["lists.1.deep"] == [str, Index, str]
    assert kinds["by number.1.a.b"] == [str, int, str]
    assert kinds["mixed.2.0"] == [str, Index, Index]


def test_tensors_have_the_keys_that_torchs_own_checkpoints_give_them():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": torch.tensor(0.1)}, {"params": model[1:].parameters()}]
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    extra = {"list": [torch.ones(1), {"b": torch.ones(1)}], "n": 3, "by number": {3: torch.ones(1)}}
    weights, state = get_state_dict(model, optimizer)
    theirs, _ = flatten_state_dict({"model": weights, "optimizer": {"state": state["state"]}, "extra": extra})
    ours = flatten({"model": model, "optimizer": optimizer, "extra": extra})
    assert set(ours.tensors()) == {key for key, value in theirs.items() if isinstance(value, torch.Tensor)}
    assert ours.leaves["extra.n"].value == 3


PARTS = st.text("ab.", max_size=3) | st.integers(0, 3)
TREES = st.recursive(
    st.integers() | st.builds(lambda: torch.zeros(1)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(PARTS, inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


def as_lists(tree):
    """Tuples as `nest` gives them back where they hold tensors."""
    if isinstance(tree, dict):
        return {part: as_lists(child) for part, child in tree.items()}
    if isinstance(tree, list | tuple):
        holds = flatten({"x": tree}).tensors()
        return [as_lists(child) for child in tree] if holds else tree
    return tree


def equal(a, b):
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(equal(a[part], b[part]) for part in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a is b or (not isinstance(a, torch.Tensor) and a == b)


@given(st.dictionaries(PARTS, TREES, min_size=1, max_size=4))
def test_nest_is_the_way_back(app):
    try:
        flat = flatten(app)
    except StateError as error:
        assert "two paths give one key" in str(error)
        return
    assert {join(leaf.path) for leaf in flat.leaves.values()} == set(flat.leaves)
    assert equal(nest({leaf.path: leaf.value for leaf in flat.leaves.values()}), as_lists(app))


@given(st.dictionaries(PARTS, TREES, min_size=1, max_size=4))
def test_every_leaf_can_be_replaced_where_it_is(app):
    try:
        flat = flatten(app)
    except StateError:
        return
    for number, leaf in enumerate(flat.leaves.values()):
        leaf.replace(f"number {number}")
    # Not flattened again: what was a list of tensors is now one value, whose key may be another's.
    texts = str(app)
    assert all(texts.count(f"'number {number}'") == 1 for number in range(len(flat.leaves)))


# What is refused.


class Colour(StrEnum):
    RED = "red"


class Number(IntEnum):
    ONE = 1


def looped():
    loop = {}
    loop["again"] = loop
    return loop


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ({"a.b": 1, "a": {"b": 2}}, r"a\.b: found the paths"),
        ({"a": {0: 1, "0": 2}}, r"a\.0: found the paths"),
        ({"a": [torch.ones(1)], "a.0": 1}, r"a\.0: found the paths"),
        ({"a": {1.5: 1}}, r"a\.1\.5: found a key of type float"),
        ({"a": {True: 1}}, r"a\.True: found a key of type bool"),
        ({"a": {None: torch.ones(1)}}, "a key of type NoneType"),
        ({Colour.RED: 1}, "a key of type Colour"),
        ({"a": {Number.ONE: 1}}, "a key of type Number"),
        ({"a": {"\ud800": 1}}, "unencodable"),
        ({"__metadata__": 1}, "reserved"),
        ({"__xxh3__.r00000": torch.ones(1)}, "reserved"),
        ({"__per_rank__": {"r00000": torch.ones(1)}}, "reserved"),
        ([1], "found a list; required a dict"),
        ({"a": Holder([1])}, r"a: found state_dict\(\) gave a list"),
        ({"a": Holder({"t": {1.5: torch.ones(1)}})}, "key of type float"),
        (looped(), "contains itself"),
        ({"a": Holder(looped())}, "contains itself"),
        (types.MappingProxyType({"a": 1}), "app: found a mappingproxy"),
        ({"a": types.MappingProxyType({"b": 1})}, "a: found a mappingproxy"),
        ({"a": read_only(np.zeros(2))}, "a: found a read-only"),
        ({"a": np.array(["x"])}, "a: found a NumPy array of <U1"),
        ({"a": np.zeros(2, ">f4")}, "a: found a NumPy array of >f4"),
        ({"a": np.zeros(2)[::-1]}, r"strides \(-8,\)"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, "a masked array"),
    ],
)
def test_what_has_no_key_or_no_memory_is_refused_by_name(app, said):
    with pytest.raises(StateError, match=said):
        flatten(app)


def test_keys_that_are_ids_of_parameters_are_refused_as_no_other_process_has_them():
    model, other = nn.Linear(2, 2), torch.ones(2)
    own = Holder({"param_states": {id(each): {"exp_avg": torch.zeros(2)} for each in (other, model.weight)}})
    with pytest.raises(
        StateError, match=rf"own\.param_states\.{id(model.weight)}: found the id\(\) of 'model\.weight'"
    ):
        flatten({"own": own, "model": model})
    assert len(flatten({"own": own}).leaves) == 2  # other numbers as large may last


def test_a_class_with_state_is_not_an_object_with_state():
    with pytest.raises(StateError, match="type"):
        checkpoint.save("memory://shardopt-tests/class", {"a": nn.Linear})


class Raising(dict):
    __getattr__ = dict.__getitem__


class Returning(dict):
    __getattr__ = dict.get


@pytest.mark.parametrize("kind", [Raising, Returning])
def test_entries_of_a_dict_that_are_its_attributes_are_entries(tmp_path, kind):
    def app_of(value):
        return {"config": kind(lr=value, step=kind(state_dict=value)), "weights": torch.full((2,), value)}

    checkpoint.save(tmp_path / "c", app_of(2.0))
    with checkpoint.Manager(tmp_path / "run") as manager:
        manager.save(1, app_of(2.0))
    app = app_of(0.0)
    checkpoint.load(tmp_path / "c", app)
    assert app["config"] == app_of(2.0)["config"] and type(app["config"]) is kind


# Whose memory is whose.


def test_flatten_copies_no_tensor_and_changes_nothing():
    model = nn.Linear(2, 2)
    array, t = np.zeros(3), torch.zeros(2, requires_grad=True)
    inner = {"t": t, "plain": {"a": [1]}, "tuple": ({"t": t, "n": 1},)}
    holder = Holder(inner)
    app = {"model": model, "array": array, "holder": holder, "list": [t, 3]}
    before = copy.copy(app), copy.copy(inner), copy.copy(app["list"])
    flat = flatten(app)
    assert flat.leaves["model.weight"].value is model.weight
    assert flat.leaves["holder.t"].value is t
    assert flat.leaves["array"].value.data_ptr() == array.ctypes.data
    for leaf in flat.leaves.values():
        if not isinstance(leaf.value, torch.Tensor):
            leaf.replace("changed")
    assert all(holder.state[name] is before[1][name] for name in inner)  # an object's own containers are its own
    assert inner["plain"] == {"a": [1]} and inner["tuple"][0]["n"] == 1
    assert flat.targets[1].state["plain"] == "changed" and flat.targets[1].state["tuple"][0]["n"] == "changed"
    assert app["list"] == [t, "changed"]  # those of the app are what is loaded into


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, types.MappingProxyType], ids=lambda kind: kind.__name__)
def test_containers_within_an_objects_state_stay_its_own(kind):
    inside = kind({"n": 1, "t": torch.zeros(1)})
    holder = Holder({"inside": inside})
    flat = flatten({"holder": holder})
    flat.leaves["holder.inside.n"].replace(2)
    assert inside["n"] == 1
    (target,) = flat.targets
    assert isinstance(target.state["inside"], Mapping) and target.state["inside"]["n"] == 2


def test_loading_reaches_the_callers_own_containers(tmp_path):
    def make(number):
        return {
            "step": number,
            "nested": {"a": {"b": [number]}, "list": [torch.full((2,), float(number)), number, {"n": number}]},
            "tuple": (torch.full((2,), float(number)), number, Pair(number, torch.zeros(1) + number)),
            "array": np.full((2, 2), number),
            "turned": np.full((2, 3), number).T,
            "count": Counter({"a": number}),
            "ordered": OrderedDict(n=number),
        }

    app, saved = make(0), make(7)
    nested, inner, array, turned, ordered = (
        app["nested"],
        app["nested"]["list"],
        app["array"],
        app["turned"],
        app["ordered"],
    )
    tensor, pair_tensor = app["tuple"][0], app["tuple"][2].right
    roundtrip(tmp_path / "c", saved, app)
    assert app["nested"] is nested and nested["list"] is inner and app["ordered"] is ordered
    assert (app["step"], nested["a"], inner[1], inner[2], dict(ordered)) == (7, {"b": [7]}, 7, {"n": 7}, {"n": 7})
    assert type(app["tuple"]) is tuple and type(app["tuple"][2]) is Pair
    assert app["tuple"][0] is tensor and app["tuple"][2].right is pair_tensor and tensor[0] == pair_tensor[0] == 7
    assert app["tuple"][1:] == (7, Pair(7, pair_tensor))
    assert app["array"] is array and (array == 7).all()
    assert app["turned"] is turned and (turned == 7).all()
    assert app["count"] == Counter({"a": 7})


def test_a_failed_load_changes_nothing(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": torch.ones(2), "h": Holder({"t": torch.ones(1), "n": 1}), "n": 1, "x": 1})
    holder = Holder({"t": torch.zeros(1), "n": 0})
    app = {"a": torch.zeros(2), "h": holder, "n": 0}
    with pytest.raises(ValueError, match="x: found a plain value"):
        checkpoint.load(tmp_path / "c", app)
    assert app["n"] == 0 and not app["a"].any() and holder.loaded is None
    assert holder.state["n"] == 0 and not holder.state["t"].any()


# Objects with state.


def test_objects_within_objects_get_their_state_first(tmp_path):
    log = []

    def make(number):
        inner = Holder({"n": number, "t": torch.full((2,), float(number))}, log)
        innermost = Holder({"only": number}, log)
        outer = Holder({"inner": inner, "list": [innermost, torch.zeros(1)], "m": number}, log)
        return {"first": Holder({"n": number}, log), "deep": {"list": [outer]}}, inner, innermost, outer

    saved, *_ = make(7)
    app, inner, innermost, outer = make(0)
    assert set(flatten(app).leaves) == {
        "first",
        "deep.list.0.inner.n",
        "deep.list.0.inner.t",
        "deep.list.0.list.0",
        "deep.list.0.list.1",
        "deep.list.0.m",
    }
    log.clear()
    roundtrip(tmp_path / "c", saved, app)
    assert log == [app["first"], inner, innermost, outer]
    assert inner.loaded["n"] == 7 and inner.loaded["t"] is inner.state["t"] and inner.state["t"][0] == 7
    assert innermost.loaded == {"only": 7}
    assert outer.loaded["m"] == 7 and outer.loaded["inner"] is inner


def test_a_part_without_tensors_is_one_value(tmp_path):
    """A fresh object may have fewer entries than the one that was saved."""
    saved = Holder({"t": torch.ones(1), "history": {"a": 1, "b": [1, {"c": 2}]}})
    fresh = Holder({"t": torch.zeros(1), "history": {}})
    assert set(flatten({"x": saved}).leaves) == {"x.t", "x.history"}
    roundtrip(tmp_path / "c", {"x": saved}, {"x": fresh})
    assert fresh.loaded["history"] == {"a": 1, "b": [1, {"c": 2}]}
    plain = Holder({})
    roundtrip(tmp_path / "d", {"x": Holder({"a": 1, 2: {"b": None}})}, {"x": plain})
    assert plain.loaded == {"a": 1, 2: {"b": None}}


@pytest.mark.parametrize("kind", [OrderedDict, Counter, lambda d: defaultdict(int, d)])
def test_whatever_dict_an_object_gives_it_gets_back(tmp_path, kind):
    fresh = Holder(kind({"a": 0}))
    roundtrip(tmp_path / "c", {"x": Holder(kind({"a": 1, "b": 2}))}, {"x": fresh})
    assert fresh.loaded == {"a": 1, "b": 2}
    assert type(fresh.loaded) is type(fresh.state)
    assert fresh.state == {"a": 0}


class Versioned(nn.Module):
    """A module with a version, a buffer that is not saved, and extra state of its own."""

    _version = 3

    def __init__(self, extra):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.extra, self.seen_version = extra, None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.seen_version = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize(
    ("extra", "fresh"),
    [({"a": 1}, {"a": 0}), (7, None), ({"t": torch.ones(2), "n": 1}, {"t": torch.zeros(2), "n": 0}), ((1, 2), ())],
    ids=["dict", "int", "tensors", "tuple"],
)
def test_modules_keep_versions_and_extra_state(tmp_path, extra, fresh):
    saved, module = nn.Sequential(Versioned(extra)), nn.Sequential(Versioned(fresh))
    with torch.no_grad():
        saved[0].weight.fill_(7)
    weight = module[0].weight
    roundtrip(tmp_path / "c", {"m": saved}, {"m": module})
    assert module[0].weight is weight and weight.tolist() == [7, 7]
    assert module[0].seen_version == 3
    if isinstance(extra, dict) and "t" in extra:
        assert module[0].extra["t"] is fresh["t"] and module[0].extra["n"] == 1 and fresh["t"].tolist() == [1, 1]
    else:
        assert module[0].extra == extra and type(module[0].extra) is type(extra)


def test_a_module_whose_state_dict_was_replaced_is_asked_as_it_wants(tmp_path):
    """On the instance, as torch's distributed getters do, and by its class; neither has torch's arguments."""

    class Short(nn.Linear):
        def state_dict(self):
            return {"short": self.weight.detach()}

        def load_state_dict(self, state):
            self.weight.detach().copy_(state["short"])

    def modules(value):
        patched, short = nn.Linear(2, 1), Short(2, 1)
        patched.state_dict = lambda: {"w": patched.weight.detach()}
        patched.load_state_dict = lambda state: patched.weight.detach().copy_(state["w"])
        for module in (patched, short):
            nn.init.constant_(module.weight, value)
        return {"patched": patched, "short": short}

    saved, into = modules(7.0), modules(0.0)
    roundtrip(tmp_path / "c", saved, into)
    assert [module.weight.tolist() for module in into.values()] == [[[7.0, 7.0]]] * 2


def test_modules_without_state_and_tied_parameters(tmp_path):
    class Plain(Versioned):
        def __init__(self, extra):
            super().__init__(extra)
            del self.weight

    class Tied(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight
            nn.init.constant_(self.a.weight, number)

    app = {"relu": nn.ReLU(), "plain": Plain("mine"), "tied": Tied(0.0)}
    roundtrip(tmp_path / "c", {"relu": nn.ReLU(), "plain": Plain("saved"), "tied": Tied(7.0)}, app)
    assert app["plain"].extra == "saved" and app["plain"].seen_version == 3
    assert app["tied"].b.weight is app["tied"].a.weight and app["tied"].b.weight[0, 0] == 7


def trained(kind, steps, **options):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.uniform_(p)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def one_step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.linspace(0, 1, 12).reshape(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.LBFGS, {"history_size": 2, "max_iter": 2}),
    ],
    ids=["adam", "tensor lr", "momentum", "sgd", "nadam", "adafactor", "lbfgs"],
)
def test_torch_optimizers_resume_exactly(tmp_path, kind, options):
    model, optimizer = trained(kind, 4, **copy.deepcopy(options))
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, resumed = trained(kind, 3, **copy.deepcopy(options))
    state = {id(t) for s in resumed.state.values() for t in s.values() if isinstance(t, torch.Tensor)}
    checkpoint.load(tmp_path / "c", {"model": other, "optimizer": resumed})
    assert {id(t) for s in resumed.state.values() for t in s.values() if isinstance(t, torch.Tensor)} == state
    for _ in range(3):
        one_step(model, optimizer)
        one_step(other, resumed)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


SCHEDULERS = {
    "step": lambda o: StepLR(o, 2),
    "milestones": lambda o: MultiStepLR(o, [2, 4, 4]),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
    "linear": lambda o: LinearLR(o),
    "cosine": lambda o: CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 2)], [3]),
    "chain": lambda o: ChainedScheduler([LinearLR(o), StepLR(o, 2)]),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_schedules_resume_exactly(tmp_path, kind, lr):
    def make(steps):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=copy.copy(lr), momentum=0.9)
        schedule = SCHEDULERS[kind](optimizer)
        for _ in range(steps):
            advance(optimizer, schedule)
        return optimizer, schedule

    def advance(optimizer, schedule):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        optimizer.step()
        schedule.step(*([1.0] if kind == "plateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    optimizer, schedule = make(5)
    other, resumed = make(1)
    checkpoint.save(tmp_path / "c", {"o": optimizer, "s": schedule})
    checkpoint.load(tmp_path / "c", {"o": other, "s": resumed})
    for _ in range(5):
        assert advance(optimizer, schedule) == advance(other, resumed)


def test_a_scaler_resumes_exactly(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    other = torch.amp.GradScaler("cpu")
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    roundtrip(tmp_path / "c", {"a": scaler, "b": disabled}, {"a": other, "b": disabled})
    assert other.state_dict() == scaler.state_dict()


def test_protocols_are_met_by_what_torch_has():
    for thing in (nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), torch.amp.GradScaler("cpu", enabled=False)):
        assert isinstance(thing, Stateful)
    assert not isinstance(torch.zeros(1), Stateful)


def test_a_path_is_below_itself_and_what_it_begins_with():
    path = ("optimizer", "state", "w")
    assert all(is_below(path, path[:length]) for length in range(4))
    assert is_below(path, ("model",), ("optimizer", "state"))
    assert not is_below(path) and not is_below(path, ("optimizer", "state", "w", "exp_avg"), ("opt",))


@pytest.mark.parametrize("make", [lambda: defaultdict(list), OrderedDict, UserDict])
def test_an_empty_mapping_of_any_class_is_saved_and_stays_of_it(tmp_path, make):
    checkpoint.save(tmp_path / "c", {"losses": make(), "step": 1})
    app = {"losses": make(), "step": 0}
    mapping = app["losses"]
    checkpoint.load(tmp_path / "c", app)
    assert app["step"] == 1 and app["losses"] is mapping and not mapping and type(mapping) is type(make())
