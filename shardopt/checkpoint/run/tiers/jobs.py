"""What is begun on the tiers of a run with each commit, done one after the other in a thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardopt.checkpoint.hosts.hosts import Hosts
from shardopt.checkpoint.run.failures import Failures
from shardopt.checkpoint.run.steps import Place
from shardopt.ranks import Ranks
from shardopt.world import Thread, world

_log = logging.getLogger("shardopt.checkpoint")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What is to be done for a checkpoint that was committed.

    Args:
        ranks: of the side channel on which it is done.
        hosts: by the number of the tier.
        tier, onto: numbers of tiers; that which has it (None: the root alone), and those behind that are to get it.
        to_root: whether the root is to get it.
        then: called once it has.
        is_restored: whether the run has just been restored from it: then what the hosts have of it is verified.
    """

    place: Place
    ranks: Ranks
    hosts: Sequence[Hosts]
    tier: int | None
    onto: Sequence[int]
    to_root: bool
    then: Callable[[], None]
    is_restored: bool

    @property
    def promotes(self) -> bool:
        return bool(self.onto) or self.to_root


class TierQueue:
    """Does jobs in the order in which they were begun, which is one on all ranks.

    Args:
        do: does one, and is told how to find out whether a newer one of a tier waits.

    Attributes:
        failures: of jobs, but for copies alone: those come with the next save.
    """

    def __init__(self, do: Callable[[Job, Callable[[], bool]], None]) -> None:
        self._do = do
        self._changed = world().condition()
        self._jobs: deque[tuple[int, Job]] = deque()  # the first is under way
        self._given_up: set[Job] = set()  # on rank 0
        self._worker: Thread | None = None
        self.failures = Failures()

    def begin(self, job: Job) -> None:
        """Has a job done in its turn; does not wait."""
        with self._changed:
            self._jobs.append((self.failures.begin(), job))
            if self._worker is None:
                # Not a daemon: a program that ends waits for it. It ends when there is nothing to do.
                self._worker = world().thread(self._work, "shardopt-tiers")
                self._worker.start()

    def supersede(self) -> list[Job]:
        """On rank 0: gives up copies that have no turn yet and will have none, as a newer one waits; returns them."""
        with self._changed:
            of_tiers = [job for _, job in list(self._jobs)[1:] if job.tier is not None][:-1]
            given_up = [job for job in of_tiers if not (job.promotes or job.is_restored or job in self._given_up)]
            self._given_up.update(given_up)
        return given_up

    def promoting(self) -> frozenset[str]:
        """Returns the names of checkpoints that come to the root now or later."""
        with self._changed:
            return frozenset(job.place.name for _, job in self._jobs if job.to_root)

    def finish(self) -> None:
        """Waits until all that was begun is done. Local; a failure stays to be raised."""
        with self._changed:
            while self._jobs:
                self._changed.wait()

    def _work(self) -> None:
        world().lower_priority()
        while True:
            with self._changed:
                if not self._jobs:
                    self._worker = None
                    return
                number, job = self._jobs[0]
            try:
                with job.ranks.beating():
                    self._do(job, partial(self._is_newest, job))
            except BaseException as error:  # the training goes on meanwhile
                _log.error("what is behind the save of step %d has failed: %s", job.place.step, error)
                if job.promotes or job.tier is None:  # raised by the next call
                    self.failures.note(number, error)
            with self._changed:
                self._jobs.popleft()
                self._given_up.discard(job)
                self._changed.notify()  # nobody but the program itself waits

    def _is_newest(self, job: Job) -> bool:
        with self._changed:
            return [each for _, each in self._jobs if each.tier is not None][-1] is job
