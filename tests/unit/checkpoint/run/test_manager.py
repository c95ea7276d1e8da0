"""One process with a Manager: when it saves, what it keeps, what it restores; ranks are in tests/distributed."""

import errno
import gc
import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.writing import staging
from shardopt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptionError,
    MismatchError,
    OptionError,
    StateError,
)

STAGES = (None, "now", "lazy")


def app_of(value=0.0):
    return {"w": torch.full((5,), float(value)), "number": value}


def run(manager, steps, metrics=lambda step: None):
    for step in steps:
        manager.save(step, app_of(step), metrics=metrics(step))


def flip(path, name):
    (file,) = path.glob(name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_keeps_what_its_rules_say(tmp_path, stage):
    losses = {step: abs(step - 7.0) for step in range(1, 21)}
    rules = checkpoint.Retention(last=2, every=5, best=("loss", "min", 2))
    with checkpoint.Manager(tmp_path, stage=stage, keep=rules) as manager:
        run(manager, range(1, 21), lambda step: {"loss": losses[step]})
    assert manager.steps() == [5, 7, 8, 10, 15, 19, 20]
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"step-{step:08d}" for step in manager.steps()]
    assert manager.metrics(7) == {"loss": 0.0}
    for step in manager.steps():
        assert checkpoint.verify(manager.path(step)).ok
        app = app_of()
        checkpoint.load(manager.path(step), app)  # strict: the metrics are in nobody's way
        assert app["number"] == step and app["w"].eq(step).all()


@pytest.mark.parametrize("on_tier", [False, True])
@pytest.mark.parametrize("stage", [None, "now"])
def test_only_the_last_step_is_passed_over_and_steps_rise(tmp_path, stage, on_tier):
    tiers = [checkpoint.Tier(str(tmp_path / "tier"), every=1)] if on_tier else []
    with checkpoint.Manager(tmp_path / "run", every=5, stage=stage, destinations=tiers) as manager:
        for step in (5, 10):
            manager.save(step, {"x": step})
        manager.save(10, {"x": 11})
        with pytest.raises(CheckpointExistsError, match="steps must rise"):
            manager.save(5, {"x": 15})
            manager.wait()
        app = {"x": 0}
        assert manager.restore(app) == app["x"] == 10
        assert manager.save(10, app) is None
        with pytest.raises(CheckpointExistsError, match="steps must rise"):
            manager.save(5, {"x": 15})
            manager.wait()
        assert manager.restore(app, step=5) == app["x"] == 5
        assert manager.save(5, app) is None
        assert manager.save(10, {"x": 20}) is not None  # of a new branch
        assert manager.restore(app) == 10 and app["x"] == 20


@pytest.mark.parametrize("stage", [None, "now"])
def test_a_counter_that_starts_over_is_refused_also_where_its_steps_are_gone(tmp_path, stage):
    tiers = [checkpoint.Tier(str(tmp_path / "tier"), every=1, keep_last=1)]
    with checkpoint.Manager(tmp_path / "run", every=2, stage=stage, destinations=tiers) as manager:
        for step in range(1, 7):
            manager.save(step, {"x": step})
        for step in (1, 2, 5):  # only on a tier, and removed there; at the root; the one before the last
            with pytest.raises(CheckpointExistsError, match=r"(?s)^steps must rise .*first delete\(6\), and each"):
                manager.save(step, {"x": -step})
                manager.wait()
        manager.save(6, {"x": -6})  # is there
        with pytest.raises(CheckpointExistsError, match=r"^steps must rise"):
            manager.save(3, {"x": -3}, force=True)
            manager.wait()
        assert manager.save(7, {"x": 7}) is not None
        app = {"x": 0}
        assert manager.restore(app) == app["x"] == 7
        manager.delete(7)  # which the root does not list
        assert manager.save(7, app) is not None
        assert manager.restore(app, step=4) == 4
        assert manager.save(5, app) is not None


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_that_failed_is_not_the_last_one(tmp_path, stage):
    tiers = [checkpoint.Tier(str(tmp_path / "tier"), every=1)]
    with checkpoint.Manager(tmp_path / "run", every=1, stage=stage, destinations=tiers) as manager:
        manager.save(6, {"x": 6})
        for step in (7, 8):
            with pytest.raises(StateError):
                manager.save(step, {"x": object()})
                manager.wait()
        with pytest.raises(CheckpointExistsError, match=r"(?s)^steps must rise .*first delete\(6\), and each"):
            manager.save(5, {"x": 5})
            manager.wait()
        manager.save(6, {"x": -6})  # is there
        assert manager.restore(app := {"x": 0}) == app["x"] == 6
        with pytest.raises(StateError):
            manager.save(7, {"x": object()})
            manager.wait()
        manager.delete(6)
        assert manager.save(5, {"x": 5}) is not None


