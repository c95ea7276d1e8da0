"""AdEMAMix: Adam with a second average of gradients, over many more steps.

θ parameter, G gradient, t step; M exp_avg, S exp_avg_slow, V exp_avg_sq (like the parameter, in its dtype).

    M ← β₁ M + (1 − β₁) G,  V ← β₂ V + (1 − β₂) G²,  S ← β₃ₜ S + (1 − β₃ₜ) G
    θ ← (1 − lr weight_decay) θ − lr (M / (1 − β₁ᵗ) + αₜ S) / (√V / √(1 − β₂ᵗ) + eps)

with αₜ = min(1, t / t_alpha_beta3) α, and β₃ₜ rising from β₁ to β₃ over as many steps, such that the half-life of S
rises linearly: ln β₃ₜ = ln β₁ ln β₃ / ((1 − t / T) ln β₃ + (t / T) ln β₁).
Source: Pagliardini et al., The AdEMAMix Optimizer: Better, Faster, Older (arXiv:2409.03137).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log, sqrt
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.elementwise.base import ElementwiseOptimizer, Numbers
from shardopt.algorithms.options import COUNT, NOT_NEGATIVE, RATE, Range, are_decays, optional, options_of
from shardopt.algorithms.registry import Options


class AdEMAMix(ElementwiseOptimizer):
    """AdEMAMix (arXiv:2409.03137) as a torch optimizer.

    State of a parameter: `step`, a number on the CPU; `exp_avg`, `exp_avg_sq` and `exp_avg_slow`, of its shape and
    dtype.

    Args:
        params: tensors or groups of them.
        lr: the learning rate, a number or a tensor of one element, which is read in every step.
        betas: (β₁, β₂, β₃), each in [0, 1).
        alpha: α, the weight of the slow average.
        t_alpha_beta3: over how many steps α and β₃ come to their values; None: they have them from the start.
        eps: is added to the root.
        weight_decay: decoupled, at least 0.
        foreach, maximize: as of `Lion`.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        options = options_of(
            locals(),
            lr=RATE,
            betas=Range(
                "three numbers in [0, 1), with t_alpha_beta3 the first and the third above 0",
                lambda betas: are_decays(betas, 3) and (t_alpha_beta3 is None or (betas[0] > 0 and betas[2] > 0)),
            ),
            alpha=NOT_NEGATIVE,
            t_alpha_beta3=optional(COUNT),
            eps=NOT_NEGATIVE,
            weight_decay=NOT_NEGATIVE,
        )
        super().__init__(params, options)

    def _count(self, group: Options, lr: float, state: dict[str, Any]) -> Numbers:
        state["step"] += 1
        return lr, float(state["step"])

    def _update(
        self, group: Options, numbers: Numbers, weights: list[Tensor], gradients: list[Tensor], *state: list[Tensor]
    ) -> None:
        (lr, step), (fast, squares, slow) = numbers, state
        beta1, beta2, beta3 = group["betas"]
        alpha = ramped_alpha(step, group["t_alpha_beta3"], group["alpha"])
        slow_beta = ramped_beta(step, group["t_alpha_beta3"], beta1, beta3)
        if group["weight_decay"] != 0:
            torch._foreach_mul_(weights, 1 - group["weight_decay"] * lr)
        torch._foreach_lerp_(fast, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        torch._foreach_lerp_(slow, gradients, 1 - slow_beta)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, sqrt(1 - beta2 ** int(step)))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(fast, 1 - beta1 ** int(step))
        torch._foreach_add_(updates, slow, alpha=alpha)
        torch._foreach_addcdiv_(weights, updates, roots, -lr)


def ramped_alpha(step: float, steps: int | None, alpha: float) -> float:
    """Computes αₜ."""
    return alpha if steps is None else min(step * alpha / steps, alpha)


def ramped_beta(step: float, steps: int | None, first: float, last: float) -> float:
    """Computes β₃ₜ."""
    if steps is None or step >= steps:
        return last
    share = step / steps
    return min(exp(log(first) * log(last) / ((1 - share) * log(last) + share * log(first))), last)
