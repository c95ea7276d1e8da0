"""Products of a block with one matrix per dimension, and decompositions of these matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_outer(factor: Tensor, block: Tensor, dim: int, decay: float, weight: float) -> None:
    """Sets F ← decay F + weight B Bᵀ, where B is the block as a matrix whose rows are dimension `dim`.

    Args:
        factor: [m, m], changed in place.
        block: of m elements along `dim`.
        dim: of the block.
        decay, weight: of the old and the new.
    """
    unfolded = block.movedim(dim, 0).reshape(block.shape[dim], -1)
    factor.mul_(decay).add_(unfolded @ unfolded.T, alpha=weight)


def apply_factors(block: Tensor, factors: Sequence[Tensor | None], inverse: bool = False) -> Tensor:
    """Multiplies each dimension of a block by the transpose of its matrix, or by the matrix if `inverse`.

    Args:
        block: [m_0, m_1, …].
        factors: for each dimension [m, m], orthogonal or symmetric; None leaves the dimension as it is.

    Returns:
        A new tensor of the block's shape, contiguous.
    """
    result = block
    for factor in factors:  # each puts its dimension behind the others; after all of them the order is as before
        if factor is None:
            result = result.movedim(0, -1)
        else:
            result = torch.tensordot(result, factor, dims=([0], [1 if inverse else 0]))
    return result.clone(memory_format=torch.contiguous_format)


def descending_eigenvectors(factor: Tensor) -> Tensor:
    """Computes the eigenvectors of a symmetric matrix [m, m] as columns, by descending eigenvalue, in its dtype.

    They are computed in fp64, in which those of the small eigenvalues of a first gradient are told apart better. Of a
    matrix that is not finite in its whole they are NaN.
    """
    wide = factor.double()
    tiny = 1e-30 * torch.eye(factor.shape[0], dtype=wide.dtype, device=wide.device)
    _, vectors = _decompose(wide + tiny)
    descending: Tensor = vectors.flip(1).contiguous().to(factor.dtype)
    return descending


def inverse_root(factor: Tensor, root: int, eps: float) -> Tensor:
    """Computes (F + eps I)^(−1 / root) of a positive semidefinite matrix, in fp64 because small eigenvalues count most.

    Args:
        factor: [m, m]. Eigenvalues below zero, which are errors of rounding, are taken for zero.
        root: such as 4.
        eps: at least 0; where it is 0, a zero eigenvalue gives infinity.

    Returns:
        [m, m] in the dtype of `factor`; NaN where that is not finite in its whole.
    """
    values, vectors = _decompose(factor.double())
    powers = values.clamp_(min=0.0).add_(eps).pow_(-1.0 / root)
    root_of: Tensor = ((vectors * powers) @ vectors.T).to(factor.dtype)
    return root_of


def _decompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Computes eigenvalues [m] and eigenvectors [m, m] of a symmetric matrix; NaN if that fails.

    An error here would be its owner's alone, in the middle of a collective step, and the other ranks would wait for it.
    """
    finite = factor.isfinite().all()
    identity = torch.eye(factor.shape[0], dtype=factor.dtype, device=factor.device)
    try:
        values, vectors = torch.linalg.eigh(torch.where(finite, factor, identity))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # it did not converge; public, but not in `__all__`
        return torch.full_like(factor[0], torch.nan), torch.full_like(factor, torch.nan)
    lost = torch.where(finite, 1.0, torch.nan).to(factor.dtype)
    return values * lost, vectors * lost
