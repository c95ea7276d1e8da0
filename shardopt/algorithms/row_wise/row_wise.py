"""Adagrad and Adam with one second moment per table row, for tables that are plain or sharded in any way.

A parameter is [N rows, ...]; a row is all elements with one index of the first dimension, on any ranks. Its
moment, [N, 1, ...], is cut as the parameter is along the rows, and is the same on all ranks that share a row. The rules
are in `row_rules.py`. Where only rows are cut, a rank moves its rows by itself and computes what one process would, bit
for bit. Where rows are cut too, the squares of a row are added up over the ranks that share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardopt.algorithms.dense_gradients import checked_gradients
from shardopt.algorithms.options import DECAYS, NOT_NEGATIVE, RATE, options_of
from shardopt.algorithms.reductions import Term
from shardopt.algorithms.registry import Options
from shardopt.algorithms.row_wise.row_gradients import RowGradient, by_rows, refuse_decay_of_sparse
from shardopt.algorithms.row_wise.row_kernels import Numbers
from shardopt.algorithms.row_wise.row_rules import ADAGRAD, ADAM, RowRule, update_rows
from shardopt.algorithms.row_wise.row_shares import RowShares
from shardopt.algorithms.shared_rows import RowSharingOptimizer, RowSharingStep, cuts_of_rows
from shardopt.errors import AlgorithmError, Problem
from shardopt.sharding.box import cover_faults
from shardopt.sharding.gradients import requires_gradient
from shardopt.sharding.pieces import View
from shardopt.sharding.view import local_tensors


class _RowStep(RowSharingStep):
    """The step of one parameter on this rank."""

    optimizer: _RowWise
    rows: list[RowGradient] | None = None
    shared: RowShares | None
    options: Options
    """Those of the group, with the rate as a number."""
    waits = True  # the number of rows that were touched is asked in any case

    def __init__(self, optimizer: _RowWise, group: Options, parameter: Tensor) -> None:
        super().__init__(optimizer, group, parameter)
        if not self.state:
            _refuse_unsuitable(self.view, self.name, type(optimizer).__name__)
        across = cuts_of_rows(parameter)
        if across and (self.gradients is not None or requires_gradient(parameter)):
            self.shared = RowShares(parameter, across)

    @cached_property
    def rule_numbers(self) -> Numbers:
        """The numbers of this step; must be read before the step is counted."""
        return self.optimizer.rule.numbers(self.options, float(self.state["step"]) + 1 if self.state else 1.0)

    def _read_gradients(self) -> list[Tensor] | None:
        gradients = checked_gradients(self.parameter, self.name, (torch.strided, torch.sparse_coo))
        self.rows = None if gradients is None else [by_rows(gradient) for gradient in gradients]
        refuse_decay_of_sparse(self.rows or [], self.group["weight_decay"], self.name)
        return gradients


class _RowWise(RowSharingOptimizer):
    """The base of the row-wise optimizers.

    If rows are cut, a step makes two all-reduces per process group that cuts them: of which rows are touched, and of
    their squares. Replicas of rows that more than two ranks cut take part in both, and get the first one's squares.
    Ranks without a gradient then count as having zeros. Rows of a lookup's own backward take one.
    """

    rule: ClassVar[RowRule]
    step_type = _RowStep

    def _take(self, steps: Sequence[Any]) -> None:
        # Once for all parameters of a group: of a rate on a device the host waits for it.
        groups = {id(step.group): step.group for step in steps}
        options = {key: {**group, "lr": float(group["lr"])} for key, group in groups.items()}
        for step in steps:
            step.options = options[id(step.group)]
        super()._take(steps)

    def equations(self, step: Any) -> Iterator[Iterable[Term]]:
        if step.shared is None:
            yield ()
        elif step.shared.are_known_alike(step.rows):
            yield step.shared.only_summands(step.rows, step.rule_numbers)
        else:
            yield step.shared.first_summands(step.rows)
            yield step.shared.summands(step.rows, step.rule_numbers)
        if step.is_due():
            self._update(step)

    def _update(self, step: _RowStep) -> None:
        rule, numbers, state = self.rule, step.rule_numbers, step.counted_state()
        if step.shared is not None:
            step.shared.apply(rule, step.rows, state, numbers)
            return
        names = (rule.moments, *rule.others)
        state_of_locals = [local_tensors(state[name]) for name in names]
        for local, gradient, *entries in zip(step.local_tensors, step.rows or (), *state_of_locals, strict=True):
            here = dict(zip(names, entries, strict=True))
            update_rows(rule, local, gradient.index, gradient.values, here, numbers)


class RowWiseAdagrad(_RowWise):
    """Adagrad with one accumulator per row: the sum over steps of the row's mean squared gradient.

    Gradients may be dense or sparse; with the same values they give the same result, as a row without a gradient is
    not moved. Groups, defaults and names are those of torchrec.optim's class. Older ones moved all elements of a row by
    the mean of their gradients; here each moves by its own, as in torchrec 1.8 and FBGEMM's exact row-wise Adagrad.

    Sources: Duchi, Hazan, Singer, Adaptive Subgradient Methods (2011). The mean over a row: Mudigere et al.,
    Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation Models (2022).

    State of a parameter: `step`, without dimensions, on the CPU, float32 (float64 if that is torch's default dtype);
    `sum`, [N, 1, ...], float32 (float64 for a float64 parameter).

    Args:
        params: of at least one dimension, not complex; plain or sharded, or groups of them.
        lr: η, not negative.
        lr_decay: in step t the rate is lr / (1 + (t − 1) lr_decay).
        weight_decay: times the parameter it is added to the gradient, before it is squared. Not with sparse gradients.
        initial_accumulator_value: the initial value of `sum`.
        eps: ε, added to the root.
        maximize: whether to go up.

    Raises:
        ValueError: an option is out of range.
    """

    rule = ADAGRAD

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = options_of(
            locals(),
            lr=RATE,
            lr_decay=NOT_NEGATIVE,
            weight_decay=NOT_NEGATIVE,
            initial_accumulator_value=NOT_NEGATIVE,
            eps=NOT_NEGATIVE,
        )
        super().__init__(params, options)


class RowWiseAdam(_RowWise):
    """Adam with one second moment per row: an average over steps of the row's mean squared gradient.

    With a sparse gradient only its rows are moved, and only their moments decay, as with torch's SparseAdam.

    Sources: Kingma, Ba, Adam: A Method for Stochastic Optimization (2015); the mean over a row as in RowWiseAdagrad.

    State of a parameter: `step`, without dimensions, on the CPU, float32 (float64 if that is torch's default dtype);
    `exp_avg`, like the parameter; `exp_avg_sq`, [N, 1, ...], float32 (float64 for a float64 parameter).

    Args:
        params: of at least one dimension, not complex; plain or sharded, or groups of them.
        lr: not negative.
        betas: β₁ and β₂, at least 0 and less than 1.
        eps: ε, added to the root.
        weight_decay: times the parameter it is added to the gradient, as torch's Adam does. Not with sparse gradients.
        maximize: whether to go up.

    Raises:
        ValueError: an option is out of range.
    """

    rule = ADAM

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        options = options_of(locals(), lr=RATE, eps=NOT_NEGATIVE, weight_decay=NOT_NEGATIVE, betas=DECAYS)
        order = ("lr", "eps", "weight_decay", "betas", "maximize")  # as groups were always saved
        super().__init__(params, {name: options[name] for name in order})


def unsuitable_for_row_wise(view: View) -> str:
    """Returns why a parameter cannot be optimized row by row; "" if it can."""
    if not view.shape:
        return "no dimensions, and so no rows"
    if not view.dtype.is_floating_point:
        return f"elements of {view.dtype}, which have no row-wise moments"
    whole_rows = all(box.sizes[1:] == view.shape[1:] for box in view.layout.boxes)
    if not whole_rows and cover_faults(view.shape, view.layout.boxes):
        return "shards that do not say who has the rest of their rows"
    return ""


def _refuse_unsuitable(view: View, name: str, algorithm: str) -> None:
    reason = unsuitable_for_row_wise(view)
    if reason:
        problem = Problem(name, reason, f"a parameter that {algorithm} can step", "give it to another optimizer")
        raise AlgorithmError(f"{algorithm} cannot step this parameter", [problem])
