"""One process that listens for a signal: what it does with it, and what it leaves alone."""

import ctypes
import itertools
import math
import os
import signal
import threading
import time

import pytest

from shardopt import checkpoint
from shardopt.checkpoint.run import stopping
from shardopt.checkpoint.run.stopping import Stop
from shardopt.errors import CheckpointExistsError
from shardopt.ranks import Ranks
from shardopt.runtime import signals
from shardopt.runtime.signals import Listener
from shardopt.world import world
from tests.harness import run_ranks_outcomes

ALONE = Ranks(None)


@pytest.fixture
def stop():
    stop = Stop(checkpoint.Preemption(signal.SIGUSR2, 7, 100.0))
    yield stop
    stop.close()


def test_without_a_signal_it_continues(stop):
    assert not any(stop.after(step, ALONE) for step in range(100))


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_a_deadline_may_be_as_late_as_one_likes(seconds):
    timer = world().timer(seconds, lambda: None, "late")
    timer.start()
    timer.join(0.02)
    assert timer.is_alive()  # and has raised nothing
    timer.cancel()


class Interrupted:
    """A halt whose second question is interrupted once."""

    def __init__(self):
        self.places = []

    def at(self, place, wanted):
        self.places.append(place)
        if self.places == [1, 2]:
            raise KeyboardInterrupt
        return 3 if place > 2 else None


def test_a_question_that_was_interrupted_is_asked_again(stop):
    """Or this rank would count fewer than the others, and stop after another step."""
    stop._deadline_runs.acquire()  # which would end this process
    halt = Interrupted()
    stop._halt = ALONE, halt
    assert not stop.after(1, ALONE)
    with pytest.raises(KeyboardInterrupt):
        stop.after(2, ALONE)
    assert not stop.after(2, ALONE)
    assert stop.after(3, ALONE) and stop.after(3, ALONE)
    assert halt.places == [1, 2, 2, 3]
    stop._stops_at = None  # so that it can be closed


def test_other_ranks_have_a_halt_of_their_own(stop):
    """As after `init_process_group` with another size, in the same process."""
    others = Ranks(None)
    assert not stop.after(1, ALONE)
    assert not stop.after(2, others) and stop._halt[0] is others


def test_ranks_are_waited_for_as_long_as_the_manager_says(tmp_path, monkeypatch):
    waited, halt = [], Ranks.halt
    monkeypatch.setattr(Ranks, "halt", lambda self, what: waited.append(self.deadline_seconds) or halt(self, what))
    with checkpoint.Manager(
        tmp_path, stop_on=signal.SIGUSR2, options=checkpoint.SaveOptions(deadline_seconds=3.0)
    ) as manager:
        manager.save(1, {"x": 1})
    assert waited == [3.0]


def test_what_the_signal_did_before_it_does_again():
    before = signal.getsignal(signal.SIGUSR2)
    held = threading.active_count(), len(os.listdir("/proc/self/fd"))
    stop = Stop(checkpoint.Preemption(signal.SIGUSR2, 7, 100.0))
    assert signal.getsignal(signal.SIGUSR2) != before
    stop.close()
    assert signal.getsignal(signal.SIGUSR2) == before
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == held


# Several that listen, closed in any order, and handlers of the program's own in between.

SIGNALS = (signal.SIGUSR2, signal.SIGUSR2, signal.SIGHUP)


@pytest.fixture
def as_before():
    """Nothing that listens is left behind, and both signals do what they did."""
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in set(SIGNALS)}
    held = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    assert {signum: signal.getsignal(signum) for signum in before} == dict.fromkeys(before, signal.SIG_IGN)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == held
    assert signal.set_wakeup_fd(-1) == -1
    for signum, handler in before.items():
        signal.signal(signum, handler)


class Ears:
    """Listens like a `Stop` that continues after the signal."""

    def __init__(self, signum):
        self.signum, self.noted, self.heard = signum, 0, threading.Semaphore(0)
        self.listener = Listener(signum, self.note, self.heard.release)

    def note(self):
        self.noted += 1

    def hears(self):
        before = self.noted
        signal.raise_signal(self.signum)
        assert self.heard.acquire(timeout=5)
        return self.noted == before + 1

    def is_deaf(self):
        return not self.heard.acquire(blocking=False)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_listeners_are_closed_in_any_order(as_before, order):
    ears = [Ears(signum) for signum in SIGNALS]
    still = set(range(3))
    for closed in order:
        for i in still:
            assert ears[i].hears()
            for other in still - {i}:
                if ears[other].signum == ears[i].signum:
                    assert ears[other].heard.acquire(timeout=5)
        ears[closed].listener.close()
        still.discard(closed)
        signal.raise_signal(ears[closed].signum)  # another listener hears it, or nothing happens
        for other in still:
            if ears[other].signum == ears[closed].signum:
                assert ears[other].heard.acquire(timeout=5)
    assert all(each.is_deaf() for each in ears)


