"""Workers of DataLoaders outlive the signal that stops a job, which torchrun sends to all processes of a rank."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shardopt
from shardopt.data import shield_workers
from shardopt.integrations.loader import ResumableLoader
from shardopt.runtime.signals import Listener


class Pids(Dataset):
    """Each sample is the process that made it."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return os.getpid()


def told(pid, signum):
    """Sends a signal from a process that is not the worker's rank."""
    subprocess.run([sys.executable, "-c", f"import os; os.kill({pid}, {int(signum)})"], check=True)


@pytest.fixture
def listening():
    listener = Listener(signal.SIGUSR1, lambda: None, lambda: None)
    yield
    listener.close()


def over_sampler(**options):
    sampler = shardopt.ResumableSampler(8, batch_size=1)
    return sampler.through(DataLoader(Pids(), batch_sampler=sampler, num_workers=1, prefetch_factor=1, **options))


def over_loader(**options):
    return iter(ResumableLoader(Pids(), batch_size=1, num_workers=1, prefetch_factor=1, **options))


def shielded(**options):
    loader = DataLoader(Pids(), num_workers=1, prefetch_factor=1, **options)
    shield_workers(loader)
    shield_workers(loader)
    return iter(loader)


def begun(folder, worker):
    torch.save(os.getpid(), f"{folder}/{worker}")


@pytest.mark.parametrize(
    ("open_", "start"), [(over_sampler, "fork"), (over_loader, None), (shielded, None), (shielded, "forkserver")]
)
def test_workers_go_on_after_signals_and_call_the_programs_own_function(tmp_path, listening, open_, start):
    batches = open_(worker_init_fn=partial(begun, str(tmp_path)), multiprocessing_context=start)
    (worker,) = next(batches).tolist()
    assert torch.load(tmp_path / "0") == worker
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        told(worker, signum)
    assert [batch.tolist() for batch in batches] == [[worker]] * 7


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_a_worker_ends_when_its_rank_says_so(listening, start):
    batches = over_sampler(multiprocessing_context=start)
    (worker,) = next(batches).tolist()
    process = next(each for each in torch.multiprocessing.active_children() if each.pid == worker)
    told(worker, signal.SIGTERM)
    assert process.is_alive()
    process.terminate()
    process.join(20)
    assert process.exitcode == 0


def test_nothing_changes_without_workers_or_a_listener():
    for workers in (0, 1):
        sampler = shardopt.ResumableSampler(8, batch_size=1)
        loader = DataLoader(Pids(), batch_sampler=sampler, num_workers=workers)
        next(sampler.through(loader))
        assert loader.worker_init_fn is None
    loader = DataLoader(Pids())
    shield_workers(loader)
    assert loader.worker_init_fn is None
