"""Steps, averages, saves and loads in modes that a program may be in: each comes out as it does outside of them."""

import contextlib

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Rule
from shardopt.optim import GradientClipping, GradientClippingOptimizer, WarmupOptimizer, WarmupPolicy, WarmupStage


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))


def step(optimizer, mode, seed):
    draw = torch.Generator().manual_seed(seed)
    for parameter in optimizer.params.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    with mode():
        optimizer.step()


def values_of(*things):
    """Copies of all tensors, and the plain values, in states, dicts and lists."""
    found = {}

    def look(key, value):
        if isinstance(value, torch.Tensor):
            assert not value.is_inference() and not value.is_meta, key
            found[key] = value.detach().clone()
        elif hasattr(value, "state_dict"):
            look(key, value.state_dict())
        elif isinstance(value, dict | list | tuple):
            for name, each in value.items() if isinstance(value, dict) else enumerate(value):
                look(f"{key}.{name}", each)
        else:
            found[key] = value

    look("", things)
    return found


def assert_same(found, wanted, name=""):
    assert found.keys() == wanted.keys(), name
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), (name, key)
        else:
            assert found[key] == value, (name, key)


ALGORITHMS = {
    **{name: {} for name in ("adamw", "adagrad", "radam", "rmsprop", "adamax", "rprop", "nadam", "adadelta")},
    **{name: {} for name in ("lion", "ademamix", "schedulefreeadamw", "lamb", "soap", "shampoo", "muon", "adafactor")},
    "sgd": {"momentum": 0.9},
    "8 bits": {"state_dtype": torch.uint8},
}


def keyed(algorithm, model, **options):
    named = {name: each for name, each in model.named_parameters() if algorithm != "muon" or each.ndim == 2}
    name = "adamw" if algorithm == "8 bits" else algorithm
    optimizer = shardopt.keyed(name, named, **ALGORITHMS[algorithm], **options)
    optimizer.train()
    return optimizer


def steps_of(algorithm, mode, made, begun):
    model = model_of()
    with made():
        optimizer = keyed(algorithm, model, lr=0.01)
    with begun():
        optimizer.init_state()
    step(optimizer, mode, 0)
    step(optimizer, mode, 1)
    step(optimizer, contextlib.nullcontext, 2)
    return values_of(model, optimizer)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_and_state_are_those_of_no_mode(algorithm):
    wanted = steps_of(algorithm, *[contextlib.nullcontext] * 3)
    for mode in MODES.values():
        assert_same(steps_of(algorithm, mode, mode, mode), wanted)


def wrapped_steps(mode):
    model = model_of()
    optimizer = WarmupOptimizer(keyed("adamw", model), [WarmupStage(WarmupPolicy.LINEAR, 5, 0.1)])
    optimizer = GradientClippingOptimizer(optimizer, GradientClipping.NORM, 0.5)
    ema = shardopt.EMA(model, 0.5)
    ema.attach(optimizer)
    step(optimizer, mode, 0)
    step(optimizer, contextlib.nullcontext, 1)
    return values_of(model, optimizer, ema, optimizer.total_norm, optimizer.last_total_grad_norm)


def averages(mode):
    model, batches = model_of(), [torch.ones(3, 8)]
    with mode():
        ema, swa = shardopt.EMA(model, 0.5), shardopt.SWA(model, torch.float64, use_buffers=True)
        ema.update()
        swa.update()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.update()
    swa.update()
    with mode(), ema.swap():
        inside = [parameter.tolist() for parameter in model.parameters()]
        shardopt.optim.update_bn(batches, model)
    return values_of(model, ema, swa, inside)


def saves(mode, folder):
    app = trained()
    with mode():
        checkpoint.save(f"{folder}/a", app)
        checkpoint.async_save(f"{folder}/b", app, stage="now").result(60)
        pending = checkpoint.async_save(f"{folder}/c", app, stage="lazy")
    pending.result(60)
    found = []
    for name in "abc":
        again = fresh()
        checkpoint.load(f"{folder}/{name}", again, init_state=True)
        found.append(continued(again, f"{folder}/{name}-"))
    return values_of(continued(app, f"{folder}/o"), found)


def loads(mode, folder):
    checkpoint.save(f"{folder}/a", {**trained(), "best": {"x": torch.arange(6.0).reshape(2, 3)}, "h": torch.ones(3)})
    again = {**fresh(), "best": {}, "h": torch.zeros(3, dtype=torch.bfloat16)}
    rules = [Rule("best.x", "best.x", "a b -> b a")]
    turned = {"best": {"x": torch.zeros(3, 2)}}
    with mode():
        checkpoint.load(f"{folder}/a", again, init_state=True, strict=checkpoint.Strictness(dtype="cast"))
        ignored = checkpoint.Strictness(unexpected="ignore")
        checkpoint.load(f"{folder}/a", turned, rearrange=rules, strict=ignored)
        with checkpoint.open(f"{folder}/a") as reader:
            read = reader.read("best.x")
    read.add_(1)
    again["best"]["x"].add_(1)
    return values_of(continued(again, f"{folder}/b"), again["best"], again["h"], turned, read)


def runs(mode, folder):
    app, again = trained(), fresh()
    with mode():
        with checkpoint.Manager(f"{folder}/run", keep=1, stage="now", incremental=True) as manager:
            manager.restore(app)
            for count in (1, 2, 3):
                manager.save(count, app)
        with checkpoint.Manager(f"{folder}/run") as manager:
            assert manager.restore(again) == 3
        checkpoint.convert(manager.path(3), f"{folder}/converted.pt", "torch", select=r"^model\.")
    loaded = torch.load(f"{folder}/converted.pt")
    return values_of(continued(app, f"{folder}/b"), continued(again, f"{folder}/c"), loaded)


def trained():
    app = fresh()
    app["ema"].attach(app["optimizer"])
    step(app["optimizer"], contextlib.nullcontext, 0)
    app["x"].add_(1)
    return {**app, "step": 3}


def fresh():
    model = model_of()
    optimizer = keyed("adamw", model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    return {
        **{"model": model, "optimizer": optimizer, "ema": shardopt.EMA(model, 0.5), "schedule": schedule, "step": 0},
        "x": torch.zeros(3, 2).t(),  # which a save copies
    }


def continued(app, url):
    """Trains a step and saves, as a program does that has left the mode."""
    step(app["optimizer"], contextlib.nullcontext, 1)
    checkpoint.save(url, app)
    return app


@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step", "ignore:The given NumPy array is not writable"
)
@pytest.mark.parametrize("work", [wrapped_steps, averages, saves, loads, runs])
def test_work_in_a_mode_comes_out_as_outside_of_it(work, tmp_path):
    folders = [] if work in (wrapped_steps, averages) else [tmp_path]
    wanted = work(contextlib.nullcontext, *(folder / "plain" for folder in folders))
    for name, mode in MODES.items():
        assert_same(work(mode, *(folder / name for folder in folders)), wanted, name)


def test_a_closure_is_evaluated_in_the_mode_of_its_caller():
    model, seen = model_of(), []
    optimizer = keyed("soap", model)

    def closure():
        optimizer.zero_grad()
        output = model(torch.ones(3, 8, device="cpu"))
        seen.append((output.dtype, torch.get_default_device().type))
        loss = output.float().square().mean()
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        optimizer.step(closure)
    assert seen == [(torch.bfloat16, "meta")]
