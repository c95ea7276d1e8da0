"""Tries a class from outside on small tensors, and compares what it does with its spec.

A wrong spec would show late: state that no checkpoint has, state of a dtype in which nothing loads, or parameters that
differ with the number of ranks. Three steps of a matrix show it at once:

- its state has the entries of the spec, with their shapes and dtypes;
- state that is made early, as the spec says, leads to the same numbers as the state that the class makes;
- rows and columns by themselves get the same numbers as within the matrix, if the spec says that the algorithm is
  elementwise;
- for steps in backward: parameters that step one after the other get the same numbers as in one step.

Steps that draw random numbers cannot be compared. A step that raises is left to the real one, which raises again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.initial_state import initial_state, made_of
from shardopt.algorithms.registry import AlgorithmSpec, Kind, StateEntry, StepsOn
from shardopt.errors import AlgorithmError, Problem
from shardopt.runtime.torch_private import step_without_hooks
from shardopt.sharding.gradients import is_added_up
from shardopt.sharding.view import view_of

_STEPS = 3
_SCALES = (0.01, 1.0, 10.0, 0.1)  # of rows, whose norms then differ from those of the whole
_COLUMNS = 3
_MADE_ALIKE = (Kind.SCALAR, Kind.PARAMETER, Kind.ROWS, Kind.COLUMNS, Kind.TABLE_ROWS)  # by `made_of`

Make = Callable[[list[Tensor]], Optimizer]


def refuse_contradicted(
    spec: AlgorithmSpec,
    optimizer: type[Optimizer],
    options: Mapping[str, Any],
    parameters: Iterable[Tensor],
    in_backward: bool = False,
) -> None:
    """Raises where a class from outside does not do what its spec says. Local; leaves random states as they are.

    Args:
        spec: of the class, or of the base whose step it inherits.
        optimizer: the class.
        options: arguments of its constructor.
        parameters: that it is to step, of any kind: only their dtypes are looked at.
        in_backward: whether each of them is to step by itself.

    Raises:
        AlgorithmError: the steps contradict the spec, or parameters cannot step by themselves.
    """
    untried = not spec.tried or not spec.takes_dense or spec.needs_closure
    if untried or not spec.is_brought_in or spec.steps_on is StepsOn.PARAMETERS:
        return

    def make(tensors: list[Tensor]) -> Optimizer:
        return optimizer(tensors, **deepcopy(dict(options)))

    dtypes = {view_of(parameter).dtype for parameter in parameters if is_added_up(parameter)}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        problems = {problem.key: problem for problem in _not_to_be_made(spec, make)}
        for dtype in sorted(dtypes, key=str) if not problems else ():
            problems |= {problem.key: problem for problem in _tried(_contradictions, spec, make, dtype)}
        if spec.elementwise and not problems:
            problems = {problem.key: problem for problem in _tried(_parts_differ, spec, make, torch.float64)}
        if in_backward and not problems:
            alone = _tried(_parameters_differ, spec, make, torch.float64)
            if alone:
                raise AlgorithmError(f"{spec.name} may not step in backward", alone, code="step-in-backward")
    if problems:
        raise AlgorithmError(
            f"{optimizer.__name__} does not do what its AlgorithmSpec says",
            list(problems.values()),
            code="algorithm-spec",
        )


def _tried(find: Callable[..., list[Problem]], *arguments: Any) -> list[Problem]:
    """Returns what `find` finds; nothing if code from outside raises, which the user's own step will do again."""
    try:
        return find(*arguments)
    except Exception:
        return []


def _not_to_be_made(spec: AlgorithmSpec, make: Make) -> list[Problem]:
    """Returns entries whose `exists` or `initial` raises: else the first load into a new optimizer would."""
    parameter, _ = _example(torch.float32)
    try:
        group = make([parameter]).param_groups[0]
    except Exception:  # the user's own call raises it again
        return []
    problems = []
    for entry in spec.state:
        if entry.kind not in _MADE_ALIKE:
            continue
        try:
            if entry.exists(group) and entry.suits(parameter.ndim):
                made_of(entry, group, parameter)
        except Exception as error:
            options = ", ".join(name for name in group if name != "params")
            problems.append(
                Problem(
                    f"{spec.name}.state.{entry.name}",
                    f"{type(error).__name__}: {error} from its initial= or exists=",
                    "ones that go with the options of a group",
                    f"name one of {options}",
                )
            )
    return problems


def _contradictions(spec: AlgorithmSpec, make: Make, dtype: torch.dtype) -> list[Problem]:
    """Returns where state is not as the spec says, after steps in one dtype."""
    parameter, gradients = _example(dtype)
    optimizer = _stepped(make, parameter, gradients)
    state, group = optimizer.state[parameter], optimizer.param_groups[0]
    entries = {entry.name: entry for entry in spec.entries(group)}
    problems = [
        Problem(
            f"{spec.name}.state.{name}",
            "state that the spec does not name",
            "an entry of the spec for each name in optimizer.state[parameter]",
            _entry_for(name, value, parameter),
        )
        for name, value in state.items()
        if name not in entries
    ]
    for name, entry in entries.items():
        problems += _misfit(f"{spec.name}.state.{name}", entry, state, made_of(entry, group, parameter))
    return problems or _early_differs(spec, make, dtype, parameter)


def _misfit(key: str, entry: StateEntry, state: Mapping[str, Any], made: Any) -> list[Problem]:
    """Compares an entry that a class has made with the one that the spec would make."""
    if entry.name not in state:
        remedy = "take it out of the spec, or give it exists=… if it depends on options"
        return [Problem(key, f"nothing after {_STEPS} steps", "the state that the spec names", remedy)]
    found, required = _described(state[entry.name]), _described(made)
    if found == required:
        return []
    how = _kind_of(state[entry.name], made)
    return [Problem(key, found, f"{required}, by Kind.{entry.kind.name} and Dtype.{entry.dtype.name}", how)]


def _kind_of(found: Any, made: Any) -> str:
    if not isinstance(found, Tensor):
        return "make a tensor of it in the class, or give the entry Dtype.PLAIN_COUNT if it is an int"
    if isinstance(made, Tensor) and found.shape == made.shape:
        return "make it in that dtype in the class, or give the entry another Dtype"
    return "make it in that shape in the class, or give the entry another Kind"


def _entry_for(name: str, value: Any, parameter: Tensor) -> str:
    """Returns the remedy for state without an entry: the entry that it seems to want."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return f"add StateEntry({name!r}, Kind.PARAMETER)"
    if isinstance(value, Tensor) and value.ndim == 0:
        return f"add StateEntry({name!r}, Kind.SCALAR)"
    if isinstance(value, int):
        return f"add StateEntry({name!r}, Kind.SCALAR, Dtype.PLAIN_COUNT)"
    return "keep it outside of optimizer.state if it need not be saved"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {list(value.shape)}"
    return f"a plain {type(value).__name__}"


def _early_differs(spec: AlgorithmSpec, make: Make, dtype: torch.dtype, stepped: Tensor) -> list[Problem]:
    """Compares with steps on state that was made early, as by `init_state` and a load."""
    if spec.settled_at_first_step:  # then a step makes the state again
        return []
    parameter, gradients = _example(dtype)
    key, required = f"{spec.name}.state", "the numbers of a run whose state the class makes"
    try:
        _stepped(make, parameter, gradients, spec)
    except Exception as error:
        found = f"{type(error).__name__}: {error}, in a step on state that was made as the spec says"
        return [Problem(key, found, required, "let the class take state that is there already, whole")]
    if torch.equal(parameter, stepped) or _draws(make, dtype):
        return []
    found = "other numbers from state that was made as the spec says"
    remedy = "give entries the first values of the class (initial=…); count steps to know the first one"
    return [Problem(key, found, required, remedy)]


def _parts_differ(spec: AlgorithmSpec, make: Make, dtype: torch.dtype) -> list[Problem]:
    """Compares the steps of a matrix with those of its rows and of its columns, each by itself."""
    whole, gradients = _example(dtype)
    parts = [[part.clone() for part in torch.split(whole, 1, dim)] for dim in range(whole.ndim)]
    _stepped(make, whole, gradients)
    for dim, of_dim in enumerate(parts):
        for number, part in enumerate(of_dim):
            _stepped(make, part, [gradient.narrow(dim, number, 1).clone() for gradient in gradients])
    joined = [torch.cat(of_dim, dim) for dim, of_dim in enumerate(parts)]
    differ = [not torch.allclose(each, whole, rtol=1e-9, atol=1e-12) for each in joined]
    if not any(differ) or _draws(make, dtype):
        return []
    return [
        Problem(
            f"{spec.name}.elementwise",
            f"other numbers for a {'row' if differ[0] else 'column'} by itself than within the whole parameter",
            "elementwise=True only for updates that take nothing from other elements, such as a norm or a mean",
            "derive the class from CommunicatingOptimizer, or register it with elementwise=False for plain parameters; "
            "tried=False in the AlgorithmSpec is for a class that itself sums over all ranks",
        )
    ]


def _parameters_differ(spec: AlgorithmSpec, make: Make, dtype: torch.dtype) -> list[Problem]:
    """Compares the steps of two parameters of a group with those of one after the other, as backward takes them."""
    ends = []
    for alone in (False, True):
        parameter, gradients = _example(dtype)
        both = [parameter.requires_grad_(), parameter.detach().mul(2).requires_grad_()]
        optimizer = make(both)
        (group,) = optimizer.param_groups
        for gradient in gradients:
            for each in both:
                each.grad = gradient.clone()
            for group["params"] in [[each] for each in both] if alone else [both]:
                step_without_hooks(type(optimizer))(optimizer)
        ends.append(torch.cat(both))
    if torch.allclose(ends[0], ends[1], rtol=1e-9, atol=1e-12) or _draws(make, dtype):
        return []
    return [
        Problem(
            "algorithm",
            f"{spec.name}, whose parameters get other numbers where they step one after the other",
            "an algorithm that needs nothing but the gradient of the element that it updates",
            "count steps in the state of each parameter, not in its group; or step after backward, with shardopt.keyed",
        )
    ]


def _draws(make: Make, dtype: torch.dtype) -> bool:
    """Whether two runs differ by themselves, as the class draws random numbers."""
    (one, gradients), (other, _) = _example(dtype), _example(dtype)
    _stepped(make, one, gradients)
    _stepped(make, other, gradients)
    return not torch.equal(one, other)


def _example(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Returns a matrix with its gradients, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(_SCALES, dtype=torch.float64, device="cpu").unsqueeze(1)
    shape = (1 + _STEPS, len(_SCALES), _COLUMNS)
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scales
    parameter, *gradients = values.to(dtype).unbind()
    return parameter.clone(), [gradient.clone() for gradient in gradients]


def _stepped(
    make: Make, parameter: Tensor, gradients: Sequence[Tensor], early: AlgorithmSpec | None = None
) -> Optimizer:
    """Takes steps on a parameter in place; `early`: on state that was made as this spec says."""
    optimizer = make([parameter.requires_grad_()])
    if early is not None:
        optimizer.state[parameter] = initial_state(early, optimizer, optimizer.param_groups[0], parameter)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step_without_hooks(type(optimizer))(optimizer)
    return optimizer
