"""Orthogonalises one whole matrix by a Newton-Schulz iteration, and scales its learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor


def orthogonalised(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Approximates the nearest semi-orthogonal matrix: singular values near 1 (with torch's coefficients 0.7 to 1.2).

    A quintic Newton-Schulz iteration (Jordan et al. 2024): X ← a X + (b A + c A²) X with A = X Xᵀ.

    Args:
        matrix: [M, N] in the dtype to compute in; overwritten.
        coefficients: (a, b, c).
        steps: of the iteration.
        eps: the least norm to divide by.

    Returns:
        [M, N], in the dtype of `matrix`.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=eps))  # no singular value is larger than the Frobenius norm
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjustment(how: str | None, rows: int, columns: int) -> float:
    """Returns the factor by which the learning rate of a matrix of this shape is scaled."""
    if how == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    if how == "spectral_unclamped":
        return sqrt(rows / columns)
    return sqrt(max(1, rows / columns))
