"""The optimizer of tables, which updates the rows that each backward touches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardopt.optim.core.composite import OptimizerWrapper
from shardopt.optim.fused import FusedOptimizer
from shardopt.runtime.torch_private import step_nested


class FusedRows(OptimizerWrapper, FusedOptimizer):
    """Updates the touched rows at the end of each backward, by a step of another optimizer.

    The module that has the parameters calls `update`, once for all gradients of one backward. Options that are
    changed before a backward hold in it. Step-pre-hooks, its own and those of all optimizers that it is part of, run
    before each update, so that who refuses a step refuses there; and again, like step-post-hooks, with `step`.

    Args:
        optimizer: of the parameters; not to be stepped by anyone else.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes no parameter, as backward has; evaluates a closure and returns its loss."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, as there are no gradients."""

    def update(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Takes one step with gradients that parameters have only during this call.

        Args:
            gradients: parameter → its gradient, placed as it is.

        Raises:
            PartialLoadError: this optimizer, or one that it is part of, may be half changed.
        """
        self._before_backward()
        before = {parameter: parameter.grad for parameter in self.params.values()}
        try:
            for parameter in before:
                parameter.grad = gradients.get(parameter)
            step_nested(self._optimizer)
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient
