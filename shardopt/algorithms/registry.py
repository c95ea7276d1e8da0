"""The specs of optimization algorithms: the state that each keeps for a parameter, and whether it may step on shards.

One frozen `AlgorithmSpec` per class, found by class or by name. It is read where state is made (`initial_state`), where
shards of state are put together again, by tests and by the documentation; no other file lists algorithms.

Another package's class is brought in with a few lines:

    register(AlgorithmSpec(Signum, "signum", elementwise=True, state=(StateEntry("exp_avg", Kind.PARAMETER),)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.errors import AlgorithmError, Problem
from shardopt.runtime.torch_private import step_without_hooks
from shardopt.sharding.pieces import View

GLOBAL_STATE = "__global__"
"""The key in `state` of what belongs to no parameter: one per optimizer, even on a rank without parameters."""

Options = Mapping[str, Any]


class Kind(Enum):
    """The shape and placement of an entry of state, given those of its parameter."""

    PARAMETER = "like-parameter"
    """The shape and placement of the parameter."""
    SCALAR = "scalar"
    """One number for the whole parameter, the same on every rank."""
    ROWS = "rows"
    """The parameter's shape with a last dimension of size 1; placed like the parameter along the others."""
    COLUMNS = "columns"
    """The parameter's shape with a second-to-last dimension of size 1; placed like it along the others."""
    TABLE_ROWS = "rows of a table"
    """One number per index of the first dimension, along which it is placed like the parameter; all others have size
    1.
    """
    ROW_BLOCKS = "blocks of rows"
    """One number per block of elements of a row, [rows, blocks], placed like the parameter along the first
    dimension.
    """
    HISTORY = "history × parameter"
    """A stack of tensors like the parameter along a new first dimension, as many as the option `history_size` says."""
    BLOCKS = "blocks, each whole on one rank"
    """A global shape that follows from the parameter's shape and the options alone.

    Each block is on the rank that computes on it. A plain parameter has a plain tensor.
    """
    GLOBAL = "global"
    """An entry that belongs to no parameter and is the same on every rank; its dtype is a rule of its own."""


class Dtype(Enum):
    """The rule for the dtype of an entry of state."""

    OF_KIND = "COUNTER for Kind.SCALAR, PARAMETER for all others"
    PARAMETER = "the parameter's"
    COUNTER = "float32; float64 where that is torch's default dtype and the step is not fused"
    COUNT = "int64"
    PLAIN_COUNT = "a plain int, which is no tensor"
    AT_LEAST_SINGLE = "float32; float64 of a float64 parameter"
    WIDE = "float64"

    def of(self, parameter: torch.dtype, options: Options) -> torch.dtype:
        """Returns the dtype of the entry for a parameter of dtype `parameter`, in a group with these options."""
        if self is Dtype.AT_LEAST_SINGLE:
            return torch.promote_types(parameter, torch.float32)
        if self is not Dtype.COUNTER:
            fixed = {Dtype.COUNT: torch.int64, Dtype.PLAIN_COUNT: torch.int64, Dtype.WIDE: torch.float64}
            return fixed.get(self, parameter)
        wide = torch.get_default_dtype() == torch.float64 and not options.get("fused")
        return torch.float64 if wide else torch.float32


class StepsOn(Enum):
    """The tensors that an algorithm's optimizer is given, if parameters are sharded."""

    LOCAL_TENSORS = "local tensors"
    """The plain local tensors of the parameters, as for torch's own elementwise optimizers."""
    PARAMETERS = "the parameters themselves"
    """The user's tensors, sharded as they are.

    The class does its own communication, and reads gradients by `local_gradients`. Its `state[parameter]` holds
    finished tensors, whose global shapes do not depend on the number of ranks. It has a method `initial_state`
    (`MakesState`).
    """


