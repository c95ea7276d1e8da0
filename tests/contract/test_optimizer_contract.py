"""The contract of torch.optim.Optimizer, held by every kind of keyed optimizer alike."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardopt
from shardopt.errors import AlgorithmError, PartialLoadError, StateError
from shardopt.optim.core.composite import CompositeOptimizer
from shardopt.runtime.partial_loads import PartialLoad
from tests.support.optimizers import BUILDERS, OPTIONS, give_gradients, parameters, same, snapshot, train

each_kind = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


def innermost(optimizer):
    if isinstance(optimizer, CompositeOptimizer):
        return [local for part in optimizer._children for local in innermost(part)]
    return [optimizer]


# --- steps -----------------------------------------------------------------------------------------------------------


@each_kind
def test_it_trains_as_torchs_adam(build):
    params, plain = parameters(), parameters()
    optimizer, reference = build(params), torch.optim.Adam(plain.values(), **OPTIONS)
    train(optimizer, params, 4)
    train(reference, plain, 4)
    assert all(map(torch.equal, params.values(), plain.values()))
    assert len([each for each in optimizer.state if isinstance(each, torch.Tensor) and each.shape]) == 3
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


@pytest.mark.parametrize(
    # The step of "own" is the user's, and torch's to compile.
    "build",
    [pytest.param(build, id=kind) for kind, build in BUILDERS.items() if kind != "own"],
)
def test_a_compiled_loop_steps_as_it_is_written(build):
    params, plain = parameters(), parameters()
    optimizer, reference = build(params), build(plain)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(2):
        give_gradients(params, step)
        give_gradients(plain, step)
        compiled()
        reference.step()
    assert all(map(torch.equal, params.values(), plain.values()))


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
        optimizer.check_state_dict(saved)  # of what the hooks make of it, as a load does
        assert fired == ["first load_state_dict_pre", "load_state_dict_pre"]
        fired.clear()
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
    tensors = innermost(optimizer)
    fired = []
    for local in tensors:
        local.register_step_pre_hook(lambda who, args, kwargs: fired.append(("pre", who)))
        local.register_step_post_hook(lambda who, args, kwargs: fired.append(("post", who)))
        local.register_state_dict_post_hook(lambda who, saved: fired.append(("save", who)))
        local.register_load_state_dict_pre_hook(lambda who, saved: fired.append(("load", who)))
        local.register_load_state_dict_post_hook(lambda who: fired.append(("loaded", who)))
    optimizer.init_state()
    train(optimizer, params)
    assert fired == [(name, local) for local in tensors for name in ("pre", "post")]
    fired.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert fired == [(name, local) for name in ("save", "load", "loaded") for local in tensors]


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
    before = snapshot(optimizer, params)
    marked = innermost(optimizer)[0]
    PartialLoad(marked, "loading x").begin()
    with pytest.raises(PartialLoadError, match="loading x"):
        optimizer.step()
    PartialLoad(marked, "").end(mends=True)
    if len(innermost(optimizer)) == 1 and not isinstance(optimizer, CompositeOptimizer):
        assert same(snapshot(optimizer, params), before)
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
    assert [group["lr"] for group in saved["param_groups"] if name in group["params"]] == [1.0]
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


@pytest.mark.parametrize(
    ("build", "attach"),
    [
        pytest.param(
            BUILDERS[kind], SCHEDULES[name], id=f"{kind}-{name}", marks=[pytest.mark.exhaustive][: (i + j) % 3]
        )
        for i, kind in enumerate(BUILDERS)
        for j, name in enumerate(SCHEDULES)
    ],
)
def test_schedules_act_as_on_torchs_adam(build, attach):
    """Warnings are errors, so that a schedule which does not see the steps fails here."""
    params, plain = parameters(), parameters()
    optimizer, reference = build(params), torch.optim.Adam(plain.values(), **OPTIONS)
    if "initial_lr" in optimizer.param_groups[0]:  # of a warm-up; CyclicLR takes its first rate from there
        reference.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["initial_lr"]
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
    assert all(mine is not own for mine, own in zip(params.values(), twins.values(), strict=True))
    before = snapshot(optimizer, params)
    train(twin, {name: twins[name] for name in params}, first=2)
    assert fired == []
    assert same(snapshot(optimizer, params), before)
    optimizer._optimizer_step_pre_hooks.clear()
    train(optimizer, params, first=2)
    assert same(twin.state_dict(), optimizer.state_dict())
    assert all(torch.equal(twins[name], params[name]) for name in params)
    train(other, others)
    assert fired == ["other"]


@each_kind
def test_memory_is_freed_with_the_last_reference(build):
    """At once, and not when Python's garbage collector comes by, which knows nothing of a device's memory."""
    params = parameters()
    optimizer = build(params)
    lr_scheduler.ExponentialLR(optimizer, 0.5)
    gc.collect()
    gc.disable()
    try:
        train(optimizer, params, 2)
        optimizer.init_state()
        optimizer.check_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        alive = [weakref.ref(optimizer), *map(weakref.ref, params.values())]
        del optimizer, params
        assert [reference() for reference in alive] == [None] * 4
    finally:
        gc.enable()


@each_kind
def test_repr_tells_what_it_is_made_of(build):
    text = repr(build(parameters()))
    assert "lr: 0.05" in text
    assert text.startswith(type(build(parameters())).__name__)


@each_kind
def test_lbfgs_inside_is_refused_before_anything_is_changed(build):
    params = parameters()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = shardopt.optim.CombinedOptimizer([build(params), ("lbfgs", shardopt.keyed("lbfgs", {"w": weight}))])
    train_before = snapshot(optimizer, params)
    give_gradients(params, 0)
    with pytest.raises(AlgorithmError, match="LBFGS"):
        optimizer.step(lambda: pytest.fail("the closure was evaluated"))
    assert same(snapshot(optimizer, params), train_before)
