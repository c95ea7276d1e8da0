"""One process that listens for a signal: what it does with it, and what it leaves alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardopt import checkpoint
from shardopt.ranks import Ranks
from shardopt.stopping import Stop

ALONE = Ranks(None)
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def stop():
    stop = Stop(signal.SIGUSR2, 7, 100.0)
    yield stop
    stop.close()


def test_untold_it_goes_on(stop):
    assert not any(stop.after(step, ALONE) for step in range(100))


def test_what_the_signal_did_before_it_does_again():
    before = signal.getsignal(signal.SIGUSR2)
    held = threading.active_count(), len(os.listdir("/proc/self/fd"))
    stop = Stop(signal.SIGUSR2, 7, 100.0)
    assert signal.getsignal(signal.SIGUSR2) != before
    stop.close()
    assert signal.getsignal(signal.SIGUSR2) == before
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == held


PROGRAM = """
import ctypes, os, signal, sys, threading, time
from shardopt import checkpoint

root, case = sys.argv[1:]
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
    manager = checkpoint.Manager(root, stop_on=signal.SIGTERM, exit_code=0, stop_seconds=0.5)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    mutex = ctypes.create_string_buffer(64)  # zeros are a mutex that is not locked
    for _ in range(2):  # in C, from which no signal leads back
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
else:
    with checkpoint.Manager(root, every=100, stop_on=signal.SIGTERM) as m:
        for step in range(1, 1000):
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            m.save(step, {"step": step})
print("the last line")
"""


@pytest.mark.parametrize(("case", "code", "steps"), [("told", 143, [5]), ("forked", 0, []), ("stuck", 1, [])])
def test_programs(tmp_path, case, code, steps):
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "root"), case],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        timeout=100,
    )
    assert ended.returncode == code, ended.stderr
    assert checkpoint.Manager(tmp_path / "root").steps() == steps
    assert ended.stdout == ("the last line\n" if case == "forked" else "")
    if case == "stuck":
        assert "told to stop by SIGTERM, and not done with it after 0.5 s" in ended.stderr
        assert time.monotonic() - begin < 60
