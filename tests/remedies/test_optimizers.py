"""What errors of optimizers in a load advise, followed to the letter, one alternative after the other."""

import re
from pathlib import Path

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from tests.golden.state import torch_optimizers
from tests.remedies.following import app_of, assert_same, moments_of, refused, stepped, weights_of

IGNORE = Strictness(unexpected="ignore")
POSITIONS = Path(__file__).parents[1] / "golden" / "torch_positions"


@pytest.fixture
def url(tmp_path):
    return tmp_path / "c"


def saved(url, app):
    checkpoint.save(url, app)
    return app


def loaded(url, app, **options):
    checkpoint.load(url, app, init_state=True, **options)
    return app


def without_optimizer(url, app):
    """Loads an app but for its optimizer, as the remedies advise that begin anew."""
    checkpoint.load(url, {"model": app["model"]}, strict=IGNORE)
    assert not moments_of(app)
    return stepped(app, 1)


@pytest.mark.parametrize("form", ["keyed", "torch"])
def test_another_algorithm_is_resumed_or_begun_anew(url, form):
    before = saved(url, app_of(form, 2))
    remedy = (
        "resume with AdamW; or begin anew with Adam: leave the optimizer out of the app, and load with Strictness("
        'unexpected="ignore"); or load with strict=False, which takes the state that fits and no options'
        if form == "keyed"
        else "resume with AdamW; or begin anew: leave the optimizer out of the app, and load with Strictness("
        'unexpected="ignore")'
    )
    refused(remedy, checkpoint.load, url, app_of(form, algorithm="adam"), init_state=True)
    without_optimizer(url, app_of(form, algorithm="adam"))
    if form == "keyed":
        other = loaded(url, app_of(form, algorithm="adam", lr=0.5), strict=False)
        assert moments_of(other) == moments_of(before) and other["optimizer"].param_groups[0]["lr"] == 0.5
    assert_same(loaded(url, app_of(form)), before)


def test_another_algorithm_without_state_is_no_matter_of_making_some(url):
    before = saved(url, app_of("keyed", 2))
    remedy = (
        "resume with AdamW; or begin anew with {}: leave the optimizer out of the app, and load with Strictness("
        'unexpected="ignore"); or, if it has state of the same names, load with strict=False and init_state=True, '
        "which takes that and no options"
    )
    refused(remedy.format("SGD"), checkpoint.load, url, app_of(algorithm="sgd"), init_state=True)
    without_optimizer(url, app_of(algorithm="sgd"))
    refused(remedy.format("Adam"), checkpoint.load, url, app_of(algorithm="adam"))
    other = loaded(url, app_of(algorithm="adam", lr=0.5), strict=False)
    assert moments_of(other) == moments_of(before) and other["optimizer"].param_groups[0]["lr"] == 0.5


