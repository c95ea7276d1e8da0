"""Gradients by rows: sparse ones of embeddings, and dense ones, which contain every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt.errors import GradientError, Problem

_MARK = "_shardopt_rows_are_alike"


@dataclass(frozen=True, slots=True)
class RowGradient:
    """The gradient of a local tensor [N, ...], by rows.

    Args:
        index: [k], int64, ascending; None where there is one for each row, in order.
        values: [k, ...], of the rows at `index`; zero in all others.
        are_alike: whether all ranks that share these rows are known to have a gradient of the same ones.
    """

    index: Tensor | None
    values: Tensor
    are_alike: bool = False

    @staticmethod
    def nothing(local: Tensor) -> RowGradient:
        """Makes a gradient without any rows."""
        index = torch.empty(0, dtype=torch.int64, device=local.device)
        return RowGradient(index, local.new_empty((0, *local.shape[1:])))

    def at(self, index: Tensor) -> Tensor:
        """Returns the gradient of the rows at `index`, ascending, which include its own; zeros for the others."""
        if self.index is None:
            return self.values.index_select(0, index)
        if len(self.index) == len(index):
            return self.values
        wider = self.values.new_zeros((len(index), *self.values.shape[1:]))
        return wider.index_copy_(0, torch.searchsorted(index, self.index), self.values)


def mark_alike(gradient: Tensor) -> None:
    """Notes that all ranks that share rows have a gradient of the same ones, so that a step need not ask first.

    Args:
        gradient: sparse and coalesced, with the marked rows on each of these ranks, in the same step.
    """
    setattr(gradient, _MARK, True)


def by_rows(gradient: Tensor) -> RowGradient:
    """Converts a strided or sparse gradient, [N, ...], to rows, without a copy of its dense size."""
    if not gradient.is_sparse:
        return RowGradient(None, gradient)
    are_alike = getattr(gradient, _MARK, False)
    gradient = gradient.coalesce()
    indices, values = gradient.indices(), gradient.values()
    if gradient.sparse_dim() == 1:
        return RowGradient(indices[0], values, are_alike)
    # Single elements, or pieces of rows: assembled to rows.
    index, place = torch.unique(indices[0], return_inverse=True)
    rows = values.new_zeros((len(index), *gradient.shape[1:]))
    rows[(place, *indices[1:])] = values
    return RowGradient(index, rows)


def refuse_decay_of_sparse(gradients: list[RowGradient], weight_decay: float, name: str) -> None:
    """Raises if weight decay would change rows that a sparse gradient lacks.

    Raises:
        GradientError: a gradient is sparse, and the weight decay is not 0.
    """
    if weight_decay == 0 or all(gradient.index is None for gradient in gradients):
        return
    problem = Problem(
        key=f"{name}.grad",
        found=f"a sparse gradient in a group with weight_decay={weight_decay}",
        required="a dense one, as the decay changes every row",
        remedy="set weight_decay to 0 for this parameter",
    )
    raise GradientError("weight decay does not go with sparse gradients", [problem], code="sparse-gradient")
