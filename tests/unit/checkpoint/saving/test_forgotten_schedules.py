"""A schedule that is not saved is told of at the first save; one that is saved in any way, or none at all, is not."""

import logging
import weakref
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.planning.forgotten import tell_of_what_is_lost
from shardopt.optim import WarmupOptimizer, WarmupPolicy, WarmupStage
from shardopt.state.flatten import flatten


def keyed(model):
    return shardopt.keyed("adamw", model.named_parameters(), lr=1.0)


OPTIMIZERS = {"keyed": keyed, "torch's": lambda model: torch.optim.AdamW(model.parameters())}


class Trainer:
    """A trainer that keeps a schedule, and saves all of its state, or only the steps."""

    def __init__(self, schedule, in_full):
        self.schedules, self.in_full = [schedule], in_full

    def state_dict(self):
        (schedule,) = self.schedules
        return {"a": [schedule.state_dict()]} if self.in_full else {"steps": schedule.last_epoch}

    def load_state_dict(self, state):
        pass


class Hidden(Trainer):
    """One whose schedule is seen in its state alone."""

    def __init__(self, schedule):
        self.get = lambda: {"inner": {"schedule": schedule.state_dict()}}

    def state_dict(self):
        return self.get()


HOLDERS = {
    "itself": lambda schedule: {"schedule": schedule},
    "list": lambda schedule: {"schedules": [schedule]},
    "dict": lambda schedule: {"all": {"schedules": {"one": schedule}}},
    "its state": lambda schedule: {"schedule": schedule.state_dict()},
    "trainer": lambda schedule: {"trainer": Trainer(schedule, in_full=True)},
    "trainer that counts": lambda schedule: {"trainer": Trainer(schedule, in_full=False)},
    "in the state alone": lambda schedule: {"trainer": Hidden(schedule)},
}


def told(tmp_path, caplog, app, stage=None):
    with caplog.at_level(logging.WARNING, logger="shardopt"), checkpoint.Manager(tmp_path, stage=stage) as manager:
        manager.save(1, app)
        manager.save(2, app)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("maker", OPTIMIZERS)
def test_a_schedule_that_is_not_saved_is_told_of_once(tmp_path, caplog, maker):
    model = torch.nn.Linear(3, 1)
    optimizer = OPTIMIZERS[maker](model)
    CosineAnnealingLR(optimizer, 10)
    (line,) = told(tmp_path, caplog, {"model": model, "optimizer": optimizer, "notes": ["none"]})
    assert "sets the rates of optimizer, and none is in the app" in line and "last_epoch=" in line


@pytest.mark.parametrize(("members", "is_told"), [((1, 3), True), ((0, 1), False), (None, False)])
def test_the_first_of_the_ranks_that_save_tells(monkeypatch, caplog, members, is_told):
    """It used to be the first of the job, which a group need not have."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    CosineAnnealingLR(optimizer, 10)
    tell_of_what_is_lost(flatten({"optimizer": optimizer}), members)
    assert bool(caplog.records) is is_told


def test_only_saves_of_the_optimizer_itself_tell(tmp_path, caplog):
    """A save of the model alone, or an estimate, used to use up the one warning."""
    model = torch.nn.Linear(3, 1)
    optimizer = keyed(model)
    CosineAnnealingLR(optimizer, 10)
    app = {"model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path / "1", app, select=r"^model\.")
    checkpoint.estimate(app, tmp_path / "2", measure_seconds=0)
    assert not caplog.text
    checkpoint.save(tmp_path / "3", app, select=r"^optimizer\.")
    assert caplog.text.count("sets the rates of optimizer") == 1
    second = keyed(model)
    left_out = {"second": second, "schedule": CosineAnnealingLR(second, 10)}
    checkpoint.save(tmp_path / "4", left_out, select=r"^second\.")
    assert caplog.text.count("sets the rates of") == 1


@pytest.mark.parametrize("maker", OPTIMIZERS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_schedule_that_is_saved_is_not_told_of(tmp_path, caplog, maker, holder):
    model = torch.nn.Linear(3, 1)
    optimizer = OPTIMIZERS[maker](model)
    schedule = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    assert told(tmp_path, caplog, {"model": model, "optimizer": optimizer, **HOLDERS[holder](schedule)}) == []


def test_rates_that_no_schedule_of_torchs_sets_are_not_told_of(tmp_path, caplog):
    model = torch.nn.Linear(3, 1)
    by_hand = torch.optim.SGD(model.parameters(), lr=1.0)
    by_hand.param_groups[0].update(lr=0.5, initial_lr=1.0)
    warm = WarmupOptimizer(keyed(model), [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4)])
    assert told(tmp_path, caplog, {"model": model, "by_hand": by_hand, "warm": warm}) == []


class Keyed(torch.optim.SGD):
    """torchrec's form of a keyed optimizer."""

    def __init__(self, model):
        self.params = dict(model.named_parameters())
        super().__init__(self.params.values(), lr=0.1, momentum=0.9)

    def state_dict(self):
        return {"state": {name: self.state[each] for name, each in self.params.items() if each in self.state}}


