"""The plan of a save: who writes which boxes, into which data files. Pure data; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardopt.checkpoint.format.constants import DTYPES, PER_RANK_PREFIX, Dtype, file_stem, segment_count
from shardopt.checkpoint.format.data_file import build_header
from shardopt.checkpoint.format.manifest import StoredTensors
from shardopt.checkpoint.planning.assign import assign, check_covers
from shardopt.checkpoint.planning.describe import Geometry
from shardopt.sharding.box import Box, whole
from shardopt.sharding.pieces import View


class WriteRequest(NamedTuple):
    """One box of a tensor that this rank writes: `piece` of its view, narrowed to `inner` if that is not all of it."""

    key: str
    dtype: Dtype
    box: Box
    piece: int
    inner: Box | None


class SavePlan:
    """Who writes what of a job's state; the same on every rank. Holds no tensor.

    Args:
        cut_plain: as for `assign`.

    Raises:
        LayoutError: the boxes of a tensor do not make up the tensor.
    """

    def __init__(self, geometry: Geometry, world_size: int, cut_plain: bool = True) -> None:
        check_covers(geometry.members)
        self.geometry = geometry
        self.assigned = assign(geometry.members, cut_plain)
        writers = {writer for assignment in set(self.assigned.values()) for writer in assignment.writers}
        if geometry.per_rank:
            writers |= {(rank, 0) for rank in range(world_size)}
        self.files = sorted(writers)  # rank and slot of every data file
        self.stored: StoredTensors | None = None  # made at the first commit, and kept

    def boxes_of(self, rank: int, key: str) -> Iterator[tuple[Box, int]]:
        """The boxes of a tensor that a rank writes, and into which of its files."""
        assignment = self.assigned[key]
        for box, (writer, slot) in zip(assignment.boxes, assignment.writers, strict=True):
            if writer == rank:
                yield box, slot


class RankWrites:
    """What one rank writes, by the number of its data file and in the order of its bytes.

    Args:
        views: what the rank holds, of which only the places count; None where the bytes come from elsewhere.
    """

    def __init__(self, plan: SavePlan, rank: int, views: Mapping[str, View] | None = None) -> None:
        self.rank = rank
        self.slots: defaultdict[int, list[WriteRequest]] = defaultdict(list)
        for key in plan.assigned if views is None else filter(plan.assigned.__contains__, views):
            for box, slot in plan.boxes_of(rank, key):
                piece, inner = (0, None) if views is None else _place_in(views[key], box)
                self.slots[slot].append(WriteRequest(key, plan.geometry.members[key].dtype, box, piece, inner))
        for parts in self.slots.values():
            parts.sort(key=lambda part: (-part.dtype.itemsize, part.key))
        self._headers: dict[int, tuple[int, bytes]] = {}  # by slot: the bytes per rank that it was made for, and it

    def header(self, slot: int, per_rank_bytes: int) -> bytes:
        """The header of one of this rank's data files."""
        made_for, found = self._headers.get(slot, (-1, b""))
        if made_for != per_rank_bytes:
            stem = file_stem(self.rank, slot)
            members = [(part.key, part.dtype, part.box) for part in self.slots.get(slot, ())]
            if per_rank_bytes:
                members.append((PER_RANK_PREFIX + stem, DTYPES["uint8"], whole((per_rank_bytes,))))
            found = build_header(stem, members)
            self._headers[slot] = per_rank_bytes, found
        return found

    def file_bytes(self, slot: int, per_rank_bytes: int) -> int:
        """The bytes of one of this rank's data files."""
        bodies = [part.box.numel * part.dtype.itemsize for part in self.slots.get(slot, ())] + [per_rank_bytes]
        checksums = 8 * sum(map(segment_count, bodies))
        return len(self.header(slot, per_rank_bytes)) + sum(bodies) + checksums


def _place_in(view: View, box: Box) -> tuple[int, Box | None]:
    """Which piece of the view holds the box, and where in it; None for all of it."""
    for i, piece in enumerate(view.pieces):
        if piece.box is box or piece.box == box:
            return i, None
    for i, piece in enumerate(view.pieces):
        if piece.box.contains(box):
            return i, box.within(piece.box)
    raise AssertionError(f"no piece of this rank contains {box}")
