"""Which of an algorithm's implementations in torch takes a step: its for-loop, foreach or fused one.

Who names one (`foreach`, `fused`) gets it. Who names none gets, from `keyed`, the fastest that computes what the loop
computes: on the CPU the fused one where `AlgorithmSpec.fused_agrees` says that it does, else the for-loop; elsewhere
what torch takes by itself. Nothing of this choice is kept: the group's options stay as they were given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.registry import AlgorithmSpec, AtFirstStep
from shardopt.errors import GradientError, Problem
from shardopt.optim.leaves import GroupLeaves
from shardopt.optim.turn import Turn

Group = Mapping[str, Any]
States = Mapping[Tensor, Mapping[str, Any]]


def fused_now(spec: AlgorithmSpec, turn: Turn, state: States, chooses: bool) -> bool | None:
    """What a group's "fused" is to be in this step.

    Args:
        spec: of the algorithm.
        turn: of the group, in which "fused" is an option; its leaves have their gradients.
        state: of the inner optimizer.
        chooses: whether a group that names no implementation gets the fastest.
    """
    group, leaves = turn.group, turn.leaves
    fused: bool | None = group["fused"]
    if chooses and _prefers_fused(spec, group, leaves):
        fused = turn.repeats or not (spec.takes_sparse and _any_sparse(leaves.leaves))
    if fused and spec.settled_at_first_step and not turn.repeats:
        names = _names_from_gradients(spec, group)
        if leaves.settled != names:
            if _some_are_late(names, leaves.leaves, state):
                return False
            if _all_have(names, leaves.leaves, state):
                leaves.settled = names
    return fused


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


def _prefers_fused(spec: AlgorithmSpec, group: Group, leaves: GroupLeaves) -> bool:
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
        and all(device == "cpu" and dtype in spec.fused_agrees for device, dtype in leaves.kinds)
    )


def _any_sparse(leaves: Collection[Tensor]) -> bool:
    """Whether a leaf has a sparse gradient, of which fused implementations know nothing."""
    return any([grad is not None and grad.is_sparse for grad in [leaf.grad for leaf in leaves]])


def _names_from_gradients(spec: AlgorithmSpec, group: Group) -> tuple[str, ...]:
    """The state that a group's parameters have only from their first gradient on."""
    return tuple(entry.name for entry in spec.entries(group) if entry.initial is AtFirstStep.GRADIENT)


def _some_are_late(names: Collection[str], leaves: Collection[Tensor], state: States) -> bool:
    """Whether of the leaves with a gradient some have such state and some do not.

    torch's fused implementations make it for all of their parameters or for none, and fail otherwise.
    """
    stepped = [state.get(leaf, {}) for leaf in leaves if leaf.grad is not None]
    return any(len({entries.get(name) is None for entries in stepped}) > 1 for name in names)


def _all_have(names: Collection[str], leaves: Collection[Tensor], state: States) -> bool:
    """Whether every leaf has all of that state, so that none can be late any more."""
    return all(state.get(leaf, {}).get(name) is not None for leaf in leaves for name in names)
