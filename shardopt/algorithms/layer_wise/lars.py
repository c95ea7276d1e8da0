"""LARS: SGD with momentum whose rate for each parameter follows from its norm and that of its gradient.

θ parameter, G gradient, B momentum_buffer; ‖·‖ over the whole parameter.

    r = trust_coefficient ‖θ‖ / (‖G‖ + weight_decay ‖θ‖)        1 where ‖θ‖ or the divisor is 0
    U = r (G + weight_decay θ)
    B ← momentum B + (1 − dampening) U
    θ ← θ − lr B            with nesterov  θ ← θ − lr (U + momentum B)

Parameters of fewer than two dimensions (biases, norms) have r = 1 and no decay.
Source: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks (arXiv:1708.03888), with lr outside of the
buffer, as torch's SGD has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.elementwise.base import is_rate, refuse_options
from shardopt.algorithms.layer_wise.base import Group, LayerWiseOptimizer, rate, ratio


class LARS(LayerWiseOptimizer):
    """LARS (arXiv:1708.03888) for parameters that may be sharded, on one or several meshes.

    State of a parameter: `momentum_buffer`, of its shape and dtype, cut as it is; none without `momentum`. A parameter
    of 16 bits is computed in fp32 and rounded at the end of the step.

    Args:
        params: tensors, or groups of them.
        lr: the learning rate, a number or a tensor of one element.
        momentum: in [0, 1).
        dampening: in [0, 1).
        weight_decay: at least 0.
        trust_coefficient: above 0.
        nesterov: whether the step looks ahead.
        maximize: whether to step the other way.

    Raises:
        ValueError: an option is out of its range.
    """

    _tensors = ("momentum_buffer",)
    _counts = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        refuse_options(
            "LARS",
            [
                ("lr", lr, "at least 0", is_rate(lr)),
                ("momentum", momentum, "in [0, 1)", 0 <= momentum < 1),
                ("dampening", dampening, "in [0, 1)", 0 <= dampening < 1),
                ("weight_decay", weight_decay, "at least 0", weight_decay >= 0),
                ("trust_coefficient", trust_coefficient, "above 0", trust_coefficient > 0),
                ("nesterov", nesterov, "False without momentum", momentum > 0 or not nesterov),
            ],
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _names_for(self, group: Group) -> tuple[str, ...]:
        return self._tensors if group["momentum"] > 0 else ()

    def _measure(
        self, group: Group, step: int, weight: Tensor, gradient: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        return weight, gradient

    def _factor(self, group: Group, dimensions: int, norms: Tensor) -> Tensor:
        if dimensions < 2:
            return torch.ones_like(norms[0])
        weight, gradient = norms.unbind()
        divisor = gradient + group["weight_decay"] * weight
        return torch.where(
            (weight > 0) & (divisor > 0), group["trust_coefficient"] * ratio(weight, divisor), torch.ones_like(weight)
        )

    def _move(
        self,
        group: Group,
        step: int,
        weight: Tensor,
        gradient: Tensor,
        state: Sequence[Tensor],
        factor: Tensor,
        dimensions: int,
    ) -> None:
        update = gradient
        if dimensions > 1:
            update = gradient.add(weight, alpha=group["weight_decay"]).mul_(factor)
        for buffer in state:
            buffer.mul_(group["momentum"]).add_(update, alpha=1 - group["dampening"])
            update = update.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        lr = rate(group["lr"])
        weight.sub_(update * lr)
