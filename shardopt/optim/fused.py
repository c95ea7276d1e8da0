"""Contracts of optimizers that update parameters inside of backward."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from shardopt.optim.core.base import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """A keyed optimizer whose parameters are updated while backward runs, so that no gradient is ever stored.

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
        """Changes no parameter, as backward has; evaluates a closure, whose loss is returned."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Has no gradient to drop."""


class EmptyFusedOptimizer(FusedOptimizer):
    """The fused optimizer of a module that has no parameters to update."""

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    @property
    def updates_in_backward(self) -> bool:
        """Nothing is updated."""
        return False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluates a closure, whose loss is returned; nothing else."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing."""


class FusedOptimizerModule(abc.ABC):
    """A module that has a fused optimizer for parameters of its own; no other optimizer may step on them."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer: names in it are relative to the module."""
