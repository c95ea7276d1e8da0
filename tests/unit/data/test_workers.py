"""Workers of DataLoaders outlive the signal that stops a job, which torchrun sends to the process group of a rank."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shardopt
from shardopt import checkpoint
from shardopt.data import shield_workers
from shardopt.integrations.loader import ResumableLoader
from shardopt.runtime.signals import Listener
from tests.harness import run_ranks, run_ranks_outcomes

LOOPS = ["sampler", "loader", "shielded"]


class Pids(Dataset):
    """Each sample is the process that made it."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return os.getpid()


class Large(Dataset):
    """Samples that a worker cannot put into a pipe before somebody takes them."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return b"x" * 400_000


def opened(loop, samples, **options):
    options |= {"num_workers": 1, "prefetch_factor": 1}
    if loop == "sampler":
        sampler = shardopt.ResumableSampler(len(samples), batch_size=1)
        return sampler.through(DataLoader(samples, batch_sampler=sampler, **options))
    if loop == "loader":
        return iter(ResumableLoader(samples, batch_size=1, **options))
    loader = DataLoader(samples, **options)
    shield_workers(loader)
    shield_workers(loader)
    return iter(loader)


def begun(folder, worker):
    Path(folder, "begun").write_text(f"{worker} {os.getpid()}")


def told_in_the_middle(folder, loop, start):
    """Its process group gets SIGTERM while a loop runs, as by torchrun; returns the batches that are left."""
    os.setsid()
    told = []
    listener = Listener(signal.SIGTERM, lambda: told.append("here"), lambda: None)
    batches = opened(loop, Pids(), worker_init_fn=partial(begun, folder), multiprocessing_context=start)
    (worker,) = next(batches).tolist()
    sender = f"import os, signal; os.killpg({os.getpid()}, signal.SIGTERM)"
    subprocess.run([sys.executable, "-c", sender], start_new_session=True, check=True)
    left = [batch.tolist() for batch in batches]
    listener.close()
    return told, left == [[worker]] * 7, Path(folder, "begun").read_text() == f"0 {worker}"


@pytest.mark.parametrize(
    ("loop", "start"),
    [*((each, "fork") for each in LOOPS), pytest.param("shielded", "spawn", marks=pytest.mark.exhaustive)],
)
def test_workers_go_on_after_a_signal_to_the_group_of_their_rank(tmp_path, loop, start):
    assert run_ranks(1, told_in_the_middle, str(tmp_path), loop, start) == [(["here"], True, True)]


@pytest.fixture
def listening():
    listener = Listener(signal.SIGTERM, lambda: None, lambda: None)
    yield
    listener.close()


def test_a_worker_ends_when_its_rank_says_so(listening):
    batches = opened("sampler", Pids())
    (worker,) = next(batches).tolist()
    process = next(each for each in torch.multiprocessing.active_children() if each.pid == worker)
    process.terminate()
    process.join(20)
    assert process.exitcode in (0, -signal.SIGTERM)  # the second if a fork server has made it


def leave(folder, end):
    batches = opened("shielded", Large(), worker_init_fn=partial(begun, folder), multiprocessing_context="fork")
    next(batches)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


@pytest.mark.parametrize("end", ["killed", "left"])
def test_a_worker_ends_with_its_rank_whatever_it_has_still_to_hand_over(tmp_path, end):
    run_ranks_outcomes(1, leave, str(tmp_path), end)
    _, worker = (tmp_path / "begun").read_text().split()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_changes_without_workers_or_a_listener():
    for workers in (0, 1):
        sampler = shardopt.ResumableSampler(8, batch_size=1)
        loader = DataLoader(Pids(), batch_sampler=sampler, num_workers=workers)
        next(sampler.through(loader))
        assert loader.worker_init_fn is None
    loader = DataLoader(Pids())
    shield_workers(loader)
    assert loader.worker_init_fn is None


def test_a_manager_that_listens_tells_once_of_workers_that_its_signal_would_end(tmp_path, caplog):
    loader = DataLoader(Pids(), num_workers=1, multiprocessing_context="fork")
    with checkpoint.Manager(tmp_path / "a") as manager:
        batches = iter(loader)
        next(batches)
        manager.save(1, {"step": 1})
    assert caplog.messages == []
    with checkpoint.Manager(tmp_path / "b", stop_on=signal.SIGTERM) as manager:
        for step in (1, 2):
            manager.save(step, {"step": step})
    (line,) = caplog.messages
    assert "1 workers of a DataLoader are in the process group of their rank" in line
    del batches
    shield_workers(loader)
    batches = iter(loader)
    next(batches)
    with checkpoint.Manager(tmp_path / "c", stop_on=signal.SIGTERM) as manager:
        manager.save(1, {"step": 1})
    assert caplog.messages == [line]


def ignore_sigterm(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_workers_that_ignore_the_signal_are_not_told_of(tmp_path, caplog):
    batches = iter(DataLoader(Pids(), num_workers=1, multiprocessing_context="fork", worker_init_fn=ignore_sigterm))
    next(batches)
    with checkpoint.Manager(tmp_path, stop_on=signal.SIGTERM) as manager:
        manager.save(1, {"step": 1})
    assert caplog.messages == []
