"""Streams of accelerators that threads work on: a new one has device 0 and default streams, whatever the caller has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """This thread on a stream, and on its device.

    The device goes first, and is left last. A stream that is entered from another device makes that one the current one
    again when it is left, for which the driver makes a context: some hundred MiB on device 0 for each process.
    """
    module = torch.get_device_module(stream.device)
    with module.device(stream.device), module.stream(stream):
        yield


class CallersStreams:
    """The streams that the calling thread works on, for threads that do some of its work.

    What they do on them is ordered after what was asked of these streams before, and before what is asked afterwards.

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
        """The thread that enters on these streams."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(on_stream(stream))
            yield
