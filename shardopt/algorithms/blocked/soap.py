"""SOAP: Adam in the eigenbases of Shampoo's preconditioners.

Of a block with gradient G (of any number of dimensions; here [m, n]), t the number of its steps after the first:

    L ← β_s L + (1 − β_s) G Gᵀ,  R ← β_s R + (1 − β_s) Gᵀ G
    M ← β₁ M + (1 − β₁) G                   G' = Q_Lᵀ G Q_R,  M' = Q_Lᵀ M Q_R
    V ← β₂ V + (1 − β₂) G'²
    θ ← (1 − lr weight_decay) (θ − lr √(1 − β₂ᵗ) / (1 − β₁ᵗ) Q_L (M' / (√V + eps)) Q_Rᵀ)

The first step only makes L and R, and Q_L and Q_R from their eigenvectors (descending). Every `precondition_frequency`
steps these are refreshed after the update by one step of power iteration: Q ← the orthogonal factor of L Q, whose
columns are sorted before by diag(Qᵀ L Q), descending, and V with them. A dimension that is too large has no Q.

State: M exp_avg and V exp_avg_sq like the parameter; L, R as GG_0, GG_1, and Q_L, Q_R as Q_0, Q_1, factors of the
blocks.
Source: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam (arXiv:2409.11321), in the order of the authors'
implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.blocked.factors import add_outer, apply_factors, descending_eigenvectors
from shardopt.algorithms.blocked.optimizer import BlockOptimizer
from shardopt.algorithms.options import COUNT, DECAY, DECAYS, NOT_NEGATIVE, RATE, optional, options_of, rate_of
from shardopt.algorithms.registry import Options


class SOAP(BlockOptimizer):
    """SOAP (arXiv:2409.11321) for parameters that may be sharded, on one or several meshes.

    State of a parameter: `step`; `exp_avg`, `exp_avg_sq` of its shape; `GG_i`, `Q_i` for each preconditioned dimension
    i, [N_i, 1, N_i] without `block_size`. All are in fp32 (fp64 for an fp64 parameter). Of a matrix [M, N] that is 2
    (M² + N² + M N) elements in all, on its owner alone.

    Args:
        params: tensors, or groups of them.
        lr: the learning rate, a number or a tensor of one element.
        betas: (β₁, β₂).
        shampoo_beta: β_s; None is β₂.
        eps: is added to the root.
        weight_decay: decoupled, at least 0.
        precondition_frequency: every how many steps a basis is refreshed.
        max_precondition_dim: dimensions (of a block) beyond this have no basis.
        precondition_1d: whether vectors have one.
        correct_bias: whether M and V are corrected for their start at zero.
        block_size: cuts parameters into blocks of at most so many elements along each dimension, each with its own
            bases. None keeps parameters whole, as in the paper.
        stagger: whether the refreshes of blocks are spread over the steps, by their parameters' names; otherwise all
            are due in the same step.

    Raises:
        ValueError: an option is out of its range.
    """

    factors = ("GG", "Q")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
        precondition_1d: bool = False,
        correct_bias: bool = True,
        block_size: int | None = None,
        stagger: bool = True,
    ) -> None:
        options = options_of(
            locals(),
            lr=RATE,
            betas=DECAYS,
            shampoo_beta=optional(DECAY),
            eps=NOT_NEGATIVE,
            weight_decay=NOT_NEGATIVE,
            precondition_frequency=COUNT,
            block_size=optional(COUNT),
        )
        super().__init__(params, options)

    def _factored_dims(self, group: Options, sizes: Sequence[int]) -> tuple[int, ...]:
        if len(sizes) == 1 and not group["precondition_1d"]:
            return ()
        return tuple(dim for dim, size in enumerate(sizes) if size <= group["max_precondition_dim"])

    def _update_block(self, group: Options, step: int, gradient: Tensor, state: dict[str, Tensor], turn: int) -> Tensor:
        beta1, beta2 = group["betas"]
        decay = beta2 if group["shampoo_beta"] is None else group["shampoo_beta"]
        bases = [state.get(f"Q_{dim}") for dim in range(gradient.ndim)]
        if step == 1:
            for dim, basis in enumerate(bases):
                if basis is not None:
                    add_outer(state[f"GG_{dim}"], gradient, dim, decay, 1 - decay)
                    state[f"Q_{dim}"] = descending_eigenvectors(state[f"GG_{dim}"])
            return gradient.zero_()
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        average.lerp_(gradient, 1 - beta1)
        squares.lerp_(apply_factors(gradient, bases).square_(), 1 - beta2)
        rotated = apply_factors(average, bases) / squares.sqrt().add_(group["eps"])
        update = apply_factors(rotated, bases, inverse=True)
        for dim, basis in enumerate(bases):
            if basis is not None:
                add_outer(state[f"GG_{dim}"], gradient, dim, decay, 1 - decay)
        if (step - 1 + turn) % group["precondition_frequency"] == 0:
            for dim, basis in enumerate(bases):
                if basis is not None:
                    product = state[f"GG_{dim}"] @ basis
                    order = torch.argsort((basis * product).sum(0), descending=True, stable=True)
                    state["exp_avg_sq"] = state["exp_avg_sq"].index_select(dim, order)
                    state[f"Q_{dim}"] = torch.linalg.qr(product.index_select(1, order))[0]
        return update

    def _apply(self, group: Options, step: int, weight: Tensor, update: Tensor) -> None:
        if step == 1:
            return
        beta1, beta2 = group["betas"]
        lr = rate_of(group)
        size = lr
        if group["correct_bias"]:
            size = lr * (sqrt(1 - beta2 ** (step - 1)) / (1 - beta1 ** (step - 1)))
        weight.add_(update * -size if isinstance(size, Tensor) else update.mul_(-size))
        if group["weight_decay"] != 0:
            weight.mul_(1 - lr * group["weight_decay"])
