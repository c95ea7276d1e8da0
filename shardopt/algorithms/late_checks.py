"""What ranks have told each other in a step, looked at in a later one, so that no device is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LateChecks:
    """Numbers that are on their way to the host, and who judges them there. A copy has none."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Any, Callable[[Tensor], None]]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return LateChecks, ()

    def note(self, numbers: Tensor, judge: Callable[[Tensor], None]) -> None:
        """Has numbers judged once they are there.

        Args:
            numbers: on any device; copied.
            judge: gets them on the CPU, and raises where something is wrong with them.
        """
        if numbers.is_cpu:
            self._waiting.append((numbers.clone(), None, judge))
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        there = torch.get_device_module(numbers.device).Event()
        there.record()
        self._waiting.append((host, there, judge))

    def judge(self) -> None:
        """Looks at what has come. Waits for nothing.

        Raises:
            Exception: what a judge raises; nothing is judged twice.
        """
        while self._waiting and (self._waiting[0][1] is None or self._waiting[0][1].query()):
            numbers, _, judge = self._waiting.pop(0)
            judge(numbers)
