"""Gradients for algorithms that step on the parameters themselves: dense, complete and checked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardopt.errors import GradientError, Problem
from shardopt.sharding.gradients import local_gradients
from shardopt.sharding.view import local_tensors


def dense_gradients(parameter: Tensor, name: str) -> list[Tensor] | None:
    """Returns this rank's gradient as local tensors; None if there is none.

    Where only some shards have one, it is zero on the others. A rank without a shard of a ShardedTensor has None, and
    has to ask the others.

    Args:
        parameter: of any kind.
        name: its FQN, for errors.

    Raises:
        GradientError: the gradient does not fit the parameter, is sparse, or has another dtype.
    """
    return checked_gradients(parameter, name, (torch.strided,))


def checked_gradients(
    parameter: Tensor, name: str, layouts: tuple[torch.layout, ...], takes_dense: bool = True
) -> list[Tensor] | None:
    """Returns this rank's gradient as local tensors, like `dense_gradients`, in one of the given layouts.

    Where only some shards have one, it is zero on the others: without rows where those are sparse, or all have to be.

    Args:
        parameter: of any kind.
        name: its FQN, for errors.
        layouts: that a gradient may have.
        takes_dense: whether the algorithm steps with dense gradients.

    Raises:
        GradientError: the gradient does not fit the parameter, or has another layout or dtype.
    """
    tensors = local_tensors(parameter)
    try:
        gradients = local_gradients(parameter)
    except GradientError as error:
        raise GradientError(
            error.message, [replace(each, key=f"{name}.grad") for each in error.problems], code=error.code
        ) from None
    if all(gradient is None for gradient in gradients):
        return None
    for gradient, local in zip(gradients, tensors, strict=True):
        if gradient is not None and (gradient.layout not in layouts or gradient.dtype != local.dtype):
            problem = Problem(
                key=f"{name}.grad",
                found=f"{gradient.layout}, {gradient.dtype}",
                required=f"{' or '.join(map(str, layouts))}, {local.dtype}",
                remedy="make it dense, or cast it, before the step",
            )
            raise GradientError("a gradient does not fit its parameter", [problem])
    sparse = not takes_dense or any(gradient is not None and gradient.is_sparse for gradient in gradients)
    pairs = zip(tensors, gradients, strict=True)
    return [no_gradient(local, sparse) if gradient is None else gradient for local, gradient in pairs]


def no_gradient(local: Tensor, sparse: bool) -> Tensor:
    """Makes a zero gradient for a local tensor; if `sparse`, one without rows, which needs no memory."""
    if not sparse:
        return torch.zeros_like(local)
    index = torch.empty((1, 0), dtype=torch.int64, device=local.device)
    values = local.new_empty((0, *local.shape[1:]))
    return torch.sparse_coo_tensor(index, values, local.shape, check_invariants=False, is_coalesced=True)