@pytest.mark.parametrize("on_tier", [False, True])
def test_metrics_with_a_step_that_is_there_replace_none(tmp_path, on_tier, caplog):
    tiers = [checkpoint.Tier(str(tmp_path / "tier"), every=1)] if on_tier else []
    options = {"every": 2, "destinations": tiers}
    with checkpoint.Manager(tmp_path / "run", **options) as manager:
        manager.save(2, {"x": 2}, metrics={"accuracy": 0.9})
        manager.save(2, {"x": 2}, metrics={"accuracy": 0.9, "loss": 1.0})
        assert "keeps" not in caplog.text
        manager.save(2, {"x": 2}, metrics={"accuracy": 0.0, "loss": 2.0})
        manager.wait()
        assert manager.metrics(2) == {"accuracy": 0.9, "loss": 1.0}
    with checkpoint.Manager(tmp_path / "run", every=2) as manager:
        manager.restore({"x": 0})
        caplog.clear()
        manager.save(2, {"x": 2}, metrics={"accuracy": 0.0, "loss": 1.0, "epoch": 1})
        assert "step 2 keeps the metrics that it has: accuracy=0.9. add_metrics(2, ...) replaces them" in caplog.text
        assert manager.metrics(2) == {"accuracy": 0.9, "loss": 1.0, "epoch": 1.0}
        manager.add_metrics(2, {"accuracy": 0.5})
        assert manager.metrics(2)["accuracy"] == 0.5


def test_all_stay_where_there_are_no_rules(tmp_path):
    with checkpoint.Manager(tmp_path, every=3) as manager:
        run(manager, range(1, 10))
        assert manager.save(10, app_of(10), force=True).tensors == 1
    assert manager.steps() == [3, 6, 9, 10]


def test_metrics_that_are_no_numbers(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, app_of(1), metrics={"a": math.nan, "b": -math.inf, "c": 3})
    actual = manager.metrics(1)
    assert math.isnan(actual.pop("a")) and actual == {"b": -math.inf, "c": 3.0}
    assert manager.metrics(2) == {}
    with pytest.raises(ValueError):
        manager.save(2, app_of(2), metrics={"a": "high"})


def test_a_loss_that_still_has_its_graph_is_a_metric(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, app_of(1), metrics={"loss": (torch.ones((), requires_grad=True) * 2)})  # torch's float() would warn
    assert manager.metrics(1) == {"loss": 2.0}


def test_a_users_own_metrics_are_neither_read_nor_removed(tmp_path):
    manager = checkpoint.Manager(tmp_path, keep=1)
    for step in (1, 2):
        own = tmp_path / f"step-{step:08d}" / "metrics.json"
        own.parent.mkdir()
        own.write_text('{"loss": "high"}')
        manager.save(step, app_of(step), metrics=None if step == 1 else {"loss": 2})
    assert manager.metrics(1) == {} and manager.metrics(2) == {"loss": 2.0}
    assert manager.steps() == [2]
    for step in (1, 2):
        assert (tmp_path / f"step-{step:08d}" / "metrics.json").read_text() == '{"loss": "high"}'


