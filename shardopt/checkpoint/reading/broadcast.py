"""Loading what many ranks want: each box is read by one of its holders, which sends it to the others.

    R ranks, H holders of a box

Where storage is slow beside the network, H reads of the same bytes cost more than one read and H - 1 sends. Who reads
what is who would write it in a save of the same layouts, so every rank works it out alone, and all read about as much.

They are sent in rounds. In each of them a rank sends at most so many different bytes that they are no more than the
bound when they are counted once for each rank that they go to; nor are those that a rank gets from all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.format.tensor_bytes import dtype_name, stored_dtype
from shardopt.checkpoint.planning.assign import Member, assign
from shardopt.ranks import Ranks
from shardopt.sharding.box import Box, cut_in_order
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import Piece, View, narrowed

Replicas = Literal["auto", "read", "exchange"]

_ROUND_BYTES = 16 << 20  # that one rank sends to all others in one round, and gets from them, and takes memory for
_LEAST_BYTES = 4 << 10  # that a rank sends to another in a round, however many there are


class _Part(NamedTuple):
    """A box that one rank reads, and all ranks that hold it, to the others of which it is sent."""

    key: str
    box: Box
    reader: int
    holders: tuple[int, ...]

    @property
    def others(self) -> Iterator[int]:
        return (rank for rank in self.holders if rank != self.reader)


def shared_among(views: Mapping[str, View], size: int) -> dict[str, View]:
    """Those tensors of which several ranks are known to hold the same box."""
    if size == 1:
        return {}
    return {key: view for key, view in views.items() if not view.layout.local and _is_shared(view.layout)}


def _is_shared(layout: Layout) -> bool:
    return layout.holders is None or bool(layout.shared)


def fingerprint(views: Mapping[str, View]) -> str:
    """Equal on two ranks that hold the same tensors in the same layouts."""
    words = [f"{key}\0{dtype_name(view.dtype)}\0{view.layout.fingerprint}" for key, view in sorted(views.items())]
    return xxhash.xxh3_64_hexdigest("\0".join(words).encode())


class BroadcastReads:
    """Who reads which boxes of tensors that several ranks hold, and the sending afterwards.

    Args:
        views: the tensors (`shared_among`), the same on all ranks but for the pieces.
        ranks: those that load.
    """

    def __init__(self, views: Mapping[str, View], ranks: Ranks) -> None:
        self._views, self._ranks = views, ranks
        self._parts = list(_parts_of(views, ranks.size))

    def own(self) -> dict[str, list[Piece]]:
        """What this rank reads, by key: parts of its own memory."""
        own: defaultdict[str, list[Piece]] = defaultdict(list)
        for part in self._parts:
            if part.reader == self._ranks.rank:
                own[part.key].append(Piece(part.box, self._memory(part.key, part.box)))
        return own

    def exchange(self) -> None:
        """Sends what this rank has read, and fills the rest of its memory. Collective; in rounds of bounded size."""
        for parts in self._rounds():
            self._exchange(parts)

    def _exchange(self, parts: list[_Part]) -> None:
        rank, size, device = self._ranks.rank, self._ranks.size, self._ranks.device
        sent_counts, got_counts = [0] * size, [0] * size
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        got: list[list[Tensor]] = [[] for _ in range(size)]
        for part in parts:
            if part.reader == rank:
                raw = _raw(self._memory(part.key, part.box))
                for other in part.others:
                    sent[other].append(raw)
                    sent_counts[other] += raw.numel()
            elif rank in part.holders:
                target = self._memory(part.key, part.box)
                got[part.reader].append(target)
                got_counts[part.reader] += target.nbytes
        outgoing = torch.empty(sum(sent_counts), dtype=torch.uint8, device=device)
        begin = 0
        for raw in (raw for tensors in sent for raw in tensors):
            outgoing[begin : begin + raw.numel()].copy_(raw)
            begin += raw.numel()
        incoming = self._ranks.all_to_all(outgoing, sent_counts, got_counts).wait()
        begin = 0
        for target in (tensor for tensors in got for tensor in tensors):
            raw = incoming[begin : begin + target.nbytes]
            # Cloned, as a tensor of another dtype must begin where such a one may.
            target.copy_(raw.clone().view(target.dtype).view(target.shape))
            begin += target.nbytes

    def _rounds(self) -> Iterator[list[_Part]]:
        """All that is sent, a round at a time; the same on every rank."""
        limit = max(_ROUND_BYTES // max(self._most_partners(), 1), _LEAST_BYTES)
        by_reader: defaultdict[int, list[_Part]] = defaultdict(list)
        for part in self._parts:
            if len(part.holders) > 1:
                by_reader[part.reader].append(part)
        queues = [self._in_rounds(parts, limit) for parts in by_reader.values()]
        while queues:
            of_readers = [(queue, next(queue, None)) for queue in queues]
            queues = [queue for queue, parts in of_readers if parts]
            if queues:
                yield [part for _, parts in of_readers for part in parts or ()]

    def _in_rounds(self, parts: Iterable[_Part], limit: int) -> Iterator[list[_Part]]:
        """What one rank sends, cut so that in each round it is no more than the limit. Cut as it goes: thousands of
        ranks send many small pieces."""
        together: list[_Part] = []
        nbytes = 0
        for part in parts:
            itemsize = self._views[part.key].dtype.itemsize
            for box in cut_in_order(part.box, limit // itemsize):
                if together and nbytes + box.numel * itemsize > limit:
                    yield together
                    together, nbytes = [], 0
                together.append(part._replace(box=box))
                nbytes += box.numel * itemsize
        if together:
            yield together

    def _most_partners(self) -> int:
        """To how many ranks one sends at most, or from how many one gets."""
        known: dict[int, tuple[int, ...]] = {}  # by identity: thousands of parts share a tuple of thousands of ranks
        distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
        readers: defaultdict[int, set[int]] = defaultdict(set)
        for part in self._parts:
            holders = known.get(id(part.holders))
            if holders is None:
                holders = known[id(part.holders)] = distinct.setdefault(part.holders, part.holders)
            readers[id(holders)].add(part.reader)
        sends_to = 0
        gets_from = np.zeros(self._ranks.size, dtype=np.int64)
        for holders in distinct:
            each = list(readers[id(holders)])
            gets_from[list(holders)] += len(each)
            gets_from[each] -= 1  # not from itself
            sends_to = max(sends_to, len(holders) - 1)
        return max(sends_to, min(int(gets_from.max(initial=0)), self._ranks.size - 1))

    def _memory(self, key: str, box: Box) -> Tensor:
        piece = next(piece for piece in self._views[key].pieces if piece.box.contains(box))
        return narrowed(piece.tensor, box.within(piece.box))


def _parts_of(views: Mapping[str, View], size: int) -> Iterator[_Part]:
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
            yield _Part(key, box, reader, everyone if layout.holders is None else layout.holders[position])


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
