"""What happens in one simulation of a stream, as data: who publishes, who follows, and the faults; from a seed."""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from tests.simulation.schedule import DEADLINE_SECONDS

LAYOUTS = ("whole", "rows", "columns")


@dataclass(frozen=True)
class Hit:
    """A fault of a rank, or of what is stored just when that rank does an operation.

    Args:
        kind: "kill", "stop" (for `seconds`), "disk" (error `detail` of one operation on files), "slow" (its operations
            on files take `seconds` times longer), "object" (`detail` of one request), "flip" (a byte of `detail`:
            "data" or "manifest"), "lose" (a file of `detail`).
        at: the number of the operation; of those on files or objects for "disk" and "object".
    """

    kind: str
    rank: int = 0
    at: int = 1
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class Publishing:
    """A job that publishes, begun once the one before has ended.

    Args:
        ranks: how many.
        changes: for each step what changes: "none", "one" (element), "few" (elements of most tensors), or "all".
        back: how many of the last steps of the job before it trains again, with other results.
        anchor_every, keep, durable: options of its Publisher.
        layout: of the matrix over its ranks: one of `LAYOUTS`.
        stages: whether each rank has other tensors, as in a pipeline.
        seconds: between two steps.
        hears: whether its ranks wait for the result of each step.
        hits: its faults.
    """

    ranks: int = 1
    changes: tuple[str, ...] = ("few", "few")
    back: int = 0
    anchor_every: int = 50
    keep: int = 3
    durable: bool = False
    layout: str = "whole"
    stages: bool = False
    seconds: float = 0.02
    hears: bool = False
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True)
class Following:
    """A job that follows; it is started again when its ranks have ended too early.

    Args:
        ranks: how many.
        updates: how many calls it makes while there are faults.
        joins_at: seconds from the beginning.
        seconds: between two updates.
        pauses_before: the update before which it does nothing for `pause_seconds`; 0 for none.
        threads: that serve, on each rank.
        holds: the look at the weights in which the first of them stays beyond the deadline; 0 for none.
        asks: the update that is of a given step; 0 for none.
        spoils: the update before which the program changes the weights; 0 for none.
        memory_bytes: option of its Follower.
        layout, stages: as for `Publishing`.
        strided: whether one tensor is every second element of its memory.
        hits: its faults, until it is started again.
    """

    ranks: int = 1
    updates: int = 2
    joins_at: float = 0.0
    seconds: float = 0.02
    pauses_before: int = 0
    pause_seconds: float = 0.5
    threads: int = 0
    holds: int = 0
    asks: int = 0
    spoils: int = 0
    memory_bytes: int = 1 << 30
    layout: str = "whole"
    stages: bool = False
    strided: bool = False
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True)
class Stream:
    """One simulation: all that happens follows from this.

    Args:
        remote: whether the root is on an object store.
        first: the step that is published first.
    """

    seed: int
    publishing: tuple[Publishing, ...] = ()
    following: tuple[Following, ...] = ()
    remote: bool = False
    first: int = 1

    def __str__(self) -> str:
        return _code(self)

    @property
    def hits(self) -> list[Hit]:
        """All faults."""
        return [hit for jobs in (self.publishing, self.following) for job in jobs for hit in job.hits]


def _code(made: Any) -> str:
    """Writes a value as code, without what is as by default."""
    if isinstance(made, tuple):
        return f"({', '.join(map(_code, made))}{',' * (len(made) == 1)})"
    if not is_dataclass(made):
        return repr(made)
    given = [
        f"{field.name}={_code(getattr(made, field.name))}"
        for field in fields(made)
        if field.default is MISSING or getattr(made, field.name) != field.default
    ]
    return f"{type(made).__name__}({', '.join(given)})"


def draw(seed: int) -> Stream:
    """Draws a schedule."""
    chance = random.Random(f"stream {seed}")
    remote = chance.random() < 0.2
    calm = chance.random() < 0.2
    publishing = [_publishing(chance, number, remote, calm) for number in range(chance.choice((1, 1, 2, 2, 3)))]
    following = [_following(chance, remote, calm) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    return Stream(seed, tuple(publishing), tuple(following), remote, chance.choice((0, 1, 1, 1)))


def _publishing(chance: random.Random, number: int, remote: bool, calm: bool) -> Publishing:
    ranks = chance.choice((1, 1, 2, 2, 3))
    steps = chance.randint(2, 6 if ranks < 3 else 4)
    changes = tuple(chance.choice(("few", "few", "few", "one", "none", "all")) for _ in range(steps))
    hits = () if calm else _hits(chance, ranks, 10 + 14 * steps, remote)
    return Publishing(
        ranks=ranks,
        changes=changes,
        back=chance.choice((0, 1, 2, 3)) if number else 0,
        anchor_every=chance.randint(1, 4),
        keep=chance.randint(1, 3),
        durable=chance.random() < 0.2,
        layout=chance.choice(LAYOUTS),
        stages=chance.random() < 0.4,
        seconds=chance.choice((0.0, 0.005, 0.02, 0.1)),
        hears=chance.random() < 0.4,
        hits=hits,
    )


def _following(chance: random.Random, remote: bool, calm: bool) -> Following:
    ranks, updates = chance.choice((1, 1, 2, 2, 3)), chance.randint(1, 8)

    def one_of_them(likely: float) -> int:
        return chance.randint(1, updates) if chance.random() < likely else 0

    hits = () if calm else _hits(chance, ranks, 4 + 14 * updates, remote)
    return Following(
        ranks=ranks,
        updates=updates,
        joins_at=chance.choice((0.0, 0.0, 0.02, 0.1, 0.3)),
        seconds=chance.choice((0.0, 0.02, 0.05, 0.1, 0.2)),
        pauses_before=one_of_them(0.2),
        pause_seconds=chance.choice((0.1, 0.5, 1.8 * DEADLINE_SECONDS)),
        threads=chance.choice((0, 1, 1, 2)),
        holds=chance.randint(1, 20) if chance.random() < 0.04 else 0,
        asks=one_of_them(0.3),
        spoils=one_of_them(0.15),
        memory_bytes=chance.choice((0, 1500, 1 << 30, 1 << 30)),
        layout=chance.choice(LAYOUTS),
        stages=chance.random() < 0.4,
        strided=chance.random() < 0.3,
        hits=hits,
    )


def _hits(chance: random.Random, ranks: int, operations: int, remote: bool) -> tuple[Hit, ...]:
    return tuple(_hit(chance, ranks, operations, remote) for _ in range(chance.choice((0, 0, 1, 1, 2))))


def _hit(chance: random.Random, ranks: int, operations: int, remote: bool) -> Hit:
    kind = chance.choice(("kill", "kill", "kill", "stop", "disk", "disk", "slow", "flip", "lose"))
    rank, at = chance.randrange(ranks), chance.randint(1, operations)
    if remote and kind in ("disk", "slow"):
        detail = chance.choice(("before", "after", "hang", "late", "twice"))
        return Hit("object", rank, chance.randint(1, operations // 2), detail=detail)
    if kind == "stop":
        return Hit(kind, rank, at, chance.choice((0.05, 0.5, 1.5 * DEADLINE_SECONDS)))
    if kind == "disk":
        return Hit(kind, rank, chance.randint(1, operations // 2), detail=chance.choice(("EIO", "ENOSPC", "ESTALE")))
    if kind == "slow":
        return Hit(kind, rank, at, chance.choice((10.0, 100.0, 1000.0)))
    if kind in ("flip", "lose"):
        return Hit(kind, rank, at, detail=chance.choice(("data", "data", "data", "manifest")))
    return Hit(kind, rank, at)
