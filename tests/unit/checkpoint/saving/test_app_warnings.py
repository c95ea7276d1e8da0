"""Optimizers by whose parameters a resume would train otherwise: those that the app lacks, and those frozen again."""

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.planning import app_warnings, frozen, unheld
from shardopt.errors import MismatchError
from shardopt.state.names import ParameterNames
from tests.support.fake_rank import fake_rank

LINE = "steps 1 parameters that nothing in the app holds, such as {}: a resume would give their moments to new values"


def make(kind):
    model, log_alpha = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))
    named = [*model.named_parameters("model"), ("log_alpha", log_alpha)]
    if kind == "keyed":
        return model, log_alpha, shardopt.keyed("adam", named, lr=0.1)
    return model, log_alpha, torch.optim.Adam([each for _, each in named] if kind == "torch" else named)


@pytest.mark.parametrize("kind", ["keyed", "torch", "named"])
@pytest.mark.parametrize("stage", [None, "now"])
def test_a_parameter_that_nothing_in_the_app_holds_is_told_of_once(tmp_path, caplog, kind, stage):
    model, _, optimizer = make(kind)
    app = {"model": model, "optimizers": [optimizer], "step": 0}
    name = "one of shape (1,)" if kind == "torch" else "log_alpha"
    for last in (2, 4):  # at the first save of a new run, and at its restore
        caplog.clear()
        with checkpoint.Manager(tmp_path, stage=stage) as manager:
            for step in range(manager.restore(app, select="^step$") + 1, last + 1):
                app["step"] = step
                manager.save(step, app)
            manager.restore(app)
        (line,) = [each for each in caplog.messages if "nothing in the app" in each]
        assert line.startswith("optimizers.0 " + LINE.format(name))


FORGOTTEN = "an optimizer that is not in the app steps 2 parameters of it, such as {}.weight: a resumed run"


