"""A keyed optimizer by position, like torch's own: for functions that map positions to names themselves.

    {"state": {0: {name: value}, 1: {...}}, "param_groups": [{"params": [0, 1], option: value, ...}]}

Positions count the parameters of `param_groups`, one group after the other. State that belongs to no parameter (of a
warm-up, of L-BFGS) rides with that of the first trained one, as a dict under the name that it has; what is neither a
tensor, a number nor a dict in it goes as the bytes of its typed JSON, because torch flattens nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.errors import MismatchError, Problem, StateError
from shardopt.optim.core.node import Node, StateDict
from shardopt.optim.gradients.scaler import refuse_torchs_scaler
from shardopt.optim.state_dict.groups import first_names
from shardopt.optim.state_dict.options import as_number
from shardopt.runtime.deferred_checks import taking_state
from shardopt.runtime.partial_loads import loading_alone
from shardopt.runtime.torch_private import (
    after_load_state_dict,
    after_state_dict,
    before_load_state_dict,
    before_state_dict,
    take_torchs_attributes,
    without_hooks,
)
from shardopt.sharding.view import local_tensors
from shardopt.state.param_groups import PARAMS, UNTOUCHED
from shardopt.state.paths import PARAM_GROUPS, STATE
from shardopt.state.values import decode_value, encode_value

_REMEDY = "load what as_torch() of an optimizer with the same groups gave, or torch's getters with it"


class ByPosition(Optimizer):
    """A view of a keyed optimizer whose `state_dict` goes by position; `KeyedOptimizer.as_torch` makes it.

    Parameters, state and groups are the keyed optimizer's, live; steps, hooks of steps and `zero_grad` are passed on to
    it. State is made as by `init_state` where a function asks whether there is any, so that none has to take a step to
    make some.

    Args:
        optimizer: is viewed, and kept alive.
    """

    def __init__(self, optimizer: Node) -> None:
        take_torchs_attributes(self)
        self._optimizer = optimizer

    @property
    def viewed(self) -> Node:
        """The keyed optimizer."""
        return self._optimizer

    @property
    def state(self) -> Any:
        """The live state of each parameter."""
        return _MadeState(self)

    @state.setter
    def state(self, state: Any) -> None:
        raise self._refused("state")

    @property
    def param_groups(self) -> Any:
        """The keyed optimizer's own groups."""
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        raise self._refused("param_groups")

    @property
    def defaults(self) -> dict[str, Any]:
        """The keyed optimizer's defaults."""
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        raise self._refused("defaults")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the keyed optimizer, which needs names: `{"params": {fqn: parameter}, ...}`."""
        self._optimizer.add_param_group(param_group)

    @without_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step of the keyed optimizer, whose hooks run; returns the closure's loss."""
        return self._optimizer.step(closure)

    def train(self, mode: bool = True) -> None:
        """Calls the keyed optimizer's `train`."""
        self._optimizer.train(mode)

    def eval(self) -> None:
        """Calls the keyed optimizer's `eval`."""
        self._optimizer.eval()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes the gradients of the keyed optimizer."""
        self._optimizer.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Registers a hook with the keyed optimizer, which passes itself to it."""
        return self._optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Registers a hook with the keyed optimizer, which passes itself to it."""
        return self._optimizer.register_step_post_hook(hook)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answers torch's GradScaler, which asks this before it steps an optimizer."""
        refuse_torchs_scaler(self.param_groups)
        return False

    def init_state(self) -> None:
        """Makes the state of every trained parameter without state; see `KeyedOptimizer.init_state`."""
        self._optimizer.init_state()

    def state_dict(self) -> StateDict:
        """Returns the state by position, `{"state": {position: {name: value}}, "param_groups": [...]}`.

        A group is `{"params": [positions], option: value, ...}`.

        The tensors are the optimizer's own. Groups have every option of the live ones, those that say how to compute
        among them, as torch's have; a tensor of one element is a number. Local to the rank. Hooks of the keyed
        optimizer's `state_dict` run, then those that are registered here.

        Raises:
            StateError: there is state of no parameter, and no parameter is trained.
        """
        before_state_dict(self)
        position = {parameter: i for i, parameter in enumerate(self._parameters())}
        groups = [
            {
                PARAMS: [position[parameter] for parameter in group[PARAMS]],
                **{name: as_number(value) for name, value in group.items() if name != PARAMS},
            }
            for group in self.param_groups
        ]
        named = self._optimizer.state_dict()[STATE]
        state = {position[parameter]: entries for parameter, entries in self._by_parameter(named).items()}
        return after_state_dict(self, {STATE: state, PARAM_GROUPS: groups})

    @taking_state()  # that is to be replaced: its checks are dropped
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads in place and all or nothing, as `KeyedOptimizer.load_state_dict` does. Local to the rank.

        As with torch's optimizers, parameters are matched by their order in the groups, whatever keys stand for them,
        and the state that is given replaces what is there: a parameter without any has none afterwards, and one that
        has none yet gets it.

        Raises:
            MismatchError: groups of other numbers of parameters, or state or options that do not fit; nothing was
                changed.
        """
        offered = before_load_state_dict(self, state_dict)
        named = self._named(offered)
        optimizer = self._optimizer
        live = self._live()
        of_parameters = set(first_names(optimizer.params).values())
        state = named[STATE]
        absent = [name for name, entries in live.items() if name not in state and name in of_parameters and entries]
        new = [name for name, entries in state.items() if entries and not live.get(name)]
        optimizer._init_named((), [name for name in new if name in of_parameters])
        before = [(leaf, leaf._saves_groups) for leaf in optimizer._leaves()]
        try:
            unstepped = self._unstepped(state)
            for group in named[PARAM_GROUPS]:
                group[UNTOUCHED] = [name for name in group[PARAMS] if name in unstepped]
            for leaf, _ in before:
                leaf.save_param_groups(True)
            optimizer.load_state_dict({**named, STATE: {**{name: live[name] for name in absent}, **state}})
        except BaseException:
            optimizer.drop_state([name for name in new if name in of_parameters])
            raise
        finally:
            for leaf, saves in before:
                leaf.save_param_groups(saves)
        with loading_alone(optimizer):  # of which this is the end
            optimizer.drop_state(absent)
            after_load_state_dict(self)

    def __repr__(self) -> str:
        return f"{self._optimizer!r} by position"

    def __reduce__(self) -> Any:
        return type(self), (self._optimizer,)

    def _refused(self, name: str) -> StateError:
        problem = Problem(name, f"another {name}", "the keyed optimizer's own", "set it there")
        return StateError("a view has nothing of its own to replace", [problem], code="by-position")

    def _parameters(self) -> list[Tensor]:
        """Returns the parameters of all groups in order."""
        return list(chain.from_iterable(group[PARAMS] for group in self.param_groups))

    def _carrier(self) -> Tensor | None:
        """Returns the parameter whose state also carries the state of no parameter."""
        return next((parameter for parameter in self._parameters() if parameter.requires_grad), None)

    def by_parameter(self) -> dict[Tensor, dict[str, Any]]:
        """Returns parameter → its state, for those with state."""
        return self._by_parameter(self._live())

    def _live(self) -> StateDict:
        """Returns the state by name, without the keyed optimizer's own hooks."""
        state: StateDict = self._optimizer._gather()[STATE]
        return state

    def _by_parameter(self, named: StateDict) -> dict[Tensor, dict[str, Any]]:
        """Returns state by parameter, for those with state, and removes it from `named`."""
        names = first_names(self._optimizer.params)
        state = {parameter: dict(named.pop(name)) for parameter, name in names.items() if name in named}
        state = {parameter: entries for parameter, entries in state.items() if entries}
        if named:
            carrier = self._carrier()
            if carrier is None:
                found, required = "state of no parameter, and no trained one", "a parameter that it can go with"
                problems = [Problem(name, found, required, "save it through shardopt.checkpoint") for name in named]
                raise StateError("state cannot be given by position", problems, code="by-position")
            state.setdefault(carrier, {}).update({name: _to_torch(entries, name) for name, entries in named.items()})
        return state

    def _named(self, offered: Mapping[str, Any]) -> StateDict:
        """Returns state that is offered by position, or under other names, in a keyed optimizer's form.

        Raises:
            MismatchError: it does not have the groups that are here.
        """
        here, given = self.param_groups, offered.get(PARAM_GROUPS)
        problems = _different_groups(here, given)
        given = [] if problems else cast("list[Mapping[str, Any]]", given)
        name_of = first_names(self._optimizer.params)
        names = [name_of[parameter] for parameter in self._parameters()]
        keys = list(chain.from_iterable(group[PARAMS] for group in given))
        name_here = dict(zip(keys, names, strict=False))
        state = offered.get(STATE)
        if not isinstance(state, Mapping):
            problems.append(Problem(STATE, f"a {type(state).__name__}", "a mapping by parameter", _REMEDY))
            state = {}
        problems += [
            Problem(f"{STATE}.{key}", "state", "that of a parameter in param_groups", _REMEDY)
            for key in state
            if key not in name_here and not problems
        ]
        if problems:
            raise MismatchError(
                "the state does not fit this optimizer; nothing was changed", problems, code="by-position"
            )
        named = {name_here[key]: dict(entries) for key, entries in state.items()}
        own = {name: entries for name, entries in self._live().items() if name not in names}
        carrier = self._carrier()
        carried = named.get(name_of[carrier], {}) if carrier is not None else {}
        of_none = {name: _from_torch(carried.pop(name), entries) for name, entries in own.items() if name in carried}
        groups = []
        for group in given:
            options = {option: value for option, value in group.items() if option not in (PARAMS, "param_names")}
            groups.append({PARAMS: [name_here[key] for key in group[PARAMS]], **options})
        return {STATE: named | of_none, PARAM_GROUPS: groups}

    def _unstepped(self, state: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """Returns the names whose state was never stepped, and is offered as the very memory of this optimizer.

        A load of what a getter gave is then none: the first step settles what it would have settled before.
        """

        def places(entries: Mapping[str, Any]) -> Any:
            return {
                name: [local.data_ptr() for local in local_tensors(value)] if isinstance(value, Tensor) else value
                for name, value in entries.items()
            }

        unstepped = self._optimizer.unstepped_state(state)
        live = self._live() if unstepped else {}
        return {name for name in unstepped if places(state[name]) == places(live[name])}


class _MadeState(MutableMapping[Tensor, Any]):
    """Parameter → its live state, with the state of no parameter in that of the first trained one."""

    def __init__(self, view: ByPosition) -> None:
        self._view = view

    def __bool__(self) -> bool:
        # torch's getters and setters ask for this, and where there is none take a step with gradients of zeros.
        self._view.init_state()
        return True

    def __getitem__(self, parameter: Tensor) -> Any:
        if parameter is self._view._carrier():
            return self._view.by_parameter().get(parameter, {})
        return self._view._optimizer.state[parameter]

    def __setitem__(self, parameter: Tensor, entries: Any) -> None:
        self._view._optimizer.state[parameter] = entries

    def __delitem__(self, parameter: Tensor) -> None:
        del self._view._optimizer.state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._view.by_parameter())

    def __len__(self) -> int:
        return len(self._view.by_parameter())