def test_metrics_of_before_they_were_in_manifests(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    path = tmp_path / "step-00000001"
    shutil.copytree(Path(__file__).parents[3] / "golden" / "v1", path)
    assert manager.metrics(1) == {}
    (path / "metrics.json").write_text('{"loss": 0.5, "a": NaN}')
    assert manager.metrics(1)["loss"] == 0.5
    (path / "metrics.json").write_text('{"a": "high"}')
    with pytest.raises(CorruptionError, match="no number"):
        manager.metrics(1)


@pytest.mark.parametrize("stage", STAGES)
def test_remains_of_dead_saves_are_cleared_and_others_left(tmp_path, stage):
    for step in (1, 2, 9):
        dead = tmp_path / f"step-{step:08d}"
        dead.mkdir()
        (dead / "0123456789ab-r00000.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000002" / "mine.txt").write_text("mine")
    (tmp_path / "step-5").mkdir()
    with checkpoint.Manager(tmp_path, keep=1, stage=stage) as manager:
        run(manager, [3])
    left = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if "step-00000003" not in str(each)}
    dead = {"step-00000009", "step-00000009/0123456789ab-r00000.safetensors"}  # above: another may be writing it
    assert left == {"step-00000002", "step-00000002/mine.txt", "step-5", *dead}


def test_a_save_in_flight_to_the_same_root_is_not_cleared(tmp_path, monkeypatch):
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.restore(app_of())  # so that all that comes to the root is this run's
    gate, unheld = threading.Event(), staging.copy_on_host
    monkeypatch.setattr(staging, "copy_on_host", lambda host, source: gate.wait(30) and unheld(host, source))
    weight = torch.nn.Parameter(torch.ones(3))
    half = tmp_path / "step-00000001" / "0123456789ab-r00000.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half")
    app = {"weight": weight, "optimizer": torch.optim.SGD([weight], 0.1)}
    pending = checkpoint.async_save(manager.path(1), app, stage="lazy")
    manager.save(2, app_of(2))
    assert half.exists()
    gate.set()
    pending.result(30)
    manager.save(3, app_of(3))
    assert manager.steps() == [3]


def test_what_is_being_read_is_cleared_with_a_later_save(tmp_path, monkeypatch):
    manager = checkpoint.Manager(tmp_path, keep=1)
    run(manager, [1])
    reads, may_go_on = threading.Event(), threading.Event()
    load_module = sys.modules["shardopt.checkpoint.loading.load"]
    monkeypatch.setattr(load_module, "fill", held_back(load_module.fill, reads, may_go_on))
    app = app_of()
    reader = threading.Thread(target=lambda: checkpoint.load(manager.path(1), app))
    reader.start()
    assert reads.wait(30)
    run(manager, [2])
    assert manager.steps() == [1, 2]
    may_go_on.set()
    reader.join()
    assert app["number"] == 1 and app["w"].eq(1).all()
    run(manager, [3])
    assert manager.steps() == [3]


def held_back(call, begun, may_go_on):
    def held(*args):
        begun.set()
        assert may_go_on.wait(30)
        return call(*args)

    return held


def test_restore_takes_the_newest_and_0_where_there_is_none(tmp_path):
    app = app_of(5)
    assert checkpoint.Manager(tmp_path / "nowhere").restore(app) == 0
    assert app["number"] == 5
    run(checkpoint.Manager(tmp_path), (1, 2))
    (tmp_path / "step-00000003").mkdir()
    assert checkpoint.Manager(tmp_path).restore(app) == 2
    assert app["number"] == 2