@pytest.mark.parametrize("kind", ["torch", "keyed", "in backward", "one of two", "beside a proxy"])
def test_an_optimizer_that_the_app_lacks_is_told_of_once(tmp_path, caplog, kind):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    if kind == "keyed":
        optimizer = shardopt.keyed("adam", dict(model.named_parameters()))
    elif kind == "in backward":
        optimizer = shardopt.in_backward(dict(model.named_parameters()), "adam")
    else:
        optimizer = torch.optim.Adam(model.parameters())
    app = {"model": model}
    if kind == "torch":
        app["schedule"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
    if kind in ("one of two", "beside a proxy"):
        app |= {"other": other, "optimizer": torch.optim.Adam(other.parameters())}
    if kind == "beside a proxy":
        app["optimizer"].model = weakref.proxy(nn.Linear(2, 1))  # which is gone
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for number in range(2):
        with checkpoint.Manager(tmp_path / str(number)) as manager:
            manager.save(1, app)
    (line,) = [each for each in caplog.messages if "not in the app" in each]
    assert line.startswith(FORGOTTEN.format("model"))


def test_a_save_before_the_first_step_does_not_keep_what_the_app_lacks_from_being_told_of(tmp_path, caplog):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with checkpoint.Manager(tmp_path) as manager:
        for step in range(3):
            manager.save(step, {"model": model})
            assert ("not in the app" in caplog.text) is (step > 0)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert caplog.text.count("not in the app") == 1


class WithAnother(torch.optim.Optimizer):
    """Has another optimizer step what it does not."""

    def __init__(self, own, other):
        super().__init__(own, {})
        self.other = other

    def state_dict(self):
        return super().state_dict() | {"other": self.other.state_dict()}


NOT_LACKING = ("no state", "empty state", "others", "frozen", "saved elsewhere", "its state", "in an object", "wrapped")


@pytest.mark.parametrize("kind", [*NOT_LACKING, "within another", "gone"])
def test_an_app_that_lacks_no_optimizer_is_not_told_of(tmp_path, caplog, monkeypatch, kind):
    model = nn.Linear(2, 1)
    optimizer = (torch.optim.SGD if kind in ("no state", "empty state") else torch.optim.Adam)(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if kind == "empty state":  # as of one that looks for some
        assert not any(optimizer.state[each] for each in model.parameters())
    app = {"model": nn.Linear(2, 1) if kind == "others" else model}
    if kind == "gone":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        schedule.itself = schedule  # as a closure over it
        del schedule
        optimizer = app["optimizer"] = torch.optim.Adam([model.bias])
    if kind == "frozen":
        model.requires_grad_(False)
    if kind == "within another":
        app["optimizer"] = WithAnother([model.bias], optimizer)
    if kind == "its state":
        app["optimizer"] = optimizer.state_dict()
    if kind == "in an object":
        app["trainer"] = Agent(*model.parameters())
    if kind == "wrapped":
        app["optimizer"] = shardopt.optim.CombinedOptimizer([shardopt.keyed("adam", dict(model.named_parameters()))])
    if kind == "saved elsewhere":
        with checkpoint.Manager(tmp_path / "whole") as manager:
            manager.restore({**app, "optimizer": optimizer})
    with checkpoint.Manager(tmp_path / "weights") as manager:
        manager.save(1, app)
    assert not [each for each in caplog.messages if "not in the app" in each]


def test_what_is_alive_at_a_search_for_a_forgotten_optimizer_is_collected_later(tmp_path, caplog):
    gc.freeze()  # as a program does once its imports are done
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.itself = [model]
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, {"model": model})
    assert FORGOTTEN.format("model") in caplog.text
    is_alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert is_alive() is None


class Agent:
    """Saves parameters that none of its attributes has."""

    __slots__ = ("_state",)

    def __init__(self, *parts):
        self._state = lambda: dict(enumerate(parts))

    def state_dict(self):
        return self._state()

    def load_state_dict(self, state): ...


class Raising(Mapping):
    """As a config of OmegaConf with a value that is missing."""

    def __getitem__(self, key):
        raise RuntimeError("missing mandatory value")

    def __iter__(self):
        return iter(["a"])

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    "held",
    [
        lambda alpha: alpha,
        lambda alpha: {"list": [alpha.data]},
        lambda alpha: nn.ParameterList([alpha]),
        lambda alpha: checkpoint.PerRank(alpha.data),
        lambda alpha: Agent(alpha),
        lambda alpha: OrderedDict(alpha=alpha),
        lambda alpha: alpha.requires_grad_(False) is None,
    ],
    ids=["tensor", "its memory", "module", "per rank", "object", "ordered", "frozen"],
)
def test_whatever_holds_it_counts(tmp_path, caplog, held):
    model, log_alpha, optimizer = make("keyed")
    app = {"model": model, "optimizer": optimizer, "alpha": held(log_alpha)}
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(app)
        manager.save(1, app)
    assert "nothing in the app" not in caplog.text


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_what_has_no_place_in_memory_is_looked_over(tmp_path, caplog, has_optimizer):
    model, _, optimizer = make("keyed")
    for name, adjacent in {"a": torch.eye(2).to_sparse(), "b": torch.ones(2).to_mkldnn()}.items():
        model.register_buffer(name, adjacent, persistent=False)
    app = {"model": model, **({"optimizer": optimizer} if has_optimizer else {})}
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(app)
        manager.save(1, app)
    assert ("nothing in the app" in caplog.text) is has_optimizer


def test_objects_of_the_program_are_not_looked_into(tmp_path):
    model, _, optimizer = make("keyed")
    agent = type("Configured", (Agent,), {})(torch.ones(1))
    agent.config, agent.lazy, agent.sparse = Raising(), nn.LazyLinear(3), torch.eye(2).to_sparse()
    app = {"model": model, "optimizer": optimizer, "agent": agent}
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(app)
        manager.save(1, app)


