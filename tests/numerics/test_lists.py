"""Algorithms that step lists of parameters compute the bits of one parameter at a time, as here."""

import itertools
from math import prod
from unittest import mock

import pytest
import torch

import shardopt
from shardopt.algorithms import lists
from shardopt.algorithms.adafactor import Adafactor
from shardopt.sharding import local_tensors
from tests.harness import run_ranks
from tests.support.fake_rank import shard
from tests.support.layouts import meshes

SHAPES = [(64, 96), (256,), (64, 96), (7, 11), (64, 96), (3, 4, 5), (), (3, 4, 5), (256,), (1, 9), (9, 1), (130, 300)]
ALONE, DTYPES = {"MOST_ON_CPU": 0}, [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NO_DECAY = (1, 8)  # the places of a second group
LAST = 4

LISTED = {
    "LAMB": [{"weight_decay": 0.1}, {"most_norm": 2.0, "correct_bias": False, "weight_decay": 0.0, "maximize": True}],
    "LARS": [
        {"weight_decay": 0.1, "trust_coefficient": 0.1},
        {"nesterov": True, "maximize": True},
        {"momentum": 0.0, "weight_decay": 0.1},
    ],
    "Adafactor": [{"weight_decay": 0.1}, {"foreach": True, "maximize": True, "weight_decay": 0.0}],
}
CASES = [(name, options) for name, of_name in LISTED.items() for options in of_name]
LOW = [
    ("adamw", {"state_dtype": "uint8"}),
    ("adamw", {"state_dtype": "bfloat16"}),
    ("adam", {"state_dtype": "uint8", "amsgrad": True, "rounding": "stochastic"}),
    ("adamw", {"state_dtype": "uint8", "master_dtype": "float32"}),
    ("nadam", {"state_dtype": "uint8", "rounding": "nearest"}),
    ("sgd", {"momentum": 0.9, "state_dtype": "uint8"}),
]


def values(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def lacks(place, step):
    """Whether a parameter has no gradient in a step: counters differ from then on."""
    return (place % 4 == 2 and step == 1) or (place == 4 and step == 0)


def trained(name, options, dtype, place=lambda tensor: tensor):
    """Parameters and state after some steps, in two groups."""
    named = {f"w{i:02}": torch.nn.Parameter(place(each)) for i, each in enumerate(values(0, dtype))}
    second = [key for number, key in enumerate(named) if number in NO_DECAY]
    groups = [
        {"params": [(key, each) for key, each in named.items() if key not in second]},
        {"params": [(key, named[key]) for key in second], "lr": 0.02},
    ]
    optimizer = shardopt.keyed(name, groups, lr=0.01, **options)
    for step in range(LAST):
        for number, (parameter, gradient) in enumerate(zip(named.values(), values(1 + step, dtype), strict=True)):
            parameter.grad = None if lacks(number, step) else place(gradient)
        optimizer.step()
    return {key: {"": parameter, **optimizer.state[parameter]} for key, parameter in named.items()}


# --- one parameter at a time -----------------------------------------------------------------------------------------


def wide(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def norm(tensor):
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square_().sqrt()


def ratio(one, other):
    return one / other if one > 0 and other > 0 else torch.ones_like(one)


def lamb(options, step, weight, gradient, state):
    beta1, beta2 = options["betas"]
    average, squares = (state[name].to(weight.dtype) for name in ("exp_avg", "exp_avg_sq"))
    average.lerp_(gradient, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = (1 - beta1**step, 1 - beta2**step) if options["correct_bias"] else (1.0, 1.0)
    update = (average / first).div_((squares / second).sqrt_().add_(options["eps"]))
    if options["weight_decay"]:
        update.add_(weight, alpha=options["weight_decay"])
    of_weight = norm(weight) if options["most_norm"] is None else norm(weight).clamp(max=options["most_norm"])
    weight.sub_(update.mul_(ratio(of_weight, norm(update)).to(weight.dtype) * options["lr"]))
    state["exp_avg"].copy_(average)
    state["exp_avg_sq"].copy_(squares)


def lars(options, step, weight, gradient, state):
    update = gradient
    if weight.ndim > 1:
        decay, factor = options["weight_decay"], torch.ones((), dtype=torch.float64)
        divisor = norm(gradient) + decay * norm(weight)
        if norm(weight) > 0 and divisor > 0:
            factor = options["trust_coefficient"] * ratio(norm(weight), divisor)
        update = gradient.add(weight, alpha=decay).mul_(factor.to(weight.dtype))
    if "momentum_buffer" in state:
        buffer = state["momentum_buffer"].to(weight.dtype)
        buffer.mul_(options["momentum"]).add_(update, alpha=1 - options["dampening"])
        update = update.add(buffer, alpha=options["momentum"]) if options["nesterov"] else buffer
        state["momentum_buffer"].copy_(buffer)
    weight.sub_(update * options["lr"])


def adafactor(options, step, weight, gradient, state):
    dtype, shape = torch.promote_types(weight.dtype, torch.float32), weight.shape
    share, eps = float(step) ** options["beta2_decay"], torch.finfo(weight.dtype).eps
    if weight.ndim > 1:
        height, width = shape[-2:]
        squares, columns = (
            torch.linalg.vector_norm(gradient, dim=dim, keepdim=True, dtype=dtype).square_() for dim in (-1, -2)
        )
        squares.div_(width)
        mean = torch.zeros(*shape[:-2], 1, 1, dtype=dtype).add_(squares.sum(-2, keepdim=True), alpha=share / height)
        if step > 1:
            mean.add_(state["row_var"].sum(-2, keepdim=True, dtype=dtype), alpha=(1 - share) / height)
        state["row_var"].lerp_(squares.to(weight.dtype), share)
        state["col_var"].lerp_(columns.div_(height).to(weight.dtype), share)
        estimate = (state["row_var"] * state["col_var"]).div_(mean.clamp_(min=eps).to(weight.dtype))
    else:
        state["variance"].lerp_(gradient * gradient, share)
        estimate = state["variance"].clone()
    update = estimate.clamp_(min=eps**2).rsqrt_().mul_(gradient)
    of_weight, of_update = (
        torch.linalg.vector_norm(each, dtype=dtype).square_() / max(prod(shape), 1) for each in (weight, update)
    )
    alpha = of_weight.sqrt().clamp_(min=options["eps"][1]) * min(options["lr"], step**-0.5)
    if options["weight_decay"]:
        weight.mul_(1 - options["lr"] * options["weight_decay"])
    scale = alpha / (of_update.sqrt() / options["d"]).clamp_(min=1.0)
    weight.add_(update.mul_(scale), alpha=1 if options["maximize"] else -1)


STEPS = {"LAMB": lamb, "LARS": lars, "Adafactor": adafactor}


@torch.no_grad()
def one_at_a_time(name, options, dtype):
    """What `trained` returns, computed so."""
    like = shardopt.keyed(name, {"w": torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))}, lr=0.01, **options)
    found = {}
    for number, weight in enumerate(values(0, dtype)):
        group = {**like.param_groups[0], **({"lr": 0.02} if number in NO_DECAY else {})}
        spec = shardopt.algorithms.spec_of(name)
        state = {}
        for entry in spec.entries(group, weight.ndim):
            shape = list(weight.shape)
            if entry.name in ("row_var", "col_var"):
                shape[-1 if entry.name == "row_var" else -2] = 1
            state[entry.name] = torch.zeros(shape, dtype=dtype) if entry.name != "step" else torch.tensor(0.0)
        taken = 0
        for step in range(LAST):
            if lacks(number, step):
                continue
            taken += 1
            if "step" in state:
                state["step"] += 1
            gradient = values(1 + step, dtype)[number]
            if name == "Adafactor":
                adafactor(group, taken, weight, gradient, state)
            else:
                stepped, sign = wide(weight), -1 if group["maximize"] else 1
                STEPS[name](group, taken, stepped, sign * wide(gradient), state)
                weight.copy_(stepped)
        found[f"w{number:02}"] = {"": weight, **state}
    return found


@torch.no_grad()
def norms_one_at_a_time(name, options, then, now):
    """What `cast` returns, computed so."""
    found = {}
    for number, weight in enumerate(values(0, torch.float32)):
        weight, state = weight.to(then[number % 2]), {}
        for step in range(LAST):
            if step == 2:
                weight = weight.to(now)
            for entry in () if state else shardopt.algorithms.spec_of(name).entries(options, weight.ndim):
                state[entry.name] = torch.tensor(0.0) if entry.name == "step" else torch.zeros_like(weight)
            if "step" in state:
                state["step"] += 1
            stepped, gradient = wide(weight), wide(values(1 + step, weight.dtype)[number])
            STEPS[name](options, step + 1, stepped, gradient, state)
            weight.copy_(stepped)
        found[f"w{number:02}"] = {"": weight, **state}
    return found


def cast(name, options, then, now):
    """Parameters and state after some steps; parameters, but not their state, are cast in the middle."""
    named = {f"w{i:02}": torch.nn.Parameter(each.to(then[i % 2])) for i, each in enumerate(values(0, torch.float32))}
    optimizer = shardopt.keyed(name, named, lr=0.01, **options)
    for step in range(LAST):
        for number, parameter in enumerate(named.values()):
            if step == 2:
                parameter.grad = None
                parameter.data = parameter.data.to(now)
            parameter.grad = values(1 + step, parameter.dtype)[number]
        optimizer.step()
    states = {key: {"": parameter, **optimizer.state[parameter]} for key, parameter in named.items()}
    return states, optimizer.param_groups[0]


def differing(one, other):
    keys = {(key, name) for state in (one, other) for key in state for name in state[key]}
    return sorted((key, name) for key, name in keys if not torch.equal(one[key][name], other[key][name]))


@pytest.mark.parametrize(
    ("name", "options", "dtype", "most"),
    [
        pytest.param(
            name,
            options,
            dtype,
            most,
            id=f"{name}-{options}-{dtype}-{most}",
            # Usually each case in both dtypes, and under both bounds.
            marks=[pytest.mark.exhaustive][: most == 6200 or (i + j + (most == 0)) % 2],
        )
        for i, (name, options) in enumerate(CASES)
        for j, dtype in enumerate(DTYPES)
        for most in (lists.MOST_ON_CPU, 6200, 0)
    ],
)
def test_lists_have_the_bits_of_one_at_a_time(name, options, dtype, most):
    with mock.patch.object(lists, "MOST_ON_CPU", most):
        assert differing(trained(name, options, dtype), one_at_a_time(name, options, dtype)) == []


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ((torch.float32, torch.float32), torch.float64),
        ((torch.float64, torch.float64), torch.float32),
        ((torch.float32, torch.float32), torch.bfloat16),
        ((torch.float32, torch.bfloat16), torch.bfloat16),
        ((torch.float32, torch.bfloat16), torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize(("name", "options"), [CASES[0], CASES[2]], ids=str)
def test_state_of_another_dtype_than_its_parameter_is_computed_in_the_parameters(name, options, then, now):
    together, group = cast(name, options, then, now)
    assert differing(together, norms_one_at_a_time(name, group, then, now)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), LOW, ids=str)
def test_chunks_of_several_parameters_have_the_bits_of_each(name, options, dtype):
    together = trained(name, options, dtype)
    with mock.patch.multiple(lists, **ALONE):
        assert differing(together, trained(name, options, dtype)) == []


def over_one_memory(name, options, dtype):
    """Parameters and state after some steps: two over the same memory, two that overlap, and two side by side."""
    whole = values(0, dtype)[-1]
    parts = (whole[:64], whole[:64], whole[60:], whole.view(-1)[:64], whole.view(-1)[60:124], whole.view(-1)[124:188])
    named = {f"w{i}": torch.nn.Parameter(part) for i, part in enumerate(parts)}
    optimizer = shardopt.keyed(name, named, lr=0.01, **options)
    for step in range(3):
        gradients = values(1 + step, dtype)[-1].view(-1)
        for parameter in named.values():
            parameter.grad = gradients[: parameter.numel()].view(parameter.shape)
        optimizer.step()
    return {key: {"": parameter, **optimizer.state[parameter]} for key, parameter in named.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), [*CASES, *LOW], ids=str)
def test_parameters_that_share_memory_are_stepped_one_after_the_other(name, options, dtype):
    together = over_one_memory(name, options, dtype)
    with mock.patch.multiple(lists, **ALONE):
        assert differing(together, over_one_memory(name, options, dtype)) == []


def test_parameters_of_one_kind_are_stepped_together():
    named = {f"w{i}": torch.nn.Parameter(each) for i, each in enumerate(values(0, torch.float32))}
    optimizer = Adafactor(named.values())
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    steps = [optimizer._make_step(optimizer.param_groups[0], each) for each in named.values()]
    batches = [[SHAPES[steps.index(step)] for step in batch] for batch in optimizer.batches(steps)]
    assert sorted(map(len, batches)) == [1, 1, 1, 1, 1, 2, 2, 3]
    assert all(len(set(shapes)) == 1 for shapes in batches)


# --- shards ----------------------------------------------------------------------------------------------------------


def placed(layout):
    from torch.distributed.tensor import Replicate, Shard

    row, square = meshes()
    dims = {"last": (-1,), "both": (0, -1)}[layout]
    mesh = square if len(dims) > 1 else row

    def place(full):
        placements = [Shard(dim % full.ndim) if full.ndim else Replicate() for dim in dims]
        return shard(full, mesh, *placements)

    return place


OF_SHARDS = [*itertools.product(("last", "both"), [CASES[0], CASES[2], CASES[5], *LOW[:2]])]


def on_shards(cases):
    """Cases whose bits are others where each parameter is stepped alone."""
    found = []
    for layout, (name, options) in cases:
        together = trained(name, options, torch.float32, placed(layout))
        with mock.patch.multiple(lists, **ALONE):
            alone = trained(name, options, torch.float32, placed(layout))
        for key, state in together.items():
            for entry, value in state.items():
                pairs = zip(local_tensors(value), local_tensors(alone[key][entry]), strict=True)
                if not all(itertools.starmap(torch.equal, pairs)):
                    found.append((layout, name, options, key, entry))
    return found


def test_shards_are_stepped_together_as_alone(request):
    """Usually each case under one of the layouts."""
    cases = OF_SHARDS if request.config.getoption("--exhaustive") else OF_SHARDS[::2]
    assert run_ranks(2, on_shards, cases) == [[]] * 2
