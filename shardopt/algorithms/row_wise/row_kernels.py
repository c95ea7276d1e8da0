"""The row-wise updates as one Triton kernel: it finds each row, its mean square and its moment, and moves it.

k touched rows of D elements, or all rows. A program has some; it runs over their columns twice, for the mean square and
to move them, so that of a row of usual width the second reading of the gradient comes out of the cache.

Where Triton is absent, or does not work, `fits` says no, and torch's own operations do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardopt.runtime.kernels import can_run, tl, triton

_MOST_COLUMNS, _ELEMENTS = 1024, 2048
"""The largest number of columns that a program holds at once, and its number of elements."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one step, which `row_rules` computes from options. Without betas the rule is Adagrad's.

    Args:
        rate: with which rows are moved.
        eps: added to the root.
        decay: of the weights.
        sign: 1 to go down along the gradient, -1 to go up.
        betas: β₁ and β₂.
        correction: 1 − β₂ᵗ.
    """

    rate: float
    eps: float
    decay: float
    sign: float
    betas: tuple[float, float] | None = None
    correction: float = 1.0


def fits(*tensors: Tensor) -> bool:
    """Whether the kernel supports a table, its gradients and its state."""
    return can_run(_try, *tensors) and all(
        tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors
    )


def _try(device: torch.device) -> None:
    """Runs the kernel once for each rule, on one row."""
    table, index = torch.zeros(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for betas in (None, (0.9, 0.99)):
        averages = None if betas is None else table
        update(table, index, table, table, averages, Numbers(1.0, 1.0, 0.0, 1.0, betas))


def update(
    table: Tensor, index: Tensor | None, gradients: Tensor, moments: Tensor, averages: Tensor | None, numbers: Numbers
) -> None:
    """Moves rows and their state in place. Works in fp32, and waits for no device.

    Args:
        table: [N, ...], contiguous.
        index: [k], int64, each row at most once; None for all rows, in order.
        gradients: [k, ...], contiguous.
        moments: [N, 1, ...], fp32.
        averages: like the table; None for Adagrad.
        numbers: of this step.
    """
    count, width = len(gradients), gradients[:1].numel()
    if not count or not width:
        return
    columns = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    rows = max(_ELEMENTS // columns, 1)
    beta1, beta2 = numbers.betas or (0.0, 0.0)
    with torch.cuda.device_of(table):  # type: ignore[no-untyped-call]  # torch leaves it untyped; Triton launches there
        _move_rows[(triton.cdiv(count, rows),)](
            table,
            table if index is None else index.contiguous(),
            gradients,
            moments,
            table if averages is None else averages,
            count,
            numbers.rate,
            numbers.eps,
            numbers.decay,
            numbers.sign,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            numbers.correction,
            WIDTH=width,
            GATHERS=index is not None,
            ADAM=averages is not None,
            DECAYS=numbers.decay != 0,
            ROWS=rows,
            COLUMNS=columns,
        )


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]  # Triton is untyped
    def _gradient(gradients, given, table, here, mask, sign, decay, DECAYS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's own types
        """Computes G, with weight decay, in fp32."""
        gradient = tl.load(gradients + given, mask=mask, other=0.0).to(tl.float32) * sign
        if DECAYS:
            gradient += decay * tl.load(table + here, mask=mask, other=0.0).to(tl.float32)
        return gradient

    @triton.jit  # type: ignore[untyped-decorator]  # Triton is untyped
    def _move_rows(  # type: ignore[no-untyped-def]  # Triton's own types
        table,
        index,
        gradients,
        moments,
        averages,
        count,
        rate,
        eps,
        decay,
        sign,
        beta1,
        rest1,
        beta2,
        rest2,
        correction,
        WIDTH: tl.constexpr,
        GATHERS: tl.constexpr,
        ADAM: tl.constexpr,
        DECAYS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        there = places < count
        numbers = places.to(tl.int64)  # rows × D may be past 2³¹
        rows = tl.load(index + places, mask=there, other=0) if GATHERS else numbers
        starts = (rows * WIDTH)[:, None]
        given = (numbers * WIDTH)[:, None]
        total = tl.zeros([ROWS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            columns = (first + tl.arange(0, COLUMNS))[None, :]
            mask = there[:, None] & (columns < WIDTH)
            gradient = _gradient(gradients, given + columns, table, starts + columns, mask, sign, decay, DECAYS)
            total += tl.sum(gradient * gradient, axis=1)
        moment = tl.load(moments + rows, mask=there, other=0.0)
        if ADAM:
            moment = beta2 * moment + rest2 * (total / WIDTH)
            root = tl.sqrt(moment / correction) + eps
        else:
            moment += total / WIDTH
            root = tl.sqrt(moment) + eps
        tl.store(moments + rows, moment, mask=there)
        root = tl.where(there, root, 1.0)[:, None]
        for first in range(0, WIDTH, COLUMNS):
            columns = (first + tl.arange(0, COLUMNS))[None, :]
            mask = there[:, None] & (columns < WIDTH)
            step = _gradient(gradients, given + columns, table, starts + columns, mask, sign, decay, DECAYS)
            if ADAM:
                average = tl.load(averages + starts + columns, mask=mask, other=0.0).to(tl.float32)
                step = beta1 * average + rest1 * step
                tl.store(averages + starts + columns, step, mask=mask)
            value = tl.load(table + starts + columns, mask=mask, other=0.0).to(tl.float32)
            tl.store(table + starts + columns, value - rate * (step / root), mask=mask)
