"""Work on whole matrices that are sharded: gather each at its owner, work there, hand the results back.

Everything that all ranks must agree on is in the plan (`owners.py`); here are the buffers and the exchanges. While an
owner works, the next round's matrices are on their way to it and the last round's results on their way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Protocol

import torch
from torch import Tensor

from shardopt.algorithms.muon.assignment import BufferLayout, Job, Round, plan
from shardopt.ranks import Exchange, Ranks
from shardopt.sharding.box import Box


class Task(Protocol):
    """What is to be done with one matrix."""

    @property
    def job(self) -> Job:
        """Where the matrix lies, and how much work it is."""

    def parts(self) -> Mapping[Box, Tensor]:
        """What this rank has of the matrix; asked once, when it is to be sent. Converted to the buffers' dtype."""

    def work(self, whole: Tensor) -> Tensor:
        """The result, of the same shape and dtype. Owner only; `whole` is its own to overwrite."""

    def take(self, box: Box, part: Tensor) -> None:
        """Uses a part of the result, of the box's sizes: once for each box that this rank holds."""


class MatrixRedistributor:
    """Tasks of matrices that lie over the same ranks.

    Args:
        ranks: to exchange with.
        dtype: in which matrices travel and are worked on.
        device: where.
        round_bytes: at which size of its matrices an owner puts the next one into a later round; the same on each rank.
    """

    def __init__(self, ranks: Ranks, dtype: torch.dtype, device: torch.device, round_bytes: int) -> None:
        self._ranks, self._dtype, self._device = ranks, dtype, device
        self._most_elements = round_bytes // dtype.itemsize

    def run(self, tasks: Sequence[Task], word: Sequence[float] = ()) -> Tensor:
        """Does the tasks, which are the same in the same order on every rank. Collective: two exchanges a round.

        Args:
            tasks: one at least.
            word: numbers that this rank tells all others beside it; as many on each rank.

        Returns:
            [R, len(word)], what each of the ranks told, in the dtype and on the device of the exchange.
        """
        ranks = self._ranks
        rounds = plan(tuple(task.job for task in tasks), ranks.members, ranks.members[ranks.rank], self._most_elements)
        gathering = self._gather(rounds[0], tasks, word)
        told = torch.empty(0)
        returning: tuple[Round, Exchange] | None = None
        for number, here in enumerate(rounds):
            wholes = gathering.wait()
            head = 0 if number else len(word)
            if not number:
                told = torch.stack(_heads(here.recv_from_holders, wholes, head))
            if number + 1 < len(rounds):
                gathering = self._gather(rounds[number + 1], tasks)
            results = self._return(here, wholes, tasks, head)
            if returning is not None:
                _take(*returning, tasks)
            returning = here, results
        if returning is not None:
            _take(*returning, tasks)
        return told

    def _gather(self, here: Round, tasks: Sequence[Task], word: Sequence[float] = ()) -> Exchange:
        head = len(word)
        sent = self._buffer(here.send_to_owner, head)
        if head:
            own = torch.tensor(word, dtype=self._dtype).to(self._device, non_blocking=True)
            torch._foreach_copy_(_heads(here.send_to_owner, sent, head), [own] * len(here.send_to_owner.counts))
        for number, segments in _by_matrix(here.send_to_owner, sent, head):
            parts = tasks[number].parts()
            for box, segment in segments:
                segment.copy_(parts[box])
        send_to_owner, recv_from_holders = (
            [count + head for count in route.counts] for route in (here.send_to_owner, here.recv_from_holders)
        )
        return self._ranks.all_to_all(sent, send_to_owner, recv_from_holders)

    def _return(self, here: Round, gathered: Tensor, tasks: Sequence[Task], head: int) -> Exchange:
        sent = self._buffer(here.send_to_holders)
        wholes: dict[int, Tensor] = {}
        for number, segments in _by_matrix(here.recv_from_holders, gathered, head):
            if number not in wholes:
                # Memory of its own even where the matrix came as one box: the bits of a product may depend on where
                # its factors are aligned.
                wholes[number] = gathered.new_empty(tasks[number].job.layout.shape)
            for box, segment in segments:
                _at(wholes[number], box).copy_(segment)
        for number in here.owned:
            wholes[number] = tasks[number].work(wholes[number])
        for number, segments in _by_matrix(here.send_to_holders, sent):
            for box, segment in segments:
                segment.copy_(_at(wholes[number], box))
        return self._ranks.all_to_all(sent, here.send_to_holders.counts, here.recv_from_owner.counts)

    def _buffer(self, route: BufferLayout, head: int = 0) -> Tensor:
        return torch.empty(sum(route.counts) + head * len(route.counts), dtype=self._dtype, device=self._device)


def _take(here: Round, exchange: Exchange, tasks: Sequence[Task]) -> None:
    for number, segments in _by_matrix(here.recv_from_owner, exchange.wait()):
        for box, segment in segments:
            tasks[number].take(box, segment)


def _by_matrix(route: BufferLayout, buffer: Tensor, head: int = 0) -> Iterator[tuple[int, list[tuple[Box, Tensor]]]]:
    """The boxes of a route and where they lie in its buffer, for each run of boxes of one matrix.

    Args:
        route: what goes to or comes from each rank.
        buffer: of that, rank by rank; each one's part begins with `head` elements more.
    """
    parts = zip(route.parts, chain.from_iterable(boxes for _, boxes in _of_ranks(route, buffer, head)), strict=True)
    for number, run in groupby(parts, key=lambda part: part[0][0]):
        yield number, [(box, memory.view(box.sizes)) for (_, box), memory in run]


def _heads(route: BufferLayout, buffer: Tensor, head: int) -> list[Tensor]:
    """What each rank's part of a buffer begins with."""
    return [each for each, _ in _of_ranks(route, buffer, head)]


def _of_ranks(route: BufferLayout, buffer: Tensor, head: int) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """What each rank's part of a buffer begins with, and where the boxes lie that follow."""
    sizes = iter([box.numel for _, box in route.parts])
    for count, part in zip(route.counts, torch.split(buffer, [head + count for count in route.counts]), strict=True):
        own: list[int] = []
        while sum(own) < count:
            own.append(next(sizes))
        first, *boxes = torch.split(part, [head, *own])
        yield first, boxes


def _at(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(map(slice, box.offsets, box.ends))]
