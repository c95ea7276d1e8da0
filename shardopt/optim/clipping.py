"""Clips gradients before a step, over all ranks and any kinds of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum, unique
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardopt.errors import Problem, StateError
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.core.composite import OptimizerWrapper
from shardopt.optim.gradients.local_gradients import alike, clamp, scale, writable_gradients
from shardopt.optim.gradients.norms import GradientNorm, Measured
from shardopt.optim.state_dict.groups import first_names, refuse_flattened, refuse_unfit_groups
from shardopt.ranks import Group, SharedGroup
from shardopt.state.param_groups import PARAMS

_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ has it, so that nothing is divided by zero


@unique
class GradientClipping(Enum):
    """A way to clip gradients."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class _Default(float):
    """A default value that tells whether the caller gave one."""


_TORCHRECS_LIMIT = _Default(0.1)
_NOT_GIVEN = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clips the gradients of all parameters, including those of a closure, before each step of another optimizer.

    NORM scales all gradients g of the job by min(1, max_gradient / (‖g‖_p + 1e-6)), as torch.nn.utils.clip_grad_norm_
    does in one process. Source: Pascanu, Mikolov, Bengio, On the Difficulty of Training Recurrent Neural Networks,
    2013, arXiv:1211.5063, algorithm 1. Each element counts once, on however many ranks it is; of replicas with
    different gradients the first rank's counts. The norm is taken in fp64 and is the same on every rank. VALUE limits
    each element to [-max_gradient, max_gradient], and needs no other rank.

    With NORM every rank of the job, or of `process_group`, must step, even without a gradient or a parameter. Each step
    is one all-reduce over all of them. Before the first step, and the first one with other parameters, ranks exchange
    who holds which. So all ranks must add groups between the same two steps.

    Sparse gradients are coalesced, and stay so. A gradient with another placement than its parameter is redistributed,
    for which all ranks of its mesh have to have one.

    Args:
        optimizer: is wrapped.
        clipping: how to clip, or its name; by default, which is torchrec's, not at all.
        max_gradient: the largest norm, or the largest absolute value of an element; 0 makes finite gradients zero. Not
            to be given without `clipping`, since nothing would be clipped; `GradientClipping.NONE` turns it off.
        norm_type: p, more than 0; `inf` or "inf" is the largest absolute value of all elements.
        enable_global_grad_clip: makes no difference. The norm is always that of the whole job.
        param_to_pgs: makes no difference. The holders follow from each tensor's own layout.
        track_grad_norm: whether the norm is also measured in each step where NORM is not asked for, for
            `last_total_grad_norm`: then these steps are collective as well.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error, and no step is taken. It has to wait
            for the norm in every step. Otherwise gradients become zero or NaN, as torch's do.
        process_group: the ranks over which the norm is taken: a process group, or a device mesh. None is the
            `process_group` of the optimizer, or the whole job.

    Raises:
        StateError: an argument is out of range, `max_gradient` is given without `clipping`, or an optimizer has no
            names. Or gradients are to be clipped or measured, but the optimizer or a child of it updates in backward,
            and they are gone by then.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping | str = _NOT_GIVEN,
        max_gradient: float = _TORCHRECS_LIMIT,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Sequence[ProcessGroup]] | None = None,
        track_grad_norm: bool = False,
        error_if_nonfinite: bool = False,
        process_group: Group | None = None,
    ) -> None:
        super().__init__(optimizer)
        _refuse_bad_arguments(clipping, max_gradient, norm_type)
        self._clipping = GradientClipping(clipping)
        self._max_gradient = float(max_gradient)
        self._norm = GradientNorm(
            float(norm_type), SharedGroup(optimizer.process_group if process_group is None else process_group)
        )
        self._error_if_nonfinite = error_if_nonfinite
        self._track_grad_norm = track_grad_norm
        self._total_norm: Tensor | None = None
        if self._clipping is not GradientClipping.NONE or track_grad_norm:
            self._refuse_updates_in_backward()

    @property
    def total_norm(self) -> Tensor | None:
        """The norm of the gradients before they were last clipped.

        None before the first measurement. With VALUE and NONE it is measured only under `track_grad_norm`.

        fp64, without dimensions, equal on all ranks, on the device that ranks communicate on. To read it waits for it.
        """
        return self._total_norm

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """The norm as `total_norm` has it, but under torchrec's name and in the default dtype, as there."""
        return None if self._total_norm is None else self._total_norm.to(torch.get_default_dtype())

    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """Measures the norm of the current gradients, and changes nothing. Collective.

        Returns:
            The norm in the default dtype, as `last_total_grad_norm`, and all local gradients, live.

        Raises:
            StateError, GradientError, LayoutError, RankError: as `clip_grad_norm_`.
        """
        measured = self._measured()
        return measured.total.to(torch.get_default_dtype()), list(chain.from_iterable(measured.kinds))

    def clip_grad_norm_(self) -> Tensor:
        """Clips the norm of the current gradients, as NORM does before a step. Collective.

        Returns:
            The norm before that, as `total_norm`.

        Raises:
            StateError: a child of the optimizer updates in backward.
            GradientError: a gradient does not fit its parameter; or the norm is not finite, and that is an error.
            LayoutError: a parameter cannot be described, or its boxes on different ranks do not fit together.
            RankError: another rank failed; nothing was changed.
        """
        measured = self._measured()
        self._total_norm = measured.total
        if self._error_if_nonfinite:
            measured.refuse_nonfinite()
        with torch.no_grad():
            scale(measured.kinds, (self._max_gradient / (measured.total + _EPSILON)).clamp(max=1.0))
        return measured.total

    def _before_step(self) -> None:
        if self._clipping is GradientClipping.NORM:
            self.clip_grad_norm_()
            return
        if self._track_grad_norm:
            self._total_norm = self._measured().total
        if self._clipping is GradientClipping.VALUE:
            gradients = chain.from_iterable(writable_gradients(name, parameter) for name, parameter in self._named())
            with torch.no_grad():
                clamp(alike(gradient for gradient in gradients if gradient is not None), self._max_gradient)

    def _measured(self) -> Measured:
        self._refuse_updates_in_backward()
        return self._norm.measure(self._parameters(), self._names_of_parameters)

    def _named(self) -> list[tuple[str, Tensor]]:
        names = first_names(self.params)
        try:
            return [(names[parameter], parameter) for parameter in self._parameters()]
        except (LookupError, TypeError):  # something that somebody has put into a group
            self._names_of_parameters()
            raise

    def _names_of_parameters(self) -> dict[Tensor, str]:
        """Returns the names of the parameters; raises for unfit ones. Called after parameters were wrapped, or
        added.
        """
        names = first_names(self.params)
        refuse_flattened(self.params)
        refuse_unfit_groups(self.param_groups, names, once=False)
        return names

    def _parameters(self) -> list[Tensor]:
        try:
            return list(chain.from_iterable(group[PARAMS] for group in self.param_groups))
        except (LookupError, TypeError):  # something that somebody has put there is no group
            self._names_of_parameters()
            raise

    def _refuse_updates_in_backward(self) -> None:
        if self.updates_in_backward:
            problem = Problem(
                key=type(self).__name__,
                found="an optimizer that updates parameters in backward, or has such a child",
                required="gradients that are there until the step",
                remedy="clip the other optimizers before they are combined, or step after backward (shardopt.keyed)",
            )
            raise StateError("gradients that backward has used up cannot be clipped", [problem], code="clipping")


