"""Streams of accelerators for threads: a new thread has device 0 and default streams, whatever its caller has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Puts this thread on a stream, and on its device.

    The device goes first, and is left last. A stream that is entered from another device makes that one the current one
    again when it is left, for which the driver makes a context: some hundred MiB on device 0 for each process.
    """
    module = torch.get_device_module(stream.device)
    with module.device(stream.device), module.stream(stream):
        yield


class CallersStreams:
    """The current streams of the calling thread, for threads that do some of its work.

    Their work is ordered after all that was queued on these streams before, and before what is queued afterwards.

    Args:
        tensors: that are worked on; streams of their devices.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
        modules = [(device, torch.get_device_module(device)) for device in devices]
        # Not every kind of device has streams (MPS has none).
        self._streams = [module.current_stream(device) for device, module in modules if hasattr(module, "stream")]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Puts the thread that enters on these streams."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(on_stream(stream))
            yield
