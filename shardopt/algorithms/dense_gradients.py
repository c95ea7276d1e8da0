"""Gradients as algorithms take them that step on the parameters themselves."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardopt.errors import GradientError, Problem
from shardopt.sharding.gradients import local_gradients
from shardopt.sharding.view import local_tensors


def dense_gradients(parameter: Tensor, name: str) -> list[Tensor] | None:
    """The gradient on this rank, as local tensors; None where there is none. Zero where only some shards have one.

    A rank without a shard of a ShardedTensor has None, and has to ask the others.

    Args:
        parameter: of any kind.
        name: its FQN, for errors.

    Raises:
        GradientError: the gradient does not fit the parameter, is sparse, or has another dtype.
    """
    return found_gradients(parameter, name, (torch.strided,))


def found_gradients(
    parameter: Tensor, name: str, layouts: tuple[torch.layout, ...], takes_dense: bool = True
) -> list[Tensor] | None:
    """As `dense_gradients`, of certain layouts. Where some shards only have one, it is zero on the others: without
    rows where those are sparse, or all have to be.
    """
    leaves = local_tensors(parameter)
    try:
        found = local_gradients(parameter)
    except GradientError as error:
        raise GradientError(error.message, [replace(each, key=f"{name}.grad") for each in error.problems]) from None
    if all(gradient is None for gradient in found):
        return None
    for gradient, leaf in zip(found, leaves, strict=True):
        if gradient is not None and (gradient.layout not in layouts or gradient.dtype != leaf.dtype):
            problem = Problem(
                key=f"{name}.grad",
                found=f"{gradient.layout}, {gradient.dtype}",
                required=f"{' or '.join(map(str, layouts))}, {leaf.dtype}",
                remedy="make it dense, or cast it, before the step",
            )
            raise GradientError("a gradient does not fit its parameter", [problem])
    sparse = not takes_dense or any(gradient is not None and gradient.is_sparse for gradient in found)
    both = zip(leaves, found, strict=True)
    return [no_gradient(leaf, sparse) if its is None else its for leaf, its in both]


def no_gradient(leaf: Tensor, sparse: bool) -> Tensor:
    """A gradient of zeros for a local tensor; one without rows, and so without memory, where it is to be sparse."""
    if not sparse:
        return torch.zeros_like(leaf)
    index = torch.empty((1, 0), dtype=torch.int64, device=leaf.device)
    values = leaf.new_empty((0, *leaf.shape[1:]))
    return torch.sparse_coo_tensor(index, values, leaf.shape, check_invariants=False, is_coalesced=True)
