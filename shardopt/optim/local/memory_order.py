"""Checks that tensors that one kernel walks through together have the same order in memory.

torch's fused kernels for the CPU take the memory of a parameter, its gradient and its state for runs of the same
elements in the same order, and never ask for strides: a column of a wider matrix is overwritten with its neighbours, a
transposed gradient taken for another one, an expanded one read past its end.

N rows, each of tensors that are walked through together; columns are lists of N tensors: parameters, gradients, and
the kinds of state that lie like them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import Tensor

Row = Sequence[Tensor]
Columns = Sequence[Sequence[Tensor]]

_DTYPE, _NBYTES = attrgetter("dtype"), attrgetter("nbytes")


def are_contiguous(tensors: Iterable[Tensor]) -> bool:
    """Whether all tensors are contiguous in C order. Sparse ones are not."""
    return all(map(Tensor.is_contiguous, tensors))


def lie_in_order(columns: Columns) -> bool:
    """Whether, in every row, all tensors have one shape and are contiguous in C order, as they mostly are."""
    sizes = [list(map(Tensor.size, column)) for column in columns]
    return all(each == sizes[0] for each in sizes) and are_contiguous(chain.from_iterable(columns))


def misfits(rows: Iterable[Row]) -> list[tuple[Row, Tensor]]:
    """Returns the rows with tensors in different memory orders, each with the first tensor that differs.

    Where they are, in whatever order of dimensions, a kernel may walk through them together.
    """
    candidates = ((row, _misfit(row)) for row in rows)
    return [(row, tensor) for row, tensor in candidates if tensor is not None]


class InOrder:
    """The columns for which `lie_in_order` held in one step, so that the next step checks less.

    Parameters and gradients are checked again: gradients are others, and a parameter may get other memory while it
    stays the same tensor (`.data`, `set_`). Of state it is enough that nobody has replaced it, and that there is none
    of a kind that there was none of: SGD makes its buffers in the first step, after they would have been seen.

    Args:
        lists: parameters, gradients (which are not kept), and lists of their state, some of it like them.
        columns: those of these that were seen to lie in order.
    """

    def __init__(self, lists: Columns, columns: Columns) -> None:
        seen = set(map(id, columns))
        self._state = [(place, list(each)) for place, each in enumerate(lists) if place > 1 and id(each) in seen]
        self._without = [place for place, each in enumerate(lists) if place > 1 and _has_none(each)]
        self._nbytes = list(map(_NBYTES, lists[0]))
        self._dtypes = list(map(_DTYPE, lists[1]))

    def still(self, lists: Columns) -> bool:
        """Whether the tensors of this step are still in order; only their state must be the same."""
        return (
            list(map(_NBYTES, lists[0])) == self._nbytes
            and list(map(_DTYPE, lists[1])) == self._dtypes
            and all(_has_none(lists[place]) for place in self._without)
            and all(len(lists[place]) == len(kept) and all(map(is_, lists[place], kept)) for place, kept in self._state)
            and are_contiguous(chain(lists[0], lists[1]))
        )


def _has_none(column: Sequence[Tensor | None]) -> bool:
    """Whether a list of one kind of state has none: torch leaves it empty, or None where the step makes it."""
    return not column or column[0] is None


def _misfit(row: Row) -> Tensor | None:
    first = row[0]
    for tensor in row:
        if tensor.layout is not torch.strided or tensor.shape != first.shape:
            return tensor
        if first.numel() and (_strides(tensor) != _strides(first) or not _is_run(tensor)):
            return tensor
    return None


def _strides(tensor: Tensor) -> list[int]:
    """Returns the strides without those of dimensions of size 1, which have no meaning."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _is_run(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
