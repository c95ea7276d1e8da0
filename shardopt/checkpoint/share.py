"""Loading what many ranks want: each box is read by one of its holders, which sends it to the others.

    R ranks, H holders of a box

Where storage is slow beside the network, H reads of the same bytes cost more than one read and H - 1 sends. Who reads
what is who would write it in a save of the same layouts, so every rank works it out alone, and all read about as much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.memory import dtype_name, stored_dtype
from shardopt.checkpoint.plan import Member, assign
from shardopt.checkpoint.read import pieces_in_order
from shardopt.ranks import Ranks
from shardopt.sharding.box import Box
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import Piece, View, narrowed

Replicas = Literal["auto", "read", "exchange"]

_ROUND_BYTES = 16 << 20  # that one rank sends to all others in one exchange, which bounds what is taken for it


@dataclass(frozen=True, slots=True)
class _Part:
    """A box that one rank reads, and those that it sends it to."""

    key: str
    box: Box
    reader: int
    others: tuple[int, ...]


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


class SharedReads:
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
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        got: list[list[Tensor]] = [[] for _ in range(size)]
        for part in parts:
            if part.reader == rank:
                for other in part.others:
                    sent[other].append(self._memory(part.key, part.box))
            elif rank in part.others:
                got[part.reader].append(self._memory(part.key, part.box))
        flat = [_raw(tensor).to(device) for tensors in sent for tensor in tensors]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
        incoming = self._ranks.exchange(outgoing, [sum(map(_nbytes, its)) for its in sent], _totals(got)).wait()
        begin = 0
        for target in (tensor for tensors in got for tensor in tensors):
            raw = incoming[begin : begin + _nbytes(target)]
            # Cloned, as a tensor of another dtype must begin where such a one may.
            target.copy_(raw.clone().view(target.dtype).view(target.shape))
            begin += _nbytes(target)

    def _rounds(self) -> list[list[_Part]]:
        """All parts, cut so that in each round no rank sends more than the bound; the same on every rank."""
        rounds: list[list[_Part]] = []
        last: defaultdict[int, int] = defaultdict(int)  # by reader: the round that it sends in, and how much
        sends: defaultdict[int, int] = defaultdict(int)
        for part in self._parts:
            itemsize = self._views[part.key].dtype.itemsize
            for box in pieces_in_order(part.box, itemsize) if part.others else ():
                nbytes = box.numel * itemsize * len(part.others)
                if sends[part.reader] and sends[part.reader] + nbytes > _ROUND_BYTES:
                    last[part.reader] += 1
                    sends[part.reader] = 0
                sends[part.reader] += nbytes
                if last[part.reader] == len(rounds):
                    rounds.append([])
                rounds[last[part.reader]].append(_Part(part.key, box, part.reader, part.others))
        return rounds

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
            holders = everyone if layout.holders is None else layout.holders[position]
            yield _Part(key, box, reader, tuple(rank for rank in holders if rank != reader))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _totals(tensors: Iterable[Iterable[Tensor]]) -> list[int]:
    return [sum(map(_nbytes, its)) for its in tensors]
