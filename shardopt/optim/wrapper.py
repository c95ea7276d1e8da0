"""An optimizer around another one: the base of clipping and warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.optim.base import KeyedOptimizer, StateDict
from shardopt.optim.composite import CompositeOptimizer
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.param_groups import STATE

OwnState = dict[str, MutableMapping[str, Any]]


class OptimizerWrapper(CompositeOptimizer):
    """Another keyed optimizer with something around its step.

    Parameters, state, groups and defaults are the wrapped optimizer's, not copies. A subclass overrides
    `_before_step` for what happens between gradients and step, and `_own_state` for the state that it keeps itself.

    Args:
        optimizer: is wrapped, and lives on inside.

    Raises:
        StateError: it is not a keyed optimizer.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        super().__init__([optimizer])

    @property
    def _optimizer(self) -> KeyedOptimizer:
        """The wrapped one.

        Trainers that make the class of an optimizer a base of their own wrapper's (Lightning) keep this under that very
        name in the wrapper itself.
        """
        kept: KeyedOptimizer | None = vars(self).get("_optimizer")
        return self._children[0] if kept is None else kept

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN → parameter, the wrapped optimizer's."""
        return self._optimizer.params

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        self._refuse_torchs_getters()
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._made:
            self._optimizer.state = state

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        if self._made:
            self._optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._made:
            self._optimizer.defaults = defaults

    def init_state(
        self, sparse_grad_parameter_names: Iterable[str] | None = None, *, names: Iterable[str] | None = None
    ) -> None:
        """Makes the wrapped optimizer's state; this wrapper's own is always there."""
        inner = None if names is None else set(names) - self._own_state().keys()
        self._optimizer._init_named(list(sparse_grad_parameter_names or ()), inner)

    def unstepped_state(self, names: Iterable[str]) -> set[str]:
        """Returns the wrapped optimizer's unstepped state."""
        return self._optimizer.unstepped_state(set(names) - self._own_state().keys())

    def drop_state(self, names: Iterable[str]) -> None:
        """Removes the wrapped optimizer's state of these names."""
        self._optimizer.drop_state(set(names) - self._own_state().keys())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        if self._made:
            self._optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._optimizer!r}"

    def _own_state(self) -> OwnState:
        """Returns this wrapper's own state, besides the wrapped one's: `{name: {key: tensor or plain value}}`.

        It is saved under that name in `state_dict()["state"]`. The inner mappings must be the live ones: loading
        replaces plain values in them, copies into their tensors, and then calls `post_load_state_dict`.
        """
        return {}

    @property
    def _has_state(self) -> bool:
        return bool(self._own_state()) or super()._has_state

    def held_state_names(self) -> set[str]:
        """Returns the wrapped optimizer's names, and those of this wrapper's own state."""
        return {*self._optimizer.held_state_names(), *self._own_state()}

    def _state_names(self) -> set[str]:
        return {*self._optimizer._state_names(), *self._own_state()}

    def _gather(self) -> StateDict:
        gathered = self._optimizer.state_dict()
        own = {name: dict(entries) for name, entries in self._own_state().items()}
        taken = own.keys() & gathered[STATE].keys()
        if taken:
            both = f"state of {type(self).__name__} and of what it wraps"
            problems = [Problem(name, both, "one of them", "give it another name") for name in sorted(taken)]
            raise StateError("two optimizers keep state under one name", problems)
        return {**gathered, STATE: {**gathered[STATE], **own}}

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        state = offered.get(STATE)
        if isinstance(state, Mapping):
            own = self._own_state()
            for name, entries in own.items():
                if name in state:
                    plan.mapping(f"{plan.section(STATE)}.{name}", entries, state[name], "load what this wrapper saved")
                else:
                    remedy = f"it was saved without {type(self).__name__}: pass strict=False to go on without this"
                    plan.missing(f"{plan.section(STATE)}.{name}", remedy)
            offered = {**offered, STATE: {name: entries for name, entries in state.items() if name not in own}}
        self._optimizer.plan_load(plan, offered)
