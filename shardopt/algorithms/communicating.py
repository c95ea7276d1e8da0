"""The bases of algorithms: what a step has around its equations.

`AlgorithmOptimizer` evaluates the closure and loads state in its own dtypes. `CommunicatingOptimizer` is for algorithms
that step on the parameters themselves, sharded as they are: its state follows from the registered spec, and a subclass
has the equations, in one generator for each parameter. What this yields is added up over the ranks among which the
parameter is cut, in one all-reduce for each group of ranks and for all parameters together; what comes after the last
yield is the update:

    def equations(self, step):
        numbers = step.numbers(1, torch.float64)        # of this rank; and who has a gradient
        numbers[0] = ...
        yield [(numbers, step.cuts)]                    # from here on of all ranks
        if step.is_due():
            state = step.counted_state()
            ...

On the CPU a gradient that is absent or refused on some ranks is raised after the first exchange, on all ranks, before
anything has changed. On an accelerator that would be to wait: there the step after the next raises it, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, nan, prod
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.absent_gradients import refuse_absent, refuse_absent_late
from shardopt.algorithms.dense_gradients import dense_gradients
from shardopt.algorithms.initial_state import made_of, restore_dtypes
from shardopt.algorithms.reductions import Term, all_reduce_terms, equate_sums
from shardopt.algorithms.registry import GLOBAL_STATE, AlgorithmSpec, Options, find_spec, spec_of
from shardopt.algorithms.stepped import Stepped
from shardopt.errors import AlgorithmError, GradientError, Problem, ShardoptError
from shardopt.ranks import SharedGroup
from shardopt.runtime.accelerator import is_capturing
from shardopt.runtime.deferred_checks import DeferredChecks
from shardopt.sharding.box import cover_faults
from shardopt.sharding.gradients import requires_gradient, takes_gradient
from shardopt.sharding.pieces import View
from shardopt.sharding.reduced import ShardGroup, shard_groups_of
from shardopt.sharding.view import device_of, is_held, local_tensors, view_of


class AlgorithmOptimizer(Optimizer):
    """A torch optimizer whose step evaluates the closure once, then calls the subclass's `_take_step`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; returns the closure's loss.

        Args:
            closure: evaluates the model again and returns the loss; called once, with gradients enabled.

        Raises:
            AlgorithmError: the step is captured into a graph; nothing was changed.
            GradientError: a gradient is not one that the algorithm can step with; nothing was changed.
        """
        refuse_capture(type(self).__name__)
        self._refuse_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch does, but keeps the dtype of state that has one of its own; torch casts to the parameter's."""
        super().load_state_dict(state_dict)
        restore_dtypes(self.spec, self, state_dict)

    @property
    def spec(self) -> AlgorithmSpec:
        """The spec that this class, or a base of it, is registered with."""
        return find_spec(type(self), may_override=True) or spec_of(type(self))

    def complete_state(self, parameter: Tensor) -> None:
        """Brings the state of a parameter, if any, to the shapes that are saved, if it has others."""

    def unlike(self, group: Options, options: Options, kept: Collection[str]) -> Iterable[tuple[str, Any, Any]]:
        """Yields each option of a saved group that implies other state than this group's: (name, stored, own).

        Args:
            group: has the options of the code.
            options: of the saved group.
            kept: options that a load leaves as they are.
        """
        return ()

    def _refuse_step(self) -> None:
        """Raises if no step may be taken now; called before the closure."""

    def _take_step(self) -> None:
        """Takes the step of all parameters, with autograd off."""
        raise NotImplementedError


