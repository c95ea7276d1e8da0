"""Wrappers of other libraries around an optimizer, a schedule or a model: stand-ins with the shapes that those have."""

import copy
import warnings
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.errors import CorruptionError, PartialLoadError, StateError
from shardopt.state.flatten import flatten
from shardopt.state.trainer_optimizers import is_constructed, unwrapped
from tests.support.fake_rank import fake_rank


class Delegating(torch.optim.Optimizer):
    """As Accelerate's: a subclass by name, whose constructor does not run torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = None

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Imitating:
    """As Lightning's: takes the class of what it wraps for a base of its own, and looks attributes up in it."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self._strategy = None
        self.__class__ = type("Imitating" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Gathering(Imitating):
    """As Fabric's: its state is what a strategy makes of the optimizer's."""

    def state_dict(self):
        raise AssertionError("gathers everything on one rank")


class Schedule:
    """As Accelerate's: no schedule by its class, but it has a schedule's methods."""

    def __init__(self, scheduler, optimizer):
        self.scheduler, self.optimizers = scheduler, [optimizer]

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict):
        self.scheduler.load_state_dict(state_dict)

    def step(self):
        self.scheduler.step()


class Module(nn.Module):
    """As Fabric's: its state is that of the model that it wraps."""

    def __init__(self, module):
        super().__init__()
        self._forward_module = module

    def forward(self, inputs):
        return self._forward_module(inputs)

    def state_dict(self, *args, **kwargs):
        return self._forward_module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self._forward_module.load_state_dict(*args, **kwargs)


WRAPPERS = [Delegating, Imitating, Gathering, lambda optimizer: Delegating(Imitating(optimizer))]
MAKERS = {
    "torch": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "keyed": lambda model: shardopt.keyed("adam", model.named_parameters(), lr=0.1),
    "clipping": lambda model: shardopt.GradientClippingOptimizer(
        shardopt.keyed("adam", model.named_parameters(), lr=0.1),
        clipping=shardopt.GradientClipping.NORM,
        max_gradient=1.0,
    ),
}


def train(app, steps):
    for _ in range(steps):
        app["model"](torch.ones(1, 2)).sum().backward()
        app["optimizer"].step()
        app["schedule"].step()
        app["optimizer"].zero_grad()


def make_app(maker, wrap, wrap_model=lambda model: model):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = MAKERS[maker](model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    wrapped = wrap(optimizer)
    return {"model": wrap_model(model), "optimizer": wrapped, "schedule": Schedule(schedule, wrapped)}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_optimizer_resumes(tmp_path, maker, wrap):
    app, plain = make_app(maker, wrap, Module), make_app(maker, lambda optimizer: optimizer)
    for each in (app, plain):
        train(each, 3)
        checkpoint.save(tmp_path / str(each is app), each)
        train(each, 2)
    expected = plain["model"].state_dict()
    for saved in (True, False):  # with wrappers or without: the same keys, the same values
        for fresh in (make_app(maker, wrap, Module), make_app(maker, lambda optimizer: optimizer)):
            train(fresh, 1)
            checkpoint.load(tmp_path / str(saved), fresh)
            train(fresh, 2)
            actual = fresh["model"].state_dict()
            assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", ["now", "lazy"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_saved_beside_training(tmp_path, wrap, stage):
    app = make_app("keyed", wrap)
    train(app, 1)
    before = copy.deepcopy(app["model"].state_dict())
    pending = checkpoint.async_save(tmp_path / "c", app, stage=stage)
    train(app, 3)
    pending.result()
    fresh = make_app("keyed", wrap)
    train(fresh, 1)
    checkpoint.load(tmp_path / "c", fresh)
    assert all(torch.equal(actual, before[name]) for name, actual in fresh["model"].state_dict().items())


def test_one_that_is_half_loaded_refuses_to_step(tmp_path):
    app = make_app("torch", Delegating)
    train(app, 1)
    checkpoint.save(tmp_path / "c", app)
    (file,) = tmp_path.glob("c/*.safetensors")
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError):
        checkpoint.load(tmp_path / "c", app)
    with pytest.raises(PartialLoadError):
        train(app, 1)


