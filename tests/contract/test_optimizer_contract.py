"""The contract of torch.optim.Optimizer, held by every kind of keyed optimizer alike."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.torn import mark_torn, unmark_torn
from shardopt.errors import AlgorithmError, MismatchError, StateError, TornStateError
from shardopt.optim.composite import CompositeOptimizer
from tests.contract.optimizers import BUILDERS, OPTIONS, give_gradients, parameters, same, train

each_kind = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


def everything(optimizer, params):
    """A copy of all that a step or a load could change."""
    return copy.deepcopy((list(params.values()), optimizer.state_dict(), [_options(g) for g in optimizer.param_groups]))


def _options(group):
    return {name: value for name, value in group.items() if name != "params"}


def innermost(optimizer):
    if isinstance(optimizer, CompositeOptimizer):
        return [leaf for part in optimizer._parts for leaf in innermost(part)]
    return [optimizer]


# --- steps -----------------------------------------------------------------------------------------------------------


@each_kind
def test_it_trains_as_torchs_adam(build):
    params, plain = parameters(), parameters()
    optimizer, reference = build(params), torch.optim.Adam(plain.values(), **OPTIONS)
    train(optimizer, params, 4)
    train(reference, plain, 4)
    assert all(map(torch.equal, params.values(), plain.values()))
    assert len(optimizer.state) == 3
    for parameter, twin in zip(params.values(), plain.values(), strict=True):
        assert same(dict(optimizer.state[parameter]), reference.state[twin])
    assert dict(optimizer.params) == params


@each_kind
def test_a_closure_runs_once_with_gradients_and_its_loss_is_returned(build):
    params, plain = parameters(), parameters()
    optimizer, reference = build(params), torch.optim.Adam(plain.values(), **OPTIONS)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in params.values())
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss == sum(parameter.detach().square().sum() for parameter in plain.values())
    for parameter in plain.values():
        parameter.grad = 2 * parameter.detach()
    reference.step()
    assert all(map(torch.equal, params.values(), plain.values()))
    assert optimizer.step() is None


@each_kind
def test_zero_grad_drops_or_zeroes(build):
    params = parameters()
    optimizer = build(params)
    give_gradients(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in params.values())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in params.values())


@each_kind
def test_options_are_live(build):
    params = parameters()
    optimizer = build(params)
    before = [parameter.detach().clone() for parameter in params.values()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(optimizer, params, 2)
    assert all(map(torch.equal, params.values(), before))
    assert {group["lr"] for part in innermost(optimizer) for group in part.param_groups} == {0.0}


# --- hooks -----------------------------------------------------------------------------------------------------------


@each_kind
def test_hooks_fire_once_for_each_call_in_the_order_of_torch(build):
    params = parameters()
    optimizer = build(params)
    fired = []

    def note(name):
        def hook(who, *_):
            assert who is optimizer
            fired.append(name)

        return hook

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))
    for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        getattr(optimizer, f"register_{kind}_hook")(note(kind))
        getattr(optimizer, f"register_{kind}_hook")(note(f"first {kind}"), prepend=True)
    try:
        optimizer.init_state()
        assert fired == []
        train(optimizer, params)
        assert fired == ["global pre", "pre", "post", "global post"]
        fired.clear()
        saved = optimizer.state_dict()
        assert fired == ["first state_dict_pre", "state_dict_pre", "first state_dict_post", "state_dict_post"]
        fired.clear()
        optimizer.check_state_dict(saved)
        assert fired == []
        optimizer.load_state_dict(saved)
        names = ["load_state_dict_pre", "load_state_dict_post"]
        assert fired == [f"{first}{name}" for name in names for first in ("first ", "")]
    finally:
        for handle in handles:
            handle.remove()


@each_kind
def test_hooks_of_parts_fire_whenever_a_part_is_used(build):
    params = parameters()
    optimizer = build(params)
    leaves = innermost(optimizer)
    fired = []
    for leaf in leaves:
        leaf.register_step_pre_hook(lambda who, args, kwargs: fired.append(("pre", who)))
        leaf.register_step_post_hook(lambda who, args, kwargs: fired.append(("post", who)))
        leaf.register_state_dict_post_hook(lambda who, saved: fired.append(("save", who)))
        leaf.register_load_state_dict_pre_hook(lambda who, saved: fired.append(("load", who)))
        leaf.register_load_state_dict_post_hook(lambda who: fired.append(("loaded", who)))
    optimizer.init_state()
    train(optimizer, params)
    assert fired == [(name, leaf) for leaf in leaves for name in ("pre", "post")]
    fired.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert fired == [(name, leaf) for name in ("save", "load", "loaded") for leaf in leaves]


@each_kind
def test_a_hook_may_change_what_is_stepped_saved_and_loaded(build):
    params = parameters()
    optimizer = build(params)
    optimizer.register_step_pre_hook(lambda who, args, kwargs: ((who, lambda: 3), {}))
    assert optimizer.step() == 3
    optimizer.register_state_dict_post_hook(lambda who, saved: {"wrapped": saved})
    optimizer.register_load_state_dict_pre_hook(lambda who, saved: saved["wrapped"])
    train(optimizer, params)
    optimizer.load_state_dict(optimizer.state_dict())


@each_kind
def test_a_step_before_a_part_is_loaded_whole_is_refused(build):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params)
    before = everything(optimizer, params)
    marked = innermost(optimizer)[0]
    mark_torn([marked], "loading x")
    with pytest.raises(TornStateError, match="loading x"):
        optimizer.step()
    unmark_torn([marked])
    if len(innermost(optimizer)) == 1 and not isinstance(optimizer, CompositeOptimizer):
        assert same(everything(optimizer, params), before)
    optimizer.step()


# --- groups, schedules, scaling --------------------------------------------------------------------------------------


@each_kind
def test_a_group_is_added_by_name_and_trains_is_saved_and_loaded(build):
    params, plain = parameters(), parameters()
    optimizer, reference = build(params), torch.optim.Adam(plain.values(), **OPTIONS)
    more, twin = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    train(optimizer, params)
    train(reference, plain)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if build is BUILDERS["combined without keys"]:
        with pytest.raises(StateError, match=r"layer\.more: found names that fit 2 of the optimizers"):
            optimizer.add_param_group({"params": {"layer.more": more}, "lr": 1.0})
        optimizer.optimizers[0][1].add_param_group({"params": {"layer.more": more}, "lr": 1.0})
    elif build is BUILDERS["nested"]:
        # Two of the three lie under "layer" without keys, so only the head's is plain to find.
        optimizer.add_param_group({"params": {"head.more": more}, "lr": 1.0})
    else:
        optimizer.add_param_group({"params": {"layer.more": more}, "lr": 1.0})
    reference.add_param_group({"params": [twin], "lr": 1.0})
    params, plain = {**params, "more": more}, {**plain, "more": twin}
    train(optimizer, params, 2)
    train(reference, plain, 2)
    assert all(map(torch.equal, params.values(), plain.values()))
    saved = optimizer.state_dict()
    (name,) = [name for name in optimizer.params if name.endswith("more")]
    assert saved["state"][name]["step"] == 2
    assert saved["param_groups"][name]["lr"] == 1.0
    assert optimizer.load_state_dict(saved) == ([], [])
    with pytest.raises(StateError, match="added twice"):
        optimizer.add_param_group({"params": {name: torch.nn.Parameter(torch.ones(1))}})
    with pytest.raises(StateError, match=r"added twice|to several"):
        optimizer.add_param_group({"params": {f"{name}.again": more}})
    assert same(optimizer.state_dict(), saved)


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, 8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.3, anneal_epochs=3),
}


def test_every_schedule_of_torch_is_tried():
    classes = {
        value.__name__
        for value in vars(lr_scheduler).values()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert classes - set(SCHEDULES) <= {"LRScheduler", "_LRScheduler"}


@each_kind
@pytest.mark.parametrize("attach", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_act_as_on_torchs_adam(build, attach):
    """Warnings are errors, so that a schedule which does not see the steps fails here."""
    params, plain = parameters(), parameters()
    optimizer, reference = build(params), torch.optim.Adam(plain.values(), **OPTIONS)
    with warnings.catch_warnings():
        # SequentialLR calls the first step of its schedules with an argument that torch deprecates.
        warnings.filterwarnings("ignore", "The epoch parameter")
        schedules = attach(optimizer), attach(reference)
        for step in range(5):
            train(optimizer, params, first=step)
            train(reference, plain, first=step)
            for schedule in schedules:
                metric = [1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []
                schedule.step(*metric)
            for group in optimizer.param_groups:
                assert (group["lr"], group["betas"]) == (
                    reference.param_groups[0]["lr"],
                    reference.param_groups[0]["betas"],
                )
    assert all(map(torch.equal, params.values(), plain.values()))
    optimizer.load_state_dict(optimizer.state_dict())


@each_kind
def test_a_schedule_of_a_part_sees_its_steps(build):
    params = parameters()
    optimizer = build(params)
    part = innermost(optimizer)[0]
    schedule = lr_scheduler.ExponentialLR(part, 0.5)
    train(optimizer, params)
    schedule.step()
    assert part.param_groups[0]["lr"] == 0.025


@each_kind
def test_torchs_grad_scaler_unscales_and_skips(build):
    params, plain = parameters(), parameters()
    optimizer, reference = build(params), torch.optim.Adam(plain.values(), **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        give_gradients(params, step)
        give_gradients(plain, step)
        scaler.scale(torch.ones(()))
        for parameter in params.values():
            parameter.grad *= 8
        if step == 1:
            params["head.w"].grad[0] = torch.inf
        else:
            reference.step()
        scaler.step(optimizer)
        scaler.update(8.0)
    assert all(map(torch.equal, params.values(), plain.values()))


# --- copies ----------------------------------------------------------------------------------------------------------


def repickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@each_kind
@pytest.mark.parametrize("duplicate", [copy.deepcopy, repickled])
def test_a_copy_trains_alike_and_apart_and_leaves_others_alone(build, duplicate):
    params, others = parameters(), parameters(1)
    optimizer, other = build(params), build(others)
    fired = []
    other.register_step_pre_hook(lambda *_: fired.append("other"))
    optimizer.register_step_pre_hook(lambda *_: fired.append("hook"))
    lr_scheduler.ExponentialLR(optimizer, 0.5)  # puts a function around the step that no copy may share
    train(optimizer, params, 2)
    fired.clear()
    if duplicate is repickled:
        optimizer._optimizer_step_pre_hooks.clear()
    twin = duplicate(optimizer)
    twins = dict(twin.params)
    assert same(twin.state_dict(), optimizer.state_dict())
    assert all(mine is not its for mine, its in zip(params.values(), twins.values(), strict=True))
    before = everything(optimizer, params)
    train(twin, {name: twins[name] for name in params}, first=2)
    assert fired == []
    assert same(everything(optimizer, params), before)
    optimizer._optimizer_step_pre_hooks.clear()
    train(optimizer, params, first=2)
    assert same(twin.state_dict(), optimizer.state_dict())
    assert all(torch.equal(twins[name], params[name]) for name in params)
    train(other, others)
    assert fired == ["other"]


@each_kind
def test_repr_tells_what_it_is_made_of(build):
    text = repr(build(parameters()))
    assert "lr: 0.05" in text
    assert text.startswith(type(build(parameters())).__name__)


# --- state -----------------------------------------------------------------------------------------------------------


@each_kind
def test_init_state_is_invisible_and_gives_a_destination(build):
    params, plain = parameters(), parameters()
    optimizer, trained = build(params), build(plain)
    before = copy.deepcopy(list(params.values()))
    optimizer.init_state([next(iter(params))])
    assert all(map(torch.equal, params.values(), before))
    assert all(parameter.grad is None for parameter in params.values())
    saved = optimizer.state_dict()["state"]
    assert all(saved[name]["step"] == 0 for name in params)
    train(optimizer, params, 3)
    train(trained, plain, 3)
    assert same(optimizer.state_dict(), trained.state_dict())
    assert all(map(torch.equal, params.values(), plain.values()))
    with pytest.raises(StateError, match="found nobody"):
        optimizer.init_state(["nobody"])


@each_kind
def test_loading_is_in_place_and_exact(build):
    params, plain = parameters(), parameters(1)
    optimizer, trained = build(params), build(plain)
    train(trained, plain, 3)
    optimizer.init_state()
    addresses = {
        (name, entry): value.data_ptr()
        for name, entries in optimizer.state_dict()["state"].items()
        for entry, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    saved = trained.state_dict()
    for group in trained.param_groups:
        group["lr"] = 0.125
    saved = trained.state_dict()
    assert optimizer.load_state_dict(saved) == ([], [])
    loaded = optimizer.state_dict()
    assert same(loaded, saved)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}
    for (name, entry), address in addresses.items():
        assert loaded["state"][name][entry].data_ptr() == address


def drop_parameter(saved):
    del saved["state"]["layer.b"]
    return r"state\.layer\.b: found nothing|found no state; required state of layer\.b"


def add_parameter(saved):
    saved["state"]["layer.new"] = {"step": torch.tensor(1.0)}
    return r"state\.layer\.new: found a value"


def rename_parameter(saved):
    saved["state"]["elsewhere"] = saved["state"].pop("head.w")
    return r"state\.elsewhere: found a value"


def drop_entry(saved):
    del saved["state"]["head.w"]["exp_avg_sq"]
    return r"state\.head\.w\.exp_avg_sq: found nothing"


def add_entry(saved):
    saved["state"]["head.w"]["max_exp_avg_sq"] = torch.zeros(3)
    return r"state\.head\.w\.max_exp_avg_sq: found a value"


def other_shape(saved):
    saved["state"]["head.w"]["exp_avg"] = torch.zeros(1)  # would broadcast
    return r"state\.head\.w\.exp_avg: found shape \(1,\); required \(3,\)"


def other_dtype(saved):
    saved["state"]["layer.w"]["exp_avg"] = torch.zeros(4, 2, dtype=torch.float64)
    return r"state\.layer\.w\.exp_avg: found dtype torch\.float64; required torch\.float32"


def other_kind(saved):
    saved["state"]["layer.w"]["step"] = 3
    return r"state\.layer\.w\.step: found a plain value; required a tensor"


def no_values(saved):
    saved["state"]["layer.w"]["exp_avg"] = torch.zeros(4, 2, device="meta")
    return r"state\.layer\.w\.exp_avg: found a tensor on the meta device"


def no_state(saved):
    saved["state"] = {name: {} for name in saved["state"]}
    return "found no state; .* call init_state"


def state_is_no_mapping(saved):
    saved["state"] = []
    return "state: found a"


def drop_section(saved):
    del saved["param_groups"]
    return "param_groups: found nothing"


def add_section(saved):
    saved["more"] = {}
    return "more: found a value"


def groups_are_torchs(saved):
    saved["param_groups"] = list(saved["param_groups"].values())
    return "param_groups: found a list"


def drop_group(saved):
    saved["param_groups"].pop("head.w", None) or saved["param_groups"].clear()
    return r"param_groups\.(head\.w|layer\.b): found nothing"


def rename_group(saved):
    saved["param_groups"]["other"] = saved["param_groups"].popitem()[1]
    return r"param_groups\.other: found a value"


def other_members(saved):
    next(iter(saved["param_groups"].values()))["params"] = ["nobody"]
    return r"\.params: \S+: found nothing"


def drop_option(saved):
    del next(iter(saved["param_groups"].values()))["betas"]
    return r"param_groups\.\S+\.betas: found nothing"


def add_option(saved):
    next(iter(saved["param_groups"].values()))["momentum"] = 0.9
    return r"param_groups\.\S+\.momentum: found a value"


def other_option_kind(saved):
    next(iter(saved["param_groups"].values()))["lr"] = torch.tensor(0.1)
    return r"param_groups\.\S+\.lr: found a tensor; required a plain value"


MISMATCHES = [
    drop_parameter, add_parameter, rename_parameter, drop_entry, add_entry, other_shape, other_dtype, other_kind,
    no_values, no_state, state_is_no_mapping, drop_section, add_section, groups_are_torchs, drop_group, rename_group,
    other_members, drop_option, add_option, other_option_kind,
]  # fmt: skip


@each_kind
@pytest.mark.parametrize("change", MISMATCHES, ids=lambda change: change.__name__)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(build, change):
    params, plain = parameters(), parameters(1)
    optimizer, trained = build(params), build(plain)
    train(optimizer, params, 2)
    train(trained, plain, 3)
    for group in trained.param_groups:
        group["lr"] = 0.5
    saved = copy.deepcopy(trained.state_dict())
    message = change(saved)
    before = everything(optimizer, params)
    with pytest.raises(MismatchError, match=message) as error:
        optimizer.load_state_dict(saved)
    assert all(problem.found and problem.required and problem.remedy for problem in error.value.problems)
    assert same(everything(optimizer, params), before)
    if change is not no_values:  # stands for values that are still to be read
        with pytest.raises(MismatchError, match=message):
            optimizer.check_state_dict(saved)
    assert same(everything(optimizer, params), before)


@each_kind
def test_every_problem_is_told_at_once(build):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    changes = [drop_entry, other_dtype, add_section, add_option]
    messages = [change(saved) for change in changes]
    with pytest.raises(MismatchError) as error:
        optimizer.load_state_dict(saved)
    assert len(error.value.problems) == len(changes)
    for message in messages:
        assert any(re.search(message, str(problem)) for problem in error.value.problems)


@each_kind
def test_state_into_an_optimizer_that_has_none_names_init_state(build):
    params, plain = parameters(), parameters()
    optimizer, trained = build(params), build(plain)
    train(trained, plain)
    with pytest.raises(MismatchError, match=r"none, as this optimizer has none yet; call init_state\(\)"):
        optimizer.load_state_dict(trained.state_dict())
    assert len(optimizer.state) == 0


@each_kind
def test_not_strict_loads_what_fits_and_tells_the_rest(build):
    params, plain = parameters(), parameters(1)
    optimizer, trained = build(params), build(plain)
    optimizer.init_state()
    train(trained, plain, 3)
    saved = copy.deepcopy(trained.state_dict())
    drop_parameter(saved)
    add_parameter(saved)
    add_section(saved)
    missing, unexpected = optimizer.load_state_dict(saved, strict=False)
    assert (missing, sorted(unexpected)) == (["state.layer.b"], ["more", "state.layer.new"])
    state = optimizer.state_dict()["state"]
    assert same(state["layer.w"], saved["state"]["layer.w"])
    assert state["layer.b"]["step"] == 0
    other_shape(saved)
    with pytest.raises(MismatchError):
        optimizer.load_state_dict(saved, strict=False)


@each_kind
def test_dtypes_are_converted_on_request_alone(build):
    params, plain = parameters(), parameters(1)
    optimizer, trained = build(params), build(plain)
    train(optimizer, params)
    train(trained, plain, 3)
    saved = copy.deepcopy(trained.state_dict())
    for name in params:
        saved["state"][name]["exp_avg"] = saved["state"][name]["exp_avg"].bfloat16()
    with pytest.raises(MismatchError, match="convert_dtype=True"):
        optimizer.load_state_dict(saved)
    optimizer.check_state_dict(saved, convert_dtype=True)
    optimizer.load_state_dict(saved, convert_dtype=True)
    for name, entries in optimizer.state_dict()["state"].items():
        if name in params:
            assert same(entries["exp_avg"], saved["state"][name]["exp_avg"].float())
    saved["state"]["head.w"]["exp_avg"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(MismatchError, match=r"dtype torch\.int64"):
        optimizer.load_state_dict(saved, convert_dtype=True)


@each_kind
def test_groups_are_saved_on_request(build):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params)
    with_groups = optimizer.state_dict()
    assert sorted(name for group in with_groups["param_groups"].values() for name in group["params"]) == sorted(params)
    assert all(key == group["params"][0] for key, group in with_groups["param_groups"].items())
    optimizer.save_param_groups(False)
    assert list(optimizer.state_dict()) == ["state"]
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(MismatchError, match="param_groups: found a value"):
        optimizer.load_state_dict(with_groups)


@each_kind
def test_steps_after_a_checkpoint_are_those_of_an_uninterrupted_run(build, tmp_path):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, 3)
    optimizer.param_groups[0]["lr"] = 0.0625
    checkpoint.save(tmp_path, {"model": dict(params), "optimizer": optimizer})
    resumed = parameters(1)
    other = build(resumed)
    other.init_state()
    checkpoint.load(tmp_path, {"model": dict(resumed), "optimizer": other})
    train(optimizer, params, 3, first=3)
    train(other, resumed, 3, first=3)
    assert same(everything(other, resumed), everything(optimizer, params))


@each_kind
def test_a_checkpoint_that_does_not_fit_changes_nothing(build, tmp_path):
    params, resumed = parameters(), parameters(1)
    optimizer, other = build(params), build(resumed)
    train(optimizer, params, 3)
    app = {"optimizer": optimizer.state_dict()}
    del app["optimizer"]["state"]["head.w"]["exp_avg_sq"]
    checkpoint.save(tmp_path, app)
    other.init_state()
    before = everything(other, resumed)
    with pytest.raises(MismatchError, match=r"optimizer\.state\.head\.w\.exp_avg_sq"):
        checkpoint.load(tmp_path, {"optimizer": other})
    assert same(everything(other, resumed), before)
    train(other, resumed)


@each_kind
def test_lbfgs_inside_is_refused_before_anything_is_changed(build):
    params = parameters()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = shardopt.CombinedOptimizer([build(params), ("lbfgs", shardopt.keyed("lbfgs", {"w": weight}))])
    train_before = everything(optimizer, params)
    give_gradients(params, 0)
    with pytest.raises(AlgorithmError, match="LBFGS"):
        optimizer.step(lambda: pytest.fail("the closure was evaluated"))
    assert same(everything(optimizer, params), train_before)
