"""What the integrations share, without any framework: optimizers made keyed, a loader that counts, runs that save."""

import os
import signal
import time
from datetime import timedelta

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.writing import staging
from shardopt.errors import CheckpointError, MismatchError, StateError
from shardopt.integrations import run
from shardopt.integrations.loader import ResumableLoader
from shardopt.integrations.loggers import log_report_metrics
from shardopt.integrations.optimizers import keyed_like, make_keyed, require_keyed
from shardopt.integrations.run import FrameworkState, TrainingRun, replace_checkpoint
from shardopt.world import using
from tests.harness import run_ranks_outcomes
from tests.support.worlds import FakeClock


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer whose constructor has not run torch's."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler = optimizer, scaler

    def state_dict(self):
        return self.optimizer.state_dict()


class Lookahead(Wrapper):
    """One that keeps weights itself."""

    def state_dict(self):
        return {**self.optimizer.state_dict(), "slow": torch.zeros(1)}


def make(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    return model, [{"params": others, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02}]


def train(model, optimizer, schedule, steps=6):
    for step in range(steps):
        model(torch.full((2, 3), 1.0 + step)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "sequence": lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 1, 0.5), StepLR(optimizer, 2)], [3]),
}


@pytest.mark.parametrize("algorithm", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_an_optimizer_made_keyed_trains_as_the_one_that_it_replaces(algorithm, schedule):
    model, groups = make()
    optimizer = algorithm(groups, lr=0.01, foreach=False)
    expected = train(model, optimizer, schedule(optimizer))

    model, groups = make()
    replaced = algorithm(groups, lr=0.01, foreach=False)
    wrapper, made = Wrapper(replaced), schedule(replaced)
    make_keyed(wrapper, model, [made], "")
    assert wrapper.optimizer is not replaced and len(wrapper.optimizer.param_groups) == 2
    for value, wanted in zip(train(model, wrapper.optimizer, made), expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("warmup", [0, 5])
def test_a_rate_that_the_code_changes_is_warned_of_under_a_schedule_of_any_first_rate(tmp_path, caplog, warmup):
    def run(rate, steps):
        model, _ = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, step / warmup) if warmup else 1.0)
        first, wrapper = optimizer.param_groups[0]["lr"], Wrapper(optimizer)
        make_keyed(wrapper, model, [schedule], "")
        assert wrapper.optimizer.param_groups[0]["lr"] == first == (0.0 if warmup else rate)
        app = {"model": model, "optimizer": wrapper.optimizer, "schedule": schedule}
        with checkpoint.Manager(tmp_path, every=2) as manager:
            done = manager.restore(app)
            for step in range(done + 1, done + steps + 1):
                train(model, wrapper.optimizer, schedule, 1)
                manager.save(step, app)
        return caplog.messages.copy(), caplog.clear()

    run(2e-3, 4)
    assert not [line for line in run(2e-3, 2)[0] if "options of the checkpoint" in line]
    (line,) = [line for line in run(5e-3, 2)[0] if "options of the checkpoint" in line]
    assert ".lr: 0.005 in the code, 0.002 in the checkpoint" in line


def test_optimizers_that_cannot_be_keyed_are_refused_by_name():
    model, groups = make()
    optimizer = torch.optim.AdamW(groups)
    with pytest.raises(StateError, match=r"optimizers\[0\]: found a torch.optim.adamw.AdamW; .* do this"):
        require_keyed([Wrapper(optimizer)], "do this")
    with pytest.raises(StateError, match="param_groups: found 6 tensors without names"):
        keyed_like(optimizer, make()[0].named_parameters(), "do this")
    with pytest.raises(StateError, match="mixed_precision: found fp16"):
        make_keyed(Wrapper(optimizer, scaler=object()), model, [], "do this")
    keyed = shardopt.keyed("adamw", model.named_parameters())
    assert require_keyed([Wrapper(Wrapper(keyed))], "do this") == [keyed]
    with pytest.raises(StateError, match=r"optimizers\[0\]: found a .*Lookahead, which keeps slow itself"):
        require_keyed([Wrapper(Lookahead(keyed))], "do this")
    outer = torch.optim.SGD(groups)
    outer.optimizer = keyed
    with pytest.raises(StateError, match=r"optimizers\[0\]: found a torch.optim.sgd.SGD; .* do this"):
        require_keyed([Wrapper(outer)], "do this")
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(StateError, match="state: found that of steps taken"):
        keyed_like(optimizer, model.named_parameters(), "do this")


def test_parameters_exchanged_beneath_a_keyed_optimizer_are_refused():
    model, _ = make()
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    assert require_keyed([optimizer], "do this") == [optimizer]
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(1))  # as Accelerate does for FSDP2
    with pytest.raises(StateError, match=r"optimizers\[0\]: found groups with other parameters.*; do this"):
        require_keyed([optimizer], "do this")


