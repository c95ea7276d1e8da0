"""torch's own optimizers in `app`: their state goes by the names of parameters, as that of keyed ones does."""

import copy
import logging
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import MismatchError
from tests.golden.state import Layers, step_torch_optimizers, torch_optimizers

POSITIONS = Path(__file__).parents[4] / "golden" / "torch_positions"

KINDS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.5}),
    "adamw": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "lr": torch.tensor(0.1)}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def test_options_of_any_kind_are_compared(tmp_path, caplog):
    class Odd(torch.optim.SGD):
        def __init__(self, params, **options):
            super().__init__(params)
            self.defaults |= options
            self.param_groups[0].update(options)

    model = torch.nn.Linear(2, 2)
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": Odd(model.parameters(), decay=0, kind="x", lr=1)})
    app = {"model": model, "optimizer": Odd(model.parameters(), decay=0.0, kind=len, lr=torch.tensor([1.0]))}
    checkpoint.load(tmp_path / "c", app)
    (told,) = caplog.messages
    assert (
        "optimizer: kind: <built-in function len> here, x stored" in told and "decay" not in told and "lr:" not in told
    )


@pytest.mark.parametrize("scheduled", [False, True])
def test_options_that_the_code_has_changed_are_told(tmp_path, caplog, scheduled):
    def app_of(**options):
        model = Layers()
        app = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9), **options)}
        if scheduled:
            app["schedule"] = torch.optim.lr_scheduler.ExponentialLR(app["optimizer"], 0.5)
        return app

    app = stepped(app_of(lr=0.1))
    if scheduled:
        app["schedule"].step()
    checkpoint.save(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", app_of(lr=0.1 if scheduled else torch.tensor(0.1), foreach=False), init_state=True)
    assert not caplog.messages
    other = app_of(lr=0.001, eps=1e-4, weight_decay=0.5)
    checkpoint.load(tmp_path / "c", other, init_state=True)
    assert other["optimizer"].param_groups[0]["eps"] == 1e-8
    (told,) = [line for line in caplog.messages if "options of the checkpoint replace" in line]
    assert "optimizer: eps: 0.0001 here, 1e-08 stored" in told and "betas" not in told
    assert "optimizer: weight_decay: 0.5 here, 0.01 stored" in told
    assert "optimizer: lr: 0.001 here, 0.1 stored" in told and ("initial_lr" in told) == scheduled


def stepped(app, steps=2, seed=0):
    """Steps the optimizers of an app by gradients that go by the names of the model's parameters."""
    model = app["model"]
    for step in range(steps):
        for name, parameter in sorted(model.named_parameters()):
            torch.manual_seed(seed + step + sum(map(ord, name)))
            parameter.grad = torch.randn(parameter.shape)
        for name, optimizer in app.items():
            if name.startswith("optim"):
                optimizer.step()
    return app


def state_of(app, name="optimizer"):
    """The state of an optimizer by the names of the model's parameters."""
    names = {id(parameter): name for name, parameter in app["model"].named_parameters()}
    return {
        names[id(parameter)]: {entry: torch.as_tensor(value) for entry, value in entries.items() if value is not None}
        for parameter, entries in app[name].state.items()
        if entries
    }


def equal(one, other):
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(torch.equal(value, other[name][entry]) for entry, value in one[name].items())
        for name in one
    )


def weights_equal(one, other):
    return all(torch.equal(value, other.get_parameter(name)) for name, value in one.named_parameters())


def app_of(order=("first", "second"), kind=torch.optim.AdamW, named=False, **options):
    model = Layers(order)
    parameters = model.named_parameters() if named else model.parameters()
    return {"model": model, "optimizer": kind(parameters, **{"lr": 0.125, **options})}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("init_state", [False, True])
