"""Broadcast reads: of several ranks that load one box, one reads it and sends it to the others.

    R ranks, H holders of a box

Where storage is slow beside the network, H reads of the same bytes cost more than one read and H - 1 sends. A box is
read by the rank that would write it in a save of the same layouts, so every rank works it out alone, and all read about
as much.

They are sent in rounds. In each of them a rank sends at most so many different bytes that they are no more than the
bound when they are counted once for each rank that they go to; nor are those more that a rank gets from all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.format.assign import Member, assign
from shardopt.checkpoint.format.tensor_bytes import dtype_name, flat_bytes, stored_dtype
from shardopt.ranks import Ranks
from shardopt.runtime.accelerator import wait_for_reads
from shardopt.runtime.torch_private import changeable
from shardopt.sharding.box import Box, cut_in_order
from shardopt.sharding.pieces import Piece, View, narrowed

ShareReads = Literal["auto", "always", "never"]

_ROUND_BYTES = 16 << 20  # that one rank sends to all others in one round, and gets from them, and takes memory for
_LEAST_BYTES = 4 << 10  # that a rank sends to another in a round, however many there are


class _SharedBox(NamedTuple):
    """A box, the rank that reads it, and all ranks that hold it."""

    key: str
    box: Box
    reader: int
    holders: tuple[int, ...]

    @property
    def others(self) -> Iterator[int]:
        return (rank for rank in self.holders if rank != self.reader)


def shared_among(views: Mapping[str, View]) -> dict[str, View]:
    """Returns the tensors with a box that several ranks are known to hold, by key."""
    layouts = {key: view.layout for key, view in views.items() if not view.layout.local}
    return {key: views[key] for key, layout in layouts.items() if layout.holders is None or layout.shared}


def fingerprint(views: Mapping[str, View]) -> str:
    """Returns a hash that is equal on two ranks that hold the same tensors in the same layouts."""
    words = [f"{key}\0{dtype_name(view.dtype)}\0{view.layout.fingerprint}" for key, view in sorted(views.items())]
    return xxhash.xxh3_64_hexdigest("\0".join(words).encode())


class BroadcastReads:
    """Assigns each box that several ranks hold to one reader, and later sends it to the other holders.

    Args:
        views: the tensors (`shared_among`), the same on all ranks but for the pieces.
        ranks: those that load.
    """

    def __init__(self, views: Mapping[str, View], ranks: Ranks) -> None:
        self._views, self._ranks = views, ranks
        self._boxes = list(_shared_boxes(views, ranks.size))

    def own_pieces(self) -> dict[str, list[Piece]]:
        """Returns the pieces of this rank's memory that it reads itself, by key."""
        own: defaultdict[str, list[Piece]] = defaultdict(list)
        for shared in self._boxes:
            if shared.reader == self._ranks.rank:
                own[shared.key].append(Piece(shared.box, self._memory(shared.key, shared.box)))
        return own

    def exchange(self) -> None:
        """Sends the boxes that this rank read, and receives the others. Collective; in rounds of bounded size."""
        wait_for_reads(piece.tensor for view in self._views.values() for piece in view.pieces)
        for boxes in self._rounds():
            self._exchange(boxes)

    def _exchange(self, boxes: list[_SharedBox]) -> None:
        rank, size, device = self._ranks.rank, self._ranks.size, self._ranks.device
        sent_counts, received_counts = [0] * size, [0] * size
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        received: list[list[Tensor]] = [[] for _ in range(size)]
        for shared in boxes:
            if shared.reader == rank:
                raw = flat_bytes(self._memory(shared.key, shared.box))
                for other in shared.others:
                    sent[other].append(raw)
                    sent_counts[other] += raw.numel()
            elif rank in shared.holders:
                target = self._memory(shared.key, shared.box)
                received[shared.reader].append(target)
                received_counts[shared.reader] += target.nbytes
        outgoing = torch.empty(sum(sent_counts), dtype=torch.uint8, device=device)
        begin = 0
        for raw in (raw for tensors in sent for raw in tensors):
            outgoing[begin : begin + raw.numel()].copy_(raw)
            begin += raw.numel()
        incoming = self._ranks.all_to_all(outgoing, sent_counts, received_counts).wait()
        begin = 0
        for target in (tensor for tensors in received for tensor in tensors):
            raw = incoming[begin : begin + target.nbytes]
            # Cloned, as a tensor of another dtype must begin where such a one may.
            with changeable([target]):
                target.copy_(raw.clone().view(target.dtype).view(target.shape))
            begin += target.nbytes

    def _rounds(self) -> Iterator[list[_SharedBox]]:
        """Yields the boxes sent in each round; the same on every rank."""
        limit = max(_ROUND_BYTES // max(self._most_partners(), 1), _LEAST_BYTES)
        by_reader: defaultdict[int, list[_SharedBox]] = defaultdict(list)
        for shared in self._boxes:
            if len(shared.holders) > 1:
                by_reader[shared.reader].append(shared)
        queues = [self._in_rounds(boxes, limit) for boxes in by_reader.values()]
        while queues:
            next_boxes = [(queue, next(queue, None)) for queue in queues]
            queues = [queue for queue, boxes in next_boxes if boxes]
            if queues:
                yield [shared for _, boxes in next_boxes for shared in boxes or ()]

    def _in_rounds(self, boxes: Iterable[_SharedBox], limit: int) -> Iterator[list[_SharedBox]]:
        """Splits the boxes that one rank sends into rounds of at most `limit` bytes.

        A generator: thousands of ranks send many small pieces.
        """
        together: list[_SharedBox] = []
        nbytes = 0
        for shared in boxes:
            itemsize = self._views[shared.key].dtype.itemsize
            for box in cut_in_order(shared.box, limit // itemsize):
                if together and nbytes + box.numel * itemsize > limit:
                    yield together
                    together, nbytes = [], 0
                together.append(shared._replace(box=box))
                nbytes += box.numel * itemsize
        if together:
            yield together

    def _most_partners(self) -> int:
        """Returns the largest number of ranks that any rank sends to, or receives from."""
        known: dict[int, tuple[int, ...]] = {}  # by identity: thousands of boxes share a tuple of thousands of ranks
        distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
        readers: defaultdict[int, set[int]] = defaultdict(set)
        for shared in self._boxes:
            holders = known.get(id(shared.holders))
            if holders is None:
                holders = known[id(shared.holders)] = distinct.setdefault(shared.holders, shared.holders)
            readers[id(holders)].add(shared.reader)
        sends_to = 0
        receives_from = np.zeros(self._ranks.size, dtype=np.int64)
        for holders in distinct:
            each = list(readers[id(holders)])
            receives_from[list(holders)] += len(each)
            receives_from[each] -= 1  # not from itself
            sends_to = max(sends_to, len(holders) - 1)
        return max(sends_to, min(int(receives_from.max(initial=0)), self._ranks.size - 1))

    def _memory(self, key: str, box: Box) -> Tensor:
        piece = next(piece for piece in self._views[key].pieces if piece.box.contains(box))
        return narrowed(piece.tensor, box.within(piece.box))


def _shared_boxes(views: Mapping[str, View], size: int) -> Iterator[_SharedBox]:
    everyone = tuple(range(size))
    members = {
        key: Member((key,), stored_dtype(view.dtype, key), view.layout, everyone) for key, view in sorted(views.items())
    }
    for key, assignment in assign(members).items():
        layout, position = views[key].layout, 0
        # The assignment has the layout's boxes in their order, some of them in several pieces.
        for box, (reader, _) in zip(assignment.boxes, assignment.writers, strict=True):
            while not layout.boxes[position].contains(box):
                position += 1
            yield _SharedBox(key, box, reader, everyone if layout.holders is None else layout.holders[position])
