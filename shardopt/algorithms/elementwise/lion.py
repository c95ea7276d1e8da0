"""Lion: steps by the sign of an average of gradients.

θ parameter, G gradient, M exp_avg (like the parameter, in its dtype).

    θ ← (1 − lr weight_decay) θ − lr sign(β₁ M + (1 − β₁) G)
    M ← β₂ M + (1 − β₂) G

Source: Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.elementwise.base import ElementwiseOptimizer, Numbers
from shardopt.algorithms.options import DECAYS, NOT_NEGATIVE, RATE, options_of
from shardopt.algorithms.registry import Options


class Lion(ElementwiseOptimizer):
    """Lion (arXiv:2302.06675) as a torch optimizer.

    State of a parameter: `exp_avg`, of its shape and dtype. Good rates are 3 to 10 times smaller than AdamW's, and
    decays as much larger.

    Args:
        params: tensors or groups of them.
        lr: the learning rate, a number or a tensor of one element, which is read in every step.
        betas: (β₁, β₂), each in [0, 1).
        weight_decay: decoupled, at least 0.
        foreach: see `ElementwiseOptimizer`.
        maximize: whether to step the other way.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, options_of(locals(), lr=RATE, betas=DECAYS, weight_decay=NOT_NEGATIVE))

    def _update(
        self, group: Options, numbers: Numbers, weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> None:
        (lr,), (averages,) = numbers, state
        beta1, beta2 = group["betas"]
        if group["weight_decay"] != 0:
            torch._foreach_mul_(weights, 1 - group["weight_decay"] * lr)
        updates = torch._foreach_lerp(averages, gradients, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_lerp_(averages, gradients, 1 - beta2)
        torch._foreach_add_(weights, updates, alpha=-lr)