@pytest.mark.parametrize("name", ["manifest.json", "*.safetensors"])
def test_a_damaged_newest_is_logged_and_the_one_before_taken(tmp_path, caplog, name):
    run(checkpoint.Manager(tmp_path), (1, 2, 3))
    for step in (2, 3):
        flip(tmp_path / f"step-{step:08d}", name)
    app, manager = app_of(), checkpoint.Manager(tmp_path, keep=1)
    with caplog.at_level(logging.WARNING, "shardopt.checkpoint"):
        assert manager.restore(app) == 1
    assert app["number"] == 1 and app["w"].eq(1).all()
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "step 3 is damaged",
        "step 2 is damaged",
    ]
    # What is damaged is no checkpoint to retention, nor in the way of the save that comes to its step again.
    caplog.clear()
    manager.save(2, app_of(20))
    assert manager.steps() == [1, 2, 3]
    makes_way = f"damaged checkpoints are removed before they are saved again: {manager.path(2)} [damaged]"
    assert [record.getMessage() for record in caplog.records] == [makes_way]
    manager.save(3, app_of(30))
    assert manager.steps() == [1, 3]  # the one that was restored, and the newest
    assert checkpoint.verify(manager.path(3)).ok
    assert checkpoint.Manager(tmp_path).restore(app) == 3 and app["number"] == 30


def test_a_restore_of_some_keys_says_so(tmp_path, caplog):
    run(checkpoint.Manager(tmp_path), (1, 2))
    app = app_of()
    with caplog.at_level(logging.INFO, "shardopt"):
        assert checkpoint.Manager(tmp_path).restore(app, select="^w$") == 2
    assert app["w"].eq(2).all() and app["number"] == app_of()["number"]
    assert "; of the app only what select='^w$' finds (1 keys)" in caplog.text


def test_all_damaged_is_an_error(tmp_path):
    run(checkpoint.Manager(tmp_path), (1, 2))
    for step in (1, 2):
        flip(tmp_path / f"step-{step:08d}", "*.safetensors")
    with pytest.raises(CorruptionError):
        checkpoint.Manager(tmp_path).restore(app_of())


def test_what_does_not_fit_is_not_taken_for_damaged(tmp_path):
    run(checkpoint.Manager(tmp_path), (1, 2))
    with pytest.raises(MismatchError):
        checkpoint.Manager(tmp_path).restore({"w": torch.zeros(6), "step": 0})
    assert checkpoint.Manager(tmp_path).restore({"w": torch.zeros(5)}, strict=False) == 2


def trained(steps, optimizer_of):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    app = {"model": model, "optimizer": optimizer_of(model)}
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        app["optimizer"].step()
        app["optimizer"].zero_grad()
    return app


