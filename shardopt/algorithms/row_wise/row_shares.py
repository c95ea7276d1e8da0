"""Steps rows that are cut over several ranks: adds up their squares over these ranks, then moves the rows.

N rows on this rank, k of them touched on any rank. A rank's memory for sums is [N, 1, ...], one number for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.reductions import Term
from shardopt.algorithms.row_wise.row_gradients import RowGradient
from shardopt.algorithms.row_wise.row_kernels import Numbers
from shardopt.algorithms.row_wise.row_rules import (
    RowRule,
    chunks,
    moment_dtype,
    move_moments,
    prepared,
    square_sums,
    update_rows,
)
from shardopt.algorithms.shared_rows import SharedRows
from shardopt.sharding.reduced import ShardGroup, local_views, sum_memory
from shardopt.sharding.view import local_tensors, view_of


class RowShares(SharedRows):
    """The step of one parameter whose rows are cut over ranks.

    Args:
        parameter: of at least two dimensions.
        cuts: those through its rows.
    """

    def __init__(self, parameter: Tensor, cuts: tuple[ShardGroup, ...]) -> None:
        shape, dtype = view_of(parameter).shape, moment_dtype(view_of(parameter).dtype)
        super().__init__(parameter, cuts, dtype)
        self._dims = range(1, len(shape))
        self._width = max(prod(shape[1:]), 1)
        self._sums = sum_memory(parameter, self._dims, dtype)
        self._counts = sum_memory(parameter, self._dims, dtype)

    def summands(self, gradients: Sequence[RowGradient] | None, numbers: Numbers) -> Iterator[Term]:
        """Yields this rank's summands: whether it has a gradient, squares of rows, and which rows it touched."""
        if gradients is not None:
            self.flag += 1
            sums = local_views(self.parameter, self._dims, self._sums)
            counts = local_views(self.parameter, self._dims, self._counts)
            for local, gradient, into, count in zip(
                local_tensors(self.parameter), gradients, sums, counts, strict=True
            ):
                _add_squares(local, gradient, into, count, numbers)
        yield from ((memory, self.cuts) for memory in (self.flag, *self._sums, *self._counts))

    def apply(
        self,
        rule: RowRule,
        gradients: Sequence[RowGradient] | None,
        state: Mapping[str, Any],
        numbers: Numbers,
    ) -> None:
        """Updates state and parameter. Rows that only another rank touched are touched here with zeros.

        The moments are moved by themselves, since local tensors may share them.
        """
        moments = local_tensors(state[rule.moments])
        for memory, sums, count in zip(moments, self._sums, self._counts, strict=True):
            touched = _touched(count)
            moved = memory.index_select(0, touched)
            move_moments(moved, sums.index_select(0, touched).div_(self._width), numbers)
            memory.index_copy_(0, touched, moved)
        tensors = local_tensors(self.parameter)
        local_moments = local_views(self.parameter, self._dims, moments)
        counts = local_views(self.parameter, self._dims, self._counts)
        for number, (local, moment, count) in enumerate(zip(tensors, local_moments, counts, strict=True)):
            gradient = RowGradient.nothing(local) if gradients is None else gradients[number]
            touched = _touched(count)
            every = len(touched) == len(local)
            values = gradient.values if every and gradient.index is None else gradient.at(touched)
            others = {name: local_tensors(state[name])[number] for name in rule.others}
            here = {rule.moments: moment, **others}
            update_rows(rule, local, None if every else touched, values, here, numbers, moments_moved=True)


def _add_squares(local: Tensor, gradient: RowGradient, sums: Tensor, counts: Tensor, numbers: Numbers) -> None:
    """Adds the squares of this rank's elements of rows, and 1 for each row that has a gradient."""
    for at in chunks(gradient.values):
        squares = square_sums(prepared(gradient.values[at], local[at], numbers))
        if gradient.index is None:
            sums[at] += squares
            counts[at] += 1
        else:
            sums.index_add_(0, gradient.index[at], squares)
            counts.index_add_(0, gradient.index[at], torch.ones_like(squares))


def _touched(counts: Tensor) -> Tensor:
    """Returns the rows that any rank has a gradient for, ascending."""
    return counts.flatten().nonzero().flatten()
