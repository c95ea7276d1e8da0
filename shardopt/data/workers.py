"""Workers of DataLoaders that go on after a signal to stop, as the job saves before it ends.

torchrun sends its signals to the process group of each rank, in which the workers are. torch's workers end by SIGTERM,
and the rank gets an error, in whatever line it is. So the save after which the job would stop does not come about.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from shardopt.runtime.signals import listened
from shardopt.world import world

_log = logging.getLogger("shardopt")


def shield_workers(loader: DataLoader[Any]) -> None:
    """Puts each worker of a loader into a process group of its own, so that signals to that of the rank pass it by.

    A worker ends as before if its rank ends it, or something sends it a signal by its number; and, on Linux, at once
    when its rank is gone. Sets `loader.worker_init_fn`, which then calls the one that it had.

    Call it on each rank before the loader is iterated. `sampler.through(loader)`, `ResumableLoader`, the Trainer's
    callback and our `Accelerator` do it by themselves where a `Manager` has `stop_on`, and `RankPosition` always.

    Args:
        loader: torch's DataLoader, or a subclass; nothing changes without workers.
    """
    loader = getattr(loader, "base_dataloader", loader)  # by which those of Accelerate read
    if loader.num_workers and not isinstance(loader.worker_init_fn, _Shield):
        loader.worker_init_fn = _Shield(loader.worker_init_fn)


def shield_if_listening(loader: Any) -> None:
    """As `shield_workers`, where the loader is a DataLoader and this process listens for a signal to stop."""
    if isinstance(loader, DataLoader) and listened():
        shield_workers(loader)


def warn_of_workers() -> bool:
    """Warns of workers of DataLoaders that a signal to this rank's process group would end; returns whether there are.

    Only where this process listens for a signal. Workers are known by the name that torch gives them.
    """
    if not listened():
        return False
    children = [each.pid for each in multiprocessing.active_children() if each.pid is not None]
    workers = [each for each in children if _is_unshielded_worker(each)]
    if workers:
        _log.warning(
            "%d workers of a DataLoader are in the process group of their rank: they get its signals too, as torchrun "
            "sends them, and a rank that waits for their batch then fails before it has saved. Call "
            "shardopt.data.shield_workers(loader) before the loader is iterated [data-position]",
            len(workers),
        )
    return bool(workers)


def _is_unshielded_worker(pid: int) -> bool:
    with suppress(OSError):  # it has ended, or this is no Linux
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        ignored = int(fields.get("SigIgn", "0"), 16)  # as where its worker_init_fn has it ignore them
        is_worker = fields.get("Name", "").startswith("pt_data_worker") and os.getpgid(pid) == os.getpgid(0)
        return is_worker and not all(ignored >> (signum - 1) & 1 for signum in listened())
    return False


class _Shield:
    """A `worker_init_fn` that leaves the rank's process group, and then calls another one. Can be pickled."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then
        self.rank = os.getpid()  # not the worker's parent, which may be a fork server

    def __call__(self, worker: int) -> None:
        os.setpgid(0, 0)
        world().thread(self._end_with_rank, "shardopt-worker", daemon=True).start()
        if self.then is not None:
            self.then(worker)

    def _end_with_rank(self) -> None:
        """Ends the worker when its rank is gone.

        What ends the group would end it otherwise. By itself it may stay for ever: with batches that nobody takes out
        of a pipe any more.
        """
        gone = select.poll()
        try:
            gone.register(os.pidfd_open(self.rank), select.POLLIN)
            gone.poll()
        except ProcessLookupError:
            pass  # by now
        except (AttributeError, OSError):  # of Linux 5.3
            return
        os._exit(1)
