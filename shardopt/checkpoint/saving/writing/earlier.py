"""The bytes of a box at an earlier save: in a file of that save, or in host memory that was kept since."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol
from weakref import WeakSet

import xxhash
from torch import Tensor

from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.tensor_bytes import bytes_of, is_plain_memory
from shardopt.checkpoint.saving.planning.save_plan import WriteRequest
from shardopt.checkpoint.saving.writing.device_stream import BUFFER_BYTES, to_host
from shardopt.checkpoint.sources.reading.open_file import SummedFile
from shardopt.checkpoint.storage import Span
from shardopt.sharding.box import Box

ReadRange = Callable[[int, int], memoryview]
"""Returns the bytes of a box between two offsets in it, at the begins or ends of segments."""


class Earlier(Protocol):
    """The bytes of a box at an earlier save, and how many each delta has that they are read from."""

    @property
    def delta_bytes(self) -> Sequence[int]: ...
    @property
    def checksums(self) -> bytes: ...
    def reading(self) -> AbstractContextManager[ReadRange]: ...


class OnDisk(NamedTuple):
    """The bytes of an entry of an open file. Reads raise CorruptionError where they are not what was written."""

    file: SummedFile
    entry: Entry
    delta_bytes: Sequence[int] = ()

    @property
    def checksums(self) -> bytes:
        return self.file.checksums(self.entry)

    @contextmanager
    def reading(self) -> Iterator[ReadRange]:
        with self.file.opened() as read:

            def read_range(begin: int, end: int) -> memoryview:
                memory = memoryview(bytearray(end - begin))
                read([Span(self.entry.begin + begin, memory)])
                for failed in self.file.failed_segments(self.entry.segment + begin // SEGMENT_BYTES, memory):
                    raise self.file.segment_error(self.entry, failed)
                return memory

            yield read_range


class TensorBytes:
    """The bytes of a tensor in C order, by range; copies only that range from accelerators.

    Each copy waits for the device. So a read that begins where the last one ended copies the `BUFFER_BYTES` around it,
    which are kept for what is read next.
    """

    delta_bytes: Sequence[int] = ()

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._nbytes = tensor, tensor.nbytes
        self._memory = bytes_of(tensor) if is_plain_memory(tensor) else None
        self._copied, self._begin, self._last_end = memoryview(b""), 0, -1
        self._digests: dict[tuple[int, int], bytes] = {}

    def read(self, begin: int, end: int) -> memoryview:
        """Returns a range of bytes."""
        if self._memory is None and not self._tensor.is_contiguous():
            self._memory = bytes_of(to_host(self._tensor))
        if self._memory is not None:
            return self._memory[begin:end]
        if not self._begin <= begin <= end <= self._begin + len(self._copied):
            first, last = begin, end
            if begin == self._last_end:
                first -= begin % BUFFER_BYTES
                last = min(max(end, first + BUFFER_BYTES), self._nbytes)
            size = self._tensor.element_size()
            self._copied = bytes_of(to_host(self._tensor.detach().reshape(-1)[first // size : last // size]))
            self._begin = first
        self._last_end = end
        return self._copied[begin - self._begin : end - self._begin]

    def digest(self, begin: int, end: int) -> bytes:
        """Returns the checksum of a range, which is computed once."""
        digest = self._digests.get((begin, end))
        if digest is None:
            digest = self._digests[begin, end] = xxhash.xxh3_64_digest(self.read(begin, end))
        return digest

    @property
    def checksums(self) -> bytes:
        ends = (min(begin + SEGMENT_BYTES, self._nbytes) for begin in range(0, self._nbytes, SEGMENT_BYTES))
        return b"".join(self.digest(i * SEGMENT_BYTES, end) for i, end in enumerate(ends))

    def reading(self) -> AbstractContextManager[ReadRange]:
        return nullcontext(self.read)


class Kept:
    """The boxes of a rank's last save, in host memory that stays as it is until another save was written.

    Attributes:
        memory: the number of the memory that it is in, which the next save must not use; None for none.
    """

    def __init__(self) -> None:
        self.memory: int | None = None
        self._next_memory = 0
        self._save_id = ""
        self._boxes: dict[tuple[str, Box], TensorBytes] = {}
        self._next: dict[tuple[str, Box], TensorBytes] = {}
        _made.add(self)

    def of(self, save_id: str, request: WriteRequest) -> TensorBytes | None:
        """Returns a box as that save wrote it; None if it is not here."""
        return self._boxes.get((request.key, request.box)) if save_id == self._save_id else None

    def add(self, request: WriteRequest, tensor: Tensor) -> TensorBytes:
        """Returns a box of the save that is under way, which is kept with it."""
        if (request.key, request.box) not in self._next:
            self._next[request.key, request.box] = TensorBytes(tensor)
        return self._next[request.key, request.box]

    def end(self, save_id: str, boxes: Iterable[tuple[WriteRequest, Tensor]]) -> None:
        """Keeps the boxes of a save that was written, in the place of those before."""
        for request, tensor in boxes:
            self.add(request, tensor)
        self._boxes, self._next, self._save_id, self.memory = self._next, {}, save_id, self._next_memory

    def begin(self) -> int:
        """Begins a save, also in the place of one that did not end; returns the number of its memory."""
        self._next, self._next_memory = {}, 1 if self.memory == 0 else 0
        return self._next_memory

    def forget(self) -> None:
        """Forgets everything, before its memory is freed."""
        self._boxes, self._next, self._save_id, self.memory = {}, {}, "", None


_made: WeakSet[Kept] = WeakSet()


def _forget_in_child() -> None:
    # A forked child does not inherit the memory (`runtime/host_memory.py`): a read of it would end the process.
    for kept in _made:
        kept.forget()


os.register_at_fork(after_in_child=_forget_in_child)
