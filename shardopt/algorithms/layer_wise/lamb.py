"""LAMB: Adam whose update of each parameter has the parameter's own norm, times the rate.

θ parameter, G gradient, t the number of the step; ‖·‖ over the whole parameter.

    M ← β₁ M + (1 − β₁) G                       V ← β₂ V + (1 − β₂) G²
    U = (M / (1 − β₁ᵗ)) / (√(V / (1 − β₂ᵗ)) + eps) + weight_decay θ
    θ ← θ − lr min(‖θ‖, most_norm) / ‖U‖ · U        the quotient is 1 where ‖θ‖ or ‖U‖ is 0

Without `correct_bias` both corrections are left out.
Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (arXiv:1904.00962).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.layer_wise.base import LayerWiseOptimizer, ratio
from shardopt.algorithms.lists import Tensors
from shardopt.algorithms.options import DECAYS, NOT_NEGATIVE, POSITIVE, RATE, optional, options_of, rate_of
from shardopt.algorithms.registry import Options


class LAMB(LayerWiseOptimizer):
    """LAMB (arXiv:1904.00962) for parameters that may be sharded, on one or several meshes.

    State of a parameter: `step`, a number on the CPU; `exp_avg` and `exp_avg_sq`, of its shape and dtype, cut as it is.
    A parameter of 16 bits is computed in fp32 and rounded at the end of the step.

    Args:
        params: tensors, or groups of them.
        lr: the learning rate, a number or a tensor of one element.
        betas: (β₁, β₂), each in [0, 1).
        eps: is added to the root.
        weight_decay: at least 0; part of the update, whose norm is taken with it.
        most_norm: bounds the norm of the parameter in the quotient; None for no bound.
        correct_bias: whether M and V are corrected for their start at zero.
        maximize: whether to step the other way.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        most_norm: float | None = None,
        correct_bias: bool = True,
        maximize: bool = False,
    ) -> None:
        options = options_of(
            locals(), lr=RATE, betas=DECAYS, eps=NOT_NEGATIVE, weight_decay=NOT_NEGATIVE, most_norm=optional(POSITIVE)
        )
        super().__init__(params, options)

    def _measure(
        self, group: Options, number: int, weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> tuple[Tensors, Tensors]:
        averages, squares = state
        beta1, beta2 = group["betas"]
        # The same operations as in `_move`, out of place.
        new_averages = torch._foreach_lerp(averages, gradients, 1 - beta1)
        new_squares = torch._foreach_mul(squares, beta2)
        torch._foreach_addcmul_(new_squares, gradients, gradients, 1 - beta2)
        return weights, _updates(group, number, weights, new_averages, new_squares)

    def _factor(self, group: Options, dimensions: int, weight: Tensor, other: Tensor) -> Tensor:
        return ratio(weight if group["most_norm"] is None else weight.clamp(max=group["most_norm"]), other)

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
        averages, squares = state
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        updates, rate = _updates(group, number, weights, averages, squares), rate_of(group)
        scales = factors * (rate.reshape(1) if isinstance(rate, Tensor) else rate)
        torch._foreach_mul_(updates, scales.unbind())
        torch._foreach_sub_(weights, updates)


def _updates(group: Options, number: int, weights: Tensors, averages: Tensors, squares: Tensors) -> tuple[Tensor, ...]:
    """Computes U of the new M and V, as new tensors."""
    beta1, beta2 = group["betas"]
    first, second = (1 - beta1**number, 1 - beta2**number) if group["correct_bias"] else (1.0, 1.0)
    updates, roots = torch._foreach_div(averages, first), torch._foreach_div(squares, second)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_div_(updates, roots)
    if group["weight_decay"] != 0:
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
    return updates
