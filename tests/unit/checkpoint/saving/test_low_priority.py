"""Who writes beside the training gives way to it, if that costs the training nothing itself."""

import os
import sys
import threading

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.saving.writing import low_priority
from shardopt.errors import CheckpointError
from tests.harness import Fault
from tests.harness.faults import watched

LARGE = {"a": torch.arange(3 << 20), "b": torch.ones(5 << 20, dtype=torch.bfloat16), "step": 3}
SMALL = {f"{i}": torch.full((1 << 16,), i) for i in range(40)} | {"step": 3}


@pytest.fixture
def writers(monkeypatch):
    """Notes of each write of a file: the thread, and its niceness."""
    noted, write = [], checkpoint.save.__globals__["write_files"]

    def noting(*args):
        noted.append((threading.current_thread().name, os.getpriority(os.PRIO_PROCESS, 0)))
        return write(*args)

    monkeypatch.setitem(checkpoint.save.__globals__, "write_files", noting)
    return noted


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
@pytest.mark.parametrize(
    ("app", "in_background", "thread"),
    [(LARGE, True, "shardopt-write"), (SMALL, True, "shardopt-save"), (LARGE, False, "MainThread")],
)
@pytest.mark.parametrize("durable", [True, False])
def test_large_tensors_are_written_at_low_priority_in_the_background(
    tmp_path, writers, app, in_background, thread, durable
):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if in_background:
        checkpoint.async_save(tmp_path / "a", {"x": app}, durable=durable).result()
    else:
        checkpoint.save(tmp_path / "a", {"x": app}, durable=durable)
    assert writers == [(thread, max(before, 13) if thread == "shardopt-write" else before)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    found = {name: torch.zeros_like(value) for name, value in app.items() if name != "step"}
    checkpoint.load(tmp_path / "a", {"x": found | {"step": 0}})
    assert all(torch.equal(found[name], app[name]) for name in found)


@pytest.mark.parametrize("operation", ["os:writev", "os:fsync"])
def test_its_errors_are_those_of_the_save(tmp_path, operation):
    with watched([Fault(0, operation, action="EIO")], []):
        pending = checkpoint.async_save(tmp_path / "a", LARGE, durable=operation == "os:fsync")
        pending.done.wait()
    with pytest.raises(CheckpointError, match="Input/output error"):
        pending.result()
    writing = [thread for thread in threading.enumerate() if thread.name == "shardopt-write"]
    for thread in writing:
        thread.join(10)
    assert not any(thread.is_alive() for thread in writing)


def test_where_no_thread_can_be_had_the_save_writes_itself(tmp_path, monkeypatch, writers):
    start = threading.Thread.start

    def limited(thread):
        if thread.name == "shardopt-write":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    checkpoint.async_save(tmp_path / "a", LARGE, durable=False).result()
    assert [thread for thread, _ in writers] == ["shardopt-save"]
    assert checkpoint.verify(tmp_path / "a").ok


def test_of_how_much(tmp_path, writers, monkeypatch):
    """Mixed sizes: small tensors among large ones do not matter, a large one among thousands of small ones does."""
    few = {"large": torch.zeros(6 << 20)} | {f"{i}": torch.ones(3) for i in range(12)}
    checkpoint.async_save(tmp_path / "a", few, durable=False).result()
    many = {"large": torch.zeros(6 << 20)} | {f"{i}": torch.ones(3) for i in range(60)}
    checkpoint.async_save(tmp_path / "b", many, durable=False).result()
    monkeypatch.setattr(low_priority, "_LEAST_BYTES", 64 << 20)
    checkpoint.async_save(tmp_path / "c", few, durable=False).result()
    assert [thread for thread, _ in writers] == ["shardopt-write", "shardopt-save", "shardopt-save"]