class WarmUp(torch.optim.Optimizer):
    """torchrec's form of a warm-up: its position is the state of a parameter that it adds, and that is in no group."""

    def __init__(self, optimizer, params):
        self._optimizer, self.params, self.state = optimizer, params, optimizer.state
        self.params["__warmup"] = torch.nn.Parameter()

    param_groups = property(lambda self: self._optimizer.param_groups)

    def step(self, closure=None):
        self._optimizer.step()
        self.state[self.params["__warmup"]] = {"warmup": torch.tensor([1, 0])}

    def state_dict(self):
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self._optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_saved_warm_up_of_another_library_is_told_of(tmp_path, caplog, scheduled):
    model = torch.nn.Linear(2, 2)
    inner = Keyed(model)
    app = {"model": model, "optimizer": WarmUp(inner, inner.params)}
    if scheduled:
        app["schedule"] = torch.optim.lr_scheduler.StepLR(inner, 5)
    checkpoint.save(tmp_path / "0", app)
    assert not caplog.text
    model(torch.ones(1, 2)).sum().backward()
    app["optimizer"].step()
    for number, regex in enumerate(("^model", r"\.state\.(weight|bias)")):
        checkpoint.save(tmp_path / f"part{number}", app, select=regex)
    assert not caplog.text
    checkpoint.save(tmp_path / "1", app)
    checkpoint.save(tmp_path / "2", app)
    assert caplog.text.count("optimizer.state.__warmup is saved, but a new optimizer has no place for it") == 1


def test_a_warm_up_that_a_combined_optimizer_leaves_out_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    inner = Keyed(model)
    app = {"model": model, "optimizer": WarmUp(inner, dict(inner.params))}  # a combined one lists them anew
    with pytest.raises(shardopt.errors.StateError) as caught:
        checkpoint.save(tmp_path / "1", app)
    assert [each.key for each in caught.value.problems] == ["optimizer.state.__warmup"]
    assert "shardopt's WarmupOptimizer" in str(caught.value)


