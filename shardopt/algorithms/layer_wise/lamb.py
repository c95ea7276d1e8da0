"""LAMB: Adam whose update of each parameter is as large as the parameter, times the rate.

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

from shardopt.algorithms.elementwise.base import are_decays, is_rate, refuse_options
from shardopt.algorithms.layer_wise.base import Group, LayerWiseOptimizer, rate, ratio


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

    _tensors = ("exp_avg", "exp_avg_sq")
    _counts = True

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
        refuse_options(
            "LAMB",
            [
                ("lr", lr, "at least 0", is_rate(lr)),
                ("betas", betas, "two numbers in [0, 1)", len(betas) == 2 and are_decays(betas)),
                ("eps", eps, "at least 0", eps >= 0),
                ("weight_decay", weight_decay, "at least 0", weight_decay >= 0),
                ("most_norm", most_norm, "above 0, or None", most_norm is None or most_norm > 0),
            ],
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "most_norm": most_norm,
            "correct_bias": correct_bias,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _measure(
        self, group: Group, step: int, weight: Tensor, gradient: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        beta1, beta2 = group["betas"]
        average, squares = state
        # The same operations as in `_move`, out of place.
        return weight, _update(
            group,
            step,
            weight,
            average.lerp(gradient, 1 - beta1),
            (squares * beta2).addcmul_(gradient, gradient, value=1 - beta2),
        )

    def _factor(self, group: Group, dimensions: int, norms: Tensor) -> Tensor:
        weight, update = norms.unbind()
        return ratio(weight if group["most_norm"] is None else weight.clamp(max=group["most_norm"]), update)

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
        beta1, beta2 = group["betas"]
        average, squares = state
        average.lerp_(gradient, 1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.sub_(_update(group, step, weight, average, squares).mul_(factor * rate(group["lr"])))


def _update(group: Group, step: int, weight: Tensor, average: Tensor, squares: Tensor) -> Tensor:
    """Computes U of the new M and V, as a new tensor."""
    beta1, beta2 = group["betas"]
    first, second = (1 - beta1**step, 1 - beta2**step) if group["correct_bias"] else (1.0, 1.0)
    update = (average / first).div_((squares / second).sqrt_().add_(group["eps"]))
    return update.add_(weight, alpha=group["weight_decay"]) if group["weight_decay"] != 0 else update
