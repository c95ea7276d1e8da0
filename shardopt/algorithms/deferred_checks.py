"""Checks of numbers that ranks have exchanged in a step, run in a later one, so that no device is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DeferredChecks:
    """Numbers that are being copied to the host, and the checks to be run on them there. A copy has none."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Any, Callable[[Tensor], None]]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredChecks, ()

    def defer(self, numbers: Tensor, check: Callable[[Tensor], None]) -> None:
        """Queues a check of numbers, to be run once they are on the host.

        Args:
            numbers: on any device; copied.
            check: gets them on the CPU, and raises where something is wrong with them.
        """
        if numbers.is_cpu:
            self._waiting.append((numbers.clone(), None, check))
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        copied = torch.get_device_module(numbers.device).Event()
        copied.record()
        self._waiting.append((host, copied, check))

    def run_ready(self) -> None:
        """Runs the checks of numbers that have arrived. Waits for nothing.

        Raises:
            Exception: as a check raises it; no check runs twice.
        """
        while self._waiting and (self._waiting[0][1] is None or self._waiting[0][1].query()):
            numbers, _, check = self._waiting.pop(0)
            check(numbers)