OPTIMIZERS = {
    "keyed": lambda model: shardopt.keyed("adamw", model.named_parameters(), lr=0.1),
    "combined": lambda model: shardopt.optim.CombinedOptimizer(
        [("a", shardopt.keyed("adamw", [("weight", model.weight)], lr=0.1))]
    ),
    "stateless": lambda model: shardopt.keyed("sgd", model.named_parameters(), lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_never_stepped_is_initialized(tmp_path, kind):
    app = trained(2, OPTIMIZERS[kind])
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(2, app)
    fresh = trained(0, OPTIMIZERS[kind])
    assert checkpoint.Manager(tmp_path).restore(fresh) == 2
    for one, other in zip(
        torch.utils._pytree.tree_leaves(app["optimizer"].state_dict()),
        torch.utils._pytree.tree_leaves(fresh["optimizer"].state_dict()),
        strict=True,
    ):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_an_optimizer_stays_without_state_where_the_checkpoint_has_none(tmp_path):
    checkpoint.Manager(tmp_path).save(1, trained(0, OPTIMIZERS["keyed"]))
    fresh = trained(0, OPTIMIZERS["keyed"])
    assert checkpoint.Manager(tmp_path).restore(fresh) == 1
    assert not any(fresh["optimizer"].state.values())


def test_a_failed_save_in_the_background_is_raised_by_close(tmp_path):
    (tmp_path / "step-00000002").write_text("in the way")
    manager = checkpoint.Manager(tmp_path, stage="now")
    run(manager, [1, 2])
    with pytest.raises(CheckpointError, match="step-00000002"):
        manager.close()
    manager.close()
    with pytest.raises(RuntimeError, match="closed"):
        manager.save(3, app_of())
    assert manager.steps() == [1]


def test_leaving_by_an_error_shows_that_error(tmp_path, caplog):
    (tmp_path / "step-00000002").write_text("in the way")
    with pytest.raises(ZeroDivisionError), checkpoint.Manager(tmp_path, stage="now") as manager:
        run(manager, [2])
        raise ZeroDivisionError
    assert "has failed too" in caplog.text


def test_a_removal_that_fails_ends_no_training(tmp_path, monkeypatch, caplog):
    manager = checkpoint.Manager(tmp_path, keep=1)
    run(manager, [1])

    def refuse(*unused):
        raise PermissionError("not yours")

    monkeypatch.setattr("os.unlink", refuse)
    run(manager, [2])
    assert "not yours" in caplog.text
    monkeypatch.undo()
    run(manager, [3])
    assert manager.steps() == [3]


def held():
    for thread in threading.enumerate():
        if thread.name == "shardopt-save":  # still removing what is no longer wanted
            thread.join()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.exhaustive
def test_200_saves_leave_memory_descriptors_and_threads_flat(tmp_path):
    app = trained(1, OPTIMIZERS["keyed"])
    rules = checkpoint.Retention(last=2, every=100, best=("loss", "min", 2))
    with checkpoint.Manager(tmp_path, stage="lazy", keep=rules) as manager:
        for step in range(1, 201):
            manager.save(step, app, metrics={"loss": float(step)}).result(30)
            if step == 50:
                *before, rss_before = held()
        *after, rss_after = held()
    assert after == before
    assert rss_after - rss_before <= 2 << 20
    assert manager.steps() == [1, 2, 100, 199, 200]


WRONG = {
    "every": [0, -1, "50", 2.5, True, None, torch.tensor(2.0), timedelta(0), timedelta(minutes=-1)],
    "keep": [0, "3", 1.0, False, (1, 2)],
    "options": [None, {"durable": False}],
    "stage": ["background", "NOW", 1, True],
    "stop_on": ["SIGTERM", 0, 4000, True, signal.SIGKILL, 15.0, (), (signal.SIGTERM, "SIGINT")],
    "destinations": [None, "s3://bucket/run", checkpoint.Mirror("copies"), {checkpoint.Mirror("copies")}],
}
WRONG_RETENTION = {
    "last": [0, "3", 1.0, False],
    "every": [0, "3"],
    "seconds": [0, -1, "60", math.nan, math.inf, True],
    "best": ["loss", ("a", "least", 1), ("a", "min", 0), ("a", "min", "1"), ("a", "min"), (1, "min", 1), 3],
}
WRONG_PREEMPTION = {"exit_code": ["1", -1, 256, True], "seconds": [0, -1, "5", math.nan, None, True]}
WRONG_SAVES = {"deadline_seconds": [0, "5", None, math.nan], "durable": [None, "no"], "select": ["(", 3]}
PLACES = {
    checkpoint.Retention: WRONG_RETENTION,
    checkpoint.Preemption: WRONG_PREEMPTION,
    checkpoint.SaveOptions: WRONG_SAVES,
}


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(make, name, value) for make, wrong in PLACES.items() for name, values in wrong.items() for value in values],
    ids=repr,
)
def test_a_wrong_argument_of_a_frozen_value_is_refused_by_name(make, name, value):
    with pytest.raises(OptionError, match=rf"{name}: found .*; required .*; ") as caught:
        make(**{name: value})
    assert [problem.key for problem in caught.value.problems] == [name]


