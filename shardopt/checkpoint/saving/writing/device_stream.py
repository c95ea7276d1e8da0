"""Streams tensors from accelerators to the host: fills one of two pinned buffers while the other is written.

    window      tensors whose bytes fill a buffer; those of the host among them stand for themselves

Memory of the host and bytes in flight are bounded by the two buffers. They begin at pages, of 4 KiB or more.

A copy to the host takes the caller microseconds, however small. So small tensors are first joined on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.format.tensor_bytes import bytes_of
from shardopt.checkpoint.storage import FLUSH
from shardopt.runtime.accelerator import copy_stream, has_streams, on_stream
from shardopt.runtime.host_memory import ALIGNMENT_BYTES, HostMemory
from shardopt.sharding.box import cut_in_order, whole
from shardopt.sharding.pieces import narrowed

BUFFER_BYTES = 64 * SEGMENT_BYTES
_SMALL_BYTES = 64 << 10  # up to here a tensor is joined with its neighbours
_JOINED_BYTES = 1 << 20  # of the device for them: what torch's allocator takes from its pool of small blocks
_PAGE_BYTES = 4096
_COPIED_EXACTLY = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}
"""What lists of CUDA copy as it is: others by way of fp32, which changes bits of NaN, or not at all."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_MOST_MEMBERS = 4096  # of a window, which tensors of the host do not fill


