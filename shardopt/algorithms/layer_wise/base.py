"""The base of algorithms with a rate for each parameter, which follows from norms of the whole of it.

θ parameter, G gradient; a subclass says which of θ, G and the update U are measured.

Each rank computes the squares of its own elements in float64. One all-reduce for each process group among which
parameters are cut makes them those of whole parameters, all in one buffer; then the step is taken. So norms differ
between meshes in the last bits of float64, and the factor made of them, which is rounded to the dtype that is computed
in, hardly ever does: everything else is elementwise. What is measured before the exchange is not kept but computed
again, so that nothing has changed where a rank refuses its gradient, and there is never more scratch memory than for
one local tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import nan
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.absent_gradients import refuse_absent
from shardopt.algorithms.dense_gradients import dense_gradients
from shardopt.algorithms.late_checks import LateChecks
from shardopt.algorithms.reductions import Term, all_reduce_terms
from shardopt.errors import GradientError
from shardopt.sharding.box import cover_faults
from shardopt.sharding.gradients import requires_gradient, takes_gradient
from shardopt.sharding.pieces import View
from shardopt.sharding.reduced import shard_groups_of
from shardopt.sharding.view import assemble, device_of, is_held, local_tensors, view_of

Group = Mapping[str, Any]


class LayerWiseOptimizer(Optimizer):
    """A torch optimizer for parameters of which some or all are sharded, on one or several meshes.

    Every rank of a parameter must call `step` with it, and the same of them must have gradients.
    """

    names: Mapping[Tensor, str] = MappingProxyType({})
    """Parameter → its name, for errors and for the order of parameters in the exchange; a keyed optimizer sets it."""

    _tensors: ClassVar[tuple[str, ...]]
    """The names of state that lies like the parameter, in the order in which the equations take it."""
    _counts: ClassVar[bool]
    """Whether state has a `step`."""

    # --- the equations ---

    def _names_for(self, group: Group) -> tuple[str, ...]:
        """Returns those of `_tensors` that there are under these options."""
        return self._tensors

    def _measure(
        self, group: Group, step: int, weight: Tensor, gradient: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns two tensors whose norms the factor is made of; changes nothing.

        Args:
            group: the options.
            step: the number of this step, from 1; 0 where none is counted.
            weight, gradient: local tensors, real, of at least 32 bits; neither is changed.
            state: in the order of `_names_for`.
        """
        raise NotImplementedError

    def _factor(self, group: Group, dimensions: int, norms: Tensor) -> Tensor:
        """Returns the factor of the rate of a parameter with so many dimensions: float64, [] of its two norms, [2]."""
        raise NotImplementedError

    def _move(
        self,
        group: Group,
        step: int,
        weight: Tensor,
        gradient: Tensor,
        state: Sequence[Tensor],
        factor: Tensor,
        dimensions: int,
    ) -> None:
        """Changes weight and state in place, elementwise; `factor` has their dtype and no dimensions."""
        raise NotImplementedError

    # --- the step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step. Collective: one all-reduce for every process group among which parameters are cut.

        No device is waited for, unless a parameter is a ShardedTensor: then ranks ask each other whether it has a
        gradient.

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
        works.sort(key=lambda work: work.name)
        all_reduce_terms(work.term() for work in works)
        shared = [work for work in works if work.cuts]
        faults = [work.fault for work in works if work.fault is not None]
        for device in {work.numbers.device for work in shared}:
            here = [work for work in shared if work.numbers.device == device]
            check = partial(refuse_absent, [work.demand for work in here])
            counts = torch.cat([work.numbers[2:] for work in here])
            if device.type != "cpu":  # reading them now would wait for the device
                self._late.defer(counts, check)
            elif not faults:  # this rank's own error says more
                check(counts)
        for fault in faults:
            raise fault
        for work in works:
            if work.is_held and work.is_due():
                work.apply()
        return loss

    def initial_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter that has none, as its first step would; changes nothing."""
        state: dict[str, Any] = {}
        if self._counts:
            wide = torch.get_default_dtype() == torch.float64
            state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")
        for name in self._names_for(group):
            state[name] = assemble(parameter, [torch.zeros_like(local) for local in local_tensors(parameter)])
        return state

    @property
    def _late(self) -> LateChecks:
        checks: LateChecks = self.__dict__.setdefault("_late_checks", LateChecks())  # copies are made without it
        return checks


def unsuitable_for_norms(view: View) -> str:
    """Returns why the norm of a parameter cannot be taken; "" where it can."""
    if not view.dtype.is_floating_point:
        return f"elements of {view.dtype}"
    if cover_faults(view.shape, view.layout.boxes):
        return "shards that do not say where the rest of the parameter is"
    return ""


class _Work:
    """The step of one parameter on this rank.

    Attributes:
        numbers: two squares of norms, how many ranks have a gradient, and how many have shards but no gradient (NaN
            where one refuses its own); float64, [4], of this rank, and after the exchange of all.
    """

    def __init__(self, optimizer: LayerWiseOptimizer, group: Group, parameter: Tensor) -> None:
        self.optimizer, self.group, self.parameter = optimizer, group, parameter
        view = view_of(parameter)
        self.dimensions = len(view.shape)
        self.name = optimizer.names.get(parameter, f"a parameter of shape {tuple(view.shape)}")
        self.local_tensors = local_tensors(parameter)
        self.is_held = is_held(parameter)
        self.cuts = shard_groups_of(parameter)
        self.state: dict[str, Any] = optimizer.state.get(parameter, {})
        self.gradients: Sequence[Tensor] = ()
        self.fault: GradientError | None = None  # raised once the other ranks know of it
        present = False
        try:
            gradients = dense_gradients(parameter, self.name)
            present, self.gradients = gradients is not None, gradients or ()
        except GradientError as error:
            self.fault = error
        self.may_have_gradient = present or self.fault is not None or requires_gradient(parameter)
        self.numbers: Tensor = torch.zeros(4, dtype=torch.float64, device=device_of(parameter))
        self._measured = False

    def term(self) -> Term:
        """Measures this rank's elements; returns its summand of the exchange."""
        if self.local_tensors:
            self.numbers[2 if self.gradients else 3] = nan if self.fault else 1.0
        if self.gradients or not takes_gradient(self.parameter):
            self._measure()
        return self.numbers, self.cuts

    def _measure(self) -> None:
        """Adds the squares; of a parameter without a gradient here, those with a gradient of zeros, if others have."""
        for weight, gradient, state in self._wide(self._state_or_zeros()):
            pair = self.optimizer._measure(self.group, self._next_step, weight, gradient, state)
            for place, each in enumerate(pair):
                self.numbers[place] += torch.linalg.vector_norm(each, dtype=torch.float64).square_()

    @property
    def _next_step(self) -> int:
        if not self.optimizer._counts:
            return 0
        return 1 + (int(self.state["step"]) if self.state else 0)

    @property
    def demand(self) -> tuple[str, bool]:
        """The parameter's name, and whether all of its ranks must have a gradient, or none."""
        return self.name, takes_gradient(self.parameter)

    def is_due(self) -> bool:
        """Whether the parameter has a gradient; valid after the exchange."""
        if takes_gradient(self.parameter):
            return bool(self.gradients)
        # Gradients are with the shards: one on any rank is one for the whole parameter, zero elsewhere.
        return bool(self.numbers[2] > 0)

    def apply(self) -> None:
        """Updates parameter and state."""
        if not self.state:
            self.state = self.optimizer.state[self.parameter]
            self.state.update(self.optimizer.initial_state(self.group, self.parameter))
        step = self._next_step
        factor = self.optimizer._factor(self.group, self.dimensions, self.numbers[:2].sqrt())
        for (weight, gradient, state), memory in zip(
            self._wide(self._state_tensors()), self._memory(self._state_tensors()), strict=True
        ):
            self.optimizer._move(self.group, step, weight, gradient, state, factor.to(weight.dtype), self.dimensions)
            for into, result in zip(memory, (weight, *state), strict=True):
                if result is not into:
                    into.copy_(result)
        if self.optimizer._counts:
            self.state["step"] += 1

    def _state_tensors(self) -> list[Sequence[Tensor]]:
        return [local_tensors(self.state[name]) for name in self.optimizer._names_for(self.group)]

    def _state_or_zeros(self) -> list[Sequence[Tensor]]:
        if self.state:
            return self._state_tensors()
        # Of one element each, which stand for all: they are read alone.
        return [[local.new_zeros(()).expand_as(local) for local in self.local_tensors] for _ in self._entries]

    @property
    def _entries(self) -> tuple[str, ...]:
        return self.optimizer._names_for(self.group)

    def _memory(self, state: Sequence[Sequence[Tensor]]) -> Iterable[tuple[Tensor, ...]]:
        return zip(self.local_tensors, *state, strict=True)

    def _wide(self, state: Sequence[Sequence[Tensor]]) -> Iterable[tuple[Tensor, Tensor, list[Tensor]]]:
        """Yields weight, gradient and state of each local tensor; of 16 bits in fp32, as torch's kernels for 16 bits
        round by how far from the end of the memory an element is."""
        gradients = self.gradients or [local.new_zeros(()).expand_as(local) for local in self.local_tensors]
        sign = -1 if self.group["maximize"] else 1
        for (weight, *entries), gradient in zip(self._memory(state), gradients, strict=True):
            wide = torch.promote_types(weight.dtype, torch.float32)
            yield (
                weight.to(wide),
                gradient.to(wide) if sign == 1 else -gradient.to(wide),
                [entry.to(wide) for entry in entries],
            )


def rate(lr: Any) -> Any:
    """Returns a learning rate as a number; one on an accelerator stays there, so that nothing is waited for."""
    if not isinstance(lr, Tensor):
        return lr
    return float(lr) if lr.is_cpu else lr.reshape(())


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns a quotient of norms, and 1 where either is 0."""
    defined = (numerator > 0) & (denominator > 0)
    return torch.where(defined, numerator / torch.where(defined, denominator, 1.0), 1.0)
