"""Gathers each sharded matrix at its owner, computes there on the whole matrix, and scatters the results.

Everything that all ranks must agree on is in the plan (`assignment.py`); here are the buffers and the exchanges. While
an owner computes, the next round's matrices are on their way to it and the last round's results on their way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import torch
from torch import Tensor

from shardopt.algorithms.gathering.assignment import BufferLayout, Round, plan
from shardopt.algorithms.gathering.step import GatheredStep
from shardopt.ranks import Exchange, Ranks
from shardopt.sharding.box import Box

Part = tuple[GatheredStep, int]
"""A parameter, and the number of one of its parts."""


class MatrixRedistributor:
    """Computes on matrices that are sharded over the same ranks, each whole at its owner.

    Args:
        ranks: to exchange with.
        dtype: in which matrices travel and are worked on.
        device: on which they travel; each is worked on on its parameter's.
        round_bytes: at which size of its matrices an owner puts the next one into a later round; the same on each rank.
    """

    def __init__(self, ranks: Ranks, dtype: torch.dtype, device: torch.device, round_bytes: int) -> None:
        self._ranks, self._dtype, self._device = ranks, dtype, device
        self._most_elements = round_bytes // dtype.itemsize

    def run(self, parts: Sequence[Part], flags: Sequence[float] = ()) -> Tensor:
        """Computes on parts; all ranks pass the same parts in the same order. Collective: two exchanges per round.

        Args:
            parts: one at least.
            flags: numbers that this rank sends to all others with the first exchange; as many on each rank.

        Returns:
            [R, len(flags)], the flags of each rank, in the dtype and on the device of the exchange.
        """
        ranks = self._ranks
        jobs = tuple(step.job(number) for step, number in parts)
        rounds = plan(jobs, ranks.members, ranks.members[ranks.rank], self._most_elements)
        gathering = self._gather(rounds[0], parts, flags)
        flags_of_ranks = torch.empty(0)
        returning: tuple[Round, Exchange] | None = None
        for number, here in enumerate(rounds):
            gathered = gathering.wait()
            header = 0 if number else len(flags)
            if not number:
                flags_of_ranks = torch.stack(_headers(here.recv_from_holders, gathered, header))
            if number + 1 < len(rounds):
                gathering = self._gather(rounds[number + 1], parts)
            results = self._return(here, gathered, parts, header)
            if returning is not None:
                _apply(*returning, parts)
            returning = here, results
        if returning is not None:
            _apply(*returning, parts)
        return flags_of_ranks

    def _gather(self, here: Round, parts: Sequence[Part], flags: Sequence[float] = ()) -> Exchange:
        header = len(flags)
        sent = self._buffer(here.send_to_owner, header)
        if header:
            own = torch.tensor(flags, dtype=self._dtype, device="cpu").to(self._device, non_blocking=True)
            torch._foreach_copy_(_headers(here.send_to_owner, sent, header), [own] * len(here.send_to_owner.counts))
        for number, segments in _by_matrix(here.send_to_owner, sent, header):
            step, part = parts[number]
            local_boxes = step.local_boxes(part)
            for box, segment in segments:
                segment.copy_(local_boxes[box])
        send_counts, recv_counts = (
            [count + header for count in layout.counts] for layout in (here.send_to_owner, here.recv_from_holders)
        )
        return self._ranks.all_to_all(sent, send_counts, recv_counts)

    def _return(self, here: Round, gathered: Tensor, parts: Sequence[Part], header: int) -> Exchange:
        sent = self._buffer(here.send_to_holders)
        matrices: dict[int, Tensor] = {}
        for number, segments in _by_matrix(here.recv_from_holders, gathered, header):
            step, part = parts[number]
            if number not in matrices:
                # Memory of its own even where the matrix came as one box: the bits of a product may depend on where
                # its factors are aligned.
                matrices[number] = torch.empty(step.parts[part].sizes, dtype=self._dtype, device=step.device)
            for box, segment in segments:
                _box_of(matrices[number], box).copy_(segment)
        for number in here.owned:
            step, part = parts[number]
            matrices[number] = step.compute(part, matrices[number])
        for number, segments in _by_matrix(here.send_to_holders, sent):
            for box, segment in segments:
                segment.copy_(_box_of(matrices[number], box))
        return self._ranks.all_to_all(sent, here.send_to_holders.counts, here.recv_from_owner.counts)

    def _buffer(self, layout: BufferLayout, header: int = 0) -> Tensor:
        return torch.empty(sum(layout.counts) + header * len(layout.counts), dtype=self._dtype, device=self._device)


def _apply(here: Round, exchange: Exchange, parts: Sequence[Part]) -> None:
    for number, segments in _by_matrix(here.recv_from_owner, exchange.wait()):
        step, part = parts[number]
        for box, segment in segments:
            step.apply(part, box, segment)


def _by_matrix(layout: BufferLayout, buffer: Tensor, header: int = 0) -> Iterator[tuple[int, list[tuple[Box, Tensor]]]]:
    """Yields, for each run of boxes of one matrix, the boxes and their positions in the buffer.

    Args:
        layout: of the buffer.
        buffer: rank by rank; each rank's segment begins with `header` elements more.
    """
    memory_of = chain.from_iterable(segments for _, segments in _of_ranks(layout, buffer, header))
    for number, run in groupby(zip(layout.boxes, memory_of, strict=True), key=lambda pair: pair[0][0]):
        yield number, [(box, memory.view(box.sizes)) for (_, box), memory in run]


def _headers(layout: BufferLayout, buffer: Tensor, header: int) -> list[Tensor]:
    """Returns the header of each rank's segment of a buffer."""
    return [each for each, _ in _of_ranks(layout, buffer, header)]


def _of_ranks(layout: BufferLayout, buffer: Tensor, header: int) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """Yields the header of each rank's segment of a buffer, and the memory of the boxes that follow it."""
    sizes = iter([box.numel for _, box in layout.boxes])
    segments = torch.split(buffer, [header + count for count in layout.counts])
    for count, segment in zip(layout.counts, segments, strict=True):
        own: list[int] = []
        while sum(own) < count:
            own.append(next(sizes))
        first, *boxes = torch.split(segment, [header, *own])
        yield first, boxes


def _box_of(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(map(slice, box.offsets, box.ends))]
