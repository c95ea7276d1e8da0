"""Lion, AdEMAMix and Schedule-Free beside the packages of their authors: the same bits in fp32 and fp64."""

import copy

import pytest
import pytorch_optimizer
import schedulefree
import torch

import shardopt
from shardopt.algorithms.elementwise.ademamix import AdEMAMix
from shardopt.algorithms.elementwise.lion import Lion
from shardopt.algorithms.elementwise.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from shardopt.errors import AlgorithmError, GradientError, MismatchError, StateError

SHAPES = [(7, 5), (64,), (3, 4, 2), ()]
STEPS = 12
WARM = {"lr": 0.05, "warmup_steps": 4, "weight_decay": 0.1, "r": 0.5}
CASES = {
    "lion": (Lion, pytorch_optimizer.Lion, {"lr": 0.02}),
    "lion-decayed": (Lion, pytorch_optimizer.Lion, {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.2}),
    "lion-maximize": (Lion, pytorch_optimizer.Lion, {"maximize": True, "weight_decay": 0.2}),
    "ademamix": (AdEMAMix, pytorch_optimizer.AdEMAMix, {"lr": 0.02, "weight_decay": 0.1}),
    "ademamix-ramped": (AdEMAMix, pytorch_optimizer.AdEMAMix, {"t_alpha_beta3": 7, "weight_decay": 0.0}),
    "schedule-free-sgd": (ScheduleFreeSGD, schedulefree.SGDScheduleFree, {"lr": 0.1}),
    "schedule-free-sgd-warm": (ScheduleFreeSGD, schedulefree.SGDScheduleFree, {**WARM, "momentum": 0.7}),
    "schedule-free-adamw": (ScheduleFreeAdamW, schedulefree.AdamWScheduleFree, {}),
    "schedule-free-adamw-warm": (ScheduleFreeAdamW, schedulefree.AdamWScheduleFree, {**WARM, "betas": (0.7, 0.9)}),
}
FREE = [name for name in CASES if name.startswith("schedule-free")]


def tensors(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def parameters(dtype=torch.float32):
    return {f"w{i}": torch.nn.Parameter(tensor) for i, tensor in enumerate(tensors(0, dtype))}


def train(optimizer, params, first=0, last=STEPS, modes=True):
    for step in range(first, last):
        gradients = tensors(1 + step, next(iter(params.values())).dtype)
        for parameter, gradient in zip(params.values(), gradients, strict=True):
            parameter.grad = gradient
        if modes and step in (0, 5, 9):  # there and back, as around an evaluation
            optimizer.eval()
            optimizer.eval()
            optimizer.train()
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_the_authors_package(name, dtype, foreach):
    ours_class, theirs_class, options = CASES[name]
    theirs = parameters(dtype)
    # The package's takes decays for L2 penalties by default; the paper's are decoupled.
    more = {"weight_decouple": True} if theirs_class is pytorch_optimizer.AdEMAMix else {}
    reference = theirs_class(theirs.values(), **options, **more, foreach=foreach)
    has_modes = name in FREE
    if has_modes:
        reference.train()
    train(reference, theirs, modes=has_modes)
    ours = parameters(dtype)
    plain = ours_class(list(ours.values()), **options, foreach=foreach)
    train(plain, ours, modes=has_modes)
    keyed = parameters(dtype)
    by_name = shardopt.keyed(ours_class, keyed, **options, foreach=foreach)
    train(by_name, keyed)  # modes do nothing for an algorithm with weights of one kind
    if has_modes:
        for optimizer in (reference, plain, by_name):
            optimizer.eval()
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key
        assert torch.equal(keyed[key], theirs[key]), key
        for entry, value in reference.state[theirs[key]].items():
            assert torch.equal(plain.state[ours[key]][entry], value), (key, entry)


def wrappers():
    def clipped(optimizer):
        return shardopt.GradientClippingOptimizer(optimizer, shardopt.GradientClipping.NORM, max_gradient=1e6)

    def warm(optimizer):
        stages = [shardopt.WarmupStage(shardopt.WarmupPolicy.LINEAR, max_iters=3, value=0.5)]
        return shardopt.WarmupOptimizer(optimizer, stages, lr=0.05)

    return {
        "keyed": lambda optimizer: optimizer,
        "wrapper": shardopt.optim.OptimizerWrapper,
        "combined": lambda optimizer: shardopt.optim.CombinedOptimizer([("a", optimizer)]),
        "clipped": clipped,
        "warm": warm,
        "all": lambda optimizer: clipped(
            warm(shardopt.optim.CombinedOptimizer([shardopt.optim.OptimizerWrapper(optimizer)]))
        ),
    }


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("wrapping", wrappers())
def test_modes_and_resume_through_every_wrapper(wrapping, mode):
    """A run that saves in either mode continues as one that loads there, whatever mode the other is in."""

    def make(params):
        return wrappers()[wrapping](shardopt.keyed("ScheduleFreeAdamW", params, **WARM))

    params = parameters()
    optimizer = make(params)
    train(optimizer, params, last=6)
    y = [parameter.detach().clone() for parameter in params.values()]
    optimizer.eval()
    assert optimizer.evaluating
    averages = [parameter.detach().clone() for parameter in params.values()]
    assert not any(map(torch.equal, y, averages))
    with pytest.raises(StateError, match="evaluation mode"):
        optimizer.step()
    assert all(map(torch.equal, averages, params.values()))
    if mode == "train":
        optimizer.train()
    weights = [parameter.detach().clone() for parameter in params.values()]
    saved = copy.deepcopy(optimizer.state_dict())

    others = parameters()
    resumed = make(others)
    resumed.init_state()
    resumed.eval()
    for parameter, value in zip(others.values(), weights, strict=True):
        parameter.data.copy_(value)
    resumed.load_state_dict(saved)
    assert resumed.evaluating == (mode == "eval")
    for each, of in ((optimizer, params), (resumed, others), (copy.deepcopy(optimizer), None)):
        each.train()
        assert not each.evaluating
        if of is not None:
            train(each, of, first=6)
    assert all(map(torch.equal, params.values(), others.values()))
    for one, other in zip(params.values(), others.values(), strict=True):
        state = resumed.state[other]
        assert all(torch.equal(value, state[name]) for name, value in optimizer.state[one].items())


def test_a_refused_step_changes_nothing_in_other_children():
    params = parameters()
    first = {"w0": params["w0"]}
    rest = {name: parameter for name, parameter in params.items() if name != "w0"}
    free = shardopt.keyed("ScheduleFreeSGD", rest)
    optimizer = shardopt.optim.CombinedOptimizer([shardopt.keyed("adamw", first), free])
    clipping = shardopt.GradientClippingOptimizer(optimizer, shardopt.GradientClipping.VALUE, max_gradient=1e-3)
    train(clipping, params, last=1)
    clipping.eval()
    before = {name: parameter.detach().clone() for name, parameter in params.items()}
    gradients = tensors(5, torch.float32)
    for parameter, gradient in zip(params.values(), gradients, strict=True):
        parameter.grad = gradient.clone()
    for each in (clipping, optimizer):
        with pytest.raises(StateError, match="evaluation mode"):
            each.step(lambda: pytest.fail("the model was evaluated"))
    assert all(torch.equal(parameter, before[name]) for name, parameter in params.items())
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(params.values(), gradients, strict=True))


