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

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.communicating import CommunicatingOptimizer, ParameterStep, numbers_of, uncovered
from shardopt.algorithms.lists import Tensors, add_squares, batched, owners_of
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

    A step makes two all-reduces for every process group among which parameters are cut. If these are more than two
    ranks, and others have replicas, each is followed by one that gives these the first one's. No device is waited for,
    unless a `step` was put on one, or where a parameter is a ShardedTensor: then ranks ask each other whether it has a
    gradient.
    """

    def batches(self, steps: Sequence[ParameterStep]) -> Iterable[Sequence[ParameterStep]]:
        """Returns steps of one number and of one shape together."""
        return batched(steps, _alike)

    def equations_of(self, steps: Sequence[ParameterStep]) -> Iterator[Iterable[Iterable[Term]]]:
        """Two exchanges: R, C, M and RMS(θ); then RMS(U)."""
        first = steps[0]
        group, view, size = first.group, first.view, max(prod(first.view.shape), 1)
        # RMS(θ)², and the counts of gradients.
        numbers, owners = numbers_of(steps, 1, torch.promote_types(view.dtype, torch.float32)), owners_of(steps)
        time = 1.0 + (float(first.state["step"]) if first.state else 0.0)
        weight = time ** group["beta2_decay"]
        if first.local_tensors:
            add_squares(numbers[:, 0], owners, [local for step in steps for local in step.local_tensors])
        numbers[:, 0].div_(size)
        factors = _Factors(steps, numbers.dtype, weight) if len(view.shape) > 1 else None
        terms = [[(row, step.cuts)] for row, step in zip(numbers.unbind(), steps, strict=True)]
        yield terms if factors is None else map(chain, terms, factors.terms())
        squares, updates = numbers.new_zeros(len(steps)), None
        due = first.is_due()
        if due:
            eps = torch.finfo(view.dtype).eps if group["eps"][0] is None else group["eps"][0]
            for step in steps:
                step.counted_state()
            _update_state(steps, factors, weight, eps)
            updates = _updates(steps, factors, eps)
            add_squares(squares, owners, updates)
            squares.div_(size)
            if not first.cuts:  # the squares are complete, and the updates need not be kept
                _apply(steps, owners, updates, time, numbers[:, 0], squares)
            if not first.cuts or not group["foreach"]:
                updates = None
        yield [[(square, step.cuts)] for square, step in zip(squares.unbind(), steps, strict=True)]
        if due and first.cuts:
            _apply(steps, owners, updates or _updates(steps, factors, eps), time, numbers[:, 0], squares)


def unsuitable_for_adafactor(view: View) -> str:
    """Returns why Adafactor cannot optimize a parameter; "" if it can."""
    if view.dtype.is_complex:
        return f"elements of {view.dtype}, of which it could not take rows and columns"
    return uncovered(view)


class _Factors:
    """R, C and M of K parameters of one shape in one step: of this rank's elements, and once they are added up of all.

    Attributes:
        rows, columns, both: the means of G² over columns and over rows, and M; as `sum_memory` makes them, [K, ...].
    """

    def __init__(self, steps: Sequence[ParameterStep], dtype: torch.dtype, weight: float) -> None:
        self._steps, self._dtype, self._weight = steps, dtype, weight
        self._parameter, shape = steps[0].parameter, steps[0].view.shape
        rows, columns = len(shape) - 2, len(shape) - 1
        self._height, self._width = max(shape[rows], 1), max(shape[columns], 1)
        self._dims = [columns], [rows], [rows, columns]
        memory = (sum_memory(self._parameter, dims, dtype, len(steps)) for dims in self._dims)
        self.rows, self.columns, self.both = memory
        self._add_gradients()
        self._add_old_rows()

    def terms(self) -> Iterator[list[Term]]:
        """Yields for each parameter the sums, and the cuts over which they run."""
        for place, step in enumerate(self._steps):
            pairs = zip((self.rows, self.columns, self.both), self._dims, strict=True)
            yield [(sums[place], _cuts_along(step, dims)) for memory, dims in pairs for sums in memory]

    def views(self, *memory: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yields those parts of rows, columns and both that belong to each local tensor, [K, ...]."""
        yield from zip(*map(self._views, self._dims, memory), strict=True)

    def _views(self, dims: Collection[int], memory: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(self._steps) > 1:
            return memory
        return [each.unsqueeze(0) for each in local_views(self._parameter, dims, [each[0] for each in memory])]

    def _add_gradients(self) -> None:
        """Adds the means of G² over this rank's elements of rows, of columns, and (times w) of both."""
        rows, columns = -2, -1
        gradients = _stacked([step.gradients or () for step in self._steps])
        views = self.views(self.rows, self.columns, self.both)
        for gradient, (row, column, mean) in zip(gradients, views, strict=False):
            squares = _squares_along(gradient, columns, self._dtype).div_(self._width)
            row.add_(squares)
            column.add_(_squares_along(gradient, rows, self._dtype).div_(self._height))
            mean.add_(squares.sum(rows, keepdim=True), alpha=self._weight / self._height)

    def _add_old_rows(self) -> None:
        """Adds (1 − w) times the mean of R over this rank's rows, on the first of the ranks that hold them.

        So M comes out of the same round as R: the mean of the new R is the mean of the old one, moved by w.
        """
        if not self._steps[0].state or not _is_first_of_rows(self._steps[0]):
            return
        along_rows = _cuts_along(self._steps[0], self._dims[0])
        means = self.both if along_rows else self._views(self._dims[2], self.both)
        for rows, mean in zip(_stacked(_state_of(self._steps, "row_var")), means, strict=True):
            mean.add_(rows.sum(-2, keepdim=True, dtype=self._dtype), alpha=(1 - self._weight) / self._height)


def _alike(step: ParameterStep) -> Any:
    """Returns what is equal for parameters that may be stacked: then sums over a dimension have the bits of each."""
    shape, time = step.view.shape, float(step.state["step"]) if step.state else 0.0
    if len(shape) < 2:
        return time, bool(step.state), shape, len(step.local_tensors)
    # A sum of very many numbers is taken by several threads where it is the only one.
    can = step.all_or_none and len(step.local_tensors) == 1 and max(shape) < _MOST_OF_ONE_THREAD
    if not can or not all(gradient.is_contiguous() for gradient in step.gradients or ()):
        return step
    cuts = tuple(cut.dims for cut in step.cuts)
    return time, bool(step.state), shape, step.local_tensors[0].shape, cuts, _is_first_of_rows(step)


_MOST_OF_ONE_THREAD = 32_768


def _cuts_along(step: ParameterStep, dims: Collection[int]) -> tuple[ShardGroup, ...]:
    return tuple(cut for cut in step.cuts if not cut.dims.isdisjoint(dims))


def _is_first_of_rows(step: ParameterStep) -> bool:
    along_rows = _cuts_along(step, [len(step.view.shape) - 1])
    return all(is_first_of(step.parameter, cut) for cut in along_rows)


def _state_of(steps: Sequence[ParameterStep], name: str) -> list[Sequence[Tensor]]:
    return [local_tensors(step.state[name]) for step in steps]


def _stacked(of_steps: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns for each local tensor, one of each of K parameters, [K, ...]; of one parameter views."""
    if len(of_steps) == 1:
        return [tensor.unsqueeze(0) for tensor in of_steps[0]]
    return [torch.stack(tensors) for tensors in zip(*of_steps, strict=True)]


def _unstacked(stacks: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors of each parameter, one after the other."""
    return list(chain.from_iterable(zip(*(stack.unbind() for stack in stacks), strict=True)))


def _gradients_of(steps: Sequence[ParameterStep]) -> list[Tensor]:
    return [gradient for step in steps for gradient in step.gradients or ()]


def _update_state(steps: Sequence[ParameterStep], factors: _Factors | None, weight: float, eps: float) -> None:
    """Updates R and C, or V, with the sums over all ranks."""
    if factors is None:
        gradients, memory = _gradients_of(steps), list(chain.from_iterable(_state_of(steps, "variance")))
        torch._foreach_lerp_(memory, torch._foreach_mul(gradients, gradients), weight)
        return
    for name, means in (("row_var", factors.rows), ("col_var", factors.columns)):
        memory = list(chain.from_iterable(_state_of(steps, name)))
        torch._foreach_lerp_(memory, _unstacked(mean.to(memory[0].dtype) for mean in means), weight)
    for mean in factors.both:
        mean.clamp_(min=eps)


def _updates(steps: Sequence[ParameterStep], factors: _Factors | None, eps: float) -> Tensors:
    """Computes U for each local tensor."""
    estimates: Tensors
    if factors is None:
        estimates = torch._foreach_clamp_min(list(chain.from_iterable(_state_of(steps, "variance"))), eps**2)
    else:
        stored = (_stacked(_state_of(steps, name)) for name in ("row_var", "col_var"))
        views = factors.views(*stored, factors.both)
        estimates = _unstacked([(row * column).div_(mean.to(row.dtype)) for row, column, mean in views])
        torch._foreach_clamp_min_(estimates, eps**2)
    torch._foreach_rsqrt_(estimates)
    torch._foreach_mul_(estimates, _gradients_of(steps))
    return estimates


def _apply(
    steps: Sequence[ParameterStep],
    owners: Tensor,
    updates: Tensors,
    time: float,
    squares: Tensor,
    update_squares: Tensor,
) -> None:
    """Updates S parameters.

    Args:
        owners: of local tensors, as `owners_of` returns it.
        updates: U, for each local tensor; used up.
        time: t.
        squares, update_squares: RMS(θ)² and RMS(U)², [S].
    """
    group, inverse_root, lr = steps[0].group, time**-0.5, steps[0].group["lr"]
    if isinstance(lr, Tensor):  # one on an accelerator stays there, so that nothing is waited for
        lr = float(lr) if lr.is_cpu or squares.is_cpu else lr.to(squares.device, non_blocking=True).reshape(1)
    rho = lr.clamp(max=inverse_root) if isinstance(lr, Tensor) else min(lr, inverse_root)
    alpha = squares.sqrt().clamp_(min=group["eps"][1]) * rho
    scales = alpha / (update_squares.sqrt() / group["d"]).clamp_(min=1.0)
    parameters = [local for step in steps for local in step.local_tensors]
    if group["weight_decay"] != 0:
        kept = 1 - lr * group["weight_decay"]
        for local in parameters:  # in 16 bits foreach rounds a number otherwise
            local.mul_(kept.reshape(()) if isinstance(kept, Tensor) else kept)
    torch._foreach_mul_(updates, scales.index_select(0, owners).unbind())
    torch._foreach_add_(parameters, updates, alpha=1 if group["maximize"] else -1)


def _squares_along(gradient: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Computes the sum of squares along a dimension, without a tensor of all squares."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True, dtype=dtype)
    return norm.square_()
