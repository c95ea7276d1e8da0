"""A save in the background stores the state of the call, to the bit, whatever training does next.

Copies beside training are held at a gate, so that the race between them and training is as wide as it can be: what is
not copied in the call, and not guarded by a hook, is changed before it is copied.
"""

import copy
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.saving.background_save import BackgroundSave
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.writing import staging
from shardopt.checkpoint.saving.writing.pending import tracked_urls
from shardopt.checkpoint.saving.writing.staging import changed_by_steps_alone
from shardopt.errors import CheckpointError, CheckpointExistsError, StateError
from shardopt.optim import CombinedOptimizer
from shardopt.state.flatten import flatten
from shardopt.state.values import decode_value, encode_value

STAGES = ("now", "lazy")
HELD_SECONDS = 0.15


@pytest.fixture
def gate(monkeypatch):
    """Copies by any thread but the main one begin when this is set."""
    opened = threading.Event()
    unheld = staging.copy_on_host

    def held(host, source):
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(30)
        unheld(host, source)

    monkeypatch.setattr(staging, "copy_on_host", held)
    yield opened
    opened.set()


@pytest.fixture
def saver():
    saver = AsyncSaver()
    yield saver
    saver.close()


def opens_soon(gate):
    threading.Timer(HELD_SECONDS, gate.set).start()


