"""Which of an algorithm's implementations in torch takes a step: its for-loop, foreach or fused one.

Who names one (`foreach`, `fused`) gets it. Who names none gets, from `keyed`, the fastest that computes what the loop
computes: on the CPU the fused one where `AlgorithmSpec.fused_agrees` says that it does and memory lies as it takes it
to, else the for-loop; elsewhere what torch takes by itself. Nothing of this choice is kept: the group's options stay as
they were given. Where torch's fused kernels for the CPU would compute something else, or walk out of the memory that
they are given, a step that names them is refused; on other devices torch refuses by itself.
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
from shardopt.optim.local.group_step import GroupStep
from shardopt.optim.local.memory_order import InOrder, Row, are_contiguous, lie_in_order, misfits
from shardopt.optim.local.shards import GroupShards

Group = Mapping[str, Any]
States = Mapping[Tensor, Mapping[str, Any]]


def choose_fused(spec: AlgorithmSpec, turns: Iterable[GroupStep]) -> None:
    """Sets "fused" where a group names no implementation, and the fused one may take its step.

    Args:
        spec: of the algorithm.
        turns: of groups, with their leaves.
    """
    for turn in turns:
        if "fused" in turn.group and _prefers_fused(spec, turn.group, turn.leaves):
            turn.group["fused"] = turn.chosen = True


def settle_fused(spec: AlgorithmSpec, turns: Iterable[GroupStep], state: States, names: Mapping[Tensor, str]) -> None:
    """Leaves those steps to the for-loop that torch's fused implementation for the CPU cannot take.

    Args:
        spec: of the algorithm.
        turns: of groups that have gathered what they step with, where that is torch's way.
        state: of the inner optimizer.
        names: plain parameter → FQN, for errors.

    Raises:
        AlgorithmError: `fused=True` was asked for by name, and would be wrong. No step was taken.
    """
    for turn in turns:
        leaves, known = turn.leaves, turn.leaves.in_order
        leaves.in_order = None
        if not turn.group.get("fused"):
            continue
        if known is not None and _lies_as_before(turn, known):
            leaves.in_order = known
            continue
        if not leaves.any_on_cpu:
            continue
        if not turn.chosen:
            _refuse_dtypes(spec, leaves, names)
        columns = _columns(spec, turn, state)
        if columns is None:
            turn.group["fused"] = False
        elif lie_in_order(columns):
            leaves.in_order = None if turn.lists is None else InOrder(turn.lists, columns)
        elif found := misfits(columns):
            if not turn.chosen:
                raise _would_be_wrong(found, state, leaves.names_of_local_tensors(names))
            turn.group["fused"] = False


def _lies_as_before(turn: GroupStep, known: InOrder) -> bool:
    """Whether what is stepped with lies as it did in the step before."""
    if turn.lists is None:
        return False
    if turn.repeats and turn.gradients_in_order:  # then the leaves alone may lie otherwise
        return are_contiguous(turn.lists[0])
    return known.still(turn.lists)


def refuse_sparse(spec: AlgorithmSpec, group: Group, sharded: Iterable[tuple[str, Tensor]]) -> None:
    """Raises where a shard has a sparse gradient, and the group's options would change rows that it does not have.

    Args:
        spec: of the algorithm.
        group: its options.
        sharded: names of sharded parameters, and their leaves.

    Raises:
        GradientError: there is one. No step was taken.
    """
    if _names_from_gradients(spec, group):
        option, why = "momentum", "a sparse buffer would grow with every step and could not be saved"
    elif spec.takes_sparse and group.get("weight_decay"):
        option, why = "weight_decay", "the decay changes every row"
    else:
        return
    for name, leaf in sharded:
        if leaf.grad is not None and leaf.grad.is_sparse:
            problem = Problem(
                key=f"{name}.grad",
                found=f"a sparse gradient in a group with {option}",
                required=f"a dense one, as {why}",
                remedy=f"set {option} to 0 for this parameter, or use SparseAdam or RowWiseAdagrad",
            )
            raise GradientError(f"{option} does not go with sparse gradients of shards", [problem])


def _prefers_fused(spec: AlgorithmSpec, group: Group, leaves: GroupShards) -> bool:
    """Whether a group names no implementation, and the fused one is the fastest that agrees.

    It is not where the for-loop refuses the options, takes numbers that the fused one does not, or keeps other state.
    """
    return (
        group["fused"] is None
        and group["foreach"] is None
        and not group["differentiable"]
        and not group.get("capturable")  # refused on the CPU
        and not any(isinstance(value, Tensor) for name, value in group.items() if name != "lr")
        and torch.get_default_dtype() != torch.float64  # which would be the dtype of the for-loop's counters
        and all(on_cpu and dtype in spec.fused_agrees for on_cpu, dtype in leaves.kinds)
    )


def _names_from_gradients(spec: AlgorithmSpec, group: Group) -> tuple[str, ...]:
    """The state that a group's parameters have only from their first gradient on."""
    return tuple(entry.name for entry in spec.entries(group) if entry.initial is AtFirstStep.GRADIENT)


