"""Update rules with one moment per table row, as functions of rows; they know no parameter, rank or optimizer.

A table is [N rows, ...]. Some of these are touched: k rows with gradients G of the same shape, θ their values, and one
number for each row, [k, 1, ...]. Where a row is shared out by columns, a rank has the columns it holds, and a (which
needs all of them) is handed in.

    a = mean of G² over the row
    Adagrad:  S ← S + a                     θ ← θ − lr / (1 + (t − 1) lr_decay) · G / (√S + ε)
    Adam:     V ← β₂ V + (1 − β₂) a         M ← β₁ M + (1 − β₁) G
                                            θ ← θ − lr / (1 − β₁ᵗ) · M / (√(V / (1 − β₂ᵗ)) + ε)

Sources: Duchi, Hazan, Singer, Adaptive Subgradient Methods (2011), and Kingma, Ba, Adam (2015), with the mean over a
row in the place of the square of an element, as in Mudigere et al., Software-Hardware Co-design for Fast and Scalable
Training of Deep Learning Recommendation Models (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardopt.algorithms.registry import Options
from shardopt.algorithms.row_wise import row_kernels
from shardopt.algorithms.row_wise.row_kernels import Numbers
from shardopt.runtime.rows import write_rows

State = Mapping[str, Tensor]

CHUNK_ELEMENTS = 1 << 19
"""The number of table elements updated at once (one row at least), which bounds temporary memory."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """An update rule for rows.

    Args:
        moments: the name of the state that has one number for each row.
        numbers: (options, the number of the step from 1 on) → the numbers of the step.
        others: the names of state that is like the table; one at most.
    """

    moments: str
    numbers: Callable[[Options, float], Numbers]
    others: tuple[str, ...] = ()


def adagrad_numbers(options: Options, step: float) -> Numbers:
    """Returns the numbers of a step: the rate is lr / (1 + (t − 1) lr_decay)."""
    return Numbers(float(options["lr"]) / (1 + (step - 1) * float(options["lr_decay"])), *_common_numbers(options))


def adam_numbers(options: Options, step: float) -> Numbers:
    """Returns the numbers of a step: the rate is lr / (1 − β₁ᵗ)."""
    beta1, beta2 = map(float, options["betas"])
    rate, correction = float(options["lr"]) / (1 - beta1**step), 1 - beta2**step
    return Numbers(rate, *_common_numbers(options), betas=(beta1, beta2), correction=correction)


def _common_numbers(options: Options) -> tuple[float, float, float]:
    """Returns ε, weight decay, and the sign of the gradient."""
    return float(options["eps"]), float(options["weight_decay"]), -1.0 if options["maximize"] else 1.0


ADAGRAD = RowRule("sum", adagrad_numbers)
ADAM = RowRule("exp_avg_sq", adam_numbers, others=("exp_avg",))


def move_moments(moments: Tensor, squares: Tensor, numbers: Numbers) -> None:
    """Updates S ← S + a, or V ← β₂ V + (1 − β₂) a, for some rows, in place."""
    if numbers.betas is None:
        moments.add_(squares)
    else:
        moments.mul_(numbers.betas[1]).add_(squares, alpha=1 - numbers.betas[1])


def _move_rows(rows: Tensor, gradients: Tensor, moments: Tensor, averages: Tensor | None, numbers: Numbers) -> None:
    """Updates θ ← θ − rate · G / (√S + ε), or M ← β₁ M + (1 − β₁) G, then θ ← θ − rate · M / (√(V / (1 − β₂ᵗ)) + ε)."""
    root = moments if averages is None else moments.div(numbers.correction)
    root = root.sqrt().add_(numbers.eps)
    if averages is not None and numbers.betas is not None:
        gradients = averages.mul_(numbers.betas[0]).add_(gradients, alpha=1 - numbers.betas[0])
    rows.add_(gradients / root, alpha=-numbers.rate)


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a table's moments, and of computation on its rows: fp64 for an fp64 table, else fp32."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def update_rows(
    rule: RowRule,
    table: Tensor,
    index: Tensor | None,
    gradients: Tensor,
    state: State,
    numbers: Numbers,
    moments_moved: bool = False,
) -> None:
    """Moves rows of a table, and their state, by their gradients. Local; not recorded by autograd.

    Nothing of the size of the table is made; with an index, no other row is read or written. On a GPU with Triton one
    kernel does it, which rounds in another order.

    Args:
        rule: ADAGRAD or ADAM.
        table: [N, ...], of any floating dtype; changed.
        index: [k], int64, each row at most once; None for all rows, in order.
        gradients: [k, ...], of the rows at `index`; not changed.
        state: the rule's `moments`, [N, 1, ...], in `moment_dtype`, and its `others`, like the table; changed.
        numbers: of this step.
        moments_moved: whether the moments have been moved already, and are only to be read.
    """
    moments, averages = state[rule.moments], next((state[name] for name in rule.others), None)
    like_table = (table, gradients) if averages is None else (table, gradients, averages)
    if not moments_moved and row_kernels.fits(*like_table, moments):
        row_kernels.update(table, index, gradients, moments, averages, numbers)
        return
    for at in chunks(gradients):
        rows, moments_here = _gather(table, index, at), _gather(moments, index, at)
        descent = prepared(gradients[at], rows, numbers)
        if not moments_moved:
            move_moments(moments_here, mean_squares(descent), numbers)
            _scatter(moments, index, at, moments_here)
        averages_here = None if averages is None else _gather(averages, index, at)
        _move_rows(rows, descent, moments_here, averages_here, numbers)
        if averages is not None and averages_here is not None:
            _scatter(averages, index, at, averages_here)
        _scatter(table, index, at, rows)


def chunks(gradients: Tensor) -> list[slice]:
    """Splits rows into runs that are processed at once."""
    count = len(gradients)
    length = max(CHUNK_ELEMENTS * count // max(gradients.numel(), 1), 1)
    return [slice(start, start + length) for start in range(0, count if gradients.numel() else 0, length)]


def prepared(gradients: Tensor, rows: Tensor, numbers: Numbers) -> Tensor:
    """Converts gradients to descent directions with weight decay, in the dtype of computation; copies only if it must.

    Args:
        gradients: of some rows.
        rows: these rows; looked at only where there is weight decay.
        numbers: of this step.
    """
    given = gradients.to(moment_dtype(gradients.dtype))
    given = -given if numbers.sign < 0 else given
    return given.add(rows, alpha=numbers.decay) if numbers.decay != 0 else given


def square_sums(gradients: Tensor) -> Tensor:
    """Returns the sum of G² over each row, [k, 1, ...]."""
    squares = gradients.square()
    return squares.sum(tuple(range(1, squares.ndim)), keepdim=True) if squares.ndim > 1 else squares


def mean_squares(gradients: Tensor) -> Tensor:
    """Returns the mean of G² over each row, [k, 1, ...]."""
    return square_sums(gradients).div_(max(prod(gradients.shape[1:]), 1))


def _gather(tensor: Tensor, index: Tensor | None, at: slice) -> Tensor:
    """Returns some rows in the dtype of computation: their own memory, or a copy to be scattered back."""
    rows = tensor[at] if index is None else tensor.index_select(0, index[at])
    return rows.to(moment_dtype(tensor.dtype))


def _scatter(tensor: Tensor, index: Tensor | None, at: slice, rows: Tensor) -> None:
    """Writes back the rows from `_gather`."""
    if index is not None:
        write_rows(tensor, index[at], rows.to(tensor.dtype))
    elif rows.dtype != tensor.dtype:
        tensor[at] = rows
