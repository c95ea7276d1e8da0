"""Everything that depends on the type of accelerator: its module, streams for threads, and pinned host memory.

Nothing else asks for CUDA by name. A new thread has device 0 and default streams, whatever its caller has.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU

_log = logging.getLogger("shardopt")


def module_in_use() -> tuple[str, Any] | None:
    """Returns the type of torch's accelerator here, and its module (`torch.cuda`); None if there is none."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else (device.type, torch.get_device_module(device))


def is_capturing() -> bool:
    """Whether the current stream is captured into a graph, whose replays run nothing of the host's code."""
    if torch.compiler.is_compiling():  # which decides by itself what it captures
        return False
    asks = getattr(_initialized_module(), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def synchronize(device: torch.device) -> None:
    """Waits for all work of a device.

    From another device torch would return to that one, for which the driver makes a context: some hundred MiB on device
    0 for each process that waits in a new thread.
    """
    with getattr(torch.get_device_module(device), "device", nullcontext)(device):  # MPS has one alone
        torch.accelerator.synchronize(device)


def wait_for_reads(tensors: Iterable[Tensor]) -> None:
    """Waits until accelerators have read these tensors, which are about to change, where they are in pinned memory.

    `fully_shard` with a CPUOffloadPolicy queues copies of its weights in each forward, and waits for none of them.
    """
    module = _initialized_module()
    if module is not None and any(tensor.is_cpu and tensor.is_pinned() for tensor in tensors):
        has_memory = getattr(module, "memory_reserved", lambda device: True)  # MPS has no such question, and one device
        for device in range(module.device_count()):
            if has_memory(device):  # others would get a context
                synchronize(torch.device(device))  # of the accelerator, by its number


def _initialized_module() -> Any:
    """Returns the accelerator's module; None where this process has not used it, and a question makes a context."""
    in_use = module_in_use()
    return in_use[1] if in_use is not None and getattr(in_use[1], "is_initialized", lambda: True)() else None


def has_streams(device: torch.device) -> bool:
    """Whether a device has streams, on which copies run beside other work (MPS has none)."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "stream")


def copies_from_pinned(device: torch.device) -> bool:
    """Whether copies between a device and the host run in parallel only with pinned host memory."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "cudart")


def pin(memory: Tensor, device: torch.device) -> bool:
    """Pins host memory for all accelerators of a type; returns whether it could: without it, copies take longer.

    Args:
        device: in use; any other, such as device 0 of a new thread, would get a context of some hundred MiB.
    """
    module = torch.get_device_module(device)
    with module.device(device):
        # Not by torch's own allocator of pinned memory, which takes the next power of two.
        code = int(module.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if code != 0:
        _forget_error(device)
        _warn_of_pageable(code)
    return code == 0


def unpin(memory: Tensor, device: torch.device) -> None:
    """Unpins memory that `pin` pinned for a device."""
    module = torch.get_device_module(device)
    with module.device(device):
        module.cudart().cudaHostUnregister(memory.data_ptr())


@cache
def _warn_of_pageable(code: int) -> None:
    """Logs once that memory could not be pinned."""
    _log.warning(
        "host memory cannot be pinned (error %d of the driver; see ulimit -l): copies to it take longer [no-space]",
        code,
    )


def _forget_error(device: torch.device) -> None:
    """Clears the runtime's last error, which torch would otherwise raise at its next launch."""
    with suppress(OSError, AttributeError):
        if device.type == "cuda" and torch.version.cuda:
            ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}").cudaGetLastError()
        elif device.type == "cuda":
            ctypes.CDLL("libamdhip64.so").hipGetLastError()


def copy_stream(device: torch.device) -> Any:
    """Returns the stream for all copies of this process between an accelerator and the host.

    torch has 32 for each device, and hands them out in turn: one for each save would soon be another library's, too.
    So copies of two saves, or of a save and a load at one time, wait for each other.
    """
    stream = _copy_streams.get(device)
    return stream or _copy_streams.setdefault(device, torch.get_device_module(device).Stream(device))


def side_stream(device: torch.device) -> Any:
    """Returns the stream for what this process exchanges beside training."""
    stream = _side_streams.get(device)
    return stream or _side_streams.setdefault(device, torch.get_device_module(device).Stream(device))


def await_copies() -> None:
    """Waits for all copies on these streams that have begun."""
    for stream in tuple(_copy_streams.values()):
        if not stream.query():
            with on_stream(stream):
                stream.synchronize()  # and not the device: another thread may be capturing a graph on it


_copy_streams: dict[torch.device, Any] = {}
_side_streams: dict[torch.device, Any] = {}
os.register_at_fork(after_in_child=_copy_streams.clear)
os.register_at_fork(after_in_child=_side_streams.clear)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Switches this thread to a stream, and to its device.

    The device goes first, and is left last. A stream that is entered from another device makes that one the current one
    again when it is left, for which the driver makes a context: some hundred MiB on device 0 for each process.
    """
    module = torch.get_device_module(stream.device)
    with module.device(stream.device), module.stream(stream):
        yield


class CallersStreams:
    """The current streams of the calling thread, for threads that do part of its work.

    Their work is ordered after all that was queued on these streams before, and before what is queued afterwards.

    Args:
        tensors: that are worked on; streams of their devices.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
        self._streams = [torch.get_device_module(each).current_stream(each) for each in devices if has_streams(each)]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Switches the entering thread to these streams."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(on_stream(stream))
            yield
