"""Steps on an accelerator: what the CPU computes, and no wait of the host for the device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardopt
from benchmarks import launches
from tests.accelerator.support import each_kind, needs_standin, on_accelerator

STEPS = 4
EXACT = (
    *("adamw", "sgd", "rmsprop", "adadelta", "adamax", "asgd", "rprop", "lion", "ademamix", "adafactor", "lamb"),
    *("lars", "muon", "soap", "shampoo", "rowwiseadam", "rowwiseadagrad", "schedulefreeadamw", "schedulefreesgd"),
)
WITHIN_AN_ULP = ("adagrad", "adam", "nadam", "radam")  # torch's foreach and fused code rounds at other places
# With gradients of a lower rank, their results depend on how each device rounds: 1e-7 in a gradient becomes 5e-3.
FULL_RANK = ("soap", "shampoo")
WAITS = {
    "asgd": "torch's own reads its step to compute the rates of the next",
    "lbfgs": "the line search looks at losses",
}
FORMS = [{"state_dtype": torch.bfloat16}, {"state_dtype": torch.uint8, "rounding": "stochastic"}]


def stepped(name, kind, options, gradients_seed=0, last=lambda step: step()):
    shape = (6, 6) if name in FULL_RANK else (6, 4)
    parameters = {
        f"p{i}": nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(kind)) for i in range(3)
    }
    optimizer = shardopt.keyed(name, parameters, **options)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(gradients_seed + number)
        for parameter in parameters.values():
            parameter.grad = torch.randn(shape, generator=generator).to(kind)
        if name == "lbfgs":

            def step():
                optimizer.step(lambda: torch.zeros((), device=kind))

        else:
            step = optimizer.step
        last(step) if number == STEPS - 1 else step()
    return {name: parameter.detach().cpu() for name, parameter in parameters.items()}


def all_of_them(standin):
    differing, waiting = {}, {}
    for name, options in [*((name, {}) for name in (*EXACT, *WITHIN_AN_ULP, "lbfgs")), *(("adamw", o) for o in FORMS)]:

        def last(step, name=name):
            try:
                with standin.no_waits():
                    step()
            except RuntimeError as error:
                waiting[name] = str(error)

        here, there = stepped(name, "cpu", options), stepped(name, standin.KIND, options, last=last)
        far = max((here[each] - there[each]).abs().max().item() for each in here)
        allowed = 1e-4 if standin.KIND == "cuda" else 1e-6 if name in WITHIN_AN_ULP else 0.0
        if name not in waiting and far > allowed:
            differing[name] = far
    return differing, waiting


@each_kind
def test_every_algorithm_computes_as_on_the_cpu_and_waits_for_nothing_but_what_is_listed(kind):
    ((differing, waiting),) = on_accelerator(1, all_of_them, kind=kind)
    assert not differing
    assert waiting.keys() == WAITS.keys(), waiting


MOST_LAUNCHES = {  # for each parameter: a tenth of one parameter at a time
    "AdamW, 8-bit state": 5.3,
    "AdamW, bf16 state": 1.2,
    "Adafactor": 4.5,
    "LAMB": 3.8,
    "LARS": 3.1,
}


def launches_of_each(standin):
    return {row[0]: float(row[2]) for row in launches.measure("standin", list(MOST_LAUNCHES), launches.COUNTS)}


@needs_standin
def test_algorithms_launch_for_many_parameters_together():
    (found,) = on_accelerator(1, launches_of_each)
    assert {name: each for name, each in found.items() if each > MOST_LAUNCHES[name]} == {}


def clip_and_unscale(standin):
    weight = nn.Parameter(torch.zeros(2, device=standin.KIND))
    clipped = shardopt.GradientClippingOptimizer(
        shardopt.keyed("sgd", {"w": weight}, lr=1.0), shardopt.GradientClipping.NORM, 1.0
    )
    for number in range(3):
        weight.grad = torch.tensor([3.0, 4.0]).to(standin.KIND)
        if number == 2:
            with standin.no_waits():
                clipped.step()
        else:
            clipped.step()
    weight.grad = None
    scaler, optimizer = shardopt.GradScaler(standin.KIND, init_scale=4.0), shardopt.keyed("sgd", {"w": weight}, lr=1.0)
    for number in range(3):
        loss = scaler.scale((weight * weight).sum())
        loss.backward()
        if number == 2:
            with standin.no_waits():
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weight.tolist()


@each_kind
def test_clipping_and_unscaling_without_ranks_wait_for_nothing(kind):
    ((x, y),) = on_accelerator(1, clip_and_unscale, kind=kind)
    assert (x, y) == pytest.approx((1.8, 2.4), rel=1e-5)  # −3 · (0.6, 0.8), and each step of the scaler turns its sign


def on_shards(standin):
    found = {}
    for name in ("soap", "shampoo", "muon", "adafactor", "lamb", "adamw"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)).to(standin.KIND)
        if dist.is_initialized():
            fully_shard(model, mesh=init_device_mesh(standin.KIND, (2,)))
        optimizer = shardopt.keyed(name, model.named_parameters(), lr=1e-2)
        for step in range(3):
            # Of full rank: in the null space of a gradient, SOAP's basis is the rounding of each device.
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(standin.KIND)
            (model(inputs) - inputs[:, :4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = [full(parameter).detach().cpu() for parameter in model.parameters()]
    return found


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@each_kind
def test_own_algorithms_step_on_shards_of_two_ranks(kind):
    (expected,) = on_accelerator(1, on_shards, kind=kind)
    for found in on_accelerator(2, on_shards, kind=kind):
        for name, weights in found.items():
            for weight, whole in zip(weights, expected[name], strict=True):
                torch.testing.assert_close(
                    weight, whole, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )
