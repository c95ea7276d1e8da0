"""Whatever fails on the way into a save in the background: nothing is left pending, and the next save works."""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.writing import pending as pending_saves
from shardopt.checkpoint.saving.writing import staging
from shardopt.errors import StateError
from shardopt.runtime.staging_fence import wait_for_copies

# A generator that is closed is called too, where nobody can take what it raises.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PACKAGE = str(Path(shardopt.__file__).parent)
STAGES = ("now", "lazy")


class Injected(Exception):
    """The error that is raised on purpose."""


@contextmanager
def each_call(visit):
    """`visit(n, frame)` at the n-th call, counted from 1, of a function of the package, or of `threading` by it.

    Of this thread only. What it raises, the function raises.
    """
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        ours, by_us = (each.f_code.co_filename.startswith(PACKAGE) for each in (frame, frame.f_back))
        if event == "call" and (ours or (by_us and frame.f_code.co_filename == threading.__file__)):
            count += 1
            visit(count, frame)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def small_app():
    model = torch.nn.Linear(2, 2)
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1, momentum=0.9)
    optimizer.init_state()
    return {"model": model, "optimizer": optimizer, "step": 1}


def step(app):
    for each in app["model"].parameters():  # no backward, which torch 2.11 forbids in a fork
        each.grad = torch.ones_like(each)
    app["optimizer"].step()


def calls_of_sound_save(stage, url):
    """Who calls what from where, at each call of a save that nothing is wrong with."""
    for number in range(2):  # the first one fills caches
        calls = []
        app, saver = small_app(), AsyncSaver()

        def note(n, frame, calls=calls):
            calls.append((frame.f_code.co_qualname, frame.f_back.f_code.co_qualname, frame.f_back.f_lineno))

        with each_call(note):
            pending = saver.save(f"{url}-{number}", app, SaveTerms(durable=False), stage=stage)
        pending.result(30)
        saver.close()
    return calls


def first_of_each(calls):
    """The numbers of the calls that are the first from where they are made."""
    return sorted({call: n for n, call in reversed([*enumerate(calls, 1)])}.values())


def fail_at(n, stage, error, url):
    """A save in which the n-th call raises, and a sound one after it; whether the first one failed."""
    app, saver = small_app(), AsyncSaver()

    def visit(count, frame):
        if count == n:
            raise error("on purpose")

    failed = False
    try:
        with each_call(visit):
            pending = saver.save(f"{url}-first", app, SaveTerms(durable=False), stage=stage)
        assert pending.done.wait(30)
        pending.result(0)
    except error:
        failed = True
    wait_for_copies()
    step(app)
    again = saver.save(f"{url}-second", app, SaveTerms(durable=False), stage=stage)
    again.result(30)
    saver.close()
    assert not app["optimizer"]._optimizer_step_pre_hooks
    step(app)
    assert not pending_saves._tracked
    assert checkpoint.verify(f"{url}-second").ok
    return failed


class TakesNoHooks(torch.optim.SGD):
    """As wrappers of other libraries that call themselves optimizers."""

    def register_step_pre_hook(self, hook):
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_takes_no_hooks_fails_the_save_each_time(stage, tmp_path):
    app, saver = small_app(), AsyncSaver()
    bad = app | {"other": TakesNoHooks(torch.nn.Linear(1, 1).parameters(), 0.1)}
    for name in ("one", "two"):
        with pytest.raises(RuntimeError, match="no hooks here"):
            saver.save(tmp_path / name, bad, stage=stage).result(30)
    step(app)
    saver.save(tmp_path / "three", app, stage=stage).result(30)
    saver.close()
    assert not pending_saves._tracked


@pytest.mark.parametrize("metrics", [{"loss": "n/a"}, {"loss": 1.0, "more": torch.ones(2)}, 0.5], ids=str)
def test_metrics_that_are_no_numbers_are_named(metrics, tmp_path):
    saver = AsyncSaver()
    with pytest.raises(StateError, match=r"metrics(\.loss|\.more)?: found .*; required .*number"):
        saver.save(tmp_path / "one", {"x": 1}, metrics=metrics).result(30)
    saver.close()


def test_a_forked_child_has_nothing_of_a_running_save(tmp_path, monkeypatch):
    """It may step, save and end; the parent's save continues."""
    app, saver, gate = small_app(), AsyncSaver(), threading.Event()
    copy = staging.copy_on_host
    monkeypatch.setattr(staging, "copy_on_host", lambda *args: (gate.wait(30), copy(*args)))
    pending = saver.save(tmp_path / "one", app, stage="lazy")
    child = os.fork()
    if child == 0:
        try:
            gate.set()
            step(app)
            saver.save(tmp_path / "child", app, SaveTerms(durable=False)).result(30)
            os._exit(0 if not pending_saves._tracked else 1)
        finally:
            os._exit(2)
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    assert ended == (child, 0)
    assert not pending.done
    gate.set()
    pending.result(30)
    saver.close()
    assert checkpoint.verify(tmp_path / "one").ok and checkpoint.verify(tmp_path / "child").ok


def fail_at_each(stage, error, tmp_path, numbers):
    calls = calls_of_sound_save(stage, tmp_path / "sound")
    names = {name for name, _, _ in calls}
    assert {"AsyncSaver.save", "AsyncSaver._stage", "hold_steps", "PendingSave.__init__", "Thread.start"} <= names
    threads, failed, struck = threading.active_count(), 0, numbers(calls)
    for n in struck:
        try:
            failed += fail_at(n, stage, error, str(tmp_path / str(n)))
        except BaseException as failure:
            raise AssertionError(f"after a failure at call {n}, {calls[n - 1]}") from failure
    assert threading.active_count() == threads
    assert failed >= 0.9 * len(struck)  # a few are made for what may fail
    print(f"{len(struck)} failures of {len(calls)} calls, of which {failed} failed the save")


@pytest.mark.parametrize(("stage", "error"), [("now", KeyboardInterrupt), ("lazy", Injected)], ids=STAGES)
def test_a_failure_at_a_call_of_each_kind_on_the_way_in(stage, error, tmp_path):
    """Each kind of call under the stages that have it, in turn under the one and under the other if both have it."""
    both = set.intersection(*({*calls_of_sound_save(each, tmp_path / each)} for each in STAGES))
    elsewhere = {*sorted(both)[1 - STAGES.index(stage) :: 2]}
    fail_at_each(
        stage, error, tmp_path, lambda calls: [n for n in first_of_each(calls) if calls[n - 1] not in elsewhere]
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
def test_a_failure_at_any_call_on_the_way_in(stage, error, tmp_path):
    fail_at_each(stage, error, tmp_path, lambda calls: range(1, len(calls) + 1))