class ParameterStep:
    """One parameter in one step, on this rank.

    Args:
        optimizer: whose step it is.
        group: its options.
        parameter: the user's tensor.

    Attributes:
        group, parameter: as they were given.
        key: the parameter's FQN, "" where no keyed optimizer has given it; `name` is for errors.
        view, local_tensors: what is here of the parameter. `view.shape` and `view.dtype` are those of the whole.
        is_held: whether this rank has elements of it.
        cuts: the groups of ranks among which it is cut.
        gradients: of the local tensors; None where there is none.
        fault: why the gradient is refused; raised once the other ranks know of it.
        refuses: whether this rank refuses a gradient in this step, of this parameter or of another.
        counts: how many ranks have a gradient, and how many have shards but no gradient (NaN where one refuses it,
            infinite where one refuses another), once `numbers` were exchanged.
    """

    counts: Tensor

    def __init__(self, optimizer: CommunicatingOptimizer, group: Options, parameter: Tensor) -> None:
        self.optimizer, self.group, self.parameter = optimizer, group, parameter
        self.key = optimizer.names.get(parameter, "")
        self.view = view_of(parameter, self.key)
        self.name = self.key or f"a parameter of shape {tuple(self.view.shape)}"
        self.local_tensors = local_tensors(parameter)
        self.is_held = is_held(parameter)
        self.cuts: tuple[ShardGroup, ...] = shard_groups_of(parameter)
        self.gradients: list[Tensor] | None = None
        self.fault: ShardoptError | None = None
        self.refuses = False
        try:
            self.gradients = self._read_gradients()
        except GradientError as error:
            self.fault = error

    def _read_gradients(self) -> list[Tensor] | None:
        """Returns the gradient of each local tensor; raises GradientError if the algorithm cannot step with it."""
        return dense_gradients(self.parameter, self.name)

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return prod(self.view.shape)

    @property
    def device(self) -> torch.device:
        """The device of the local tensors."""
        return device_of(self.parameter)

    @property
    def may_have_gradient(self) -> bool:
        """Whether this rank has a gradient, or another rank may have one. All ranks then join the sums."""
        return self.gradients is not None or self.fault is not None or requires_gradient(self.parameter)

    @property
    def all_or_none(self) -> bool:
        """Whether all ranks must have a gradient, or none. For a ShardedTensor, one on any rank is enough."""
        return takes_gradient(self.parameter)

    def numbers(self, count: int, dtype: torch.dtype) -> Tensor:
        """Makes zeros for so many numbers of this rank, followed by its `counts`."""
        return numbers_of([self], count, dtype)[0]

    def own_counts(self) -> tuple[float, float]:
        """Returns what this rank adds to `counts`."""
        here = float(bool(self.local_tensors))
        have, lack = (here, 0.0) if self.gradients is not None else (0.0, here)
        return have, self.refusal or lack

    @property
    def refusal(self) -> float:
        """The mark among counts of ranks without a gradient: NaN if it is refused here, infinite if another is."""
        return nan if self.fault else inf if self.refuses else 0.0

    def is_due(self) -> bool:
        """Whether it has a gradient and elements on this rank; valid after the exchange of `numbers`.

        Where other shards of a ShardedTensor have one, this rank's gradient is zeros from here on.
        """
        if not self.all_or_none and self.gradients is None and bool(self.counts[0] > 0):
            self.gradients = [torch.zeros_like(local) for local in self.local_tensors]
        return self.is_held and self.gradients is not None

    @property
    def state(self) -> dict[str, Any]:
        """The live state; empty if there is none."""
        state: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return state

    def counted_state(self) -> dict[str, Any]:
        """Returns the live state, with this step counted; makes it if there is none."""
        state: dict[str, Any] = self.optimizer.state[self.parameter]
        if not state:
            state.update(self.optimizer.initial_state(self.group, self.parameter))
        if "step" in state:
            state["step"] += 1
        return state


