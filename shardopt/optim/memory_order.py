"""Whether tensors that one kernel walks through together lie in memory alike.

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

_NBYTES = attrgetter("nbytes")


def lie_in_order(columns: Columns) -> bool:
    """Whether in every row all tensors have one shape, and lie in C order without gaps: as they mostly do."""
    sizes = [list(map(Tensor.size, column)) for column in columns]
    return all(each == sizes[0] for each in sizes) and _are_contiguous(chain.from_iterable(columns))


def misfits(columns: Columns) -> list[tuple[Row, Tensor]]:
    """The rows whose tensors are not all runs of the same elements in the same order, each with the first that is not.

    Where they are, in whatever order of dimensions, a kernel may walk through them together.
    """
    found = ((row, _misfit(row)) for row in zip(*columns, strict=True))
    return [(row, tensor) for row, tensor in found if tensor is not None]


class InOrder:
    """What was seen to `lie_in_order` in one step, so that the next one has less to ask.

    Parameters and gradients are asked again: gradients are others, and a parameter may get other memory while it stays
    the same tensor (`.data`, `set_`). Of state it is enough that nobody has replaced it.

    Args:
        columns: parameters, gradients (which are not kept), and what else is to be known again.
    """

    def __init__(self, columns: Columns) -> None:
        parameters, _, *others = columns
        self._kept = [list(parameters), *map(list, others)]
        self._nbytes = list(map(_NBYTES, parameters))

    def still(self, columns: Columns) -> bool:
        """Whether these are the same tensors, but for the gradients, and still lie so."""
        parameters, gradients, *others = columns
        now = [parameters, *others]
        return (
            len(now) == len(self._kept)
            and all(len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(self._kept, now, strict=True))
            and list(map(_NBYTES, parameters)) == self._nbytes
            and _are_contiguous(parameters)
            and _are_contiguous(gradients)
        )


def _misfit(row: Row) -> Tensor | None:
    first = row[0]
    for tensor in row:
        if tensor.layout is not torch.strided or tensor.shape != first.shape:
            return tensor
        if first.numel() and (_strides(tensor) != _strides(first) or not _is_run(tensor)):
            return tensor
    return None


def _are_contiguous(tensors: Iterable[Tensor]) -> bool:
    """Sparse tensors are not."""
    return all(map(Tensor.is_contiguous, tensors))


def _strides(tensor: Tensor) -> list[int]:
    """Without those of dimensions of size 1, which say nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _is_run(tensor: Tensor) -> bool:
    """Whether the elements lie without gaps in memory, and each in a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