def test_layers_of_one_shape_may_change_places(tmp_path, named, init_state):
    saved = stepped(app_of(named=named))
    checkpoint.save(tmp_path / "c", saved)
    loaded = app_of(("second", "first"), named=named)
    if not init_state:
        stepped(loaded, seed=7)
    checkpoint.load(tmp_path / "c", loaded, init_state=init_state)
    assert equal(state_of(loaded), state_of(saved))
    assert weights_equal(stepped(loaded)["model"], stepped(saved)["model"])


def test_a_layer_is_inserted(tmp_path):
    saved = stepped(app_of())
    checkpoint.save(tmp_path / "c", saved)
    loaded = app_of(("first", "between", "second"))
    checkpoint.load(tmp_path / "c", loaded, strict=False, init_state=True)
    assert equal(state_of(loaded), state_of(saved))
    stepped(loaded)


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind) for kind in KINDS])
def test_a_fresh_process_resumes_where_it_was(tmp_path, kind):
    cls, options = KINDS[kind]
    saved = stepped(app_of(kind=cls, **copy.deepcopy(options)))
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(2, saved, force=True)
    loaded = app_of(("second", "first"), kind=cls, **copy.deepcopy(options))
    with checkpoint.Manager(tmp_path) as manager:
        assert manager.restore(loaded)
    assert equal(state_of(loaded), state_of(saved))
    assert weights_equal(stepped(loaded)["model"], stepped(saved)["model"])


@pytest.mark.parametrize("into", ["torch", "keyed"])
def test_torchs_state_and_that_of_keyed_ones_are_one_form(tmp_path, into):
    def made(form, order):
        model = Layers(order)
        if form == "torch":
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.125)}
        return {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters(), lr=0.125)}

    saved = stepped(made("keyed" if into == "torch" else "torch", ("first", "second")))
    checkpoint.save(tmp_path / "c", saved)
    loaded = made(into, ("second", "first"))
    checkpoint.load(tmp_path / "c", loaded, init_state=True)
    assert equal(state_of(loaded), state_of(saved))
    for name, weight in stepped(saved)["model"].state_dict().items() if stepped(loaded) else ():
        torch.testing.assert_close(loaded["model"].state_dict()[name], weight)  # computed by other loops


def test_a_failed_load_takes_the_state_away_that_it_made(tmp_path):
    checkpoint.save(tmp_path / "c", {**stepped(app_of()), "extra": 1})
    loaded = app_of()
    before = {name: value.clone() for name, value in loaded["model"].state_dict().items()}
    with pytest.raises(MismatchError, match="extra"):
        checkpoint.load(tmp_path / "c", loaded, init_state=True)
    assert not loaded["optimizer"].state
    assert all(torch.equal(value, before[name]) for name, value in loaded["model"].state_dict().items())
    assert all(parameter.grad is None for parameter in loaded["model"].parameters())


def golden(order, *names):
    app = torch_optimizers(order)
    return {name: app[name] for name in ("model", *names)}


def expected(*names):
    app = torch_optimizers()
    step_torch_optimizers(app)
    return {name: app[name] for name in ("model", *names)}


@pytest.mark.parametrize("name", ["named", "shapes", "stateless"])
def test_positions_of_earlier_versions_are_read_by_names_or_shapes(caplog, name):
    loaded, wanted = golden(("second", "first"), name), expected(name)
    with caplog.at_level(logging.INFO):
        checkpoint.load(POSITIONS, loaded, init_state=True, strict=Strictness(unexpected="ignore"))
    assert equal(state_of(loaded, name), state_of(wanted, name))
    assert any("stored by position" in line and name in line for line in caplog.messages)
    assert [group["lr"] for group in loaded[name].param_groups] == [g["lr"] for g in wanted[name].param_groups]


