"""All of torch's schedules on keyed optimizers and their wrappers: torch's own rates, and a resume that is exact."""

import pytest
import torch
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR

import shardopt
from shardopt import checkpoint

STEPS = 6


class Halving:
    """A callable with state, which schedules save."""

    def __init__(self, start=1.0):
        self.factor = start

    def __call__(self, epoch):
        self.factor *= 0.9
        return self.factor


SCHEDULES = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR-callable": lambda o: torchs.LambdaLR(o, [Halving() for _ in o.param_groups]),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: torchs.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [3, 3, 8], 0.5),
    "ConstantLR": lambda o: torchs.ConstantLR(o, 0.3, 8),
    "LinearLR": lambda o: torchs.LinearLR(o, 0.2, 1.0, 9),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, 11, 2.0),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, 5, 0.001),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 4, 2),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, 1.0, 4), torchs.StepLR(o, 2), torchs.ExponentialLR(o, 0.9)], [4, 8]
    ),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.ConstantLR(o, 0.1, 7), torchs.ExponentialLR(o, 0.9)], o
    ),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2", base_momentum=0.7, max_momentum=0.95),
    "CyclicLR-callable": lambda o: torchs.CyclicLR(o, 0.01, 0.1, 4, scale_fn=Halving(), scale_mode="iterations"),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, [0.1, 0.3], total_steps=15, three_phase=True),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
    "shardopt.ReduceLROnPlateau": lambda o: shardopt.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
    "SWALR": lambda o: SWALR(o, [0.02, 0.05], anneal_epochs=7),
    "SWALR-linear": lambda o: SWALR(o, 0.02, anneal_epochs=4, anneal_strategy="linear"),
}
GROUPS = [{"match": "weight"}, {"match": "bias", "lr": 0.03}]


def test_no_class_of_torchs_is_left_out():
    classes = {name for name in torchs.__all__ if name not in ("LRScheduler", "CosineAnnealingWarmRestarts")}
    covered = {name.split("-")[0] for name in SCHEDULES}
    assert classes <= covered and {"CosineAnnealingWarmRestarts", "SWALR"} <= covered
    assert len(torchs.__all__) - 1 == 15


def model():
    torch.manual_seed(3)
    return torch.nn.Linear(4, 3)


def plain(net):
    # fused is what `keyed` takes for SGD in fp32 on the CPU where nothing is named
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.03}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True)


def one(net):
    return shardopt.keyed("sgd", net.named_parameters(), lr=0.05, momentum=0.9, groups=GROUPS)


def with_adamw(net):
    return shardopt.keyed("adamw", net.named_parameters(), lr=0.05, groups=GROUPS)


def with_tensor_rates(net):
    return shardopt.keyed("adamw", net.named_parameters(), lr=torch.tensor(0.05, dtype=torch.float64), foreach=False)


def combined(net):
    parts = [("w", {"weight": net.weight}, 0.05), ("b", {"bias": net.bias}, 0.03)]
    return shardopt.CombinedOptimizer(
        [(key, shardopt.keyed("sgd", named, lr=lr, momentum=0.9)) for key, named, lr in parts]
    )


def clipped(net):
    return shardopt.GradientClippingOptimizer(one(net), clipping=shardopt.GradientClipping.NORM, max_gradient=1e6)


def warmed(net):
    stages = [shardopt.WarmupStage(shardopt.WarmupPolicy.LINEAR, max_iters=3, value=0.5)]
    return shardopt.WarmupOptimizer(one(net), stages, lr=0.05)


def train(net, optimizer, schedule, steps):
    """The rates (and momenta) of each step."""
    seen = []
    for step in steps:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        seen.append([(float(g["lr"]), g.get("momentum"), g.get("betas")) for g in optimizer.param_groups])
        optimizer.step()
        if isinstance(schedule, torchs.ReduceLROnPlateau):
            schedule.step([0.9, 1.0, 1.1, 0.8][step % 4])
        else:
            schedule.step()
    return seen