def _different_groups(here: Any, given: Any) -> list[Problem]:
    """Returns the problems of groups that differ from the ones here in number, or in number of parameters."""
    if not isinstance(given, list) or not all(isinstance(group, Mapping) and PARAMS in group for group in given):
        return [Problem(PARAM_GROUPS, f"a {type(given).__name__}", "a list of groups with their parameters", _REMEDY)]
    if len(given) != len(here):
        return [Problem(PARAM_GROUPS, f"{len(given)} groups", f"{len(here)}", _REMEDY)]
    counts = [(len(group[PARAMS]), len(own[PARAMS])) for group, own in zip(given, here, strict=True)]
    return [
        Problem(f"{PARAM_GROUPS}[{i}].{PARAMS}", f"{count} parameters", f"{own}", _REMEDY)
        for i, (count, own) in enumerate(counts)
        if count != own
    ]


def _to_torch(value: Any, key: str) -> Any:
    """Returns a value of state in a form that torch flattens; see `_from_torch`."""
    if isinstance(value, Mapping):
        return {name: _to_torch(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, Tensor) or type(value) in (int, float):
        return value
    text = json.dumps(encode_value(value, key)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _from_torch(value: Any, live: Any) -> Any:
    """Returns a value from `_to_torch` in its original form; `live` has the types."""
    if isinstance(value, Mapping) and isinstance(live, Mapping):
        return {name: _from_torch(inner, live.get(name)) for name, inner in value.items()}
    if isinstance(value, Tensor) and not isinstance(live, Tensor) and value.dtype == torch.uint8:
        return decode_value(json.loads(value.cpu().numpy().tobytes()))
    return value