def grouped(form, lr, order=("bias", "weight"), **options):
    """An app whose optimizer has a group for each of these names of parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    if form == "keyed":
        groups = [{"match": name, "lr": lr[name]} for name in order]
        return {
            "model": model,
            "optimizer": shardopt.keyed("adamw", model.named_parameters(), groups=groups, **options),
        }
    groups = [{"params": [model.get_parameter(name)], "lr": lr[name]} for name in order]
    return {"model": model, "optimizer": torch.optim.AdamW(groups, **options)}


@pytest.mark.parametrize("schedule", [False, True])
def test_parameters_that_had_other_options_get_groups_or_the_codes_options(url, schedule):
    before = grouped("keyed", {"bias": 0.5, "weight": 0.25})
    if schedule:
        before["schedule"] = torch.optim.lr_scheduler.ExponentialLR(before["optimizer"], 0.5)
    checkpoint.save(url, stepped(before))
    remedy = (
        'put these parameters into groups of their own, as they were saved; or call keep_options("lr") before loading, '
        "to keep what the code gives"
    )

    def load(app):
        without = {name: each for name, each in app.items() if name != "schedule"}
        return loaded(url, without, strict=IGNORE)

    refused(remedy, load, app_of())
    together = app_of()
    together["optimizer"].keep_options("lr")
    load(together)
    assert moments_of(together) == moments_of(before) and together["optimizer"].param_groups[0]["lr"] == 0.125
    apart = grouped("keyed", {"bias": 0.1, "weight": 0.1})
    load(apart)
    ours, theirs = ([group["lr"] for group in app["optimizer"].param_groups[:2]] for app in (apart, before))
    assert ours == theirs == ([0.125, 0.0625] if schedule else [0.5, 0.25])


def test_parameters_of_which_one_had_an_option_more_continue_without_it(url):
    before = grouped("keyed", {"bias": 0.125, "weight": 0.125})
    before["optimizer"].param_groups[0]["lr_scale"] = 2.0
    checkpoint.save(url, stepped(before))
    remedy = (
        'put these parameters into groups of their own, …; or load with Strictness(unexpected="ignore"), which '
        "leaves it out"
    )
    refused(remedy, checkpoint.load, url, app_of(), init_state=True)
    assert moments_of(loaded(url, app_of(), strict=IGNORE)) == moments_of(before)
    apart = grouped("keyed", {"bias": 0.125, "weight": 0.125})
    apart["optimizer"].param_groups[0]["lr_scale"] = 1.0
    assert loaded(url, apart)["optimizer"].param_groups[0]["lr_scale"] == 2.0


def test_groups_of_torchs_optimizers_are_made_as_they_were_saved(url):
    before = saved(url, stepped(grouped("torch", {"bias": 0.5, "weight": 0.25})))
    problem = refused(
        "make these groups of them, as they were saved: …", checkpoint.load, url, app_of("torch"), init_state=True
    )
    groups = [[*map(str.strip, part.split(","))] for part in problem.remedy.split(": ")[1].split(";")]
    app = app_of("torch")
    named = [[name.strip("'").removeprefix("model.") for name in names] for names in groups]
    parameters = [{"params": [app["model"].get_parameter(name) for name in names]} for names in named]
    app["optimizer"] = torch.optim.AdamW(parameters)
    loaded(url, app)
    assert sorted(moments_of(app)) == sorted(moments_of(before))  # groups may stand in another order
    assert weights_of(stepped(app, 1)) == weights_of(stepped(before, 1))


NO_NAMES = (
    "put the module whose parameters these are into the app, where it is saved and where it is loaded, or make the "
    "optimizer of model.named_parameters()"
)


def of_one_shape(named=False):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, False), torch.nn.Linear(2, 2, False))
    parameters = model.named_parameters() if named else model.parameters()
    return stepped({"model": model, "optimizer": torch.optim.AdamW(parameters)})


@pytest.mark.parametrize("there", [False, True])
def test_positions_get_names_by_the_module_or_of_the_optimizer(tmp_path, there):
    """Names lack where it was saved, or only where it is loaded."""
    before = of_one_shape()
    saved(tmp_path / "c", before if there else {"optimizer": before["optimizer"]})
    app = of_one_shape()
    options = {"strict": IGNORE}
    refused(NO_NAMES, checkpoint.load, tmp_path / "c", {"optimizer": app["optimizer"]}, **options)
    saved(tmp_path / "whole", before)
    checkpoint.load(tmp_path / "whole", app)
    assert_same(app, before)
    before, app = of_one_shape(named=True), of_one_shape(named=True)
    saved(tmp_path / "named", {"optimizer": before["optimizer"]})
    checkpoint.load(tmp_path / "named", {"optimizer": app["optimizer"]})
    assert moments_of(app) == moments_of(before)


def test_the_module_alone_is_not_enough_where_it_was_saved_with_it_and_named_here(tmp_path):
    before, app = saved(tmp_path / "c", of_one_shape()), of_one_shape(named=True)
    checkpoint.load(tmp_path / "c", app)
    assert_same(app, before)


def test_numbers_get_names_by_the_rules_that_the_error_writes(tmp_path):
    def app(*names):
        made = torch_optimizers(("second", "first"))
        return {name: made[name] for name in ("model", *names)}

    remedy = (
        "say which is which, in the order in which the optimizer that was saved had them: rename={…}; or leave the "
        'optimizer out of the app, and load with Strictness(unexpected="ignore")'
    )
    doubtful = app("doubtful")
    options = {"init_state": True, "strict": IGNORE}
    problem = refused(remedy, checkpoint.load, POSITIONS, doubtful, **options)
    written = re.search(r"rename=(\{.*\}); or leave", problem.remedy).group(1)
    in_order = [name for name, _ in torch_optimizers()["model"].named_parameters()]
    rename = eval(re.sub(r"enumerate\(\[.*\]\)", f"enumerate({in_order})", written))
    checkpoint.load(POSITIONS, doubtful, rename=rename, **options)
    assert moments_of(doubtful | {"optimizer": doubtful["doubtful"]})
    alone = app()
    checkpoint.load(POSITIONS, alone, strict=IGNORE)
    assert weights_of(alone) == weights_of(doubtful)


def test_groups_by_number_are_given_in_the_order_of_the_checkpoint(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    weights = [each for each in model.parameters() if each.dim() > 1]
    saved = torch.optim.AdamW([{"params": weights, "weight_decay": 0.5}, {"params": [model[0].bias]}], lr=0.25)
    torch.save({"optimizer": saved.state_dict()}, tmp_path / "a.pt")

    def load(match):
        optimizer = shardopt.keyed("adamw", model.named_parameters(), groups=[{"match": match}])
        checkpoint.load(tmp_path / "a.pt", {"optimizer": optimizer})
        return [group["weight_decay"] for group in optimizer.param_groups]

    remedy = (
        "give the app groups of as many parameters, in the checkpoint's order: in keyed(groups=[...]) the listed ones "
        "come first"
    )
    refused(remedy, load, "bias")
    assert load("weight") == [0.5, 0.01]


def test_parameters_on_one_side_only_are_renamed_or_passed_over(url):
    before = saved(url, app_of(steps=2))

    def other():
        model = torch.nn.ModuleDict({"new": torch.nn.Linear(3, 2)})
        return {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters())}

    assert_same(loaded(url, other(), rename={r"^(model|optimizer\.\w+)\.": r"\1.new."}), before)
    remedy = (
        "load what was saved from the same parameters, by checkpoint.load(..., rename={...}) where names have changed, "
        "or pass strict=False, which leaves their state as it is"
    )
    fewer = shardopt.keyed("adamw", {"weight": before["model"].weight})
    fewer.init_state()
    state = before["optimizer"].state_dict()
    refused(remedy, fewer.load_state_dict, state)
    fewer.load_state_dict(state, strict=False)
    weight = before["model"].weight
    assert torch.equal(fewer.state[weight]["exp_avg"], before["optimizer"].state[weight]["exp_avg"])
    several = (
        "load what was saved from the same parameters and options, by checkpoint.load(..., rename={...}) where names "
        "have changed, with init_state=True where some have not stepped, or pass strict=False"
    )
    refused(several, fewer.load_state_dict, state)


def test_options_that_a_schedule_adds_are_attached_left_out_or_passed_over(url):
    def one_cycle(app):
        return torch.optim.lr_scheduler.OneCycleLR(app["optimizer"], max_lr=0.5, total_steps=20)

    remedy = (
        "a schedule adds some: attach the same one first, or leave the schedule out of the app and load with Strictness"
        '(unexpected="ignore") for what another one had added, or Strictness(missing="ignore") for what the new one '
        "adds; set a key of your own in param_groups before the load; or pass strict=False"
    )
    before = app_of(steps=2)
    schedule = one_cycle(before)
    saved(url, before)
    refused(remedy, checkpoint.load, url, app_of(), init_state=True)
    assert_same(loaded(url, app_of(), strict=IGNORE), before)
    assert moments_of(loaded(url, app_of(), strict=False))
    same = app_of()
    one_cycle(same)
    assert loaded(url, same)["optimizer"].param_groups[0]["max_lr"] == 0.5
    plain = saved(url.parent / "d", app_of(steps=2))
    new = app_of()
    one_cycle(new)
    refused(remedy, checkpoint.load, url.parent / "d", new, init_state=True)
    loaded(url.parent / "d", new, strict=Strictness(missing="ignore"))
    assert moments_of(new) == moments_of(plain) and new["optimizer"].param_groups[0]["max_lr"] == 0.5
    assert schedule


def test_an_own_key_of_the_training_loop_is_set_before_the_load(url):
    before = app_of(steps=2)
    before["optimizer"].param_groups[0]["progress"] = 0.5
    saved(url, before)
    refused("set a key of your own in param_groups before the load", checkpoint.load, url, app_of(), init_state=True)
    with_key = app_of()
    with_key["optimizer"].param_groups[0]["progress"] = 0.0
    assert loaded(url, with_key)["optimizer"].param_groups[0]["progress"] == 0.5


def test_state_by_position_is_loaded_by_position_or_saved_with_names():
    before, into = app_of("torch", steps=2), app_of()
    remedy = (
        "optimizer.as_torch().load_state_dict(...) takes parameters in the order of the groups here; or save from a "
        "torch optimizer made of model.named_parameters()"
    )
    refused(remedy, into["optimizer"].load_state_dict, before["optimizer"].state_dict())
    into["optimizer"].as_torch().load_state_dict(before["optimizer"].state_dict())
    assert sorted(moments_of(into)) == sorted(moments_of(before))
    with_names = torch.optim.AdamW(before["model"].named_parameters(), lr=0.125)
    with_names.load_state_dict(before["optimizer"].state_dict())
    into = app_of()
    into["optimizer"].init_state()
    into["optimizer"].load_state_dict(with_names.state_dict())
    assert sorted(moments_of(into)) == sorted(moments_of(before))


def test_state_of_another_form_is_resumed_or_converted(url):
    before = saved(url, app_of(steps=2, state_dtype=torch.bfloat16))
    remedy = (
        "resume with state_dtype='bfloat16'; or load into an optimizer that stores as it was saved, and give its "
        "state_dict() to load_state_dict(..., convert_state=True) of this one"
    )
    refused(remedy, checkpoint.load, url, app_of(), init_state=True)
    as_saved = loaded(url, app_of(state_dtype=torch.bfloat16))
    assert moments_of(as_saved) == moments_of(before)
    converted = app_of()
    checkpoint.load(url, {"model": converted["model"]}, strict=IGNORE)
    converted["optimizer"].init_state()
    converted["optimizer"].load_state_dict(as_saved["optimizer"].state_dict(), convert_state=True)
    assert moments_of(converted) == moments_of(before)


def test_another_rounding_is_resumed_or_kept(url):
    before = saved(url, app_of(steps=2, state_dtype=torch.bfloat16, rounding="stochastic"))
    remedy = 'resume with rounding=…; or call keep_options("rounding") before loading, to round as the code says'
    options = {"state_dtype": torch.bfloat16, "rounding": "nearest"}
    refused(remedy, checkpoint.load, url, app_of(**options), init_state=True)
    kept = app_of(**options)
    kept["optimizer"].keep_options("rounding")
    assert moments_of(loaded(url, kept)) == moments_of(before)
    assert kept["optimizer"].param_groups[0]["rounding"] == "nearest"
    assert moments_of(loaded(url, app_of(state_dtype=torch.bfloat16, rounding="stochastic"))) == moments_of(before)


def test_options_under_which_state_would_lie_otherwise_are_resumed(url):
    """The key of the option is that of the argument of `keyed`."""

    def made(**options):
        model = torch.nn.Linear(3, 2)
        return {"model": model, "optimizer": shardopt.keyed("shampoo", model.named_parameters(), **options)}

    checkpoint.save(url, stepped(made(block_size=2)))
    with pytest.raises(shardopt.errors.MismatchError) as caught:
        checkpoint.load(url, made(block_size=3), init_state=True)
    remedy = next(problem.remedy for problem in caught.value.problems if problem.remedy.startswith("resume with"))
    assert "block_size=2" in remedy
    loaded(url, made(block_size=2))


def test_the_line_about_replaced_options_says_how_the_codes_are_kept(url, caplog):
    saved(url, app_of(steps=2, lr=0.5))
    loaded(url, app_of(lr=0.25))
    line = next(each for each in caplog.messages if "keep_options" in each)
    assert "call optimizer.keep_options('lr') before loading" in line
    caplog.clear()
    kept = app_of(lr=0.25)
    kept["optimizer"].keep_options("lr")
    assert loaded(url, kept)["optimizer"].param_groups[0]["lr"] == 0.25 and "keep_options" not in caplog.text


def test_an_option_that_cannot_be_stored_is_kept_outside_or_groups_are_not_saved(url):
    app = app_of(steps=2)
    app["optimizer"].param_groups[0]["callback"] = print
    remedy = "keep it outside of the group, or turn groups off with save_param_groups(False)"
    refused(remedy, checkpoint.save, url, app)
    refused(remedy, checkpoint.load, saved_elsewhere(url), app)
    app["optimizer"].save_param_groups(False)
    saved(url, app)
    other = app_of()
    remedy = "load what state_dict() gave, with groups where save_param_groups(True) was called"
    refused(remedy, other["optimizer"].load_state_dict, app["optimizer"].state_dict())
    del app["optimizer"].param_groups[0]["callback"]
    app["optimizer"].save_param_groups(True)
    other["optimizer"].init_state()
    other["optimizer"].load_state_dict(app["optimizer"].state_dict())
    assert moments_of(other) == moments_of(app)
    saved(url.parent / "e", app)


def saved_elsewhere(url):
    saved(url.parent / "elsewhere", app_of(steps=2))
    return url.parent / "elsewhere"


def test_groups_that_are_not_wanted_are_dropped_or_turned_on():
    state = app_of(steps=2)["optimizer"].state_dict()
    remedy = "drop it; for param_groups, call save_param_groups(True) before loading"
    for drops in (True, False):
        other = app_of(steps=1)
        other["optimizer"].save_param_groups(False)
        refused(remedy, other["optimizer"].load_state_dict, state)
        if not drops:
            other["optimizer"].save_param_groups(True)
        other["optimizer"].load_state_dict({"state": state["state"]} if drops else state)
        assert other["optimizer"].state_dict()["state"]["bias"]["step"] == 2


def test_state_and_its_lack_in_load_state_dict():
    state = app_of(steps=2)["optimizer"].state_dict()
    fresh = app_of()
    refused("call init_state() before loading", fresh["optimizer"].load_state_dict, state)
    fresh["optimizer"].init_state()
    fresh["optimizer"].load_state_dict(state)
    assert fresh["optimizer"].state_dict()["state"]["bias"]["step"] == 2
    remedy = (
        "it was saved before the first step: call init_state() before saving, or load it into an optimizer on which "
        "init_state() was not called"
    )
    early = app_of()
    refused(remedy, fresh["optimizer"].load_state_dict, early["optimizer"].state_dict())
    app_of()["optimizer"].load_state_dict(early["optimizer"].state_dict())
    early["optimizer"].init_state()
    fresh["optimizer"].load_state_dict(early["optimizer"].state_dict())


def test_what_is_offered_is_what_state_dict_gives():
    app, other = app_of(steps=2), app_of(steps=2)
    state = app["optimizer"].state_dict()
    for remedy, wrong in (
        ("load what state_dict() of a keyed optimizer gave", {**state, "param_groups": 3}),
        ("offer what state_dict() gives", {**state, "state": 3}),
    ):
        refused(remedy, other["optimizer"].load_state_dict, wrong)
        other["optimizer"].load_state_dict(state)
    combined = shardopt.optim.CombinedOptimizer([("a", other["optimizer"])])
    theirs = shardopt.optim.CombinedOptimizer([("a", app["optimizer"])]).state_dict()
    for section in ("state", "param_groups"):
        remedy = "load what state_dict() of a combined optimizer gave"
        refused(remedy, combined.load_state_dict, {**theirs, section: 3})
    combined.load_state_dict(theirs)
    wide = {name: {entry: each.double() for entry, each in held.items()} for name, held in state["state"].items()}
    remedy = "convert it first, or pass convert_dtype=True"
    refused(remedy, other["optimizer"].load_state_dict, {**state, "state": wide})
    other["optimizer"].load_state_dict({**state, "state": wide}, convert_dtype=True)
    assert moments_of(other) == moments_of(app)


def test_positions_are_those_of_as_torch():
    app, other = app_of(steps=2), app_of(steps=2)
    remedy = "load what as_torch() of an optimizer with the same groups gave, or torch's getters with it"
    state = app["optimizer"].as_torch().state_dict()
    for groups in (3, [], [{**state["param_groups"][0], "params": [0]}]):
        refused(remedy, other["optimizer"].as_torch().load_state_dict, {**state, "param_groups": groups})
    other["optimizer"].as_torch().load_state_dict(state)
    assert moments_of(other) == moments_of(app)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_the_line_about_a_replaced_rate_says_what_to_do_with_its_schedule(url, caplog):
    def made(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def scheduled(lr):
        app = app_of(lr=lr)
        return app | {"schedule": made(app["optimizer"])}

    app = scheduled(0.5)
    saved(url, stepped(app))
    loaded(url, scheduled(0.25))
    line = next(each for each in caplog.messages if "keep_options" in each)
    remedy = (
        "; a schedule sets 'lr' again: leave it out of the app, load with "
        'Strictness(unexpected="ignore"), and afterwards make it anew and call its step() once for each step taken'
    )
    assert line.endswith(remedy)
    kept = app_of(lr=0.25)
    kept["optimizer"].keep_options("lr")
    checkpoint.load(url, kept, strict=checkpoint.Strictness(unexpected="ignore"), init_state=True)
    schedule, course = made(kept["optimizer"]), scheduled(0.25)["schedule"]
    for _ in range(app["schedule"].last_epoch):
        schedule.step(), course.step()
    assert schedule.base_lrs == [0.25] and schedule.get_last_lr() == course.get_last_lr() != [0.25]
