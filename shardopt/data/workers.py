"""Workers of DataLoaders that go on after a signal to stop, as the job saves before it ends.

torchrun, Slurm and others send a signal to all processes of a rank. A worker that it ends makes torch raise an error in
the rank, wherever that is, and the save after which the job would stop does not come about.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from typing import Any

from torch.utils.data import DataLoader

from shardopt.runtime.signals import listened
from shardopt.world import world


def shield_workers(loader: DataLoader[Any]) -> None:
    """Has the workers of a loader go on after SIGTERM and the signals of `stop_on`, until their own rank ends them.

    Sets `loader.worker_init_fn`, which then calls the one that it had. Call it on each rank after the `Manager` is made
    and before the loader is iterated. `sampler.through(loader)`, `ResumableLoader` and the integrations do it by
    themselves. Without workers, and where the system cannot tell who has sent a signal (macOS), nothing changes.

    Args:
        loader: torch's DataLoader, or a subclass.
    """
    loader = getattr(loader, "base_dataloader", loader)  # by which those of Accelerate read
    if loader.num_workers and hasattr(signal, "sigwaitinfo"):
        before = loader.worker_init_fn
        then = before.then if isinstance(before, _Shield) else before
        loader.worker_init_fn = _Shield(listened() | {signal.SIGTERM}, then)


def shield_if_listening(loader: Any) -> None:
    """As `shield_workers`, where the loader is a DataLoader and this process listens for a signal to stop."""
    if isinstance(loader, DataLoader) and listened():
        shield_workers(loader)


class _Shield:
    """A `worker_init_fn`: blocks signals, takes them in a thread, and then calls another one. Can be pickled."""

    def __init__(self, signals: Collection[int], then: Callable[[int], None] | None) -> None:
        self.signals, self.then = frozenset(signals), then
        self.rank = os.getpid()  # not the worker's parent, which may be a fork server

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        world().thread(self._wait_for_rank, "shardopt-signals", daemon=True).start()
        if self.then is not None:
            self.then(worker)

    def _wait_for_rank(self) -> None:
        while signal.sigwaitinfo(self.signals).si_pid != self.rank:
            pass
        os._exit(0)  # as a worker of torch's ends if its rank, which gives up waiting for it, sends SIGTERM