def test_frozen_values_list_all_that_is_wrong_and_are_equal_by_value():
    with pytest.raises(OptionError) as caught:
        checkpoint.Retention(last=0, every=0, best="loss")
    assert [problem.key for problem in caught.value.problems] == ["last", "every", "best"]
    with pytest.raises(OptionError) as caught:
        checkpoint.Preemption("SIGTERM", exit_code=-1, seconds=0)
    assert [problem.key for problem in caught.value.problems] == ["stop_on", "seconds", "exit_code"]
    assert checkpoint.Retention(last=np.int64(2)) == checkpoint.Retention(last=2)
    both = (signal.SIGTERM, signal.SIGINT)
    assert checkpoint.Preemption(both) == checkpoint.Preemption([*both, signal.SIGINT])
    assert replace(checkpoint.SaveOptions(durable=False), select="x").durable is False


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]], ids=repr)
def test_a_wrong_option_is_refused_by_name(tmp_path, name, value):
    with pytest.raises(OptionError, match=rf"{name}: found .*; required .*; ") as caught:
        checkpoint.Manager(tmp_path, **{name: value})
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TypeError)
    assert [problem.key for problem in caught.value.problems] == [name]


TIER, MIRROR = checkpoint.Tier("/dev/shm/run", every=1), checkpoint.Mirror("copies")


@pytest.mark.parametrize(
    ("destinations", "found"),
    [
        ([MIRROR, TIER], {"[1]": "a Tier after a Mirror"}),
        ([MIRROR, TIER, MIRROR], {"[1]": "a Tier after a Mirror", "[2]": "a Mirror after a Mirror"}),
        ([TIER, "s3://bucket/run", 3], {"[1]": "'s3://bucket/run'", "[2]": "3"}),
        ([TIER, TIER, MIRROR], {"": "one path twice"}),
        ([TIER, checkpoint.Mirror("")], {"[1].url": "''"}),
        ([checkpoint.Mirror(b"copies")], {"[0].url": "b'copies'"}),
        ([checkpoint.Tier("/dev/shm/run", every=0), MIRROR], {"[0].every": "0"}),
    ],
)
def test_destinations_that_are_none_or_in_another_order_are_refused(tmp_path, destinations, found):
    with pytest.raises(OptionError) as caught:
        checkpoint.Manager(tmp_path, destinations=destinations)
    assert {problem.key.removeprefix("destinations"): problem.found for problem in caught.value.problems} == found
    assert all(problem.required and problem.remedy for problem in caught.value.problems)


