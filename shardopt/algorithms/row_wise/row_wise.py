"""Adagrad and Adam with one second moment for each row of a table, for tables that are plain or sharded in any way.

A parameter is [N rows, ...]; a row is all that lies under one index of the first dimension, on whichever ranks. Its
moment, [N, 1, ...], is cut as the parameter is along the rows, and is the same on all ranks that share a row. The rules
are in `row_rules.py`. Where only rows are cut, a rank moves its rows by itself and computes what one process would, bit
for bit. Where rows are cut too, the squares of a row are added up over the ranks that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardopt.algorithms.reductions import all_reduce_terms
from shardopt.algorithms.row_wise.row_gradients import RowGradient, refuse_decay_of_sparse, row_gradients
from shardopt.algorithms.row_wise.row_rules import ADAGRAD, ADAM, RowRule, moment_dtype, update_rows
from shardopt.algorithms.row_wise.row_shares import RowShares
from shardopt.errors import AlgorithmError, GradientError, Problem
from shardopt.sharding.box import cover_faults
from shardopt.sharding.gradients import requires_gradient
from shardopt.sharding.pieces import View
from shardopt.sharding.reduced import shard_groups_of, sum_like
from shardopt.sharding.view import assemble, is_held, local_tensors, view_of

Group = Mapping[str, Any]


class _RowWise(torch.optim.Optimizer):
    """The base of the row-wise optimizers."""

    rule: ClassVar[RowRule]
    names: Mapping[Tensor, str] = MappingProxyType({})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step. Where rows are cut, collective: one all-reduce for each process group among which they are.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once.

        Raises:
            GradientError: a gradient does not fit its parameter, or is sparse where there is weight decay; also on the
                ranks that share rows with the one that has it.
            AlgorithmError: a parameter has no rows or complex elements, or shards that do not say who has the rest of
                their rows. Nothing was changed in either case.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works = [_Work(self, group, parameter) for group in self.param_groups for parameter in group["params"]]
        # Where a number stands among others decides in which order ranks add it up, and so its last bit.
        works.sort(key=lambda work: self.names.get(work.parameter, ""))
        shared = [(work, work.shares) for work in works if work.shares]
        faults = [work.fault for work in works if work.fault]
        for _, shares in shared if faults else ():
            shares.refuse()
        all_reduce_terms(chain.from_iterable(shares.summands(work.gradients, work.group) for work, shares in shared))
        for fault in faults:
            raise fault
        _raise_refused([work.name for work, shares in shared if shares.is_refused()])
        for work in works:
            if work.is_due():
                work.apply()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch does, but moments in the dtype that they have here, where torch casts to the parameter's."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        loaded = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(saved, loaded, strict=True):
            moments = state_dict["state"].get(number, {}).get(self.rule.moments)
            if moments is not None and parameter in self.state:
                dtype = moment_dtype(view_of(parameter).dtype)
                self.state[parameter][self.rule.moments] = moments.to(parameter.device, dtype, copy=True)

    def initial_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter that has none, as its first step would; changes nothing."""
        view = view_of(parameter)
        wide = torch.get_default_dtype() == torch.float64
        state = {"step": torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")}
        for name in self.rule.others:
            state[name] = assemble(parameter, [torch.zeros_like(local) for local in local_tensors(parameter)])
        moments = sum_like(parameter, *range(1, len(view.shape)), dtype=moment_dtype(view.dtype))
        for local in local_tensors(moments):
            local.fill_(group.get("initial_accumulator_value", 0.0))
        return {**state, self.rule.moments: moments}


class RowWiseAdagrad(_RowWise):
    """Adagrad with one accumulator for each row: the sum over steps of the mean of the squared gradients of the row.

    Gradients may be dense or sparse; with the same values they give the same result, as a row without a gradient is
    not moved. Groups, defaults and names are those of torchrec.optim's class; that one moves all elements of a row by
    the mean of their gradients, while here each is moved by its own, as by FBGEMM's exact row-wise Adagrad.

    Sources: Duchi, Hazan, Singer, Adaptive Subgradient Methods (2011); the mean over a row as in Mudigere et al.,
    Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation Models (2022).

    State of a parameter: `step`, without dimensions, on the CPU, float32 (float64 where that is torch's default dtype);
    `sum`, [N, 1, ...], float32 whatever the parameter's dtype (float64 of a float64 parameter).

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
        options = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        _refuse_negative(options)
        super().__init__(params, {**options, "maximize": maximize})


class RowWiseAdam(_RowWise):
    """Adam with one second moment for each row: an average over steps of the mean of the squared gradients of the row.

    With a sparse gradient only its rows are moved, and only their moments decay, as with torch's SparseAdam.

    Sources: Kingma, Ba, Adam: A Method for Stochastic Optimization (2015); the mean over a row as in RowWiseAdagrad.

    State of a parameter: `step`, without dimensions, on the CPU, float32 (float64 where that is torch's default dtype);
    `exp_avg`, like the parameter; `exp_avg_sq`, [N, 1, ...], float32 whatever the parameter's dtype (float64 of a
    float64 parameter).

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
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        _refuse_negative(options)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1, but are {betas}")
        super().__init__(params, {**options, "betas": betas, "maximize": maximize})


def unsuitable_for_row_wise(view: View) -> str:
    """Returns why a parameter cannot be optimized row by row; "" where it can."""
    if not view.shape:
        return "no dimensions, and so no rows"
    if not view.dtype.is_floating_point:
        return f"elements of {view.dtype}, which have no row-wise moments"
    whole_rows = all(box.sizes[1:] == view.shape[1:] for box in view.layout.boxes)
    if not whole_rows and cover_faults(view.shape, view.layout.boxes):
        return "shards that do not say who has the rest of their rows"
    return ""


def _refuse_unsuitable(parameter: Tensor, name: str, algorithm: str) -> None:
    reason = unsuitable_for_row_wise(view_of(parameter))
    if reason:
        problem = Problem(name, reason, f"a parameter that {algorithm} can step", "give it to another optimizer")
        raise AlgorithmError(f"{algorithm} cannot step this parameter", [problem])


def _refuse_negative(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if not value >= 0.0:
            raise ValueError(f"{name} must not be negative, but is {value}")


def _raise_refused(names: list[str]) -> None:
    """Raises where another rank has refused its gradients; the error there says what is wrong with them."""
    problems = [
        Problem(name, "a gradient, of it or of another, that another rank refuses", "good ones on all", "see its error")
        for name in names
    ]
    if problems:
        raise GradientError("a rank that shares rows cannot step", problems)


class _Work:
    """The step of one parameter on this rank."""

    def __init__(self, optimizer: _RowWise, group: Group, parameter: Tensor) -> None:
        self.optimizer, self.group, self.parameter = optimizer, group, parameter
        self.name = optimizer.names.get(parameter) or f"a parameter of shape {tuple(view_of(parameter).shape)}"
        if not optimizer.state.get(parameter):
            _refuse_unsuitable(parameter, self.name, type(optimizer).__name__)
        self.local_tensors = local_tensors(parameter)
        self.gradients: list[RowGradient] | None = None
        self.fault: GradientError | None = None  # raised once the ranks that share rows know of it
        try:
            gradients = row_gradients(parameter, self.name)
            refuse_decay_of_sparse(gradients or [], group["weight_decay"], self.name)
            self.gradients = gradients
        except GradientError as error:
            self.fault = error
        across = tuple(cut for cut in shard_groups_of(parameter) if any(cut.dims))  # along more than the rows
        self.shares: RowShares | None = None
        if across and (self.gradients is not None or requires_gradient(parameter)):
            self.shares = RowShares(parameter, across)

    def is_due(self) -> bool:
        """Whether the parameter has a gradient, and this rank elements of it; valid once the summands are added up."""
        if not (any(local.numel() for local in self.local_tensors) or is_held(self.parameter)):
            return False
        return self.gradients is not None if self.shares is None else self.shares.is_due()

    def apply(self) -> None:
        """Updates parameter and state."""
        rule, parameter, state = self.optimizer.rule, self.parameter, self.optimizer.state[self.parameter]
        if not state:
            state.update(self.optimizer.initial_state(self.group, parameter))
        state["step"] += 1
        step = float(state["step"])
        if self.shares is not None:
            self.shares.apply(rule, self.gradients, state, self.group, step)
            return
        state_of_locals = [local_tensors(state[name]) for name in (rule.moments, *rule.others)]
        for local, gradient, *entries in zip(self.local_tensors, self.gradients or (), *state_of_locals, strict=True):
            here = dict(zip((rule.moments, *rule.others), entries, strict=True))
            update_rows(rule, local, gradient.index, gradient.values, here, self.group, step)
