"""From local tensors to data files: one pass that sums and writes each tensor's bytes. No talking between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash
from torch import Tensor

from shardopt.checkpoint.datafile import build_header
from shardopt.checkpoint.format import DTYPES, PER_RANK_PREFIX, SEGMENT_BYTES, Dtype, file_name, file_stem
from shardopt.checkpoint.manifest import DataFile
from shardopt.checkpoint.memory import bytes_of, is_plain_memory
from shardopt.checkpoint.plan import Assignment, Member
from shardopt.checkpoint.storage import Storage
from shardopt.sharding.box import Box, whole
from shardopt.sharding.view import View

_CHUNK_BYTES = 16 * SEGMENT_BYTES  # small enough that what was just summed is still in the cache when it is written


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a tensor that this rank writes; `tensor` holds just the box."""

    key: str
    dtype: Dtype
    box: Box
    tensor: Tensor


def own_parts(
    rank: int, members: Mapping[str, Member], assigned: Mapping[str, Assignment], views: Mapping[str, View]
) -> dict[int, list[Part]]:
    """What `rank` writes, by slot: the number of the data file among this rank's."""
    slots: defaultdict[int, list[Part]] = defaultdict(list)
    for key, view in views.items():
        assignment = assigned[key]
        for box, (writer, slot) in zip(assignment.boxes, assignment.writers, strict=True):
            if writer == rank:
                slots[slot].append(Part(key, members[key].dtype, box, _tensor_of(view, box)))
    return slots


def write_files(
    storage: Storage, save_id: str, rank: int, slots: Mapping[int, Sequence[Part]], per_rank: Tensor | None
) -> list[DataFile]:
    """Writes this rank's data files; durable on return.

    Args:
        per_rank: uint8, the rank's own values; goes into its first file under a key of its own.
    """
    extra = {0: [_per_rank_part(rank, per_rank)]} if per_rank is not None else {}
    written = []
    for slot in sorted({*slots, *extra}):
        parts = sorted(slots.get(slot, ()), key=lambda part: (-part.dtype.itemsize, part.key)) + extra.get(slot, [])
        written.append(_write_file(storage, save_id, rank, slot, parts))
    return written


def _write_file(storage: Storage, save_id: str, rank: int, slot: int, parts: Sequence[Part]) -> DataFile:
    header, _ = build_header(file_stem(rank, slot), [(part.key, part.dtype, part.box) for part in parts])
    digest = xxhash.xxh3_64(header)

    def stream() -> Iterator[memoryview]:
        yield memoryview(header)
        sums = bytearray()
        for part in parts:
            memory = bytes_of(part.tensor if is_plain_memory(part.tensor) else _gathered(part.tensor))
            for begin in range(0, memory.nbytes, _CHUNK_BYTES):
                chunk = memory[begin : begin + _CHUNK_BYTES]
                for i in range(0, chunk.nbytes, SEGMENT_BYTES):
                    sums += xxhash.xxh3_64_digest(chunk[i : i + SEGMENT_BYTES])
                yield chunk
        digest.update(sums)
        yield memoryview(sums)

    name = file_name(save_id, rank, slot)
    nbytes = storage.write(name, stream())
    return DataFile(name, nbytes, digest.hexdigest())


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def _tensor_of(view: View, box: Box) -> Tensor:
    for piece in view.pieces:
        if piece.box == box:
            return piece.tensor
    for piece in view.pieces:
        if piece.box.contains(box):
            inner = box.within(piece.box)
            return narrowed(piece.tensor, inner)
    raise AssertionError(f"no piece of this rank contains {box}")


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """The part of `tensor` that `box` names, without a copy."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _per_rank_part(rank: int, data: Tensor) -> Part:
    return Part(PER_RANK_PREFIX + file_stem(rank, 0), DTYPES["uint8"], whole(data.shape), data)
