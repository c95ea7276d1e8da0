"""LARS: SGD with momentum whose rate for each parameter follows from the norms of parameter and gradient.

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

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.layer_wise.base import LayerWiseOptimizer, ratio
from shardopt.algorithms.lists import Tensors
from shardopt.algorithms.options import DECAY, NOT_NEGATIVE, POSITIVE, RATE, Range, options_of, rate_of
from shardopt.algorithms.registry import Options


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
        options = options_of(
            locals(),
            lr=RATE,
            momentum=DECAY,
            dampening=DECAY,
            weight_decay=NOT_NEGATIVE,
            trust_coefficient=POSITIVE,
            nesterov=Range("False without momentum", lambda nesterov: momentum > 0 or not nesterov),
        )
        super().__init__(params, options)

    def _measure(
        self, group: Options, number: int, weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> tuple[Tensors, Tensors]:
        return weights, gradients

    def _factor(self, group: Options, dimensions: int, weight: Tensor, other: Tensor) -> Tensor:
        if dimensions < 2:
            return torch.ones_like(weight)
        divisor = other + group["weight_decay"] * weight
        return torch.where(
            (weight > 0) & (divisor > 0), group["trust_coefficient"] * ratio(weight, divisor), torch.ones_like(weight)
        )

    def _move(
        self,
        group: Options,
        number: int,
        factors: Tensor,
        dimensions: int,
        weights: list[Tensor],
        gradients: list[Tensor],
        *state: list[Tensor],
    ) -> None:
        updates: Tensors = gradients
        if dimensions > 1:
            updates = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
            torch._foreach_mul_(updates, factors.unbind())
        for buffers in state:
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates, alpha=1 - group["dampening"])
            updates = torch._foreach_add(updates, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers
        torch._foreach_sub_(weights, torch._foreach_mul(updates, rate_of(group)))
