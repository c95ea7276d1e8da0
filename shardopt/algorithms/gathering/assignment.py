"""Assigns matrices to owners, the costliest first, and plans which boxes are sent. Integers only, no tensors.

M matrices that lie in boxes over the same R ranks. Each is given to one owner, which gathers its boxes, works on the
whole and hands each box back to all who hold it. All ranks compute the same plan from the same layouts, without
communication.

Plans are made of rounds, each with one exchange to the owners and one back, so that an owner need not have all of its
matrices in memory at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardopt.sharding.box import Box
from shardopt.sharding.layout import Layout


@dataclass(frozen=True, slots=True)
class Job:
    """One matrix: its layout, and the cost of computing on it.

    Args:
        layout: with the holders of each box.
        cost: in any unit that is the same for all.
        owner: the rank that is to compute, a global number, where it keeps state for it; None: whichever suits. The
            same for all matrices of a plan.
    """

    layout: Layout
    cost: int
    owner: int | None = None

    @property
    def elements(self) -> int:
        """The number of elements that the owner sends back, once per holder. It gathers at most as many."""
        holders_of_boxes = self.layout.holders or ((),)
        return sum(box.numel * len(holders) for box, holders in zip(self.layout.boxes, holders_of_boxes, strict=True))


@lru_cache(maxsize=4096)
def layout_on(shape: tuple[int, ...], box: Box, rank: int) -> Layout:
    """Returns the layout of a plain tensor, cached from step to step together with its hash."""
    return Layout.from_holders(shape, {box: (rank,)})


@lru_cache(maxsize=8192)
def job_of(layout: Layout, part: Box, cost: int, owner: int | None = None) -> Job:
    """Returns the job for a part of a parameter: its layout in the part's own coordinates, its cost and owner.

    Args:
        layout: of the parameter, with the holders of each box.
        part: its box in the parameter.
        cost, owner: as of `Job`.
    """
    if layout.shape != part.sizes:
        cut = zip(layout.boxes, layout.holders or (), strict=True)
        common = ((box.intersect(part), holders) for box, holders in cut)
        inside = {box.within(part): holders for box, holders in common if box is not None}
        layout = Layout.from_holders(part.sizes, inside)
    return Job(layout, cost, owner)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The boxes that a rank sends or receives in one exchange, in the order of its buffer.

    Args:
        boxes: the number of the matrix, and the box.
        counts: how many elements go to or come from each of the ranks.
    """

    boxes: tuple[tuple[int, Box], ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's computations and exchanges in a round.

    Args:
        owned: the numbers of the matrices that it works on.
        send_to_owner: the boxes that it sends to the owners of matrices.
        recv_from_holders: the boxes of its own matrices that it gets.
        send_to_holders: the boxes of its results that it sends back.
        recv_from_owner: the boxes of results that it gets.
    """

    owned: tuple[int, ...]
    send_to_owner: BufferLayout
    recv_from_holders: BufferLayout
    send_to_holders: BufferLayout
    recv_from_owner: BufferLayout


@lru_cache(maxsize=256)
def plan(jobs: tuple[Job, ...], ranks: tuple[int, ...], rank: int, most_elements: int) -> tuple[Round, ...]:
    """Plans the rounds of `rank`. All ranks have the same number of rounds, with the same matrices.

    Args:
        jobs: matrices that `ranks` and no others hold (not all of them need), in the same order on every rank.
        ranks: global numbers, in the order of the process group through which they exchange.
        rank: one of them.
        most_elements: at which size of its matrices an owner puts the next one into a later round.
    """
    if any(job.owner is None for job in jobs):
        owners = _owners([job.cost for job in jobs], len(ranks))
    else:
        owners = [ranks.index(job.owner) for job in jobs if job.owner is not None]
    rounds = _rounds([job.elements for job in jobs], owners, most_elements)
    return tuple(_round(jobs, [ranks[owner] for owner in owners], numbers, ranks, rank) for numbers in rounds)


def _owners(costs: Sequence[int], count: int) -> list[int]:
    """Assigns each job to one of `count` owners: the costliest first, each to the owner with the least cost so far.

    No owner gets more than 4/3 of what the best division would give the busiest (Graham 1969).
    """
    loads = [(0, owner) for owner in range(count)]
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        load, owners[job] = loads[0]
        heapq.heapreplace(loads, (load + costs[job], owners[job]))
    return owners


def _rounds(sizes: Sequence[int], owners: Sequence[int], most: int) -> list[list[int]]:
    """Splits jobs into rounds. In each round an owner has at most `most` elements, or one job."""
    rounds: list[list[int]] = [[]]
    filled: dict[int, tuple[int, int]] = {}  # owner -> the round of its last job, and the size of its jobs there
    for job, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        at, full = filled.get(owner, (0, 0))
        at, full = (at + 1, size) if full and full + size > most else (at, full + size)
        filled[owner] = at, full
        if at == len(rounds):
            rounds.append([])
        rounds[at].append(job)
    return rounds


def _round(
    jobs: Sequence[Job], owners: Sequence[int], numbers: Sequence[int], ranks: Sequence[int], rank: int
) -> Round:
    owned = tuple(job for job in numbers if owners[job] == rank)
    held = [(job, box, holders) for job in numbers for box, holders in _boxes_of(jobs[job].layout, rank)]
    whole = [(job, box, holders) for job in owned for box, holders in _boxes(jobs[job].layout)]
    return Round(
        owned,
        send_to_owner=_buffer_layout(
            ((owners[job], job, box) for job, box, holders in held if _sender(holders, owners[job], ranks) == rank),
            ranks,
        ),
        recv_from_holders=_buffer_layout(
            ((_sender(holders, rank, ranks), job, box) for job, box, holders in whole), ranks
        ),
        send_to_holders=_buffer_layout(
            ((holder, job, box) for job, box, holders in whole for holder in holders), ranks
        ),
        recv_from_owner=_buffer_layout(((owners[job], job, box) for job, box, _ in held), ranks),
    )


def _boxes(layout: Layout) -> Iterable[tuple[Box, tuple[int, ...]]]:
    assert layout.holders is not None  # a tensor whose holders are not known stays where it is
    return zip(layout.boxes, layout.holders, strict=True)


@lru_cache(maxsize=4096)
def _boxes_of(layout: Layout, rank: int) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    return tuple((box, holders) for box, holders in _boxes(layout) if rank in holders)


def _sender(holders: Sequence[int], owner: int, ranks: Sequence[int]) -> int:
    """Returns the holder that sends a box to the owner: the owner itself, or the holder in the owner's replica.

    Replicas are taken to be runs of ranks of equal length, as in a mesh whose first dimension replicates; then a box
    does not leave the hosts of a replica.
    """
    return owner if owner in holders else holders[ranks.index(owner) * len(holders) // len(ranks)]


def _buffer_layout(boxes: Iterable[tuple[int, int, Box]], ranks: Sequence[int]) -> BufferLayout:
    """Orders boxes (peer, job, box) in a buffer; sender and receiver order the boxes of one peer alike."""
    position = {rank: i for i, rank in enumerate(ranks)}
    ordered = sorted(boxes, key=lambda each: position[each[0]])  # stable: jobs and boxes stay in ascending order
    counts = [0] * len(ranks)
    for peer, _, box in ordered:
        counts[position[peer]] += prod(box.sizes)
    return BufferLayout(tuple((job, box) for _, job, box in ordered), tuple(counts))
