"""Chooses torch's implementation for a step of an algorithm: for-loop, foreach or fused.

A group that names one (`foreach`, `fused`) gets it. One that names none gets, from `keyed`, the fastest that computes
what the loop computes: the fused one where `AlgorithmSpec.fused_agrees` says that it does, torch has its kernel, and
memory lies as this assumes; else the for-loop on the CPU, and elsewhere what torch takes by itself. Nothing of this
choice is kept but where counters are: the group's options stay as they were given. Where torch's fused kernels for the
CPU would compute something else, or walk out of the memory that they are given, a step that names them is refused; on
other devices torch refuses by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.registry import AlgorithmSpec, AtFirstStep, Kind
from shardopt.errors import AlgorithmError, GradientError, Problem
from shardopt.optim.local.group_step import GroupShards, GroupStep
from shardopt.optim.local.memory_order import InOrder, Row, are_contiguous, lie_in_order, misfits
from shardopt.runtime.torch_private import has_fused_kernel

Group = Mapping[str, Any]
States = Mapping[Tensor, Mapping[str, Any]]


def choose_fused(spec: AlgorithmSpec, steps: Iterable[GroupStep]) -> None:
    """Sets "fused" for a group that names no implementation, if the fused one can take its step.

    Args:
        spec: of the algorithm.
        steps: of groups, with their local tensors.
    """
    for step in steps:
        if "fused" in step.group and _prefers_fused(spec, step.group, step.shards):
            step.group["fused"] = step.chosen = True


def settle_fused(spec: AlgorithmSpec, steps: Iterable[GroupStep], state: States, names: Mapping[Tensor, str]) -> None:
    """Gives the for-loop the steps that torch's fused CPU implementation cannot take.

    Args:
        spec: of the algorithm.
        steps: of groups that have gathered their lists, where torch gathers ahead.
        state: of the inner optimizer.
        names: plain parameter → FQN, for errors.

    Raises:
        AlgorithmError: `fused=True` was asked for by name, and would be wrong. No step was taken.
    """
    for step in steps:
        shards, known = step.shards, step.shards.in_order
        shards.in_order = None
        if not step.group.get("fused"):
            continue
        if known is not None and step.lists is not None:
            # In a step that repeats, gradients in order, the local tensors alone may lie otherwise.
            repeats = step.repeats and step.gradients_in_order
            if are_contiguous(step.lists[0]) if repeats else known.still(step.lists):
                shards.in_order = known
                continue
        on_host = any(local.is_cpu for local in shards.local_tensors)
        if not on_host and not step.chosen:
            continue
        if not step.chosen:
            _refuse_dtypes(spec, shards, names)
        columns = _columns(spec, step, state)
        instead = False if on_host else None  # with False torch takes the for-loop, with None foreach where it can
        if columns is None or not (on_host or _have_one_dtype(columns)):
            step.group["fused"] = instead
        elif lie_in_order(columns):
            shards.in_order = None if step.lists is None else InOrder(step.lists, columns)
        elif bad_rows := misfits(columns):
            if not step.chosen:
                names = shards.names_of_local_tensors(names)
                problems = [_misfit_problem(row, tensor, state, names[row[0]]) for row, tensor in bad_rows]
                raise AlgorithmError(
                    "torch's fused kernels would walk out of these tensors; no step was taken", problems
                )
            step.group["fused"] = instead


def place_counters(steps: Iterable[GroupStep], state: States) -> None:
    """Moves the step counters of groups on accelerators to where the implementation that was chosen wants them.

    Fused ones read them on the device. The others compute with them on the host, and would wait for the device. They
    are moved where the choice is another one than in the step before, so that a step that repeats pays nothing.
    """
    for step in steps:
        shards, group = step.shards, step.group
        if not shards.local_tensors or shards.local_tensors[0].is_cpu or "fused" not in group:
            continue
        fused = bool(group["fused"])
        if group.get("capturable") or (step.repeats and shards.was_fused == fused):
            continue
        shards.was_fused = fused
        moved: dict[int, Tensor] = {}
        for local in shards.local_tensors:
            entries: Any = state.get(local, {})
            counter = entries.get("step")
            device = local.device if fused else torch.device("cpu")
            if isinstance(counter, Tensor) and counter.device != device:
                moved[id(counter)] = entries["step"] = counter.to(device, non_blocking=fused)
        if moved and step.lists is not None:
            shards.cache = None
            step.lists = [[moved.get(id(each), each) for each in column] for column in step.lists]


def refuse_sparse(spec: AlgorithmSpec, group: Group, sharded: Iterable[tuple[str, Tensor]]) -> None:
    """Raises if a shard has a sparse gradient, and the group's options would change rows that it lacks.

    Args:
        spec: of the algorithm.
        group: its options.
        sharded: names of sharded parameters, and their local tensors.

    Raises:
        GradientError: there is one. No step was taken.
    """
    if any(entry.initial is AtFirstStep.GRADIENT for entry in spec.entries(group)):
        option, why = "momentum", "a sparse buffer would grow with every step and could not be saved"
    elif spec.takes_sparse and group.get("weight_decay"):
        option, why = "weight_decay", "the decay changes every row"
    else:
        return
    for name, local in sharded:
        if local.grad is not None and local.grad.is_sparse:
            problem = Problem(
                key=f"{name}.grad",
                found=f"a sparse gradient in a group with {option}",
                required=f"a dense one, as {why}",
                remedy=f"set {option} to 0 for this parameter, or use SparseAdam or RowWiseAdagrad",
            )
            raise GradientError(
                f"{option} does not go with sparse gradients of shards", [problem], code="sparse-gradient"
            )


def refuse_all_sparse(spec: AlgorithmSpec, names: Mapping[Tensor, str]) -> None:
    """Raises where an algorithm from outside, whose spec does not name sparse gradients, would meet one.

    Args:
        spec: of the algorithm.
        names: local tensor → FQN of its parameter.

    Raises:
        GradientError: there is one. No step was taken.
    """
    problems = [
        Problem(
            key=f"{name}.grad",
            found="a sparse gradient",
            required=f"a dense one, as the spec of {spec.name} does not say that it takes others",
            remedy="make it dense (sparse=False in the Embedding), or use SparseAdam or RowWiseAdagrad; "
            "takes_sparse=True in the AlgorithmSpec is for a class that steps with sparse gradients",
        )
        for local, name in names.items()
        if local.grad is not None and local.grad.is_sparse
    ]
    if problems:
        raise GradientError(f"{spec.name} takes no sparse gradients", problems, code="sparse-gradient")


def _prefers_fused(spec: AlgorithmSpec, group: Group, shards: GroupShards) -> bool:
    """Whether a group names no implementation, and the fused one is the fastest with equal results.

    It is not where the for-loop refuses the options, takes numbers that the fused one does not, or keeps other state.
    """
    names_none = (
        group["fused"] is None
        and group["foreach"] is None
        and not group["differentiable"]
        and not group.get("capturable")  # refused on the CPU
        and not any(isinstance(value, Tensor) for name, value in group.items() if name != "lr")
        and torch.get_default_dtype() != torch.float64  # which would be the dtype of the for-loop's counters
    )
    if not names_none:
        return False
    kinds = shards.kinds
    agrees = all(dtype in spec.fused_agrees for _, dtype in kinds)
    return agrees and (all(on_cpu for on_cpu, _ in kinds) or _has_kernel(spec, group, shards))


def _has_kernel(spec: AlgorithmSpec, group: Group, shards: GroupShards) -> bool:
    """Whether all local tensors are on accelerators of one kind, for which torch has the fused kernel."""
    kinds = {local.device.type for local in shards.local_tensors}
    return len(kinds) == 1 and not isinstance(group["lr"], Tensor) and has_fused_kernel(spec.name, kinds.pop())


def _have_one_dtype(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether each local tensor, its gradient and its state have one dtype, as kernels of accelerators require."""
    return all(len({each.dtype for each in row}) == 1 for row in zip(*columns, strict=True))