class Outer(torch.optim.Optimizer):
    """Around another, of whose state it saves nothing, as SAM; or all, as Lookahead."""

    def __init__(self, inner, in_full, hold=lambda inner: inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.base = hold(inner)
        if in_full:
            self.state_dict = inner.state_dict


@pytest.mark.parametrize("hold", [lambda inner: inner, lambda inner: [inner], lambda inner: {0: inner}])
@pytest.mark.parametrize("how", ["lost", "in full", "beside it", "not stepped"])
def test_state_of_an_optimizer_in_another_that_is_not_saved_is_told_once(tmp_path, caplog, how, hold):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    app = {"model": model, "optimizer": Outer(inner, how == "in full", hold)}
    if how == "beside it":
        app["base"] = hold(inner)
    if how != "not stepped":
        model(torch.ones(1, 2)).sum().backward()
        inner.step()
    for number in range(2):
        checkpoint.save(tmp_path / f"{number}", app)
    told = [each for each in caplog.messages if "optimizer.base has state" in each]
    assert len(told) == (how == "lost")


class HandsOn(torch.optim.Optimizer):
    """A wrapper whose constructor does not run torch's, as Opacus' DPOptimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state_dict = optimizer.state_dict

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.parametrize("to", ["wrapper", "optimizer", "none"])
def test_a_schedule_of_a_wrapper_of_an_optimizer_is_told_of(tmp_path, caplog, to):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = HandsOn(HandsOn(inner))
    schedule = None if to == "none" else LambdaLR(wrapper if to == "wrapper" else inner, float)
    lines = told(tmp_path, caplog, {"model": model, "optimizer": wrapper})
    assert sum("a schedule sets the rates of optimizer" in each for each in lines) == (schedule is not None)


class Preconditioned(torch.optim.Optimizer):
    """One that keeps moments by number, as K-FAC does, which torch's state_dict leaves out."""

    def __init__(self, params, where):
        super().__init__(params, {})
        held = self.param_groups[0]["params"]
        self.moments = held if where == "parameter" else {n: each.detach().clone() for n, each in enumerate(held)}
        if where == "state":
            self.state = {each: {"moment": self.moments.pop(n)} for n, each in enumerate(held)}


@pytest.mark.parametrize("where", ["attribute", "state", "parameter", "app"])
def test_tensors_of_an_optimizer_outside_its_state_are_told_of_once(tmp_path, caplog, where):
    model = torch.nn.Linear(2, 2)
    optimizer = Preconditioned(model.parameters(), where)
    app = {"model": model, "optimizer": optimizer, "moments": optimizer.moments if where == "app" else 1}
    lines = told(tmp_path, caplog, app)
    assert sum("optimizer keeps tensors in moments, " in each for each in lines) == (where == "attribute")


class Filled:
    """A queue that another thread fills while a save looks at it; that thread is played by what looks at an entry."""

    def __init__(self, kind):
        filled = self

        class Entry:
            @property
            def __class__(self):
                filled.put(object())
                return Entry

        self.entries = deque([Entry()]) if kind == "deque" else {0: Entry()}

    def put(self, entry):
        if isinstance(self.entries, deque):
            self.entries.append(entry)
        else:
            self.entries[len(self.entries)] = entry
        setattr(self, f"at{len(self.entries)}", None)

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state): ...


@pytest.mark.parametrize("stage", [None, "now"])
@pytest.mark.parametrize("kind", ["deque", "dict"])
def test_a_queue_that_a_thread_fills_fails_no_save(tmp_path, caplog, kind, stage):
    model, filled = torch.nn.Linear(2, 2), Filled(kind)
    optimizer = keyed(model)
    LambdaLR(optimizer, float)
    (line,) = told(tmp_path, caplog, {"model": model, "optimizer": optimizer, "queue": filled}, stage)
    assert line.startswith("a schedule sets the rates") and len(filled.entries) > 1


class Unknown:
    """Another thing that cannot be asked of which class it is."""

    @property
    def __class__(self):
        raise RuntimeError("gone")


def test_what_a_look_stumbles_over_fails_no_save(tmp_path):
    model, other = torch.nn.Linear(2, 2), Filled("dict")
    optimizer, other.entries = keyed(model), Unknown()
    LambdaLR(optimizer, float)
    assert checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer, "other": other}, durable=False)


@pytest.mark.parametrize("hold", [lambda proxy: proxy, lambda proxy: [proxy]], ids=["attribute", "in a list"])
@pytest.mark.parametrize("holder", ["object", "optimizer"])
@pytest.mark.parametrize("stage", [None, "now"])
def test_a_weak_proxy_of_what_is_gone_fails_no_save(tmp_path, caplog, hold, holder, stage):
    model = torch.nn.Linear(2, 2)
    app = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "object": Filled("dict")}
    LambdaLR(app["optimizer"], float)
    app[holder].owner = hold(weakref.proxy(torch.nn.Linear(2, 2)))
    (line,) = told(tmp_path, caplog, app, stage)
    assert line.startswith("a schedule sets the rates of optimizer, and none is in the app")