class CommunicatingOptimizer(AlgorithmOptimizer):
    """The base of optimizers that step on the user's tensors and do their own communication.

    Every rank of a parameter must call `step` with it, and the same of them must have gradients.

    Args:
        params: tensors, plain or sharded, or groups of them.
        defaults: the options of groups that do not name them.
    """

    names: Mapping[Tensor, str] = MappingProxyType({})
    """Parameter → its FQN, for errors and for the order of parameters in exchanges; a keyed optimizer sets it."""

    shared_group = SharedGroup()
    """The ranks that train the parameters, for sums over all of them; a keyed optimizer sets it."""

    step_type: ClassVar[type[ParameterStep]] = ParameterStep

    # --- the equations ---

    def equations(self, step: ParameterStep) -> Iterator[Iterable[Term]]:
        """Yields this rank's summands of each exchange of a parameter's step; then updates state and parameter.

        Each exchange changes the yielded tensors to the sums over the ranks of their cuts, in place. Before the first
        one nothing may be changed. All ranks of a cut yield equally often, and tensors of the same shapes: also a rank
        that is not due, with zeros. So it returns early after the last yield alone.
        """
        raise NotImplementedError

    def equations_of(self, steps: Sequence[Any]) -> Iterator[Iterable[Iterable[Term]]]:
        """Yields at each exchange the summands of each step of a batch: the equations of an algorithm over lists."""
        (step,) = steps
        yield from ([terms] for terms in self.equations(step))

    def batches(self, steps: Sequence[Any]) -> Iterable[Sequence[Any]]:
        """Returns the steps that `equations_of` takes together; by default each alone."""
        return [[step] for step in steps]

    # --- the step ---

    def initial_state(self, group: Options, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter without state, as its first step would; changes nothing."""
        entries = self.spec.entries(group, len(view_of(parameter).shape))
        return {entry.name: made_of(entry, group, parameter) for entry in entries}

    def initial_global(self) -> dict[str, Tensor]:
        """Makes the state that belongs to no parameter as it is before the first step; changes nothing."""
        return {}

    def make_global(self) -> dict[str, Tensor]:
        """Returns the live state that belongs to no parameter; makes it if there is none."""
        by_name: Any = self.state  # torch declares tensors as its only keys, and takes any
        state: dict[str, Tensor] = by_name[GLOBAL_STATE]
        if not state:
            state.update(self.initial_global())
        return state

    @property
    def deferred(self) -> DeferredChecks:
        """The checks of numbers that are still being copied to the host."""
        checks: DeferredChecks = self.__dict__.setdefault("_deferred_checks", DeferredChecks())
        return checks  # copies are made without it

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as torch does, after all deferred checks of gradients have passed.

        Raises:
            GradientError: a step did; on an accelerator it was taken all the same. Each time, until loads have replaced
                this state and all parameters of that step.
        """
        self.deferred.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch does, but keeps the dtype of state that has one of its own.

        An earlier step that lacked a gradient is forgotten once its parameters were changed by another hand than a
        step's, too, as by a load of the model. Until then they have its update, and `state_dict` raises.
        """
        super().load_state_dict(state_dict)
        self.deferred.state_is_loaded()

    def _refuse_step(self) -> None:
        self.deferred.begin_step()

    def _take_step(self) -> None:
        steps = [self._make_step(group, each) for group in self.param_groups for each in group["params"]]
        refuses = any(step.fault is not None for step in steps)
        for step in steps:
            step.refuses = refuses
        try:
            self._take(steps)
        finally:
            self.deferred.end_step(
                lambda: Stepped(self, [step.parameter for step in steps if step.is_held and step.may_have_gradient])
            )

    def _make_step(self, group: Options, parameter: Tensor) -> ParameterStep:
        return self.step_type(self, group, parameter)

    def _take(self, steps: Sequence[Any]) -> None:
        """Takes the step of these parameters."""
        # Those that another rank may have a gradient of as well, so that all ranks add up the same. Where a number
        # stands among others decides in which order ranks add it up, and so its last bit.
        steps = sorted((each for each in steps if each.may_have_gradient), key=lambda step: step.key)
        rounds = [(batch, self.equations_of(batch)) for batch in self.batches(steps)]
        terms = _next_terms(steps, rounds)
        self._reduce(terms)
        self._equate(terms, self._counts(steps))
        self._agree(steps)  # replicas too, if they wait for each other in the next exchange
        while terms := _next_terms(steps, rounds):
            self._reduce(terms)
            self._equate(terms)
        raise_fault(steps)  # now that the others do not wait for this rank

    def _reduce(self, terms: Iterable[Term]) -> None:
        all_reduce_terms(terms)

    def _equate(self, terms: Collection[Term], counts: tuple[Tensor, ...] = ()) -> None:
        equate_sums(terms, counts)

    def _counts(self, steps: Sequence[Any]) -> tuple[Tensor, ...]:
        """Returns those numbers of the first exchange that `_agree` reads."""
        return tuple(step.counts for step in steps if step.cuts)

    def _agree(self, steps: Sequence[Any]) -> None:
        """Raises if gradients are absent or refused on some ranks; defers the check if it would wait for a device.

        What one rank refuses reaches those that share a parameter with it. Where meshes overlap, those that share one
        only with these step.
        """
        shared = [step for step in steps if step.cuts]
        if all(is_on_host(step.counts) for step in shared):
            raise_fault(steps)
            refuse_absent([(step.name, step.all_or_none) for step in shared], [step.counts.tolist() for step in shared])
            return
        for device in {step.counts.device for step in shared}:
            here = [step for step in shared if step.counts.device == device]
            check = partial(refuse_absent_late, [(step.name, step.all_or_none) for step in here])
            self.deferred.defer(torch.cat([step.counts for step in here]), check)


def _next_terms(steps: Iterable[Any], rounds: Iterable[tuple[Sequence[Any], Iterator[Any]]]) -> list[Term]:
    """Continues the equations of all batches to their next exchange; returns its terms in the order of the steps."""
    found: dict[Any, Iterable[Term]] = {}
    for batch, equations in rounds:
        found.update(zip(batch, next(equations, ()), strict=False))
    return [term for step in steps for term in found.get(step, ())]


def refuse_capture(
    name: str,
    remedy: str = "capture forward and backward alone, or step with an algorithm of torch's that has capturable=True",
) -> None:
    """Raises where a step would be captured into a graph: its replays would have this step's numbers of the host.

    Raises:
        AlgorithmError: it would be.
    """
    if is_capturing():
        problem = Problem(name, "a step that is captured into a graph", "a step outside of graphs", remedy)
        raise AlgorithmError("replays would repeat the counts and rates that the host has now", [problem])


def numbers_of(steps: Sequence[ParameterStep], count: int, dtype: torch.dtype) -> Tensor:
    """Makes zeros for so many numbers of each of S steps on one device, followed by its `counts`: [S, count + 2]."""
    own = torch.tensor([(0.0,) * count + step.own_counts() for step in steps], dtype=dtype, device="cpu")
    numbers = own.to(steps[0].device, non_blocking=True)
    for step, counts in zip(steps, numbers[:, count:].unbind(), strict=True):
        step.counts = counts
    return numbers


def raise_fault(steps: Iterable[ParameterStep]) -> None:
    """Raises the error of the first gradient that this rank refuses."""
    for step in steps:
        if step.fault is not None:
            raise step.fault


def uncovered(view: View) -> str:
    """Returns why no rank knows the whole of a parameter; "" if its shards say who has the rest."""
    if cover_faults(view.shape, view.layout.boxes):
        return "shards that do not say where the rest of the parameter is"
    return ""


def is_on_host(numbers: Tensor) -> bool:
    """Whether numbers can be read without waiting for a device."""
    return numbers.is_cpu
