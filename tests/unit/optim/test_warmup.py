"""`WarmupOptimizer`: the rates that steps are taken with, however nested, and its position through save and load."""

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

import shardopt
from shardopt import GradientClipping, GradientClippingOptimizer, checkpoint
from shardopt.errors import MismatchError, StateError
from shardopt.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from shardopt.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

RAMP = WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.2)
DECAY = WarmupStage(WarmupPolicy.POLY, max_iters=12, value=2.0, lr_scale=1.0)
BOTH = [0.2, 0.4, 0.6, 0.8, 1.0, *((1 - i / 8) ** 2 for i in range(1, 9)), 0.0, 0.0]
"""The multipliers of RAMP and DECAY at iterations 0, 1, ..."""


def parameters(*names):
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(3)) for name in names or ("weight",)}


def sgd(params=None, lr=1.0, **options):
    return KeyedOptimizerWrapper(params or parameters(), lambda tensors: torch.optim.SGD(tensors, lr=lr, **options))


def give_gradients(optimizer, value=1.0):
    for parameter in optimizer.params.values():
        parameter.grad = torch.full_like(parameter, value)


def train(optimizer, steps, between=lambda: None):
    """Steps with constant gradients; the rates of every group that each step was taken with."""
    rates = []
    handle = optimizer.register_step_pre_hook(
        lambda *_: rates.append([float(group["lr"]) for group in optimizer.param_groups])
    )
    for _ in range(steps):
        give_gradients(optimizer)
        optimizer.step()
        between()
    handle.remove()
    return rates


