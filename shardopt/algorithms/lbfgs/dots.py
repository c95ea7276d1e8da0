"""Computes inner products and linear combinations of vectors in local tensors, in fp64, some columns at a time.

k vectors in a row block [k, n] are rows; blocks of several parameters together make up whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_RUN = 1 << 20  # elements that are widened to fp64 at a time


def as_rows(tensor: Tensor, rows: int = 1) -> Tensor:
    """Views a tensor as rows of real numbers [rows, n], without a copy if it is contiguous.

    Args:
        tensor: [rows, ...], or of any shape for one row. A complex number becomes two.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(rows, -1)


def products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Returns the inner products of all rows of `left` with all rows of `right`.

    Args:
        left, right: blocks [k_i, n] of floating dtypes; k and l rows in all.

    Returns:
        [k, l] in fp64, on their device.
    """
    shape = sum(len(block) for block in left), sum(len(block) for block in right)
    total = torch.zeros(shape, dtype=torch.float64, device=left[0].device)
    for run in _runs(left[0].shape[1], sum(shape)):
        total.addmm_(_wide(left, run), _wide(right, run).T)
    return total


def combine(coefficients: Tensor, rows: Sequence[Tensor], into: Tensor) -> None:
    """Sets a vector to Σ c_i row_i.

    Args:
        coefficients: [k] in fp64, on the rows' device.
        rows: blocks [k_i, n] with k rows in all.
        into: [n], of any floating dtype; it may be one of the rows.
    """
    for run in _runs(into.shape[0], len(coefficients)):
        into[run] = (coefficients @ _wide(rows, run)).to(into.dtype)


def _runs(columns: int, rows: int) -> Iterator[slice]:
    length = max(_RUN // max(rows, 1), 1)
    for start in range(0, columns, length):
        yield slice(start, min(start + length, columns))


def _wide(blocks: Sequence[Tensor], run: slice) -> Tensor:
    return torch.cat([block[:, run].double() for block in blocks])
