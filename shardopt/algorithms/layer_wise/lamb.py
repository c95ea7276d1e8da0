"""LAMB: Adam whose update of each parameter has the parameter's own norm, times the rate.

θ parameter, G gradient, t the number of the step; ‖·‖ over the whole parameter.

    M ← β₁ M + (1 − β₁) G                       V ← β₂ V + (1 − β₂) G²
    U = (M / (1 − β₁ᵗ)) / (√(V / (1 − β₂ᵗ)) + eps) + weight_decay θ
    θ ← θ − lr min(‖θ‖, most_norm) / ‖U‖ · U        the quotient is 1 where ‖θ‖ or ‖U‖ is 0

Without `correct_bias` both corrections are left out.
Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (arXiv:1904.00962).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from shardopt.algorithms.layer_wise.base import LayerWiseOptimizer, ratio
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
        self, group: Options, number: int, weight: Tensor, gradient: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        beta1, beta2 = group["betas"]
        average, squares = state
        # The same operations as in `_move`, out of place.
        return weight, _update(
            group,
            number,
            weight,
            average.lerp(gradient, 1 - beta1),
            (squares * beta2).addcmul_(gradient, gradient, value=1 - beta2),
        )

    def _factor(self, group: Options, dimensions: int, norms: Tensor) -> Tensor:
        weight, update = norms.unbind()
        return ratio(weight if group["most_norm"] is None else weight.clamp(max=group["most_norm"]), update)

    def _move(
        self,
        group: Options,
        number: int,
        weight: Tensor,
        gradient: Tensor,
        state: Sequence[Tensor],
        factor: Tensor,
        dimensions: int,
    ) -> None:
        beta1, beta2 = group["betas"]
        average, squares = state
        average.lerp_(gradient, 1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.sub_(_update(group, number, weight, average, squares).mul_(factor * rate_of(group)))


def _update(group: Options, number: int, weight: Tensor, average: Tensor, squares: Tensor) -> Tensor:
    """Computes U from the new M and V, as a new tensor."""
    beta1, beta2 = group["betas"]
    first, second = (1 - beta1**number, 1 - beta2**number) if group["correct_bias"] else (1.0, 1.0)
    update = (average / first).div_((squares / second).sqrt_().add_(group["eps"]))
    return update.add_(weight, alpha=group["weight_decay"]) if group["weight_decay"] != 0 else update
