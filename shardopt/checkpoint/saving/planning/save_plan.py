"""The plan of a save: which rank writes which boxes to which data files. Pure data; no I/O."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from shardopt.checkpoint.format.assign import Assignment, assign
from shardopt.checkpoint.format.constants import DTYPES, PER_RANK_PREFIX, Dtype, file_stem, segment_count
from shardopt.checkpoint.format.data_file import build_header
from shardopt.checkpoint.format.manifest import StoredTensors
from shardopt.checkpoint.saving.planning.describe import Geometry
from shardopt.runtime.host_memory import LARGE_BYTES
from shardopt.sharding.box import Box, whole
from shardopt.sharding.pieces import View


class WriteRequest(NamedTuple):
    """One box of a tensor that this rank writes: a `piece` of its view, narrowed to `inner` unless that is None.

    `prefix` for what gets a key of its own in the data file: some rows of what the plan has as one box, the rest of
    which an earlier save has; or a delta, whose bytes are in `memory`.
    """

    key: str
    dtype: Dtype
    box: Box
    piece: int
    inner: Box | None
    prefix: str = ""
    memory: Tensor | None = None

    @property
    def name(self) -> str:
        """The key in the data file."""
        return self.prefix + self.key

    @property
    def nbytes(self) -> int:
        """The number of bytes of the box."""
        return self.box.numel * self.dtype.itemsize


class SavePlan:
    """The writers of all boxes of a job's state, or of one component; the same on every rank. Holds no tensor.

    Args:
        geometry: whose tensors are made up by their boxes (`check_covers`).
        cut_plain: as for `assign`.
        known: the assignments of tensors that another rank has planned.
    """

    def __init__(
        self,
        geometry: Geometry,
        world_size: int,
        cut_plain: bool = True,
        known: Mapping[str, Assignment] = MappingProxyType({}),
    ) -> None:
        self.geometry = geometry
        members = {key: member for key, member in geometry.members.items() if key not in known}
        self.assigned = {**assign(members, cut_plain), **known}
        alike = {id(each.writers): each.writers for each in self.assigned.values()}
        writers = dict.fromkeys(chain.from_iterable(alike.values()))  # mostly ascending, which is sorted fast
        if geometry.per_rank:
            writers |= dict.fromkeys((rank, 0) for rank in range(world_size))
        self.files = sorted(writers)  # rank and slot of every data file
        self.stored: StoredTensors | None = None  # made at the first commit, and kept

    @cached_property
    def boxes_in_order(self) -> Mapping[tuple[int, int], Sequence[tuple[str, int]]]:
        """The boxes of each data file, by rank and slot, in byte order: key, and number of the box in its tensor."""
        boxes: defaultdict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
        for key, assignment in self.assigned.items():
            for number, writer in enumerate(assignment.writers):
                boxes[writer].append((key, number))
        members = self.geometry.members
        for of_file in boxes.values():
            of_file.sort(key=lambda box: (-members[box[0]].dtype.itemsize, box[0]))
        return boxes


class RankWrites:
    """The writes of one rank, by slot of the data file and in byte order there.

    Args:
        views: of the rank's tensors, of which only the boxes count; None where the bytes come from elsewhere.
    """

    def __init__(self, plan: SavePlan, rank: int, views: Mapping[str, View] | None = None) -> None:
        self.rank = rank
        self.slots: defaultdict[int, list[WriteRequest]] = defaultdict(list)
        own: dict[Assignment, list[tuple[Box, int]]] = {}  # of the tensors that are written alike
        for key in plan.assigned if views is None else filter(plan.assigned.__contains__, views):
            alike = plan.assigned[key]
            if alike not in own:
                writers = zip(alike.boxes, alike.writers, strict=True)
                own[alike] = [(box, slot) for box, (writer, slot) in writers if writer == rank]
            for box, slot in own[alike]:
                piece, inner = (0, None) if views is None else _place_in(views[key], box)
                self.slots[slot].append(WriteRequest(key, plan.geometry.members[key].dtype, box, piece, inner))
        for requests in self.slots.values():  # as `SavePlan.boxes_in_order`
            requests.sort(key=_place_in_file)
        self._headers: dict[int, tuple[int, bytes]] = {}  # by slot: `per_rank_bytes`, and the header for it
        self._tensor_bytes: dict[int, int] = {}

    def only(self, slots: Mapping[int, Sequence[WriteRequest]]) -> RankWrites:
        """Returns the writes with fewer requests, patches or deltas of them. Slots without requests have no file."""
        writes = copy.copy(self)
        writes.slots = defaultdict(list)
        for slot, requests in slots.items():
            if requests:
                writes.slots[slot] = sorted(requests, key=_place_in_file)
        writes._headers, writes._tensor_bytes = {}, {}
        return writes

    def replaced(self, other: Callable[[WriteRequest], WriteRequest]) -> RankWrites:
        """Returns the writes with other memory for the same boxes."""
        writes = copy.copy(self)
        writes.slots = defaultdict(list, {slot: [*map(other, requests)] for slot, requests in self.slots.items()})
        return writes

    def header(self, slot: int, per_rank_bytes: int) -> bytes:
        """Returns the header of one of this rank's data files, for this many bytes of values per rank."""
        made_for, header = self._headers.get(slot, (-1, b""))
        if made_for != per_rank_bytes:
            stem = file_stem(self.rank, slot)
            members = [(request.name, request.dtype, request.box) for request in self.slots.get(slot, ())]
            if per_rank_bytes:
                members.append((PER_RANK_PREFIX + stem, DTYPES["uint8"], whole((per_rank_bytes,))))
            header = build_header(stem, members)
            self._headers[slot] = per_rank_bytes, header
        return header

    def tensor_bytes(self, slot: int) -> int:
        """Returns the number of tensor bytes in one of this rank's data files."""
        if slot not in self._tensor_bytes:
            self._tensor_bytes[slot] = sum(request.nbytes for request in self.slots.get(slot, ()))
        return self._tensor_bytes[slot]

    def large_offsets(self) -> dict[tuple[str, Box], int]:
        """Returns the offsets of large boxes in their files, by key and box; of files whose header was made already."""
        offsets = {}
        for slot, (_, header) in self._headers.items():
            requests, offset = self.slots.get(slot, ()), len(header)
            for request in requests if self.tensor_bytes(slot) >= LARGE_BYTES * len(requests) else ():
                if request.nbytes >= LARGE_BYTES and request.memory is None:
                    offsets[request.key, request.box] = offset
                offset += request.nbytes
        return offsets

    def file_bytes(self, slot: int, per_rank_bytes: int) -> int:
        """Returns the size of one of this rank's data files in bytes."""
        bodies = [*(request.nbytes for request in self.slots.get(slot, ())), per_rank_bytes]
        checksums = 8 * sum(map(segment_count, bodies))
        return len(self.header(slot, per_rank_bytes)) + sum(bodies) + checksums


def _place_in_file(request: WriteRequest) -> tuple[int, str]:
    return -request.dtype.itemsize, request.name


def _place_in(view: View, box: Box) -> tuple[int, Box | None]:
    """Returns the number of the view's piece that holds the box, and the box within it; None for the whole piece."""
    for i, piece in enumerate(view.pieces):
        if piece.box is box or piece.box == box:
            return i, None
    for i, piece in enumerate(view.pieces):
        if piece.box.contains(box):
            return i, box.within(piece.box)
    raise AssertionError(f"no piece of this rank contains {box}")