def _columns(spec: AlgorithmSpec, turn: GroupStep, state: States) -> list[list[Tensor]] | None:
    """The leaves that have gradients, these, and each kind of state that lies like leaves, as far as there is any.

    None where some leaves have such state, and others get it in this step: torch's fused implementations make it for
    all of their parameters or for none, and fail otherwise.
    """
    names = [entry.name for entry in spec.state if entry.kind is Kind.PARAMETER]
    if turn.lists is None:
        leaves = [leaf for leaf in turn.leaves.leaves if leaf.grad is not None]
        gradients: list[Any] = [leaf.grad for leaf in leaves]
        held = [state.get(leaf, {}) for leaf in leaves]
        others = [[its.get(name) for its in held] for name in names]
    else:
        leaves, gradients, *others = turn.lists
        others = [column for column in others if _name_of(column, leaves, state) in names]
    columns = [leaves, gradients]
    for column in others:
        absent = sum(map(is_, column, repeat(None)))
        if 0 < absent < len(column):
            return None
        if not absent:
            columns.append(column)
    return columns


def _name_of(column: Sequence[Tensor | None], leaves: Sequence[Tensor], state: States) -> str:
    """The name that state has which torch has gathered; "" where there is none yet."""
    for leaf, value in zip(leaves, column, strict=False):  # torch leaves lists empty of what options do without
        if value is not None:
            return next((name for name, its in state.get(leaf, {}).items() if its is value), "")
    return ""


def _refuse_dtypes(spec: AlgorithmSpec, leaves: GroupShards, names: Mapping[Tensor, str]) -> None:
    astray = {dtype for on_cpu, dtype in leaves.kinds if on_cpu}.intersection(spec.fused_astray)
    if astray:
        problems = [
            Problem(
                key=name,
                found=f"a parameter of {leaf.dtype} on the CPU",
                required=f"another dtype, as torch's fused {spec.name} is far from its for-loop in this one",
                remedy=_REMEDY,
            )
            for leaf, name in leaves.names_of_local_tensors(names).items()
            if leaf.is_cpu and leaf.dtype in astray
        ]
        raise AlgorithmError(f"torch's fused {spec.name} would be wrong; no step was taken", problems)


_REMEDY = "leave fused out: the for-loop takes such steps"


def _would_be_wrong(found: Iterable[tuple[Row, Tensor]], state: States, names: Mapping[Tensor, str]) -> AlgorithmError:
    problems = [_misfit_problem(row, tensor, state, names[row[0]]) for row, tensor in found]
    return AlgorithmError("torch's fused kernels would walk out of these tensors; no step was taken", problems)


def _misfit_problem(row: Row, other: Tensor, state: States, name: str) -> Problem:
    leaf, gradient = row[:2]
    if other is leaf:
        required = "elements that fill a run of memory, each in a place of its own, as fused kernels go through it"
        return Problem(name, _described(leaf), required, _REMEDY)
    entry = next((key for key, value in state.get(leaf, {}).items() if value is other), "state")
    key = f"{name}.grad" if other is gradient else f"{name}.{entry}"
    return Problem(key, _described(other), f"{_described(leaf)}, as its parameter has", _REMEDY)


def _described(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} memory"
    return f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