def _columns(spec: AlgorithmSpec, step: GroupStep, state: States) -> list[list[Tensor]] | None:
    """Returns columns of equal layout: local tensors with gradients, the gradients, and each kind of state that exists.

    None where some local tensors have such state, and others get it in this step: torch's fused implementations make it
    for all of their parameters or for none, and fail otherwise.
    """
    names = [entry.name for entry in spec.state if entry.kind is Kind.PARAMETER]
    if step.lists is None:
        local_tensors = [local for local in step.shards.local_tensors if local.grad is not None]
        gradients: list[Any] = [local.grad for local in local_tensors]
        states = [state.get(local, {}) for local in local_tensors]
        others = [[entries.get(name) for entries in states] for name in names]
    else:
        local_tensors, gradients, *others = step.lists
        others = [column for column in others if _name_of(column, local_tensors, state) in names]
    columns = [local_tensors, gradients]
    for column in others:
        absent = sum(map(is_, column, repeat(None)))
        if 0 < absent < len(column):
            return None
        if not absent:
            columns.append(column)
    return columns


def _name_of(column: Sequence[Tensor | None], local_tensors: Sequence[Tensor], state: States) -> str:
    """Returns the name of the state in a column that torch has gathered; "" if there is none yet."""
    for local, value in zip(local_tensors, column, strict=False):  # torch leaves lists empty of what options do without
        if value is not None:
            return next((name for name, entry in state.get(local, {}).items() if entry is value), "")
    return ""


def _refuse_dtypes(spec: AlgorithmSpec, shards: GroupShards, names: Mapping[Tensor, str]) -> None:
    astray = {dtype for on_cpu, dtype in shards.kinds if on_cpu}.intersection(spec.fused_astray)
    if astray:
        problems = [
            Problem(
                key=name,
                found=f"a parameter of {local.dtype} on the CPU",
                required=f"another dtype, as torch's fused {spec.name} is far from its for-loop in this one",
                remedy=_REMEDY,
            )
            for local, name in shards.names_of_local_tensors(names).items()
            if local.is_cpu and local.dtype in astray
        ]
        raise AlgorithmError(f"torch's fused {spec.name} would be wrong; no step was taken", problems)


_REMEDY = "leave fused out: the for-loop takes such steps"


def _misfit_problem(row: Row, other: Tensor, state: States, name: str) -> Problem:
    local, gradient = row[:2]
    if other is local:
        required = "elements that fill a run of memory, each in a place of its own, as fused kernels go through it"
        return Problem(name, _described(local), required, _REMEDY)
    entry = next((key for key, value in state.get(local, {}).items() if value is other), "state")
    key = f"{name}.grad" if other is gradient else f"{name}.{entry}"
    return Problem(key, _described(other), f"{_described(local)}, as its parameter has", _REMEDY)


def _described(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} memory"
    return f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
