"""Steps rows that are cut over several ranks: adds up their squares over these ranks, then moves the rows.

N rows on this rank, k of them touched on any rank. In a first exchange the ranks find out whether they have gradients
of the same rows, as lookups in tables that are cut by columns give them. Then k numbers are added up; otherwise N, and
who touched which of them. Where a lookup's own backward takes the step, all know that beforehand, and exchange once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.algorithms.reductions import Term, equated_replicas
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
from shardopt.runtime.rows import write_rows
from shardopt.sharding.reduced import ShardGroup, local_views, sum_memory
from shardopt.sharding.view import local_tensors, view_of

_PARTS = 16  # of a digest of rows, of 4 bits each
_MOST_RANKS = 65_536  # whose sums of squares of such numbers are exact in fp32


class RowShares(SharedRows):
    """The step of one parameter whose rows are cut over ranks.

    Args:
        parameter: of at least two dimensions.
        cuts: those through its rows.
    """

    def __init__(self, parameter: Tensor, cuts: tuple[ShardGroup, ...]) -> None:
        shape, dtype = view_of(parameter).shape, moment_dtype(view_of(parameter).dtype)
        super().__init__(parameter, cuts, dtype)
        self._dims, self._dtype = range(1, len(shape)), dtype
        # Replicas have to agree on how many rows they add up where the first one's sums go to all.
        self._ranks = prod(group.size() for group in (*(cut.group for cut in cuts), *equated_replicas(cuts)))
        self._width = max(prod(shape[1:]), 1)
        self._alike: Tensor | None = None
        self._sums: tuple[Tensor, ...] = ()
        self._counts: tuple[Tensor, ...] = ()

    def are_known_alike(self, gradients: Sequence[RowGradient] | None) -> bool:
        """Whether all ranks that share the rows know that they have gradients of the same ones."""
        return gradients is not None and len(gradients) == 1 and gradients[0].are_alike

    def only_summands(self, gradients: Sequence[RowGradient], numbers: Numbers) -> Iterator[Term]:
        """Yields what the others do together, for rows that are known to be the same on all ranks."""
        self.flag += 1
        yield self.flag, self.cuts
        yield from self._squares_of(gradients, numbers)

    def first_summands(self, gradients: Sequence[RowGradient] | None) -> Iterator[Term]:
        """Yields whether this rank has a gradient, and of which rows."""
        self._alike = torch.zeros(1 + 2 * _PARTS, dtype=self._dtype, device=self.flag.device)
        if gradients is not None:
            self.flag += 1
            if isinstance(self.parameter, DTensor) and len(gradients) == 1:
                self._alike.copy_(_described(gradients[0]))
        yield from ((memory, self.cuts) for memory in (self.flag, self._alike))

    def asked(self) -> tuple[Tensor, ...]:
        """Returns `flag`, and whether all ranks have described the same rows, unless they knew it beforehand."""
        return super().asked() if self._alike is None else (*super().asked(), self._alike)

    def summands(self, gradients: Sequence[RowGradient] | None, numbers: Numbers) -> Iterator[Term]:
        """Yields this rank's squares of rows, and which rows it touched where that is not the same on all ranks."""
        if gradients is not None and _are_alike(self.on_host[1:], self._ranks):
            yield from self._squares_of(gradients, numbers)
            return
        self._sums, self._counts = (sum_memory(self.parameter, self._dims, self._dtype) for _ in range(2))
        if gradients is not None:
            sums = local_views(self.parameter, self._dims, self._sums)
            counts = local_views(self.parameter, self._dims, self._counts)
            for local, gradient, into, count in zip(
                local_tensors(self.parameter), gradients, sums, counts, strict=True
            ):
                _add_squares(local, gradient, into, count, numbers)
        yield from ((memory, self.cuts) for memory in (*self._sums, *self._counts))

    def _squares_of(self, gradients: Sequence[RowGradient], numbers: Numbers) -> Iterator[Term]:
        """Yields this rank's squares of the rows that all ranks have a gradient of."""
        (local,), (gradient,) = local_tensors(self.parameter), gradients
        # A rank that refuses its gradient sends as much, so that the others learn of it.
        self._sums = (_zeros(local, gradient) if self.refuses else _squares(local, gradient, numbers),)
        yield self._sums[0], self.cuts

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
        moments, tensors = local_tensors(state[rule.moments]), local_tensors(self.parameter)
        if not self._counts:
            assert gradients is not None  # or the ranks would not have the same rows
            (gradient,) = gradients
            _move(moments[0], gradient.index, self._sums[0].div_(self._width), numbers)
            others = {name: local_tensors(state[name])[0] for name in rule.others}
            here = {rule.moments: moments[0], **others}
            update_rows(rule, tensors[0], gradient.index, gradient.values, here, numbers, moments_moved=True)
            return
        for memory, sums, count in zip(moments, self._sums, self._counts, strict=True):
            touched = _touched(count)
            _move(memory, touched, sums.index_select(0, touched).div_(self._width), numbers)
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


def _described(gradient: RowGradient) -> Tensor:
    """Returns 1, and parts of a digest of the rows that have a gradient, and their squares: [1 + 2 × parts], fp32.

    Added up over the ranks they say whether all are equal, to all ranks alike: numbers are equal where the sum of their
    squares times their count is the square of their sum. Of 4 bits each that is exact on up to 65,536 ranks.
    """
    if gradient.index is None:
        digest = gradient.values.new_full((), -1, dtype=torch.int64)
    else:
        places = torch.arange(1, len(gradient.index) + 1, device=gradient.index.device)
        mixed = (gradient.index + places * 0x9E3779B97F4A7C1) * 0x5851F42D4C957F2D
        mixed ^= mixed >> 31
        digest = (mixed * 0x14057B7EF767814F).sum()
    parts = (digest >> torch.arange(0, 4 * _PARTS, 4, device=digest.device) & 0xF).float()
    return torch.cat([parts.new_ones(1), parts, parts.square()])


def _are_alike(sums: Sequence[float], ranks: int) -> bool:
    """Whether so many ranks have described the same rows. The same on all of them."""
    have, *parts = sums
    own, squares = parts[:_PARTS], parts[_PARTS:]
    return have == ranks <= _MOST_RANKS and all(ranks * two == one * one for one, two in zip(own, squares, strict=True))


def _move(moments: Tensor, index: Tensor | None, squares: Tensor, numbers: Numbers) -> None:
    """Moves the moments of some rows, in place; of all rows without an index."""
    if index is None:
        move_moments(moments, squares, numbers)
        return
    moved = moments.index_select(0, index)
    move_moments(moved, squares, numbers)
    write_rows(moments, index, moved)


def _squares(local: Tensor, gradient: RowGradient, numbers: Numbers) -> Tensor:
    """Returns the sum of squares of this rank's elements of each row that has a gradient, [k, 1, ...]."""
    found = [square_sums(prepared(gradient.values[at], local[at], numbers)) for at in chunks(gradient.values)]
    return torch.cat(found) if found else _zeros(local, gradient)


def _zeros(local: Tensor, gradient: RowGradient) -> Tensor:
    """Returns zeros in the place of squares, [k, 1, ...]."""
    shape = (len(gradient.values), *[1] * (local.ndim - 1))
    return gradient.values.new_zeros(shape, dtype=moment_dtype(local.dtype))


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
