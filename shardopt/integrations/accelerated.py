"""Optimizers in Accelerate's wrappers, made keyed once their parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardopt.errors import Problem, StateError
from shardopt.integrations.optimizers import keyed_like
from shardopt.optim.keyed import KeyedOptimizer
from shardopt.torch_private import note_steps_for_schedules


def make_keyed(wrapper: Any, model: nn.Module, schedules: Iterable[Any], remedy: str) -> None:
    """Puts a keyed optimizer in the place of a torch optimizer in an `AcceleratedOptimizer`; a keyed one stays.

    For FSDP2, Accelerate shards the model beneath the optimizer, and puts the new parameters in its groups. So this
    comes after `prepare`, and before the first step. Schedules that go by the torch optimizer go by the keyed one then,
    those within others too.

    Raises:
        StateError: the optimizer has stepped, or has parameters that are not the model's; or it is stepped by a
            GradScaler, which has hold of its `step`.
        AlgorithmError: its class is not known, or cannot step on shards.
    """
    optimizer = wrapper.optimizer
    if isinstance(optimizer, KeyedOptimizer):
        return
    if wrapper.scaler is not None:
        found, required = "fp16, with a GradScaler around the optimizer's step", 'mixed_precision="bf16" or "no"'
        raise StateError(
            "the optimizer cannot be keyed by parameter name", [Problem("mixed_precision", found, required, remedy)]
        )
    wrapper.optimizer = keyed_like(optimizer, model.named_parameters(remove_duplicate=False), remedy)
    for schedule in schedules:
        _move(schedule, optimizer, wrapper.optimizer)
    note_steps_for_schedules(optimizer, wrapper.optimizer)


def _move(schedule: Any, old: Optimizer, new: Optimizer) -> None:
    if getattr(schedule, "optimizer", None) is old:
        schedule.optimizer = new
    for value in vars(schedule).values() if isinstance(schedule, LRScheduler) else ():
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, LRScheduler):
                _move(inner, old, new)
