"""torch's SparseAdam with a step that gathers the touched rows once, updates them and scatters them back.

torch's makes four sparse tensors of them and adds each to a dense one, which takes two to three times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.communicating import AlgorithmOptimizer
from shardopt.runtime.rows import write_rows
from shardopt.runtime.torch_private import step_without_hooks


class SparseAdam(AlgorithmOptimizer, torch.optim.SparseAdam):
    """torch.optim.SparseAdam with the same options, state and bits, but faster if gradients consist of whole rows."""

    def _take_step(self) -> None:
        """Uses torch's own step if a gradient is not sparse only along its first dimension."""
        due = [(group, p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all(gradient.is_sparse and gradient.sparse_dim() == 1 for _, _, gradient in due):
            step_without_hooks(torch.optim.SparseAdam)(self)
            return
        for group, parameter, gradient in due:
            state = self.state[parameter]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            state["step"] += 1
            gradient = gradient.coalesce()
            if gradient.values().numel():
                _move_rows(parameter, gradient.indices()[0], gradient.values(), state, group)


def _move_rows(
    parameter: Tensor, index: Tensor, gradients: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> None:
    """Updates some rows by Adam, in torch's order of operations, so with the same bits.

    M ← M + (1 − β₁)(G − M), V ← V + (1 − β₂)(G² − V), θ ← θ − lr √(1 − β₂ᵗ) / (1 − β₁ᵗ) · M / (√V + ε)
    """
    beta1, beta2 = group["betas"]
    step = state["step"]
    lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
    size = lr * sqrt(1 - beta2**step) / (1 - beta1**step)
    given = -gradients if group["maximize"] else gradients
    first, second = state["exp_avg"].index_select(0, index), state["exp_avg_sq"].index_select(0, index)
    first.add_(given.sub(first).mul_(1 - beta1))
    second.add_(given.square().sub_(second).mul_(1 - beta2))
    write_rows(state["exp_avg"], index, first)
    write_rows(state["exp_avg_sq"], index, second)
    moved: Tensor = -size * first.div_(second.sqrt_().add_(group["eps"]))
    write_rows(parameter, index, moved.add_(parameter.index_select(0, index)))