@pytest.mark.parametrize("grouped", [False, True])
def test_positions_of_parameters_of_which_some_have_no_name_go_by_their_order(tmp_path, grouped):
    """Earlier versions saved numbers for all of them where a part of the model is in no module of the app."""

    def make(rate):
        inner, outer = nn.Linear(2, 2), nn.Linear(2, 2)
        groups = [{"params": [*each.parameters()], "lr": rate * number} for number, each in ((1, outer), (2, inner))]
        params = groups if grouped else [*outer.parameters(), *inner.parameters()]
        return inner, outer, torch.optim.Adam(params, lr=rate)

    inner, outer, saved = make(0.5)
    inner(outer(torch.ones(1, 2))).square().sum().backward()
    saved.step()
    values = {name: value.clone() for name, value in inner.state_dict().items()}
    checkpoint.save(tmp_path / "c", {"inner": values, "optimizer": saved})
    with checkpoint.open(tmp_path / "c") as reader:
        assert "optimizer.state.3.exp_avg" in [*reader.keys()]
    inner, _, loaded = make(0.1)
    checkpoint.load(tmp_path / "c", {"inner": inner, "optimizer": loaded}, init_state=True)
    for number, state in saved.state_dict()["state"].items():
        for entry, value in state.items():
            assert torch.equal(loaded.state_dict()["state"][number][entry], value), (number, entry)
    assert [each["lr"] for each in loaded.param_groups] == [each["lr"] for each in saved.param_groups]


def test_positions_that_may_be_either_of_two_are_refused_and_the_remedy_works(tmp_path):
    loaded, wanted = golden(("second", "first"), "doubtful"), expected("doubtful")
    before = copy.deepcopy(loaded["model"].state_dict())
    only = Strictness(unexpected="ignore")
    with pytest.raises(MismatchError, match="without a name") as caught:
        checkpoint.load(POSITIONS, loaded, init_state=True, strict=only)
    assert all(torch.equal(value, before[name]) for name, value in loaded["model"].state_dict().items())
    (problem,) = caught.value.problems
    assert problem.key == "doubtful.state" and "rename=" in problem.remedy
    names = [name for name, _ in wanted["model"].named_parameters()]
    rename = {rf"^doubtful\.state\.{i}\.(?=[^.]*$)": f"doubtful.state.{name}." for i, name in enumerate(names)}
    checkpoint.load(POSITIONS, loaded, init_state=True, strict=only, rename=rename)
    assert equal(state_of(loaded, "doubtful"), state_of(wanted, "doubtful"))


@pytest.mark.parametrize(
    ("sizes", "rename", "told"),
    [
        ([(3, 3), (3, 3)], None, 1),
        (
            [(3, 3), (3, 3)],
            {r"^optimizer\.state\.0\.": "optimizer.state.a.", r"^optimizer\.state\.1\.": "optimizer.state.b."},
            0,
        ),
        ([(3, 3), (2, 3)], None, 0),
    ],
)
def test_an_order_that_nothing_confirms_is_told(tmp_path, caplog, sizes, rename, told):
    def made(kind):
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(size)) for name, size in zip("ab", sizes, strict=True)})
        optimizer = shardopt.keyed("adamw", model.named_parameters()) if kind == "keyed" else None
        return {"model": model, "optimizer": optimizer or torch.optim.AdamW(model.parameters())}

    app = made("torch")
    for parameter in app["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    app["optimizer"].step()
    torch.save({key: each.state_dict() for key, each in app.items()}, tmp_path / "c.pt")
    checkpoint.load(tmp_path / "c.pt", made("keyed"), init_state=True, rename=rename)
    assert sum("nothing stored confirms it" in line for line in caplog.messages) == told


def test_positions_of_l_bfgs_are_kept(tmp_path):
    loaded, wanted = golden(("first", "second"), "lbfgs"), expected("lbfgs")
    checkpoint.load(POSITIONS, loaded, strict=Strictness(unexpected="ignore"), init_state=True)
    ours, theirs = (each["lbfgs"].state_dict()["state"][0] for each in (loaded, wanted))
    assert torch.equal(ours["d"], theirs["d"]) and ours["n_iter"] == theirs["n_iter"]


def test_l_bfgs_with_parameters_in_another_order_is_refused(tmp_path):
    def made(order):
        model = Layers(order)
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)}

    def step(app):
        app["optimizer"].step(lambda: sum(p.square().sum() for p in app["model"].parameters()))

    saved, loaded = made(("first", "second")), made(("second", "first"))
    for app in (saved, loaded):
        for parameter in app["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        step(app)
    checkpoint.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError, match=r"first\.weight"):
        checkpoint.load(tmp_path / "c", loaded)
    again = made(("first", "second"))
    checkpoint.load(tmp_path / "c", again, init_state=True)
    assert "param_names" not in again["optimizer"].param_groups[0]
    assert torch.equal(
        again["optimizer"].state_dict()["state"][0]["d"], saved["optimizer"].state_dict()["state"][0]["d"]
    )


