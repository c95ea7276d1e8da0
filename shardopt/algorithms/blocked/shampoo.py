"""Distributed Shampoo: gradients multiplied by inverse roots of their second moments along each dimension.

Of a block with gradient G of D dimensions (here a matrix [m, n], D = 2), t the number of the step:

    L ← β₂ L + (1 − β₂) G Gᵀ,  R ← β₂ R + (1 − β₂) Gᵀ G                 (β₂ = 1: L ← L + G Gᵀ, as in the first paper)
    M ← β₁ M + (1 − β₁) G,  M̂ = M / (1 − β₁ᵗ)
    U = (L / (1 − β₂ᵗ) + eps I)^(−1 / 2D) M̂ (R / (1 − β₂ᵗ) + eps I)^(−1 / 2D)
    V ← β_g V + (1 − β_g) G²,  A = M̂ / (√(V / (1 − β_gᵗ)) + graft_eps)    with graft="adam"
    θ ← (1 − lr weight_decay) θ − lr U ‖A‖ / ‖U‖                          without it θ ← (1 − lr weight_decay) θ − lr U

The inverse roots are those of the last refresh: of the first step, and of every `precondition_frequency` steps. Norms
are those of the block.

State: M exp_avg and V exp_avg_sq like the parameter; L, R as preconditioner_0, preconditioner_1, and their roots as
root_0, root_1, factors of the blocks.
Sources: Gupta et al., Shampoo: Preconditioned Stochastic Tensor Optimization (arXiv:1802.09568); Shi et al., A
Distributed Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer (arXiv:2309.06497).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.blocked.factors import add_outer, apply_factors, inverse_root
from shardopt.algorithms.blocked.optimizer import BlockOptimizer
from shardopt.algorithms.options import COUNT, DECAY, NOT_NEGATIVE, POSITIVE, RATE, Range, one_of, options_of, rate_of
from shardopt.algorithms.registry import Options


class Shampoo(BlockOptimizer):
    """Distributed Shampoo (arXiv:2309.06497) for parameters that may be sharded, on one or several meshes.

    State of a parameter: `step`; `exp_avg` (unless β₁ is 0) and `exp_avg_sq` (with grafting) of its shape;
    `preconditioner_i`, `root_i` for each dimension i, [N_i, blocks, min(N_i, block_size)]. All are in fp32 (fp64 for an
    fp64 parameter). Each block's are on its owner alone. Of a matrix [M, N] cut into whole blocks that is 6 M N
    elements, with grafting and average.

    Args:
        params: tensors, or groups of them.
        lr: the learning rate, a number or a tensor of one element.
        betas: (β₁, β₂), β₂ also 1.
        eps: is added to the eigenvalues; more than 0.
        weight_decay: decoupled, at least 0.
        precondition_frequency: every how many steps inverse roots are computed again.
        block_size: cuts parameters into blocks of at most so many elements along each dimension.
        graft: whose norm an update takes: "adam", or None for its own.
        graft_beta, graft_eps: β_g and what is added to the root.
        stagger: whether the refreshes of blocks are spread over the steps, by their parameters' names; otherwise all
            are due in the same step.

    Raises:
        ValueError: an option is out of its range.
    """

    factors = ("preconditioner", "root")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        precondition_frequency: int = 10,
        block_size: int = 1024,
        graft: str | None = "adam",
        graft_beta: float = 0.999,
        graft_eps: float = 1e-8,
        stagger: bool = True,
    ) -> None:
        options = options_of(
            locals(),
            lr=RATE,
            betas=Range("two numbers, in [0, 1) and [0, 1]", _are_betas),
            eps=POSITIVE,
            weight_decay=NOT_NEGATIVE,
            precondition_frequency=COUNT,
            block_size=COUNT,
            graft=one_of(None, "adam"),
            graft_beta=DECAY,
            graft_eps=NOT_NEGATIVE,
        )
        super().__init__(params, options)

    def _factored_dims(self, group: Options, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(range(len(sizes)))

    def _update_block(self, group: Options, step: int, gradient: Tensor, state: dict[str, Tensor], turn: int) -> Tensor:
        (beta1, beta2), dims = group["betas"], range(gradient.ndim)
        for dim in dims:
            add_outer(state[f"preconditioner_{dim}"], gradient, dim, beta2, 1 - beta2 if beta2 < 1 else 1.0)
        if step == 1 or (step + turn) % group["precondition_frequency"] == 0:
            correction = 1 - beta2**step if beta2 < 1 else 1.0
            for dim in dims:
                corrected = state[f"preconditioner_{dim}"] / correction
                state[f"root_{dim}"] = inverse_root(corrected, 2 * gradient.ndim, group["eps"])
        moved = gradient
        if beta1:
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            moved = state["exp_avg"] / (1 - beta1**step)
        update = apply_factors(moved, [state[f"root_{dim}"] for dim in dims])
        if not group["graft"]:
            return update
        beta = group["graft_beta"]
        squares = state["exp_avg_sq"].mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
        grafted = moved / (squares / (1 - beta**step)).sqrt_().add_(group["graft_eps"])
        own = torch.linalg.vector_norm(update)
        return update.mul_(torch.linalg.vector_norm(grafted) / own.clamp(min=torch.finfo(own.dtype).tiny))

    def _apply(self, group: Options, step: int, weight: Tensor, update: Tensor) -> None:
        lr = rate_of(group)
        if group["weight_decay"] != 0:
            weight.mul_(1 - lr * group["weight_decay"])
        weight.sub_(update * lr)


def _are_betas(betas: Sequence[float]) -> bool:
    return len(betas) == 2 and 0 <= betas[0] < 1 and 0 <= betas[1] <= 1
