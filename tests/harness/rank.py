"""The process of one rank. The fork server has imported this module, and torch with it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.faults import Fault, watched
from tests.harness.outcome import Outcome
from tests.harness.traces import Traces

LEAVE = b"leave"


@dataclass(frozen=True)
class Job:
    """The job of a rank. `call` is the pickled (function, args, kwargs); `stays`: others may follow in its process."""

    world_size: int
    folder: Path
    call: bytes
    backend: str | None
    faults: Sequence[Fault]
    trace: Sequence[str]
    environment: dict[str, str]
    warning_filters: Sequence[Any]
    directory: str
    stays: bool = False
    looks_at_names: bool = False

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def stack(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.stack"


def rank_main(rank: int, job: Job, connection: Connection) -> None:
    """Runs the job's function, reports its outcome, then waits: for another job, for LEAVE, or to be killed.

    No rank leaves before all have reported, so that none of them sees a connection close that another has done with.
    """
    threading.Thread(target=die_with_parent, daemon=True).start()
    _set_up_process(rank, job)
    traces = Traces(job.looks_at_names)
    while True:
        _set_up_call(rank, job)
        outcome = _outcome(rank, job, traces)
        sys.stdout.flush()
        sys.stderr.flush()
        outcome.stays = job.stays and outcome.ok and not traces.left()
        connection.send_bytes(outcome.to_bytes())
        message = connection.recv_bytes()  # comes when every rank has returned
        if message == LEAVE:
            break
        job = pickle.loads(message)
    if dist.is_initialized():
        dist.barrier()  # without it some gloo jobs abort on their way out
        dist.destroy_process_group()


def die_with_parent() -> None:
    """Kills this rank once its test process is gone: the fork server would keep it, and it the fork server."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _set_up_process(rank: int, job: Job) -> None:
    output = os.open(job.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    # Unbuffered, and open for as long as the process lives: the handler writes to its descriptor.
    faulthandler.register(signal.SIGUSR1, file=os.open(job.stack(rank), os.O_WRONLY | os.O_CREAT), all_threads=True)
    torch.set_num_threads(1)


def _set_up_call(rank: int, job: Job) -> None:
    os.chdir(job.directory)
    os.environ.clear()
    os.environ.update(job.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(job.world_size), LOCAL_WORLD_SIZE=str(job.world_size))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever this machine calls itself
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(job.warning_filters):
        # The interpreter's own filters hold plain text where those made in Python hold compiled patterns.
        message, module = (getattr(pattern, "pattern", pattern) or "" for pattern in (message, module))
        warnings.filterwarnings(action, message, category, module, line)


def _outcome(rank: int, job: Job, traces: Traces) -> Outcome[Any]:
    outcome: Outcome[Any] = Outcome(rank)
    try:
        function, args, kwargs = pickle.loads(job.call)
        if job.backend is not None and not (job.stays and dist.is_initialized()):
            store = f"file://{job.folder / 'store'}"
            dist.init_process_group(job.backend, init_method=store, rank=rank, world_size=job.world_size)
            if job.faults:
                dist.barrier()  # a kill in the first call would otherwise find others that still connect to this rank
        if job.stays:
            traces.begin()
        with watched([fault for fault in job.faults if fault.rank == rank], job.trace) as watch:
            try:
                outcome.value = function(*args, **kwargs)
            finally:
                outcome.at_seconds = time.monotonic()
                outcome.calls, outcome.struck = tuple(watch.calls), watch.struck
    except BaseException as error:
        outcome.error = error
        outcome.at_seconds = outcome.at_seconds or time.monotonic()
        outcome.traceback = "".join(traceback.format_exception(error))
    return outcome