class MakesState(Protocol):
    """The protocol of an optimizer that steps on the parameters themselves.

    Args:
        names: parameter → FQN, set by the keyed optimizer; for errors, and for an order of parameters that is the same
            however they are given.
    """

    names: Mapping[Tensor, str]

    def initial_state(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter without state, as its first step would; changes nothing."""


class AtFirstStep(Enum):
    """Initial values that only the first step knows; state made earlier must not fix them."""

    LEARNING_RATE = "the group's lr at the first step"
    GRADIENT = "made from the first gradient; not there before it"
    PARAMETER = "the parameter's value at the first step"


def _always(of: Any) -> bool:
    return True


def _suits(parameter: View) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One named entry in the state of a parameter.

    Args:
        name: key in `optimizer.state[parameter]`.
        kind: its shape and placement.
        dtype: its dtype rule; `Dtype.OF_KIND` becomes the rule that it names.
        initial: the number that every element has before the first step; or the name of the option that holds it (for a
            complex parameter, both parts get it); or what the first step takes it from.
        exists: whether a group with these options has it.
        suits: whether a parameter with that number of dimensions has it.
        signed: whether an element may be negative.
        narrows: whether it may be stored in fewer bits in a group with these options. A mean of parameters may not, nor
            do two means whose difference has to stay positive.
        maximum: whether an element is the largest that there was of something else, and never falls.
    """

    name: str
    kind: Kind
    dtype: Dtype = Dtype.OF_KIND
    initial: float | str | AtFirstStep = 0.0
    exists: Callable[[Options], bool] = _always
    suits: Callable[[int], bool] = _always
    signed: bool = True
    narrows: Callable[[Options], bool] = _always
    maximum: bool = False

    def __post_init__(self) -> None:
        if self.dtype is Dtype.OF_KIND:
            object.__setattr__(self, "dtype", Dtype.COUNTER if self.kind is Kind.SCALAR else Dtype.PARAMETER)

    @property
    def needs_first_step(self) -> bool:
        """Whether the first step makes it, in groups of any options: a counter past that step would leave it unmade."""
        made = isinstance(self.initial, AtFirstStep) or self.kind is Kind.BLOCKS  # roots and bases, of first gradients
        return made and self.exists is _always


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """One algorithm: its class, its name, the state that it keeps, and how it steps on shards.

    Args:
        optimizer: the class that computes it.
        name: `keyed` takes it in place of the class; compared in lower case.
        elementwise: whether each element's update depends on nothing but that element (and scalars that all ranks
            share), so that it may step on shards.
        state: the entries that it keeps for a parameter, in the order in which it is made.
        why_not: where it is not elementwise, why a step on shards would compute something else.
        state_at_construction: whether the class makes all state when it is constructed, not at the first gradient.
        steps_on: the tensors that its optimizer is built over, where parameters are sharded. One that steps on
            parameters is never refused for shards.
        stands_for: a class of torch in whose place it runs, on plain parameters too: with the same options and state.
        unsuitable: why a parameter cannot be optimized with it, in a few words; "" where it can. Called
            where it steps on parameters only.
        takes_sparse: whether it steps with sparse gradients.
        takes_dense: whether it steps with dense gradients.
        fused_agrees: the dtypes in which torch's fused implementation computes what its for-loop computes, up to the
            rounding of the last bits. Measured on the CPU.
        fused_astray: the dtypes in which it computes something else, and is refused.
        needs_closure: whether a step has to evaluate the model again itself, maybe several times.
        later_options: those that it did not always have: what was saved without them goes with their defaults.
        compounds: whether noise in its state adds up, as no gradient brings it back: 8 bits at random are refused.
        tried: whether `keyed` first steps small tensors with a class from outside, and refuses a spec that does not
            fit what it does. False for a class that does otherwise on small tensors, or itself sums over all ranks.
    """

    optimizer: type[Optimizer]
    name: str
    elementwise: bool
    state: tuple[StateEntry, ...] = ()
    why_not: str = ""
    state_at_construction: bool = False
    steps_on: StepsOn = StepsOn.LOCAL_TENSORS
    stands_for: type[Optimizer] | None = None
    unsuitable: Callable[[View], str] = _suits
    takes_sparse: bool = False
    takes_dense: bool = True
    fused_agrees: tuple[torch.dtype, ...] = ()
    fused_astray: tuple[torch.dtype, ...] = ()
    needs_closure: bool = False
    later_options: frozenset[str] = frozenset()
    compounds: bool = False
    tried: bool = True

    @property
    def is_brought_in(self) -> bool:
        """Whether its class is neither torch's nor ours."""
        return self.optimizer.__module__.partition(".")[0] not in ("torch", "shardopt")

    @property
    def settled_at_first_step(self) -> bool:
        """Whether some state gets its initial value only at the first step."""
        return any(isinstance(entry.initial, AtFirstStep) for entry in self.state)

    def entries(self, options: Options, dimensions: int = 2) -> tuple[StateEntry, ...]:
        """Returns the entries of state of a parameter with so many dimensions, in a group with these options."""
        return tuple(
            entry
            for entry in self.state
            if entry.kind is not Kind.GLOBAL and entry.exists(options) and entry.suits(dimensions)
        )

    @property
    def has_global_state(self) -> bool:
        """Whether the algorithm keeps state that belongs to no parameter."""
        return any(entry.kind is Kind.GLOBAL for entry in self.state)


_SPECS: dict[type[Optimizer], AlgorithmSpec] = {}
_VARIANTS: dict[type[Optimizer], AlgorithmSpec] = {}


def register(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Registers an algorithm for this process.

    A class that is defined again, as by a cell of a notebook, takes the place of the earlier one.

    Args:
        spec: its class, name and state, and how it steps; it is returned.

    Raises:
        AlgorithmError: the name is another class's, or the class has another name; or the spec cannot be right.
    """
    problems = _faults(spec)
    if problems:
        raise AlgorithmError("an AlgorithmSpec cannot be right", problems, code="algorithm-spec")
    rivals = [each for each in algorithms() if each != spec and _is_rival(each, spec)]
    for known in rivals:
        if not _is_again(known, spec):
            raise AlgorithmError(
                "an algorithm is registered twice",
                [
                    Problem(
                        key=spec.name,
                        found=f"{spec.optimizer.__qualname__} under the name {spec.name!r}",
                        required=f"another class and name than {known.optimizer.__qualname__}, {known.name!r}",
                        remedy="register a class once, under a name of its own",
                    )
                ],
                code="unknown-algorithm",
            )
    for known in rivals:
        del _SPECS[known.optimizer]
        _VARIANTS[known.optimizer] = known  # optimizers of it may be there
    _SPECS[spec.optimizer] = spec
    if spec.stands_for is not None:
        _SPECS[spec.stands_for] = spec
    return spec


def _is_rival(known: AlgorithmSpec, spec: AlgorithmSpec) -> bool:
    return known.optimizer is spec.optimizer or _plain(known.name) == _plain(spec.name)


def _is_again(known: AlgorithmSpec, spec: AlgorithmSpec) -> bool:
    """Whether a spec is of the same definition from outside, which was run or registered again."""
    where = [(each.optimizer.__module__, each.optimizer.__qualname__, each.name.lower()) for each in (known, spec)]
    return spec.is_brought_in and where[0] == where[1]


def _faults(spec: AlgorithmSpec) -> list[Problem]:
    """Returns what cannot be right in a spec, whatever its class does."""
    if not (isinstance(spec.optimizer, type) and issubclass(spec.optimizer, Optimizer)):
        remedy = "give the class itself, not its name or an instance"
        return [Problem(str(spec.name), repr(spec.optimizer), "a subclass of torch.optim.Optimizer", remedy)]
    key = f"{spec.name}.state"
    strangers = [each for each in spec.state if not isinstance(each, StateEntry)]
    if strangers:
        remedy = f"write StateEntry({str(strangers[0])!r}, Kind.PARAMETER)"
        return [Problem(key, repr(strangers[0]), "a tuple of StateEntry", remedy)]
    problems = []
    names = [entry.name for entry in spec.state]
    if len(set(names)) < len(names):
        problems.append(Problem(key, ", ".join(names), "each name once", "merge the entries of one name"))
    if spec.elementwise and spec.steps_on is StepsOn.LOCAL_TENSORS:
        problems += [
            Problem(
                f"{key}.{entry.name}",
                f"Kind.{entry.kind.name} in an elementwise algorithm",
                "Kind.PARAMETER or Kind.SCALAR",
                "let it step on parameters (elementwise=False, steps_on=StepsOn.PARAMETERS), and communicate",
            )
            for entry in spec.state
            if entry.kind not in (Kind.PARAMETER, Kind.SCALAR)
        ]
    if spec.steps_on is StepsOn.PARAMETERS and not hasattr(spec.optimizer, "initial_state"):
        found = f"{spec.optimizer.__name__} without a method initial_state"
        required = "one that makes the state of a parameter"
        problems.append(Problem(spec.name, found, required, "derive it from CommunicatingOptimizer, which has it"))
    return problems


def register_variant(spec: AlgorithmSpec) -> None:
    """Registers the class that computes an algorithm in another way, selected by options of its own.

    It is found by its class, and not by a name: that is the algorithm's.
    """
    _VARIANTS[spec.optimizer] = spec


def algorithms() -> tuple[AlgorithmSpec, ...]:
    """Returns the specs of all registered algorithms, by name."""
    return tuple(sorted(dict.fromkeys(_SPECS.values()), key=lambda spec: spec.name))


def find_spec(optimizer: type[Optimizer], may_override: bool = False) -> AlgorithmSpec | None:
    """Finds the spec of a class, or of the registered base whose `step` it inherits; None if neither exists.

    Args:
        may_override: whether the class may have a `step` of its own, with the state of its base.
    """
    for base in optimizer.__mro__:
        spec = _SPECS.get(base) or _VARIANTS.get(base)
        if spec is not None:
            same = may_override or step_without_hooks(optimizer) is step_without_hooks(base)
            return spec if same else None
    return None


def spec_of(algorithm: type[Optimizer] | str) -> AlgorithmSpec:
    """Returns the spec of a class or a name.

    Args:
        algorithm: a class, also one that inherits its `step` from one that is registered; or a name, in any case, with
            or without underscores.

    Raises:
        AlgorithmError: it is not registered; the error lists the names that are.
    """
    if isinstance(algorithm, str):
        spec = next((spec for spec in _SPECS.values() if _plain(spec.name) == _plain(algorithm)), None)
    else:
        spec = find_spec(algorithm) if isinstance(algorithm, type) else None
    if spec is None:
        raise AlgorithmError("an optimizer is not known here", [unknown(algorithm)], code="unknown-algorithm")
    return spec


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def unknown(algorithm: type[Optimizer] | str) -> Problem:
    """Describes an unregistered algorithm, as a problem."""
    remedy = "declare the state that it keeps with shardopt.algorithms.register(AlgorithmSpec(...))"
    found = "an algorithm that is not registered (a subclass that overrides step counts as another algorithm)"
    if isinstance(algorithm, str):
        near = get_close_matches(algorithm.lower(), [spec.name.lower() for spec in algorithms()], n=1, cutoff=0.7)
        meant = f"did you mean {near[0]!r}? Otherwise " if near else ""
        found = "a name that is not registered"
        remedy = f"{meant}import the module that registers it, or {remedy}"
    key = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__qualname__", repr(algorithm))
    if isinstance(algorithm, type) and any(spec.name == key for spec in algorithms()):
        remedy = f"use the registered {key}, by that name, or {remedy}"
        key = f"{algorithm.__module__}.{key}"
    elif str(getattr(algorithm, "__module__", "")).startswith(("torchao.", "bitsandbytes.")):
        remedy = f"for state in 8 bits pass shardopt.keyed(name, ..., state_dtype=torch.uint8), or {remedy}"
    return Problem(
        key=key,
        found=found,
        required="one of " + ", ".join(spec.name for spec in algorithms()),
        remedy=remedy,
    )
