"""Optimizers within objects of a program's own: trainers of GANs, agents, engines."""

import copy
import pickle
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardopt
from shardopt import checkpoint
from shardopt.errors import CheckpointError, MismatchError, PartialLoadError, StateError
from shardopt.state.flatten import flatten
from shardopt.state.trainer_optimizers import StateWithin, state_with_optimizers
from tests.harness import run_ranks


class Trainer:
    """Trains two models of as many parameters; its state has the optimizers in another order than its attributes."""

    def __init__(self, make, model=lambda *sizes: nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))):
        self.second, self.first = model(4, 6, 6, 2), model(2, 6, 6, 4)
        self.of_second, self.of_first = make(self.second), make(self.first)
        self.epoch = 0

    def step(self):
        self.epoch += 1
        # The models by turns, so that one optimizer may have stepped and the other not.
        model, optimizer = ((self.first, self.of_first), (self.second, self.of_second))[self.epoch % 2]
        model(torch.full((3, model[0].in_features), float(self.epoch))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state_dict(self):
        return {"first": self.of_first.state_dict(), "second": self.of_second.state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        self.of_first.load_state_dict(state["first"])
        self.of_second.load_state_dict(state["second"])
        self.epoch = state["epoch"]

    def app(self):
        return {"first": self.first, "second": self.second, "trainer": self}


class AskingAhead(Trainer):
    """Asks for states in another order than it has them."""

    def state_dict(self):
        second = self.of_second.state_dict()
        return {"first": self.of_first.state_dict(), "second": second, "epoch": self.epoch}


class Listed(Trainer):
    def state_dict(self):
        return {"all": [self.of_first.state_dict(), self.of_second.state_dict()], "epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict({"first": state["all"][0], "second": state["all"][1], "epoch": state["epoch"]})


class InTuple(Listed):
    def state_dict(self):
        return {"all": (self.of_first.state_dict(), self.of_second.state_dict()), "epoch": self.epoch}


class Merged(Trainer):
    def state_dict(self):
        own = super().state_dict()
        return {**own, "first": {**own["first"], "kept": 1}, "second": {"kept": torch.ones(2), **own["second"]}}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        assert state["first"]["kept"] == 1 and state["second"]["kept"].tolist() == [1, 1]


class Copied(Trainer):
    def state_dict(self):
        return copy.deepcopy(super().state_dict())

    def load_state_dict(self, state):
        super().load_state_dict(copy.deepcopy(state))


class OfAgent(Trainer):
    """Has the optimizers in a dict of another object, and one of them in a list too."""

    def __init__(self, make):
        super().__init__(make)
        self.agent = SimpleNamespace(optimizers={"second": self.of_second, "first": self.of_first})
        self.all = [self.of_first]
        del self.of_second, self.of_first

    def __getattr__(self, name):
        if not name.startswith("of_"):
            raise AttributeError(name)
        return self.agent.optimizers[name.removeprefix("of_")]

    def state_dict(self):
        return {**super().state_dict(), "all": [each.state_dict() for each in self.all]}


class OneOfAll(Trainer):
    """The optimizer of the first model steps the second one, too."""

    def __init__(self, make):
        super().__init__(make)
        self.of_first = make(nn.ModuleDict({"first": self.first, "second": self.second}))


class WithModels(Trainer):
    """Has the models in its own state: the app has none, and shapes do not tell the two hidden layers apart."""

    def state_dict(self):
        return {**super().state_dict(), "models": [self.first.state_dict(), self.second.state_dict()]}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.first.load_state_dict(state["models"][0])
        self.second.load_state_dict(state["models"][1])

    def app(self):
        return {"trainer": self}


MAKERS = {
    "torch": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "keyed": lambda model: shardopt.keyed("adam", model.named_parameters(), lr=0.1),
    "mixed": lambda model: MAKERS["keyed" if next(model.parameters()).shape[1] == 2 else "torch"](model),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def trained(trainer, make, steps):
    torch.manual_seed(0)
    made = trainer(MAKERS[make])
    for _ in range(steps):
        made.step()
    return made


def assert_same(one, other):
    one, other = (flatten({**each.app(), "models": [each.first, each.second]}) for each in (one, other))
    assert one.values() == other.values() and one.leaves.keys() == other.leaves.keys()
    assert all(torch.equal(each, other.tensors()[key]) for key, each in one.tensors().items())


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize(
    ("trainer", "make"),
    [
        *product([Trainer, AskingAhead, Listed, InTuple, Copied, OfAgent, OneOfAll, WithModels], MAKERS),
        *product([Merged], ["torch", "sgd"]),  # a keyed one takes no state with more in it
    ],
)
def test_optimizers_within_an_object_resume_bit_for_bit(tmp_path, trainer, make, steps):
    checkpoint.save(tmp_path / "c", trained(trainer, make, steps).app())
    torch.manual_seed(1)
    resumed = trainer(MAKERS[make])
    checkpoint.load(tmp_path / "c", resumed.app(), init_state=True)
    for _ in range(3):
        resumed.step()
    assert_same(resumed, trained(trainer, make, steps + 3))


def test_a_manager_has_nothing_to_say_of_them(tmp_path, caplog):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, trained(Trainer, "torch", 3).app())
    resumed = trained(Trainer, "torch", 0)
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(resumed.app())
    assert resumed.epoch == 3 and not caplog.messages


def test_their_groups_stay_the_dicts_that_they_are(tmp_path):
    """Schedules and loops may hold them."""
    checkpoint.save(tmp_path / "c", trained(Trainer, "torch", 2).app())
    resumed = trained(Trainer, "torch", 0)
    groups = resumed.of_first.param_groups[0], resumed.of_second.param_groups[0]
    checkpoint.load(tmp_path / "c", resumed.app(), init_state=True)
    assert resumed.of_first.param_groups[0] is groups[0] and resumed.of_second.param_groups[0] is groups[1]


def test_copies_in_another_order_than_the_optimizers_were_asked_are_refused_at_the_save(tmp_path):
    class Copying(AskingAhead):
        def state_dict(self):
            return copy.deepcopy(super().state_dict())

    with pytest.raises(StateError, match=r"trainer: found copies(?s:.*)without a copy"):
        checkpoint.save(tmp_path / "c", trained(Copying, "torch", 1).app())


def test_what_does_not_fit_one_of_them_is_refused_before_anything_changed(tmp_path):
    checkpoint.save(tmp_path / "c", trained(Trainer, "torch", 2).app())
    other = Trainer(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(MismatchError, match=r"trainer\.first\.param_groups(?s:.*)Adam") as caught:
        checkpoint.load(tmp_path / "c", other.app(), init_state=True)
    assert "trainer.second." in str(caught.value) and other.epoch == 0 and not other.of_first.state


def test_none_of_them_steps_after_a_load_that_failed(tmp_path):
    class Failing(Trainer):
        def load_state_dict(self, state):
            self.of_first.load_state_dict(state["first"])
            raise ValueError("it has no more")

    checkpoint.save(tmp_path / "c", trained(Trainer, "torch", 2).app())
    failing = trained(Failing, "torch", 0)
    with pytest.raises(CheckpointError, match=r"trainer: found ValueError: it has no more"):
        checkpoint.load(tmp_path / "c", failing.app(), init_state=True)
    for optimizer in (failing.of_first, failing.of_second):
        with pytest.raises(PartialLoadError):
            optimizer.step()


def test_those_that_a_load_would_make_are_refused_before_anything_changed(tmp_path):
    """The stored state has names: `load_state_dict` of torch's optimizers would take them for numbers."""
    checkpoint.save(tmp_path / "c", trained(Trainer, "torch", 2).app())

    class Later(Trainer):
        def __init__(self):
            super().__init__(lambda model: None)

        def state_dict(self):
            return {"first": None, "second": None, "epoch": self.epoch}

        def load_state_dict(self, state):
            raise AssertionError("it is not called")

    later = Later()
    with pytest.raises(MismatchError, match=r"trainer: found the state of an optimizer(?s:.*)before the load"):
        checkpoint.load(tmp_path / "c", later.app(), init_state=True)


def test_an_older_state_beside_that_of_the_optimizer_stays_what_it_is(tmp_path):
    class Best(Trainer):
        best = None

        def state_dict(self):
            return {**super().state_dict(), "best": self.best}

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.best = state["best"]

    saved = trained(Best, "torch", 4)
    saved.best = copy.deepcopy(saved.of_first.state_dict())
    checkpoint.save(tmp_path / "c", saved.app())
    resumed = trained(Best, "torch", 0)
    checkpoint.load(tmp_path / "c", resumed.app(), init_state=True)
    saved.of_first.load_state_dict(resumed.best)
    assert_same(saved, resumed)


@pytest.mark.parametrize("fails", [False, True])
def test_optimizers_are_left_as_they_were_once_asked(fails):
    class Failing(Trainer):
        def state_dict(self):
            return super().state_dict() if not fails else 1 / 0

    trainer = trained(Failing, "torch", 2)
    of_program = vars(trainer.of_second)["state_dict"] = lambda: torch.optim.Adam.state_dict(trainer.of_second)
    before = dict(vars(trainer.of_first))
    if fails:
        with pytest.raises(ZeroDivisionError):
            state_with_optimizers(trainer)
    else:
        assert isinstance(state_with_optimizers(trainer)["second"], StateWithin)
    assert vars(trainer.of_first) == before and trainer.of_second.state_dict is of_program


def test_a_copy_of_their_state_is_a_plain_dict_and_copies_no_parameter():
    state = state_with_optimizers(trained(Trainer, "torch", 2))["first"]
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert type(copied) is dict and copied["param_groups"] == state["param_groups"]


def _sharded(root, make):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    trainer = Trainer(
        MAKERS[make],
        lambda *sizes: fully_shard(nn.Sequential(*map(nn.Linear, sizes, sizes[1:])), mesh=mesh),
    )
    begin = {2: 0, 1: 3, 3: 3}[dist.get_world_size()]
    if begin:
        checkpoint.load(f"{root}/3", trainer.app(), init_state=True)
    for step in range(begin, 6):
        trainer.step()
        if not begin:
            checkpoint.save(f"{root}/{step + 1}", trainer.app())
    expected = checkpoint.open(f"{root}/6")
    for key, value in flatten(trainer.app()).tensors().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole.detach(), expected.read(key))


@pytest.mark.parametrize("make", ["torch", "keyed"])
def test_sharded_state_within_an_object_resumes_on_other_ranks(tmp_path, make):
    for ranks in (2, 1, 3):
        run_ranks(ranks, _sharded, str(tmp_path), make)
