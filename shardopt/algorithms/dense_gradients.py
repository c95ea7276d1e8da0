"""Gradients as algorithms take them that step on the parameters themselves."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardopt.errors import GradientError, Problem
from shardopt.sharding.view import gradient_leaves, leaves_of


def dense_gradients(parameter: Tensor, name: str) -> list[Tensor] | None:
    """The gradient on this rank, as local tensors; None where there is none. Zero where only some shards have one.

    A rank without a shard of a ShardedTensor has None, and has to ask the others.

    Args:
        parameter: of any kind.
        name: its FQN, for errors.

    Raises:
        GradientError: the gradient does not fit the parameter, is sparse, or has another dtype.
    """
    leaves = leaves_of(parameter)
    try:
        found = gradient_leaves(parameter)
    except GradientError as error:
        raise GradientError(error.message, [replace(each, key=f"{name}.grad") for each in error.problems]) from None
    if all(gradient is None for gradient in found):
        return None
    for gradient, leaf in zip(found, leaves, strict=True):
        if gradient is not None and (gradient.layout, gradient.dtype) != (torch.strided, leaf.dtype):
            problem = Problem(
                key=f"{name}.grad",
                found=f"{gradient.layout}, {gradient.dtype}",
                required=f"{torch.strided}, {leaf.dtype}",
                remedy="make it dense, or cast it, before the step",
            )
            raise GradientError("a gradient does not fit its parameter", [problem])
    return [
        torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)
    ]
