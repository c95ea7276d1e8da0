"""From local tensors to data files: one pass that sums and writes each tensor's bytes. No talking between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import xxhash
from torch import Tensor

from shardopt.checkpoint.datafile import build_header
from shardopt.checkpoint.describe import Geometry
from shardopt.checkpoint.format import DTYPES, PER_RANK_PREFIX, SEGMENT_BYTES, Dtype, file_name, file_stem
from shardopt.checkpoint.manifest import DataFile, StoredTensors
from shardopt.checkpoint.memory import bytes_of, is_plain_memory
from shardopt.checkpoint.plan import assign, check_covers
from shardopt.checkpoint.storage import Storage
from shardopt.sharding.box import Box, whole
from shardopt.sharding.view import View

_CHUNK_BYTES = 16 * SEGMENT_BYTES  # small enough that what was just summed is still in the cache when it is written


class Part(NamedTuple):
    """One box of a tensor that this rank writes: `piece` of its view, narrowed to `inner` if that is not all of it."""

    key: str
    dtype: Dtype
    box: Box
    piece: int
    inner: Box | None


class SavePlan:
    """Who writes what of a job's state, and in which order this rank writes its part. Holds no tensor.

    Args:
        geometry: of the job.
        rank: this one.
        views: what this rank holds; only where it is counts.

    Raises:
        LayoutError: the boxes of a tensor do not make up the tensor.
    """

    def __init__(self, geometry: Geometry, rank: int, world_size: int, views: Mapping[str, View]) -> None:
        check_covers(geometry.members)
        self.geometry = geometry
        self.rank = rank
        self.assigned = assign(geometry.members)
        writers = {writer for assignment in set(self.assigned.values()) for writer in assignment.writers}
        if geometry.per_rank:
            writers |= {(each, 0) for each in range(world_size)}
        self.files = sorted(writers)  # of all ranks: rank and slot
        self.slots: defaultdict[int, list[Part]] = defaultdict(list)
        for key, view in views.items():
            assignment = self.assigned[key]
            for box, (writer, slot) in zip(assignment.boxes, assignment.writers, strict=True):
                if writer == rank:
                    self.slots[slot].append(Part(key, geometry.members[key].dtype, box, *_place_in(view, box)))
        for parts in self.slots.values():
            parts.sort(key=lambda part: (-part.dtype.itemsize, part.key))
        self._headers: dict[tuple[int, int], bytes] = {}
        self.stored: StoredTensors | None = None  # kept by rank 0 after the first commit

    def header(self, slot: int, per_rank_bytes: int) -> bytes:
        """The header of one of this rank's data files."""
        found = self._headers.get((slot, per_rank_bytes))
        if found is None:
            stem = file_stem(self.rank, slot)
            members = [(part.key, part.dtype, part.box) for part in self.slots.get(slot, ())]
            if per_rank_bytes:
                members.append((PER_RANK_PREFIX + stem, DTYPES["uint8"], whole((per_rank_bytes,))))
            found = self._headers[slot, per_rank_bytes] = build_header(stem, members)
        return found


def write_files(
    storage: Storage, save_id: str, plan: SavePlan, views: Mapping[str, View], per_rank: Tensor | None
) -> list[DataFile]:
    """Writes this rank's data files; durable on return.

    Args:
        views: the tensors' memory.
        per_rank: uint8, the rank's own values; goes into its first file under a key of its own.
    """
    slots = sorted({*plan.slots, *([0] if per_rank is not None else [])})
    return [_write_file(storage, save_id, plan, slot, views, per_rank if slot == 0 else None) for slot in slots]


def _write_file(
    storage: Storage, save_id: str, plan: SavePlan, slot: int, views: Mapping[str, View], per_rank: Tensor | None
) -> DataFile:
    header = plan.header(slot, 0 if per_rank is None else per_rank.numel())
    digest = xxhash.xxh3_64(header)

    def tensors() -> Iterator[Tensor]:
        for key, _, _, piece, inner in plan.slots.get(slot, ()):
            tensor = views[key].pieces[piece].tensor
            yield tensor if inner is None else narrowed(tensor, inner)
        if per_rank is not None:
            yield per_rank

    def stream() -> Iterator[memoryview]:
        yield memoryview(header)
        sums: list[bytes] = []
        for tensor in tensors():
            memory = bytes_of(tensor if is_plain_memory(tensor) else _gathered(tensor))
            if memory.nbytes <= SEGMENT_BYTES:
                sums += (xxhash.xxh3_64_digest(memory),) if memory.nbytes else ()
                yield memory
                continue
            for begin in range(0, memory.nbytes, _CHUNK_BYTES):
                chunk = memory[begin : begin + _CHUNK_BYTES]
                sums += [
                    xxhash.xxh3_64_digest(chunk[i : i + SEGMENT_BYTES]) for i in range(0, chunk.nbytes, SEGMENT_BYTES)
                ]
                yield chunk
        checksums = b"".join(sums)
        digest.update(checksums)
        yield memoryview(checksums)

    name = file_name(save_id, plan.rank, slot)
    nbytes = storage.write(name, stream())
    return DataFile(name, nbytes, digest.hexdigest())


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def _place_in(view: View, box: Box) -> tuple[int, Box | None]:
    """Which piece of the view holds the box, and where in it; None for all of it."""
    for i, piece in enumerate(view.pieces):
        if piece.box is box or piece.box == box:
            return i, None
    for i, piece in enumerate(view.pieces):
        if piece.box.contains(box):
            return i, box.within(piece.box)
    raise AssertionError(f"no piece of this rank contains {box}")


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """The part of `tensor` that `box` names, without a copy."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor
