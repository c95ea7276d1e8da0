"""Runs one schedule of a stream, and judges what has come of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from shardopt.checkpoint.saving import commit
from shardopt.checkpoint.stream.staged import Staged
from shardopt.world import world as current_world
from tests.simulation.simulate import Outcome
from tests.simulation.streams.jobs import Around, RunningFollower, RunningJob, RunningPublisher
from tests.simulation.streams.judge import judge, judge_stored
from tests.simulation.streams.ledger import Ledger
from tests.simulation.streams.schedule import Following, Publishing, Stream
from tests.simulation.streams.storage import Stored
from tests.simulation.tasks import Scheduler
from tests.simulation.world import SimulatedWorld, simulated, without_garbage

_RESTART_SECONDS = 0.05
_LATE_SECONDS = 3.0  # in which a request is carried out that was given up: the last job is without faults
_MOST_STARTS = 3  # of a follower: the second has no faults of its own, and the third is for one that was cut short
_MOST_SECONDS = 600.0


def simulate(schedule: Stream) -> Outcome:
    """Runs a schedule; after its faults a last job publishes, and all followers and a new one take what it has."""
    with without_garbage():
        scheduler = Scheduler(schedule.seed)
        world = SimulatedWorld(scheduler)
        ledger, stored = Ledger(schedule.seed, schedule.first), Stored(world, schedule.remote)
        run = _Run(Around(schedule, world, stored, ledger))
        logging.disable(logging.CRITICAL)  # nobody reads it, and lines cost time
        try:
            with simulated(world), _noting_commits(run), _slow_applying():
                problems = run.problems()
        finally:
            logging.disable(logging.NOTSET)
        problems += ledger.problems + scheduler.errors + judge(run.around, run.started)
        return Outcome(schedule, problems, scheduler.trace)


class _Run:
    """The jobs of a schedule: publishers one after the other, and followers beside them."""

    def __init__(self, around: Around) -> None:
        schedule, seed = around.schedule, around.schedule.seed
        self.around = around
        self.started: list[RunningJob] = []
        keep = 1 + seed % 3
        last = Publishing(
            ranks=1 + seed % 2,
            changes=("few", "one", "few", "all", "few")[: keep + 2],
            back=seed % 4,
            anchor_every=1 + seed % 5,
            keep=keep,
            layout=("whole", "rows")[seed % 2],
        )
        self._publishing = [*schedule.publishing, last]
        self.publisher: RunningPublisher | None = None
        self._published = 0
        new = Following(updates=0, ranks=1 + (seed // 2) % 2, layout=("columns", "whole")[seed % 2])
        self._following = [*schedule.following, new]
        self._followers: list[RunningFollower | None] = [None for _ in self._following]
        self._coming = len(self._following) + 1  # jobs that are to be started at a time

    def problems(self) -> list[str]:
        """Runs all jobs; returns what is wrong with what is left."""
        scheduler = self.around.world.scheduler
        for i, job in enumerate(self._following):
            scheduler.at(job.joins_at, partial(self._start_follower, i, 0))
        scheduler.at(0.0, self._start_publisher)
        if not scheduler.run(self._have_ended, scheduler.now + _MOST_SECONDS):
            tasks = [task for each in self.started for process in each.processes for task in process.tasks]
            stacks = [task.stack() for task in tasks if not task.ended]
            return ["the simulation does not end:\n" + "\n".join(stacks)]
        return judge_stored(self.around, self._publishing[-1].keep)

    def _start_publisher(self) -> None:
        self._coming -= 1
        job = self._publishing[self._published]
        self.publisher = RunningPublisher(self.around, len(self.started), job, self._published)
        self._published += 1
        self.around.ledger.ending = self._published == len(self._publishing)
        self.started.append(self.publisher)
        self.publisher.start()

    def _start_follower(self, i: int, again: int) -> None:
        self._coming -= 1
        follower = RunningFollower(self.around, len(self.started), self._following[i], str(i), again)
        self._followers[i] = follower
        self.started.append(follower)
        follower.start()

    def _have_ended(self) -> bool:
        """Whether all jobs have ended; starts those that come after one that has."""
        ledger, publisher = self.around.ledger, self.publisher
        if publisher is not None and publisher.has_ended() and not ledger.over:
            self.publisher = None
            if self._published < len(self._publishing):
                is_last = self._published == len(self._publishing) - 1
                late = is_last and any(hit.detail == "late" for hit in self.around.schedule.hits)
                self._later(_LATE_SECONDS if late else _RESTART_SECONDS, self._start_publisher)
            else:
                self._end_faults(publisher)
        for i, follower in enumerate(self._followers):
            if follower is not None and follower.has_ended() and len(follower.finished) < follower.ranks:
                self._followers[i] = None
                if follower.again + 1 < _MOST_STARTS:
                    self._later(_RESTART_SECONDS, partial(self._start_follower, i, follower.again + 1))
                else:
                    ledger.problems.append(f"{follower.name} has ended too early, like those before it")
        ended = all(follower is None or follower.has_ended() for follower in self._followers)
        return ledger.over and ended and not self._coming

    def _later(self, seconds: float, start: Callable[[], None]) -> None:
        self._coming += 1
        scheduler = self.around.world.scheduler
        scheduler.at(scheduler.now + seconds, start)

    def _end_faults(self, last: RunningPublisher) -> None:
        world, ledger = self.around.world, self.around.ledger
        world.scheduler.note("simulation", "faults are over")
        ledger.over = True
        world.files.failing.clear()
        world.files.slow.clear()
        world.objects.failing.clear()
        if len(last.finished) < last.ranks:
            ledger.problems.append("the last publisher, which has no faults, has ended too early")


def _noting_commits(run: _Run) -> Any:
    """Has the ledger know what all ranks have written, just before it is committed."""
    publish = commit.publish_checkpoint

    def noting(storage: Any, *args: Any) -> None:
        assert run.publisher is not None
        run.publisher.commits(storage.url, lambda: publish(storage, *args))

    return mock.patch.object(commit, "publish_checkpoint", noting)


class _Slowly(list[Any]):
    """Elements between which others have their turn, and faults strike."""

    def __iter__(self) -> Iterator[Any]:
        world = current_world()
        assert isinstance(world, SimulatedWorld)
        for each in super().__iter__():
            world.scheduler.operate("apply", 20e-6)
            yield each


@contextmanager
def _slow_applying() -> Iterator[None]:
    """Has the changes of an update take time to be applied, one by one."""
    read = Staged.read

    def reading(staged: Staged) -> None:
        read(staged)
        staged._copies, staged._scatters = _Slowly(staged._copies), _Slowly(staged._scatters)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Staged, "read", reading))
        yield
