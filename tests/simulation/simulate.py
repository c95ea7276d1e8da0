"""Runs one schedule, and judges what has come of it."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from shardopt import checkpoint
from shardopt.checkpoint.saving import agree_plan
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.world import world as current_world
from tests.simulation.jobs import MIRROR, ROOT, Ledger, RunningJob, judge_exports, judge_order
from tests.simulation.schedule import DEADLINE_SECONDS, Job, Schedule
from tests.simulation.store import StoreServer
from tests.simulation.tasks import Process, Scheduler
from tests.simulation.told import Told, have_left, meaning
from tests.simulation.world import SimulatedWorld, begin_process, simulated, without_garbage


@dataclass
class Outcome:
    """What has come of a schedule.

    Args:
        schedule: of a run, or of a stream.
        problems: what must not have happened.
        trace: all operations, in order.
    """

    schedule: Any
    problems: list[str]
    trace: list[tuple[float, str, str]]

    @property
    def digest(self) -> str:
        """The hash of the trace: equal where the same has happened."""
        return hashlib.blake2b(repr(self.trace).encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        lines = [f"{seconds:12.6f}  {who:16} {what}" for seconds, who, what in self.trace]
        return "\n".join([*lines, str(self.schedule), *self.problems])


def simulate(schedule: Schedule) -> Outcome:
    """Runs a schedule, and after it a job without faults that restores and saves; all in this thread.

    That job has one rank, and in every fourth simulation two: it is there to see what the others have left.
    """
    with without_garbage():
        return _simulate(schedule)


def _simulate(schedule: Schedule) -> Outcome:
    last = Job(ranks=1 if schedule.seed % 4 else 2, saves=1, mirror=schedule.jobs[0].mirror)
    whole = replace(schedule, jobs=(*schedule.jobs, last))
    scheduler = Scheduler(schedule.seed)
    world, ledger = SimulatedWorld(scheduler), Ledger()
    jobs: list[RunningJob] = []
    logging.disable(logging.CRITICAL)  # nobody reads it, and lines cost time
    try:
        with simulated(world), _slow_planning():
            problems = _run_jobs(world, whole, ledger, jobs)
            if not problems:
                problems = _verify(world, jobs)
            for job in jobs:
                _end(world, job.processes)
    finally:
        logging.disable(logging.NOTSET)
    problems += ledger.problems + scheduler.errors + _judge(schedule, ledger, jobs) + judge_order(ledger, jobs)
    return Outcome(schedule, problems, scheduler.trace)


def seconds_allowed(schedule: Schedule) -> float:
    """Returns how long a call may take at most: deadlines of some rounds, and all that the schedule slows down."""
    slow = sum(fault.seconds for fault in schedule.faults)
    slow += sum(10 * (job.planning_seconds + job.state_seconds) for job in schedule.jobs)
    requests = sum(fault.kind == "object" for fault in schedule.faults)
    return 5 * DEADLINE_SECONDS + slow + 4.0 * requests + 12.0


def _run_jobs(world: SimulatedWorld, schedule: Schedule, ledger: Ledger, jobs: list[RunningJob]) -> list[str]:
    scheduler = world.scheduler
    server: StoreServer | None = None
    for number, job in enumerate(schedule.jobs):
        if server is None or job.new_store or server.lost or number == len(schedule.jobs) - 1:
            server = StoreServer(scheduler, world.network)
        ledger.current = number
        running = RunningJob(world, server, schedule, number, ledger)
        if jobs:
            jobs[-1].resumes_beside(running)
        jobs.append(running)
        until = scheduler.now + (job.saves + 4) * seconds_allowed(schedule)
        if not scheduler.run(running.has_ended, until):
            stacks = [task.stack() for each in running.processes for task in each.tasks if not task.ended]
            return [f"job {number} does not end:\n" + "\n".join(stacks)]
        if not job.leaves_stopped:
            _end(world, running.processes)
    return []


def _end(world: SimulatedWorld, processes: list[Process]) -> None:
    for process in processes:
        process.kill()
    world.scheduler.run(lambda: all(task.ended for each in processes for task in each.tasks), world.scheduler.now + 1)


def _verify(world: SimulatedWorld, jobs: list[RunningJob]) -> list[str]:
    """Lets the processes left of earlier jobs continue; then reads all checkpoints there are."""
    scheduler = world.scheduler
    left = [process for job in jobs for process in job.processes if not process.dead]
    for process in left:
        process.go_on()
    scheduler.run(lambda: all(process.dead or process.stopped for process in left), scheduler.now + 60)
    for job in jobs:
        _end(world, job.processes)
    gone = [path for path in jobs[0].ledger.files_of_user if world.files.find(path) is None]
    problems = [f"{path}, which was its user's, was removed" for path in gone]
    committed: defaultdict[int, set[Any]] = defaultdict(set)  # step → the jobs of which there is a checkpoint of it
    reader = Process(scheduler, "reader", "reader")
    unreadable = {step for job in jobs for step in job.ledger.unreadable}

    def read() -> None:
        begin_process(reader)
        roots = [ROOT, MIRROR] if jobs[0].job.mirror else [ROOT]
        for root in roots:
            storage = world.open_storage(root, True, lambda url, durable: None)
            for name in storage.names():
                if name.startswith("step-") and storage.child(name).exists("manifest.json"):
                    url = storage.child(name).url
                    report = checkpoint.verify(url)
                    if root == ROOT:
                        values = read_manifest(storage.child(name))[0].values
                        committed[values["step"][1]].add(values["job"][1])
                    # What it refers to may be in one that cannot be read.
                    if any(root != ROOT or unreadable.isdisjoint(_steps_in(each.key)) for each in report.problems):
                        problems.append(f"{url} is committed, and not whole: {report}")

    reader.start(read)
    if not scheduler.run(lambda: reader.dead, scheduler.now + 1000):
        problems.append("reading does not end")
    if not any(job.job.keep_last for job in jobs):  # then nothing is ever removed
        for step, number in jobs[0].ledger.committed.items():
            if number not in committed[step]:
                problems.append(f"step {step}, which job {number} has committed, is lost")
    return problems + judge_exports(world, jobs)


def _steps_in(url: str) -> list[int]:
    return [int(step) for step in re.findall(r"/step-(\d+)", url)]


def _judge(schedule: Schedule, ledger: Ledger, jobs: list[RunningJob]) -> list[str]:
    problems = []
    allowed = seconds_allowed(schedule)
    by_call: defaultdict[tuple[int, str], list[Told]] = defaultdict(list)
    for told in ledger.told:
        if told.end - told.begin > allowed:
            problems.append(f"{told.call} of rank {told.rank} took {told.end - told.begin:.1f} s: {told}")
        if _is_told_at_once(jobs[told.job], told) and told.end - told.begin > 1.0:
            problems.append(f"ranks in different calls were not told at once: {told}")
        if not told.disturbed:
            by_call[told.job, told.call].append(told)
    for (job, call), all_told in by_call.items():
        # Where who passes answers on is hit while it does, some have the answer, and others an error.
        if jobs[job].leads_disturbed():
            all_told = [told for told in all_told if told.ok]
        if call == "close" and jobs[job].job.exports:
            all_told = [told for told in all_told if told.ok or told.rank]  # rank 0 alone makes them, and is told
        if len({meaning(told, have_left(ledger.told, told)) for told in all_told}) > 1:
            each = "\n".join(f"  rank {told.rank}: {told.text}" for told in all_told)
            problems.append(f"{call} of job {job} told ranks differently:\n{each}")
    beside = any(fault.kind in ("stop", "cut") for fault in schedule.faults)
    for told in ledger.told:
        # A rank of the job before, at last: it has committed there, or cleared away what it took for remains, or what
        # its rules let go.
        was_first = beside and (
            _WAS_FIRST.search(told.text) or (jobs[told.job].job.mirror and _COPIES.search(told.text))
        )
        was_first = was_first or (
            any(fault.beside and fault.job < told.job for fault in schedule.faults) and _TAKEN_AWAY.search(told.text)
        )
        if not told.ok and _has_no_excuse(jobs[told.job], told) and not was_first and not ledger.may_fail:
            problems.append(f"a call failed in a job without faults: {told}")
    for number, running in enumerate(jobs):
        stored = running.server.data
        if len(stored) > 40 + 20 * sum(each.job.ranks for each in jobs):
            problems.append(f"the store of job {number} has {len(stored)} keys: {sorted(stored)}")
    return problems


def _is_told_at_once(running: RunningJob, told: Told) -> bool:
    """Whether ranks of a job are in different calls, and nothing else takes time there.

    Not at its end: who has left after the error, and for which reason, is not known to all at once.
    """
    job = running.job
    slow = job.mirror or job.planning_seconds or job.state_seconds
    return (
        job.astray is not None
        and told.call != "close"
        and not slow
        and not any(fault.job == running.number for fault in running.schedule.faults)
    )


def _has_no_excuse(running: RunningJob, told: Told) -> bool:
    """Whether nothing has hit a job, nor does it do anything for which it is to be refused."""
    job, number = running.job, running.number
    if told.call == "misfit" or job.bad_metrics or job.astray or running.disturbed:
        return False
    if job.mirror and running.ledger.unreadable and "UnreadableError" in told.text:
        return False  # in copying one that was not the newest any more, and so was not looked at by a restore
    harmless = ("unreadable", "signal", "reset")  # who was hit by a signal before it listened is disturbed
    return not any(fault.job == number and fault.kind not in harmless for fault in running.schedule.faults)


_WAS_FIRST = re.compile("the path is taken|do not share the storage|give one of the steps that are there")
_TAKEN_AWAY = re.compile("were removed while it was committed|cannot write to .*No such file or directory")
"""What is said of a save whose files a process of a job before, that continues, has taken for remains."""
_COPIES = re.compile(
    "does not see the files of other ranks|were removed while it was committed"
    "|found no such file|there is no checkpoint|refers to was removed while it was saved"
)
"""What is said of a copy that another process makes too, or whose original, or what it refers to, another process has
removed by its rules."""


def _slow_planning() -> mock._patch[object]:
    """Has the making of plans take as much simulated time as a job says."""
    plan = agree_plan.Planning.plan

    def slowly(planning: agree_plan.Planning, comparison: agree_plan.Comparison) -> BaseException | None:
        world = current_world()
        assert isinstance(world, SimulatedWorld)
        seconds = world._process().planning_seconds
        if seconds:
            world.sleep(seconds)
        return plan(planning, comparison)

    return mock.patch.object(agree_plan.Planning, "plan", slowly)