def test_without_names_parameters_of_one_shape_are_refused(tmp_path):
    saved = stepped(app_of())
    checkpoint.save(tmp_path / "c", {"optimizer": saved["optimizer"]})
    loaded = stepped(app_of(), seed=3)
    with pytest.raises(MismatchError, match="without names") as caught:
        checkpoint.load(tmp_path / "c", {"optimizer": loaded["optimizer"]})
    assert "named_parameters()" in caught.value.problems[0].remedy
    for app in (saved, loaded):  # the remedy, followed
        app["optimizer"].param_groups[0]["param_names"] = [name for name, _ in app["model"].named_parameters()]
    checkpoint.save(tmp_path / "d", {"optimizer": saved["optimizer"]})
    checkpoint.load(tmp_path / "d", {"optimizer": loaded["optimizer"]})
    assert equal(state_of(loaded), state_of(saved))


def test_shapes_tell_where_there_are_no_names(tmp_path):
    saved, loaded = stepped(app_of()), stepped(app_of(), seed=3)
    for app in (saved, loaded):
        app["optimizer"] = torch.optim.Adam(app["model"].head.parameters())
        stepped(app)
    checkpoint.save(tmp_path / "c", {"optimizer": saved["optimizer"]})
    checkpoint.load(tmp_path / "c", {"optimizer": loaded["optimizer"]})
    assert equal(state_of(loaded), state_of(saved))


def test_two_models_of_one_app_have_names_of_their_own(tmp_path):
    def made():
        app = {"a": Layers(), "b": Layers()}
        app["optimizer"] = torch.optim.Adam([*app["a"].parameters(), *app["b"].parameters()])
        return app

    saved = made()
    for i, parameter in enumerate([*saved["a"].parameters(), *saved["b"].parameters()]):
        parameter.grad = torch.full_like(parameter, i + 1.0)
    saved["optimizer"].step()
    checkpoint.save(tmp_path / "c", saved)
    with checkpoint.open(tmp_path / "c") as reader:
        assert reader.read("optimizer.state.b.first.bias.step") == 1
    loaded = made()
    checkpoint.load(tmp_path / "c", loaded, init_state=True)
    ours, theirs = (app["optimizer"].state_dict()["state"] for app in (loaded, saved))
    assert all(torch.equal(ours[i]["exp_avg"], theirs[i]["exp_avg"]) for i in range(12))


def test_groups_go_by_their_members_not_by_their_order(tmp_path):
    def made(turned):
        model = Layers()
        groups = [{"params": [p for n, p in model.named_parameters() if n.endswith(end)]} for end in ("weight", "bias")]
        groups[0]["lr"] = 0.5
        return {"model": model, "optimizer": torch.optim.AdamW(groups[::-1] if turned else groups)}

    saved, loaded = stepped(made(False)), made(True)
    saved["optimizer"].param_groups[1]["lr"] = 0.25
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", loaded, init_state=True)
    assert [group["lr"] for group in loaded["optimizer"].param_groups] == [0.25, 0.5]
    assert equal(state_of(loaded), state_of(saved))
    together = app_of()
    with pytest.raises(MismatchError, match="the same in one group"):
        checkpoint.load(tmp_path / "c", together, init_state=True)