def batches(loader, count):
    found = []
    while len(found) < count:
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("done", range(11))
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_loader_resumes_wherever_it_was_left(done, drop_last):
    def new():
        return ResumableLoader(torch.arange(22), batch_size=5, seed=3, drop_last=drop_last)

    expected = batches(new(), 12)
    left, resumed = new(), new()
    assert len(left) == (4 if drop_last else 5)
    assert batches(left, done) == expected[:done]
    resumed.load_state_dict(left.state_dict())
    assert len(resumed) == len(left)
    assert batches(resumed, 12 - done) == expected[done:]


def test_state_with_tensors_comes_back_whatever_is_there(tmp_path):
    value = {"best": torch.tensor(0.5), "paths": {"a": torch.tensor([1, 2])}, "n": 3}
    checkpoint.save(tmp_path / "a", {"framework": FrameworkState(value)})
    loaded = FrameworkState({"n": 0})
    checkpoint.load(tmp_path / "a", {"framework": loaded})
    assert loaded.value["n"] == 3 and torch.equal(loaded.value["paths"]["a"], torch.tensor([1, 2]))
    checkpoint.save(tmp_path / "b", {"framework": FrameworkState({"n": 4})})
    checkpoint.load(tmp_path / "b", {"framework": loaded})
    assert loaded.value == {"n": 4}

    def refuse(value):
        raise MismatchError(f"found {value}")

    with pytest.raises(MismatchError, match=r"found \{'n': 4\}"):
        checkpoint.load(tmp_path / "b", {"framework": FrameworkState(check=refuse)})


def test_steps_that_count_for_several_are_saved_when_one_was_due(tmp_path):
    app = {"step": 0}
    run = TrainingRun(tmp_path, every=5, stop_on=None)
    assert run.begin(app) == 0
    for step in (2, 4, 4, 6, 8, 12, 14):
        app["step"] = step
        run.after_step(step, lambda: app)
    assert run.manager.steps() == [6, 12]
    run.end(14, lambda: app)
    assert checkpoint.Manager(tmp_path).steps() == [6, 12, 14]
    with pytest.raises(StateError, match="no training under way"):
        _ = run.manager


def test_steps_are_saved_every_so_much_time(tmp_path):
    app, clock = {"step": 0}, FakeClock()
    with using(clock):
        run = TrainingRun(tmp_path, every=timedelta(minutes=5), stop_on=None)
        assert run.begin(app) == 0
        for step in (2, 4, 4, 6, 8, 12, 14, 16, 18):
            clock.now += 120
            app["step"] = step
            run.after_step(step, lambda: app)
        run.end(18, lambda: app)
    assert checkpoint.Manager(tmp_path).steps() == [6, 16, 18]


def test_what_a_tier_alone_is_due_for_stays_out_of_the_root(tmp_path):
    app = {"step": 0}
    run = TrainingRun(
        tmp_path / "root", every=4, destinations=[checkpoint.Tier(str(tmp_path / "tier"), every=1)], stop_on=None
    )
    run.begin(app)
    for step in range(1, 7):
        run.after_step(step, lambda: app)
        run.manager.wait()
    assert run.manager.steps() == [4]
    run.end(6, lambda: app)
    assert checkpoint.Manager(tmp_path / "root").steps() == [4, 6]


def test_the_last_step_is_copied_by_the_time_that_a_framework_may_change_its_weights(tmp_path, monkeypatch):
    copy_on_host = staging.copy_on_host

    def copy_slowly(host, source):
        time.sleep(0.05)
        copy_on_host(host, source)

    monkeypatch.setattr(staging, "copy_on_host", copy_slowly)
    model = torch.nn.Linear(1, 1, bias=False)
    app = {"model": model, "optimizer": shardopt.keyed("sgd", model.named_parameters(), lr=0.1)}
    run = TrainingRun(tmp_path, stage="lazy", stop_on=None)
    run.begin(app)
    model.weight.data.fill_(3)
    run.save_last(1, lambda: app)
    model.weight.data.fill_(7)
    run.end(1, lambda: app)
    assert checkpoint.Manager(tmp_path).restore(app) == 1 and model.weight.item() == 3


class Asking(MemoryFileSystem):
    """A file system that asks for a password."""

    protocol = "asking"
    cachable = False

    def __init__(self, password=None, **options):
        super().__init__(**options)
        if password != "please":
            raise PermissionError("no password")


