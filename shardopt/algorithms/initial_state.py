"""State before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.registry import AlgorithmSpec, AtFirstStep, Dtype, Kind, MakesState, StateEntry, StepsOn
from shardopt.sharding.view import local_tensors
from shardopt.torch_private import can_make_lazy_state, lazy_state


def initial_state(spec: AlgorithmSpec, optimizer: Optimizer, group: Mapping[str, Any], leaf: Tensor) -> dict[str, Any]:
    """New state for a tensor that has none, as the algorithm would make it at the first gradient.

    torch makes it where it can, so that names, dtypes and devices are torch's; for a class that makes state inside of
    its step, it is what the spec says. What only a gradient gives a first value (the momentum buffer of SGD) is filled
    in with zeros, to be a destination for loading. Nothing is changed: neither `optimizer.state` nor `leaf.grad`.

    Args:
        spec: of the optimizer's class.
        optimizer: steps on `leaf` or on tensors like it.
        group: the options of the leaf's group.
        leaf: a local tensor; one gradient of its size is held for the time of the call. The parameter itself for an
            algorithm that steps on parameters.
    """
    if spec.steps_on is StepsOn.PARAMETERS:
        return cast(MakesState, optimizer).initial_state(group, leaf)
    state = lazy_state(optimizer, group, leaf) if can_make_lazy_state(optimizer) else {}
    for entry in spec.entries(group, leaf.ndim):
        if entry.name not in state:
            state[entry.name] = _as_told(entry, group, leaf)
    return state


def is_initial(state: Mapping[str, Any], fresh: Mapping[str, Any]) -> bool:
    """Whether state has the names and values of `fresh` in the elements that this rank holds.

    Args:
        state: of a parameter, or of none; tensors plain or sharded, and plain values.
        fresh: as `initial_state` makes it; sharded in the same way.
    """
    return state.keys() == fresh.keys() and all(_equal(state[name], fresh[name]) for name in fresh)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) != isinstance(other, Tensor):
        return False
    if not isinstance(one, Tensor):
        return bool(one == other)
    held, wanted = local_tensors(one), local_tensors(other)
    return len(held) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a, b.to(a.device)) for a, b in zip(held, wanted, strict=True)
    )


def _as_told(entry: StateEntry, group: Mapping[str, Any], leaf: Tensor) -> Any:
    """A piece of state as its entry says."""
    initial = group[entry.initial] if isinstance(entry.initial, str) else entry.initial
    if isinstance(initial, AtFirstStep):
        initial = group["lr"] if initial is AtFirstStep.LEARNING_RATE else 0.0
    if entry.dtype is Dtype.PLAIN_COUNT:
        return int(initial)
    dtype = entry.dtype.of(leaf.dtype, group)
    if entry.kind is Kind.SCALAR:
        return torch.tensor(float(initial), dtype=dtype)
    return torch.full_like(leaf, float(initial), dtype=dtype)
