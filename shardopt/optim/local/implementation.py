"""Chooses torch's implementation for a step of an algorithm: for-loop, foreach or fused.

A group that names one (`foreach`, `fused`) gets it. One that names none gets, from `keyed`, the fastest that computes
what the loop computes: the fused one where `AlgorithmSpec.fused_agrees` says that it does, torch has its kernel, and
memory lies as this assumes; else the for-loop on the CPU, and elsewhere what torch takes by itself. What a tensor gets
depends on no other one: ranks hold different tensors of a group, and implementations round differently, so that
replicas would drift apart. Nothing of this choice is kept but where counters are: the group's options stay as they were
given. Where torch's fused kernels for the CPU would compute something else, or walk out of the memory that they are
given, a step that names them is refused; on other devices torch refuses by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.registry import AlgorithmSpec, AtFirstStep, Kind
from shardopt.errors import AlgorithmError, GradientError, Problem
from shardopt.optim.local.group_step import GroupShards, GroupStep, Part
from shardopt.optim.local.memory_order import InOrder, Row, are_contiguous, lie_in_order, misfits
from shardopt.runtime.torch_private import has_fused_kernel

Group = Mapping[str, Any]
States = Mapping[Tensor, Mapping[str, Any]]


def choose_fused(spec: AlgorithmSpec, steps: Iterable[GroupStep]) -> None:
    """Chooses the fused implementation for a group that names none, if it can take the step of some of its tensors.

    Args:
        spec: of the algorithm.
        steps: of groups, with their local tensors.
    """
    for step in steps:
        if "fused" not in step.group or not _names_none(step.group):
            continue
        kinds = step.shards.kinds
        agree = [dtype in spec.fused_agrees for _, dtype in kinds]
        if any(agree) and (all(on_cpu for on_cpu, _ in kinds) or _has_kernel(spec, step.group, step.shards)):
            step.chosen = True
            if all(agree):
                step.group["fused"] = True
            else:  # `settle_fused` is to look at each local tensor; torch gathers no others for fused
                step.shards.in_order = None


def settle_fused(
    spec: AlgorithmSpec, steps: Iterable[GroupStep], optimizer: Optimizer, names: Mapping[Tensor, str]
) -> None:
    """Gives the for-loop the local tensors that torch's fused CPU implementation cannot take.

    Args:
        spec: of the algorithm.
        steps: of groups that have gathered their lists, where torch gathers ahead.
        optimizer: the inner one.
        names: plain parameter → FQN, for errors.

    Raises:
        AlgorithmError: `fused=True` was asked for by name, and would be wrong. No step was taken.
    """
    for step in steps:
        shards, known = step.shards, step.shards.in_order
        shards.in_order = None
        if not step.group.get("fused") and not step.chosen:
            continue
        _refuse_rate_elsewhere(spec, step)
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
        columns = _columns(spec, step, optimizer.state)
        rows = [[each for each in row if each is not None] for row in zip(*columns, strict=True)]
        agree = [_agrees(row, spec.fused_agrees if step.chosen else None, on_host) for row in rows]
        if all(agree) and all(len(row) == len(columns) for row in rows) and lie_in_order(columns):
            step.group["fused"] = True
            shards.in_order = None if step.lists is None else InOrder(step.lists, columns)
            continue
        bad_rows = misfits(rows)
        if bad_rows and not step.chosen:
            names = shards.names_of_local_tensors(names)
            problems = [_misfit_problem(row, tensor, optimizer.state, names[row[0]]) for row, tensor in bad_rows]
            raise AlgorithmError("torch's fused kernels would walk out of these tensors; no step was taken", problems)
        bad = {row[0] for row, _ in bad_rows}
        # torch's fused implementations make state for all that they are given, or for none.
        parts: dict[tuple[bool, int], list[Tensor]] = {}
        for row, agrees in zip(rows, agree, strict=True):
            fused = agrees and row[0] not in bad
            parts.setdefault((fused, len(row) if fused else 0), []).append(row[0])
        instead = False if on_host else None  # with False torch takes the for-loop, with None foreach where it can
        if len(parts) > 1:
            step.split(optimizer, [(tensors, True if fused else instead) for (fused, _), tensors in parts.items()])
        else:
            step.group["fused"] = True if all(fused for fused, _ in parts) else instead


def _refuse_rate_elsewhere(spec: AlgorithmSpec, step: GroupStep) -> None:
    """Raises for a rate on an accelerator and tensors on the CPU, whose fused kernels read it before it is copied."""
    lr = step.group.get("lr")
    if isinstance(lr, Tensor) and not lr.is_cpu and any(local.is_cpu for local in step.shards.local_tensors):
        required = "a number, or a tensor on the CPU, for parameters there"
        problem = Problem(f"{spec.name}.lr", f"a tensor on {lr.device}", required, "pass lr as one")
        raise AlgorithmError("a rate would be read before it is there; no step was taken", [problem])


def place_counters(steps: Iterable[GroupStep], state: States) -> None:
    """Moves the step counters of groups on accelerators to where the implementation that was chosen wants them.

    Fused ones read them on the device. The others compute with them on the host, and would wait for the device. They
    are moved where the choice is another one than in the step before, so that a step that repeats pays nothing.
    """
    for step in steps:
        shards, group = step.shards, step.group
        if not shards.local_tensors or shards.local_tensors[0].is_cpu or "fused" not in group:
            continue
        fused = None if step.is_split else bool(group["fused"])
        if group.get("capturable") or (step.repeats and fused is not None and shards.was_fused == fused):
            continue
        shards.was_fused = fused
        for part in step.parts:
            _place_counters(part, shards, state)


def _place_counters(part: Part, shards: GroupShards, state: States) -> None:
    fused = bool(part.group["fused"])
    moved: dict[int, Tensor] = {}
    for local in part.group["params"]:
        entries: Any = state.get(local, {})
        counter = entries.get("step")
        device = local.device if fused else torch.device("cpu")
        if isinstance(counter, Tensor) and counter.device != device:
            moved[id(counter)] = entries["step"] = counter.to(device, non_blocking=device.type != "cpu")
    if moved and part.lists is not None:
        shards.cache = None
        part.lists = [[moved.get(id(each), each) for each in column] for column in part.lists]


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
        instead = "use SparseAdam or RowWiseAdagrad"
    elif spec.takes_sparse and group.get("weight_decay"):
        option, why = "weight_decay", "the decay changes every row"
        instead = "make it dense (sparse=False in the Embedding)"
    else:
        return
    for name, local in sharded:
        if local.grad is not None and local.grad.is_sparse:
            problem = Problem(
                key=f"{name}.grad",
                found=f"a sparse gradient in a group with {option}",
                required=f"a dense one, as {why}",
                remedy=f"set {option} to 0 for this parameter, or {instead}",
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


def _names_none(group: Group) -> bool:
    """Whether a group names no implementation, and its options and state are the same in the for-loop and fused."""
    return (
        group["fused"] is None
        and group["foreach"] is None
        and not group["differentiable"]
        and not group.get("capturable")  # refused on the CPU
        and not any(isinstance(value, Tensor) for name, value in group.items() if name != "lr")
        and torch.get_default_dtype() != torch.float64  # which would be the dtype of the for-loop's counters
    )


def _has_kernel(spec: AlgorithmSpec, group: Group, shards: GroupShards) -> bool:
    """Whether all local tensors are on accelerators of one kind, for which torch has the fused kernel."""
    kinds = {local.device.type for local in shards.local_tensors}
    return len(kinds) == 1 and not isinstance(group["lr"], Tensor) and has_fused_kernel(spec.name, kinds.pop())


def _agrees(row: Row, dtypes: Collection[torch.dtype] | None, on_host: bool) -> bool:
    """Whether the fused implementation takes the dtypes of a local tensor, its gradient and its state: all the same.

    Args:
        dtypes: in which it computes what the loop computes; None where it was asked for by name.
        on_host: whether it is the one of the CPU.
    """
    if dtypes is None and on_host:
        return True  # torch refuses it by itself
    return (dtypes is None or row[0].dtype in dtypes) and len({each.dtype for each in row}) == 1


def _columns(spec: AlgorithmSpec, step: GroupStep, state: States) -> list[list[Any]]:
    """Returns columns of equal layout: local tensors with gradients, the gradients, and each kind of state that exists.

    State is None for a local tensor that gets it in this step, while others have it.
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
    return columns + [column for column in others if not all(map(is_, column, repeat(None)))]


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
