"""Scratch for reads into memory of accelerators: pinned, and copied to the device beside the reads that follow.

    slot        memory for one batch, which a thread reads into, verifies, and has copied

Two buffers are cut into slots, which are taken in turn. A slot is taken again once its copies have ended. So the bytes
in flight and the host memory are bounded by the two buffers. They begin at pages, of 4 KiB or more.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.format.tensor_bytes import bytes_of
from shardopt.checkpoint.sources.reading.open_file import ReadRequest
from shardopt.checkpoint.sources.reading.scratch import ScratchCopy, check_cast, room_for
from shardopt.runtime.accelerator import copies_from_pinned, copy_stream, has_streams, on_stream
from shardopt.runtime.host_memory import HostMemory
from shardopt.runtime.torch_private import changeable

BUFFER_BYTES = 64 * SEGMENT_BYTES
_PAGE_BYTES = 4096


def is_streamed(target: Tensor) -> bool:
    """Whether memory of an accelerator is filled through pinned slots: where copies from these run beside its work."""
    return has_streams(target.device) and copies_from_pinned(target.device)


class _Slot(NamedTuple):
    """Memory for a batch, and the ends of the copies from it: stream and event of each device."""

    memory: memoryview
    ends: list[tuple[Any, Any]]


class DeviceScratch:
    """Pinned slots for the batches of one load. To be made and ended in the thread that loads.

    Copies come after what was queued on the current streams of this thread. Threads that read share it.

    Args:
        by_file: the requests, each for memory of an accelerator.
        limit: of a batch, in bytes.
        threads: that read at a time.
    """

    grows = False

    def __init__(self, by_file: Collection[Sequence[ReadRequest]], limit: int, threads: int) -> None:
        self._memory = HostMemory()
        self._taken: dict[int, _Slot] = {}  # by address
        devices = {request.target.device for requests in by_file for request in requests}
        needed = max(sum(room_for(each.entry.end - each.entry.begin) for each in requests) for requests in by_file)
        is_small = needed <= limit  # then each file is one batch
        nbytes = max(needed, 1) if is_small else limit + 2 * SEGMENT_BYTES
        self.nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        # One for each thread, and one for the batch that is being made: so nobody waits for another thread.
        in_buffer = max(BUFFER_BYTES // self.nbytes, -(-(threads + 1) // 2))
        slots = min(len(by_file), 2 * in_buffer) if is_small else 2 * in_buffer
        buffers = [min(in_buffer, slots), max(slots - in_buffer, 0)]
        device = next(iter(devices))
        wanted = [(torch.uint8, torch.Size((count * self.nbytes,)), device) for count in buffers if count]
        self._spare: deque[_Slot] = deque()
        for buffer in self._memory.tensors_of(wanted):
            self._spare += [_Slot(bytes_of(slot), []) for slot in torch.split(buffer, self.nbytes)]
        self._memory.populate()
        for each in devices:
            current = torch.get_device_module(each).current_stream(each)
            copy_stream(each).wait_stream(current)
        self._streams = {each: copy_stream(each) for each in devices}

    def take(self) -> memoryview:
        """Takes the slot whose copies began the longest ago; waits for these, which are most often over."""
        slot = self._spare.popleft()
        for stream, event in slot.ends:
            if not event.query():
                with on_stream(stream):
                    event.synchronize()
        slot.ends.clear()
        self._taken[id(slot.memory)] = slot
        return slot.memory

    def use(self, memory: bytearray | memoryview, copies: Sequence[ScratchCopy]) -> None:
        """Begins copies from a slot, and gives it back. Does not wait."""
        slot = self._taken.pop(id(memory))
        by_device: defaultdict[torch.device, list[ScratchCopy]] = defaultdict(list)
        for copy in copies:
            by_device[copy.target.device].append(copy)
        for device, own in by_device.items():
            stream = self._streams[device]
            with on_stream(stream):
                for copy in own:
                    check_cast(*copy)
                sources = [_on_device(copy) for copy in own]
                targets = [copy.target for copy in own]
                with changeable(targets):
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                event = torch.get_device_module(device).Event()
                event.record(stream)
            slot.ends.append((stream, event))
        self._spare.append(slot)

    def end(self) -> None:
        """Waits for all copies that have begun, and frees the slots."""
        for stream in self._streams.values():
            if not stream.query():
                with on_stream(stream):
                    stream.synchronize()
        self._spare.clear()
        self._taken.clear()
        self._memory.give_back()


def _on_device(copy: ScratchCopy) -> Tensor:
    """Returns the source of a copy to a device: itself, or its bytes on the device where torch would first cast or
    gather them into memory that is not pinned.
    """
    source, target = copy.source, copy.target
    if (source.dtype == target.dtype and source.is_contiguous()) or not source.numel():
        return source
    extent = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    span = source.as_strided((extent,), (1,))
    return span.to(target.device, non_blocking=True).as_strided(source.shape, source.stride(), 0)