def streamed(tensors: Iterable[Tensor], nbytes: int) -> Generator[memoryview]:
    """Yields the bytes of tensors one after the other, large ones in parts of whole segments; and `FLUSH`.

    What was yielded before `FLUSH` is overwritten once the next is asked for.

    Args:
        tensors: in any memory; they stay as they are meanwhile. Asked for two windows ahead.
        nbytes: of all of them.
    """
    memory = HostMemory()
    windows = _Windows(memory, min(BUFFER_BYTES, -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES))
    try:
        ready, ahead = None, windows.begun(tensors)
        for window in ahead:
            if ready is not None:
                yield from ready.taken()
            ready = window
        if ready is not None:
            yield from ready.taken()
    finally:
        windows.wait()
        memory.give_back()


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy of any tensor in plain host memory."""
    tensor = tensor.detach()
    if tensor.is_cpu or tensor.is_contiguous():
        return tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    for into, piece in pieces_to_host(host, tensor):
        into.copy_(piece.resolve_conj().resolve_neg())
    return host


def pieces_to_host(host: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs to copy, for a tensor that is to be copied from an accelerator: pieces of a large view, as a copy of
    it would first gather all of it on the device.
    """
    if source.is_contiguous() or source.nbytes <= BUFFER_BYTES:
        yield host, source
        return
    for box in cut_in_order(whole(source.shape), BUFFER_BYTES // source.itemsize):
        yield narrowed(host, box), narrowed(source, box)


Pair = tuple[Tensor, Tensor]
"""Contiguous host memory, and what is to be copied there: a tensor of its dtype and shape on an accelerator."""


def begin_copies(device: torch.device, pairs: Sequence[Pair]) -> None:
    """Begins copies from one device, on its stream for copies; where it has none, waits for them.

    Args:
        pairs: where neighbours in memory follow one another, small ones are copied together.
    """
    streams = has_streams(device)
    pairs = [pair for pair in pairs if pair[0].nbytes]  # tensors without elements have no place
    with torch.no_grad(), on_stream(copy_stream(device)) if streams else nullcontext():
        alone: list[Pair] = []
        for run in _neighbours(pairs) if streams else [pairs]:
            if not (streams and len(run) > 1 and _are_copied_together(device, run)):
                alone += run
        if alone:
            hosts, sources = zip(*alone, strict=True)
            torch._foreach_copy_(hosts, sources, non_blocking=streams)


def _neighbours(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yields runs of small tensors between whose places there is nothing; any other tensor by itself."""
    run: list[Pair] = []
    first = place = 0  # of the run, and of what would be next in it
    for pair in pairs:
        begin, nbytes = pair[0].data_ptr(), pair[0].nbytes
        is_small = nbytes <= _SMALL_BYTES and begin % ALIGNMENT_BYTES == 0
        if run and not (is_small and begin == place and begin + nbytes <= first + _JOINED_BYTES):
            yield run
            run = []
        if not run:
            first = begin
        run.append(pair)
        place = -(-(begin + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if is_small else 0
    if run:
        yield run


def _are_copied_together(device: torch.device, run: Sequence[Pair]) -> bool:
    """Begins one copy for neighbours, on the current stream, by way of memory of the device with the same distances.

    Returns whether the device had that memory.
    """
    first = run[0][0].data_ptr()
    nbytes = run[-1][0].data_ptr() + run[-1][0].nbytes - first
    try:
        joined = torch.empty(-(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    by_dtype: dict[torch.dtype, tuple[Tensor, list[Tensor], list[Tensor]]] = {}
    for host, source in run:
        dtype = host.dtype
        if dtype not in _COPIED_EXACTLY:
            dtype = _INTEGERS[dtype.itemsize]
            source = source.view(dtype)
        of_dtype = by_dtype.get(dtype)
        if of_dtype is None:  # of one dtype a list takes few launches
            of_dtype = by_dtype[dtype] = joined.view(dtype), [], []
        memory, places, sources = of_dtype
        places.append(memory.as_strided(host.shape, host.stride(), (host.data_ptr() - first) // dtype.itemsize))
        sources.append(source)
    for _, places, sources in by_dtype.values():
        torch._foreach_copy_(places, sources)
    storage = run[0][0].untyped_storage()
    together = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        storage, first - storage.data_ptr(), (nbytes,), (1,)
    )
    together.copy_(joined[:nbytes], non_blocking=True)
    return True


class _Window:
    """Tensors in order, each with its place in the buffer, or none if it is not streamed."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._used = buffer, 0
        self._members: list[tuple[Tensor, Tensor | None]] = []
        self._copied: list[tuple[Any, Any]] = []  # stream, event

    def takes(self, nbytes: int) -> bool:
        """Whether this many bytes fit."""
        return self._used + nbytes <= len(self._buffer) and len(self._members) < _MOST_MEMBERS

    def add(self, tensor: Tensor, streams: bool) -> None:
        """Adds a tensor; a streamed one must fit."""
        host: Tensor | None = None
        if streams:
            end = self._used + tensor.nbytes
            host = self._buffer[self._used : end].view(tensor.dtype).view(tensor.shape)
            self._used = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._members.append((tensor, host))

    def begin(self) -> None:
        """Begins the copies, each on its device's stream. Does not wait."""
        by_device: defaultdict[torch.device, list[Pair]] = defaultdict(list)
        for tensor, host in self._members:
            if host is not None:
                by_device[tensor.device].append((host, tensor.detach()))
        for device, pairs in by_device.items():
            begin_copies(device, pairs)
            stream = copy_stream(device)
            with on_stream(stream):
                event = torch.get_device_module(device).Event()
                event.record(stream)
            self._copied.append((stream, event))

    def taken(self) -> Iterator[memoryview]:
        """Waits for the copies, and yields the bytes."""
        for stream, event in self._copied:
            with on_stream(stream):
                event.synchronize()
        for tensor, host in self._members:
            if host is not None:
                yield bytes_of(host)
            else:
                yield bytes_of(tensor if tensor.is_cpu and tensor.is_contiguous() else to_host(tensor))
        if self._used:
            yield FLUSH


class _Windows:
    """Splits tensors into windows that use two buffers in turn."""

    def __init__(self, memory: HostMemory, buffer_bytes: int) -> None:
        self._memory, self._bytes = memory, buffer_bytes
        self._buffers: Iterator[Tensor] | None = None
        self._ordered: set[torch.device] = set()

    def begun(self, tensors: Iterable[Tensor]) -> Iterator[_Window]:
        """Yields windows whose copies have begun; the caller takes the last but one before the next is made."""
        window: _Window | None = None
        for tensor in tensors:
            streams = self._streams(tensor)
            for piece in self._cut(tensor) if streams else (tensor,):
                if window is not None and not window.takes(piece.nbytes if streams else 0):
                    window.begin()
                    yield window
                    window = None
                window = window or _Window(self._next_buffer(tensor.device))
                window.add(piece, streams)
        if window is not None:
            window.begin()
            yield window

    def wait(self) -> None:
        """Waits for all copies that have begun."""
        for device in self._ordered:
            stream = copy_stream(device)
            if not stream.query():
                with on_stream(stream):
                    stream.synchronize()

    def _streams(self, tensor: Tensor) -> bool:
        """Whether a tensor is streamed; orders its copy after what is queued on its device's current stream."""
        if tensor.is_cpu or not tensor.numel() or not has_streams(tensor.device) or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.device not in self._ordered:
            self._ordered.add(tensor.device)
            current = torch.get_device_module(tensor.device).current_stream(tensor.device)
            copy_stream(tensor.device).wait_stream(current)
        # A copy that made it contiguous would be as large as it is.
        return tensor.nbytes <= self._bytes or tensor.is_contiguous()

    def _cut(self, tensor: Tensor) -> Iterator[Tensor]:
        if tensor.nbytes <= self._bytes:
            yield tensor
        else:
            yield from torch.split(tensor.detach().view(-1), self._bytes // tensor.dtype.itemsize)

    def _next_buffer(self, device: torch.device) -> Tensor:
        if self._buffers is None:
            wanted = (torch.uint8, torch.Size((self._bytes,)), device)
            self._buffers = cycle(self._memory.tensors_of([wanted, wanted]))
            self._memory.populate()
        return next(self._buffers)
