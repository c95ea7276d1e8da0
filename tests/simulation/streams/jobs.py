"""The jobs of a simulated stream: those that publish, those that follow, and threads that serve."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardopt.checkpoint.run.branches import parse_id
from shardopt.checkpoint.stream.follower import Follower
from shardopt.checkpoint.stream.publisher import Publisher
from shardopt.errors import MismatchError, RankError, ShardoptError, StateError
from tests.simulation.schedule import DEADLINE_SECONDS
from tests.simulation.store import StoreServer
from tests.simulation.streams.ledger import Attempt, Ledger
from tests.simulation.streams.schedule import Following, Hit, Publishing, Stream
from tests.simulation.streams.storage import Stored
from tests.simulation.streams.weights import App
from tests.simulation.tasks import Killed, Process
from tests.simulation.threads import SimulatedEvent
from tests.simulation.told import Told
from tests.simulation.world import SimulatedGroup, SimulatedWorld, begin_process, end_process

LONG_SECONDS = 1.6 * DEADLINE_SECONDS
_LOOKS = 12  # of a thread in an update, one soon after the other


@dataclass(frozen=True)
class Around:
    """What all jobs of a simulation share."""

    schedule: Stream
    world: SimulatedWorld
    stored: Stored
    ledger: Ledger


class _Stopped(Exception):
    """Ends a rank whose call has raised what it must not."""


class RunningJob:
    """A job that was started.

    Args:
        number: by which it is known among all that were started.
        name: of its processes.
        hits: its faults.

    Attributes:
        disturbed: the ranks that a fault has hit.
        finished: the ranks that have done all that they were to do.
    """

    def __init__(self, around: Around, number: int, name: str, ranks: int, hits: tuple[Hit, ...]) -> None:
        self.around, self.number, self.name, self.ranks, self.hits = around, number, name, ranks, hits
        self.disturbed: set[int] = set()
        self.finished: set[int] = set()
        world = around.world
        self.server = StoreServer(world.scheduler, world.network)
        self.processes: list[Process] = []

    def start(self) -> None:
        """Starts all ranks."""
        for rank in range(self.ranks):
            process = Process(self.around.world.scheduler, f"{self.name} rank {rank}", f"{self.name}.{rank // 2}")
            process.address = f"10.1.{self.number}.{rank // 2 + 1}"
            process.rank, process.job_size = rank, self.ranks
            process.gives_up = lambda: None
            for hit in self.hits:
                if hit.rank == rank and not self.around.ledger.over:  # which may be so before the job begins
                    self._place(hit, process, rank)
            self.processes.append(process)
            process.start(partial(self._main, process, rank))

    def has_ended(self) -> bool:
        """Whether no process is left."""
        return all(process.dead for process in self.processes)

    def _place(self, hit: Hit, process: Process, rank: int) -> None:
        world, ledger = self.around.world, self.around.ledger
        scheduler = world.scheduler

        def strike() -> None:
            if ledger.over:
                return
            if hit.kind in ("flip", "lose"):
                ledger.damaged |= not ledger.ending and self.around.stored.damage(hit)
                return
            self.disturbed.add(rank)
            if hit.kind == "kill":
                process.kill()
            elif hit.kind == "stop":
                process.stop()
                scheduler.at(scheduler.now + hit.seconds, process.go_on)
            elif hit.kind == "slow":
                scheduler.note(process.name, f"has a disk that takes {hit.seconds:g} times longer")
                world.files.slow[process.name] = hit.seconds

        if hit.kind == "disk":
            world.files.failing[process.name, hit.at] = getattr(errno, hit.detail)
        elif hit.kind == "object":
            world.objects.failing[process.name, hit.at] = hit.detail
        else:
            process.at_operation[hit.at].append(strike)

    def _main(self, process: Process, rank: int) -> None:
        begin_process(process)
        process.at_exit.append(end_process)
        process.group = SimulatedGroup(process, self.server, rank, self.ranks)
        with suppress(ShardoptError, _Stopped):  # it was noted
            self._run(process.group, rank)
            self.finished.add(rank)

    def _run(self, group: SimulatedGroup, rank: int) -> None:
        raise NotImplementedError

    def works(self, seconds: float) -> None:
        """Has a rank work about so long: never so much longer than others that they give it up."""
        self.around.world.sleep(seconds * self.around.world.scheduler.random.uniform(0.5, 1.5))

    def call(
        self, rank: int, call: str, function: Callable[[], Any], describe: Callable[[Any], str] = str
    ) -> tuple[bool, Any]:
        """Makes a call, and notes what it has told; returns whether it has a result, and that.

        Raises:
            RankError: as it; for a program that is started again.
        """
        scheduler, ledger = self.around.world.scheduler, self.around.ledger
        who = f"{self.name} rank {rank}"
        scheduler.note(who, f"calls {call}")
        begin, ok, result, text = scheduler.now, False, None, ""
        try:
            result = function()
            ok, text = True, describe(result)
        except Killed:
            raise
        except ShardoptError as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, RankError) and not isinstance(error, MismatchError):
                raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            ledger.problems.append(f"{who}: {call} raised {text}")
            raise _Stopped from error
        finally:
            if not self.processes[rank].dead:
                told = Told(self.number, rank, call, begin, scheduler.now, ok, text, rank in self.disturbed)
                ledger.told.append(told)
                scheduler.note(who, f"{call}: {text.splitlines()[0] if text else ''}")
        return ok, result


class RunningPublisher(RunningJob):
    """A job that publishes. Args: as `RunningJob`."""

    def __init__(self, around: Around, number: int, job: Publishing, attempt: int) -> None:
        super().__init__(around, number, f"publisher {attempt}", job.ranks, job.hits)
        self.job, self.attempt = job, attempt
        self.first = around.ledger.begins(job.back)

    def _run(self, group: SimulatedGroup, rank: int) -> None:
        job, around = self.job, self.around
        app = App(job.ranks, rank, job.layout, job.stages)
        publisher = Publisher(
            around.stored.root,
            anchor_every=job.anchor_every,
            keep=job.keep,
            durable=job.durable,
            deadline_seconds=DEADLINE_SECONDS,
            process_group=group,
        )
        with publisher:
            for step, changes in enumerate(job.changes, self.first):
                self.works(job.seconds)
                app.fill(around.ledger.publishes(self.attempt, step, changes))
                publish = partial(publisher.publish, step, app.tensors)
                ok, pending = self.call(rank, f"publish {step}", publish, lambda _: "")
                if ok and job.hears:
                    self.call(rank, f"result {step}", pending.result, lambda report: str(report.save_id))
            self.call(rank, "close", publisher.close)

    def commits(self, url: str, commit: Callable[[], None]) -> None:
        """Commits what all ranks have written, to be at a URL."""
        id, ledger = parse_id(url.rpartition("/")[2]), self.around.ledger
        assert id is not None
        ledger.commits(self.attempt, id.step)
        commit()
        ledger.committed = Attempt(self.attempt, id.step)


class RunningFollower(RunningJob):
    """A job that follows. Args: as `RunningJob`.

    Args:
        again: how many times it was started before.
    """

    def __init__(self, around: Around, number: int, job: Following, name: str, again: int) -> None:
        super().__init__(around, number, f"follower {name}.{again}", job.ranks, () if again else job.hits)
        self.job, self.again = job, again
        self._spoiled: set[int] = set()
        self._begun: dict[int, list[SimulatedEvent]] = {}  # rank → what wakes its threads where an update begins
        self._at: dict[int, Attempt | None] = {}

    def _run(self, group: SimulatedGroup, rank: int) -> None:
        job, world, ledger = self.job, self.around.world, self.around.ledger
        app = App(job.ranks, rank, job.layout, job.stages, job.strided)
        follower = Follower(
            self.around.stored.root,
            app.tensors,
            memory_bytes=job.memory_bytes,
            deadline_seconds=DEADLINE_SECONDS,
            process_group=group,
        )
        ended: list[bool] = []
        self._begun[rank] = [SimulatedEvent(world.scheduler) for _ in range(job.threads)]
        threads = [
            world.thread(partial(self._serve, follower, app, rank, i, ended), f"serving {i}")
            for i in range(job.threads)
        ]
        for thread in threads:
            thread.start()
        try:
            for number in range(1, job.updates + 1):
                self.works(job.seconds)
                if job.pauses_before == number:
                    world.sleep(job.pause_seconds)
                self._update(follower, app, rank, number)
            while not ledger.over:
                world.sleep(0.03)
            if not self._update(follower, app, rank, -1) and job.holds:  # it may have met who stays too long
                self._update(follower, app, rank, -2)
        except RankError:
            for begun in self._begun[rank]:
                begun.set()
            world.sleep(0.01)  # a program that is to be started again serves until it ends
            raise
        finally:
            ended.append(True)
        if follower.step is None or ledger.newest is None or follower.step != ledger.newest.step:
            ledger.problems.append(f"{self.name} rank {rank} ends at {follower.step}, and not at {ledger.newest}")

    def _update(self, follower: Follower, app: App, rank: int, number: int) -> bool:
        """Updates, and judges what has come of it; returns whether it did not fail.

        Args:
            number: of the update; -1 of the last one, and -2 of one that is made where that has failed.
        """
        job, ledger = self.job, self.around.ledger
        step = None
        if job.asks == number:
            there = [id.step for id in map(parse_id, self.around.stored.committed()) if id is not None]
            drawn = self.around.world.scheduler.random.choice(there) if there else None
            step = ledger.choice(f"{self.name} {number}", drawn)
        if job.spoils == number and follower.step is not None:
            self._spoiled.add(rank)
            app.spoil()
        before, least = follower.step, ledger.committed
        if number % 3 == 2:
            self.call(rank, f"poll {number}", follower.poll)
        call = f"update {number}" if step is None else f"update {number} to {step}"
        for begun in self._begun[rank]:
            begun.set()
        ok, report = self.call(rank, call, lambda: follower.update(step), lambda _: f"is at {follower.step}")
        if ok and report is not None:
            self._spoiled.discard(rank)
        if ok and follower.step is None and report is not None:
            ledger.problems.append(f"{self.name} rank {rank}: update {number} returned {report} and left torn weights")
        if follower.step is None or rank in self._spoiled:
            self._at[rank] = None
            return ok
        at, was = ledger.attempt_of(app, follower.step), self._at.get(rank)
        where = f"{self.name} rank {rank}: update {number}"
        if at is None:
            ledger.problems.append(f"{where} is over, and the weights are {ledger.why_not(app, follower.step)}")
        elif step is None and not self._may_come_late():
            # A read that fails while weights are applied tears them: then an older step is better than none.
            may_tear = any(hit.kind in ("disk", "object") for hit in self.hits)
            if was is not None and before is not None and at < was and not may_tear:
                ledger.problems.append(f"{where} went back from {was} to {at}")
            if ok and not self.hits and ledger.comes_late(at, least):
                ledger.problems.append(f"{where} came to {at}, though {least} was committed")
        self._at[rank] = at
        return ok

    def _may_come_late(self) -> bool:
        """Whether a request of an earlier publisher may have been carried out beside a later one."""
        return any(hit.detail == "late" for hit in self.around.schedule.hits)

    def _serve(self, follower: Follower, app: App, rank: int, thread: int, ended: list[bool]) -> None:
        """Looks at the weights, as a thread that serves does: often at the beginning of an update."""
        world, begun, looks, often = self.around.world, self._begun[rank][thread], 0, 0
        while not ended:
            if often:
                often -= 1
                world.sleep(world.scheduler.draw(2e-4))
            elif begun.wait(0.05):
                begun.clear()
                often = _LOOKS
            looks += 1
            seconds = LONG_SECONDS if looks == self.job.holds and not thread else world.scheduler.draw(4e-4)
            self._turn(follower, app, rank, f"look {looks} of thread {thread}", seconds)

    def _turn(self, follower: Follower, app: App, rank: int, call: str, seconds: float) -> None:
        world, ledger = self.around.world, self.around.ledger
        begin = world.scheduler.now
        try:
            with follower.serving() as step:
                for _ in range(2):
                    if rank not in self._spoiled and ledger.attempt_of(app, step) is None:
                        wrong = ledger.why_not(app, step)
                        ledger.problems.append(f"{self.name} rank {rank}: serving() gave step {step}, {wrong}")
                    world.sleep(seconds / 2)
        except StateError as error:
            if follower.step is not None:
                ledger.problems.append(f"{self.name} rank {rank}, {call}: step {follower.step} is there, and {error}")
        except ShardoptError as error:
            text = f"{type(error).__name__}: {error}"
            ledger.told.append(Told(self.number, rank, call, begin, world.scheduler.now, False, text, True))
