"""Makes a schedule that fails smaller, as long as it still fails: fewer faults, jobs, ranks, saves and options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeVar

from tests.simulation.schedule import Job, Schedule

_DEFAULT = Job()
T = TypeVar("T")


def shrink(schedule: T, fails: Callable[[T], bool], most_runs: int = 300) -> T:
    """Returns a schedule that fails too, and of which nothing can be left out alone.

    Args:
        schedule: of jobs one after the other, or any dataclass of which each part can be left out for itself.
        fails: whether one fails; called at most `most_runs` times.
    """
    candidates_of: Callable[[Any], Iterator[Any]] = _smaller if isinstance(schedule, Schedule) else _parts_left_out
    runs, smaller = 0, True
    while smaller:
        smaller = False
        for candidate in candidates_of(schedule):
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


def _parts_left_out(made: Any) -> Iterator[Any]:
    """Yields a dataclass with one thing less: an element of a tuple, or of what is in it, or a value by default."""
    for field in fields(made):
        value = getattr(made, field.name)
        if isinstance(value, tuple):
            for i in reversed(range(len(value))):
                yield replace(made, **{field.name: value[:i] + value[i + 1 :]})
            for i, each in enumerate(value):
                for smaller in _parts_left_out(each) if is_dataclass(each) else ():
                    yield replace(made, **{field.name: (*value[:i], smaller, *value[i + 1 :])})
        elif field.default is not MISSING and value != field.default:
            yield replace(made, **{field.name: field.default})
            if isinstance(value, int) and isinstance(field.default, int) and value > field.default + 1:
                yield replace(made, **{field.name: value - 1})
