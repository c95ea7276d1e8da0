"""State before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.registry import AlgorithmSpec, Dtype, Kind, MakesState, StateEntry, StepsOn
from shardopt.algorithms.torch_private import can_make_lazy_state, lazy_state
from shardopt.errors import AlgorithmError, Problem


def fresh_state(spec: AlgorithmSpec, optimizer: Optimizer, group: Mapping[str, Any], leaf: Tensor) -> dict[str, Any]:
    """New state for a tensor that has none, as the algorithm would make it at the first gradient.

    torch makes it, so that names, dtypes and devices are torch's; what torch makes only from the gradient itself
    (the momentum buffer of SGD) is filled in as zeros, to be a destination for loading.
    Nothing is changed: neither `optimizer.state` nor `leaf.grad`.

    Args:
        spec: of the optimizer's class.
        optimizer: steps on `leaf` or on tensors like it.
        group: the options of the leaf's group.
        leaf: a local tensor; one gradient of its size is held for the time of the call. The parameter itself for an
            algorithm that steps on parameters.

    Raises:
        AlgorithmError: the algorithm's state cannot be made without a step.
    """
    if spec.steps_on is StepsOn.PARAMETERS:
        return cast(MakesState, optimizer).fresh_state(group, leaf)
    if spec.state_as_told:
        return {entry.name: _as_told(entry, group, leaf) for entry in spec.entries(group, leaf.ndim)}
    if not can_make_lazy_state(optimizer):
        raise AlgorithmError(
            "state cannot be made before the first step",
            [
                Problem(
                    key=spec.name,
                    found="an algorithm that makes its state inside of step",
                    required="one that makes it apart (torch's _init_group)",
                    remedy="take a first step with real gradients instead of init_state",
                )
            ],
        )
    state = lazy_state(optimizer, group, leaf)
    for entry in spec.entries(group):
        if entry.name not in state and entry.kind is Kind.PARAMETER:
            state[entry.name] = torch.zeros_like(leaf, dtype=entry.dtype.of(leaf.dtype, group))
    return state


def _as_told(entry: StateEntry, group: Mapping[str, Any], leaf: Tensor) -> Any:
    """A piece of state as its entry says."""
    if entry.dtype is Dtype.PLAIN_COUNT:
        return 0
    return torch.zeros_like(leaf, dtype=entry.dtype.of(leaf.dtype, group))