class Saves:
    """An object of the program's own with a state that is given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state): ...


@pytest.mark.parametrize("stage", [None, "now"])
@pytest.mark.parametrize(
    ("state", "is_told"),
    [
        ({"step": 20, "loss_scale": 8.02}, True),
        ({"masters": [0.5] * 256}, False),
        ({"masters": "0" * 256}, False),
        ({"order": [0] * 10_000}, False),
        ({"masters": torch.zeros(256)}, False),
        ({"masters": nn.Linear(16, 16)}, False),
    ],
    ids=["few numbers", "as many", "characters", "many", "a tensor", "an object"],
)
def test_objects_of_the_program_hide_no_more_than_they_save(tmp_path, caplog, state, is_told, stage):
    model, masters, lists = nn.Linear(2, 1), nn.Parameter(torch.zeros(256)), nn.Linear(2, 128)
    app = {"model": model, "lists": lists, "loop": Saves(state)}
    app["optimizer"] = torch.optim.Adam([*model.parameters(), masters])
    other = torch.optim.Adam(lists.parameters())
    lists(torch.ones(1, 2)).sum().backward()
    other.step()
    with checkpoint.Manager(tmp_path, stage=stage) as manager:
        for step in (1, 2):
            manager.save(step, app)
    lines = [each for each in caplog.messages if "nothing in the app" in each or "not in the app" in each]
    starts = ["optimizer steps 1 parameters that nothing", FORGOTTEN.format("lists")] if is_told else []
    assert len(lines) == len(starts) and all(map(str.startswith, lines, starts))


@pytest.mark.parametrize(("moments", "is_told"), [([0.5, 0.5], False), ([], True)])
def test_an_optimizer_of_few_numbers_may_be_in_an_object_of_the_program(tmp_path, caplog, moments, is_told):
    model, small = nn.Linear(2, 128), nn.Parameter(torch.ones(4))
    model.register_parameter("small", small)
    optimizer = torch.optim.SGD([small], lr=0.1, momentum=0.5)
    small.grad = torch.ones(4)
    optimizer.step()
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, {"model": model, "loop": Saves({"moments": moments})})
    assert ("not in the app" in caplog.text) is is_told


def test_what_an_object_of_the_program_saves_later_counts_in_another_run(tmp_path, caplog):
    model, masters, loop = nn.Linear(2, 1), nn.Parameter(torch.zeros(256)), Saves({"step": 1})
    app = {"model": model, "loop": loop, "optimizer": torch.optim.Adam([*model.parameters(), masters])}
    for is_told in (True, False):
        with checkpoint.Manager(tmp_path / str(is_told)) as manager:
            manager.save(1, app)
        assert ("nothing in the app" in caplog.text) is is_told
        caplog.clear()
        loop.state = {"masters": masters}


def test_nothing_stays_of_objects_of_the_program_that_are_gone(tmp_path):
    before = len(unheld._saved)
    for step in range(3):
        checkpoint.save(tmp_path / str(step), {"x": torch.zeros(1), "loops": [Saves({"step": step}) for _ in range(9)]})
    gc.collect()
    assert len(unheld._saved) <= before


class Trainer:
    """Saves its optimizers' states as they are. Those that are in a list of its own are found there."""

    def __init__(self, optimizer, is_attribute):
        self.optimizers = lambda: [optimizer]
        if is_attribute:
            self.own = self.optimizers()

    def state_dict(self):
        return {"hooks": [{"losses": [0.5]}], "optimizer": self.optimizers()[0].state_dict()}

    def load_state_dict(self, state):
        self.optimizers()[0].load_state_dict(state["optimizer"])


class CopyingTrainer(Trainer):
    def state_dict(self):
        return copy.deepcopy(super().state_dict())


@pytest.mark.parametrize(
    "kind",
    [
        *("hidden", "attribute", "stateless", "hidden, a copy"),
        *("in the app", "keyed, in the app", "attribute, in the app", "a copy, in the app"),
    ],
)
def test_an_optimizer_that_an_object_of_the_program_saves_is_told_of_before_a_restore_is_refused(
    tmp_path, caplog, kind
):
    def make():
        model = nn.Linear(2, 1)
        if kind.startswith("keyed"):
            optimizer = shardopt.keyed("adam", model.named_parameters())
        else:
            optimizer = (torch.optim.SGD if kind == "stateless" else torch.optim.Adam)(model.parameters(), lr=0.1)
        trainer = CopyingTrainer if "copy" in kind else Trainer
        app = {"model": model, "trainer": trainer(optimizer, kind.startswith("attribute"))}
        return model, optimizer, app | ({"optimizer": optimizer} if kind.endswith("in the app") else {})

    def step(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, app = make()
    step(model, optimizer)
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, app)
    starts = [each.startswith("trainer saves the state of an optimizer") for each in caplog.messages]
    assert any(starts) is kind.startswith("hidden")
    caplog.clear()
    other, of_other, app = make()
    with checkpoint.Manager(tmp_path) as manager:
        if kind.startswith("hidden"):
            with pytest.raises(MismatchError, match="make its state before loading"):
                manager.restore(app)
            step(other, of_other)
        manager.restore(app)
        step(other, of_other)
        manager.save(2, app)
    step(model, optimizer)
    assert torch.equal(other.weight, model.weight)
    assert "trainer saves" not in caplog.text


