"""The optimizer that runs an elementwise algorithm on state, and parameters, stored in fewer bits."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.communicating import refuse_capture
from shardopt.algorithms.initial_state import is_initial
from shardopt.algorithms.lists import batched
from shardopt.algorithms.low_precision.chunks import blocks_of_row
from shardopt.algorithms.low_precision.codes import code_of_one
from shardopt.algorithms.low_precision.inner import InnerSteps
from shardopt.algorithms.low_precision.options import (
    MASTER,
    STEP,
    as_texts,
    form_of,
    refuse_algorithm,
    refuse_bad_values,
    unfit,
    warn_of_lost_changes,
)
from shardopt.algorithms.low_precision.work import LowPrecisionStep, walk
from shardopt.algorithms.reductions import Term, all_reduce_terms
from shardopt.algorithms.registry import (
    AlgorithmSpec,
    AtFirstStep,
    Dtype,
    Kind,
    Options,
    StateEntry,
    StepsOn,
    find_spec,
    register_variant,
)
from shardopt.algorithms.shared_rows import RowSharingOptimizer, cuts_of_rows
from shardopt.errors import AlgorithmError, Problem
from shardopt.ranks import Ranks
from shardopt.runtime.signatures import signature
from shardopt.sharding.masters import note_masters
from shardopt.sharding.reduced import blocks_like
from shardopt.sharding.view import assemble, local_tensors, tells_of_others, view_of
from shardopt.state.param_groups import STORAGE_OPTIONS


class _Variant(type):
    """The metaclass of the classes here."""


class LowPrecisionOptimizer(RowSharingOptimizer, metaclass=_Variant):
    """The base of the classes that `low_precision` makes, one for each algorithm.

    State of a parameter: the algorithm's own entries, those like the parameter in `state_dtype`; "<entry>_scale", fp32
    [rows, blocks of a row], for each that is codes; "master", fp32 like the parameter, where it has one; and "step",
    a number, where the algorithm keeps none. A parameter whose step is 0 never had one: its first makes state again.

    Args:
        params: plain or sharded, or groups of them.
        options: of the algorithm, and those of `STORAGE_OPTIONS`.

    Raises:
        AlgorithmError: an option is none that there is, or goes with none of those.
    """

    algorithm: ClassVar[AlgorithmSpec]
    _inner: InnerSteps | None = None

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        options = {**STORAGE_OPTIONS, **as_texts(options)}
        self._inner = InnerSteps(self.algorithm, options)
        super().__init__(params, {**self._inner.defaults, **{name: options[name] for name in STORAGE_OPTIONS}})
        note_masters(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does."""
        group = as_texts(param_group)
        refuse_bad_values({**self.defaults, **group}, self.algorithm)
        super().add_param_group(group)
        warn_of_lost_changes(self.algorithm, self.param_groups[-1])

    def step_alone(self, group: Options, parameter: Tensor) -> None:
        """Takes one step on a single parameter that needs nothing from other ranks."""
        refuse_capture(type(self).__name__)
        with torch.no_grad():
            self._take([self._make_step(group, parameter)])

    def initial_state(self, group: Options, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter without state; changes nothing."""
        view = view_of(parameter)
        form, initial = form_of(self.algorithm, group, view.shape, view.dtype), self.inner.initial(group)
        made = {entry.name: initial[entry.name] for entry in self.algorithm.entries(group) if entry.name in initial}
        at_first = {entry.name for entry in self.algorithm.state if isinstance(entry.initial, AtFirstStep)}
        state = {STEP: torch.zeros((), dtype=torch.float32, device="cpu"), **made}
        for entry in form.entries:
            value = 0.0 if entry.name in at_first else float(made[entry.name])
            if entry.coded:
                scales = blocks_like(parameter, blocks_of_row(view.shape), torch.float32)
                for local in local_tensors(scales):
                    local.fill_(abs(value))
                state[entry.scale_name] = scales
                value = 0 if value == 0 else code_of_one(entry.signed)
            tensors = [torch.full_like(local, value, dtype=entry.dtype) for local in local_tensors(parameter)]
            state[entry.name] = assemble(parameter, tensors)
        if form.master:
            masters = [local.detach().to(torch.float32) for local in local_tensors(parameter)]
            state[MASTER] = assemble(parameter, masters)
        return state

    def refuse_parameters(self, group: Options, names: Mapping[Tensor, str]) -> None:
        """Raises AlgorithmError if a parameter cannot be stored as its group says."""
        refuse_bad_values(group, self.algorithm)
        problems: list[Problem] = []
        for parameter, name in names.items():
            view = view_of(parameter, name)
            problems += unfit(name, group, view.dtype)
            coded = not problems and form_of(self.algorithm, group, view.shape, view.dtype).coded
            if coded and not tells_of_others(parameter):
                found = f"a {type(parameter).__name__}, which does not say who has the rest of its rows"
                remedy = 'give it to a group with state_dtype="bfloat16" or None'
                problems.append(Problem(f"{name}: state_dtype", found, "a DTensor, or ShardedTensor", remedy))
        if problems:
            raise AlgorithmError(
                f"{self.algorithm.name} cannot store these parameters or their state in fewer bits",
                problems,
                code="low-precision",
            )

    def waits_for_others(self, group: Options, parameter: Tensor) -> bool:
        """Whether a step of the parameter needs numbers of other ranks."""
        view = view_of(parameter)
        return form_of(self.algorithm, group, view.shape, view.dtype).coded and bool(cuts_of_rows(parameter))

    @torch.no_grad()
    def state_loaded(self, parameter: Tensor, loaded: Collection[str]) -> None:
        """Sets a parameter from its master after a load, or the master from the parameter, if it was ever stepped.

        Args:
            parameter: has state.
            loaded: the entries that were loaded. A counter without its master makes another one stale.
        """
        state = self.state.get(parameter, {})
        if MASTER in state and state[STEP] > 0:
            for local, master in zip(local_tensors(parameter), local_tensors(state[MASTER]), strict=True):
                if MASTER in loaded:
                    local.copy_(master)
                elif STEP in loaded:
                    master.copy_(local)

    def masters(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields each parameter that has a master, with this and the number of its steps."""
        for parameter, state in self.state.items():
            if MASTER in state and STEP in state:
                yield parameter, state[MASTER], state[STEP]

    def is_unstepped(self, group: Options, parameter: Tensor) -> bool:
        """Whether the parameter was never stepped, and its state is still initial.

        Not compared is the master: the first step makes it of what the parameter is then.
        """
        state = self.state.get(parameter, {})
        if not state or state[STEP] > 0:
            return False
        fresh = self.initial_state(group, parameter)
        return is_initial(*({name: each[name] for name in each if name != MASTER} for each in (state, fresh)))

    @property
    def inner(self) -> InnerSteps:
        """The optimizer of the algorithm's own class; a copy makes it again."""
        if self._inner is None:
            self._inner = InnerSteps(self.algorithm, self.defaults)
        return self._inner

    def _make_step(self, group: Options, parameter: Tensor) -> LowPrecisionStep:
        return LowPrecisionStep(self, self.inner, group, parameter)

    def _take(self, steps: Sequence[LowPrecisionStep]) -> None:
        super()._take(steps)
        for step in steps:
            step.group.update(step.changed)

    def batches(self, steps: Sequence[LowPrecisionStep]) -> Iterable[Sequence[LowPrecisionStep]]:
        """Returns steps that are alike together."""
        return batched(steps, LowPrecisionStep.alike)

    def equations_of(self, steps: Sequence[LowPrecisionStep]) -> Iterator[Iterable[Iterable[Term]]]:
        """One exchange, where ranks share rows of codes: the largest values in their blocks."""
        if steps[0].shared is not None and not steps[0].shared.refuses:
            for step in steps:
                step.flag()
            if steps[0].is_held:  # without a gradient, for the case that others have one: it is then zero here
                walk(steps, store=False)
        yield [() if step.shared is None else step.shared.terms() for step in steps]
        due = [step for step in steps if step.is_due()]
        for step in due:
            if not step.state:
                self.state[step.parameter] = step.working
        if due:
            walk(due, store=True)

    def _reduce(self, terms: Iterable[Term]) -> None:
        all_reduce_terms(terms, Ranks.all_reduce_max)

    def _equate(self, terms: Collection[Term], counts: tuple[Tensor, ...] = ()) -> None:
        """Does nothing: the largest number is the same in any order."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "names": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        note_masters(self)


@lru_cache
def low_precision(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Returns the variant of an algorithm that takes the options of `STORAGE_OPTIONS`, under the algorithm's name.

    Raises:
        AlgorithmError: the algorithm is not elementwise.
    """
    refuse_algorithm(spec)
    arguments = signature(spec.optimizer)
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in STORAGE_OPTIONS.items()
    ]
    given = list(arguments.parameters.values())
    keywords = [each for each in given if each.kind is inspect.Parameter.VAR_KEYWORD]
    taken = arguments.replace(parameters=[*(each for each in given if each not in keywords), *own, *keywords])
    members = {"algorithm": spec, "__signature__": taken, "__module__": __name__, "__doc__": spec.optimizer.__doc__}
    made: Any = _Variant(spec.optimizer.__name__, (LowPrecisionOptimizer,), members)
    step = () if any(entry.name == STEP for entry in spec.state) else (_counter(),)
    scales = tuple(
        StateEntry(f"{entry.name}_scale", Kind.ROW_BLOCKS, Dtype.AT_LEAST_SINGLE)
        for entry in spec.state
        if entry.kind is Kind.PARAMETER
    )
    master = StateEntry(MASTER, Kind.PARAMETER, Dtype.AT_LEAST_SINGLE)
    entries = tuple(_settled(entry) for entry in spec.state)
    variant = AlgorithmSpec(
        made,
        spec.name,
        elementwise=False,
        state=(*step, *entries, *scales, master),
        why_not="where ranks share rows of codes, they find the scales of these together",
        steps_on=StepsOn.PARAMETERS,
    )
    register_variant(variant)
    return variant


def _counter() -> StateEntry:
    return StateEntry(STEP, Kind.SCALAR, Dtype.COUNTER)


def _settled(entry: StateEntry) -> StateEntry:
    """Returns the entry with initial value 0 in place of one that only the first step knows."""
    if not isinstance(entry.initial, AtFirstStep):
        return entry
    return replace(entry, initial=0.0)


def _variant_of(optimizer: type[Optimizer]) -> type[Optimizer]:
    spec = find_spec(optimizer)
    assert spec is not None
    return low_precision(spec).optimizer


def _pickled(made: type[LowPrecisionOptimizer]) -> Any:
    return made.__qualname__ if made is LowPrecisionOptimizer else (_variant_of, (made.algorithm.optimizer,))


# The classes that `low_precision` makes stand in no module, and are found by what they were made of.
copyreg.pickle(_Variant, _pickled)  # type: ignore[arg-type]  # typeshed has a constructor of instances in mind
