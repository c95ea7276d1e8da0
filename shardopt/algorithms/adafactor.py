"""Adafactor on sharded parameters, with means over rows, columns and whole parameters taken over all ranks.

A parameter with at least two dimensions is [..., N rows, D columns]; those before the last two are a batch.
G gradient, θ parameter, t step, R row_var [..., N, 1], C col_var [..., 1, D], M [..., 1, 1].

    w = t^beta2_decay            ρ = min(lr, 1 / √t)            α = ρ max(ε₂, RMS(θ))
    R ← R + w (mean of G² over columns − R)            C ← C + w (mean of G² over rows − C)
    V = R C / max(M, ε₁), where M is the mean of R over rows
    U = G / √max(V, ε₁²)
    θ ← (1 − lr · weight_decay) θ − α U / max(1, RMS(U) / d)

A parameter with fewer dimensions has a variance V ← V + w (G² − V) of its own shape instead.
Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018), with lr and ε₁ where
torch.optim.Adafactor puts them.

All sums run over a dimension or over all of them, and are made complete over the process groups among which these are
cut, in two rounds: first R, C, M and RMS(θ), then RMS(U), which needs the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.communicating import CommunicatingOptimizer, ParameterStep, uncovered
from shardopt.algorithms.reductions import Term
from shardopt.sharding.pieces import View
from shardopt.sharding.reduced import ShardGroup, is_first_of, local_views, sum_memory
from shardopt.sharding.view import local_tensors


class Adafactor(CommunicatingOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor over parameters that may be sharded.

    Options, their defaults and their limits are torch's. Where `foreach` is true all updates of a step are in memory at
    once; otherwise those of sharded parameters are computed again once their RMS is known. Where `eps[0]` is None each
    parameter has the machine epsilon of its own dtype.

    State of a parameter: `step`, without dimensions, on the CPU, float32 (float64 where that is torch's default dtype);
    `row_var` and `col_var`, or `variance`, in the parameter's dtype, each cut as the parameter is.

    A step makes two all-reduces for every process group among which parameters are cut. No device is waited for, unless
    a `step` was put on one, or where a parameter is a ShardedTensor: then ranks ask each other whether it has a
    gradient.
    """

    def equations(self, step: ParameterStep) -> Iterator[Iterable[Term]]:
        group, shape = step.group, step.view.shape
        # RMS(θ)², and the counts of gradients.
        numbers = step.numbers(1, torch.promote_types(step.view.dtype, torch.float32))
        time = 1.0 + (float(step.state["step"]) if step.state else 0.0)
        weight = time ** group["beta2_decay"]
        numbers[0] = _mean_of_squares(step.local_tensors, shape, numbers)
        factors = _Factors(step, numbers.dtype, weight) if len(shape) > 1 else None
        yield [(numbers, step.cuts), *(() if factors is None else factors.terms())]
        square, updates = numbers.new_zeros(()), []
        due = step.is_due()
        if due:
            eps = torch.finfo(step.view.dtype).eps if group["eps"][0] is None else group["eps"][0]
            _update_state(step.counted_state(), step, factors, weight, eps)
            updates = _updates(step, factors, eps)
            square = _mean_of_squares(updates, shape, numbers)
            if not step.cuts:  # the square is complete, and the update need not be kept
                _apply(step, updates, time, numbers[0], square)
                updates = []
            elif not group["foreach"]:
                updates = []
        yield [(square, step.cuts)]
        if due and step.cuts:
            _apply(step, updates or _updates(step, factors, eps), time, numbers[0], square)


def unsuitable_for_adafactor(view: View) -> str:
    """Returns why Adafactor cannot optimize a parameter; "" if it can."""
    if view.dtype.is_complex:
        return f"elements of {view.dtype}, of which it could not take rows and columns"
    return uncovered(view)


