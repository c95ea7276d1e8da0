"""Adafactor on sharded parameters: its means over rows, columns and whole parameters are taken over all ranks.

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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import nan, prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.absent_gradients import refuse_absent
from shardopt.algorithms.dense_gradients import dense_gradients
from shardopt.algorithms.late_checks import LateChecks
from shardopt.algorithms.reductions import Term, all_reduce_terms
from shardopt.errors import GradientError
from shardopt.sharding.box import cover_faults
from shardopt.sharding.gradients import requires_gradient, takes_gradient
from shardopt.sharding.pieces import View
from shardopt.sharding.reduced import ShardGroup, is_first_of, local_views, shard_groups_of, sum_like, sum_memory
from shardopt.sharding.view import assemble, device_of, is_held, local_tensors, view_of

Group = Mapping[str, Any]


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor for parameters of which some or all are sharded.

    Options, their defaults and their limits are torch's. Where `foreach` is true all updates of a step are in memory at
    once; otherwise those of sharded parameters are computed again once their RMS is known. Where `eps[0]` is None each
    parameter has the machine epsilon of its own dtype.

    State of a parameter: `step`, without dimensions, on the CPU, float32 (float64 where that is torch's default dtype);
    `row_var` and `col_var`, or `variance`, in the parameter's dtype, each cut as the parameter is.
    """

    names: Mapping[Tensor, str] = MappingProxyType({})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step. Collective: for every process group among which parameters are cut, two all-reduces.

        No device is waited for, unless a `step` was put on one, or where a parameter is a ShardedTensor: then ranks
        ask each other whether it has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once.

        Raises:
            GradientError: on all ranks that share a parameter: its gradient is sparse or does not fit it on one of
                them; or a DTensor has one on some of its ranks and not on others. Nothing was changed; but on an
                accelerator, where an earlier step has taken what was absent or refused for zeros.
        """
        self._late.run_ready()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works = [_Work(self, group, parameter) for group in self.param_groups for parameter in group["params"]]
        # Those that another rank may have a gradient of as well, so that all ranks add up the same.
        works = [work for work in works if work.may_have_gradient]
        # Where a number stands among others decides in which order ranks add it up, and so its last bit.
        works.sort(key=lambda work: self.names.get(work.parameter, ""))
        all_reduce_terms(chain.from_iterable(work.statistics() for work in works))
        shared = [work for work in works if work.cuts]
        if all(_is_on_host(work.numbers) for work in shared):
            _raise_fault(works)
            refuse_absent(
                [work.demand for work in shared], torch.cat([work.numbers[1:] for work in shared] or [_NOTHING])
            )
        else:  # reading them now would wait for the device
            for device in {work.numbers.device for work in shared}:
                here = [work for work in shared if work.numbers.device == device]
                counts = torch.cat([work.numbers[1:].float() for work in here])
                self._late.defer(counts, partial(refuse_absent, [work.demand for work in here]))
        due = [work for work in works if work.is_due() and work.is_held]
        for work in due:
            work.update_state()
            work.measure_update()
            if not work.cuts:
                work.apply()
        all_reduce_terms((work.update_square, work.cuts) for work in works)
        for work in due:
            if work.cuts:
                work.apply()
        _raise_fault(works)  # now that the others do not wait for this rank
        return loss

    @property
    def _late(self) -> LateChecks:
        checks: LateChecks = self.__dict__.setdefault("_late_checks", LateChecks())  # copies are made without it
        return checks

    def initial_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter that has none, as its first step would; changes nothing."""
        wide = torch.get_default_dtype() == torch.float64
        step = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")
        dimensions = len(view_of(parameter).shape)
        if dimensions < 2:
            variance = assemble(parameter, [torch.zeros_like(local) for local in local_tensors(parameter)])
            return {"step": step, "variance": variance}
        rows, columns = sum_like(parameter, dimensions - 1), sum_like(parameter, dimensions - 2)
        return {"step": step, "row_var": rows, "col_var": columns}


def unsuitable_for_adafactor(view: View) -> str:
    """Returns why a parameter cannot be optimized with Adafactor; "" where it can."""
    if view.dtype.is_complex:
        return f"elements of {view.dtype}, of which it could not take rows and columns"
    if cover_faults(view.shape, view.layout.boxes):
        return "shards that do not say where the rest of the parameter is"
    return ""


