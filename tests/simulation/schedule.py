"""What happens in one simulation, as data: jobs one after the other on the same storage, and faults; from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

DEADLINE_SECONDS = 2.0
STOP_SECONDS = 6.0


@dataclass(frozen=True)
class Job:
    """A job, as a launcher starts it once the one before has ended.

    Args:
        ranks: how many.
        ranks_per_block: of the tree by which they are connected.
        saves: for how many steps.
        stages: whether each rank has tensors of its own, as in a pipeline.
        stage, mirror, incremental, keep_last: options of its Manager.
        new_store: whether it has a store of its own, and not that of the job before.
        back: by how many steps it takes the run back when it restores.
        misfit: whether it tries to restore into an app that does not fit, and resumes from the newest step without.
        looks_alone: whether rank 0 makes a Manager by itself before, to look at what there is.
        hears: the ranks that wait for the result of each save in the background.
        bad_metrics: at which of its saves rank 0 gives a metric that is no number; 0 for none.
        astray: rank and number of the save for which it passes another step than the others; None for none.
        slow_rank: the rank that takes the seconds of the next two.
        planning_seconds, state_seconds: for how long it makes plans, and for how long its objects give their state.
        leaves_stopped: whether ranks that are stopped at its end are left, and may continue beside the next job.
        stops: whether its ranks save and leave when one of them gets a signal.
        exports: whether it writes each checkpoint as a Hugging Face folder too.
    """

    ranks: int = 2
    ranks_per_block: int = 128
    saves: int = 2
    stages: bool = False
    stage: str | None = None
    mirror: bool = False
    incremental: bool = False
    keep_last: int | None = None
    new_store: bool = True
    back: int = 0
    misfit: bool = False
    looks_alone: bool = False
    hears: tuple[int, ...] = ()
    bad_metrics: int = 0
    astray: tuple[int, int] | None = None
    slow_rank: int = 0
    planning_seconds: float = 0.0
    state_seconds: float = 0.0
    leaves_stopped: bool = False
    stops: bool = False
    exports: bool = False


@dataclass(frozen=True)
class Fault:
    """A fault, at an operation of a rank.

    Args:
        kind: "kill", "stop" (continues after `seconds`, or beside the next job), "cut" (off the network, for
            `seconds`), "interrupt" (as by SIGINT), "signal" (of preemption), "power" (of all hosts and disks),
            "store" (is lost), "disk" (error `detail` of one operation on files), "object" (`detail` of one request),
            "reset" (one of its connections), "unreadable" (the newest checkpoint, from the beginning of a job).
        at: the number of the operation; of those on files or objects for "disk" and "object".
        beside: the operation of rank 0 of the next job at which a stopped rank continues; 0 for none.
    """

    kind: str
    job: int
    rank: int = 0
    at: int = 1
    seconds: float = 0.0
    beside: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Schedule:
    """One simulation: all that happens follows from this."""

    seed: int
    jobs: tuple[Job, ...]
    faults: tuple[Fault, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"Schedule(\n    seed={self.seed},\n    jobs=("]
        lines += [f"        {_brief(job)}," for job in self.jobs]
        lines += ["    ),\n    faults=("]
        lines += [f"        {_brief(fault)}," for fault in self.faults]
        return "\n".join([*lines, "    ),\n)"])


def _brief(made: Job | Fault) -> str:
    """Writes one as code, without what is as by default."""
    default = Job() if isinstance(made, Job) else Fault("", -1)
    changed = [f"{name}={value!r}" for name, value in vars(made).items() if value != getattr(default, name)]
    return f"{type(made).__name__}({', '.join(changed)})"


def draw(seed: int) -> Schedule:
    """Draws a schedule."""
    chance = random.Random(seed)
    jobs = tuple(_draw_job(chance, number) for number in range(chance.choice((1, 1, 1, 1, 2, 2, 2, 3))))
    faults = [_draw_fault(chance, jobs) for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3)))]
    return Schedule(seed, _with_mirrors(jobs), (*faults, *_draw_resets(seed, jobs)))


def _draw_resets(seed: int, jobs: tuple[Job, ...]) -> list[Fault]:
    chance = random.Random(f"resets of {seed}")
    resets = []
    for _ in range(chance.choice((0, 0, 1, 2))):
        number = chance.randrange(len(jobs))
        job = jobs[number]
        resets.append(Fault("reset", number, chance.randrange(job.ranks), chance.randint(1, 15 + 45 * job.saves)))
    return resets


def _draw_job(chance: random.Random, number: int) -> Job:
    ranks = chance.choice((1, 2, 2, 2, 2, 3, 3, 4))
    stage = chance.choice((None, None, "now", "lazy"))
    job = Job(
        ranks=ranks,
        saves=chance.choice((1, 1, 2, 2, 3)) if ranks < 4 else chance.choice((1, 1, 2)),
        ranks_per_block=chance.choice((1, 2, 128)),
        stages=chance.random() < 0.4,
        stage=stage,
        mirror=chance.random() < 0.2,
        incremental=chance.random() < 0.2,
        keep_last=chance.choice((None, 1, 1, 2)),
        new_store=chance.random() < 0.5,
        leaves_stopped=chance.random() < 0.6,
        back=chance.choice((0, 0, 0, 1, 2)) if number else 0,
        misfit=number > 0 and chance.random() < (0.1, 0.4)[number > 1],
        looks_alone=chance.random() < 0.2,
    )
    if stage:
        job = replace(job, hears=tuple(rank for rank in range(ranks) if chance.random() < 0.4))
    if chance.random() < 0.08:
        job = replace(job, bad_metrics=chance.randint(1, job.saves))
    if ranks > 1 and chance.random() < 0.05:
        job = replace(job, astray=(chance.randrange(ranks), chance.randint(1, job.saves)))
    if chance.random() < 0.06:
        job = replace(job, slow_rank=chance.randrange(ranks), planning_seconds=1.6 * DEADLINE_SECONDS)
    if chance.random() < 0.06:
        job = replace(job, slow_rank=chance.randrange(ranks), state_seconds=1.6 * DEADLINE_SECONDS)
    return replace(job, stops=chance.random() < 0.2, exports=chance.random() < 0.06)


def _with_mirrors(jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """A run has a mirror, or has none."""
    return tuple(replace(job, mirror=jobs[0].mirror) for job in jobs)


def _draw_fault(chance: random.Random, jobs: tuple[Job, ...]) -> Fault:
    number = chance.randrange(len(jobs))
    job = jobs[number]
    kinds = ["kill"] * 4 + ["stop"] * 4 + ["disk"] * 3 + ["unreadable"] * 2
    kinds += ["cut", "cut", "power", "store", "interrupt"]
    kind = chance.choice(kinds + ["object"] * (6 * jobs[0].mirror) + ["signal"] * (15 * job.stops))
    rank = chance.choice((0, chance.randrange(job.ranks)))
    at = chance.randint(1, 15 + 45 * job.saves)
    if kind == "stop" and chance.random() < 0.6:
        return Fault(kind, number, rank, at, beside=chance.randint(1, 120))
    if kind in ("stop", "cut"):
        seconds = chance.choice((0.05, 0.5, 1.5 * DEADLINE_SECONDS, 1.5 * DEADLINE_SECONDS, 15.0))
        return Fault(kind, number, rank, at, seconds)
    if kind == "disk":
        detail = chance.choice(("EIO", "EIO", "ENOSPC", "ESTALE"))
        return Fault(kind, number, rank, chance.randint(1, 10 + 30 * job.saves), detail=detail)
    if kind == "object":
        detail = chance.choice(("before", "after", "hang", "late", "twice"))
        return Fault(kind, number, rank, chance.randint(1, 25 * job.saves), detail=detail)
    if kind == "unreadable":
        return Fault(kind, number + 1)
    return Fault(kind, number, rank, at)