def exactly(value):
    """Something nested with every tensor as dtype and numbers, for comparison bit by bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: exactly(inner) for key, inner in value.items()}
    return [exactly(inner) for inner in value] if isinstance(value, list | tuple) else value


def snapshot(optimizer):
    return exactly([optimizer.state_dict(), optimizer.param_groups, dict(optimizer.params)])


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


# Rates


def test_each_step_is_taken_at_its_rate():
    """Measured on the parameter: SGD with gradient 1 moves it by the rate."""
    params = {"weight": torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))}
    optimizer = WarmupOptimizer(sgd(params), [RAMP, DECAY], lr=0.5)
    moved = []
    for _ in BOTH:
        before = params["weight"].item()
        give_gradients(optimizer)
        optimizer.step()
        moved.append(before - params["weight"].item())
    assert moved == pytest.approx([0.5 * multiplier for multiplier in BOTH])


def test_rate_is_there_before_the_first_step_and_right_after_each():
    optimizer = WarmupOptimizer(sgd(), [RAMP], lr=0.5)
    assert rates_of(optimizer) == [0.1]
    give_gradients(optimizer)
    optimizer.step()
    assert rates_of(optimizer) == pytest.approx([0.2])


def test_closure_runs_once_at_the_rate_of_its_step_and_its_loss_comes_back():
    optimizer = WarmupOptimizer(sgd(), [RAMP], lr=0.5)
    seen = []

    def closure():
        seen.append(rates_of(optimizer))
        give_gradients(optimizer)
        return torch.tensor(7.0)

    assert optimizer.step(closure) == 7.0
    assert seen == [[0.1]]
    assert rates_of(optimizer) == pytest.approx([0.2])


def test_a_step_that_fails_is_not_counted():
    class Failing(KeyedOptimizer):
        def step(self, closure=None):
            raise ArithmeticError

    params = parameters()
    optimizer = WarmupOptimizer(Failing(params, {}, [{"params": [*params.values()]}]), [RAMP], lr=0.5)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert rates_of(optimizer) == [0.1]
    assert optimizer.state_dict()["state"]["__warmup"]["warmup"].tolist() == [0, 0]


def test_groups_keep_their_ratios_to_the_default_rate():
    params = parameters("slow", "plain", "frozen")
    groups = [{"match": "slow", "lr": 0.005}, {"match": "frozen", "lr": 0.0}]
    optimizer = WarmupOptimizer(shardopt.keyed("sgd", params, lr=0.01, groups=groups), [RAMP], lr=0.5)
    for rates, multiplier in zip(train(optimizer, 6), [*BOTH[:5], 1.0], strict=True):
        assert rates == pytest.approx([0.25 * multiplier, 0.0, 0.5 * multiplier])


def test_lr_stands_for_the_first_groups_rate_where_none_has_the_default_one():
    params = list(parameters("a", "b").values())

    def factory(tensors):
        return torch.optim.AdamW([{"params": tensors[:1], "lr": 0.01}, {"params": tensors[1:], "lr": 0.04}])

    inner = KeyedOptimizerWrapper(dict(zip("ab", params, strict=True)), factory)
    assert rates_of(WarmupOptimizer(inner, [RAMP], lr=0.5)) == pytest.approx([0.1, 0.4])


def test_ratios_across_the_children_of_a_combined_optimizer():
    children = [("a", sgd(parameters("x"), lr=0.1)), ("b", sgd(parameters("y"), lr=0.4))]
    optimizer = WarmupOptimizer(CombinedOptimizer(children), [RAMP], lr=1.0)
    assert train(optimizer, 2) == [pytest.approx([0.2, 0.8]), pytest.approx([0.4, 1.6])]


def test_groups_without_any_rate_or_only_rates_of_zero_get_lr():
    params = parameters()
    bare = WarmupOptimizer(KeyedOptimizer(params, {}, [{"params": [*params.values()]}]), [RAMP], lr=0.5)
    assert rates_of(bare) == [0.1]
    assert rates_of(WarmupOptimizer(sgd(lr=0.0), [RAMP], lr=0.5)) == [0.1]


def test_another_lr_param():
    optimizer = WarmupOptimizer(sgd(momentum=0.5, lr=0.3), [RAMP], lr=0.9, lr_param="momentum")
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.18)
    give_gradients(optimizer)
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.36)
    assert optimizer.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("shared", [True, False])
def test_tensor_rates_are_filled_in_place(shared):
    """torch gives every group the tensor of the default rate itself."""
    default = torch.tensor(0.01)
    params = parameters("a", "b", "c")
    second = {} if shared else {"lr": torch.tensor(0.03)}

    def factory(tensors):
        groups = [{"params": tensors[:1]}, {"params": tensors[1:], **second}]
        return torch.optim.Adam(groups, lr=default, foreach=False, capturable=False)

    inner = KeyedOptimizerWrapper({"a": params["a"], "b": params["b"]}, factory)
    optimizer = WarmupOptimizer(inner, [RAMP], lr=0.5)
    tensors = [group["lr"] for group in optimizer.param_groups]
    ratio = 1.0 if shared else 3.0
    train(optimizer, 2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.3, 0.3 * ratio])
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True))
    optimizer.add_param_group({"params": {"c": params["c"]}})  # gets the default's tensor, which stands at 0.3
    train(optimizer, 2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.5 * ratio, 0.5])


@pytest.mark.parametrize("directly", [True, False])
@pytest.mark.parametrize("steps", [1, 9])
def test_a_group_that_is_added_later_takes_part(directly, steps):
    """By the wrapper at once; one added to the wrapped optimizer, when it steps. After the end, too."""
    params = parameters("a", "b")
    inner = sgd({"a": params["a"]}, lr=0.1)
    optimizer = WarmupOptimizer(inner, [RAMP], lr=1.0)
    train(optimizer, steps)
    (inner if directly else optimizer).add_param_group({"params": {"b": params["b"]}, "lr": 0.2})
    if not directly:
        assert rates_of(optimizer)[1] == pytest.approx(2 * rates_of(optimizer)[0])
    give_gradients(optimizer)
    before = params["b"].detach().clone()
    rate = rates_of(optimizer)[0]
    optimizer.step()
    torch.testing.assert_close(before - params["b"], torch.full((3,), 2 * rate))


def test_what_others_write_while_stages_last_is_not_used():
    optimizer = WarmupOptimizer(sgd(), [RAMP, DECAY], lr=0.5)

    def meddle():
        optimizer.param_groups[0]["lr"] = 100.0

    params = optimizer.params["weight"]
    moved = []
    for _ in range(12):
        before = params.detach().clone()
        train(optimizer, 1, between=meddle)
        moved.append((before - params)[0].item())
    assert moved == pytest.approx([0.5 * multiplier for multiplier in BOTH[:12]], abs=1e-5)


def test_after_the_last_stage_the_rate_is_left_alone():
    optimizer = WarmupOptimizer(sgd(), [RAMP], lr=0.5)
    train(optimizer, 4)
    assert train(optimizer, 3) == [[0.5]] * 3
    optimizer.param_groups[0]["lr"] = 0.25
    assert train(optimizer, 3) == [[0.25]] * 3


# Schedulers

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.4, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.4, total_steps=20, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)], o
    ),
}


def stepping(scheduler):
    return lambda: scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("where", ["warm-up", "wrapped"])
def test_any_scheduler_after_the_warm_up(name, where):
    """While the stages last the rates are the warm-up's; then the scheduler's, as torch computes them."""
    inner = sgd(lr=0.3)
    optimizer = WarmupOptimizer(inner, [RAMP], lr=0.5)
    step_scheduler = stepping(SCHEDULERS[name](optimizer if where == "warm-up" else inner))
    full = 0.4 / 25 if name == "OneCycleLR" else 0.5  # it sets "initial_lr" itself
    weight = optimizer.params["weight"]
    moved = []
    for _ in range(4):
        before = weight.detach().clone()
        train(optimizer, 1, between=step_scheduler)
        moved.append((before - weight)[0].item())
    assert moved == pytest.approx([full * multiplier for multiplier in BOTH[:4]], abs=1e-6)

    bare = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    step_bares_scheduler = stepping(SCHEDULERS[name](bare))
    for i in range(4):
        bare.step()
        if i == 3:
            bare.param_groups[0]["lr"] = 0.5  # as the warm-up leaves it
        step_bares_scheduler()
    expected = []
    for _ in range(6):
        expected.append(pytest.approx(bare.param_groups[0]["lr"]))
        bare.step()
        step_bares_scheduler()
    assert [rates[0] for rates in train(optimizer, 6, between=step_scheduler)] == expected


# Saving and loading


def clipping(optimizer):
    return GradientClippingOptimizer(optimizer, GradientClipping.NORM, max_gradient=0.5)


def nested(kind, **options):
    """Two parameters under Adam, in the ways that wrappers can be nested."""
    a, b = parameters("a", "b").items()
    one, two = (
        KeyedOptimizerWrapper(dict([param]), lambda tensors: torch.optim.Adam(tensors, lr=0.1)) for param in (a, b)
    )
    stages = [RAMP, DECAY]
    made = {
        "plain": lambda: WarmupOptimizer(one, stages, **options),
        "over a wrapper": lambda: WarmupOptimizer(OptimizerWrapper(one), stages, **options),
        "over a combined": lambda: WarmupOptimizer(CombinedOptimizer([("x", one), two]), stages, **options),
        "over clipping": lambda: WarmupOptimizer(clipping(CombinedOptimizer([("x", one), two])), stages, **options),
        "under clipping": lambda: clipping(CombinedOptimizer([clipping(WarmupOptimizer(one, stages, **options)), two])),
        "in a combined": lambda: CombinedOptimizer([("x", WarmupOptimizer(one, stages, **options)), two]),
        "two in a combined": lambda: CombinedOptimizer(
            [("x", WarmupOptimizer(one, stages, **options)), ("y", WarmupOptimizer(two, [DECAY], **options))]
        ),
        "deep": lambda: OptimizerWrapper(
            CombinedOptimizer(
                [("x", OptimizerWrapper(WarmupOptimizer(CombinedOptimizer([("z", one)]), stages, **options))), two]
            )
        ),
        "two around one": lambda: WarmupOptimizer(
            OptimizerWrapper(WarmupOptimizer(one, [DECAY], lr=3.0, param_name="__inner")), stages, **options
        ),
    }[kind]()
    made.init_state()
    return made


KINDS = ["plain", "over a wrapper", "over a combined", "over clipping", "under clipping", "in a combined"]
KINDS += ["two in a combined", "deep", "two around one"]


def reloaded(optimizer, made, tmp_path, through):
    if through == "state_dict":
        made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        model = {name: param.detach() for name, param in optimizer.params.items()}
        checkpoint.save(str(tmp_path / "saved"), {"model": model, "optimizer": optimizer})
        checkpoint.load(str(tmp_path / "saved"), {"optimizer": made}, strict=False)
    with torch.no_grad():
        for name, parameter in made.params.items():
            parameter.copy_(optimizer.params[name])
    return made


@pytest.mark.parametrize(
    ("kind", "steps", "groups"),
    [
        pytest.param(kind, steps, groups, marks=[pytest.mark.exhaustive][: (i + j + groups) % 2])  # pairs are in all
        for i, kind in enumerate(KINDS)
        for j, steps in enumerate([0, 2, 4, 5, 12, 13])
        for groups in (True, False)
    ],
)
def test_resumed_steps_are_the_uninterrupted_ones_bit_for_bit(kind, steps, groups, tmp_path):
    """Within a stage, at both ends of stages and after the last, with and without saved groups."""
    optimizer, made = nested(kind, lr=0.7), nested(kind, lr=0.7)
    for each in (optimizer, made):
        each.save_param_groups(groups)
    train(optimizer, steps)
    train(made, 3)
    reloaded(optimizer, made, tmp_path, "state_dict")
    assert rates_of(made) == rates_of(optimizer)
    assert train(made, 10) == train(optimizer, 10)
    assert snapshot(made) == snapshot(optimizer)


@pytest.mark.parametrize("kind", ["plain", "over a combined", "over clipping", "deep"])
@pytest.mark.parametrize("groups", [True, False])
def test_resumed_through_a_checkpoint(kind, groups, tmp_path):
    optimizer, made = nested(kind, lr=0.7), nested(kind, lr=0.7)
    for each in (optimizer, made):
        each.save_param_groups(groups)
    train(optimizer, 6)
    reloaded(optimizer, made, tmp_path, "checkpoint")
    assert rates_of(made) == rates_of(optimizer)
    assert train(made, 8) == train(optimizer, 8)
    for name, parameter in optimizer.params.items():
        assert torch.equal(parameter, made.params[name])


def test_position_is_loaded_in_place_and_is_torchrecs():
    optimizer = WarmupOptimizer(sgd(), [RAMP, DECAY])
    position = optimizer.state_dict()["state"]["__warmup"]["warmup"]
    train(optimizer, 5)
    assert position.tolist() == [5, 1]
    assert position.dtype == torch.int64
    made = WarmupOptimizer(sgd(), [RAMP, DECAY])
    there = made.state_dict()["state"]["__warmup"]["warmup"]
    made.load_state_dict(optimizer.state_dict())
    assert there.tolist() == [5, 1]
    assert there is made.state_dict()["state"]["__warmup"]["warmup"]


def test_with_saved_groups_the_full_rates_are_the_saved_ones_and_otherwise_the_new_ones():
    for groups, full in ((True, 0.5), (False, 0.25)):
        optimizer, made = WarmupOptimizer(sgd(), [RAMP], lr=0.5), WarmupOptimizer(sgd(), [RAMP], lr=0.25)
        for each in (optimizer, made):
            each.save_param_groups(groups)
        train(optimizer, 2)
        made.load_state_dict(optimizer.state_dict())
        assert train(made, 3) == [pytest.approx([full * multiplier]) for multiplier in BOTH[2:5]]


@pytest.mark.parametrize(("kept", "rate"), [((), 0.125), (("weight_decay",), 0.125), (("weight_decay", "lr"), 0.5)])
def test_a_schedulers_rate_after_the_end_is_resumed_where_groups_are_saved(kept, rate):
    optimizer, made = (WarmupOptimizer(sgd(), [RAMP], lr=0.5) for _ in range(2))
    for each in (optimizer, made):
        each.save_param_groups(True)
    train(optimizer, 6)
    optimizer.param_groups[0]["lr"] = 0.125
    made.keep_options(*kept)
    made.load_state_dict(optimizer.state_dict())
    assert train(made, 2) == [[rate]] * 2


def test_only_some_children_save_their_groups():
    def build():
        one, two = sgd(parameters("a"), lr=0.1), sgd(parameters("b"), lr=0.1)
        one.save_param_groups(True)
        return WarmupOptimizer(CombinedOptimizer([("x", one), ("y", two)]), [RAMP], lr=1.0)

    optimizer, made = build(), build()
    train(optimizer, 6)
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    made.load_state_dict(optimizer.state_dict())
    assert rates_of(made) == [0.25, 1.0]  # the second one's group is not saved, so its rate is that of the last stage


@pytest.mark.parametrize(
    ("saved", "end", "position", "rate"),
    [
        ([RAMP, DECAY], 50, [6, 1], BOTH[6]),
        ([RAMP], 50, [6, 1], 0.3),
        ([RAMP], 5, [6, 2], 0.3),  # its end is past as well
    ],
)
def test_stages_may_be_appended(saved, end, position, rate):
    optimizer = WarmupOptimizer(sgd(), saved, lr=1.0)
    train(optimizer, 6)
    made = WarmupOptimizer(sgd(), [*saved, WarmupStage(WarmupPolicy.CONSTANT, max_iters=end, value=0.3)], lr=1.0)
    made.load_state_dict(optimizer.state_dict())
    assert made.state_dict()["state"]["__warmup"]["warmup"].tolist() == position
    assert rates_of(made) == [rate]


OTHER_STAGES = {
    "fewer": [RAMP],
    "another value": [RAMP, WarmupStage(WarmupPolicy.POLY, max_iters=12, value=1.0)],
    "another end": [WarmupStage(WarmupPolicy.LINEAR, max_iters=5, value=0.2), DECAY],
    "another policy": [WarmupStage(WarmupPolicy.CONSTANT, max_iters=4, value=0.2), DECAY],
    "another order": [WarmupStage(WarmupPolicy.POLY, max_iters=4, value=2.0), WarmupStage(max_iters=12, value=0.2)],
}


@pytest.mark.parametrize("stages", OTHER_STAGES.values(), ids=OTHER_STAGES)
@pytest.mark.parametrize("through", ["state_dict", "checkpoint"])
def test_other_stages_are_refused_before_anything_changes(stages, through, tmp_path):
    optimizer, made = WarmupOptimizer(sgd(), [RAMP, DECAY]), WarmupOptimizer(sgd(), stages)
    train(optimizer, 6)
    before = snapshot(made)
    with pytest.raises(MismatchError) as raised:
        reloaded(optimizer, made, tmp_path, through)
    (problem,) = raised.value.problems
    assert problem.key.endswith("state.__warmup.stages")
    assert "linear max_iters=4 lr_scale=1.0 value=0.2" in problem.found
    assert "poly max_iters=12" in problem.found
    assert snapshot(made) == before


def test_other_stages_in_a_child_are_named_with_its_key():
    optimizer = CombinedOptimizer([("x", WarmupOptimizer(sgd(), [RAMP]))])
    made = CombinedOptimizer([("x", WarmupOptimizer(sgd(), [DECAY]))])
    with pytest.raises(MismatchError) as raised:
        made.load_state_dict(optimizer.state_dict())
    assert [problem.key for problem in raised.value.problems] == ["state.x.__warmup.stages"]


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (lambda entries: entries.pop("warmup"), "state.__warmup.warmup"),
        (lambda entries: entries.pop("stages"), "state.__warmup.stages"),
        (lambda entries: entries.update(stages=[]), "state.__warmup.stages"),
        (lambda entries: entries.update(stages=3), "state.__warmup.stages"),
        (lambda entries: entries.update(more=1), "state.__warmup.more"),
        (lambda entries: entries.update(warmup=torch.zeros(3, dtype=torch.int64)), "state.__warmup.warmup"),
        (lambda entries: entries.update(warmup=torch.zeros(2)), "state.__warmup.warmup"),
        (lambda entries: entries.update(warmup=5), "state.__warmup.warmup"),
    ],
)
def test_damaged_state_is_refused(damage, key):
    optimizer, made = WarmupOptimizer(sgd(), [RAMP]), WarmupOptimizer(sgd(), [RAMP])
    train(optimizer, 3)
    offered = copy.deepcopy(optimizer.state_dict())
    damage(offered["state"]["__warmup"])
    before = snapshot(made)
    with pytest.raises(MismatchError) as raised:
        made.load_state_dict(offered)
    assert [problem.key for problem in raised.value.problems] == [key]
    assert snapshot(made) == before


def test_from_and_to_an_optimizer_without_warm_up():
    plain, made = sgd(momentum=0.9), WarmupOptimizer(sgd(momentum=0.9), [RAMP], lr=0.5)
    for optimizer in (plain, made):
        optimizer.init_state()
    with pytest.raises(MismatchError, match="__warmup"):
        made.load_state_dict(plain.state_dict())
    assert made.load_state_dict(plain.state_dict(), strict=False).missing_keys == ["state.__warmup"]
    assert rates_of(made) == [0.1]
    with pytest.raises(MismatchError, match="__warmup"):
        plain.load_state_dict(made.state_dict())


def test_torchrecs_state_loads_without_strictness():
    """Its position is laid out as here; it says nothing of stages."""
    made = WarmupOptimizer(sgd(), [RAMP], lr=0.5)
    actual = made.load_state_dict({"state": {"__warmup": {"warmup": torch.tensor([3, 0])}}}, strict=False)
    assert actual.missing_keys == ["state.__warmup.stages"]
    assert rates_of(made) == pytest.approx([0.4])


# The rest of what an optimizer is


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_its_own_way(copied, kind):
    optimizer = nested(kind)
    train(optimizer, 2)
    other = copied(optimizer)
    assert rates_of(other) == rates_of(optimizer)
    before = snapshot(optimizer)
    ahead = train(other, 7)
    assert snapshot(optimizer) == before
    assert train(optimizer, 7) == ahead
    for name, parameter in optimizer.params.items():
        assert torch.equal(parameter, other.params[name])


def test_a_copy_through_torch_save():
    stream = io.BytesIO()
    optimizer = nested("deep")
    train(optimizer, 2)
    torch.save(optimizer, stream)
    stream.seek(0)
    assert train(torch.load(stream, weights_only=False), 5) == train(optimizer, 5)


def test_init_state_is_not_a_step():
    optimizer = WarmupOptimizer(sgd(momentum=0.9), [RAMP], lr=0.5)
    optimizer.init_state()
    assert rates_of(optimizer) == [0.1]
    assert optimizer.state_dict()["state"]["__warmup"]["warmup"].tolist() == [0, 0]


def test_hooks_run_once_a_step():
    optimizer = WarmupOptimizer(sgd(), [RAMP])
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append(optimizer.param_groups[0]["lr"]))
    give_gradients(optimizer)
    optimizer.step()
    assert called == ["before", pytest.approx(0.04)]


def test_stages_given_are_not_changed_nor_followed():
    stages = [WarmupStage(WarmupPolicy.POLY, max_iters=4)]
    optimizer = WarmupOptimizer(sgd(), stages, lr=1.0)
    stages[0].max_iters = 1
    stages.clear()
    assert [rates[0] for rates in train(optimizer, 5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_repr_tells_stages_and_position():
    optimizer = WarmupOptimizer(sgd(), [RAMP])
    train(optimizer, 3)
    assert repr(optimizer).startswith(
        "WarmupOptimizer (iteration 3 of linear max_iters=4 lr_scale=1.0 value=0.2) of Keyed"
    )


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"stages": []}, "stages"),
        ({"stages": [WarmupStage(max_iters=0)]}, "stages[0].max_iters"),
        ({"lr": -0.1}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": torch.tensor(0.1)}, "lr"),
        ({"lr_param": "learning_rate"}, "param_groups[0].learning_rate"),
        ({"lr_param": "foreach"}, "param_groups[0].foreach"),
        ({"lr_param": ""}, "lr_param"),
        ({"param_name": ""}, "param_name"),
        ({"param_name": "weight"}, "param_name"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_changed(arguments, key):
    optimizer = sgd()
    before = exactly(optimizer.param_groups)
    with pytest.raises(StateError) as raised:
        WarmupOptimizer(optimizer, **{"stages": [RAMP], **arguments})
    assert key in [problem.key for problem in raised.value.problems]
    assert exactly(optimizer.param_groups) == before


def test_two_warm_ups_need_two_names():
    inner = WarmupOptimizer(sgd(), [RAMP])
    with pytest.raises(StateError, match="has state in the wrapped optimizer already"):
        WarmupOptimizer(OptimizerWrapper(inner), [RAMP])


def test_of_two_warm_ups_the_outer_ones_rates_are_used():
    inner = WarmupOptimizer(sgd(), [WarmupStage(max_iters=9, value=0.0)], lr=3.0, param_name="__inner")
    optimizer = WarmupOptimizer(inner, [RAMP], lr=0.5)
    assert train(optimizer, 3) == [pytest.approx([0.5 * multiplier]) for multiplier in BOTH[:3]]


def test_example_in_the_docs():
    page = (Path(__file__).parents[3] / "docs" / "warmup.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "dense": torch.nn.Linear(2, 1)})
    given = {"model": model}
    exec(code, given)
    assert rates_of(given["optimizer"]) == pytest.approx([6e-6, 3e-6])
    assert given["optimizer"].param_groups[0]["initial_lr"] == pytest.approx(6e-4)