def _refuse_bad_arguments(clipping: object, max_gradient: object, norm_type: object) -> None:
    problems = []
    limit = _number(max_gradient)
    order = math.inf if norm_type == "inf" else _number(norm_type)
    names = [each.value for each in GradientClipping]
    if not isinstance(clipping, GradientClipping) and clipping not in names:
        remedy = "pass GradientClipping.NORM, .VALUE or .NONE"
        problems.append(Problem("clipping", repr(clipping), f"a GradientClipping, or one of {names}", remedy))
    if not limit >= 0:  # NaN is not
        remedy = "pass the largest norm, or math.inf to measure it alone"
        problems.append(Problem("max_gradient", repr(max_gradient), "a number that is not negative", remedy))
    elif clipping == _NOT_GIVEN and not isinstance(max_gradient, _Default):
        unused = f"{max_gradient} without clipping, of which the default is not to clip"
        remedy = "pass clipping=GradientClipping.NORM (or VALUE), or GradientClipping.NONE to turn it off"
        problems.append(Problem("max_gradient", unused, "a way to clip", remedy))
    if not order > 0:
        problems.append(Problem("norm_type", repr(norm_type), "a number above 0", 'pass 1.0, 2.0 or "inf"'))
    if problems:
        raise StateError("invalid arguments of gradient clipping", problems, code="clipping")


def _number(value: object) -> float:
    """Converts a value to a float; NaN if it is no number."""
    return float(value) if isinstance(value, Real | Tensor) else math.nan