def test_a_scaler_and_updates_in_backward_know_the_modes():
    params = parameters()
    optimizer = shardopt.keyed("ScheduleFreeSGD", params, lr=0.1)
    scaler = shardopt.GradScaler("cpu", init_scale=4.0)
    twin = parameters()
    plain = ScheduleFreeSGD(twin.values(), lr=0.1)
    third = parameters()
    fused = shardopt.in_backward(third, "ScheduleFreeSGD", lr=0.1)
    for step in range(4):
        factors = tensors(1 + step, torch.float32)

        def loss(of, factors=factors):
            return sum((p * f).sum() for p, f in zip(of.values(), factors, strict=True))

        scaler.scale(loss(params)).backward()
        scaler.step(optimizer)
        scaler.update()
        loss(twin).backward()
        plain.step()
        loss(third).backward()
        fused.step()
        for each in (optimizer, plain, fused):
            each.zero_grad()
            each.eval()
            if step < 3:
                each.train()
    with pytest.raises(StateError, match="evaluation mode"):
        loss(third).backward()
    for key in params:
        assert torch.equal(params[key], twin[key]) and torch.equal(third[key], twin[key])
    fused.stop()


def test_another_algorithm_is_refused_by_name():
    saved = shardopt.keyed("Lion", parameters())
    saved.init_state()
    for name in ("ScheduleFreeAdamW", "AdamW", "AdEMAMix"):
        optimizer = shardopt.keyed(name, parameters())
        optimizer.init_state()
        with pytest.raises(MismatchError, match="Lion"):
            optimizer.load_state_dict(saved.state_dict())
        with pytest.raises(MismatchError, match=name):
            saved.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["Lion", "AdEMAMix", "ScheduleFreeSGD", "ScheduleFreeAdamW"])
def test_torchs_contract(name):
    """Closures, options out of range, sparse gradients, a state dict by position that resumes exactly."""
    made = shardopt.algorithms.spec_of(name).optimizer
    for bad in ({"lr": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=f"{name}'s {next(iter(bad))}"):
            made([torch.zeros(2)], **bad)
    with pytest.raises(AlgorithmError, match="capturable"):
        shardopt.keyed(name, parameters(), capturable=True)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = made([weight], lr=0.1)
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(GradientError, match="sparse"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(3, 2)) and not optimizer.state[weight]

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    for _ in range(4):
        optimizer.step()
    twin = torch.nn.Parameter(weight.detach().clone())
    other = made([twin])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, each in ((weight, optimizer), (twin, other)):
        parameter.grad = torch.full((3, 2), 0.5)
        each.step()
    assert torch.equal(weight, twin) and other.param_groups[0]["lr"] == 0.1
    for entry, saved in optimizer.state[weight].items():
        assert saved.dtype == other.state[twin][entry].dtype and torch.equal(saved, other.state[twin][entry]), entry


@pytest.mark.parametrize("name", ["ScheduleFreeSGD", "ScheduleFreeAdamW"])
def test_the_mode_is_no_option_and_weights_have_no_negative_power(name):
    made = shardopt.algorithms.spec_of(name).optimizer
    params = parameters()
    for given in ({"weight_lr_power": -1.0}, {"train_mode": False}):
        with pytest.raises(ValueError, match=f"{name}'s {next(iter(given))}"):
            made([{"params": list(params.values()), **given}])
    with pytest.raises(ValueError, match="weight_lr_power"):
        shardopt.keyed(name, params, weight_lr_power=-1.0)
    optimizer = shardopt.keyed(name, params)
    added = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(AlgorithmError, match="train_mode"):
        optimizer.add_param_group({"params": {"added": added}, "train_mode": False})
    assert len(optimizer.param_groups) == 1