class Foreign:
    """As an engine's own optimizer, which is none of torch's."""

    def state_dict(self):
        return {"x": torch.ones(1)}

    def load_state_dict(self, state_dict): ...


@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.async_save])
@pytest.mark.parametrize("inner", [Foreign(), None])
def test_what_cannot_be_unwrapped_is_refused_at_the_save(tmp_path, call, inner):
    wrapped = Delegating(inner)
    wrapped.state_dict = lambda: {"x": torch.ones(1)}
    with pytest.raises(StateError, match=r"optimizer: found a .*Delegating.*required an optimizer.*\(found 0 in it\)"):
        pending = call(tmp_path / "c", {"optimizer": wrapped, "step": 1})
        pending.result()
    wrapped.scaler, wrapped.optimizer = (torch.optim.SGD([torch.ones(1)]) for _ in range(2))
    with pytest.raises(StateError, match="found 2 in it"):
        flatten({"optimizer": wrapped})


class Averager:
    """As torch's of a model, which needs a process group."""

    step = 0

    def average_parameters(self, params):
        self.step += 1


class Lookahead(Delegating):
    """As many write it: steps on slow weights now and then, and keeps them itself."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.slow = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
        self.counter = 0

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.counter += 1
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            if self.counter % 3 == 0:
                slow.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(slow)

    def state_dict(self):
        return {**self.optimizer.state_dict(), "slow": self.slow, "counter": self.counter}

    def load_state_dict(self, state_dict):
        self.slow, self.counter = state_dict["slow"], state_dict["counter"]
        self.optimizer.load_state_dict(state_dict)


class WithHooks(Delegating):
    """As timm's Lookahead: makes places for hooks of steps and a `state`; slow weights are in that of the optimizer."""

    state = param_groups = defaults = None

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.state, self.param_groups, self.defaults = defaultdict(dict), optimizer.param_groups, optimizer.defaults
        for group in self.param_groups:
            group.setdefault("lookahead_step", 0)

    def step(self, closure=None):
        self.optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for parameter in group["params"] if group["lookahead_step"] % 2 == 0 else ():
                slow = self.optimizer.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
        self.param_groups = self.optimizer.param_groups