class _Work:
    """The step of one parameter on this rank."""

    def __init__(self, optimizer: Adafactor, group: Group, parameter: Tensor) -> None:
        self.optimizer, self.group, self.parameter = optimizer, group, parameter
        view = view_of(parameter)
        self.shape, self.dtype = view.shape, view.dtype
        self.sum_dtype = torch.promote_types(view.dtype, torch.float32)
        self.row_dim, self.column_dim = len(view.shape) - 2, len(view.shape) - 1
        self.factored = len(view.shape) > 1
        self.local_tensors = local_tensors(parameter)
        self.is_held = is_held(parameter)
        self.cuts = shard_groups_of(parameter)
        self.name = optimizer.names.get(parameter, f"a parameter of shape {view.shape}")
        self.gradients: Sequence[Tensor] = ()
        self.fault: GradientError | None = None  # raised once the other ranks know of it
        present = False
        try:
            gradients = dense_gradients(parameter, self.name)
            present, self.gradients = gradients is not None, gradients or ()
        except GradientError as error:
            self.fault = error
        self.may_have_gradient = present or self.fault is not None or requires_gradient(parameter)
        self.state: dict[str, Any] = optimizer.state.get(parameter, {})
        self.time = 1.0 + (float(self.state["step"]) if self.state else 0.0)
        self.weight = self.time ** group["beta2_decay"]
        self.kept: list[Tensor] = []
        first = group["eps"][0]
        self.eps = torch.finfo(view.dtype).eps if first is None else first

    # --- first round ---

    def statistics(self) -> Iterator[Term]:
        """Computes this rank's summands of the all-reduce before the update."""
        # RMS(θ)², how many ranks have a gradient, and how many have shards but no gradient; NaN where one refuses its
        # own.
        self.numbers: Tensor = torch.zeros(3, dtype=self.sum_dtype, device=device_of(self.parameter))
        self.update_square = self.numbers.new_zeros(())
        self.numbers[0] = _mean_of_squares(self.local_tensors, self.shape, self.numbers)
        if self.local_tensors:
            self.numbers[1 if self.gradients else 2] = nan if self.fault else 1.0
        yield self.numbers, self.cuts
        if not self.factored:
            return
        rows, columns, both = [self.column_dim], [self.row_dim], [self.row_dim, self.column_dim]
        self.row_means = sum_memory(self.parameter, rows, self.sum_dtype)
        self.column_means = sum_memory(self.parameter, columns, self.sum_dtype)
        self.means = sum_memory(self.parameter, both, self.sum_dtype)
        self._add_gradients(local_views(self.parameter, both, self.means))
        self._add_old_rows()
        yield from ((sums, self._cuts_along(rows)) for sums in self.row_means)
        yield from ((sums, self._cuts_along(columns)) for sums in self.column_means)
        yield from ((sums, self._cuts_along(both)) for sums in self.means)

    def _add_gradients(self, means: tuple[Tensor, ...]) -> None:
        """Adds the means of G² over this rank's elements of rows, of columns, and (times w) of both."""
        rows = local_views(self.parameter, [self.column_dim], self.row_means)
        columns = local_views(self.parameter, [self.row_dim], self.column_means)
        height, width = max(self.shape[self.row_dim], 1), max(self.shape[self.column_dim], 1)
        for gradient, row, column, mean in zip(self.gradients, rows, columns, means, strict=False):
            squares = _squares_along(gradient, self.column_dim, self.sum_dtype).div_(width)
            row.add_(squares)
            column.add_(_squares_along(gradient, self.row_dim, self.sum_dtype).div_(height))
            mean.add_(squares.sum(self.row_dim, keepdim=True), alpha=self.weight / height)

    def _add_old_rows(self) -> None:
        """Adds (1 − w) times the mean of R over this rank's rows, if it is the first of the ranks that have them.

        So M comes out of the same round as R: the mean of the new R is the mean of the old one, moved by w.
        """
        along_rows = self._cuts_along([self.column_dim])
        if not self.state or not all(is_first_of(self.parameter, cut) for cut in along_rows):
            return
        old = local_tensors(self.state["row_var"])
        means = self.means if along_rows else local_views(self.parameter, [self.row_dim, self.column_dim], self.means)
        height = max(self.shape[self.row_dim], 1)
        for rows, mean in zip(old, means, strict=True):
            total = rows.sum(self.row_dim, keepdim=True, dtype=self.sum_dtype)
            mean.add_(total, alpha=(1 - self.weight) / height)

    def _cuts_along(self, dims: Collection[int]) -> tuple[ShardGroup, ...]:
        return tuple(cut for cut in self.cuts if not cut.dims.isdisjoint(dims))

    # --- between the rounds ---

    def is_due(self) -> bool:
        """Whether the parameter has a gradient."""
        if not takes_gradient(self.parameter):
            # Gradients are with the shards: one on any rank is one for the whole parameter, zero elsewhere.
            due = bool(self.numbers[1] > 0)
            if due and not self.gradients:
                self.gradients = [torch.zeros_like(local) for local in self.local_tensors]
            return due
        return bool(self.gradients)

    @property
    def demand(self) -> tuple[str, bool]:
        """The parameter's name, and whether all of its ranks must have a gradient, or none."""
        return self.name, takes_gradient(self.parameter)

    def update_state(self) -> None:
        """Updates the state with the sums over all ranks."""
        if not self.state:
            self.state = self.optimizer.state[self.parameter]
            self.state.update(self.optimizer.initial_state(self.group, self.parameter))
        self.state["step"] += 1
        if self.factored:
            for name, means in (("row_var", self.row_means), ("col_var", self.column_means)):
                for memory, mean in zip(local_tensors(self.state[name]), means, strict=True):
                    memory.lerp_(mean.to(memory.dtype), self.weight)
            for mean in self.means:
                mean.clamp_(min=self.eps)
        else:
            for memory, gradient in zip(local_tensors(self.state["variance"]), self.gradients, strict=True):
                memory.lerp_(gradient * gradient, self.weight)

    # --- second round ---

    def measure_update(self) -> None:
        """Computes U, and this rank's summand of RMS(U)²."""
        updates = self._updates()
        self.update_square = _mean_of_squares(updates, self.shape, self.numbers)
        if self.group["foreach"] or not self.cuts:
            self.kept = updates

    def _updates(self) -> list[Tensor]:
        """Computes U for each local tensor."""
        if self.factored:
            rows, columns, both = [self.column_dim], [self.row_dim], [self.row_dim, self.column_dim]
            factors = zip(
                local_views(self.parameter, rows, local_tensors(self.state["row_var"])),
                local_views(self.parameter, columns, local_tensors(self.state["col_var"])),
                local_views(self.parameter, both, self.means),
                strict=True,
            )
            estimates = [(row * column).div_(mean.to(row.dtype)) for row, column, mean in factors]
        else:
            estimates = [memory.clone() for memory in local_tensors(self.state["variance"])]
        for estimate, gradient in zip(estimates, self.gradients, strict=True):
            estimate.clamp_(min=self.eps**2).rsqrt_().mul_(gradient)
        return estimates

    def apply(self) -> None:
        """Updates the parameter."""
        lr, decay = self._lr(), self.group["weight_decay"]
        inverse_root = self.time**-0.5
        rho = lr.clamp(max=inverse_root) if isinstance(lr, Tensor) else min(lr, inverse_root)
        alpha = self.numbers[0].sqrt().clamp_(min=self.group["eps"][1]) * rho
        scale = alpha / (self.update_square.sqrt() / self.group["d"]).clamp_(min=1.0)
        for local, update in zip(self.local_tensors, self.kept or self._updates(), strict=True):
            if decay != 0:
                local.mul_(1 - lr * decay)
            local.add_(update.mul_(scale), alpha=1 if self.group["maximize"] else -1)
        self.kept = []

    def _lr(self) -> float | Tensor:
        """Returns the learning rate; one on an accelerator stays there, so that nothing is waited for."""
        lr = self.group["lr"]
        if not isinstance(lr, Tensor):
            return float(lr)
        return float(lr) if lr.is_cpu else lr.to(self.numbers.device, non_blocking=True).reshape(())


def _raise_fault(works: Iterable[_Work]) -> None:
    for work in works:
        if work.fault is not None:
            raise work.fault


_NOTHING = torch.zeros(0)


def _is_on_host(numbers: Tensor) -> bool:
    """Whether numbers can be read without waiting for a device."""
    return numbers.is_cpu


def _squares_along(gradient: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Computes the sum of squares along a dimension, without a tensor of all squares."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True, dtype=dtype)
    return norm.square_()


def _mean_of_squares(tensors: Sequence[Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Computes the sum of squares of local tensors, divided by the number of elements of the whole."""
    total = like.new_zeros(())
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor, dtype=like.dtype).square_()
    return total / max(prod(shape), 1)