def test_storage_options_open_what_a_run_starts_from(tmp_path, monkeypatch):
    fsspec.register_implementation("asking", Asking, clobber=True)
    options = {"password": "please"}
    checkpoint.save("asking://other/weights", {"model": {"x": torch.ones(2)}, "more": 1}, storage_options=options)
    monkeypatch.setattr("shardopt.checkpoint.storage.open._options", {})  # as in a process of its own
    app = {"model": {"x": torch.zeros(2)}, "step": 0}
    run = TrainingRun(tmp_path, start_from="asking://other/weights", storage_options=options, stop_on=None)
    run.begin(app)
    assert app["model"]["x"].tolist() == [1.0, 1.0]
    run.end(0, lambda: app)


class Killed(BaseException):
    """What ends a process between two of its calls."""


def kill_after(monkeypatch, calls):
    """Ends the process after so many calls that change a directory."""
    left = [calls]
    for name in ("replace", "rename", "unlink", "rmdir"):
        change = getattr(os, name)

        def changing(*args, change=change, **options):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return change(*args, **options)

        monkeypatch.setattr(os, name, changing)


def test_one_of_two_checkpoints_is_whole_wherever_their_replacement_is_killed(tmp_path, monkeypatch):
    found = []
    for calls in range(20):
        path, new = str(tmp_path / f"{calls}.ckpt"), str(tmp_path / f"{calls}.ckpt.new")
        for value, url in ((1.0, path), (2.0, new)):
            checkpoint.save(url, {"x": torch.full((3,), value)})
        with monkeypatch.context() as patched:
            kill_after(patched, calls)
            try:
                replace_checkpoint(path, new)
                done = True
            except Killed:
                done = False
        app = {"x": torch.zeros(3)}
        checkpoint.load(path, app)
        assert checkpoint.verify(path).ok
        found.append(app["x"][0].item())
        if done:
            break
        checkpoint.save(f"{path}.2", {"x": torch.full((3,), 3.0)})  # the next save leaves nothing behind
        replace_checkpoint(path, f"{path}.2")
        assert len(os.listdir(path)) == 2 and not os.path.exists(f"{path}.2")
    assert done and found[0] == 1.0 and found[-1] == 2.0 and found == sorted(found)
    assert len(os.listdir(path)) == 2 and not os.path.exists(new)


def test_what_cannot_be_cleared_away_behind_a_replacement_is_told_and_stays(tmp_path, monkeypatch, caplog):
    path, new = str(tmp_path / "last.ckpt"), str(tmp_path / "last.ckpt.new")
    for value, url in ((1.0, path), (2.0, new)):
        checkpoint.save(url, {"x": torch.full((3,), value)})

    def unreadable(*unused):
        raise CheckpointError("a neighbour cannot be read")

    for name in ("referred_in", "remove_checkpoint"):
        monkeypatch.setattr(run, name, unreadable)
    replace_checkpoint(path, new)
    app = {"x": torch.zeros(3)}
    checkpoint.load(path, app)
    assert app["x"][0] == 2.0 and "stays" in caplog.text and len(caplog.records) == 2


def test_a_link_is_replaced_and_what_it_points_at_stays(tmp_path):
    for value, name in ((1.0, "kept"), (2.0, "last.new")):
        checkpoint.save(tmp_path / name, {"x": torch.full((3,), value)})
    os.symlink(tmp_path / "kept", tmp_path / "last")
    replace_checkpoint(str(tmp_path / "last"), str(tmp_path / "last.new"))
    app = {"x": torch.zeros(3)}
    for value, name in ((1.0, "kept"), (2.0, "last")):
        checkpoint.load(tmp_path / name, app)
        assert app["x"][0] == value


def hear_the_signal(folder):
    run = TrainingRun(folder, stop_on=checkpoint.Preemption(signal.SIGUSR2, seconds=60.0))
    run.begin({"step": 0})
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(1))
    run.take_signal_back()
    signal.raise_signal(signal.SIGUSR2)
    run.after_step(1, lambda: {"step": 1})


def test_the_signal_is_taken_back_from_a_handler_that_came_later(tmp_path):
    (outcome,) = run_ranks_outcomes(1, hear_the_signal, str(tmp_path))
    assert isinstance(outcome.error, SystemExit) and outcome.error.code == 128 + signal.SIGUSR2, outcome
    assert checkpoint.Manager(tmp_path).steps() == [1]


def test_figures_go_to_any_logger_until_it_is_removed(tmp_path):
    lines = []
    remove = log_report_metrics(lambda values, step: lines.append((values, step)), step=lambda: 7)
    try:
        checkpoint.save(tmp_path / "a", {"x": torch.ones(1000)})
    finally:
        remove()
    checkpoint.save(tmp_path / "b", {"x": torch.ones(1000)})
    ((values, step),) = lines
    assert step == 7 and values["checkpoint/save/bytes_total"] > 4000
    assert {"seconds", "stall_seconds", "gb_per_second"} <= {name.rpartition("/")[2] for name in values}
