"""Writes local tensors to data files, in one pass that hashes and writes each tensor's bytes. No communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import xxhash
from torch import Tensor

from shardopt.checkpoint.format.constants import SEGMENT_BYTES, file_name
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.format.tensor_bytes import bytes_of, is_plain_memory
from shardopt.checkpoint.planning.save_plan import RankWrites, WriteRequest
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.storage import Storage
from shardopt.checkpoint.storage.no_space import explain_no_space
from shardopt.sharding.pieces import View, narrowed

_CHUNK_BYTES = 16 * SEGMENT_BYTES  # small enough that bytes just hashed are still in the cache when they are written


Chunks = Callable[[WriteRequest], Iterator[memoryview]]
"""Yields the bytes of a request in chunks, each but the last of whole segments."""


def write_files(
    storage: Storage, save_id: str, writes: RankWrites, chunks_of: Chunks, per_rank: bytes | None
) -> list[DataFile]:
    """Writes a rank's data files; durable on return.

    Args:
        chunks_of: yields the bytes of a request; `from_memory` in a save.
        per_rank: the rank's own values, encoded; they go into its first file under a key of their own.

    Returns:
        The files, whose digests are of header and checksums.
    """
    slots = {
        slot: per_rank if slot == 0 else None
        for slot in sorted({*writes.slots, *([0] if per_rank is not None else [])})
    }
    files: list[DataFile] = []

    def needed() -> int:
        return sum(writes.file_bytes(slot, len(values or b"")) for slot, values in slots.items())

    def written() -> int:
        begun = file_name(save_id, writes.rank, [*slots][len(files)])
        return sum(file.nbytes for file in files) + (storage.size(begun) if storage.exists(begun) else 0)

    with explain_no_space(storage, "the data files of this rank", needed, written):
        for slot, values in slots.items():
            files.append(_write_file(storage, save_id, writes, slot, chunks_of, values))
    return files


def from_memory(views: Mapping[str, View]) -> Chunks:
    """Takes bytes from the tensors' own memory; without a copy where that is plain."""

    def chunks_of(request: WriteRequest) -> Iterator[memoryview]:
        tensor = views[request.key].pieces[request.piece].tensor
        if request.inner is not None:
            tensor = narrowed(tensor, request.inner)
        return chunks_in(tensor)

    return chunks_of


def chunks_in(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor, as `Chunks` has them; without a copy where its memory is plain."""
    memory = bytes_of(tensor if is_plain_memory(tensor) else _to_host(tensor))
    if memory.nbytes <= _CHUNK_BYTES:
        return iter((memory,))
    return (memory[begin : begin + _CHUNK_BYTES] for begin in range(0, memory.nbytes, _CHUNK_BYTES))


def with_progress(chunks_of: Chunks, writes: RankWrites, progress: Progress | None) -> Chunks:
    """Returns the same chunks, and reports them to `progress` when they have been taken."""
    if progress is None:
        return chunks_of
    done = Counter(
        sum(request.box.numel * request.dtype.itemsize for requests in writes.slots.values() for request in requests),
        progress,
    )

    def reported(request: WriteRequest) -> Iterator[memoryview]:
        for chunk in chunks_of(request):
            yield chunk
            done.add(chunk.nbytes)

    return reported


def _write_file(
    storage: Storage, save_id: str, writes: RankWrites, slot: int, chunks_of: Chunks, per_rank: bytes | None
) -> DataFile:
    file = _File(writes, slot, chunks_of, per_rank)
    name = file_name(save_id, writes.rank, slot)
    nbytes = storage.write(name, file)
    return DataFile(name, nbytes, file.digest)


class _File:
    """The bytes of a data file, from its header to its checksums; can be iterated again."""

    def __init__(self, writes: RankWrites, slot: int, chunks_of: Chunks, per_rank: bytes | None) -> None:
        self._header = writes.header(slot, len(per_rank or b""))
        self._parts, self._chunks_of, self._per_rank = writes.slots.get(slot, ()), chunks_of, per_rank
        self.digest = ""  # of header and checksums; known after an iteration

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        sums: list[bytes] = []
        for request in self._parts:
            for chunk in self._chunks_of(request):
                sums += _checksums(chunk)
                yield chunk
        if self._per_rank:
            sums += _checksums(memoryview(self._per_rank))
            yield memoryview(self._per_rank)
        checksums = b"".join(sums)
        self.digest = xxhash.xxh3_64_hexdigest(self._header + checksums)
        yield memoryview(checksums)


def _checksums(chunk: memoryview) -> list[bytes]:
    """Returns the checksum of each segment of a chunk."""
    if 0 < chunk.nbytes <= SEGMENT_BYTES:
        return [xxhash.xxh3_64_digest(chunk)]
    return [xxhash.xxh3_64_digest(chunk[i : i + SEGMENT_BYTES]) for i in range(0, chunk.nbytes, SEGMENT_BYTES)]


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