class Net(nn.Module):
    """Has what forward changes (batch norm), what nobody trains, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, inputs):
        self.calls += 1
        return self.last(self.norm(self.first(inputs)).relu())


def backward(model, scale=1.0):
    (model(torch.randn(6, 8)).square().sum() * scale).backward()


def train_step(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def snapshot(app):
    """Copies of all that a save of `app` stores."""
    flat = flatten(app)
    stored = {key: tensor.detach().clone() for key, tensor in flat.tensors().items()}
    return stored | copy.deepcopy(flat.values())


def assert_stored(url, expected):
    with checkpoint.open(url) as reader:
        for key, value in expected.items():
            value_stored = reader.read(key)
            if isinstance(value, torch.Tensor):
                assert value_stored.dtype == value.dtype and torch.equal(value_stored, value), key
            else:
                assert value_stored == decode_value(encode_value(value)), key


def adam(model, **options):
    return shardopt.keyed("adamw", trained(model), lr=0.1, **options)


def trained(model):
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


OPTIMIZERS = {
    "adamw": adam,
    "fused": lambda model: adam(model, fused=True),
    "foreach": lambda model: adam(model, foreach=True),
    "for-loop": lambda model: adam(model, foreach=False, fused=False),
    "sgd": lambda model: shardopt.keyed("sgd", trained(model), lr=0.1, momentum=0.9),
    "torch's": lambda model: torch.optim.AdamW([p for _, p in trained(model)], lr=0.1),
    "torch's fused": lambda model: torch.optim.AdamW([p for _, p in trained(model)], lr=0.1, fused=True),
    "clipped": lambda model: shardopt.GradientClippingOptimizer(
        adam(model), clipping=shardopt.GradientClipping.NORM, max_gradient=0.5
    ),
    "warm-up": lambda model: shardopt.WarmupOptimizer(
        adam(model), [shardopt.WarmupStage(shardopt.WarmupPolicy.LINEAR, max_iters=9)], lr=0.1
    ),
    "combined": lambda model: shardopt.optim.CombinedOptimizer(
        [
            ("a", shardopt.keyed("adamw", [("first.weight", model.first.weight)], lr=0.1)),
            ("b", shardopt.keyed("sgd", [("last.weight", model.last.weight)], lr=0.1, momentum=0.9)),
        ]
    ),
}


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        # Each optimizer in one stage, and each stage with every other optimizer.
        pytest.param(name, stage, marks=[pytest.mark.exhaustive][: (number + of_stage) % 2])
        for number, name in enumerate(OPTIMIZERS)
        for of_stage, stage in enumerate(STAGES)
    ],
)
def test_what_is_stored_is_the_state_at_the_call(name, stage, gate, saver, tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    ema = shardopt.EMA(model, decay=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if isinstance(optimizer, shardopt.KeyedOptimizer):
        ema.attach(optimizer)
    train_step(model, optimizer)
    ema.update()
    array, seen = np.arange(6.0), torch.zeros(7)
    app = {"model": model, "optimizer": optimizer, "ema": ema, "schedule": schedule, "step": 1}
    app |= {"data": {"seen": seen, "array": array, "order": [3, 1, 2]}}
    for number in range(3):
        gate.clear()
        expected = snapshot(app)
        pending = saver.save(tmp_path / str(number), app, stage=stage)
        assert bool(pending.staged) <= (stage == "now")
        # What any loop does before a step,
        array += 1
        seen += 1
        app["data"]["order"].append(number)
        app["step"] += 1
        optimizer.zero_grad()
        backward(model, scale=100.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ema.update()
        with torch.no_grad():
            model.frozen += 1
        # and the step, which comes while the copies are still held.
        opens_soon(gate)
        optimizer.step()
        schedule.step()
        assert (pending.staged.wait(10) and gate.is_set()) or stage == "now"
        train_step(model, optimizer)
        gate.set()
        report = pending.result(30)
        assert report.tensors == len([value for value in expected.values() if isinstance(value, torch.Tensor)])
        assert_stored(tmp_path / str(number), expected)


def test_what_may_change_before_a_step_is_not_left_for_later():
    model = Net()
    optimizer = shardopt.keyed("adamw", trained(model), lr=torch.tensor([0.1]))
    optimizer.save_param_groups(True)
    train_step(model, optimizer)
    app = {"net": model, "optimizer": optimizer, "ema": shardopt.EMA(model), "also": {"w": model.last.weight.data}}
    lazy = changed_by_steps_alone(flatten(app))
    names = [name for name, _ in trained(model)]
    state = {f"optimizer.state.{name}.{entry}" for name in names for entry in ("exp_avg", "exp_avg_sq")}
    assert lazy == {*(f"net.{name}" for name in names), *state, "also.w"}
    assert changed_by_steps_alone(flatten({"net": model})) == set()


@pytest.mark.parametrize("form", ["keyed", "torch's"])
@pytest.mark.parametrize("nbytes", [20, 17 << 20])
def test_parameters_that_are_not_trained_are_copied_late_as_they_were_though_a_forward_replaces_them(
    form, nbytes, gate, saver, tmp_path
):
    model = Net()  # of two encoders; one follows the other
    model.frozen = nn.Parameter(torch.randn(nbytes // 4), requires_grad=False)
    optimizer = (
        shardopt.keyed("sgd", model.named_parameters(), lr=0.1)
        if form == "keyed"
        else torch.optim.SGD(model.parameters())
    )
    app = {"model": model, "optimizer": optimizer}
    assert "model.frozen" in changed_by_steps_alone(flatten(app))
    expected = snapshot(app)
    pending = saver.save(tmp_path / "one", app, stage="lazy")
    model.frozen.data = model.frozen.data * 0.5
    assert not pending.staged
    gate.set()
    pending.result(30)
    assert_stored(tmp_path / "one", expected)


class InBackward(shardopt.optim.KeyedOptimizerWrapper):
    """Momentum SGD whose updates are made when a gradient is there; calls no hook."""

    updates_in_backward = True

    def __init__(self, params):
        super().__init__(params, lambda tensors: torch.optim.SGD(tensors, 0.1, momentum=0.9))
        self.init_state()
        for parameter in self.params.values():
            parameter.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, parameter):
        momentum = self.state[parameter]["momentum_buffer"]
        momentum.mul_(0.9).add_(parameter.grad)
        parameter.sub_(momentum, alpha=0.1)
        parameter.grad = None


def test_what_is_updated_within_backward_is_not_left_for_later(gate, saver, tmp_path):
    model = Net()
    fused = InBackward(dict(model.first.named_parameters(prefix="first")))
    rest = adam(model)  # claims all parameters too
    rest.init_state()
    app = {"model": model, "fused": fused, "rest": rest}
    lazy = changed_by_steps_alone(flatten(app))
    assert not {key for key in lazy if key.startswith(("model.first", "fused"))}
    assert "model.last.weight" in lazy
    backward(model)
    expected = snapshot(app)
    pending = saver.save(tmp_path / "one", app, stage="lazy")
    backward(model)
    assert not pending.staged
    assert not torch.equal(model.first.weight, expected["model.first.weight"])
    gate.set()
    pending.result(30)
    assert_stored(tmp_path / "one", expected)


def test_a_step_waits_but_nothing_before_it(gate, saver, tmp_path):
    model = Net()
    optimizer = adam(model)
    train_step(model, optimizer)
    optimizer.zero_grad()
    pending = saver.save(tmp_path / "one", {"model": model, "optimizer": optimizer}, stage="lazy")
    train = threading.Thread(target=train_step, args=(model, optimizer))
    before = model.last.weight.detach().clone()
    train.start()
    until = time.monotonic() + 30
    while model.first.weight.grad is None and time.monotonic() < until:  # backward continues meanwhile
        time.sleep(0.001)
    train.join(HELD_SECONDS)
    assert train.is_alive() and not pending.staged and not pending.done
    assert model.first.weight.grad is not None and torch.equal(model.last.weight, before)
    gate.set()
    train.join(30)
    assert pending.staged and not train.is_alive() and not torch.equal(model.last.weight, before)
    assert pending.result(30).stall_seconds >= HELD_SECONDS / 2


@pytest.mark.parametrize("make", [lambda model: adam(model), lambda model: adam(model, state_dtype=torch.bfloat16)])
def test_a_step_of_an_optimizer_that_was_made_after_the_save_waits_too(make, gate, saver, tmp_path):
    model = Net()
    app = {"model": model, "optimizer": adam(model)}
    train_step(model, app["optimizer"])
    stored = {f"model.{name}": parameter.detach().clone() for name, parameter in trained(model)}
    pending = saver.save(tmp_path / "one", app, stage="lazy")
    opens_soon(gate)
    train_step(model, make(model))
    assert pending.staged and not torch.equal(model.last.weight, stored["model.last.weight"])
    pending.result(30)
    assert_stored(tmp_path / "one", stored)


def test_updates_in_backward_wait_too(gate, saver, tmp_path):
    model = Net()
    app = {"model": model, "optimizer": adam(model)}
    train_step(model, app["optimizer"])
    model.zero_grad()
    stored = {f"model.{name}": parameter.detach().clone() for name, parameter in trained(model)}
    pending = saver.save(tmp_path / "one", app, stage="lazy")
    shardopt.in_backward(model.last, "adamw", lr=0.1)
    opens_soon(gate)
    backward(model)
    assert pending.staged and not torch.equal(model.last.weight, stored["model.last.weight"])
    pending.result(30)
    assert_stored(tmp_path / "one", stored)


def test_a_step_of_a_part_waits_too(gate, saver, tmp_path):
    model = Net()
    first = shardopt.keyed("adamw", model.first.named_parameters(prefix="first"), lr=0.1)
    last = shardopt.keyed("muon", {"last.weight": model.last.weight}, lr=0.1)
    app = {"model": model, "optimizer": CombinedOptimizer([first, last])}
    train_step(model, app["optimizer"])
    expected = snapshot(app)
    pending = saver.save(tmp_path / "one", app, stage="lazy")
    opens_soon(gate)
    train_step(model, last)
    assert pending.staged and not torch.equal(model.last.weight, expected["model.last.weight"])
    pending.result(30)
    assert_stored(tmp_path / "one", {key: expected[key] for key in expected if key.startswith("optimizer.state.last")})


def test_changing_a_lazy_tensor_by_hand_fails_the_save_by_its_name(gate, saver, tmp_path):
    model = Net()
    optimizer = adam(model)
    pending = saver.save(tmp_path / "one", {"model": model, "optimizer": optimizer}, stage="lazy")
    with torch.no_grad():
        model.first.bias.mul_(2)
    gate.set()
    with pytest.raises(StateError, match=r"model\.first\.bias: found changed by another hand") as caught:
        pending.result(30)
    assert [problem.key for problem in caught.value.problems] == ["model.first.bias"]
    assert not (tmp_path / "one" / "manifest.json").exists()


def load_state(app):
    saved = app["optimizer"].state_dict()
    moved = {name: {key: value + 1 for key, value in state.items()} for name, state in saved["state"].items()}
    app["optimizer"].load_state_dict({**saved, "state": moved})


def load_checkpoint(app):
    checkpoint.load(app["earlier"], {"model": app["model"], "optimizer": app["optimizer"]})


def swap(app):
    with app["ema"].swap():
        app["model"].eval()(torch.randn(2, 8))


@pytest.mark.parametrize("change", [load_state, load_checkpoint, swap])
def test_what_changes_state_otherwise_waits_for_the_copy(change, gate, saver, tmp_path):
    model = Net()
    optimizer = adam(model)
    ema = shardopt.EMA(model, decay=0.5)
    app = {"model": model, "optimizer": optimizer, "ema": ema, "earlier": str(tmp_path / "earlier")}
    train_step(model, optimizer)
    checkpoint.save(app["earlier"], {"model": model, "optimizer": optimizer})
    train_step(model, optimizer)
    expected = snapshot(app)
    pending = saver.save(tmp_path / "one", app, stage="lazy")
    opens_soon(gate)
    change(app)
    assert pending.staged
    pending.result(30)
    assert_stored(tmp_path / "one", expected)


def test_a_second_save_waits_or_is_refused(gate, saver, tmp_path):
    model = Net()
    app = {"model": model, "optimizer": adam(model)}
    first = saver.save(tmp_path / "one", app, stage="lazy")
    assert isinstance(first.url, str) and not first.done
    with pytest.raises(TimeoutError, match="one is still under way"):
        first.result(0.01)
    with pytest.raises(CheckpointError, match="one: found a save in flight"):
        saver.save(tmp_path / "two", app, in_flight="refuse")
    opens_soon(gate)
    second = saver.save(tmp_path / "two", app)
    assert first.done
    second.result(30)
    assert saver.save(tmp_path / "three", app, in_flight="refuse").result(30)
    for name in ("one", "two", "three"):
        assert checkpoint.verify(tmp_path / name).ok


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tell", ["save", "step", "close", "blocking save", "result"])
def test_a_failure_is_told_once_by_whatever_comes_first(tell, stage, saver, tmp_path):
    model = Net()
    optimizer = adam(model)
    app = {"model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path / "taken", app)
    failed = saver.save(tmp_path / "taken", app, stage=stage)
    assert failed.done.wait(30)
    ways = {
        "save": lambda: saver.save(tmp_path / "next", app),
        "step": lambda: train_step(model, optimizer),
        "close": saver.close,
        "blocking save": lambda: checkpoint.save(tmp_path / "next", app),
        "result": failed.result,
    }
    with pytest.raises(CheckpointExistsError, match="a committed checkpoint"):
        ways[tell]()
    assert not (tmp_path / "next").exists()
    train_step(model, optimizer)
    assert saver.save(tmp_path / "next", app, stage=stage).result(30)
    with pytest.raises(CheckpointExistsError):  # each time that it is asked
        failed.result()


def test_state_that_cannot_be_stored_fails_the_save_and_not_the_call(saver, tmp_path):
    model = Net()
    optimizer = adam(model)
    pending = saver.save(tmp_path / "one", {"model": model, "optimizer": optimizer, "bad": {"it": object()}})
    with pytest.raises(StateError, match=r"bad\.it"):
        pending.result(30)
    train_step(model, optimizer)
    with pytest.raises(ValueError, match=r"stage: found 'later'; required one of 'now', 'lazy'"):
        saver.save(tmp_path / "one", {"model": model}, stage="later")
    with pytest.raises(ValueError, match="in_flight"):
        saver.save(tmp_path / "one", {"model": model}, in_flight="drop")
    assert not (tmp_path / "one").exists()


def test_an_interrupt_stays_one_and_fails_the_save(saver, tmp_path, monkeypatch):
    def interrupt(*unused):
        raise KeyboardInterrupt

    monkeypatch.setattr(staging, "copy_on_host", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saver.save(tmp_path / "one", {"x": torch.ones(3)})
    with pytest.raises(KeyboardInterrupt):
        saver.pending.result(30)


def test_an_interrupt_before_a_save_begins_leaves_none_to_end(saver, tmp_path, monkeypatch):
    """The program used to end with exit code 1 for it, though a later save had succeeded."""
    init = BackgroundSave.__init__

    def interrupted(self, *args):
        init(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(BackgroundSave, "__init__", interrupted)
        saver.save(tmp_path / "one", {"x": torch.ones(3)})
    assert tracked_urls() == []
    saver.save(tmp_path / "one", {"x": torch.ones(3)}).result(30)


def test_nothing_of_a_save_is_kept_but_host_memory(saver, tmp_path):
    model = Net()
    optimizer = adam(model)
    for number in range(5):
        app = {"model": model, "optimizer": optimizer}
        saver.save(tmp_path / str(number), app, SaveTerms(durable=False), stage="lazy")
    saver.wait()
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("shardopt")}
    assert threads <= {"shardopt-signals"}  # which stays where something in this process has listened for a signal
    copied = copy.deepcopy(optimizer)  # a copy has no hooks
    saver.save(tmp_path / "last", {"model": model, "optimizer": optimizer}, stage="lazy")
    assert len(copied._optimizer_step_pre_hooks) == 0
    saver.wait()


def test_async_save_keeps_its_memory_between_calls(tmp_path):
    app = {"x": torch.randn(100), "step": 3}
    first = checkpoint.async_save(tmp_path / "one", app)
    second = checkpoint.async_save(tmp_path / "two", app, stage="lazy", in_flight="wait", durable=False)
    assert first.done and isinstance(second, checkpoint.PendingSave)
    report = second.result()
    assert 0 <= report.stall_seconds <= report.staging_seconds + 1 and report.writing_seconds <= report.seconds
    assert_stored(tmp_path / "one", snapshot(app))
    assert_stored(tmp_path / "two", snapshot(app))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a GPU")
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_stored_from_a_gpu_is_the_state_at_the_call(stage, saver, tmp_path):
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)], nn.BatchNorm1d(2048)).cuda()
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    inputs = torch.randn(64, 2048, device="cuda")
    app = {"model": model, "optimizer": optimizer, "step": 1}
    for number in range(3):
        model(inputs).square().sum().backward()
        optimizer.step()
        expected = snapshot(app)
        pending = saver.save(tmp_path / str(number), app, stage=stage)
        for _ in range(3):
            model(inputs).square().sum().backward()
            optimizer.step()
        pending.result(60)
        assert_stored(
            tmp_path / str(number), {key: v.cpu() if torch.is_tensor(v) else v for key, v in expected.items()}
        )
    memory, _ = saver._memories[0]
    assert memory._pinned.memory.is_pinned() and not memory._plain.memory.is_pinned()


class Parts:
    """Gives objects instead of tensors: what is in them is saved all the same."""

    def __init__(self, **parts):
        self.parts = parts

    def state_dict(self):
        return self.parts

    def load_state_dict(self, state):
        pass


def test_an_optimizer_within_another_object_waits_too(gate, saver, tmp_path):
    model = Net()
    optimizer = adam(model)
    train_step(model, optimizer)
    app = {"all": Parts(model=model, optimizer=optimizer)}
    expected = snapshot(app)
    saver.save(tmp_path / "one", app, stage="lazy")
    opens_soon(gate)
    train_step(model, optimizer)
    saver.wait()
    assert_stored(tmp_path / "one", expected)
