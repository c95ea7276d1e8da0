"""Averages of weights, exponential (EMA) and equal (SWA); both are an `Averaging`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardopt.errors import Problem, StateError
from shardopt.optim.averages.averaging import Averaging, AvgFn, MultiAvgFn


class EMA(Averaging):
    """Exponential moving averages: average ← decay · average + (1 - decay) · weight.

    Sources: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging (1992), for equal weights.
    Tarvainen and Valpola, Mean Teachers Are Better Role Models (2017), arXiv:1703.01780, for weights that decay.
    Bit-identical to torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`, but for tensors that have no average.

    Args:
        model: as for `Averaging`.
        decay: in [0, 1]; or a function that returns it for the number of updates so far (1 or more), such as
            `ramped_decay`. The default, without a formula, is 0.999.
        dtype, use_buffers, device, avg_fn, multi_avg_fn: as for `Averaging`. A formula takes the place of the decay.

    Raises:
        LayoutError, StateError: as for `Averaging`; the decay is not in [0, 1], or given beside a formula.
    """

    _entry = "ema"

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] | None = None,
        dtype: torch.dtype | None = None,
        use_buffers: bool = False,
        *,
        device: torch.device | str | int | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
    ) -> None:
        if decay is not None and (avg_fn or multi_avg_fn) is not None:
            problem = Problem("decay", "a decay and a formula", "one of them", "leave the decay out")
            raise StateError("averages cannot be made", [problem], code="averages")
        self.decay = 0.999 if decay is None else decay
        if not callable(self.decay):
            _refuse_bad_decay(self.decay, "averages cannot be made")
        super().__init__(model, dtype, use_buffers, device=device, avg_fn=avg_fn, multi_avg_fn=multi_avg_fn)

    def _step_size(self, n: int) -> float:
        decay = self.decay
        if callable(decay):
            decay = decay(n)
            _refuse_bad_decay(decay, "averages cannot be updated")
        return 1 - decay


class SWA(Averaging):
    """Stochastic weight averaging (arXiv:1803.05407): the mean of the weights at all updates, with equal weights.

    Bit-identical to torch's `AveragedModel` with `get_swa_multi_avg_fn()`, which is its default on CUDA (that on the
    CPU rounds otherwise), but for tensors that are not floating-point.

    Args:
        model, dtype, use_buffers, device, avg_fn, multi_avg_fn: as for `EMA`.
    """

    _entry = "swa"

    def _step_size(self, n: int) -> float:
        # Rounded to fp32 as torch's, whose counter is a tensor.
        return float(1 / torch.tensor(n + 1, dtype=torch.float32, device="cpu"))


def _refuse_bad_decay(decay: Any, doing: str) -> None:
    if not isinstance(decay, int | float) or not 0 <= decay <= 1:
        problem = Problem("decay", repr(decay), "a number in [0, 1]", "pass 0.999 or the like")
        raise StateError(doing, [problem], code="averages")