def test_another_algorithm_is_refused(tmp_path):
    checkpoint.save(tmp_path / "c", stepped(app_of()))
    with pytest.raises(MismatchError, match="AdamW, by which it was saved"):
        checkpoint.load(tmp_path / "c", app_of(kind=torch.optim.Adam), init_state=True)


@pytest.mark.parametrize(
    ("saved", "here", "other"),
    [
        ("adamw", "momentum", "betas"),
        ("momentum", "adamw", "dampening, momentum"),
        ("rmsprop", "momentum", "alpha"),
        ("adagrad", "rmsprop", "initial_accumulator_value, lr_decay"),
        ("adamw", "radam", None),  # which keeps the same
    ],
)
@pytest.mark.parametrize("way", ["torch.save", "converted"])
def test_another_algorithm_is_known_by_its_options_in_files_that_do_not_name_it(tmp_path, saved, here, other, way):
    app, into = (app_of(kind=KINDS[each][0], **KINDS[each][1]) for each in (saved, here))
    stepped(app)
    app["optimizer"].param_groups[0]["momentum_of_data"] = 0.5  # of the program's own
    if way == "torch.save":
        torch.save({key: each.state_dict() for key, each in app.items()}, tmp_path / "c.pt")
    else:
        checkpoint.save(tmp_path / "c", app)
        checkpoint.convert(tmp_path / "c", tmp_path / "c.pt", to="torch")
    before = into["optimizer"].state_dict()
    if other is None:
        checkpoint.load(tmp_path / "c.pt", into, init_state=True)
        return
    with pytest.raises(MismatchError, match=f"algorithm: found an algorithm with {other}, by which it was saved"):
        checkpoint.load(tmp_path / "c.pt", into, init_state=True)
    assert into["optimizer"].state_dict() == before and not into["optimizer"].state


def test_a_thousand_optimizers_take_ten_times_as_long_as_a_hundred(tmp_path):
    def made(count):
        model = nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(count))
        app = {"model": model, "optimizers": {str(i): torch.optim.SGD([p], 0.1) for i, p in enumerate(model)}}
        app["schedules"] = {i: torch.optim.lr_scheduler.StepLR(each, 1) for i, each in app["optimizers"].items()}
        return app

    def seconds(count):
        app = made(count)
        checkpoint.save(tmp_path / str(count), app)
        begin = time.process_time()
        checkpoint.load(tmp_path / str(count), app)
        return time.process_time() - begin

    seconds(10)
    few = seconds(50)
    assert seconds(500) < 30 * few


SCHEDULES = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "longer": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
}


def scheduled(form, schedule):
    model = Layers()
    parameters = model.named_parameters()
    optimizer = (
        torch.optim.AdamW(parameters, lr=0.1) if form == "torch" else shardopt.keyed("adamw", parameters, lr=0.1)
    )
    return {"model": model, "optimizer": optimizer, "schedule": SCHEDULES[schedule](optimizer)}


@pytest.mark.parametrize("form", ["torch", "keyed"])
@pytest.mark.parametrize("before", ["one cycle", "cyclic"])
def test_another_schedule_takes_the_place_of_one_that_added_options(tmp_path, form, before):
    saved = stepped(scheduled(form, before))
    saved["schedule"].step()
    checkpoint.save(tmp_path / "c", saved)
    loaded = scheduled(form, "cosine")
    if form == "keyed":
        with pytest.raises(MismatchError, match="max_") as caught:
            checkpoint.load(tmp_path / "c", loaded, init_state=True)
        assert 'Strictness(unexpected="ignore")' in caught.value.problems[0].remedy
    weights = {name: each for name, each in loaded.items() if name != "schedule"}
    with pytest.raises(MismatchError, match=r"missing|nothing in the checkpoint"):  # all else is as strict as before
        checkpoint.load(tmp_path / "c", weights | {"x": 1}, strict=Strictness(unexpected="ignore"), init_state=True)
    checkpoint.load(tmp_path / "c", weights, strict=Strictness(unexpected="ignore"), init_state=True)
    group = loaded["optimizer"].param_groups[0]
    assert "max_lr" not in group and group["lr"] == saved["optimizer"].param_groups[0]["lr"]
    assert equal(state_of(loaded), state_of(saved))
    anew = torch.optim.lr_scheduler.CosineAnnealingLR(loaded["optimizer"], 20, last_epoch=0)
    stepped(loaded, steps=1)
    anew.step()


def test_a_schedule_that_adds_options_is_begun(tmp_path):
    checkpoint.save(tmp_path / "c", stepped(scheduled("keyed", "cosine")))
    loaded = {name: each for name, each in scheduled("keyed", "one cycle").items() if name != "schedule"}
    passing = Strictness(unexpected="ignore", missing="warn")
    with pytest.warns(UserWarning, match="found an option that only the app has"):
        checkpoint.load(tmp_path / "c", loaded, strict=passing, init_state=True)
    assert loaded["optimizer"].param_groups[0]["max_lr"] == 0.5


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("cosine", r"schedule.T_max: 40 in the code, 20 in the checkpoint"),
        ("cyclic", r"schedule is a CosineAnnealingLR in the code, and was saved by one with"),
        ("longer", ""),
    ],
)
def test_other_arguments_of_a_schedule_are_said(tmp_path, caplog, before, line):
    saved = stepped(scheduled("torch", before))
    saved["schedule"].step()
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", scheduled("torch", "longer"), init_state=True)
    told = [each for each in caplog.messages if "resumes as it was saved" in each]
    assert bool(told) == bool(line) and all(line in each for each in told)


OTHER_CLASSES = {
    "step": lambda it: torch.optim.lr_scheduler.StepLR(it, 5, gamma=0.5),
    "milestones": lambda it: torch.optim.lr_scheduler.MultiStepLR(it, [5, 9], gamma=0.5),
    "exponential": lambda it: torch.optim.lr_scheduler.ExponentialLR(it, 0.5),
    "constant": lambda it: torch.optim.lr_scheduler.ConstantLR(it, 0.5),
    "linear": lambda it: torch.optim.lr_scheduler.LinearLR(it, 0.5),
}


def test_another_class_of_schedule_is_said_and_the_same_one_is_not(tmp_path, caplog):
    apps = {name: scheduled("torch", "cosine") for name in OTHER_CLASSES}
    for name, app in apps.items():
        app["schedule"] = OTHER_CLASSES[name](app["optimizer"])
        checkpoint.save(tmp_path / name, app)
    for name in OTHER_CLASSES:
        for here, app in apps.items():
            caplog.clear()
            checkpoint.load(tmp_path / name, app)
            told = [each for each in caplog.messages if "resumes as it was saved" in each]
            assert len(told) == (here != name), (name, here)
            app["schedule"] = OTHER_CLASSES[here](app["optimizer"])


