"""Makes the state that algorithms have before the first step, and recognises such state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.registry import AlgorithmSpec, AtFirstStep, Dtype, Kind, MakesState, StateEntry, StepsOn
from shardopt.runtime.torch_private import can_make_lazy_state, lazy_state
from shardopt.sharding.reduced import sum_like
from shardopt.sharding.view import assemble, local_tensors, view_of
from shardopt.state.param_groups import PARAMS


def initial_state(spec: AlgorithmSpec, optimizer: Optimizer, group: Mapping[str, Any], local: Tensor) -> dict[str, Any]:
    """Makes the state of a tensor without state, as the algorithm would at the first gradient.

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
            state[entry.name] = made_of(entry, group, local)
    return state


def lacking(
    spec: AlgorithmSpec,
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    there: Collection[str],
    is_strange: bool,
) -> list[str]:
    """Returns the names of absent entries without which the others of a parameter's state would mislead a step.

    Args:
        spec: of the algorithm that is to step.
        optimizer: is to step. It knows which of the entries this very parameter has: SOAP makes none of its bases for
            vectors, nor for dimensions that are too large.
        group: the options.
        parameter: of any kind.
        there: the names of the entries that there are.
        is_strange: whether another algorithm has made them: then they are of use only if none is absent but maxima,
            which are right from zeros on at any step.
    """
    absent = [entry for entry in spec.entries(group, len(view_of(parameter).shape)) if entry.name not in there]
    needed = [each.name for each in absent if each.needs_first_step or (is_strange and not each.maximum)]
    if needed and spec.steps_on is StepsOn.PARAMETERS:
        names = getattr(optimizer, "state_names", cast(MakesState, optimizer).initial_state)(group, parameter)
        needed = [name for name in needed if name in names]
    return needed


def is_initial(state: Mapping[str, Any], fresh: Mapping[str, Any]) -> bool:
    """Whether state equals `fresh` in names and, where this rank holds elements, in values.

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


def made_of(entry: StateEntry, group: Mapping[str, Any], parameter: Tensor) -> Any:
    """Makes one entry of state with the kind, dtype and initial value of its `StateEntry`, placed like the parameter.

    Args:
        entry: of any kind but history, blocks and global state, whose shapes its algorithm alone knows.
        group: the options.
        parameter: of any kind, or a local tensor.
    """
    initial = group[entry.initial] if isinstance(entry.initial, str) else entry.initial
    if isinstance(initial, AtFirstStep):
        initial = group["lr"] if initial is AtFirstStep.LEARNING_RATE else 0.0
    if entry.dtype is Dtype.PLAIN_COUNT:
        return int(initial)
    view = view_of(parameter)
    dtype, last = entry.dtype.of(view.dtype, group), len(view.shape) - 1
    if entry.kind is Kind.SCALAR:
        return torch.tensor(float(initial), dtype=dtype, device="cpu")
    if entry.kind is Kind.PARAMETER:
        tensors = [torch.full_like(local, float(initial), dtype=dtype) for local in local_tensors(parameter)]
        return assemble(parameter, tensors)
    summed = {Kind.ROWS: (last,), Kind.COLUMNS: (last - 1,), Kind.TABLE_ROWS: tuple(range(1, last + 1))}
    made = sum_like(parameter, *summed[entry.kind], dtype=dtype)
    if initial:
        for local in local_tensors(made):
            local.fill_(float(initial))
    return made


def restore_dtypes(spec: AlgorithmSpec, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Restores state that torch's `load_state_dict` has cast to its parameter's dtype and moved to its device.

    Args:
        spec: says which entries have a dtype that is not the parameter's.
        optimizer: has just loaded.
        state_dict: what it has loaded, by position.
    """
    wide = {entry.name: entry for entry in spec.state if entry.dtype in (Dtype.AT_LEAST_SINGLE, Dtype.WIDE)}
    saved = chain.from_iterable(group[PARAMS] for group in state_dict["param_groups"])
    loaded = ((group, parameter) for group in optimizer.param_groups for parameter in group[PARAMS])
    for number, (group, parameter) in zip(saved, loaded, strict=True):
        for name, value in state_dict["state"].get(number, {}).items() if wide else ():
            if name in wide and isinstance(value, Tensor):
                # One without dimensions is kept on the CPU.
                device = optimizer.state[parameter][name].device if value.ndim else torch.device("cpu")
                dtype = wide[name].dtype.of(view_of(parameter).dtype, group)
                optimizer.state[parameter][name] = value.detach().to(device, dtype, copy=True)