@pytest.mark.parametrize("build", [one, combined, clipped], ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_and_steps_are_torchs(name, build):
    results = []
    for make in (plain, build):
        net = model()
        optimizer = make(net)
        seen = train(net, optimizer, SCHEDULES[name](optimizer), range(2 * STEPS))
        results.append((seen, net.weight.detach(), net.bias.detach()))
    (rates, *weights), (expected, *expected_weights) = results[1], results[0]
    assert rates == expected and len({str(rate) for rate in rates}) > 1
    for weight, value in zip(weights, expected_weights, strict=True):
        assert torch.equal(weight, value)


@pytest.mark.parametrize("build", [one, with_adamw, combined, clipped, warmed], ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_schedule_goes_on_bit_for_bit(name, build, tmp_path):
    def fresh():
        net = model()
        optimizer = build(net)
        optimizer.save_param_groups(True)
        schedule = SCHEDULES[name](optimizer)
        optimizer.init_state()
        return net, optimizer, schedule

    net, optimizer, schedule = fresh()
    train(net, optimizer, schedule, range(STEPS))
    checkpoint.save(tmp_path / "c", {"model": net, "optimizer": optimizer, "schedule": schedule})
    expected = train(net, optimizer, schedule, range(STEPS, 2 * STEPS))

    other, its_optimizer, resumed = fresh()
    checkpoint.load(tmp_path / "c", {"model": other, "optimizer": its_optimizer, "schedule": resumed})
    assert train(other, its_optimizer, resumed, range(STEPS, 2 * STEPS)) == expected
    assert torch.equal(other.weight, net.weight) and torch.equal(other.bias, net.bias)
    assert list(map(float, resumed.get_last_lr())) == [float(g["lr"]) for g in its_optimizer.param_groups]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("OneCycleLR", "SWALR")])
def test_rates_that_are_tensors(name, tmp_path):
    def fresh():
        net = model()
        optimizer = with_tensor_rates(net)
        return net, optimizer, SCHEDULES[name](optimizer)

    net, optimizer, schedule = fresh()
    optimizer.init_state()
    train(net, optimizer, schedule, range(STEPS))
    checkpoint.save(tmp_path / "c", {"model": net, "optimizer": optimizer, "schedule": schedule})
    expected = train(net, optimizer, schedule, range(STEPS, 2 * STEPS))
    other, its_optimizer, resumed = fresh()
    its_optimizer.init_state()
    checkpoint.load(tmp_path / "c", {"model": other, "optimizer": its_optimizer, "schedule": resumed})
    assert train(other, its_optimizer, resumed, range(STEPS, 2 * STEPS)) == expected
    assert torch.equal(other.weight, net.weight)


def test_momentum_is_cycled_in_every_group():
    for build, option in ((one, "momentum"), (with_adamw, "betas"), (combined, "momentum")):
        optimizer = build(model())
        schedule = torchs.OneCycleLR(optimizer, 0.1, total_steps=10)
        before = [group[option] for group in optimizer.param_groups]
        optimizer.step()
        schedule.step()
        assert all(group[option] != old for group, old in zip(optimizer.param_groups, before, strict=True))


def test_a_plateau_is_seen_as_torch_sees_it():
    metrics = [1.0, 0.3, 0.7, float("nan"), 0.31, 0.29, float("inf"), 0.5, 0.5, 0.5]
    rates = []
    for kind in (torchs.ReduceLROnPlateau, shardopt.ReduceLROnPlateau):
        optimizer = one(model())
        schedule = kind(optimizer, patience=1, cooldown=1, min_lr=1e-4)
        rates.append([])
        for metric in metrics:
            schedule.step(torch.tensor(metric))
            rates[-1].append(schedule.get_last_lr())
    assert rates[0] == rates[1] and rates[0][-1] != rates[0][0]
