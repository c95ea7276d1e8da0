"""Writes local tensors to data files; one pass writes and hashes each tensor's bytes. No communication."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain

import xxhash
from torch import Tensor

from shardopt.checkpoint.format.constants import SEGMENT_BYTES, file_name
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.format.tensor_bytes import bytes_of, is_plain_memory, move_bytes
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, WriteRequest
from shardopt.checkpoint.saving.writing.device_stream import streamed, to_host
from shardopt.checkpoint.saving.writing.no_space import explain_no_space
from shardopt.checkpoint.storage import FLUSH, Storage
from shardopt.sharding.pieces import View, narrowed


def write_files(
    storage: Storage,
    save_id: str,
    writes: RankWrites,
    tensor_of: Callable[[WriteRequest], Tensor],
    per_rank: bytes | None,
    progress: Progress | None = None,
) -> list[DataFile]:
    """Writes a rank's data files; durable on return.

    Args:
        tensor_of: gives the box of a request, in any memory.
        per_rank: the rank's own values, encoded; they go into its first file under a key of their own.
        progress: called with the bytes of tensors that are written and those there are to write.

    Returns:
        The files, whose digests are of header and checksums.
    """
    values = values_by_slot(writes, per_rank)
    slots = [*values]
    done = None if progress is None else Counter(sum(map(writes.tensor_bytes, slots)), progress)
    files: list[DataFile] = []

    def needed() -> int:
        return sum(writes.file_bytes(slot, len(values[slot])) for slot in slots)

    def written() -> int:
        begun = file_name(save_id, writes.rank, slots[len(files)])
        return sum(file.nbytes for file in files) + (storage.size(begun) if storage.exists(begun) else 0)

    with explain_no_space(storage, "the data files of this rank", needed, written, save_id):
        for slot in slots:
            file = _File(writes, slot, tensor_of, values[slot], done, storage.buffer_bytes)
            name = file_name(save_id, writes.rank, slot)
            try:
                nbytes = storage.write(name, file)
            finally:
                file.close()
            files.append(DataFile(name, nbytes, file.digest))
    return files


def values_by_slot(writes: RankWrites, per_rank: bytes | None) -> dict[int, bytes]:
    """Returns the slots of a rank's data files, ascending, each with the encoded values of the rank that go there."""
    slots = sorted({*writes.slots, *([0] if per_rank is not None else [])})
    return {slot: per_rank or b"" if slot == 0 else b"" for slot in slots}


def memory_of(request: WriteRequest, views: Mapping[str, View]) -> Tensor:
    """Returns this rank's memory of the box in a request."""
    if request.memory is not None:
        return request.memory
    tensor = views[request.key].pieces[request.piece].tensor
    return tensor if request.inner is None else narrowed(tensor, request.inner)


class _File:
    """The bytes of a data file, from its header to its checksums; can be iterated again."""

    def __init__(
        self,
        writes: RankWrites,
        slot: int,
        tensor_of: Callable[[WriteRequest], Tensor],
        per_rank: bytes,
        done: Counter | None,
        buffer_bytes: int,
    ) -> None:
        self._header = writes.header(slot, len(per_rank))
        self._requests, self._tensor_of = writes.slots.get(slot, ()), tensor_of
        self._per_rank, self._done, self.nbytes = per_rank, done, writes.tensor_bytes(slot)
        self._buffer_bytes = max(buffer_bytes // SEGMENT_BYTES, 1) * SEGMENT_BYTES
        self.digest = ""  # of header and checksums; known after an iteration
        self._streaming: Generator[memoryview] | None = None

    @property
    def reuses_memory(self) -> bool:
        """Whether memory that was yielded is used again: that of tensors which are streamed from an accelerator."""
        return not all(self._tensor_of(request).is_cpu for request in self._requests)

    def close(self) -> None:
        """Ends an iteration that was left, and frees its buffers, though an error may keep the iterator."""
        if self._streaming is not None:
            self._streaming.close()

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        sums: list[bytes] = []
        for buffer, segments in self._buffers():
            nbytes = buffer.nbytes
            yield buffer  # which may have brought it to the core's cache; the storage may have released this view of it
            sums += map(xxhash.xxh3_64_digest, segments)
            if self._done is not None and nbytes:
                self._done.add(nbytes)
        if self._per_rank:
            values = memoryview(self._per_rank)
            sums += map(xxhash.xxh3_64_digest, _cut(values, SEGMENT_BYTES))
            yield values
        checksums = b"".join(sums)
        self.digest = xxhash.xxh3_64_hexdigest(self._header + checksums)
        yield memoryview(checksums)

    def _buffers(self) -> Iterator[tuple[memoryview, Iterable[memoryview]]]:
        """Yields the bytes of all requests, each buffer with its segments; and `FLUSH`.

        Small tensors are copied to stand together: each place to write from costs more than its bytes.
        """
        tensors = map(self._tensor_of, self._requests)
        room, used, address = memoryview(b""), 0, 0
        segments: list[memoryview] = []  # of what is in the room
        for tensor in tensors:
            nbytes, is_plain = tensor.nbytes, is_plain_memory(tensor)
            is_small = is_plain and 8 * nbytes <= SEGMENT_BYTES
            if segments and not (is_small and used + nbytes <= len(room)):
                yield room[:used], segments
                room, used, address, segments = room[used:], 0, address + used, []
            if is_small:
                if nbytes > len(room):
                    made = bytearray(max(nbytes, min(self.nbytes, SEGMENT_BYTES)))
                    room, address = memoryview(made), ctypes.addressof(ctypes.c_ubyte.from_buffer(made))
                if nbytes:
                    move_bytes(address + used, tensor.data_ptr(), nbytes)
                    segments.append(room[used : used + nbytes])
                    used += nbytes
                continue
            if tensor.is_cpu:
                memories: Iterable[memoryview] = [bytes_of(tensor if is_plain else to_host(tensor))]
            else:
                memories = self._streaming = streamed(chain([tensor], tensors), self.nbytes)
            for memory in memories:
                if memory is FLUSH:
                    yield memory, ()
                yield from ((buffer[:], _cut(buffer, SEGMENT_BYTES)) for buffer in _cut(memory, self._buffer_bytes))
        if segments:
            yield room[:used], segments


def _cut(memory: memoryview, nbytes: int) -> Iterable[memoryview]:
    """Cuts memory into parts of at most so many bytes; of thousands of small tensors none is sliced."""
    if memory.nbytes <= nbytes:
        return (memory,) if memory.nbytes else ()
    return [memory[begin : begin + nbytes] for begin in range(0, memory.nbytes, nbytes)]