@pytest.mark.parametrize("algorithm", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_state_is_made_under_names_that_rules_have_given(tmp_path, algorithm):
    def made(*names):
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
        return {"model": model, "optimizer": algorithm(model.parameters(), lr=0.1, **options)}

    options = {} if algorithm is torch.optim.AdamW else {"momentum": 0.9}
    app = made("first", "second")
    for parameter in app["model"].parameters():
        parameter.grad = torch.randn(2, 2)
    app["optimizer"].step()
    checkpoint.save(tmp_path / "c", app)
    loaded = made("second", "third")
    rename = {r"\bsecond\b": "third", r"\bfirst\b": "second"}
    checkpoint.load(tmp_path / "c", loaded, init_state=True, rename=rename)
    for before, after in zip(app["model"].parameters(), loaded["model"].parameters(), strict=True):
        assert torch.equal(before, after)
        stored, here = app["optimizer"].state[before], loaded["optimizer"].state[after]
        assert stored.keys() == here.keys() and all(torch.equal(here[entry], stored[entry]) for entry in stored)


def test_state_of_a_fresh_optimizer_goes_by_the_new_names(tmp_path):
    """Of torch's SGD, whose momentum comes with the first step: it is made for what is stored, renamed or not."""

    def app_of(name):
        layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        model = torch.nn.ModuleDict({name: layers})
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    saved, app = app_of("layers"), app_of("blocks")
    for number, parameter in enumerate(saved["model"].parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    saved["optimizer"].step()
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", app, rename={r"\blayers\.": "blocks."}, init_state=True)
    for number, parameter in enumerate(app["model"].parameters()):
        momentum = app["optimizer"].state[parameter]["momentum_buffer"]
        assert torch.equal(momentum, torch.full_like(parameter, float(number)))


@pytest.mark.parametrize("is_keyed", [False, True])
def test_numbers_in_the_state_of_an_old_file_are_the_tensors_of_today(tmp_path, is_keyed):
    """As torch before 1.12 had ASGD's step, eta and mu."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.update(step=int(state["step"]), eta=float(state["eta"]), mu=float(state["mu"]))
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "old.pt")
    fresh = nn.Linear(2, 2)
    made = shardopt.keyed("asgd", fresh.named_parameters()) if is_keyed else torch.optim.ASGD(fresh.parameters())
    checkpoint.load(tmp_path / "old.pt", {"model": fresh, "optimizer": made}, init_state=True)
    for before, after in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(before, after)
        stored, here = optimizer.state[before], made.state[after]
        assert stored.keys() == here.keys()
        for entry in stored:
            assert here[entry].dtype == stored[entry].dtype and torch.equal(here[entry], stored[entry])


@pytest.mark.parametrize("algorithm", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RAdam, torch.optim.Adagrad])
def test_groups_from_before_an_option_existed_load_where_missing_keys_are_ignored(tmp_path, algorithm):
    """As torch before 1.12 saved them, without `maximize` and what came later."""
    model = nn.Linear(2, 2)
    optimizer = algorithm(model.parameters(), lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for name in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        saved["param_groups"][0].pop(name, None)
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "old.pt")
    for is_keyed in (False, True):
        fresh = nn.Linear(2, 2)
        made = shardopt.keyed(algorithm, fresh.named_parameters()) if is_keyed else algorithm(fresh.parameters())
        app = {"model": fresh, "optimizer": made}
        if is_keyed:
            with pytest.raises(MismatchError, match=r'maximize: found nothing; .*Strictness\(missing="ignore"\)'):
                checkpoint.load(tmp_path / "old.pt", app, init_state=True)
        checkpoint.load(tmp_path / "old.pt", app, init_state=True, strict=Strictness(missing="ignore"))
        (group,) = made.param_groups
        assert group["lr"] == 0.25 and group["maximize"] is False
        for before, after in zip(model.parameters(), fresh.parameters(), strict=True):
            for entry, value in optimizer.state[before].items():
                assert torch.equal(made.state[after][entry], value)


def test_the_remedy_for_numbers_lists_names_in_the_order_of_the_optimizer(tmp_path):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", {"optimizer": optimizer})
    with pytest.raises(
        MismatchError, match=r"\['0\.weight', '0\.bias', '1\.weight', '1\.bias', '2\.weight', '2\.bias'\]"
    ):
        checkpoint.load(
            tmp_path / "c",
            {"model": model, "optimizer": optimizer},
            rename={r"^optimizer\.state\.0\.": "optimizer.state.0.weight."},
        )