def test_whether_the_app_lacks_an_optimizer_that_an_object_saves_is_looked_at_in_each_run(tmp_path, caplog):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    trainer = Trainer(optimizer, is_attribute=False)
    for number, more in enumerate([{}, {"optimizer": optimizer}, {}]):
        with checkpoint.Manager(tmp_path / str(number)) as manager:
            for step in range(3):
                manager.save(step, {"model": model, "trainer": trainer, **more})
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        assert caplog.text.count("trainer saves the state of an optimizer") == (not more)
        caplog.clear()


def test_schedules_samplers_and_averages_hold_no_parameters(tmp_path, caplog):
    model, _, optimizer = make("torch")
    others = {
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "sampler": shardopt.data.ResumableSampler(8, batch_size=2),
        "ema": shardopt.optim.EMA(model, decay=0.9),
        "random": shardopt.data.RandomState(on_resize="keep"),
        "scaler": torch.amp.GradScaler("cpu"),
    }
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore({"model": model, "optimizer": optimizer, **others})
    assert "nothing in the app" in caplog.text


def test_a_fault_of_the_look_ends_neither_a_restore_nor_a_save(tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG", "shardopt.checkpoint")
    model, _, optimizer = make("keyed")
    app = {"model": model, "optimizer": optimizer}
    monkeypatch.setattr(app_warnings, "objects_in", lambda app: 1 / 0)
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(app)
        assert manager.save(1, app) is not None
    assert caplog.text.count("the app was not looked at") == 3


OPTIMIZERS = {
    "keyed": lambda model: shardopt.keyed("adamw", model.named_parameters(), lr=0.1),
    "keyed sgd": lambda model: shardopt.keyed("sgd", model.named_parameters(), lr=0.1, momentum=0.9),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "combined": lambda model: shardopt.optim.CombinedOptimizer([("all", OPTIMIZERS["keyed"](model))]),
}


@pytest.mark.parametrize("parts", [False, True])
def test_parameters_of_fully_shard_are_held_also_right_after_a_forward(caplog, parts):
    with fake_rank(0, 1):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        model[2].weight = model[1].weight
        for module in (model[0], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.Adam(model.parameters())
        with torch.no_grad():
            model(torch.ones(1, 2))
        gathered = set(map(id, model.parameters())).isdisjoint(map(id, optimizer.param_groups[0]["params"][2:]))
        for own, is_told in ((list(model) if parts else model, False), (model[:1], True)):
            found = unheld.objects_in({"model": own, "o": optimizer})
            assert gathered and bool(unheld.warn_of_unheld(found)) == is_told
    (line,) = caplog.messages
    assert line.startswith("o steps 3 parameters that nothing in the app holds")


@pytest.mark.parametrize("unfrozen", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layer_that_is_frozen_again_after_a_resume_is_told_of(tmp_path, caplog, kind, unfrozen):
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        return {"model": model, "optimizer": OPTIMIZERS[kind](model), "step": 0}

    app = make()
    with checkpoint.Manager(tmp_path, every=2) as manager:
        for step in (1, 2):
            if step == 2 and unfrozen:
                app["model"][0].requires_grad_(True)
            app["model"](torch.ones(1, 2)).sum().backward()
            app["optimizer"].step()
            app["step"] = step
            manager.save(step, app)
    app = make()
    checkpoint.Manager(tmp_path).restore(app)
    assert not caplog.messages
    app["model"](torch.ones(1, 2)).sum().backward()
    for _ in range(2):
        app["optimizer"].step()
    lines = [each for each in caplog.messages if "frozen" in each]
    said = f"optimizer has trained 2 parameters that are frozen now, such as {first_name(kind)}: "
    assert [line.startswith(said) for line in lines] == [True] * unfrozen


def first_name(kind):
    return "all.0.weight" if kind == "combined" else "0.weight"


def swapped(app):
    """Puts another layer into the place of one, and adds it to the optimizer, as fine-tuners do."""
    app["model"][1] = nn.Linear(2, 2)
    app["optimizer"].add_param_group({"params": [*app["model"][1].parameters()]})
    return app


def small_app():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "step": 0}


def train(app, step):
    app["model"](torch.ones(1, 2)).square().sum().backward()
    app["optimizer"].step()
    app["optimizer"].zero_grad()
    app["step"] = step


def test_a_layer_that_is_replaced_in_mid_run_leaves_the_names_of_the_others(tmp_path, caplog):
    app = small_app()
    with checkpoint.Manager(tmp_path, every=1) as manager:
        train(app, 1)
        manager.save(1, app)
        assert not caplog.messages
        swapped(app)
        for step in (2, 3):
            train(app, step)
            manager.save(step, app)
    (line,) = caplog.messages
    assert "optimizer steps 2 parameters that nothing in the app holds" in line and "[stale-parameters]" in line
    with checkpoint.open(tmp_path / "step-00000003") as reader:
        keys = reader.keys()
    names = {key.split(".", 2)[2] for key in keys if "param_groups" in key}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias", "?0", "?1"}
    resumed = swapped(small_app())
    with checkpoint.Manager(tmp_path, every=1) as manager:
        assert manager.restore(resumed) == 3
    for each in (app, resumed):
        train(each, 4)
    pairs = zip(app["model"].parameters(), resumed["model"].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def frozen_at(tmp_path, kind, step=2):
    """Saves the steps 1 to 3 of a run that freezes its first layer after this step; returns its app."""
    app = with_layers(kind)
    with checkpoint.Manager(tmp_path, stage="now") as manager:
        for app["step"] in (1, 2, 3):
            app["model"][0].requires_grad_(app["step"] <= step)
            app["model"](torch.ones(1, 2)).sum().backward()
            app["optimizer"].step()
            app["optimizer"].zero_grad()
            manager.save(app["step"], app)
    return app


def with_layers(kind, names=("0", "1")):
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
    return {"model": model, "optimizer": OPTIMIZERS[kind](model), "step": 0}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layer_that_is_not_frozen_again_is_told_of_and_one_that_is_is_not(tmp_path, caplog, kind):
    app, name = frozen_at(tmp_path, kind), first_name(kind)
    thawed = f"optimizer trains 2 parameters that were frozen when this step was saved, such as {name}: "
    froze = f"optimizer has trained 2 parameters that are frozen now, such as {name}: "

    def told(app, then=None, **choices):
        caplog.clear()
        with checkpoint.Manager(tmp_path) as manager:
            manager.restore(app, **choices)
            assert not any("frozen" in each for each in caplog.messages)
            if then is not None:
                app["model"][0].requires_grad_(then)
            train(app, app["step"])
        return [each for each in caplog.messages if "frozen" in each]

    fresh = with_layers(kind)
    assert told(fresh, select="^step$") == []  # before the script knows what to freeze
    fresh["model"][0].requires_grad_(False)
    assert told(fresh) == []
    (line,) = told(with_layers(kind))
    assert line.startswith(thawed) and "requires_grad_(False) again" in line
    (line,) = told(app, step=2)  # a rewind in the process that has frozen it
    assert line.startswith(froze) and "requires_grad_(True) again" in line
    assert told(with_layers(kind), then=False) == []  # a script that restores first, and freezes afterwards
    app["model"][0].requires_grad_(False)
    assert told(app, then=True) == []
    assert told(app) == []


@pytest.mark.parametrize("is_mended", [False, True])
def test_frozen_layers_of_which_no_step_is_seen_are_told_of_at_the_next_save(tmp_path, caplog, is_mended):
    frozen_at(tmp_path, "torch")
    app = with_layers("torch")
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(app)
        app["model"][0].requires_grad_(not is_mended)
        for app["step"] in (4, 5):
            manager.save(app["step"], app)
        assert sum("were frozen when" in each for each in caplog.messages) == (not is_mended)
    train(app, 6)
    assert sum("were frozen when" in each for each in caplog.messages) == (not is_mended)


def test_frozen_layers_under_new_names_are_known_by_the_rules_of_rename(tmp_path, caplog):
    frozen_at(tmp_path, "keyed")
    for freezes in (False, True):
        app = with_layers("keyed", ("first", "1"))
        app["model"][0].requires_grad_(not freezes)
        caplog.clear()
        checkpoint.Manager(tmp_path).restore(app, rename={r"\b0\.(weight|bias)": r"first.\1"})
        train(app, 4)
        assert ("were frozen" in caplog.text, "frozen now" in caplog.text) == (not freezes, False)


@pytest.mark.parametrize("kind", ["keyed", "torch"])
def test_a_checkpoint_that_does_not_say_what_was_frozen_is_told_of_by_its_steps(tmp_path, caplog, kind):
    app = frozen_at(tmp_path, kind)
    report = checkpoint.load(tmp_path / "step-00000003", app)
    assert {*report.frozen} == {"optimizer.param_groups.0.bias", "optimizer.param_groups.0.weight"}
    assert checkpoint.load(tmp_path / "step-00000002", app).frozen == ()
    caplog.clear()
    frozen.frozen_otherwise([(("optimizer",), app["optimizer"])], ParameterNames(app), replace(report, frozen=None))
    train(app, 4)
    assert "has trained 2 parameters that are frozen now" in caplog.text


@pytest.mark.parametrize("key", ["iter_num", "global_step", "completed_steps", "num_steps", "iteration"])
def test_a_counter_that_stays_while_the_loop_counts_elsewhere_is_told_of_once(tmp_path, caplog, key):
    """The first job saves 0 at each step. One that resumes begins from there."""
    for saved in ([1, 2, 3], [4, 5]):
        app = {"model": nn.Linear(1, 1), key: 0, "max_steps": 0, "skipped_steps": 0, "eval_iters": 0, "best_iter": 0}
        with checkpoint.Manager(tmp_path) as manager:
            app[key] = manager.restore(app)
            caplog.clear()
            for step in saved:
                manager.save(step, app)
        (line,) = caplog.messages
        begun = saved[0] - 1
        assert f"app[{key!r}] is {begun}, as at step {saved[0]}, and step {saved[1]} is saved: after a restore" in line


def test_counters_that_count_are_not_told_of(tmp_path, caplog):
    app = {"model": nn.Linear(1, 1), "iter_num": 0, "total_steps": 500, "num_steps": 8, "step": 0}
    with checkpoint.Manager(tmp_path) as manager:
        manager.restore(app)
        manager.save(0, app)
        for step in (1, 2, 3):
            app["step"] = step
            app["iter_num"] = step // 2 + 1
            manager.save(step, app)
    assert caplog.messages == []


def test_a_network_that_is_frozen_while_another_has_its_turn_is_not_told_of(tmp_path, caplog):
    def make():
        nets = {name: nn.Linear(2, 2) for name in "gd"}
        return {**nets, **{f"of_{name}": torch.optim.SGD(each.parameters()) for name, each in nets.items()}}

    def step(app, own, other):
        app[other].requires_grad_(False)
        app[own].requires_grad_(True)
        app["d"](app["g"](torch.ones(1, 2))).sum().backward()
        app[f"of_{own}"].step()

    app = make()
    step(app, "g", "d")
    with checkpoint.Manager(tmp_path, every=1) as manager:
        manager.save(1, app)
    for again in (make(), app):
        with checkpoint.Manager(tmp_path, every=1) as manager:
            assert manager.restore(again) == 1
        step(again, "d", "g")
        step(again, "g", "d")
    assert not caplog.messages
