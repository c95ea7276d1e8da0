"""The weights of an island, which its inner optimizer steps: measures them against the anchors, and sets them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.elementwise.schedule_free import ScheduleFree
from shardopt.algorithms.low_precision.optimizer import LowPrecisionOptimizer
from shardopt.algorithms.low_precision.options import MASTER, STEP
from shardopt.errors import AlgorithmError, LayoutError, Problem
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.runtime.torch_private import step_nested
from shardopt.sharding.gradients import set_gradients, zero_gradients
from shardopt.sharding.kinds import kind_of
from shardopt.sharding.view import assemble, local_tensors, view_of


def refuse_unfit(optimizer: KeyedOptimizer, role: str) -> None:
    """Raises for algorithms whose weights are not only the parameters, and for steps that nothing can precede.

    Raises:
        AlgorithmError: it is Schedule-Free, evaluates the model itself (L-BFGS), or updates in backward.
    """
    problems = []
    if any(isinstance(atom, ScheduleFree) for atom in optimizer._atoms()):
        required = "an algorithm whose weights are only the parameters"
        remedy = "take adamw or sgd with a schedule; z and the average of Schedule-Free would not be synchronized"
        problems.append(Problem(role, "a Schedule-Free algorithm", required, remedy))
    if optimizer.needs_closure:
        found, steps = "an algorithm that evaluates the model itself", "an algorithm that steps on gradients"
        problems.append(Problem(role, found, steps, "take adamw or sgd"))
    if optimizer.updates_in_backward:
        problem = Problem(
            key=role,
            found="an optimizer that updates parameters in backward",
            required="one that steps after backward, so that the first weights can be kept before",
            remedy="make it with shardopt.keyed",
        )
        problems.append(problem)
    if problems:
        raise AlgorithmError("islands cannot be synchronized with this algorithm", problems, code="semi-sync")


def anchor_of(name: str, param: Tensor) -> Tensor:
    """Makes the anchor of a parameter: its values, placed like it, in fp32 at least. Local.

    Raises:
        LayoutError: it is not of real floating-point numbers, of a kind from outside, or cannot be described.
    """
    dtype = view_of(param, name).dtype
    if not dtype.is_floating_point or kind_of(param) is not None:
        found = f"a {type(param).__name__} of {dtype}"
        required = "a plain tensor, DTensor or ShardedTensor of real floating-point numbers"
        remedy = "leave it out of the inner optimizer, and step it by another one"
        problem = Problem(name, found, required, remedy)
        raise LayoutError("a parameter cannot be synchronized", [problem], code="semi-sync")
    wide = torch.promote_types(dtype, torch.float32)
    return assemble(param, [local.detach().to(wide, copy=True) for local in local_tensors(param)])


class Weights:
    """The weights of one parameter on this rank: its local tensors, or those of its master.

    Args:
        inner: the optimizer that steps it.
        param: the parameter.
    """

    def __init__(self, inner: KeyedOptimizer, param: Tensor) -> None:
        self._params = local_tensors(param)
        masters = _masters(inner, param)
        self._weights = self._params if masters is None else masters

    def subtract_from(self, anchors: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Computes the outer gradient: the weights that the island was given, minus the current ones.

        What was given is the anchor in the weights' own dtype. So weights that no local step has changed have a
        gradient of zeros, although they cannot hold the anchor's every bit.
        """
        for anchor, weight, into in zip(anchors, self._weights, out, strict=True):
            into.copy_(anchor.to(weight.dtype)).sub_(weight)

    def copy_to(self, tensors: Sequence[Tensor]) -> None:
        """Copies the weights to tensors of their shapes."""
        for weight, into in zip(self._weights, tensors, strict=True):
            into.copy_(weight)

    def mix(self, anchors: Sequence[Tensor], alpha: float) -> None:
        """Sets the weights to alpha · weight + (1 - alpha) · anchor; with alpha 0 to exactly the anchor."""
        for anchor, weight, param in zip(anchors, self._weights, self._params, strict=True):
            weight.copy_(anchor if alpha == 0 else weight.to(anchor.dtype).lerp_(anchor, 1 - alpha))
            if param is not weight:
                param.copy_(weight)


def step_by(optimizer: KeyedOptimizer, tensors: Mapping[str, Tensor], gradients: Iterable[Tensor]) -> None:
    """Steps an optimizer by gradients that its tensors have only during this call.

    Args:
        tensors: name → tensor that it steps.
        gradients: of the local tensors of all of them, in that order.
    """
    rest = iter(gradients)
    for tensor in tensors.values():
        set_gradients(tensor, [next(rest) for _ in local_tensors(tensor)])
    try:
        step_nested(optimizer)
    finally:
        for tensor in tensors.values():
            zero_gradients(tensor, set_to_none=True)


def _masters(inner: KeyedOptimizer, param: Tensor) -> Sequence[Tensor] | None:
    """Returns the local masters that the next step uses; None if it uses the parameter itself."""
    if not any(isinstance(atom, LowPrecisionOptimizer) for atom in inner._atoms()):
        return None
    entries: Any = inner.state.get(param) or {}
    if MASTER not in entries or STEP not in entries or not entries[STEP] > 0:
        return None
    return local_tensors(entries[MASTER])
