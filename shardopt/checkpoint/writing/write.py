"""From local tensors to data files: one pass that sums and writes each tensor's bytes. No talking between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import xxhash
from torch import Tensor

from shardopt.checkpoint.format.constants import (
    DTYPES,
    PER_RANK_PREFIX,
    SEGMENT_BYTES,
    Dtype,
    file_name,
    file_stem,
    segment_count,
)
from shardopt.checkpoint.format.data_file import build_header
from shardopt.checkpoint.format.manifest import DataFile, StoredTensors
from shardopt.checkpoint.format.tensor_bytes import bytes_of, is_plain_memory
from shardopt.checkpoint.planning.assign import assign, check_covers
from shardopt.checkpoint.planning.describe import Geometry
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.storage import Storage
from shardopt.checkpoint.storage.no_space import telling_of_space
from shardopt.sharding.box import Box, whole
from shardopt.sharding.pieces import View, narrowed

_CHUNK_BYTES = 16 * SEGMENT_BYTES  # small enough that what was just summed is still in the cache when it is written


class Part(NamedTuple):
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


class OwnParts:
    """What one rank writes, by the number of its data file and in the order of its bytes.

    Args:
        views: what the rank holds, of which only the places count; None where the bytes come from elsewhere.
    """

    def __init__(self, plan: SavePlan, rank: int, views: Mapping[str, View] | None = None) -> None:
        self.rank = rank
        self.slots: defaultdict[int, list[Part]] = defaultdict(list)
        for key in plan.assigned if views is None else filter(plan.assigned.__contains__, views):
            for box, slot in plan.boxes_of(rank, key):
                piece, inner = (0, None) if views is None else _place_in(views[key], box)
                self.slots[slot].append(Part(key, plan.geometry.members[key].dtype, box, piece, inner))
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


Chunks = Callable[[Part], Iterator[memoryview]]
"""The bytes of a part in pieces, of whole segments each but the last."""


def write_files(
    storage: Storage, save_id: str, own: OwnParts, chunks_of: Chunks, per_rank: bytes | None
) -> list[DataFile]:
    """Writes a rank's data files; durable on return.

    Args:
        chunks_of: where the bytes of a part come from; `from_memory` in a save.
        per_rank: the rank's own values; they go into its first file under a key of their own.
    """
    slots = {
        slot: per_rank if slot == 0 else None for slot in sorted({*own.slots, *([0] if per_rank is not None else [])})
    }
    files: list[DataFile] = []

    def needed() -> int:
        return sum(own.file_bytes(slot, len(values or b"")) for slot, values in slots.items())

    def written() -> int:
        begun = file_name(save_id, own.rank, [*slots][len(files)])
        return sum(file.nbytes for file in files) + (storage.size(begun) if storage.exists(begun) else 0)

    with telling_of_space(storage, "the data files of this rank", needed, written):
        for slot, values in slots.items():
            files.append(_write_file(storage, save_id, own, slot, chunks_of, values))
    return files


def from_memory(views: Mapping[str, View]) -> Chunks:
    """Takes the bytes of parts from the tensors' own memory; without a copy where that is plain."""

    def chunks_of(part: Part) -> Iterator[memoryview]:
        tensor = views[part.key].pieces[part.piece].tensor
        if part.inner is not None:
            tensor = narrowed(tensor, part.inner)
        memory = bytes_of(tensor if is_plain_memory(tensor) else _gathered(tensor))
        if memory.nbytes <= _CHUNK_BYTES:
            return iter((memory,))
        return (memory[begin : begin + _CHUNK_BYTES] for begin in range(0, memory.nbytes, _CHUNK_BYTES))

    return chunks_of


def counting(chunks_of: Chunks, own: OwnParts, progress: Progress | None) -> Chunks:
    """The same chunks, told to `progress` when they have been taken."""
    if progress is None:
        return chunks_of
    done = Counter(
        sum(part.box.numel * part.dtype.itemsize for parts in own.slots.values() for part in parts), progress
    )

    def counted(part: Part) -> Iterator[memoryview]:
        for chunk in chunks_of(part):
            yield chunk
            done.add(chunk.nbytes)

    return counted


def _write_file(
    storage: Storage, save_id: str, own: OwnParts, slot: int, chunks_of: Chunks, per_rank: bytes | None
) -> DataFile:
    file = _File(own, slot, chunks_of, per_rank)
    name = file_name(save_id, own.rank, slot)
    nbytes = storage.write(name, file)
    return DataFile(name, nbytes, file.digest)


class _File:
    """The bytes of a data file, from its header to its checksums; may be gone through again."""

    def __init__(self, own: OwnParts, slot: int, chunks_of: Chunks, per_rank: bytes | None) -> None:
        self._header = own.header(slot, len(per_rank or b""))
        self._parts, self._chunks_of, self._per_rank = own.slots.get(slot, ()), chunks_of, per_rank
        self.digest = ""  # of header and checksums; known when all has been gone through

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        sums: list[bytes] = []
        for part in self._parts:
            for chunk in self._chunks_of(part):
                sums += _sums(chunk)
                yield chunk
        if self._per_rank:
            sums += _sums(memoryview(self._per_rank))
            yield memoryview(self._per_rank)
        checksums = b"".join(sums)
        self.digest = xxhash.xxh3_64_hexdigest(self._header + checksums)
        yield memoryview(checksums)


def _sums(chunk: memoryview) -> list[bytes]:
    """The checksums of the segments that a chunk begins with."""
    if 0 < chunk.nbytes <= SEGMENT_BYTES:
        return [xxhash.xxh3_64_digest(chunk)]
    return [xxhash.xxh3_64_digest(chunk[i : i + SEGMENT_BYTES]) for i in range(0, chunk.nbytes, SEGMENT_BYTES)]


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
