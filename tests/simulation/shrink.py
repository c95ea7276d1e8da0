"""Makes a schedule that fails smaller, as long as it still fails: fewer faults, jobs, ranks, saves and options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.simulation.schedule import Job, Schedule

_DEFAULT = Job()


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], most_runs: int = 300) -> Schedule:
    """Returns a schedule that fails too, and of which nothing can be left out alone.

    Args:
        fails: whether one fails; called at most `most_runs` times.
    """
    runs, smaller = 0, True
    while smaller:
        smaller = False
        for candidate in _smaller(schedule):
            runs += 1
            if runs > most_runs:
                return schedule
            if fails(candidate):
                schedule, smaller = candidate, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Yields schedules that have one thing less, the largest things first."""
    for number in reversed(range(len(schedule.jobs))):
        if len(schedule.jobs) > 1:
            yield _without_job(schedule, number)
    for i in range(len(schedule.faults)):
        yield replace(schedule, faults=(*schedule.faults[:i], *schedule.faults[i + 1 :]))
    for number, job in enumerate(schedule.jobs):
        for smaller in _smaller_jobs(job):
            jobs = (*schedule.jobs[:number], smaller, *schedule.jobs[number + 1 :])
            faults = [fault for fault in schedule.faults if fault.job != number or fault.rank < smaller.ranks]
            yield replace(schedule, jobs=jobs, faults=tuple(faults))


def _without_job(schedule: Schedule, number: int) -> Schedule:
    faults = [replace(fault, job=fault.job - (fault.job > number)) for fault in schedule.faults if fault.job != number]
    return replace(schedule, jobs=(*schedule.jobs[:number], *schedule.jobs[number + 1 :]), faults=tuple(faults))


def _smaller_jobs(job: Job) -> Iterator[Job]:
    if job.ranks > 1:
        yield replace(job, ranks=job.ranks - 1, hears=tuple(rank for rank in job.hears if rank < job.ranks - 1))
    if job.saves > 1:
        yield replace(job, saves=job.saves - 1)
    for field in fields(Job):
        if field.name not in ("ranks", "saves") and getattr(job, field.name) != getattr(_DEFAULT, field.name):
            yield replace(job, **{field.name: getattr(_DEFAULT, field.name)})
