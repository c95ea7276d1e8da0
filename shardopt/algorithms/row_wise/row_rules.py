"""Update rules with one moment for each row of a table, as functions of rows; no parameter, rank or optimizer is known.

A table is [N rows, ...], of which some are touched: k rows with gradients G of the same shape, θ their values, and one
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

State = Mapping[str, Tensor]

CHUNK_ELEMENTS = 1 << 19
"""The number of elements of a table that are worked on at once (one row at least), which bounds temporary memory."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """An update rule, as two functions that change their first argument in place.

    Args:
        moments: the name of the state that has one number for each row.
        move_moments: (moments, mean squares, options), both [k, 1, ...].
        move_rows: (rows, gradients, moments, other state of these rows, options, the number of the step from 1 on).
            Changes the other state as well. All in one dtype.
        numbers: (options, the number of the step) → the numbers for the GPU kernel.
        others: the names of state that is like the table; one at most.
    """

    moments: str
    move_moments: Callable[[Tensor, Tensor, Options], None]
    move_rows: Callable[[Tensor, Tensor, Tensor, State, Options, float], None]
    numbers: Callable[[Options, float], Numbers]
    others: tuple[str, ...] = ()


def adagrad_moments(moments: Tensor, squares: Tensor, options: Options) -> None:
    """S ← S + a."""
    moments.add_(squares)


def adagrad_rows(
    rows: Tensor, gradients: Tensor, moments: Tensor, others: State, options: Options, step: float
) -> None:
    """θ ← θ − lr / (1 + (t − 1) lr_decay) · G / (√S + ε)."""
    rows.add_(gradients / moments.sqrt().add_(options["eps"]), alpha=-adagrad_rate(options, step))


def adagrad_rate(options: Options, step: float) -> float:
    """lr / (1 + (t − 1) lr_decay)."""
    return float(options["lr"]) / (1 + (step - 1) * float(options["lr_decay"]))


def adam_moments(moments: Tensor, squares: Tensor, options: Options) -> None:
    """V ← β₂ V + (1 − β₂) a."""
    beta2 = float(options["betas"][1])
    moments.mul_(beta2).add_(squares, alpha=1 - beta2)


def adam_rows(rows: Tensor, gradients: Tensor, moments: Tensor, others: State, options: Options, step: float) -> None:
    """M ← β₁ M + (1 − β₁) G, then θ ← θ − lr / (1 − β₁ᵗ) · M / (√(V / (1 − β₂ᵗ)) + ε)."""
    beta1 = float(options["betas"][0])
    rate, correction = adam_rates(options, step)
    averages = others["exp_avg"].mul_(beta1).add_(gradients, alpha=1 - beta1)
    rows.add_(averages / moments.div(correction).sqrt_().add_(options["eps"]), alpha=-rate)


def adam_rates(options: Options, step: float) -> tuple[float, float]:
    """lr / (1 − β₁ᵗ), and 1 − β₂ᵗ."""
    beta1, beta2 = map(float, options["betas"])
    return float(options["lr"]) / (1 - beta1**step), 1 - beta2**step


def adagrad_numbers(options: Options, step: float) -> Numbers:
    """Returns the numbers of a step for the kernel."""
    return Numbers(adagrad_rate(options, step), *_common_numbers(options))


def adam_numbers(options: Options, step: float) -> Numbers:
    """Returns the numbers of a step for the kernel."""
    rate, correction = adam_rates(options, step)
    beta1, beta2 = map(float, options["betas"])
    return Numbers(rate, *_common_numbers(options), betas=(beta1, beta2), correction=correction)


def _common_numbers(options: Options) -> tuple[float, float, float]:
    """ε, weight decay, and the sign of the gradient."""
    return float(options["eps"]), float(options["weight_decay"]), -1.0 if options["maximize"] else 1.0


ADAGRAD = RowRule("sum", adagrad_moments, adagrad_rows, adagrad_numbers)
ADAM = RowRule("exp_avg_sq", adam_moments, adam_rows, adam_numbers, others=("exp_avg",))


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the moments of a table, and of computation on its rows: fp32, or fp64 of an fp64 table."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def update_rows(
    rule: RowRule,
    table: Tensor,
    index: Tensor | None,
    gradients: Tensor,
    state: State,
    options: Options,
    step: float,
    moments_moved: bool = False,
) -> None:
    """Moves rows of a table, and the state of these rows, by their gradients. Local, and not recorded by autograd.

    Nothing of the size of the table is made; with an index, no other row is read or written. On a GPU with Triton one
    kernel does it, which rounds in another order.

    Args:
        rule: ADAGRAD or ADAM.
        table: [N, ...], of any floating dtype; changed.
        index: [k], int64, each row at most once; None for all rows, in order.
        gradients: [k, ...], of the rows at `index`; not changed.
        state: the rule's `moments`, [N, 1, ...], in `moment_dtype`, and its `others`, like the table; changed.
        options: of the optimizer's group.
        step: the number of this step, from 1 on.
        moments_moved: whether the moments have been moved already, and are only to be read.
    """
    others = [state[name] for name in rule.others]
    if not moments_moved and row_kernels.fits(table, gradients, state[rule.moments], *others):
        average = next(iter(others), None)
        row_kernels.update(table, index, gradients, state[rule.moments], average, rule.numbers(options, step))
        return
    for at in chunks(gradients):
        rows = _gather(table, index, at)
        prepared_gradients = prepared(gradients[at], rows, options)
        moments = _gather(state[rule.moments], index, at)
        if not moments_moved:
            rule.move_moments(moments, mean_squares(prepared_gradients), options)
            _scatter(state[rule.moments], index, at, moments)
        others_here = {name: _gather(state[name], index, at) for name in rule.others}
        rule.move_rows(rows, prepared_gradients, moments, others_here, options, step)
        for name, value in others_here.items():
            _scatter(state[name], index, at, value)
        _scatter(table, index, at, rows)


def chunks(gradients: Tensor) -> list[slice]:
    """Splits rows into runs that are worked on at once."""
    count = len(gradients)
    length = max(CHUNK_ELEMENTS * count // max(gradients.numel(), 1), 1)
    return [slice(start, start + length) for start in range(0, count if gradients.numel() else 0, length)]


def prepared(gradients: Tensor, rows: Tensor, options: Options) -> Tensor:
    """Converts gradients to descent directions with weight decay, in the dtype of computation; not always a copy.

    Args:
        gradients: of some rows.
        rows: these rows; looked at only where there is weight decay.
        options: of the optimizer's group.
    """
    given = gradients.to(moment_dtype(gradients.dtype))
    given = -given if options["maximize"] else given
    decay = float(options["weight_decay"])
    return given.add(rows, alpha=decay) if decay != 0 else given


def square_sums(gradients: Tensor) -> Tensor:
    """Returns the sum of G² over each row, [k, 1, ...]."""
    squares = gradients.square()
    return squares.sum(tuple(range(1, squares.ndim)), keepdim=True) if squares.ndim > 1 else squares


def mean_squares(gradients: Tensor) -> Tensor:
    """Returns the mean of G² over each row, [k, 1, ...]."""
    return square_sums(gradients).div_(max(prod(gradients.shape[1:]), 1))


def _gather(tensor: Tensor, index: Tensor | None, at: slice) -> Tensor:
    """Returns some rows in the dtype of computation: the memory itself, or a copy to be scattered back."""
    rows = tensor[at] if index is None else tensor.index_select(0, index[at])
    return rows.to(moment_dtype(tensor.dtype))


def _scatter(tensor: Tensor, index: Tensor | None, at: slice, rows: Tensor) -> None:
    """Writes back rows from `_gather`."""
    if index is not None:
        tensor.index_copy_(0, index[at], rows.to(tensor.dtype))
    elif rows.dtype != tensor.dtype:
        tensor[at] = rows