class _Factors:
    """Holds R, C and M of one parameter in one step: the sums of this rank, and after the exchange those of all ranks.

    Attributes:
        rows, columns, both: the means of G² over columns and over rows, and M; as `sum_memory` makes them.
    """

    def __init__(self, step: ParameterStep, dtype: torch.dtype, weight: float) -> None:
        self._step, self._dtype, self._weight = step, dtype, weight
        self._row_dim, self._column_dim = len(step.view.shape) - 2, len(step.view.shape) - 1
        self._height = max(step.view.shape[self._row_dim], 1)
        self._dims = [self._column_dim], [self._row_dim], [self._row_dim, self._column_dim]
        self.rows, self.columns, self.both = (sum_memory(step.parameter, dims, dtype) for dims in self._dims)
        self._add_gradients()
        self._add_old_rows()

    def terms(self) -> Iterator[Term]:
        """Yields each sum with the cuts that it runs over."""
        for memory, dims in zip((self.rows, self.columns, self.both), self._dims, strict=True):
            yield from ((sums, self._cuts_along(dims)) for sums in memory)

    def views(self, *memory: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yields, for each local tensor, its parts of rows, columns and both."""
        pairs = zip(self._dims, memory, strict=True)
        yield from zip(*(local_views(self._step.parameter, dims, each) for dims, each in pairs), strict=True)

    def _add_gradients(self) -> None:
        """Adds the means of this rank's G² over rows, over columns, and (times w) over both."""
        width = max(self._step.view.shape[self._column_dim], 1)
        views = self.views(self.rows, self.columns, self.both)
        for gradient, (row, column, mean) in zip(self._step.gradients or (), views, strict=False):
            squares = _squares_along(gradient, self._column_dim, self._dtype).div_(width)
            row.add_(squares)
            column.add_(_squares_along(gradient, self._row_dim, self._dtype).div_(self._height))
            mean.add_(squares.sum(self._row_dim, keepdim=True), alpha=self._weight / self._height)

    def _add_old_rows(self) -> None:
        """Adds (1 − w) times the mean of R over this rank's rows, on the first of the ranks that hold them.

        So M comes out of the same round as R: the mean of the new R is the mean of the old one, moved by w.
        """
        parameter, state = self._step.parameter, self._step.state
        along_rows = self._cuts_along([self._column_dim])
        if not state or not all(is_first_of(parameter, cut) for cut in along_rows):
            return
        means = self.both if along_rows else local_views(parameter, self._dims[2], self.both)
        for rows, mean in zip(local_tensors(state["row_var"]), means, strict=True):
            total = rows.sum(self._row_dim, keepdim=True, dtype=self._dtype)
            mean.add_(total, alpha=(1 - self._weight) / self._height)

    def _cuts_along(self, dims: Collection[int]) -> tuple[ShardGroup, ...]:
        return tuple(cut for cut in self._step.cuts if not cut.dims.isdisjoint(dims))


def _update_state(
    state: Mapping[str, Any], step: ParameterStep, factors: _Factors | None, weight: float, eps: float
) -> None:
    """Updates R and C, or V, with the sums over all ranks."""
    if factors is None:
        for memory, gradient in zip(local_tensors(state["variance"]), step.gradients or (), strict=True):
            memory.lerp_(gradient * gradient, weight)
        return
    for name, means in (("row_var", factors.rows), ("col_var", factors.columns)):
        for memory, mean in zip(local_tensors(state[name]), means, strict=True):
            memory.lerp_(mean.to(memory.dtype), weight)
    for mean in factors.both:
        mean.clamp_(min=eps)


def _updates(step: ParameterStep, factors: _Factors | None, eps: float) -> list[Tensor]:
    """Computes U for each local tensor."""
    state = step.state
    if factors is None:
        estimates = [memory.clone() for memory in local_tensors(state["variance"])]
    else:
        views = factors.views(local_tensors(state["row_var"]), local_tensors(state["col_var"]), factors.both)
        estimates = [(row * column).div_(mean.to(row.dtype)) for row, column, mean in views]
    for estimate, gradient in zip(estimates, step.gradients or (), strict=True):
        estimate.clamp_(min=eps**2).rsqrt_().mul_(gradient)
    return estimates


def _apply(step: ParameterStep, updates: Sequence[Tensor], time: float, square: Tensor, update_square: Tensor) -> None:
    """Updates the parameter.

    Args:
        updates: U, for each local tensor; used up.
        time: t.
        square, update_square: RMS(θ)² and RMS(U)².
    """
    group, inverse_root, lr = step.group, time**-0.5, step.group["lr"]
    if isinstance(lr, Tensor):  # one on an accelerator stays there, so that nothing is waited for
        lr = float(lr) if lr.is_cpu else lr.to(square.device, non_blocking=True).reshape(())
    rho = lr.clamp(max=inverse_root) if isinstance(lr, Tensor) else min(lr, inverse_root)
    alpha = square.sqrt().clamp_(min=group["eps"][1]) * rho
    scale = alpha / (update_square.sqrt() / group["d"]).clamp_(min=1.0)
    for local, update in zip(step.local_tensors, updates, strict=True):
        if group["weight_decay"] != 0:
            local.mul_(1 - lr * group["weight_decay"])
        local.add_(update.mul_(scale), alpha=1 if group["maximize"] else -1)


def _squares_along(gradient: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Computes the sum of squares along a dimension, without a tensor of all squares."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True, dtype=dtype)
    return norm.square_()


def _mean_of_squares(tensors: Sequence[Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Computes the sum of squares of local tensors, divided by the number of elements of the whole parameter."""
    total = like.new_zeros(())
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor, dtype=like.dtype).square_()
    return total / max(prod(shape), 1)
