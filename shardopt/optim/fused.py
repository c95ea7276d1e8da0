"""The contracts of optimizers that update parameters inside of backward."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from shardopt.optim.core.base import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """A keyed optimizer that updates its parameters while backward runs, so that no gradient is ever stored.

    Options of the groups that are changed between two backwards (schedules, warm-up) hold from the next one.

    Args:
        params, state, param_groups: as for `KeyedOptimizer`.
    """

    @property
    def updates_in_backward(self) -> bool:
        """Always true."""
        return True

    @abc.abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Changes no parameter, as backward has; evaluates a closure and returns its loss."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, as there are no gradients."""


class EmptyFusedOptimizer(FusedOptimizer):
    """The fused optimizer of a module that has no parameters to update."""

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    @property
    def updates_in_backward(self) -> bool:
        """Always false, as there are no parameters."""
        return False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates a closure and returns its loss; does nothing else."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing."""


class FusedOptimizerModule(abc.ABC):
    """A module with a fused optimizer for its own parameters; no other optimizer may step these."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The fused optimizer; its names are relative to the module."""