def test_all_wrong_options_are_told_at_once(tmp_path):
    (tmp_path / "a file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    before = signal.getsignal(signal.SIGTERM), threading.active_count()
    with pytest.raises(OptionError) as caught:
        checkpoint.Manager(tmp_path / "a file", every="50", stage="background", options=3)
    assert [problem.key for problem in caught.value.problems] == ["root", "every", "stage", "options"]
    for mirror in (tmp_path, f"{tmp_path}/", tmp_path / "link"):
        with pytest.raises(
            OptionError, match=r"destinations\[0\]\.url: found .*, which is the root too; required another place"
        ):
            checkpoint.Manager(tmp_path, destinations=[checkpoint.Mirror(mirror)], stop_on=signal.SIGTERM)
    with pytest.raises(OptionError, match="root: found None; required a path or a URL"):
        checkpoint.Manager(None)
    assert (signal.getsignal(signal.SIGTERM), threading.active_count()) == before


def test_a_signal_can_be_listened_for_in_the_main_thread_alone(tmp_path):
    actual = []

    def make():
        try:
            checkpoint.Manager(tmp_path, stop_on=signal.SIGTERM)
        except OptionError as error:
            actual.append(str(error))

    thread = threading.Thread(target=make, name="mine")
    thread.start()
    thread.join()
    assert "stop_on: found a Manager that is made in the thread 'mine'; required the main thread" in actual[0]


def test_numbers_of_other_kinds_and_lists_are_taken(tmp_path):
    manager = checkpoint.Manager(
        tmp_path, every=np.int64(2), keep=checkpoint.Retention(last=torch.tensor(1), best=["loss", "min", np.int32(1)])
    )
    for step in range(1, 9):
        manager.save(np.int64(step), app_of(step), metrics={"loss": torch.tensor(abs(step - 4.0))})
    assert manager.steps() == [4, 8]


@pytest.mark.parametrize("step", ["10", 1.5, -1, None, True], ids=repr)
def test_a_step_that_is_none(tmp_path, step):
    manager = checkpoint.Manager(tmp_path)
    for call in (
        manager.save,
        lambda step, app: manager.restore(app, step=step) if step is not None else manager.save(step, app),
    ):
        with pytest.raises(OptionError, match="step: found"):
            call(step, app_of())
    assert manager.steps() == []


@pytest.mark.parametrize(
    "metrics",
    [{"loss": "n/a"}, {"loss": None}, {"loss": torch.ones(2)}, {"loss": 10**400}, {1: 2.0}, [("loss", 1.0)], 3.0],
    ids=repr,
)
def test_metrics_that_are_none(tmp_path, metrics):
    manager = checkpoint.Manager(tmp_path)
    with pytest.raises(StateError, match="metrics"):
        manager.save(1, app_of(), metrics=metrics)
    assert manager.steps() == []


@pytest.mark.parametrize("stage", ["background", None, 1])
def test_a_wrong_stage_of_async_save(tmp_path, stage):
    with pytest.raises(OptionError, match=r"stage: found .*; required one of 'now', 'lazy'"):
        checkpoint.async_save(tmp_path / "c", app_of(), stage=stage)
    checkpoint.async_save(tmp_path / "c", app_of()).result(30)


@pytest.mark.parametrize("argument", ["root", "destinations[0].url"])
def test_no_run_is_kept_in_an_archive(argument, tmp_path):
    with checkpoint.Manager(tmp_path / "run") as manager:
        manager.save(1, {"x": torch.ones(2)})
    shutil.make_archive(str(tmp_path / "runs"), "zip", tmp_path, "run")
    for url in (
        f"zip://run::file://{tmp_path}/runs.zip",
        f"zip://run::file://{tmp_path}/none.zip",
        "tar://a::s3://b/c",
    ):
        with pytest.raises(
            OptionError, match=rf"{re.escape(argument)}: found \w+://[^\n]*, in an archive, which cannot be written"
        ):
            if argument == "root":
                checkpoint.Manager(url)
            checkpoint.Manager(tmp_path / "run", destinations=[checkpoint.Mirror(url)])
    read = {"x": torch.zeros(2)}
    checkpoint.load(f"zip://run/step-00000001::file://{tmp_path}/runs.zip", read)
    assert read["x"].tolist() == [1.0, 1.0]


def test_a_root_that_a_disk_does_not_tell_of_is_no_wrong_argument(tmp_path, monkeypatch):
    """A failing disk is for the first round to report, where all ranks hear of it."""
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "run").mkdir()
    for path in ("file", "nowhere"):
        with pytest.raises(OptionError, match="which is no directory"):
            checkpoint.Manager(tmp_path / path)

    def failing(path, *args, **kwargs):
        raise OSError(errno.EIO, "Input/output error", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        checkpoint.Manager(tmp_path / "run").close()


@pytest.mark.parametrize("stage", [None, "now"])
def test_a_step_of_the_app_that_stands_still_is_told_once(tmp_path, caplog, stage):
    app = {"x": torch.ones(1), "step": 3}
    with checkpoint.Manager(tmp_path, every=2, stage=stage) as manager:
        manager.save(3, app)
        manager.save(4, {**app, "step": 4})
        manager.save(5, app)  # not due: not saved
        assert not caplog.messages
        for step in (6, 8):
            manager.save(step, app)
    (line,) = caplog.messages
    assert 'app["step"] is 3, and the step that is saved 6: after a restore the loop would resume from 3.' in line


@pytest.mark.parametrize("step", [torch.tensor(1), "first", True, None, 2])
def test_what_is_no_other_number_of_a_step_is_not_told(tmp_path, caplog, step):
    with checkpoint.Manager(tmp_path) as manager:
        manager.save(2, {"x": torch.ones(1), "step": step})
    assert not caplog.messages
