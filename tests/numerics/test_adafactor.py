"""Adafactor on plain parameters against torch's own, for every option set of torch's database."""

import pytest
import torch

import shardopt
from shardopt.algorithms import spec_of
from shardopt.errors import AlgorithmError, GradientError
from tests.support.cases import INFOS, option_sets

STEPS = 8
SHAPES = {
    "matrix": (6, 4),
    "vector": (5,),
    "scalar": (),
    "cube": (3, 4, 5),
    "late": (4, 3),
    "row": (1, 7),
    "column": (7, 1),
}
ABSENT = {0: {"late"}, 1: {"late", "vector"}, 4: {"matrix", "cube"}}
MORE = [
    ("large eps", {"eps": (0.9, 1e-2)}),
    ("tensor lr", {"lr": torch.tensor(0.02, dtype=torch.float64)}),
    ("large lr", {"lr": 3.0, "weight_decay": 0.01}),
]
INFO = INFOS["Adafactor"]
OPTIONS = [
    pytest.param({**options, "foreach": foreach}, id=f"{desc}-foreach={foreach}".replace(" ", "_"))
    for desc, options in [*option_sets("Adafactor"), *MORE]
    for foreach in (None, True)
]
# Relative to the largest element of a tensor. In bfloat16 torch rounds the statistics that are kept in float32 here.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.05}


def parameters(dtype):
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()
    }


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(100 + step)
    every = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return {name: None if name in ABSENT.get(step, ()) else gradient for name, gradient in every.items()}


def train(optimizer, params, steps=range(STEPS), before=lambda step: None):
    for step in steps:
        dtype = next(iter(params.values())).dtype
        for name, gradient in gradients(step, dtype).items():
            params[name].grad = gradient
        before(step)
        optimizer.step()


def difference(actual, wanted):
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    return ((actual - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_step_is_torchs(options, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = shardopt.keyed("adafactor", ours, **options)
    torchs = torch.optim.Adafactor(theirs.values(), **options)
    train(optimizer, ours)
    train(torchs, theirs)
    for name, parameter in ours.items():
        assert difference(parameter.detach(), theirs[name].detach()) <= TOLERANCE[dtype], name
        mine, own = optimizer.state[parameter], torchs.state[theirs[name]]
        assert list(mine) == list(own)
        for entry in mine:
            assert difference(mine[entry], own[entry]) <= TOLERANCE[dtype], (name, entry)
        assert mine["step"].device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("foreach", [None, True])
def test_init_state_makes_what_the_first_step_makes_and_is_invisible(dtype, foreach):
    runs = []
    for calls_at in ((), (0,), (3,)):
        params = parameters(dtype)
        optimizer = shardopt.keyed(torch.optim.Adafactor, params, weight_decay=0.1, foreach=foreach)

        def before(step, optimizer=optimizer, calls_at=calls_at):
            if step in calls_at:
                optimizer.init_state()

        train(optimizer, params, before=before)
        runs.append({name: [p.detach(), *optimizer.state[p].values()] for name, p in params.items()})
    assert all(
        torch.equal(a, b) for run in runs[1:] for name in SHAPES for a, b in zip(runs[0][name], run[name], strict=True)
    )

    params = parameters(dtype)
    optimizer = shardopt.keyed("adafactor", params)
    optimizer.init_state()
    before = {name: {key: (value.shape, value.dtype) for key, value in own.items()} for name, own in state(optimizer)}
    for name, own in state(optimizer):
        entries = spec_of("adafactor").entries(optimizer.param_groups[0], len(SHAPES[name]))
        assert list(own) == [entry.name for entry in entries]
        assert all(not value.any() for value in own.values())
        assert [value.dtype for value in own.values()] == [entry.dtype.of(dtype, {}) for entry in entries]
    train(optimizer, params, range(5, 6))
    assert before == {
        name: {key: (value.shape, value.dtype) for key, value in own.items()} for name, own in state(optimizer)
    }


def state(optimizer):
    return optimizer.state_dict()["state"].items()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resumed_in_another_order_and_grouping_of_parameters_it_continues_exactly(dtype):
    whole, split = parameters(dtype), parameters(dtype)
    groups = [{"match": "vector|late", "lr": 0.2}, {"match": "cube", "d": 2.0}]
    train(shardopt.keyed("adafactor", whole, groups=groups), whole)
    first = shardopt.keyed("adafactor", split, groups=groups)
    train(first, split, range(4))
    turned = {name: torch.nn.Parameter(split[name].detach().clone()) for name in reversed(SHAPES)}
    resumed = shardopt.keyed("adafactor", turned, groups=groups[::-1])
    resumed.init_state()
    memory = {name: {key: value.data_ptr() for key, value in own.items()} for name, own in state(resumed)}
    resumed.load_state_dict(first.state_dict())
    assert memory == {name: {key: value.data_ptr() for key, value in own.items()} for name, own in state(resumed)}
    train(resumed, turned, range(4, STEPS))
    assert all(torch.equal(whole[name], turned[name]) for name in SHAPES)


def test_state_of_torchs_own_fits():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    torchs = torch.optim.Adafactor(theirs.values())
    train(torchs, theirs, range(4))
    for name, parameter in ours.items():
        parameter.data.copy_(theirs[name].data)
    optimizer = shardopt.keyed("adafactor", ours)
    optimizer.save_param_groups(False)
    optimizer.init_state()
    optimizer.load_state_dict({"state": {name: torchs.state[theirs[name]] for name in SHAPES}})
    train(optimizer, ours, range(4, STEPS))
    train(torchs, theirs, range(4, STEPS))
    assert all(difference(ours[name].detach(), theirs[name].detach()) <= 1e-6 for name in SHAPES)


def test_a_closure_is_called_once_with_gradients_and_its_loss_is_returned():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = shardopt.keyed("adafactor", {"w": weight})
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(None)
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert len(calls) == 1
    assert not torch.equal(weight.detach(), torch.ones(2, 2))


@pytest.mark.parametrize(
    "inputs",
    INFO.optim_error_inputs_func(device="cpu", dtype=torch.float32),
    ids=lambda i: i.optimizer_error_input.desc.replace(" ", "_"),
)
def test_what_torch_refuses_is_refused(inputs):
    options = inputs.optimizer_error_input.kwargs
    if "complex" in inputs.optimizer_error_input.desc:
        complex_parameter = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
        with pytest.raises(AlgorithmError, match=r"w: found elements of torch\.complex64"):
            shardopt.keyed("adafactor", {"w": complex_parameter})
        return
    if not options or (
        isinstance(inputs.optimizer_error_input.params, list)
        and not all(map(torch.is_tensor, inputs.optimizer_error_input.params))
    ):
        return  # of parameters and groups that a keyed optimizer takes in another form
    with pytest.raises(inputs.error_type, match=inputs.error_regex):
        shardopt.keyed("adafactor", {"w": torch.nn.Parameter(torch.zeros(2, 2))}, **options)


@pytest.mark.parametrize(
    "gradient", [torch.ones(2, 2).to_sparse(), torch.ones(2, 2, dtype=torch.float64)], ids=["sparse", "dtype"]
)
def test_gradients_that_do_not_fit_are_refused(gradient):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = shardopt.keyed("adafactor", {"w": weight})
    if gradient.is_sparse:
        weight.grad = gradient
    else:
        weight.grad_dtype = None  # any
        weight.grad = gradient
    with pytest.raises(GradientError, match=r"w\.grad: found .*; required torch\.strided, torch\.float32"):
        optimizer.step()
    assert not weight.detach().any() and not optimizer.state[weight]
