"""What the loop that saves has in its variables, and its app lacks, is told of.

Loops are in functions without asserts, as those of pytest call `locals()`.
"""

import copy
import importlib
import sys
import weakref

import pytest
import torch
from torch import nn

from shardopt import checkpoint

LINE = "in the loop"


class Schedule:
    """As timm's: no schedule of torch's, and no optimizer knows it."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Loader(Schedule):
    def __init__(self, sampler=None):
        self.sampler, self.steps = sampler, 0


class JobState(Loader):
    """As programs have it for torch.distributed.checkpoint."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.steps = model, optimizer, 0


def made():
    model = nn.Linear(2, 2)
    return model, torch.optim.Adam(model.parameters())


def used_scaler(enabled=True):
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    scaler.scale(torch.ones(()))
    return scaler


def saved(tmp_path, app, steps=(1,)):
    with checkpoint.Manager(tmp_path) as manager:
        for step in steps:
            manager.save(step, app)


KINDS = {
    "scaler": lambda optimizer: used_scaler(),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    "schedule": Schedule,
    "loader": lambda optimizer: Loader(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["variable", "caller's", "attribute", "global"])
def test_a_state_that_the_app_lacks_is_told_of_once(tmp_path, caplog, kind, where):
    model, optimizer = made()
    app, thing = {"model": model, "optimizer": optimizer}, KINDS[kind](optimizer)
    name = "thing"
    if where == "variable":
        saved_here(tmp_path, app, thing)
        name = "own"
    elif where == "caller's":
        saved_by_others(tmp_path, app, thing)
    elif where == "attribute":
        Job(thing).run(tmp_path, app)
        name, thing = "self.part", None
    else:
        program = {"saved": saved, "thing": thing, "tmp_path": tmp_path, "app": app}
        thing = None
        exec("def run():\n    thing\n    saved(tmp_path, app, (1, 2, 3))\nrun()", program)
    lines = [each for each in caplog.messages if LINE in each]
    assert len(lines) == 1
    assert lines[0].startswith(f"{name} (") and "has a state and is not in the app" in lines[0]


def saved_here(tmp_path, app, own):
    with checkpoint.Manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, app)


def saved_by_others(tmp_path, app, thing):
    saved(tmp_path, app, (1, 2, 3))


class Job:
    def __init__(self, part):
        self.part = part

    def run(self, tmp_path, app):
        saved(tmp_path, app, (1, 2, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_state", [False, True])
def test_a_state_in_the_app_is_not_told_of(tmp_path, caplog, kind, as_state):
    model, optimizer = made()
    thing = KINDS[kind](optimizer)
    app = {"model": model, "optimizer": optimizer}
    app["the_thing" if as_state else "other"] = thing.state_dict() if as_state else thing
    saved_by_others(tmp_path, app, thing)
    assert LINE not in caplog.text


@pytest.mark.parametrize("mark", ["scaler", "plateau"])
def test_a_state_under_another_name_is_known_by_its_entries(tmp_path, caplog, mark):
    model, optimizer = made()
    thing = KINDS[mark](optimizer)
    saved_by_others(tmp_path, {"model": model, "optimizer": optimizer, "amp": thing.state_dict()}, thing)
    assert LINE not in caplog.text


def right_programs():
    model, optimizer = made()
    app = {"model": model, "optimizer": optimizer, "step": 3}
    of_others = torch.optim.Adam([torch.zeros(2, requires_grad=True)])
    sampler = Loader()
    yield "a scaler that does nothing", app, used_scaler(enabled=False)
    yield "a scaler that is not used", app, torch.amp.GradScaler("cpu")
    yield "a schedule that torch knows", app | {"s": torch.optim.lr_scheduler.StepLR(optimizer, 1)}, None
    yield "a plateau of another optimizer", app, torch.optim.lr_scheduler.ReduceLROnPlateau(of_others)
    yield "a loader of a sampler", app | {"sampler": sampler}, Loader(sampler)
    yield "a job's state", app, JobState(model, optimizer)
    yield "an object that may hold it", app | {"own": Job.__new__(Holder)}, Schedule(optimizer)
    yield "a class", app, Schedule
    yield "a wrapper", app, nn.Sequential(model)
    yield "a layer", {"model": nn.Sequential(model), "optimizer": optimizer}, model
    yield "a teacher", app, nn.Linear(2, 2)
    yield "a criterion", app, nn.CrossEntropyLoss()
    yield "a model that has its tensors anew", app, detached(model)


class Holder(Job, Schedule):
    steps = 0


def detached(model):
    other = copy.deepcopy(model)
    for name, each in model.named_parameters():
        getattr(other, name).data = each.data
    return other


@pytest.mark.parametrize(("app", "thing"), [pytest.param(*each, id=name) for name, *each in right_programs()])
def test_right_programs_are_not_told_of(tmp_path, caplog, app, thing):
    trained(tmp_path, app, thing)
    assert LINE not in caplog.text


def trained(tmp_path, app, thing, change=lambda thing: None):
    with checkpoint.Manager(tmp_path) as manager:
        for step in (1, 2, 3):
            with torch.no_grad():
                for group in app["optimizer"].param_groups:
                    for each in group["params"]:
                        each.add_(1)
            change(thing)
            manager.save(step, app)


def moved(target):
    for each in target.parameters():
        each.data.copy_(0.5 * each.data + 1)


CHANGES = {
    "data": moved,
    "in place": lambda target: target.weight.mul_(2),
    "loaded": lambda target: target.load_state_dict({"weight": torch.rand(2, 2), "bias": torch.rand(2)}),
    "buffers": lambda target: target(torch.rand(4, 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_beside_the_app_that_changes_is_told_of_once(tmp_path, caplog, change):
    model, optimizer = made()
    target = nn.BatchNorm1d(2) if change == "buffers" else copy.deepcopy(model).requires_grad_(False)
    trained(tmp_path, {"model": model, "optimizer": optimizer}, target, CHANGES[change])
    (line,) = [each for each in caplog.messages if LINE in each]
    assert line.startswith(f"thing ({type(target).__name__}) in the loop has changed since the last save")


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_loop_of_an_installed_library_is_not_looked_at(tmp_path, caplog, monkeypatch, is_installed):
    text = "from shardopt import checkpoint\n\ndef run(root, app, own):\n"
    text += "    with checkpoint.Manager(root) as manager:\n"
    (tmp_path / "some_trainer").mkdir()
    (tmp_path / "some_trainer" / "loop.py").write_text(f"{text}        manager.save(1, app)\n")
    (tmp_path / "some_trainer" / "__init__.py").write_text("")
    if is_installed:
        (tmp_path / "some_trainer-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    loop = importlib.import_module("some_trainer.loop")
    model, optimizer = made()
    try:
        loop.run(tmp_path / "run", {"model": model, "optimizer": optimizer}, Schedule(optimizer))
    finally:
        del sys.modules["some_trainer"], sys.modules["some_trainer.loop"]
    assert ("own (Schedule) in the loop" in caplog.text) is not is_installed


def test_weights_alone_are_for_others_to_use(tmp_path, caplog):
    model, optimizer = made()
    saved_by_others(tmp_path, {"model": model, "step": 1}, Schedule(optimizer))
    assert LINE not in caplog.text


def test_what_a_loop_deletes_after_a_save_is_gone(tmp_path):
    model, optimizer = made()
    assert loop_that_deletes(tmp_path, {"model": model, "optimizer": optimizer}) == [None, None]


def loop_that_deletes(tmp_path, app):
    own, layer = Schedule(app["optimizer"]), nn.Linear(2, 2)
    refs = [weakref.ref(own), weakref.ref(layer)]
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(1, app)
        own.steps, layer.bias = 1, None  # no variable is lost by the look
        del own, layer
        return [each() for each in refs]


def test_a_save_before_the_first_step_does_not_count(tmp_path, caplog):
    model, optimizer = made()
    scales_late(tmp_path, {"model": model, "optimizer": optimizer}, torch.amp.GradScaler("cpu"))
    assert caplog.text.count(LINE) == 1


def scales_late(tmp_path, app, scaler):
    with checkpoint.Manager(tmp_path) as manager:
        for step in (0, 1):
            manager.save(step, app)
            scaler.scale(torch.ones(()))


def test_what_locals_gave_to_a_program_stays_as_it_was(tmp_path):
    model, optimizer = made()
    app, steps = {"model": model, "optimizer": optimizer}, 2
    options = locals()
    before = dict(options)
    own = Schedule(optimizer)
    with checkpoint.Manager(tmp_path) as manager:
        for step in range(1, steps):
            manager.save(step, app)
    assert own.optimizer is optimizer and options == before


def test_a_program_within_a_function_keeps_its_variables_and_is_looked_at(tmp_path, caplog):
    model, optimizer = made()
    app = {"model": model, "optimizer": optimizer}
    text = """
from shardopt import checkpoint
step, own = 0, Schedule(app["optimizer"])
with checkpoint.Manager(tmp_path) as manager:
    while step < 3:
        step += 1
        manager.save(step, app)
assert own.optimizer is app["optimizer"]
"""
    exec(text)
    assert app["model"] is model and caplog.text.count("own (Schedule) in the loop that saves has a state") == 1