def test_one_with_hooks_and_state_of_its_own_resumes_in_a_new_process(tmp_path):
    app, resumed = make_app("torch", WithHooks), make_app("torch", WithHooks)
    train(app, 3)
    checkpoint.save(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    assert "slow" in resumed["optimizer"].optimizer.state[resumed["model"].weight]
    assert not resumed["optimizer"].state
    for each in (app, resumed):
        train(each, 3)
    assert torch.equal(app["model"].weight, resumed["model"].weight)
    assert resumed["optimizer"].param_groups[0]["lookahead_step"] == 6


@pytest.mark.parametrize("around", [lambda optimizer: optimizer, Delegating, Gathering])
@pytest.mark.parametrize("taken", [True, False], ids=["stepped", "new"])
def test_what_a_wrapper_keeps_itself_resumes(tmp_path, around, taken):
    def fresh():
        return make_app("torch", lambda optimizer: around(Lookahead(optimizer)))

    app, resumed = fresh(), fresh()
    train(app, 4)
    checkpoint.save(tmp_path / "c", app)
    assert {"optimizer.counter", "optimizer.slow.0", "optimizer.state.weight.exp_avg"} <= {
        *flatten({"model": app["model"], "optimizer": app["optimizer"]}).leaves
    }
    groups = resumed["optimizer"].param_groups[0]
    if taken:
        train(resumed, 2)
    checkpoint.load(tmp_path / "c", resumed, init_state=True)
    assert resumed["optimizer"].param_groups[0] is groups
    for each in (app, resumed):
        train(each, 4)
    actual, expected = flatten(resumed).leaves, flatten(app).leaves
    assert actual.keys() == expected.keys()
    for key, leaf in expected.items():
        same = torch.equal if isinstance(leaf.value, torch.Tensor) else lambda one, other: one == other
        assert same(actual[key].value, leaf.value), key


def test_the_averager_of_post_local_sgd_resumes(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        from torch.distributed.optim import PostLocalSGDOptimizer
    apps = [make_app("torch", lambda optimizer: PostLocalSGDOptimizer(optimizer, Averager())) for _ in range(2)]
    train(apps[0], 3)
    checkpoint.save(tmp_path / "c", apps[0])
    checkpoint.load(tmp_path / "c", apps[1], init_state=True)
    assert apps[1]["optimizer"].averager.step == 3


def test_what_a_wrapper_keeps_and_cannot_get_back_is_refused_at_the_save(tmp_path):
    class Nested(Lookahead):
        def state_dict(self):
            return {"fast": self.optimizer.state_dict(), "slow": self.slow}

    class Silent(Delegating):
        state, state_dict = None, torch.optim.Optimizer.state_dict

        def __init__(self, optimizer):
            super().__init__(optimizer)
            self.state = {}

    class ByBase(Lookahead):
        state = None  # as an Optimizer's, whose constructor makes it

        def state_dict(self):
            return {"slow": self.slow, **super(Delegating, self).state_dict()}

    class Merged(Lookahead):
        def state_dict(self):
            state = self.optimizer.state_dict()
            return {**state, "state": {i: {**each, "slow": self.slow[i]} for i, each in state["state"].items()}}

    class InGroups(Lookahead):
        def state_dict(self):
            state = self.optimizer.state_dict()
            return {**state, "param_groups": [{**each, "counter": self.counter} for each in state["param_groups"]]}

    class Absent(Delegating):
        def state_dict(self):
            raise NotImplementedError("ask the optimizer")

    wrapped = make_app("torch", ByBase)
    with pytest.raises(StateError, match=r"ByBase, which keeps state that its state_dict\(\) does not give \(.*hooks"):
        checkpoint.save(tmp_path / "c", wrapped)
    with pytest.raises(StateError, match=r"Absent, which keeps state that .* \(NotImplementedError: ask"):
        checkpoint.save(tmp_path / "c", make_app("torch", Absent))
    refused = [
        *(("torch", Nested, "fast, slow"), ("torch", Merged, "slow"), ("torch", InGroups, "counter")),
        *(("keyed", Lookahead, "counter, slow"), ("torch", Silent, "slow_weight")),
    ]
    for maker, wrap, names in refused:
        app = make_app(maker, wrap)
        train(app, 1)
        if wrap is Silent:
            checkpoint.save(tmp_path / "c", app)
            weight = app["model"].weight
            app["optimizer"].state = {weight: dict(app["optimizer"].optimizer.state[weight])}
            flatten(app)  # as one that a load has left behind
            app["optimizer"].state[weight]["slow_weight"] = weight.detach()
        with pytest.raises(StateError, match=rf"optimizer: found a .*{wrap.__name__}, which keeps {names} itself"):
            flatten(app)
        inner = app["optimizer"].optimizer  # as the remedy says
        flatten({**app, "optimizer": inner, "kept": {"counter": 1}})


def test_what_has_run_its_constructor_is_itself():
    model = nn.Linear(1, 1)

    class Own(torch.optim.SGD):
        def __init__(self, params, other):
            super().__init__(params)
            self.other = other

    inner = torch.optim.SGD(model.parameters())
    for optimizer in (inner, Own(model.parameters(), inner), *(make(model) for make in MAKERS.values())):
        assert is_constructed(optimizer)
        assert unwrapped(optimizer) is optimizer
        copied = copy.deepcopy(optimizer)
        assert is_constructed(copied)
    assert unwrapped(model) is model


def test_zero_redundancy_optimizers_are_refused_at_the_save_and_the_load(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.Linear(1, 1)
    checkpoint.save(tmp_path / "c", {"optimizer": torch.optim.AdamW(model.parameters())})
    with fake_rank(0, 2):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(StateError, match=r"optimizer: found torch's ZeroRedundancyOptimizer; .*fully_shard"):
            call(tmp_path / "c", {"optimizer": optimizer})
