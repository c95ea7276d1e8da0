"""State of torch's own optimizers keeps the dtypes that it was saved with, whatever those of the parameters."""

from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch

import shardopt
from shardopt import checkpoint


class Mixed(torch.optim.Optimizer):
    """Keeps more than the parameter's dtype can hold, as optimizers of a program's own do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"moments": {"fp32": torch.zeros(parameter.shape)}, "name": "of a rule", "past": [], "seen": 0}
                state |= {"count": torch.zeros((), dtype=torch.int64), "mask": torch.ones(2, 2, dtype=torch.bool)}
            state["moments"]["fp32"].lerp_(parameter.grad.float(), 0.1)
            state["count"] += 257  # which bf16 has not
            state["past"] = [*state["past"], state["moments"]["fp32"].clone()][-1:]
            state["seen"] += 1
            parameter.sub_(state["moments"]["fp32"], alpha=0.1)


class Outer(torch.optim.Optimizer):
    """Loads by the optimizer in it."""

    def __init__(self, params):
        self.inner = Mixed(params)
        super().__init__(self.inner.param_groups, {})

    def step(self):
        self.inner.step()

    def state_dict(self):
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict["inner"])


class Trainer:
    """An object of the program's own that has an optimizer."""

    def __init__(self, params):
        self.inner = Mixed(params)
        self.step, self.state_dict = self.inner.step, self.inner.state_dict
        self.load_state_dict = self.inner.load_state_dict


class Unread(list):
    """What nobody may iterate but its owner."""

    def __iter__(self):
        raise AssertionError


class Asked:
    """Counts how often it is asked what it is."""

    times = 0

    @property
    def __class__(self):
        Asked.times += 1
        return type(self)


Pair = namedtuple("Pair", "body head")
HOLDS = {
    "list": lambda each: [each],
    "ordered": lambda each: OrderedDict(all=each),
    "default": lambda each: defaultdict(list, all=each),
    "named": lambda each: Pair(each, None),
    "deque": lambda each: deque([each]),
    "own": lambda each: Unread([each]),
    "within": lambda each: {"bodies": [("first", each)]},
    "many": lambda each: [*(Mixed([torch.nn.Parameter(torch.ones(1))]) for _ in range(70)), each],
}


class Loader(Trainer):
    """Has its optimizer in a container, beside data."""

    def __init__(self, params, hold):
        super().__init__(params)
        self.all, self.queue, self.inner = hold(self.inner), Unread([1]), None
        self.data = [[Asked()] * 1000] * 1000


def train(app, steps):
    for _ in range(steps):
        app["model"].zero_grad()
        app["model"](torch.ones(1, 2, dtype=torch.bfloat16)).square().sum().backward()
        app["optimizer"].step()


def app_of(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    return {"model": model, "optimizer": make(model.parameters())}


@pytest.mark.parametrize("make", [Mixed, Outer, Trainer, torch.optim.NAdam, torch.optim.ASGD])
def test_a_run_that_resumes_twice_goes_on_as_one(tmp_path, make):
    whole = app_of(make)
    train(whole, 3)
    for step in range(3):
        app = app_of(make)
        if step:
            if make in (Outer, Trainer):  # for which nothing makes state
                train(app, 1)
            checkpoint.load(tmp_path / str(step - 1), app, init_state=True)
        train(app, 1)
        checkpoint.save(tmp_path / str(step), app)
    assert torch.equal(app["model"].weight, whole["model"].weight)
    (found,), (wanted,) = (
        getattr(each["optimizer"], "inner", each["optimizer"]).state.values() for each in (app, whole)
    )
    assert repr(sorted(found.items())) == repr(sorted(wanted.items()))


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_optimizers_are_found_in_an_objects_containers_and_its_data_is_let_be(tmp_path, hold):
    saved, app = (app_of(lambda params: Loader(params, hold)) for _ in range(2))
    train(saved, 1), train(app, 1)
    checkpoint.save(tmp_path / "c", saved)
    Asked.times = 0
    checkpoint.load(tmp_path / "c", app)
    (state,) = app["optimizer"].state_dict()["state"].values()
    assert state["count"].dtype == torch.int64
    assert Asked.times < 100_000  # of a million


def test_hooks_of_the_program_find_state_as_it_was_saved(tmp_path):
    saved, app = app_of(Mixed), app_of(Mixed)
    train(saved, 1)
    checkpoint.save(tmp_path / "c", saved)
    seen = []
    app["optimizer"].register_load_state_dict_post_hook(
        lambda own: seen.extend(each["count"].dtype for each in own.state.values())
    )
    checkpoint.load(tmp_path / "c", app, init_state=True)
    assert seen == [torch.int64]
    assert not app["optimizer"]._optimizer_load_state_dict_pre_hooks
    assert len(app["optimizer"]._optimizer_load_state_dict_post_hooks) == 1


class Learner(torch.nn.Linear):
    """A module of the program's own that has its optimizer as extra state."""

    def __init__(self):
        super().__init__(2, 2, bias=False, dtype=torch.bfloat16)
        self.optimizer = Mixed([self.weight])

    def get_extra_state(self):
        return self.optimizer.state_dict()

    def set_extra_state(self, state):
        self.optimizer.load_state_dict(state)


def test_the_optimizer_in_the_extra_state_of_a_module_keeps_its_dtypes(tmp_path):
    torch.manual_seed(0)
    saved, model = Learner(), Learner()
    for each in (saved, model):
        train({"model": each, "optimizer": each.optimizer}, 1)
    checkpoint.save(tmp_path / "c", {"model": saved})
    checkpoint.load(tmp_path / "c", {"model": model})
    (found,), (wanted,) = (each.optimizer.state.values() for each in (model, saved))
    assert repr(sorted(found.items())) == repr(sorted(wanted.items()))


def keyed():
    model = torch.nn.Linear(2, 2)
    return shardopt.keyed("adamw", model.named_parameters(), lr=0.1)


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), keyed], ids=["module", "keyed"])
def test_a_load_that_calls_no_other_does_not_look_into_attributes(tmp_path, make):
    app = {"own": make()}
    app["own"].attribute = [Asked()]
    checkpoint.save(tmp_path / "c", app)
    Asked.times = 0
    checkpoint.load(tmp_path / "c", app)
    assert Asked.times == 0