@pytest.mark.parametrize("order", list(itertools.permutations(["first", "second", "program"])), ids="-".join)
@pytest.mark.parametrize("chains", [True, False])
def test_a_handler_that_the_program_puts_in_between_is_kept_and_may_be_taken_away(as_before, order, chains):
    calls = []
    first = Ears(signal.SIGUSR2)
    below = signal.getsignal(signal.SIGUSR2)

    def of_program(signum, frame):
        calls.append(signum)
        if chains:
            below(signum, frame)

    signal.signal(signal.SIGUSR2, of_program)
    second = Ears(signal.SIGUSR2)
    assert second.hears() and first.noted == 1 and not calls
    for name in order:
        if name == "program":  # as a context manager does
            signal.signal(signal.SIGUSR2, below)
        else:
            {"first": first, "second": second}[name].listener.close()
            left = [each for each in (first, second) if each.listener in signals._open]
            now = signal.getsignal(signal.SIGUSR2)
            calls.clear()
            before = sum(each.noted for each in left)
            signal.raise_signal(signal.SIGUSR2)
            noted = sum(each.noted for each in left) - before
            if now is of_program:
                assert calls == [signal.SIGUSR2] and noted == (len(left) if chains else 0)
            else:
                assert calls == [] and noted == len(left)
            for each in left:  # a thread hears in any case
                while each.heard.acquire(timeout=0.02):
                    pass
    if order[-1] != "program":
        assert signal.getsignal(signal.SIGUSR2) in (signal.SIG_IGN, below)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def test_what_an_event_loop_is_woken_by_is_handed_on(as_before):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    ears = [Ears(signal.SIGUSR2), Ears(signal.SIGHUP)]
    assert ears[0].hears()
    assert os.read(reader, 10) == bytes([signal.SIGUSR2])
    for each in ears:
        each.listener.close()
    assert signal.set_wakeup_fd(-1) == writer
    os.close(reader)
    os.close(writer)


def test_closing_does_not_wait_for_children_that_were_forked(as_before):
    """Who has the pipe open too: workers of a DataLoader."""
    ears = Ears(signal.SIGUSR2)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    begin = time.monotonic()
    ears.listener.close()
    assert time.monotonic() - begin < 10
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def program(root, case, log):
    """Runs in a process of its own; says where it ended."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    if case == "forked":
        manager = checkpoint.Manager(root, every=100, stop_on=signal.SIGTERM)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        time.sleep(0.2)
        assert not manager.should_save(1)
        manager.close()
    elif case == "stuck":
        checkpoint.Manager(root, stop_on=checkpoint.Preemption(signal.SIGTERM, exit_code=0, seconds=0.5))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        mutex = ctypes.create_string_buffer(64)  # zeros are a mutex that is not locked
        for _ in range(2):  # in C, from which no signal leads back
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    else:
        earlier = checkpoint.Manager(f"{root}-other", every=100, stop_on=signal.SIGTERM)
        with checkpoint.Manager(root, every=100, stop_on=signal.SIGTERM) as manager:
            earlier.close()  # the first one made is closed first
            for step in range(1, 1000):
                if step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                manager.save(step, {"step": step})
    return "the last line"


@pytest.mark.parametrize(("case", "steps"), [("told", [5]), ("forked", []), ("stuck", [])])
def test_programs(tmp_path, case, steps):
    log = tmp_path / "log"
    (ended,) = run_ranks_outcomes(1, program, str(tmp_path / "root"), case, str(log), backend=None)
    assert ended.value == ("the last line" if case == "forked" else None), ended
    assert ended.exit_code == (1 if case == "stuck" else None)
    if case == "told":
        assert isinstance(ended.error, SystemExit) and ended.error.code == 143
    if case == "stuck":
        assert "asked to stop by SIGTERM, but not done after 0.5 s" in log.read_text()
    assert checkpoint.Manager(tmp_path / "root").steps() == steps


@pytest.fixture
def no_deadline(monkeypatch):
    """Nothing ends this process, which continues after the signal, when the time for a last save is over."""
    monkeypatch.setattr(Stop, "_start_deadline", lambda self: None)
    yield
    for listener in tuple(signals._open):  # a Manager that has stopped listens until its process ends
        listener.close()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("code", [None, 7])
def test_any_of_several_signals_stops(tmp_path, no_deadline, sent, code):
    several = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(each) for each in several]
    stop_on = several if code is None else checkpoint.Preemption(several, exit_code=code)
    with checkpoint.Manager(tmp_path, every=100, stop_on=stop_on) as manager:
        manager.save(1, {"x": 1})
        signal.raise_signal(sent)
        with pytest.raises(SystemExit) as left:
            manager.save(2, {"x": 1})
        assert left.value.code == (128 + sent if code is None else code)
        assert manager.steps() == [2]
    for each, handler in zip(several, before, strict=True):
        signal.signal(each, handler)


def test_a_stop_at_a_step_that_exists_logs_that_its_metrics_cannot_be_written(tmp_path, no_deadline, caplog):
    before = signal.getsignal(signal.SIGTERM)
    checkpoint.Manager(tmp_path, every=5).save(5, {"x": 5})
    with checkpoint.Manager(tmp_path, every=5, stop_on=signal.SIGTERM) as manager:
        manager.restore({"x": 0})
        (tmp_path / "step-00000005.metrics.json").mkdir()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            manager.save(5, {"x": 5}, metrics={"loss": 1.0})
    assert "the metrics of step 5 were not added" in caplog.text
    signal.signal(signal.SIGTERM, before)


def test_a_mirror_that_cannot_be_read_keeps_no_metrics_out_of_the_root_at_a_stop(tmp_path, no_deadline, caplog):
    before, mirror = signal.getsignal(signal.SIGTERM), checkpoint.Mirror(tmp_path / "copies")
    options = {"every": 5, "destinations": [mirror]}
    with checkpoint.Manager(tmp_path / "run", **options) as manager:
        manager.save(5, {"x": 5})
    with checkpoint.Manager(tmp_path / "run", **options, stop_on=signal.SIGTERM) as manager:
        manager.restore({"x": 0})
        manager.wait()
        (tmp_path / "copies/step-00000005.metrics.json").mkdir()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            manager.save(5, {"x": 5}, metrics={"loss": 1.0})
    assert "the metrics of step 5 were not added" in caplog.text
    (tmp_path / "copies/step-00000005.metrics.json").rmdir()
    assert checkpoint.Manager(tmp_path / "run").metrics(5) == {"loss": 1.0}
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("restored", [False, True])
def test_a_stop_at_a_step_that_exists_does_not_say_it_is_saved(tmp_path, no_deadline, caplog, restored):
    before = signal.getsignal(signal.SIGTERM)
    with checkpoint.Manager(tmp_path, every=5, stop_on=signal.SIGTERM) as manager:
        for step in (5, 10):
            manager.save(step, {"x": step})
        if restored:
            manager.restore({"x": 0})
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(CheckpointExistsError, match="steps must rise over all phases"):
            manager.save(5, {"x": 15})  # of a second phase, which counts its own steps
        assert "stop requested" not in caplog.text
        with pytest.raises(SystemExit):
            manager.save(10, {"x": 10})
        assert "stop requested: already saved step 10, exiting" in caplog.text
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("on_tier", [False, True])
def test_a_stop_in_a_phase_that_counts_anew_saves_its_step_and_says_how_to_resume_it(
    tmp_path, no_deadline, caplog, on_tier
):
    before, tiers = signal.getsignal(signal.SIGTERM), [checkpoint.Tier(tmp_path / "tier", every=1)] if on_tier else []
    options = {"every": 1000 if on_tier else 100, "stage": None if on_tier else "now", "destinations": tiers}
    with checkpoint.Manager(tmp_path / "run", **options, stop_on=signal.SIGTERM) as manager:
        manager.save(200, {"x": 1})
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            manager.save(30, {"x": 2})
        assert manager.steps() == ([30] if on_tier else [30, 200])
    told = [record for record in caplog.records if "restore(app, step=30)" in record.getMessage()]
    assert [record.levelname for record in told] == ["ERROR"]
    with checkpoint.Manager(tmp_path / "run", **options) as manager:
        app = {"x": 0}
        resumed = manager.restore(app)
        assert f"others step {resumed} " in told[0].getMessage() and app["x"] == 1
        assert manager.restore(app, step=30) == 30 and app["x"] == 2
    with checkpoint.Manager(tmp_path / "run", **options) as manager:
        assert manager.restore(app) == 30
    signal.signal(signal.SIGTERM, before)


def test_the_first_of_several_signals_says_how_it_ends(tmp_path, no_deadline):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGUSR1)]
    with checkpoint.Manager(tmp_path, stop_on=[signal.SIGINT, signal.SIGUSR1]) as manager:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit) as left:
            manager.save(1, {"x": 1})
        assert left.value.code == 128 + signal.SIGUSR1
    for each, handler in zip((signal.SIGINT, signal.SIGUSR1), before, strict=True):
        signal.signal(each, handler)


def test_a_warning_says_that_managers_with_stop_on_are_used_in_turns(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(stopping, "_warned_of_turns", False)
    made = [checkpoint.Manager(tmp_path / name, stop_on=signal.SIGTERM) for name in ("left", "generator", "critic")]
    full = checkpoint.Manager(tmp_path / "full")
    for manager in (*made, full):  # the first is not used any more, as after a training that was broken off
        manager.save(1, {"x": 1})
    assert "in turns" not in caplog.text
    for step in (2, 3):
        for manager in (*made[1:], full):
            manager.save(step, {"x": 1})
    assert caplog.text.count("two Managers with stop_on are used in turns") == 1
    assert made[1].steps() == full.steps() == [1, 2, 3]
    for manager in (*made, full):
        manager.close()


def test_several_signals_do_again_what_they_did_before(tmp_path):
    several = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(each) for each in several]
    held = threading.active_count(), len(os.listdir("/proc/self/fd"))
    checkpoint.Manager(tmp_path, stop_on=several).close()
    assert [signal.getsignal(each) for each in several] == before
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == held


def test_ctrl_c_leaves_the_processes_that_load_data_alone(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    reader, writer = os.pipe()
    with checkpoint.Manager(tmp_path, stop_on=signal.SIGINT):
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)
            os.write(writer, b"1")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)
    assert signal.getsignal(signal.SIGINT) == before
