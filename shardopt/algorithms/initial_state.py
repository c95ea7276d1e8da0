"""Makes the state that algorithms have before the first step, and recognises it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.registry import AlgorithmSpec, AtFirstStep, Dtype, Kind, MakesState, StateEntry, StepsOn
from shardopt.sharding.view import local_tensors
from shardopt.torch_private import can_make_lazy_state, lazy_state


def initial_state(spec: AlgorithmSpec, optimizer: Optimizer, group: Mapping[str, Any], local: Tensor) -> dict[str, Any]:
    """Makes new state for a tensor that has none, as the algorithm would make it at the first gradient.

    torch makes it where it can, so that names, dtypes and devices are torch's; for a class that makes state inside of
    its step, it is made as the spec says. State whose first value is a gradient (the momentum buffer of SGD) is
    filled in with zeros, to be a destination for loading. Neither `optimizer.state` nor `local.grad` is changed.

    Args:
        spec: of the optimizer's class.
        optimizer: steps on `local` or on tensors like it.
        group: the options of the tensor's group.
        local: a local tensor; one gradient of its size is held for the time of the call. The parameter itself for an
            algorithm that steps on parameters.
    """
    if spec.steps_on is StepsOn.PARAMETERS:
        return cast(MakesState, optimizer).initial_state(group, local)
    state = lazy_state(optimizer, group, local) if can_make_lazy_state(optimizer) else {}
    for entry in spec.entries(group, local.ndim):
        if entry.name not in state:
            state[entry.name] = _from_entry(entry, group, local)
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


def _from_entry(entry: StateEntry, group: Mapping[str, Any], local: Tensor) -> Any:
    """Makes one entry of state with the kind, dtype and initial value of its `StateEntry`."""
    initial = group[entry.initial] if isinstance(entry.initial, str) else entry.initial
    if isinstance(initial, AtFirstStep):
        initial = group["lr"] if initial is AtFirstStep.LEARNING_RATE else 0.0
    if entry.dtype is Dtype.PLAIN_COUNT:
        return int(initial)
    dtype = entry.dtype.of(local.dtype, group)
    if entry.kind is Kind.SCALAR:
        return torch.tensor(float(initial), dtype=dtype)
    return torch.full_like(local, float(initial), dtype=dtype)
